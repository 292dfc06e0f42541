"""Two processes give what one gives, and a killed run ends as one that was not."""

import pytest
import torch

import cli
from lightning_modules import FocalPolicy
from tests.distributed.pair import launch
from tests.focal_policy.toys import recording
from tests.helpers import column, run, weights

pytestmark = pytest.mark.long


def arguments(folder) -> list[str]:
    return [
        *("fit", "-c", "focal_policy/recordings", "--data.source", str(recording(folder))),
        *("--data.keys.point_cloud", "cloud", "--data.batch_size", "15", "--model.widths", "[8, 16, 16]"),
        *("--model.time_features", "8", "--model.state_features", "8"),
        *("--trainer.max_epochs", "2", "--trainer.limit_train_batches", "3", "--trainer.log_every_n_steps", "1"),
        *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
        *("--trainer.num_sanity_val_steps", "0", "--trainer.accelerator", "cpu", "--model.warmup_steps", "1"),
        # Plain gradient steps show a difference in gradients as it is.
        *("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.1"),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    base = arguments(folder)
    sharded = "--trainer.strategy.init_args.save_distributed_checkpoint=true"
    cases = [
        {"name": "ddp", "args": [*base, "-c", "strategy/ddp"]},
        {"name": "fsdp2", "args": [*base, "-c", "strategy/fsdp2"]},
        {"name": "sharded", "args": [*base, "-c", "strategy/fsdp2", sharded]},
    ]
    for case in cases:
        case["run"] = str(folder / case["name"])
    output = launch(cases, folder)
    assert "CASE" not in output, output[-4000:]
    return {case["name"]: folder / case["name"] for case in cases} | {"one": run(base, folder / "one")}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(runs, strategy):
    """With 15 windows a batch, of which one rank has 8 and the other 7, some of them masked."""
    for name in ("train/loss", "val/loss", "val/executed_error"):
        one, two = column(runs["one"], name), column(runs[strategy], name)
        assert two == pytest.approx(one, rel=1e-4), name
    assert len(column(runs["one"], "train/loss")) == 6
    a, b = (torch.load(runs[n] / "checkpoints" / "last.ckpt", weights_only=True) for n in ("one", strategy))
    for part in (
        lambda c: c["state_dict"],
        lambda c: next(v for k, v in c["callbacks"].items() if "EMA" in k)["average"],
    ):
        assert part(a).keys() == part(b).keys()
        for name, value in part(a).items():
            torch.testing.assert_close(part(b)[name], value, rtol=1e-4, atol=1e-5)


def test_a_sharded_checkpoint_consolidates(runs, capsys):
    cli.main(["consolidate", str(runs["sharded"] / "checkpoints" / "last.ckpt")])
    file = capsys.readouterr().out.strip()
    module = FocalPolicy.load_from_checkpoint(file).load_averages(file)
    observation = {"state": torch.zeros(1, 2, 4), "point_cloud": torch.zeros(1, 2, 6, 3)}
    assert module(observation, torch.zeros(1, 12, 2)).isfinite().all()
    a, b = weights(file), weights(runs["fsdp2"] / "checkpoints" / "last.ckpt")
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_resumed_inside_an_epoch_equals_uninterrupted(tmp_path):
    every = ["--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"]
    every += ["--trainer.callbacks.every_n_train_steps=2", "--trainer.callbacks.save_top_k=-1"]
    every += ["--trainer.callbacks.filename={step}", "--trainer.callbacks.enable_version_counter=false"]
    base = [*arguments(tmp_path), *every, "--model.optimizer", "torch.optim.AdamW", "--model.optimizer.lr", "1e-3"]
    checkpoints = run(base, tmp_path) / "checkpoints"
    a = torch.load(checkpoints / "step=6.ckpt", weights_only=True)
    (checkpoints / "step=6.ckpt").unlink()
    run([*base, "--ckpt_path", str(checkpoints / "step=4.ckpt")], tmp_path)  # in the second epoch
    b = torch.load(checkpoints / "step=6.ckpt", weights_only=True)
    for name, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][name]), name
    averages = [next(v for k, v in c["callbacks"].items() if "EMA" in k)["average"] for c in (a, b)]
    for name, value in averages[0].items():
        assert torch.equal(value, averages[1][name]), name
