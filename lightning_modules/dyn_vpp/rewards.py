"""Rewards that can be checked: how near the generated future is to the expert's, frame by frame.

All functions take half precision and compute in float32. Leading axes broadcast, so that a group `[b g f c h w]` is
scored against its expert `[b 1 f c h w]` without copies.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _full(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def l1_reward(prediction: Tensor, target: Tensor) -> Tensor:
    """Minus the mean absolute error of each frame, `[... f c h w] -> [... f]`, at most 0."""
    return -(_full(prediction) - _full(target)).abs().mean((-3, -2, -1))


def cosine_reward(prediction: Tensor, target: Tensor) -> Tensor:
    """Cosine between each frame and its target as vectors, `[... f c h w] -> [... f]`, in [-1, 1].

    A frame of zeros gives 0: norms are floored at 1e-12.
    """
    return F.cosine_similarity(_full(prediction).flatten(-3), _full(target).flatten(-3), dim=-1, eps=1e-12)


def difference_reward(prediction: Tensor, target: Tensor) -> Tensor:
    """Minus the mean absolute error of the change from frame to frame, `[... f c h w] -> [... f-1]`, at most 0.

    Not in the paper: it counts only what moves, so that a still picture scores no better for its background.
    """
    return l1_reward(_full(prediction).diff(dim=-4), _full(target).diff(dim=-4))


def latent_reward(
    prediction: Tensor,
    target: Tensor,
    l1_weight: float = 1.0,
    cosine_weight: float = 1.0,
    difference_weight: float = 0.0,
) -> Tensor:
    """The paper's reward per frame, `-L1 + cosine` between generated and expert latents.

    Args:
        prediction: Generated latents, `[... f c h w]`, scaled as the U-Net sees them (unit variance).
        target: Expert latents, broadcastable to `prediction`.
        l1_weight: Weight of the L1 term.
        cosine_weight: Weight of the cosine term.
        difference_weight: Weight of `difference_reward`, which is 0 at the first frame; 0 is the paper.

    Returns:
        `[... f]`.
    """
    reward = l1_weight * l1_reward(prediction, target) + cosine_weight * cosine_reward(prediction, target)
    if difference_weight:
        reward = reward + difference_weight * F.pad(difference_reward(prediction, target), (1, 0))
    return reward


def pixel_reward(
    prediction: Tensor,
    target: Tensor,
    l1_weight: float = 1.0,
    perceptual: Callable[[Tensor, Tensor], Tensor] | None = None,
    perceptual_weight: float = 1.0,
) -> Tensor:
    """Reward per frame on decoded videos, `-(L1 + perceptual distance)`, the released code's unused alternative.

    Args:
        prediction: Decoded frames, `[... f 3 h w]` in [-1, 1].
        target: Expert frames, broadcastable to `prediction`.
        l1_weight: Weight of the L1 term.
        perceptual: A distance such as LPIPS, `([n 3 h w], [n 3 h w]) -> n values`; `None` leaves the term out.
        perceptual_weight: Its weight.

    Returns:
        `[... f]`.
    """
    reward = l1_weight * l1_reward(prediction, target)
    if perceptual is not None:
        first, second = torch.broadcast_tensors(_full(prediction), _full(target))
        distance = perceptual(first.flatten(0, -4), second.flatten(0, -4))
        reward = reward - perceptual_weight * distance.reshape(first.shape[:-3])
    return reward
