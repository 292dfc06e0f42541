"""The Euler-hybrid sampler of Dyn-VPP as pure functions: stochastic where the policy acts, deterministic elsewhere.

A video latent is noised as `x = clean + sigma * noise` (EDM, arXiv 2206.00364). A step from `sigma` to the next one
moves x along the straight line towards the predicted clean latent and, where the policy acts, adds noise:

    x' = x + (x - clean) / sigma * (target - sigma) + std * noise
       = w x + (1 - w) clean + std * noise,  w = target / sigma

Deterministic (Euler): target = sigma_next, std = 0. Ancestral (Dyn-VPP, at the first step only):
target = sigma_down, std = sigma_up. The policy is the Gaussian N(mean, std^2) over x'; every later step is a fixed map
of its outcome. No scheduler object is involved: its hidden step counter would scale the model input of the update by
the sigma that the rollout ended on.

Axes: b contexts, g samples of one context (the group), f frames, c h w one frame's latent. Sigmas are Python floats.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Denoiser = Callable[[Tensor, float], Tensor]
"""Takes x `[n f c h w]` and sigma, returns the predicted clean latents of the same shape; n is a multiple of the
number of contexts, with the rows of one context in succession."""


class Transition(NamedTuple):
    """One step of the sampler.

    Attributes:
        sigma: Noise level before the step, > 0.
        target: Noise level that the deterministic part leads to, >= 0.
        std: Standard deviation of the added noise; 0 marks a deterministic step.
    """

    sigma: float
    target: float
    std: float

    @property
    def leverage(self) -> float:
        """Derivative of the step's mean by the predicted clean latent, `1 - target / sigma`."""
        return 1 - self.target / self.sigma


class Step(NamedTuple):
    """What the update needs to know about one stochastic step of a rollout; no graph is attached.

    Attributes:
        transition: The step's noise levels.
        x: State before the step, `[b 1 f c h w]` when the whole group shares it, else `[b g f c h w]`.
        clean: Clean latent predicted from `x` during the rollout, shaped like `x`.
        noise: Standard normal noise that was drawn, `[b g f c h w]`.
    """

    transition: Transition
    x: Tensor
    clean: Tensor
    noise: Tensor


class Rollout(NamedTuple):
    """Outcome of a rollout.

    Attributes:
        latents: Generated video latents, `[b g f c h w]`.
        steps: The stochastic steps, in order.
    """

    latents: Tensor
    steps: list[Step]


def karras_sigmas(steps: int, sigma_min: float, sigma_max: float, rho: float = 7.0) -> list[float]:
    """Noise levels from `sigma_max` down to `sigma_min`, then 0 (EDM, arXiv 2206.00364, Eq. 5).

    Args:
        steps: Number of sampler steps N, at least 2.
        sigma_min: Smallest positive level.
        sigma_max: Largest level; 700 for Stable Video Diffusion, about 5 to 80 for small models.
        rho: Spacing exponent.

    Returns:
        N + 1 levels, strictly falling, the last one 0.

    Raises:
        ValueError: If there are fewer than 2 steps or the levels are not `0 < sigma_min < sigma_max`.
    """
    if steps < 2 or not 0 < sigma_min < sigma_max:
        raise ValueError(f"need steps >= 2 and 0 < sigma_min < sigma_max, got steps={steps}, {sigma_min}, {sigma_max}")
    first, last = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return [(first + i / (steps - 1) * (last - first)) ** rho for i in range(steps)] + [0.0]


