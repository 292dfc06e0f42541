"""The velocity network of FocalPolicy: a 1-D U-Net over a window of actions, conditioned on time and observation.

The tensor names (`down_modules.0.0.blocks.0.block.0.weight`, ...) are those of the released checkpoints, so their
weights load as they are (without the released `var_est` head, which is never called).

Axes: b batch, l window steps, d action dimensions, c channels, g condition features.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class SinusoidalEmbedding(nn.Module):
    """Embeds a scalar as `[sin(t w_i), cos(t w_i)]` with `w_i = 10000^(-i / (dim/2 - 1))`.

    Args:
        dim: Size of the embedding, an even number of at least 4.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, timestep: Tensor) -> Tensor:
        """`(b,)` to `(b, dim)`."""
        half = self.dim // 2
        exponent = torch.arange(half, device=timestep.device, dtype=timestep.dtype) / (half - 1)
        angles = timestep[:, None] * torch.exp(-math.log(10_000.0) * exponent)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ConvBlock(nn.Module):
    """Convolution over the window, group normalisation, Mish.

    Args:
        in_channels: Channels in.
        out_channels: Channels out, a multiple of `groups`.
        kernel_size: Odd width of the kernel in steps; the length is kept.
        groups: Groups of the normalisation.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 5, groups: int = 8):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(in_channels, out_channels, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(groups, out_channels),
            nn.Mish(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(b, in_channels, l)` to `(b, out_channels, l)`."""
        return self.block(x)


class ResidualBlock(nn.Module):
    """Two convolution blocks with a shortcut; the condition scales and shifts between them (FiLM).

    The scale multiplies as it is (not `1 + scale`), as in the released code.

    Args:
        in_channels: Channels in.
        out_channels: Channels out.
        condition_dim: Size of the condition.
        kernel_size: Odd width of the kernels.
        groups: Groups of the normalisations.
    """

    def __init__(self, in_channels: int, out_channels: int, condition_dim: int, kernel_size: int, groups: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                ConvBlock(in_channels, out_channels, kernel_size, groups),
                ConvBlock(out_channels, out_channels, kernel_size, groups),
            ]
        )
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition_dim, 2 * out_channels))
        same = in_channels == out_channels
        self.residual_conv = nn.Identity() if same else nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`(b, in_channels, l)` and `(b, condition_dim)` to `(b, out_channels, l)`."""
        scale, bias = self.cond_encoder(condition)[:, :, None].chunk(2, dim=1)
        h = scale * self.blocks[0](x) + bias
        return self.blocks[1](h) + self.residual_conv(x)


class Downsample(nn.Module):
    """Halves the length with a strided convolution.

    Args:
        channels: Channels in and out.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, c, l)` to `(b, c, l / 2)`."""
        return self.conv(x)


class Upsample(nn.Module):
    """Doubles the length with a transposed convolution.

    Args:
        channels: Channels in and out.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.ConvTranspose1d(channels, channels, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, c, l)` to `(b, c, 2 l)`."""
        return self.conv(x)


def check_unet(widths: Sequence[int], time_features: int, kernel_size: int, groups: int) -> None:
    """Refuse sizes that `ConditionalUnet1d` cannot be built with, without building it.

    Raises:
        ValueError: Naming the size.
    """
    if groups < 1:
        raise ValueError(f"groups {groups} must be at least 1")
    if not widths or any(width < 1 or width % groups for width in widths) or widths[0] % 8:
        raise ValueError(
            f"widths {list(widths)} must be one or more multiples of groups ({groups}), the first also of 8"
        )
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size {kernel_size} must be odd: no other kernel keeps the length of the window")
    if time_features < 4 or time_features % 2:
        raise ValueError(f"time_features {time_features} must be an even number of at least 4")


class ConditionalUnet1d(nn.Module):
    """Velocity `v(x, t, condition)` of an action window.

    Down the widths with two residual blocks a level and a halving of the length between levels, two residual blocks
    in the middle, and up again with skips joined on channels. The skip of the full-length level is not used, as in
    the released code. With the default widths, 4 action dimensions and a condition of 256 features it has 255.07
    million parameters (the paper's network).

    Args:
        action_dim: Dimensions of an action.
        condition_dim: Size of the observation condition.
        widths: Channels of each level, each a multiple of `groups`.
        time_features: Size of the time embedding, even.
        kernel_size: Odd width of the convolutions over steps.
        groups: Groups of the normalisations (the last block always uses 8, as released).

    Shapes:
        actions `(b, l, action_dim)`, timestep `(b,)`, condition `(b, condition_dim)` -> `(b, l, action_dim)`;
        `l` must be a multiple of `2^(len(widths) - 1)`.

    Raises:
        ValueError: If there is no width, one is no multiple of `groups` or the first none of 8, or if the kernel is
            even, or the time embedding odd.
    """

    def __init__(
        self,
        action_dim: int,
        condition_dim: int,
        widths: Sequence[int] = (512, 1024, 2048),
        time_features: int = 128,
        kernel_size: int = 5,
        groups: int = 8,
    ):
        super().__init__()
        check_unet(widths, time_features, kernel_size, groups)
        self.length_multiple = 2 ** (len(widths) - 1)
        g = time_features + condition_dim

        def block(i: int, o: int) -> ResidualBlock:
            return ResidualBlock(i, o, g, kernel_size, groups)

        self.diffusion_step_encoder = nn.Sequential(
            SinusoidalEmbedding(time_features),
            nn.Linear(time_features, 4 * time_features),
            nn.Mish(),
            nn.Linear(4 * time_features, time_features),
        )
        levels = list(zip([action_dim, *widths], widths, strict=False))
        self.down_modules: Any = nn.ModuleList(
            nn.ModuleList([block(i, o), block(o, o), Downsample(o) if level < len(levels) else nn.Identity()])
            for level, (i, o) in enumerate(levels, start=1)
        )
        self.mid_modules = nn.ModuleList([block(widths[-1], widths[-1]) for _ in range(2)])
        self.up_modules: Any = nn.ModuleList(
            nn.ModuleList([block(2 * o, i), block(i, i), Upsample(i)]) for i, o in reversed(levels[1:])
        )
        self.final_conv = nn.Sequential(
            ConvBlock(widths[0], widths[0], kernel_size), nn.Conv1d(widths[0], action_dim, 1)
        )

    def forward(self, actions: Tensor, timestep: Tensor, condition: Tensor) -> Tensor:
        """Velocity at every step of the window; `timestep` is the flow time in the units the network was trained in."""
        length = actions.shape[1]
        if length % self.length_multiple:
            raise ValueError(
                f"a window of {length} steps does not pass this U-Net: with {len(self.down_modules)} widths the "
                f"horizon must be a multiple of {self.length_multiple}"
            )
        g = torch.cat([self.diffusion_step_encoder(timestep), condition], dim=-1)
        x = actions.transpose(1, 2)  # b c l
        skips = []
        for first, second, down in self.down_modules:
            x = second(first(x, g), g)
            skips.append(x)
            x = down(x)
        for middle in self.mid_modules:
            x = middle(x, g)
        for first, second, up in self.up_modules:
            x = torch.cat([x, skips.pop()], dim=1)
            x = up(second(first(x, g), g))
        return self.final_conv(x).transpose(1, 2).contiguous()  # FSDP2 hooks into the output, which must be no view
