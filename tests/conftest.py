"""Settings of every test: one thread, no network, no account."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_SILENT"] = "true"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Nothing is written into the checkout, and no run leaks into the next."""
    monkeypatch.chdir(tmp_path)
    for name in ("FULGURITE_RUN", "LOCAL_RANK", "FULGURITE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    yield
    import sys

    if (wandb := sys.modules.get("wandb")) is not None and getattr(wandb, "run", None) is not None:
        wandb.finish()
