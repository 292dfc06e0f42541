"""Networks of the clients. Each returns features and logits: `z, logits = network(images)`.

A network of your own needs that `forward`, a `classifier` (`nn.Linear`, whose `in_features` is d) and logits
that are `classifier(z)`; FedHPro's class gradients are taken at that head. If it names the types of its blocks in
`block_types`, FSDP2 shards and gathers it block by block instead of as a whole.
"""

from importlib import import_module
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn


def norm_layer(kind: Literal["bn", "gn"], channels: int) -> nn.Module:
    """BatchNorm, or GroupNorm with at most 8 groups (no statistics to average over clients)."""
    if kind == "bn":
        return nn.BatchNorm2d(channels)
    if kind == "gn":
        return nn.GroupNorm(next(g for g in (8, 4, 2, 1) if channels % g == 0), channels)
    raise ValueError(f"norm is 'bn' or 'gn', not {kind!r}")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, `(b, in, h, w)` to `(b, out, h / stride, w / stride)`."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Literal["bn", "gn"]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = norm_layer(norm, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = norm_layer(norm, out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm_layer(norm, out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet10(nn.Module):
    """The released ResNet-10: 3x3 stem without pooling, four stages of one block, average pooling.

    Its unused projection head is left out. With `width` 32 and 10 classes: 1,228,970 parameters, d = 256.

    Args:
        num_classes: Outputs.
        in_channels: Channels of the images.
        width: Channels of the first stage; d is 8 times that.
        norm: `"bn"` as released, or `"gn"`.
    """

    block_types = (BasicBlock,)

    def __init__(
        self, num_classes: int, in_channels: int = 3, width: int = 32, norm: Literal["bn", "gn"] = "bn"
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, 1, 1, bias=False)
        self.bn1 = norm_layer(norm, width)
        self.layer1 = nn.Sequential(BasicBlock(width, width, 1, norm))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2, norm))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2, norm))
        self.layer4 = nn.Sequential(BasicBlock(4 * width, 8 * width, 2, norm))
        self.classifier = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images `(b, channels, h, w)` to features `(b, 8 width)`, at least 0, and logits `(b, c)`."""
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        z = x.mean((2, 3))
        return z, self.classifier(z)


class SmallCNN(nn.Module):
    """Two convolutions and a hidden layer, without normalisation: 8x8 to 32x32 images on a CPU.

    Args:
        num_classes: Outputs.
        in_channels: Channels of the images.
        width: Channels of the first convolution; the second has twice as many.
        dim: d.
    """

    def __init__(self, num_classes: int, in_channels: int = 1, width: int = 16, dim: int = 128) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * 16, dim)
        self.classifier = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images `(b, channels, h, w)` to features `(b, dim)`, at least 0, and logits `(b, num_classes)`."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.adaptive_max_pool2d(F.relu(self.conv2(x)), 4)
        z = F.relu(self.hidden(x.flatten(1)))
        return z, self.classifier(z)


def import_class(path: str) -> type:
    """The class at a dotted path.

    Raises:
        ValueError: If there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no class {path!r}: {error}") from None


def build_network(network: str, num_classes: int, options: dict[str, Any] | None = None) -> nn.Module:
    """A network by name.

    Args:
        network: A class of this file, or the dotted path of your own.
        num_classes: Passed as `num_classes`.
        options: Its other arguments.

    Raises:
        ValueError: Unknown name or argument, or a network without a linear `classifier` of `num_classes` outputs.
    """
    here = {"ResNet10": ResNet10, "SmallCNN": SmallCNN}
    if network not in here and "." not in network:
        raise ValueError(f"network is one of {', '.join(here)} or a dotted class path, not {network!r}")
    try:
        built = (here.get(network) or import_class(network))(num_classes=num_classes, **(options or {}))
    except (TypeError, RuntimeError, ZeroDivisionError) as error:  # unknown arguments, impossible sizes
        raise ValueError(f"network {network} with network_args {options or {}}: {error}") from None
    head = getattr(built, "classifier", None)
    if not isinstance(head, nn.Linear) or head.out_features != num_classes or head.bias is None:
        raise ValueError(f"network {network} needs a `classifier` that is an nn.Linear with {num_classes} outputs")
    return built
