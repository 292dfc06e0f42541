"""Low-rank adapters (LoRA, arXiv 2106.09685) of a U-Net, as parametrisations: no wrapper, nothing to call differently.

A weight W is read as `W + scale * up @ down`. `merge` turns the state of an adapted network into that of a plain one.
"""

import math
import re

from torch import Tensor, nn
from torch.nn.utils import parametrize

TARGETS = re.compile(r"(to_q|to_k|to_v|to_out\.0|proj_in|proj_out|conv_in|conv_out)$|(ff|ff_in)\.net\.")
"""Layers that get an adapter, as in the released code: attention, feed-forward, the convolutions at both ends."""
_ORIGINAL = ".parametrizations.weight.original"


class LowRank(nn.Module):
    """`W + scale * up @ down`, starting at W.

    Args:
        weight: W, `[out ...]`; what is not the first axis counts as one.
        rank: Of the change.
        scale: Its factor; 2 is the released alpha / rank, 32 / 16.
    """

    scale: Tensor

    def __init__(self, weight: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        size = weight[0].numel()
        self.down = nn.Parameter(weight.new_empty(rank, size).normal_(std=1 / math.sqrt(size)))
        self.up = nn.Parameter(weight.new_zeros(len(weight), rank))
        self.register_buffer("scale", weight.new_full((), scale))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight to use, shaped as `weight`."""
        return weight + self.scale * (self.up @ self.down).view_as(weight)


def add_low_rank(network: nn.Module, rank: int, scale: float = 2.0) -> None:
    """Freeze a network and give the layers that `TARGETS` names an adapter each.

    Raises:
        ValueError: If the rank is below 1 or no layer has such a name.
    """
    if rank < 1:
        raise ValueError(f"lora_rank {rank} must be at least 1")
    network.requires_grad_(False)
    chosen = [
        layer
        for name, layer in network.named_modules()
        if TARGETS.search(name) and isinstance(layer, (nn.Linear, nn.Conv2d))
    ]
    if not chosen:
        raise ValueError("no layer of the network can get an adapter: train the whole of it, without lora_rank")
    for layer in chosen:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank, scale))


def merge(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of the plain network: `state` itself where it has no adapters."""
    plain = {k: v for k, v in state.items() if ".parametrizations." not in k}
    for key in state:
        if key.endswith(_ORIGINAL):
            name = key.removesuffix(_ORIGINAL)
            down, up, scale = (state[f"{name}.parametrizations.weight.0.{part}"] for part in ("down", "up", "scale"))
            change = (up.float() @ down.float()).view_as(state[key])
            plain[f"{name}.weight"] = (state[key] + scale * change).to(state[key].dtype)
    return plain
