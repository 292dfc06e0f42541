"""Two processes compute what one does with the same global batch."""

import pytest
import torch

import cli
from tests.distributed.pair import launch
from tests.helpers import column, weights

pytestmark = pytest.mark.long
COMMON = [
    *("--trainer.max_steps", "3", "--trainer.max_epochs", "-1", "--trainer.limit_val_batches", "0"),
    *("--trainer.num_sanity_val_steps", "0", "--trainer.log_every_n_steps", "1", "--trainer.accelerator", "cpu"),
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
    *("--trainer.callbacks", "lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.save_last", "true"),
    # plain gradient steps show a difference in gradients as it is; Adam would scale rounding errors up
    *("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.01"),
]
SIZES = "--model.sizes={width: 16, heads: 2, blocks: 2}"
PRETRAIN = ["fit", "-c", "graph_pfn/prior_tiny", *COMMON, SIZES, "--model.edge_weight", "0.1", "--data.batch_size", "4"]
FINETUNE = ["fit", "-c", "graph_pfn/karate", *COMMON, SIZES, "--model.init_from", "null"]
FINETUNE += ["--model.lr_scheduler", "torch.optim.lr_scheduler.ConstantLR"]  # the first epoch's rate would be 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    cases = [
        {
            "name": f"{task}_{strategy}",
            "args": [*args, "-c", f"strategy/{strategy}"],
            "run": str(folder / f"{task}_{strategy}"),
        }
        for task, args in (("pretrain", PRETRAIN), ("finetune", FINETUNE))
        for strategy in ("ddp", "fsdp2")
    ]
    output = launch(cases, folder)
    assert "CASE" not in output, output[-4000:]
    found = {case["name"]: folder / case["name"] for case in cases}
    for task, args in (("pretrain", PRETRAIN), ("finetune", FINETUNE)):
        cli.main([*args, "--trainer.default_root_dir", str(folder / f"{task}_one")])
        found[f"{task}_one"] = next((folder / f"{task}_one").rglob("config.yaml")).parent
    return found


@pytest.mark.parametrize("task", ["pretrain", "finetune"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(runs, task, strategy):
    one, two = runs[f"{task}_one"], runs[f"{task}_{strategy}"]
    losses = [column(run, "train/loss") for run in (one, two)]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    a, b = (weights(run / "checkpoints" / "last.ckpt") for run in (one, two))
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