def hybrid_schedule(
    sigmas: Sequence[float],
    stochastic: Collection[int] = (0,),
    kind: Literal["ancestral", "drift"] = "ancestral",
    eta: float = 1.0,
) -> list[Transition]:
    """Turn noise levels into sampler steps, stochastic at the given places and Euler everywhere else.

    - `ancestral`: `std = eta * sqrt(s'^2 (s^2 - s'^2) / s^2)`, `target = sqrt(s'^2 - std^2)`, so that the total
      noise after the step is `s'`. With eta 1 target is `s'^2 / s`. This is the paper's step.
    - `drift`: `target = s + (1 - eta) (s' - s)`, `std = eta * sqrt(s - s')`, the other step of the released code,
      and the kind of noise DanceGRPO adds (arXiv 2505.07818); eta about 0.1 to 0.3.

    Args:
        sigmas: N + 1 falling noise levels, the last one 0.
        stochastic: Indices of the steps where the policy acts; empty gives the ODE sampler.
        kind: Form of the stochastic step.
        eta: Amount of noise, in (0, 1].

    Returns:
        N steps.

    Raises:
        ValueError: If a stochastic index is outside the schedule or names the step that ends at sigma 0, where
            the policy would have no width and its log-probability no value; or if eta is not in (0, 1].
    """
    last = len(sigmas) - 2
    if bad := sorted(i for i in stochastic if not (0 <= i <= last and sigmas[i + 1] > 0)):
        raise ValueError(
            f"steps {bad} cannot be stochastic: allowed are 0 to {last - 1}, because the last step ends at sigma 0"
        )
    if not 0 < eta <= 1:
        raise ValueError(f"eta must be in (0, 1], got {eta}")
    schedule = []
    for i, (now, then) in enumerate(pairwise(sigmas)):
        if i not in stochastic:
            schedule.append(Transition(now, then, 0.0))
        elif kind == "ancestral":
            ratio = then / now
            # target^2 = then^2 - std^2, written without the difference of two nearly equal numbers
            std, target = eta * then * math.sqrt(1 - ratio**2), then * math.sqrt(1 - eta**2 * (1 - ratio**2))
            schedule.append(Transition(now, target, std))
        else:
            schedule.append(Transition(now, now + (1 - eta) * (then - now), eta * math.sqrt(now - then)))
    return schedule


def start_scale(sigma_max: float) -> float:
    """Standard deviation of the initial state, `sqrt(sigma_max^2 + 1)`, for latents of unit variance."""
    return math.hypot(sigma_max, 1)


