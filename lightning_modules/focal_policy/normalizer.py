"""Affine normalisation of actions and observations, fitted to the demonstrations and kept with the weights."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn


def fit_affine(
    data: Tensor,
    mode: Literal["limits", "gaussian"] = "limits",
    fit_offset: bool = True,
    low: float = -1.0,
    high: float = 1.0,
    range_eps: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Scale and offset, per column, that map data to a common range: `x * scale + offset`.

    With "limits", the smallest value maps to `low` and the largest to `high`; a column whose range is below
    `range_eps` keeps its scale and is moved to the middle. With "gaussian", to mean 0 and (unbiased) standard
    deviation 1; a column whose deviation is below `range_eps` keeps its scale.

    Args:
        data: `(rows, d)` finite floats.
        mode: "limits" or "gaussian".
        fit_offset: False keeps zero at zero: limits then divides by the largest magnitude.
        low: Lower end of the range.
        high: Upper end of the range.
        range_eps: Smallest range (or deviation) that is stretched.

    Returns:
        scale and offset, each `(d,)`.
    """
    offset = torch.zeros_like(data[0])
    if mode == "gaussian":
        std = data.std(0)
        scale = 1 / torch.where(std < range_eps, torch.ones_like(std), std)
        if fit_offset:
            offset = -data.mean(0) * scale
        return scale, offset
    smallest, largest = data.amin(0), data.amax(0)
    if not fit_offset:
        magnitude = torch.maximum(smallest.abs(), largest.abs())
        reach = min(abs(low), abs(high))
        return torch.where(magnitude < range_eps, reach, magnitude).reciprocal() * reach, offset
    span = largest - smallest
    flat = span < range_eps
    scale = (high - low) / torch.where(flat, high - low, span)
    return scale, torch.where(flat, (low + high) / 2 - smallest, low - scale * smallest)


class Normalizer(nn.Module):
    """Affine maps of several named quantities, as buffers (saved with the weights, never trained).

    Until `fit` or loading, scale and offset are not a number, so that nothing passes unnoticed.

    Args:
        sizes: Columns of each quantity, by name.
    """

    def __init__(self, sizes: Mapping[str, int]):
        super().__init__()
        self.sizes = dict(sizes)
        for name, size in self.sizes.items():
            self.register_buffer(f"{name}_scale", torch.full((size,), torch.nan))
            self.register_buffer(f"{name}_offset", torch.full((size,), torch.nan))

    @torch.no_grad()
    def fit(self, data: Mapping[str, Tensor]) -> None:
        """Fit every quantity to `(..., size)` data (min-max to [-1, 1]).

        Raises:
            ValueError: If a quantity is missing, or has another number of columns than expected.
        """
        for name, size in self.sizes.items():
            if name not in data:
                raise ValueError(f"the demonstrations have no {name}, which the policy expects")
            found = data[name].shape[-1]
            if found != size:
                raise ValueError(f"the demonstrations have {found} numbers per {name}, the policy expects {size}")
            scale, offset = fit_affine(data[name].reshape(-1, size))
            getattr(self, f"{name}_scale").copy_(scale)
            getattr(self, f"{name}_offset").copy_(offset)

    @property
    def fitted(self) -> bool:
        """Whether every quantity has its scale."""
        return not any(bool(buffer.isnan().any()) for buffer in self.buffers())

    def forward(self, name: str, x: Tensor) -> Tensor:
        """Normalise `(..., size)`."""
        return x * getattr(self, f"{name}_scale") + getattr(self, f"{name}_offset")

    def inverse(self, name: str, x: Tensor) -> Tensor:
        """Undo `forward`."""
        return (x - getattr(self, f"{name}_offset")) / getattr(self, f"{name}_scale")
