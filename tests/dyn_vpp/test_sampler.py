import math
from itertools import pairwise

import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, EulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modules.dyn_vpp.sampler import (
    Step,
    context_noise,
    gaussian_kl,
    hybrid_schedule,
    integrate,
    karras_sigmas,
    log_probability,
    log_ratio,
    move,
    rollout,
    start_scale,
)

SHAPE = (3, 2, 4, 4)  # f c h w


def shrink(x, sigma):
    """A denoiser with a closed form: the posterior mean for standard normal data."""
    return x / (sigma**2 + 1)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@given(
    steps=st.integers(2, 40),
    low=st.floats(1e-3, 0.5),
    factor=st.floats(1.5, 1e5),
    eta=st.floats(0.05, 1),
)
@settings(max_examples=50, deadline=None)
def test_levels_fall_and_the_noise_adds_up(steps, low, factor, eta):
    sigmas = karras_sigmas(steps, low, low * factor)
    assert sigmas[-1] == 0 and all(a > b for a, b in pairwise(sigmas))
    for i, t in enumerate(hybrid_schedule(sigmas, range(steps - 1), eta=eta)[:-1]):
        assert t.target**2 + t.std**2 == pytest.approx(sigmas[i + 1] ** 2, rel=1e-12)
    for t in hybrid_schedule(sigmas, range(steps - 1))[:-1]:
        assert t.leverage > 0 and t.std > 0


def test_deterministic_step_is_the_step_of_diffusers():
    sigmas = karras_sigmas(6, 0.02, 20.0)
    scheduler = EulerDiscreteScheduler(
        prediction_type="v_prediction", timestep_type="continuous", use_karras_sigmas=True
    )
    scheduler.set_timesteps(6)
    scheduler.sigmas = torch.tensor(sigmas)
    scheduler.timesteps = torch.tensor([0.25 * math.log(s) for s in sigmas[:-1]])
    x = draw(2, *SHAPE, dtype=torch.float32) * start_scale(20.0)
    for transition, time in zip(hybrid_schedule(sigmas, ()), scheduler.timesteps, strict=True):
        v = draw(2, *SHAPE, seed=1, dtype=torch.float32)
        clean = x / (transition.sigma**2 + 1) - v * transition.sigma / math.hypot(transition.sigma, 1)
        theirs = scheduler.step(v, time, x).prev_sample
        ours = move(x, clean, transition)
        torch.testing.assert_close(ours, theirs, atol=1e-5 * max(transition.sigma, 1), rtol=1e-5)
        x = ours


def test_stochastic_step_is_the_ancestral_step_of_diffusers():
    sigmas = karras_sigmas(6, 0.02, 20.0)
    scheduler = EulerAncestralDiscreteScheduler(prediction_type="v_prediction")
    scheduler.set_timesteps(6)
    scheduler.sigmas = torch.tensor(sigmas)
    for i, transition in enumerate(hybrid_schedule(sigmas, range(5))[:-1]):
        x = draw(2, *SHAPE, dtype=torch.float32) * math.hypot(transition.sigma, 1)
        v = draw(2, *SHAPE, seed=1, dtype=torch.float32)
        scheduler._step_index = i
        scheduler.is_scale_input_called = True
        seed = torch.Generator().manual_seed(7)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
        theirs = scheduler.step(v, scheduler.timesteps[i], x, generator=seed).prev_sample
        clean = x / (transition.sigma**2 + 1) - v * transition.sigma / math.hypot(transition.sigma, 1)
        ours = move(x, clean, transition) + transition.std * noise
        torch.testing.assert_close(ours, theirs, atol=1e-5 * max(transition.sigma, 1), rtol=1e-5)


def test_ode_of_a_known_denoiser():
    # dx/ds = x s / (s^2 + 1) is solved by x ~ sqrt(s^2 + 1): the sampler returns the start
    z = draw(2, 1, *SHAPE)
    latents = rollout(shrink, z, (), hybrid_schedule(karras_sigmas(400, 0.002, 20.0), ())).latents
    torch.testing.assert_close(latents, z, atol=0.05, rtol=0.05)


