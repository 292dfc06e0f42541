"""A small federation of digits, and runs on it."""

from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from torchvision.io import write_png

from datamodules import FederatedImages
from lightning_modules import FedHPro


def data(**options) -> FederatedImages:
    return FederatedImages(**{"clients": 4, "train_size": 200, "test_size": 60, "augment": ["crop"], **options})


def pets(folder: Path, each: int) -> Path:
    """Dark cats and light dogs, 16x20, `each` many."""
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = torch.full((3, 16, 20), 20 + 200 * number + i, dtype=torch.uint8)
            write_png(pixels, str(folder / name / f"{i}.png"))
    return folder


def module(strategy="HyperPrototypes", strategy_args=None, build=True, **options) -> FedHPro:
    """With its network, unless the strategy of the trainer should build it (`build=False`)."""
    seed_everything(0, verbose=False)
    tiny = {"in_channels": 1, "width": 4, "dim": 16}
    defaults = {"network": "SmallCNN", "network_args": tiny, "local_epochs": 1, "local_batch_size": 16, "lr": 0.05}
    made = FedHPro(strategy, strategy_args, **{**defaults, **options})
    if build:
        made.configure_model()
    return made


def trainer(rounds: int, folder: Path | None = None, **options) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": folder is not None, "default_root_dir": folder, "log_every_n_steps": 1}
    return Trainer(max_epochs=rounds, **{**quiet, **options})


def weights(model: FedHPro) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.network.parameters()])
