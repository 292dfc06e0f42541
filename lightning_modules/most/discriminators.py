"""Adversarial training of the unit vocoder: the discriminators and losses of HiFi-GAN (Kong et al. 2020, section 2.3).

Each discriminator returns the outputs of all its layers; the last one is its verdict, 1 for real and 0 for made.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


def outputs_of(layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    """Outputs of convolutions with leaky ReLUs between them, each `[b, channels, ...]`, the verdict last."""
    outputs = []
    for i, layer in enumerate(layers):
        x = layer(x if i == 0 else F.leaky_relu(x, 0.1))
        outputs.append(x)
    return outputs


class PeriodDiscriminator(nn.Module):
    """Sees every `period`-th sample in a row of a picture.

    Args:
        period: samples per row.
        width: channels of the first layer (HiFi-GAN: 32).
    """

    def __init__(self, period: int, width: int) -> None:
        super().__init__()
        channels = [1, width, 4 * width, 16 * width, 32 * width]
        layers = [nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0)) for a, b in pairwise(channels)]
        last = [nn.Conv2d(32 * width, 32 * width, (5, 1), 1, (2, 0)), nn.Conv2d(32 * width, 1, (3, 1), 1, (1, 0))]
        self.layers = nn.ModuleList(weight_norm(layer) for layer in [*layers, *last])
        self.period = period

    def forward(self, samples: Tensor) -> list[Tensor]:
        """Outputs of all layers for samples `[b, s]`; the end is reflected to a whole row."""
        x = F.pad(samples[:, None], (0, -samples.shape[1] % self.period), "reflect")
        return outputs_of(self.layers, x.unflatten(2, (-1, self.period)))  # b 1 rows period


class ScaleDiscriminator(nn.Module):
    """Sees samples averaged over `scale`.

    Args:
        scale: 1, 2 or 4.
        width: a quarter of the channels of the first layer (HiFi-GAN: 32); a multiple of 4.
    """

    def __init__(self, scale: int, width: int) -> None:
        super().__init__()
        sizes = [  # in, out, kernel, stride, groups
            (1, 4 * width, 15, 1, 1),
            (4 * width, 4 * width, 41, 2, 4),
            (4 * width, 8 * width, 41, 2, 16),
            (8 * width, 16 * width, 41, 4, 16),
            (16 * width, 32 * width, 41, 4, 16),
            (32 * width, 32 * width, 41, 1, 16),
            (32 * width, 32 * width, 5, 1, 1),
            (32 * width, 1, 3, 1, 1),
        ]
        layers = [nn.Conv1d(a, b, k, s, k // 2, groups=g) for a, b, k, s, g in sizes]
        self.layers = nn.ModuleList(weight_norm(layer) for layer in layers)
        self.scale = scale

    def forward(self, samples: Tensor) -> list[Tensor]:
        """Outputs of all layers for samples `[b, s]`."""
        x = samples[:, None]
        for _ in range(self.scale.bit_length() - 1):
            x = F.avg_pool1d(x, 4, 2, 2)  # b 1 about s / scale
        return outputs_of(self.layers, x)


class AdversarialLosses(NamedTuple):
    """What the discriminators say, scalars.

    Attributes:
        discriminators: least squares, real to 1 and made to 0, summed over discriminators; moves only them.
        generator: least squares, made to 1, summed over discriminators; its value is 0 by construction, its gradient
            moves only the vocoder.
        features: mean absolute difference of the layers' outputs, summed over layers; also 0 in value and moving only
            the vocoder.
        fooled: value of the generator's loss, without gradient, for logs.
    """

    discriminators: Tensor
    generator: Tensor
    features: Tensor
    fooled: Tensor


class Discriminators(nn.Module):
    """HiFi-GAN's five period and three scale discriminators.

    Args:
        width: channels (HiFi-GAN: 32); a multiple of 4.
        periods: of the period discriminators.
        scales: of the scale discriminators.
    """

    def __init__(
        self, width: int = 32, periods: tuple[int, ...] = (2, 3, 5, 7, 11), scales: tuple[int, ...] = (1, 2, 4)
    ) -> None:
        super().__init__()
        if width < 4 or width % 4:
            raise ValueError(f"the width of the discriminators is {width}: use a multiple of 4")
        parts = [PeriodDiscriminator(p, width) for p in periods] + [ScaleDiscriminator(s, width) for s in scales]
        self.parts = nn.ModuleList(parts)

    def forward(self, real: Tensor, made: Tensor) -> AdversarialLosses:
        """Losses of real and made samples, both [b, s].

        Both sides learn from one backward pass. A term for the vocoder is `g(made) - g(made without gradient)`: the
        gradients that it has for the discriminators cancel.
        """
        total = [made.new_zeros(()) for _ in range(4)]
        for part in self.parts:
            layers = [output.chunk(3) for output in part(torch.cat([real, made.detach(), made]))]
            is_real, is_made, attached = layers[-1]
            total[0] = total[0] + (is_real - 1).square().mean() + is_made.square().mean()
            fooled = (is_made - 1).square().mean()
            total[1] = total[1] + (attached - 1).square().mean() - fooled
            for r, m, a in layers[:-1]:
                total[2] = total[2] + (r - a).abs().mean() - (r - m).abs().mean()
            total[3] = total[3] + fooled.detach()
        return AdversarialLosses(*total)
