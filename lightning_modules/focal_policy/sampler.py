"""When the student and its anchor look at the flow: locally anchored sampling, and the samplers it is compared with.

Flow time runs from noise (0) to data (1). Each training sample has two times: `tau`, where the network is trained, and
`r`, where its own prediction is the target. Draws are arguments, so that a caller decides where randomness comes from.
"""

from typing import Literal

import torch
from torch import Tensor

TimeSampler = Literal["v0", "v1", "logit_normal", "cfm", "terminal"]


def flow_times(
    u_tau: Tensor,
    n_a: Tensor,
    n_b: Tensor,
    u_mix: Tensor,
    sampler: TimeSampler = "v0",
    mean_t: float = 0.6,
    std_t: float = 1.6,
    mean_r: float = 4.0,
    std_r: float = 1.6,
    ratio: float = 0.15,
    eps: float = 0.01,
    delta: float = 0.01,
) -> tuple[Tensor, Tensor]:
    r"""Student time and anchor time of each sample (locally anchored sampling of FocalPolicy, arXiv 2605.15944).

    $\tau = \epsilon + (1-\epsilon) u$, and with $a = \sigma(\mu_t + s_t n_a)$, $b = \sigma(\mu_r + s_r n_b)$:

    - "v0" (released code): $r = \max(a, b)$ with probability 1 - ratio, else $\min(a, b)$; median 0.976
    - "v1" (in the released code, not used): $r = \min(a, r')$, $r' = a$ with probability 1 - ratio, else $b$
    - "logit_normal" (the curve in the paper's figure): $r = b$
    - "cfm" (FlowPolicy): $r = \min(\tau + \delta, 1)$, one small step after the student
    - "terminal": $r = 1$, so that the target is the demonstration itself

    Args:
        u_tau: `(b,)` uniform draws in [0, 1).
        n_a: `(b,)` standard normal draws.
        n_b: `(b,)` standard normal draws.
        u_mix: `(b,)` uniform draws in [0, 1).
        sampler: Name of the rule.
        mean_t: $\mu_t$.
        std_t: $s_t$.
        mean_r: $\mu_r$.
        std_r: $s_r$.
        ratio: Share of samples whose anchor is the earlier of the two draws.
        eps: Smallest student time; also the time at which inference starts.
        delta: Step of "cfm".

    Returns:
        tau and r, each `(b,)` in [0, 1].

    Raises:
        ValueError: If the sampler is unknown.
    """
    tau = (1 - eps) * u_tau + eps
    a, b = torch.sigmoid(mean_t + std_t * n_a), torch.sigmoid(mean_r + std_r * n_b)
    usual = u_mix < 1 - ratio
    if sampler == "v0":
        return tau, torch.where(usual, torch.maximum(a, b), torch.minimum(a, b))
    if sampler == "v1":
        return tau, torch.minimum(a, torch.where(usual, a, b))
    if sampler == "logit_normal":
        return tau, b
    if sampler == "cfm":
        return tau, (tau + delta).clamp(max=1.0)
    if sampler == "terminal":
        return tau, torch.ones_like(tau)
    raise ValueError(f"time_sampler {sampler!r} is none of v0, v1, logit_normal, cfm, terminal")
