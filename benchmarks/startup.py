"""CPU time from `fulgurite fit -c ann_snn/digits` to the first training step, beside that of `import torch, lightning`.

`python benchmarks/startup.py` prints both, medians of three runs in turn, and their difference, which is what
the toolkit itself adds, also as a share of the first: its own imports, parsing, reading the data and building the
model.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

ROOT = Path(__file__).parents[1]
RUNS = 3
CONFIG = "ann_snn/digits"
IMPORTS = ["-c", "import time, torch, lightning; print('CPU', time.process_time())"]
FIT = ["-m", "cli", "fit", "-c", CONFIG, "--trainer.callbacks+=benchmarks.startup.FirstStep"]


class FirstStep(Callback):
    """Prints the process's CPU time when the first step begins, and ends the process."""

    def on_train_batch_start(self, *args: Any) -> None:
        """Training begins."""
        print("CPU", time.process_time(), flush=True)
        os._exit(0)


def cpu_seconds(command: list[str]) -> float:
    """What the command prints behind `CPU`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=True
        )
    return float(done.stdout.split("CPU ")[1].split()[0])


def main() -> None:
    measured = [(cpu_seconds(IMPORTS), cpu_seconds(FIT)) for _ in range(RUNS)]
    alone, whole = (statistics.median(column) for column in zip(*measured, strict=True))
    print(f"import torch, lightning:                      {alone:5.2f} s of CPU")
    print(f"fit -c {CONFIG}, to the first step: {whole:5.2f} s of CPU")
    print(f"difference:                                   {whole - alone:5.2f} s of CPU, {whole / alone - 1:.2f} of it")


if __name__ == "__main__":
    main()
