"""A small recorded data set that a policy can learn: the action is a function of the state."""

from pathlib import Path

import h5py
import numpy as np

from datamodules import RobotDemonstrations
from lightning_modules import FocalPolicy

TINY = {"widths": [8, 16, 16], "time_features": 8, "state_features": 8, "warmup_steps": 2}


def recording(folder: Path, n: int = 8, d: int = 2, frames: int = 20) -> Path:
    path = folder / f"toy-{n}-{d}.hdf5"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for i in range(n):
            phase = rng.uniform(0, 6) + np.arange(frames)[:, None] * 0.3 + np.arange(d)
            file[f"data/demo_{i}/obs/state"] = np.concatenate([np.sin(phase), np.cos(phase)], axis=1)
            file[f"data/demo_{i}/obs/cloud"] = np.sin(phase)[:, None, :1] + rng.normal(size=(1, 6, 3))
            file[f"data/demo_{i}/actions"] = 2 * np.cos(phase) + 1
    return path


def data(folder: Path, **changes) -> RobotDemonstrations:
    return RobotDemonstrations(str(recording(folder)), **{"batch_size": 16, "val_fraction": 0.1} | changes)


def policy(**changes) -> FocalPolicy:
    return FocalPolicy(**TINY | changes)
