"""Every method on two processes: trained under FSDP2, saved in shards, joined into one file, tested everywhere.

Two ranks under FSDP2, two under DDP and a single device give the same test figures, with test sets that two ranks
cannot share evenly. Methods without such a test of their own also give, under DDP and FSDP2, the losses, validation
figures and weights of one process. One pair of processes serves all methods.
"""

import json
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cli
from lightning_modules.distributed import consolidate
from tests.distributed.pair import launch
from tests.helpers import column, run, weights
from tests.small import smaller

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

CONFIGS = {  # one of each LightningModule, with what makes its test batches uneven; DynVPP: test_dyn_vpp.py
    "ann_snn/digits_source": ["--data.source", "odd.npz"],  # 37 test images
    "ann_snn/digits": ["--data.batch_size", "53"],
    "fedhpro/digits": ["--data.eval_batch_size", "53"],
    "graph_pfn/karate": [],
    "focal_policy/recordings": ["--data.batch_size", "7"],
    "most/spoken_digits": ["--data.batch_size", "7"],
    "dyn_vpp/metaworld_autoencoder": ["--data.eval_batch_size", "5"],
    "dyn_vpp/metaworld_base": ["--data.eval_batch_size", "5"],
    "dyn_vpp/metaworld_policy": ["--data.eval_batch_size", "5"],
}
FIT = {  # what keeps it short
    "ann_snn/digits_source": ["--data.source", "odd.npz", "--data.batch_size", "30"],
    "ann_snn/digits": ["--model.test_time_steps", "[1, 8]"],
    "most/spoken_digits": ["--model.num_units", "16", "--model.unit_frames", "1500"],
}
# plain gradient steps show a difference in gradients as it is; Adam would scale rounding errors up
SGD = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.05", "--trainer.limit_train_batches", "3"]
EQUAL = {  # whole runs are compared, with what makes them equal
    "ann_snn/digits_source": ["--model.network", f"{__name__}.NoStatistics", "--model.network_args={}"],
    "graph_pfn/karate": ["--model.lr_scheduler", "torch.optim.lr_scheduler.ConstantLR"],  # else a first rate of 0
    "dyn_vpp/metaworld_autoencoder": ["--trainer.precision", "32-true"],
    "dyn_vpp/metaworld_policy": ["--model.dropout", "[0, 0, 0]"],  # whose masks are each rank's own
}
QUIET = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
WHOLE = ["--trainer.limit_test_batches", "1.0"]
ALONE = ["--trainer.strategy", "auto", "--trainer.devices", "1"]


class NoStatistics(nn.Sequential):
    """Classifies 8 x 8 images without BatchNorm, whose statistics are each rank's own."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def take_figures(run: Path) -> dict[str, float]:
    """Of the test just made; the file is deleted, so that the next test must write its own."""
    file = run / "test_metrics.json"
    figures = json.loads(file.read_text())
    file.unlink()
    # how long a rank took, and which audio is exchanged within its batch, is not the same on two ranks
    return {name: value for name, value in figures.items() if "latency" not in name and "shuffled" not in name}


def fit(name: str, folder: Path) -> list[str]:
    """The command line, without strategy."""
    args = ["fit", "-c", str(smaller(name, folder)), "-c", "trainer/smoke", *FIT.get(name, []), *QUIET]
    return [*args, *EQUAL[name], *SGD] if name in EQUAL else args


def place(folder: Path, name: str, strategy: str = "fsdp2") -> Path:
    return folder / f"{name.replace('/', '_')}_{strategy}"


def command(folder: Path, name: str, checkpoint: str) -> list[str]:
    """The test of the sharded run or of what it was joined into, with an uneven test set."""
    run = place(folder, name)
    args = ["test", "-c", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints" / checkpoint)]
    return [*args, *WHOLE, *CONFIGS[name], *QUIET]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs, and test figures of each method on two ranks, under FSDP2 and under DDP."""
    folder = tmp_path_factory.mktemp("pair")
    rng, images = np.random.default_rng(0), {}
    for part, n in (("train", 120), ("test", 37)):
        images |= {
            f"{part}_images": rng.integers(0, 256, (n, 8, 8), dtype=np.uint8),
            f"{part}_labels": np.arange(n) % 10,
        }
    np.savez(folder / "odd.npz", **images)
    sharded = ["-c", "strategy/fsdp2", "--trainer.strategy.init_args.save_distributed_checkpoint=true"]
    first, second = [], []
    for name in CONFIGS:
        run = place(folder, name)
        first.append({"name": f"{name} fit", "run": str(run), "args": [*fit(name, folder), *sharded]})
        first.append({"name": f"{name} test", "run": str(run), "args": command(folder, name, "last.ckpt")})
        args = [*command(folder, name, "last.consolidated.ckpt"), "-c", "strategy/ddp"]
        second.append({"name": f"{name} test under DDP", "run": str(run), "args": args})
    for name in EQUAL:
        args = [*fit(name, folder), "-c", "strategy/ddp"]
        second.append({"name": f"{name} fit under DDP", "run": str(place(folder, name, "ddp")), "args": args})
    figures = {}
    for strategy, cases in (("fsdp2", first), ("ddp", second)):
        output = launch(cases, folder, timeout=850)
        assert "CASE" not in output, output[-6000:]
        for name in CONFIGS:
            figures[name, strategy] = take_figures(place(folder, name))
            if strategy == "fsdp2":
                consolidate(place(folder, name) / "checkpoints" / "last.ckpt")
    return folder, figures


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_are_joined_and_tested_alone(runs, name):
    folder, figures = runs
    assert (place(folder, name) / "checkpoints" / "last.ckpt").is_dir()
    with chdir(folder):
        cli.main([*command(folder, name, "last.consolidated.ckpt"), *ALONE])
    alone = take_figures(place(folder, name))
    assert alone
    for strategy in ("fsdp2", "ddp"):
        assert figures[name, strategy] == pytest.approx(alone, rel=1e-4, abs=1e-6, nan_ok=True), strategy


@pytest.mark.parametrize("name", EQUAL)
def test_whole_runs_on_two_processes_equal_one(runs, name, tmp_path):
    folder, _ = runs
    with chdir(folder):
        one = run(fit(name, folder), tmp_path)
    header = (one / "metrics.csv").read_text().splitlines()[0].split(",")
    quantities = ["train/loss", *(quantity for quantity in header if quantity.startswith("val/"))]
    assert len(column(one, "train/loss")) == 3 and len(quantities) > 1
    expected = weights(one / "checkpoints" / "last.ckpt")
    for strategy, file in (("fsdp2", "last.consolidated.ckpt"), ("ddp", "last.ckpt")):
        two = place(folder, name, strategy)
        for quantity in quantities:
            # nan: steps to a success of a policy that never succeeds
            near = pytest.approx(column(one, quantity), rel=1e-4, abs=1e-6, nan_ok=True)
            assert column(two, quantity) == near, quantity
        got = weights(two / "checkpoints" / file)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
