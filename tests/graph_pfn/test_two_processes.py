"""Two processes compute what one does with the same global batch."""

import pytest
import torch

import cli
from datamodules import GraphPrior
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
# ranks get 2 and 1, 1 and 1, 1 and 1 of the 7 graphs, and in one of these steps one of them gets no classes
VALIDATE = ["fit", "-c", "graph_pfn/prior_tiny", *COMMON, SIZES, "--model.edge_weight", "0.1", "--data.batch_size", "2"]
VALIDATE += ["--data.prior", "paper", "--data.validation_graphs", "7", "--trainer.limit_val_batches", "1.0"]
VALIDATE += ["--data.settings", "{nodes: [80, 160], sparse_degree: [1.5, 10], dense_degree: [10, 20]}"]
VALIDATE += ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
TASKS = {"pretrain": PRETRAIN, "finetune": FINETUNE, "validate": VALIDATE}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    cases = [
        {
            "name": f"{task}_{strategy}",
            "args": [*args, "-c", f"strategy/{strategy}"],
            "run": str(folder / f"{task}_{strategy}"),
        }
        for task, args in TASKS.items()
        for strategy in ("ddp", "fsdp2")
    ]
    output = launch(cases, folder)
    assert "CASE" not in output, output[-4000:]
    found = {case["name"]: folder / case["name"] for case in cases}
    for task, args in TASKS.items():
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_validation_graphs_count_once_wherever_they_are(runs, strategy):
    settings = {"nodes": [80, 160], "sparse_degree": [1.5, 10], "dense_degree": [10, 20]}
    data = GraphPrior("paper", settings, batch_size=2)
    kinds = [data.sample(2**62 + i).classes > 0 for i in range(7)]
    steps = [(kinds[0:2], kinds[2:3]), (kinds[3:4], kinds[4:5]), (kinds[5:6], kinds[6:7])]
    assert any(any(a) != any(b) for a, b in steps)
    for name in ("loss", "prediction", "edges", "gain", "accuracy"):
        one, two = (column(runs[f"validate_{run}"], f"val/{name}") for run in ("one", strategy))
        assert len(one) == 1
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
