"""Source networks: residual networks for small images, with every ReLU a module of its own.

Conversion replaces each ReLU by a spiking neuron, so a ReLU that is called twice, or is a function, would hide a
neuron. The names follow the public CIFAR networks, so that published state dicts load as they are.
"""

from collections.abc import Sequence

import torch
from torch import nn


class PadShortcut(nn.Module):
    """Parameter-free shortcut: every second pixel, new channels filled with zeros ("option A").

    Written with slices and a concatenation only, because these keep their meaning with a leading time axis.

    Source: He et al. 2016, "Deep Residual Learning", section 3.3, option A; channel order of
    `akamaster/pytorch_resnet_cifar10` (half of the new channels before, half behind).

    Shapes: `[B, C, H, W] -> [B, channels_out, ceil(H / stride), ceil(W / stride)]`, with `channels_out <= 3 C`.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.before = (channels_out - channels_in) // 2
        self.behind = channels_out - channels_in - self.before
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Subsample and pad, see the class."""
        x = x[:, :, :: self.stride, :: self.stride]
        return torch.cat((x[:, : self.before] * 0, x, x[:, : self.behind] * 0), dim=1)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, a shortcut, and a ReLU behind the sum.

    Args:
        channels_in: Input channels.
        channels_out: Output channels.
        stride: Stride of the first convolution.
        pad_shortcut: Where the shape changes, use `PadShortcut` instead of a 1x1 convolution.

    Shapes: `[B, channels_in, H, W] -> [B, channels_out, H / stride, W / stride]`.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1, pad_shortcut: bool = False):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = (
                PadShortcut(channels_in, channels_out, stride)
                if pad_shortcut
                else nn.Sequential(
                    nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
                )
            )
        self.relu2 = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block, see the class."""
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu2(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """Residual network for images of about 32x32 pixels: a 3x3 stem without max-pool, basic blocks, average pool.

    Two families, as in the literature:

    - depth 18 or 34: four stages of `width` x (1, 2, 4, 8) channels (64 to 512) with 1x1 convolutions where the
      shape changes (`kuangliu/pytorch-cifar`; ResNet-18 is the paper's network),
    - depth 6n + 2 (20, 32, 44, 56, 110): three stages of `width` x (1, 2, 4) channels (16 to 64) with parameter-free
      shortcuts (He et al. 2016, section 4.2; a ResNet-20 has 269,722 parameters and loads the state dict published
      by `akamaster/pytorch_resnet_cifar10`).

    Args:
        depth: Number of weighted layers, see above.
        classes: Number of classes K.
        in_channels: Channels of the image.
        width: Channels of the first stage; None takes the family's own (64 or 16).

    Shapes: images `[B, in_channels, H, W]` float32 -> logits `[B, K]`.

    Raises:
        ValueError: if the depth belongs to neither family.
    """

    def __init__(self, depth: int = 20, classes: int = 10, in_channels: int = 3, width: int | None = None):
        super().__init__()
        blocks: tuple[int, ...]
        if depth in (18, 34):
            width, blocks, pad = width or 64, {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}[depth], False
        elif depth >= 8 and depth % 6 == 2:
            width, blocks, pad = width or 16, ((depth - 2) // 6,) * 3, True
        else:
            raise ValueError(f"CifarResNet: depth {depth} is unknown; use 18, 34 or 6n + 2 (20, 32, 44, 56, 110)")
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        channels = width
        for stage, count in enumerate(blocks):
            out, stride = width * 2**stage, 1 if stage == 0 else 2
            first = BasicBlock(channels, out, stride, pad)
            rest = [BasicBlock(out, out, 1, pad) for _ in range(count - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(first, *rest))
            channels = out
        self.stages = len(blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(channels, classes)
        _initialise(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images `[B, C, H, W]` -> logits `[B, K]`."""
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.linear(self.flatten(self.pool(x)))


class SmallResNet(nn.Module):
    """Residual network for 8x8 digits: one basic block per entry of `channels`.

    Args:
        channels: Channels of each block; the stem has those of the first.
        strides: Stride of each block.
        classes: Number of classes K.
        in_channels: Channels of the image.

    Shapes: images `[B, in_channels, H, W]` float32 -> logits `[B, K]`.

    Raises:
        ValueError: if `channels` and `strides` differ in length.
    """

    def __init__(
        self,
        channels: Sequence[int] = (16, 32, 64),
        strides: Sequence[int] = (1, 2, 2),
        classes: int = 10,
        in_channels: int = 1,
    ):
        super().__init__()
        if len(channels) != len(strides):
            raise ValueError(f"SmallResNet: {len(channels)} channels but {len(strides)} strides; give one per block")
        self.conv1 = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.relu = nn.ReLU()
        pairs = zip([channels[0], *channels], channels, strides, strict=False)
        self.blocks = nn.Sequential(*(BasicBlock(c_in, c_out, stride) for c_in, c_out, stride in pairs))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(channels[-1], classes)
        _initialise(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images `[B, C, H, W]` -> logits `[B, K]`."""
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        return self.linear(self.flatten(self.pool(x)))


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
