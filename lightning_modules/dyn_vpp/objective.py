"""The group-relative objective of Dyn-VPP: advantages, clipped loss, anchors, micro-batches.

One iteration is: `sampler.rollout`, a reward `[b g f]`, `group_advantages`, then for every `MicroBatch` of
`micro_batches` one backward pass of `weight * policy_loss(...).loss`, then one optimiser step. Related algorithms
differ by settings:

| | stochastic steps | initial noise | advantages | clip | more |
|---|---|---|---|---|---|
| Dyn-VPP | the first | shared by the group | per frame, group mean, group std | 0.2 | |
| DDPO | all but the last | own | per clip, batch mean, batch std | 1e-4 | |
| Flow-GRPO | all but the last | own | per clip, group mean, batch std | 1e-4 | `kl_weight` 0.01 to 0.04 |
| DanceGRPO | all but the last, 60 % train | shared | per clip, group mean, group std | 1e-4 | `keep` 8 of 24, `drift` |

(arXiv 2603.19370, 2305.13301, 2505.05470, 2505.07818.) "Per clip" means a reward averaged over frames,
`rewards.mean(-1, keepdim=True)`.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_modules.dyn_vpp.sampler import (
    Denoiser,
    Step,
    Transition,
    gaussian_kl,
    integrate,
    log_ratio,
    move,
    predict,
)


class Advantages(NamedTuple):
    """Normalised rewards and what a watcher wants to know about them.

    Attributes:
        values: `[b g f]`, 0 where the reward was not finite.
        zero_std_fraction: Share of (context, frame) groups whose rewards are all but equal, in [0, 1].
        nonfinite: Number of rewards that were masked.
    """

    values: Tensor
    zero_std_fraction: Tensor
    nonfinite: Tensor


def _moments(rewards: Tensor, finite: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation over `dims`, of the finite rewards only."""
    count = finite.sum(dims, keepdim=True)
    mean = torch.where(finite, rewards, 0).sum(dims, keepdim=True) / count.clamp(min=1)
    squares = torch.where(finite, rewards - mean, 0).square().sum(dims, keepdim=True)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def check_keep(keep: int | None, g: int) -> None:
    """Refuse a number of samples that train which is no even part of a group of g.

    Raises:
        ValueError: Naming both.
    """
    if keep is not None and (keep % 2 or not 2 <= keep <= g):
        raise ValueError(f"keep must be an even number from 2 to the group size {g}, got {keep}")


