"""Two processes as a user starts them: one command, whose own launcher starts the second process."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def fulgurite(*args: str) -> str:
    """A command in a process of its own; returns all that it and its children printed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "cli", *args, "--trainer.enable_progress_bar", "false"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_command_trains_on_two_processes(strategy, tmp_path):
    overlays = ["-c", "trainer/smoke", "-c", f"strategy/{strategy}"]
    two = ["--trainer.accelerator", "cpu", "--trainer.devices", "2"]
    printed = fulgurite("fit", "-c", "ann_snn/digits_source", *overlays, *two)
    assert "MEMBER: 2/2" in printed
    assert printed.count("fulgurite test") == 1  # by one rank
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    (folder,) = (tmp_path / "runs" / "ann_snn" / "digits_source").iterdir()
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "metrics.csv", "checkpoints"}
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    # the printed command, on one device
    command = shlex.split(next(line for line in printed.splitlines() if "fulgurite test" in line))[1:]
    fulgurite(*command, "--trainer.strategy", "auto", "--trainer.devices", "1")
    assert 0 < json.loads((folder / "test_metrics.json").read_text())["test/loss"] < 10