def context_noise(contexts: Sequence[int], shape: Sequence[int], *key: int) -> Tensor:
    """Standard normal numbers that depend on nothing but the context and the key.

    However contexts are spread over batches, ranks and micro-batches, each gets the same noise: a run does not depend
    on the number of ranks, and two networks can be compared on equal noise.

    Args:
        contexts: Number of each context: its place in the global batch, or its index in the data set.
        shape: Shape for one context, such as `(1 + g, f, c, h, w)`: the start and one noise per sample.
        *key: What else the numbers depend on, such as the seed and the iteration.

    Returns:
        `[len(contexts), *shape]` float32 on the CPU.
    """
    draws = []
    for context in contexts:
        digest = hashlib.blake2b(repr((*map(int, key), int(context))).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        draws.append(torch.randn(*shape, generator=generator))
    return torch.stack(draws)


def move(x: Tensor, clean: Tensor, transition: Transition) -> Tensor:
    """Mean of x after one step: `w x + (1 - w) clean` with `w = target / sigma`; shapes as `x`."""
    return torch.lerp(clean, x, transition.target / transition.sigma)


def predict(denoise: Denoiser, x: Tensor, sigma: float) -> Tensor:
    """Apply a denoiser to `[b g f c h w]`, contexts and group together as one batch."""
    return denoise(x.flatten(0, 1), sigma).unflatten(0, x.shape[:2])


def integrate(
    denoise: Denoiser, x: Tensor, noise: Sequence[Tensor], schedule: Sequence[Transition]
) -> tuple[Tensor, list[Step]]:
    """Run sampler steps from the state `x`; builds a graph unless the caller switches it off.

    Args:
        denoise: Predicts clean latents.
        x: State at the first sigma of the schedule, `[b 1 f c h w]` (one state for the whole group) or
            `[b g f c h w]`.
        noise: One standard normal `[b g f c h w]` for each stochastic step of the schedule.
        schedule: Steps to run.

    Returns:
        The last state and the stochastic steps. Until the first stochastic step a shared state stays
        `[b 1 f c h w]`, so that the denoiser sees b rows instead of b * g.

    Raises:
        ValueError: If the number of noise tensors is not the number of stochastic steps.
    """
    if len(noise) != (wanted := sum(t.std > 0 for t in schedule)):
        raise ValueError(f"the schedule has {wanted} stochastic steps, but {len(noise)} noise tensors were given")
    draws, steps = iter(noise), []
    for transition in schedule:
        clean = predict(denoise, x, transition.sigma)
        mean = move(x, clean, transition)
        if transition.std > 0:
            steps.append(Step(transition, x, clean, next(draws)))
            mean = mean + transition.std * steps[-1].noise
        x = mean
    return x, steps


@torch.no_grad()  # not inference_mode: its tensors cannot be saved for the update's backward pass
def rollout(denoise: Denoiser, start: Tensor, noise: Sequence[Tensor], schedule: Sequence[Transition]) -> Rollout:
    """Generate a group of videos for every context, without a graph.

    Args:
        denoise: Predicts clean latents; the network should be in eval mode, here and in the update.
        start: Standard normal initial noise, `[b 1 f c h w]` when the group shares it (the paper), else
            `[b g f c h w]`. float32 or float64, which is the type of all sampler maths.
        noise: One standard normal `[b g f c h w]` for each stochastic step; a tensor `[s b g f c h w]` will do.
        schedule: From `hybrid_schedule`.

    Returns:
        The videos and what the update needs. With no stochastic step: the ODE sampler, `[b 1 f c h w]` from
        a shared start.

    Raises:
        ValueError: If the number of noise tensors is not the number of stochastic steps.
    """
    latents, steps = integrate(denoise, start * start_scale(schedule[0].sigma), noise, schedule)
    return Rollout(latents, steps)


def _reduce(values: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
    return values.mean((-3, -2, -1)) if reduction == "mean" else values.sum((-3, -2, -1))


def log_probability(sample: Tensor, mean: Tensor, std: float, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Log-density of a stochastic step, one value per frame.

    Args:
        sample: State after the step, `[... f c h w]`.
        mean: Mean of the step, same shape.
        std: Its standard deviation, > 0.
        reduction: Over c h w; `mean` as in the released code, `sum` for the joint density.

    Returns:
        `[... f]`, in nats (per element for `mean`). Differences of two such values lose all digits at large sigma
        in float32: use `log_ratio` for the update.

    Raises:
        ValueError: If std is 0.
    """
    if std <= 0:
        raise ValueError("a deterministic step has no log-probability: its standard deviation is 0")
    z = (sample - mean) / std
    return _reduce(-0.5 * z.square() - math.log(std) - 0.5 * math.log(2 * math.pi), reduction)


def log_ratio(step: Step, clean: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Exact logarithm of new over old probability of a rollout's step, one value per sample and frame.

    With d the change of the step's mean it is the mean over c h w of `noise * d / std - d^2 / (2 std^2)`: equal to
    the difference of the log-probabilities, without subtracting two numbers of size 7 that differ by 1e-5. d is
    formed from the clean predictions, because the means themselves are as large as sigma.

    Args:
        step: A stochastic step of a rollout.
        clean: Clean latent predicted now, shaped like `step.x`.
        reduction: Over c h w, see `log_probability`.

    Returns:
        `[b g f]`, 0 where nothing changed. When the group shares its state, `clean` and its gradient have b rows.
    """
    shift = (step.transition.leverage / step.transition.std) * (clean - step.clean)
    return _reduce(step.noise * shift, reduction) - 0.5 * _reduce(shift.square(), reduction)


def gaussian_kl(
    clean: Tensor, reference: Tensor, transition: Transition, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """Divergence of the step's policy from a reference policy, `(mean - mean_ref)^2 / (2 std^2)`.

    Closed form as in Flow-GRPO (arXiv 2505.05470).

    Args:
        clean: Predicted clean latent, `[... f c h w]`.
        reference: The reference network's prediction from the same state, same shape.
        transition: The stochastic step.
        reduction: Over c h w, see `log_probability`.

    Returns:
        `[... f]`, >= 0, in nats (per element for `mean`).
    """
    return 0.5 * _reduce((transition.leverage / transition.std * (clean - reference)).square(), reduction)