def group_advantages(
    rewards: Tensor,
    *,
    baseline: Literal["group", "batch"] = "group",
    scale: Literal["group", "batch", "none"] = "group",
    bound: float = 2.0,
    keep: int | None = None,
    zero_std: float = 1e-5,
    eps: float = 1e-8,
) -> Advantages:
    """Compare every sample with the others of its own context, frame by frame (GRPO, arXiv 2402.03300).

    `A = (R - mean) / (std + eps)`, with the mean and unbiased std over the g samples of one context and frame; 0 where
    std is below `zero_std` (rounding noise would become +-1 there); then clamped to `+-bound`. Rewards that are not
    finite take part in nothing and get 0.

    Args:
        rewards: `[b g f]`; g samples of one context side by side. For one value per clip: `[b g 1]`.
        baseline: What is subtracted: the group's mean, or the whole batch's (of that frame).
        scale: What it is divided by: the group's std, the batch's, or nothing. For `batch` on several ranks,
            pass the rewards of all ranks.
        bound: Largest absolute advantage.
        keep: Even number of samples per group that train: the better and the worse half of them by mean reward. The
            others get 0, and the kept ones are scaled by g / keep so that a mean over g is a mean over the kept.
        zero_std: Smallest std that counts as a difference.
        eps: Added to the std.

    Returns:
        Advantages of the shape of `rewards` and the counts.

    Raises:
        ValueError: If a group has one sample, or `keep` is not an even number from 2 to g.
    """
    g = rewards.shape[1]
    if "group" in (baseline, scale) and g < 2:
        raise ValueError("a group of 1 has nothing to compare with: use at least 2 samples per context")
    check_keep(keep, g)
    finite = rewards.isfinite()
    group_mean, group_std = _moments(rewards, finite, (1,))
    batch_mean, batch_std = _moments(rewards, finite, (0, 1))

    values = rewards - (group_mean if baseline == "group" else batch_mean)
    if scale != "none":
        std = group_std if scale == "group" else batch_std
        values = torch.where(std < zero_std, 0, values / (std + eps))
    values = torch.where(finite, values, 0).clamp(-bound, bound)
    if keep is not None:
        order = torch.where(finite, rewards, group_mean).mean(-1).argsort(dim=1)
        chosen = torch.cat([order[:, : keep // 2], order[:, g - keep // 2 :]], dim=1)
        values = values * (g / keep) * torch.zeros_like(values[..., 0]).scatter(1, chosen, 1)[..., None]
    return Advantages(values, (group_std < zero_std).to(rewards.dtype).mean(), (~finite).sum())


def clipped_objective(log_ratios: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """The clipped policy loss per element, `max(-A r, -A clip(r, 1 - clip, 1 + clip))` (arXiv 1707.06347, Eq. 7).

    The maximum of the negated terms: the released code takes their minimum, which shows only when r leaves the clip
    range.

    Args:
        log_ratios: ln r, any shape.
        advantages: Broadcastable to `log_ratios`.
        clip: Half-width of the range in which r still earns, > 0.

    Returns:
        Loss per element; its gradient at r = 1 is minus advantage times the gradient of the log-probability.
    """
    ratio = log_ratios.exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))


class PolicyLoss(NamedTuple):
    """A loss and its parts; all but `loss` are detached.

    Attributes:
        loss: Scalar to differentiate.
        ratio: Mean of r; 1 before the first update.
        ratio_error: Largest `|r - 1|`.
        clip_low: Share of elements with r < 1 - clip.
        clip_high: Share of elements with r > 1 + clip.
        approx_kl: Half the mean squared log-ratio, nats.
        kl: Mean divergence from the reference, nats per element; 0 without a reference.
        drift: Mean squared change of the predicted clean latent against the reference; 0 without a reference.
    """

    loss: Tensor
    ratio: Tensor
    ratio_error: Tensor
    clip_low: Tensor
    clip_high: Tensor
    approx_kl: Tensor
    kl: Tensor
    drift: Tensor


def policy_loss(
    denoise: Denoiser,
    step: Step,
    advantages: Tensor,
    *,
    clip: float = 0.2,
    reduction: Literal["mean", "sum"] = "mean",
    skip_frames: int = 0,
    rescale: bool = False,
    reference: Tensor | None = None,
    kl_weight: float = 0.0,
    drift_weight: float = 0.0,
) -> PolicyLoss:
    """Evaluate one stochastic step of a rollout again and weigh its log-ratio by the advantages.

    When the group shares its state, the network runs forward and backward on b rows, not b * g: the mean of the step is
    the same for the whole group, so loss and gradient are exactly those of the longer way.

    Args:
        denoise: The network being trained, in eval mode as during the rollout.
        step: The stochastic step.
        advantages: `[b g f]`, each frame's log-ratio weighted by its own frame; or `[b g 1]`, the log-ratio averaged
            over frames.
        clip: See `clipped_objective`. With one pass over a rollout r stays at 1 and this does nothing.
        reduction: Of the log-ratio over c h w; `mean` is the released code.
        skip_frames: Leading frames left out of the loss; 1 leaves out the frame that is given.
        rescale: Multiply the policy term by `std / leverage`, which undoes the factor that makes its gradient tiny at
            large sigma (6e-8 and less at sigma 700) and is mean(A noise clean) at r = 1.
        reference: A frozen network's prediction from `step.x`, same shape; needed by the two weights below.
        kl_weight: Weight of `gaussian_kl` to the reference.
        drift_weight: Weight of the mean squared difference to the reference's clean prediction. Unlike the
            divergence it does not vanish at large sigma.

    Returns:
        The loss, a mean over all elements (masked ones too, so that ranks agree), and its parts.

    Raises:
        ValueError: If a weight is set without a reference.
    """
    if reference is None and (kl_weight or drift_weight):
        raise ValueError("kl_weight and drift_weight need the prediction of a reference network")
    transition = step.transition
    clean = predict(denoise, step.x, transition.sigma)
    ratios = log_ratio(step, clean, reduction)[..., skip_frames:]
    if advantages.shape[-1] == 1:
        ratios = ratios.mean(-1, keepdim=True)
    else:
        advantages = advantages[..., skip_frames:]
    loss = clipped_objective(ratios, advantages, clip).mean()
    if rescale:
        loss = loss * (transition.std / transition.leverage)

    kl = drift = loss.new_zeros(())
    if reference is not None:
        kl = gaussian_kl(clean, reference, transition, reduction)[..., skip_frames:].mean()
        drift = (clean - reference)[..., skip_frames:, :, :, :].square().mean()
        loss = loss + kl_weight * kl + drift_weight * drift

    ratio = ratios.detach().exp()
    return PolicyLoss(
        loss=loss,
        ratio=ratio.mean(),
        ratio_error=(ratio - 1).abs().max(),
        clip_low=(ratio < 1 - clip).to(ratio.dtype).mean(),
        clip_high=(ratio > 1 + clip).to(ratio.dtype).mean(),
        approx_kl=0.5 * ratios.detach().square().mean(),
        kl=kl.detach(),
        drift=drift.detach(),
    )


class MicroBatch(NamedTuple):
    """A part of a rollout's update that fits into memory.

    Attributes:
        step: The rows of one stochastic step, `x` `[r 1 f c h w]`.
        advantages: Their advantages, `[r g f]` for a shared state, else `[r 1 f]`.
        contexts: Which context each row belongs to, `[r]` int64: index the conditions with it.
        weight: Share of this part in the mean over everything; 0 for a part that only keeps ranks in step.
    """

    step: Step
    advantages: Tensor
    contexts: Tensor
    weight: float


def micro_batches(
    steps: Sequence[Step], advantages: Tensor, size: int | None = None, passes: int | None = None
) -> list[MicroBatch]:
    """Cut the update into backward passes whose weighted losses add up to the loss of the whole.

    A row is a context when the group shares its state, and otherwise one sample: a group can be cut too.

    Args:
        steps: Stochastic steps of a rollout.
        advantages: `[b g f]` or `[b g 1]`.
        size: Most rows in one pass; `None` for all.
        passes: Number of passes per step, the same on every rank (each backward pass synchronises gradients): the
            number that the rank with most rows needs. Missing passes are filled with row 0 at weight 0.

    Returns:
        `len(steps) * passes` parts, in order.

    Raises:
        ValueError: If `passes` is too small for the rows of this rank.
    """
    parts = []
    for step in steps:
        x, clean, noise, values = step.x, step.clean, step.noise, advantages
        contexts = torch.arange(x.shape[0], device=x.device)
        if x.shape[1] > 1:  # own states: b g -> (b g) 1
            contexts = contexts.repeat_interleave(x.shape[1])
            x, clean, noise, values = (t.flatten(0, 1)[:, None] for t in (x, clean, noise, values))
        rows = len(x)
        cuts = [slice(i, min(i + (size or rows), rows)) for i in range(0, rows, size or rows)]
        if passes is not None and len(cuts) > passes:
            raise ValueError(f"{rows} rows in parts of {size} need {len(cuts)} passes, but only {passes} are allowed")
        fillers = (passes or len(cuts)) - len(cuts)
        for cut, counts in [(c, True) for c in cuts] + [(slice(0, 1), False)] * fillers:
            weight = (cut.stop - cut.start) / rows / len(steps) if counts else 0.0
            part = Step(step.transition, x[cut], clean[cut], noise[cut])
            parts.append(MicroBatch(part, values[cut], contexts[cut], weight))
    return parts


def denoising_loss(
    denoise: Callable[[Tensor, Tensor], Tensor], latents: Tensor, noise: Tensor, sigma: Tensor
) -> Tensor:
    """Supervised loss of the base model, `mean (s^2 + 1) / s^2 (clean - latents)^2` (EDM with data of unit variance).

    As an anchor with weight about 1 it keeps the noise levels that the policy does not act at from drifting while
    shared weights move.

    Args:
        denoise: Predicts clean latents from `[n f c h w]` and one sigma per row.
        latents: Expert latents, `[n f c h w]`.
        noise: Standard normal, same shape.
        sigma: `[n]`, > 0, usually `exp(p_mean + p_std * normal)`.

    Returns:
        Scalar; about 1 for a network whose output v is 0.
    """
    wide = sigma.view(-1, 1, 1, 1, 1)
    error = denoise(latents + wide * noise, sigma) - latents
    return ((wide.square() + 1) / wide.square() * error.square()).mean()


def pathwise_loss(
    denoise: Denoiser, step: Step, remaining: Sequence[Transition], reward: Callable[[Tensor], Tensor]
) -> Tensor:
    """A loss whose gradient is exactly minus that of the mean reward through one stochastic step.

    The reward is differentiated through the remaining, deterministic steps (weights there taken as constants, as in the
    policy gradient). It costs the memory of the whole sampler, so it is a measuring stick, not a way to train:
    the cosine between its gradient and the policy gradient tells how noisy the estimate is.

    Args:
        denoise: The network.
        step: The last stochastic step of a rollout.
        remaining: The schedule after it; deterministic steps only.
        reward: Differentiable, `[b g f c h w] -> [b g f]`.

    Returns:
        Scalar. Its value means nothing; its gradient does.
    """
    after = (move(step.x, step.clean, step.transition) + step.transition.std * step.noise).detach()
    with torch.enable_grad():
        latents, _ = integrate(denoise, after.requires_grad_(), (), remaining)
        (slope,) = torch.autograd.grad(reward(latents).mean(), after)
    mean = move(step.x, predict(denoise, step.x, step.transition.sigma), step.transition)
    return -(slope * mean).sum()
