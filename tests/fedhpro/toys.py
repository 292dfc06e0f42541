"""A small federation of digits, and runs on it."""

from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
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


class SmoothBlock(nn.Sequential):
    """A convolution and a softplus."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.Softplus())


class SmoothCNN(nn.Module):
    """Blocks without kinks or normalisation: a rounding error stays one, where ReLU and GroupNorm may make it 1e-2."""

    block_types = (SmoothBlock,)

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(SmoothBlock(1, 4, 1), SmoothBlock(4, 8, 2), SmoothBlock(8, 16, 2))
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        z = F.softplus(self.blocks(images).mean((2, 3)))
        return z, self.classifier(z)


class WholeCNN(SmoothCNN):
    """The same, sharded and gathered as a whole."""

    block_types = ()


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
