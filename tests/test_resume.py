"""A run that is killed and resumed ends as one that was not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import newest_run, run, weights
from tests.small import smaller

ROOT = Path(__file__).parents[1]
EVERY_3 = [
    *("--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=3"),
    *("--trainer.callbacks.save_top_k=-1", "--trainer.callbacks.filename={step}"),
]
CASES = {  # what makes a step quick; all are killed within an epoch or, where an epoch is a step, between two
    "ann_snn/digits_source": [],
    "ann_snn/digits": [],
    "fedhpro/digits": [],
    "graph_pfn/karate": ["--data.steps_per_epoch", "4"],  # stops early, so it must validate
    "focal_policy/recordings": ["--data.batch_size", "4"],
    "dyn_vpp/metaworld_base": [],
    "most/spoken_digits": ["--model.num_units", "16", "--model.unit_frames", "1500"],
}
SHORT = ("ann_snn/digits_source", "ann_snn/digits")


@pytest.mark.parametrize("config", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in CASES])
def test_killed_and_resumed_equals_uninterrupted(config, tmp_path):
    common = ["-c", str(smaller(config, tmp_path)), *CASES[config], "--trainer.max_steps", "7", *EVERY_3]
    common += ["--trainer.max_epochs", "-1", "--trainer.limit_val_batches", "1", "--trainer.num_sanity_val_steps", "0"]
    common += ["--trainer.enable_model_summary", "false", "--trainer.accelerator", "cpu"]
    whole = run(["fit", *common], tmp_path / "whole")

    command = [sys.executable, "-m", "cli", "fit", *common, "--trainer.default_root_dir", str(tmp_path / "killed")]
    command += ["--trainer.callbacks+=tests.helpers.KillAt", "--trainer.callbacks.step=5"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    folder = newest_run(tmp_path / "killed")
    checkpoint = folder / "checkpoints" / "step=3.ckpt"
    assert checkpoint.is_file()

    resumed = run(["fit", *common, "--ckpt_path", str(checkpoint)], tmp_path / "killed")
    assert resumed == folder
    a, b = (weights(run / "checkpoints" / "step=6.ckpt") for run in (whole, resumed))
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
