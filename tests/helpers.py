"""What several tests use."""

import csv
import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

import cli


class KillAt(Callback):
    """Ends the process with SIGKILL, as a power cut would, once so many steps are done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run(args: list[str], folder: Path) -> Path:
    """One command in this process, with `folder` as the place of runs; returns the newest run folder."""
    cli.main([*args, "--trainer.default_root_dir", str(folder), "--trainer.enable_progress_bar", "false"])
    return newest_run(folder)


def newest_run(folder: Path) -> Path:
    return max((p.parent for p in folder.rglob("config.yaml")), key=lambda p: p.stat().st_mtime_ns)


def refusal(args: list[str], capsys: pytest.CaptureFixture) -> str:
    """Run a command that must be refused: exit code 2, one line on stderr that is returned."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    stderr = capsys.readouterr().err
    lines = [x for x in stderr.splitlines() if x.startswith("fulgurite:")]
    assert stopped.value.code == 2
    assert "Traceback" not in stderr
    assert len(lines) == 1
    return lines[0]


def column(folder: Path, name: str) -> list[float]:
    """What a run logged under `name`, from its metrics.csv."""
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True, map_location="cpu")["state_dict"]
