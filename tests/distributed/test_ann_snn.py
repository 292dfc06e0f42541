"""The closed loop on two processes: same result as one with the same global batch, and sharded checkpoints."""

import json
from pathlib import Path

import pytest
import torch

import cli
from lightning_modules import AnnSnn
from tests.distributed.pair import launch
from tests.helpers import column, newest_run, weights

SMALL = [
    *("fit", "-c", "ann_snn/digits", "--trainer.max_steps", "4", "--trainer.max_epochs", "-1"),
    *("--trainer.limit_val_batches", "1", "--trainer.log_every_n_steps", "1", "--data.batch_size", "50"),
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
    *("--trainer.num_sanity_val_steps", "0", "--model.test_time_steps", "[]", "--trainer.accelerator", "cpu"),
    # plain gradient steps show a difference in gradients as it is; Adam would scale rounding errors up
    *("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.01"),
]
WITHOUT_REPORT = [
    *("--trainer.callbacks", "lightning.pytorch.callbacks.ModelCheckpoint"),
    *("--trainer.callbacks.save_last", "true", "--trainer.callbacks+=callbacks.EMA", "--trainer.callbacks.decay=0.5"),
]


ADAM = ["--model.optimizer", "torch.optim.Adam", "--model.optimizer.lr", "0.0003"]


def losses(run):
    return column(run, "train/loss")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process, DDP, FSDP2 with a single file, FSDP2 with a sharded folder; then a test of the sharded run."""
    folder = tmp_path_factory.mktemp("pair")
    base = [*SMALL, *WITHOUT_REPORT]
    sharded = "--trainer.strategy.init_args.save_distributed_checkpoint=true"
    cases = [
        {"name": "ddp", "args": [*base, "-c", "strategy/ddp"]},
        {"name": "fsdp2", "args": [*base, "-c", "strategy/fsdp2"]},
        {"name": "sharded", "args": [*base, *ADAM, "-c", "strategy/fsdp2", sharded]},
    ]
    for case in cases:
        case["run"] = str(folder / case["name"])
    test = ["test", "-c", str(folder / "sharded" / "config.yaml"), "--data.batch_size", "77"]
    last = str(folder / "sharded" / "checkpoints" / "last.ckpt")
    cases.append({"name": "test", "run": str(folder / "sharded"), "args": [*test, "--ckpt_path", last]})
    source = ["fit", "-c", "ann_snn/digits_source", "-c", "strategy/ddp", "-c", "trainer/smoke"]
    source += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    cases.append({"name": "unnamed", "args": [*source, "--trainer.default_root_dir", str(folder / "unnamed")]})
    output = launch(cases, folder)
    assert "CASE" not in output, output[-4000:]
    cli.main([*base, "--trainer.default_root_dir", str(folder / "one")])
    found = {case["name"]: folder / case["name"] for case in cases}
    found["one"] = next((folder / "one").rglob("config.yaml")).parent
    return found


def test_ranks_started_from_outside_agree_on_one_folder(runs):
    """As under torchrun or srun, where no rank inherits the folder of another."""
    folders = list((runs["unnamed"] / "ann_snn" / "digits_source").iterdir())
    assert len(folders) == 1
    assert {p.name for p in folders[0].iterdir()} == {"config.yaml", "metrics.csv", "checkpoints"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(runs, strategy):
    one, two = losses(runs["one"]), losses(runs[strategy])
    assert len(one) == len(two) == 4
    assert two == pytest.approx(one, rel=1e-5)
    a, b = (weights(runs[name] / "checkpoints" / "last.ckpt") for name in ("one", strategy))
    assert a.keys() == b.keys()
    moved = 0.0
    start = weights_at_start()
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        if name in start:
            moved = max(moved, (value - start[name]).abs().max().item())
    assert moved > 1e-4  # the steps did something


def weights_at_start():
    from datamodules import ImageClassification

    data = ImageClassification()
    data.setup()
    module = AnnSnn(conversion="channel", percentile=100, half_threshold=True, weighting="uniform")
    module.convert_with(list(data.calibration_dataloader())[:1])
    return {k: v for k, v in module.state_dict().items() if k.startswith("student") and "linear" in k}


def test_a_sharded_checkpoint_consolidates_and_serves_one_process(runs, capsys, tmp_path):
    folder = runs["sharded"] / "checkpoints" / "last.ckpt"
    assert folder.is_dir()
    cli.main(["consolidate", str(folder)])
    file = capsys.readouterr().out.strip()
    module = AnnSnn.load_from_checkpoint(file)
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    pair = json.loads((runs["sharded"] / "test_metrics.json").read_text())
    (runs["sharded"] / "test_metrics.json").unlink()
    config = str(runs["sharded"] / "config.yaml")
    one = ["--trainer.strategy", "auto", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"]
    cli.main(["test", "-c", config, "--ckpt_path", file, *one])
    alone = json.loads((runs["sharded"] / "test_metrics.json").read_text())
    assert alone == pytest.approx(pair)
    # and goes on training, optimiser and all, as if it had always been one process
    base = [*SMALL, *WITHOUT_REPORT, *ADAM]
    cli.main([*base, "--trainer.default_root_dir", str(tmp_path)])
    always_one = newest_run(tmp_path)
    before = [average(Path(file)), average(always_one / "checkpoints" / "last.ckpt")]
    for checkpoint in (file, always_one / "checkpoints" / "last.ckpt"):
        cli.main([*base, "--trainer.max_steps", "7", "--ckpt_path", str(checkpoint)])
    assert len(losses(always_one)) == 7
    assert losses(runs["sharded"]) == pytest.approx(losses(always_one), rel=1e-3)
    # so does the average of weights
    resumed = max((p for p in folder.parent.iterdir() if p.is_file()), key=lambda p: p.stat().st_mtime_ns)
    after = [average(resumed), average(always_one / "checkpoints" / "last.ckpt")]
    assert [x["updates"] for x in (*before, *after)] == [4, 4, 7, 7]
    moved = distance(after[1], before[1])
    assert moved > 1e-3
    assert distance(*before) < 1e-3 * moved
    assert distance(*after) < 1e-3 * moved


def average(checkpoint):
    """The state of the EMA."""
    content = torch.load(checkpoint, weights_only=True)
    return next(v for k, v in content["callbacks"].items() if k.startswith("EMA"))


def distance(a, b):
    """Between two averages of all weights."""
    assert a["average"].keys() == b["average"].keys()
    return sum((a["average"][k] - b["average"][k]).square().sum() for k in a["average"]).sqrt().item()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_average_of_weights_is_that_of_one_process(runs, strategy):
    one, two = (average(runs[name] / "checkpoints" / "last.ckpt") for name in ("one", strategy))
    assert one["updates"] == two["updates"] == 4
    assert one["average"].keys() == two["average"].keys()
    raw = weights(runs["one"] / "checkpoints" / "last.ckpt")
    for name, value in one["average"].items():
        torch.testing.assert_close(two["average"][name], value, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(raw[name], value) for name, value in one["average"].items())
