"""A run that is killed at any step and resumed from any checkpoint before it ends as one that was not."""

import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch

import cli
from tests.helpers import newest_run, run, weights
from tests.small import smaller

STEPS = 7
EVERY_STEP = [
    *("--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=1"),
    *("--trainer.callbacks.save_top_k=-1", "--trainer.callbacks.filename={step}"),
]
CASES = {  # what makes a step quick; all are killed within an epoch or, where an epoch is a step, between two
    "ann_snn/digits_source": [],
    "ann_snn/digits": [],
    "fedhpro/digits": [],
    "graph_pfn/karate": ["--data.steps_per_epoch", "4"],  # stops early, so it must validate
    "graph_pfn/prior_tiny": [],
    "focal_policy/recordings": ["--data.batch_size", "4"],
    "dyn_vpp/metaworld_autoencoder": [],
    "dyn_vpp/metaworld_base": [],
    "dyn_vpp/metaworld": ["--model.group", "2"],
    "dyn_vpp/metaworld_policy": [],
    "most/spoken_digits": ["--model.num_units", "16", "--model.unit_frames", "1500"],
}
SHORT = ("ann_snn/digits_source", "ann_snn/digits")


def fit(args: list[str], folder: Path) -> None:
    """In a process of its own."""
    os.chdir(folder)
    os.environ.pop("FULGURITE_RUN", None)
    torch.set_num_threads(1)
    cli.main(args)


@pytest.fixture(scope="module")
def processes():
    """Makes processes that have imported everything already; nothing has been computed in the one they come from."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cli", "lightning.pytorch.cli", "tests.test_resume"])
    return context


@pytest.mark.parametrize(
    ("seed", "config"),
    [pytest.param(i, n, marks=() if n in SHORT else pytest.mark.long) for i, n in enumerate(CASES)],
)
def test_killed_and_resumed_equals_uninterrupted(seed, config, processes, tmp_path):
    draw = random.Random(seed)
    death = draw.randint(2, STEPS - 1)
    start = draw.randint(1, death - 1)  # the checkpoint of the step in which it dies is not written any more
    print(f"seed {seed}: killed in step {death}, resumed from step {start}")
    common = ["-c", str(smaller(config, tmp_path)), *CASES[config], "--trainer.max_steps", str(STEPS), *EVERY_STEP]
    common += ["--trainer.max_epochs", "-1", "--trainer.limit_val_batches", "1", "--trainer.num_sanity_val_steps", "0"]
    common += ["--trainer.enable_model_summary", "false", "--trainer.accelerator", "cpu"]
    whole = run(["fit", *common], tmp_path / "whole")

    command = ["fit", *common, "--trainer.default_root_dir", str(tmp_path / "killed")]
    command += ["--trainer.callbacks+=tests.helpers.KillAt", f"--trainer.callbacks.step={death}"]
    killed = processes.Process(target=fit, args=(command, tmp_path))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    folder = newest_run(tmp_path / "killed")
    checkpoints = folder / "checkpoints"
    assert {p.name for p in checkpoints.glob("step=*")} == {f"step={i}.ckpt" for i in range(1, death)}

    resumed = run(["fit", *common, "--ckpt_path", str(checkpoints / f"step={start}.ckpt")], tmp_path / "killed")
    assert resumed == folder
    a, b = (weights(run / "checkpoints" / f"step={STEPS}.ckpt") for run in (whole, resumed))
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
