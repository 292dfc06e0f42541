"""The objectives: FocalPolicy's foresight composite objective, and FlowPolicy's consistency objective (its baseline).

Both train a velocity network `v(x, s)` on the straight path from noise `x_0` to an action window `x_1`,
`x_s = s x_1 + (1 - s) x_0`, through the endpoint it predicts from flow time `s`: `F(s) = x_s + (1 - s) v(x_s, s)`.

Axes: b batch, l window steps, d action dimensions, k frequencies.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FreqMode = Literal["dct_l2", "dct_softmax", "dct_l1", "dct_band", "none"]
Scope = Literal["proximal", "window"]
Velocity = Callable[[Tensor, Tensor], Tensor]
"""`(x (b l d), s (b,)) -> velocity (b l d)`, the observation already bound."""


class Term(NamedTuple):
    """A mean kept as its two parts, so that it can be taken over the samples of all ranks.

    Attributes:
        total: sum of the loss over what counts.
        count: how much counts (valid steps), without gradient.
    """

    total: Tensor
    count: Tensor  # type: ignore[assignment] # instead of tuple's method

    def mean(self) -> Tensor:
        """The mean over this process; 0 where nothing counts."""
        return self.total / self.count.clamp(min=1)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # it is kept, and a tensor made in inference mode cannot be trained through later
def dct_matrix(length: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    r"""Orthonormal DCT-II: $C_{kn} = w_k \cos(\pi (n + 1/2) k / L)$, $w_0 = \sqrt{1/L}$, else $\sqrt{2/L}$.

    Returns:
        `(length, length)`, rows are frequencies; `C @ C.T` is the identity.
    """
    n = torch.arange(length, dtype=torch.float64)
    matrix = torch.cos(math.pi * (n + 0.5) * n[:, None] / length) * math.sqrt(2 / length)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device=device, dtype=dtype)


def dct(x: Tensor) -> Tensor:
    """DCT-II of each dimension along the window, `(b, l, d)` to `(b, k, d)`."""
    return torch.einsum("kn,bnd->bkd", dct_matrix(x.shape[1], x.dtype, x.device), x)


def time_term(predicted: Tensor, target: Tensor, valid: Tensor | None = None) -> Term:
    """Mean squared difference of two windows over valid steps and dimensions.

    Args:
        predicted: `(b, l, d)`.
        target: `(b, l, d)`.
        valid: `(b, l)` bool, False where a step was padded; None counts every step.

    Returns:
        The term; its count is the number of valid steps.
    """
    error = (predicted - target).square().mean(-1)  # b l
    if valid is None:
        valid = torch.ones_like(error, dtype=torch.bool)
    return Term((error * valid).sum(), valid.sum())


def frequency_term(
    predicted: Tensor,
    target: Tensor,
    mode: FreqMode = "dct_l2",
    valid: Tensor | None = None,
    band_weights: Sequence[float] | None = None,
) -> Term:
    r"""Difference of two windows over frequencies: a sum over (frequency, dimension), a mean over the batch.

    With $D = C(\text{predicted}) - C(\text{target})$ per sample:

    - "dct_l2" (released): $\sum_{k,d} D^2$. The DCT is orthonormal, so this *is* the summed squared error over steps
      (Parseval): no frequency counts more than another.
    - "dct_softmax" (in the released code, not used): $\frac1d \sum_{k,d} w D^2$, $w = \mathrm{softmax}_k(D^2)$ held
      constant: the worst frequency of each dimension counts most
    - "dct_l1": $\sum_{k,d} |D|$
    - "dct_band": $\sum_{k,d} b_k D^2$ with given weights $b_k$

    Padded steps count as equal in both windows, and the sum is scaled up by the share of valid steps.

    Args:
        predicted: `(b, l, d)`.
        target: `(b, l, d)`.
        mode: Name of the rule.
        valid: `(b, l)` bool, False where a step was padded; None counts every step.
        band_weights: Weight of each of the `l` frequencies, for "dct_band".

    Returns:
        The term; its count is the number of valid windows (steps over `l`).

    Raises:
        ValueError: If the mode is unknown, or the band weights are not as many as the frequencies, or below 0.
    """
    length = predicted.shape[1]
    difference = predicted - target
    if valid is None:
        count = torch.tensor(float(len(predicted)), device=predicted.device)
    else:
        difference = difference * valid[:, :, None]
        count = valid.sum() / length
    gap = dct(difference)
    if mode == "dct_l2":
        total = gap.square().sum()
    elif mode == "dct_softmax":
        power = gap.square()
        total = (power.detach().softmax(dim=1) * power).sum() / predicted.shape[2]
    elif mode == "dct_l1":
        total = gap.abs().sum()
    elif mode == "dct_band":
        if band_weights is None or len(band_weights) != length or not all(weight >= 0 for weight in band_weights):
            raise ValueError(
                f"freq_mode dct_band needs one weight a frequency: {length} numbers of at least 0 in band_weights"
            )
        weights = torch.tensor(list(band_weights), dtype=gap.dtype, device=gap.device)
        total = (weights[:, None] * gap.square()).sum()
    elif mode == "none":
        total = gap.new_zeros(())
    else:
        raise ValueError(f"freq_mode {mode!r} is none of dct_l2, dct_softmax, dct_l1, dct_band, none")
    return Term(total, count)


def interpolate(actions: Tensor, noise: Tensor, s: Tensor) -> Tensor:
    """`x_s = s actions + (1 - s) noise` for `(b, l, d)` windows and `(b,)` times."""
    s = s[:, None, None]
    return s * actions + (1 - s) * noise


def endpoint(velocity: Velocity, x: Tensor, s: Tensor, end: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Endpoint `x + (end - s) v(x, s)` that the network predicts from `(x, s)`, and the velocity."""
    v = velocity(x, s)
    return x + (end - s)[:, None, None] * v, v


