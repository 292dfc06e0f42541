"""A run that is killed and resumed ends as one that was not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import newest_run, run, weights

ROOT = Path(__file__).parents[1]
EVERY_3 = [
    *("--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=3"),
    *("--trainer.callbacks.save_top_k=-1", "--trainer.callbacks.filename={step}"),
]
CASES = {  # 10 steps of 25 (source) or 12 (closed loop) a epoch
    "ann_snn/digits_source": ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "10"],
    "ann_snn/digits": ["--trainer.max_epochs", "2", "--trainer.limit_train_batches", "5"],
}


@pytest.mark.parametrize("config", CASES)
def test_killed_and_resumed_equals_uninterrupted(config, tmp_path):
    common = ["-c", config, *CASES[config], "--trainer.limit_val_batches", "1", "--trainer.num_sanity_val_steps", "0"]
    common += ["--trainer.enable_model_summary", "false", *EVERY_3]
    whole = run(["fit", *common], tmp_path / "whole")

    command = [sys.executable, "-m", "cli", "fit", *common, "--trainer.default_root_dir", str(tmp_path / "killed")]
    command += ["--trainer.callbacks+=tests.helpers.KillAt", "--trainer.callbacks.step=8"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    folder = newest_run(tmp_path / "killed")
    checkpoint = folder / "checkpoints" / "step=6.ckpt"  # inside an epoch
    assert checkpoint.is_file()

    resumed = run(["fit", *common, "--ckpt_path", str(checkpoint)], tmp_path / "killed")
    assert resumed == folder
    a, b = weights(whole / "checkpoints" / "last.ckpt"), weights(resumed / "checkpoints" / "last.ckpt")
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name