def test_group_shares_its_start_and_differs_after_the_first_step():
    schedule = hybrid_schedule(karras_sigmas(4, 0.02, 20.0))
    rows = []

    def spy(x, sigma):
        rows.append(len(x))
        return shrink(x, sigma)

    noise = draw(1, 2, 5, *SHAPE, seed=1)
    result = rollout(spy, draw(2, 1, *SHAPE), noise, schedule)
    assert rows == [2, 10, 10, 10]  # the first step runs once per context
    assert result.latents.shape == (2, 5, *SHAPE) and result.steps[0].x.shape == (2, 1, *SHAPE)
    assert (result.latents[:, 0] - result.latents[:, 1]).abs().mean() > 0.01
    still = rollout(shrink, draw(2, 1, *SHAPE), noise, hybrid_schedule(karras_sigmas(4, 0.02, 20.0), eta=1e-9))
    torch.testing.assert_close(still.latents[:, 0], still.latents[:, 1])
    own = rollout(shrink, draw(2, 1, *SHAPE).expand(-1, 5, -1, -1, -1, -1), noise, schedule)
    torch.testing.assert_close(own.latents, result.latents)


def test_rollout_has_no_graph_but_can_be_saved_for_one():
    weight = torch.ones(1, requires_grad=True, dtype=torch.float64)
    result = rollout(
        lambda x, s: weight * x, draw(1, 1, *SHAPE), draw(1, 1, 2, *SHAPE), hybrid_schedule(karras_sigmas(3, 0.1, 5))
    )
    assert not result.latents.requires_grad
    (weight * result.latents).sum().backward()  # an inference tensor would refuse
    assert weight.grad.isfinite()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind, eta", [("ancestral", 1.0), ("drift", 0.3)])
def test_log_ratio_is_the_difference_of_log_probabilities(reduction, kind, eta):
    for transition in hybrid_schedule(karras_sigmas(6, 0.02, 20.0), range(5), kind, eta)[:-1]:
        x, noise = draw(2, 1, *SHAPE) * transition.sigma, draw(2, 4, *SHAPE, seed=1)
        old, new = draw(2, 1, *SHAPE, seed=2), draw(2, 1, *SHAPE, seed=3)
        means = [move(x, clean, transition) for clean in (old, new)]
        sample = means[0] + transition.std * noise
        before, after = (log_probability(sample, m, transition.std, reduction) for m in means)
        step = Step(transition, x, old, noise)
        torch.testing.assert_close(log_ratio(step, new, reduction), after - before, atol=1e-9, rtol=1e-9)
        assert (log_ratio(step, old, reduction) == 0).all()
        # the divergence is the mean of minus the log-ratio over fresh noise
        many = draw(2, 20_000, *SHAPE, seed=4).float()
        fresh = log_ratio(Step(transition, x, old, many), new, reduction).mean(1)
        kl = gaussian_kl(new, old, transition, reduction)[:, 0]
        torch.testing.assert_close(-fresh, kl, rtol=0.1, atol=0.05 * kl.sqrt().max().item())


def test_log_probability_is_that_of_torch():
    sample, mean = draw(5, *SHAPE), draw(5, *SHAPE, seed=1)
    theirs = torch.distributions.Normal(mean, 0.7).log_prob(sample)
    torch.testing.assert_close(log_probability(sample, mean, 0.7), theirs.mean((-3, -2, -1)))
    torch.testing.assert_close(log_probability(sample, mean, 0.7, "sum"), theirs.sum((-3, -2, -1)))


def test_noise_of_a_context_does_not_depend_on_its_batch():
    whole = context_noise(range(6), (3, 50, 50), 1, 2)
    assert whole.shape == (6, 3, 50, 50) and whole.dtype == torch.float32
    torch.testing.assert_close(torch.cat([context_noise([i], (3, 50, 50), 1, 2) for i in range(6)]), whole)
    torch.testing.assert_close(context_noise(torch.tensor([4, 1]), (3, 50, 50), 1, 2), whole[[4, 1]])
    others = torch.cat([whole, context_noise(range(6), (3, 50, 50), 1, 3), context_noise(range(6), (3, 50, 50), 2, 2)])
    correlation = torch.corrcoef(others.flatten(1)) - torch.eye(18)
    assert correlation.abs().max() < 0.06  # independent: 1 / sqrt(7500) is 0.012
    assert abs(whole.mean()) < 0.03 and abs(whole.std() - 1) < 0.03


def test_errors_name_the_culprit():
    sigmas = karras_sigmas(4, 0.1, 5.0)
    for bad in ([3], [4], [-1], [0, 3]):
        with pytest.raises(ValueError, match="cannot be stochastic"):
            hybrid_schedule(sigmas, bad)
    with pytest.raises(ValueError, match="eta"):
        hybrid_schedule(sigmas, eta=0)
    with pytest.raises(ValueError, match="sigma_min < sigma_max"):
        karras_sigmas(4, 5.0, 0.1)
    with pytest.raises(ValueError, match="standard deviation is 0"):
        log_probability(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0.0)
    with pytest.raises(ValueError, match="1 stochastic steps, but 0 noise"):
        integrate(shrink, draw(1, 1, *SHAPE), (), hybrid_schedule(sigmas))