def foresight_composite_objective(
    velocity: Velocity,
    actions: Tensor,
    noise: Tensor,
    tau: Tensor,
    r: Tensor,
    *,
    action_steps: int,
    proximal_start: int = 0,
    time_scope: Scope = "proximal",
    freq_scope: Scope = "window",
    freq_mode: FreqMode = "dct_l2",
    band_weights: Sequence[float] | None = None,
    valid: Tensor | None = None,
) -> dict[str, Term]:
    r"""The two terms of $L_{FCO} = L_{time} + \lambda L_{freq}$ (FocalPolicy, arXiv 2605.15944).

    $L_{time}$ draws the endpoint predicted at $\tau$ to the one predicted at the anchor $r$ by the same weights,
    without gradient, over the *proximal* steps (those that will be executed); $L_{freq}$ draws it to the
    demonstration, over frequencies of the whole window.

    Args:
        velocity: The network, see `Velocity`.
        actions: Normalised demonstration windows `(b, l, d)`.
        noise: Standard normal `(b, l, d)`, the start of the path to both times.
        tau: Student times `(b,)` in [0, 1].
        r: Anchor times `(b,)` in [0, 1].
        action_steps: Number of proximal steps.
        proximal_start: First proximal step: 0 as released (which starts one step before what is executed), or
            `history - 1` to match the executed steps.
        time_scope: "proximal", or "window" for consistency over all steps.
        freq_scope: "window", or "proximal".
        freq_mode: See `frequency_term`.
        band_weights: See `frequency_term`.
        valid: `(b, l)` bool, False where a step was padded.

    Returns:
        `time` and `freq`.
    """
    predicted, _ = endpoint(velocity, interpolate(actions, noise, tau), tau)
    with torch.no_grad():
        anchor, _ = endpoint(velocity, interpolate(actions, noise, r), r)
        anchor = anchor.nan_to_num()
    proximal = slice(proximal_start, proximal_start + action_steps)
    scopes = {"proximal": proximal, "window": slice(None)}
    t, f = scopes[time_scope], scopes[freq_scope]
    valid_t, valid_f = (None, None) if valid is None else (valid[:, t], valid[:, f])
    return {
        "time": time_term(predicted[:, t], anchor[:, t], valid_t),
        "freq": frequency_term(predicted[:, f], actions[:, f], freq_mode, valid_f, band_weights),
    }


def consistency_objective(
    velocity: Velocity,
    actions: Tensor,
    noise: Tensor,
    tau: Tensor,
    r: Tensor,
    *,
    segments: int = 2,
    boundary: float = 1.0,
    delta: float = 0.01,
    stop_gradient: bool = False,
    valid: Tensor | None = None,
) -> dict[str, Term]:
    r"""The two terms of FlowPolicy's loss $L_{time} + \alpha L_{velocity}$ (Consistency-FM on action windows).

    Time is cut into equal segments; with $e(\tau)$ the end of the segment that $\tau$ lies in,
    $f(s) = x_s + (e(\tau) - s)\, v(x_s, s)$ and $f(r)$ is the true point $x_{e(\tau)}$ where $r \ge$ boundary.
    $L_{time}$ is the mean of $|f(\tau) - f(r)|^2$; $L_{velocity}$ the mean of $|v_\tau - v_r|^2$ over samples with
    $\tau <$ boundary and more than $1.01\,\delta$ left in their segment (the others count as zero).

    Anchored sampling does not tie $r$ to the segment of $\tau$: use it with one segment.

    Args:
        velocity: The network, see `Velocity`.
        actions: Normalised demonstration windows `(b, l, d)`.
        noise: Standard normal `(b, l, d)`.
        tau: Student times `(b,)` in [0, 1].
        r: Anchor times `(b,)`, by FlowPolicy `min(tau + delta, 1)`.
        segments: Number of segments.
        boundary: Anchor time from which the true point is the target.
        delta: Step between the two times, for the mask of the velocity term.
        stop_gradient: Whether the anchor is held constant (Consistency-FM) or not (FlowPolicy's released code).
        valid: `(b, l)` bool, False where a step was padded.

    Returns:
        `time` and `velocity`.
    """
    end = torch.ceil(tau * segments).clamp(min=1) / segments
    predicted, v_tau = endpoint(velocity, interpolate(actions, noise, tau), tau, end)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not stop_gradient):
        anchor, v_r = endpoint(velocity, interpolate(actions, noise, r), r, end)
    true_point = interpolate(actions, noise, end)
    target = torch.where((r >= boundary)[:, None, None], true_point, anchor)
    inside = ((tau < boundary) & (end - tau > 1.01 * delta))[:, None, None]
    return {
        "time": time_term(predicted, target, valid),
        "velocity": time_term(v_tau * inside, v_r * inside, valid),
    }
