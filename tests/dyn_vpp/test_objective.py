import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_modules.dyn_vpp.objective import (
    clipped_objective,
    denoising_loss,
    group_advantages,
    micro_batches,
    pathwise_loss,
    policy_loss,
)
from lightning_modules.dyn_vpp.sampler import hybrid_schedule, karras_sigmas, rollout

B, G, F = 3, 4, 5
SHAPE = (F, 2, 3, 3)
SCHEDULE = hybrid_schedule(karras_sigmas(4, 0.05, 10.0))


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Linear(nn.Module):
    """clean = x W over channels: a policy whose gradient can be written down."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(0.1 * draw(2, 2, seed=9, dtype=dtype))

    def forward(self, x, sigma):
        return torch.einsum("nfchw,cd->nfdhw", x, self.weight)


def sample(policy, schedule=SCHEDULE, shared=True, b=B, g=G):
    start = draw(b, 1, *SHAPE, seed=1)
    stochastic = sum(t.std > 0 for t in schedule)
    return rollout(
        policy, start if shared else start.repeat(1, g, 1, 1, 1, 1), draw(stochastic, b, g, *SHAPE), schedule
    )


def gradient(policy, parts, **options):
    policy.zero_grad()
    for part in parts:
        (part.weight * policy_loss(policy, part.step, part.advantages, **options).loss).backward()
    return policy.weight.grad.clone()


# advantages


@given(
    b=st.integers(1, 4),
    g=st.integers(2, 6),
    f=st.integers(1, 4),
    seed=st.integers(0, 99),
    holes=st.floats(0, 0.5),
    scale=st.sampled_from([1e-2, 1.0, 1e3]),
)
@settings(max_examples=60, deadline=None)
def test_advantages_equal_a_loop_over_finite_rewards(b, g, f, seed, holes, scale):
    rewards = scale * draw(b, g, f, seed=seed)
    mask = torch.rand(b, g, f, generator=torch.Generator().manual_seed(seed)) < holes
    rewards[mask] = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)[seed % 3]
    result = group_advantages(rewards, bound=1.5)
    assert result.nonfinite == mask.sum()
    degenerate = 0
    for i in range(b):
        for k in range(f):
            good = ~mask[i, :, k]
            expected = torch.zeros(g, dtype=torch.float64)
            values = rewards[i, good, k]
            if len(values) > 1 and values.std() >= 1e-5:
                expected[good] = ((values - values.mean()) / (values.std() + 1e-8)).clamp(-1.5, 1.5)
            else:
                degenerate += 1
            torch.testing.assert_close(result.values[i, :, k], expected, atol=1e-9, rtol=1e-9)
    assert result.zero_std_fraction == pytest.approx(degenerate / (b * f))


def test_contexts_do_not_mix():
    rewards = draw(B, G, F)
    together = group_advantages(rewards).values
    torch.testing.assert_close(together, torch.cat([group_advantages(r[None]).values for r in rewards]))
    torch.testing.assert_close(group_advantages(rewards.flip(0)).values, together.flip(0))
    free = group_advantages(rewards, bound=math.inf).values
    assert free.mean(1).abs().max() < 1e-12
    shifted = group_advantages(rewards + 10 * draw(B, 1, F, seed=5), bound=math.inf).values
    torch.testing.assert_close(shifted, free)


def test_baselines_and_scales():
    rewards = draw(B, G, F) + 3 * draw(B, 1, 1, seed=1)
    centred = rewards - rewards.mean(1, keepdim=True)
    options = {"bound": math.inf, "eps": 0.0}
    torch.testing.assert_close(group_advantages(rewards, scale="none", **options).values, centred)
    batch_std = rewards.flatten(0, 1).std(0)
    torch.testing.assert_close(group_advantages(rewards, scale="batch", **options).values, centred / batch_std)
    ddpo = group_advantages(rewards, baseline="batch", scale="batch", **options).values
    torch.testing.assert_close(ddpo, (rewards - rewards.mean((0, 1))) / batch_std)
    one = rewards[:, :1]
    assert group_advantages(one, baseline="batch", scale="batch", **options).values.shape == (B, 1, F)


def test_keep_takes_the_best_and_the_worst():
    rewards = torch.tensor([[5.0, 1.0, 3.0, 2.0, 4.0, math.nan]])[..., None].double()
    values = group_advantages(rewards, keep=2, scale="none", bound=math.inf).values.flatten()
    torch.testing.assert_close(values, torch.tensor([2.0, -2.0, 0, 0, 0, 0]).double() * 3)
    full = group_advantages(rewards, scale="none", bound=math.inf)
    torch.testing.assert_close(group_advantages(rewards, keep=6, scale="none", bound=math.inf).values, full.values)


def test_advantage_errors():
    with pytest.raises(ValueError, match="group of 1"):
        group_advantages(draw(4, 1, F))
    for keep in (3, 0, G + 2):
        with pytest.raises(ValueError, match="even number"):
            group_advantages(draw(B, G, F), keep=keep)


# objective


@given(
    r=st.floats(0.3, 3).filter(lambda r: min(abs(r - 0.8), abs(r - 1.2)) > 1e-6),  # a kink has no gradient
    a=st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3),
)
@settings(max_examples=60, deadline=None)
def test_clip_never_rewards_going_further(r, a):
    logr = torch.tensor(math.log(r), dtype=torch.float64, requires_grad=True)
    loss = clipped_objective(logr, torch.tensor(a, dtype=torch.float64), 0.2)
    assert loss.item() == pytest.approx(max(-a * r, -a * min(max(r, 0.8), 1.2)))
    loss.backward()
    overshot = (r > 1.2 and a > 0) or (r < 0.8 and a < 0)
    assert logr.grad.item() == pytest.approx(0 if overshot else -a * r)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rescale", [False, True])
def test_gradient_is_the_analytic_policy_gradient(reduction, rescale):
    policy = Linear()
    result = sample(policy)
    advantages = group_advantages(draw(B, G, F, seed=3)).values
    ours = gradient(policy, micro_batches(result.steps, advantages), reduction=reduction, rescale=rescale)
    # d logp / d W = leverage / std * x (outer) noise, summed or averaged over c h w; the loss is -mean A logp
    (step,) = result.steps
    outer = torch.einsum("bgf,bfchw,bgfdhw->cd", advantages, step.x[:, 0], step.noise)
    factor = 1.0 if rescale else step.transition.leverage / step.transition.std
    elements = B * G * F * (math.prod(SHAPE[1:]) if reduction == "mean" else 1)
    torch.testing.assert_close(ours, -factor * outer / elements, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("shared", [True, False])
def test_ratio_is_one_before_the_first_update(shared):
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Conv3d(F, 16, 3, padding=1), nn.SiLU(), nn.Conv3d(16, F, 3, padding=1))
    start, noise = draw(B, 1 if shared else G, *SHAPE, dtype=torch.float32), draw(1, B, G, *SHAPE, dtype=torch.float32)
    result = rollout(lambda x, s: policy(x / s), start, noise, SCHEDULE)
    parts = micro_batches(result.steps, draw(B, G, F, dtype=torch.float32), size=2)
    assert len(parts) == (2 if shared else 6)
    for part in parts:  # other batch sizes than in the rollout
        loss = policy_loss(lambda x, s: policy(x / s), part.step, part.advantages)
        assert loss.ratio_error < 1e-6 and loss.clip_low == loss.clip_high == 0


@pytest.mark.parametrize("size", [None, 1, 2, 5])
def test_shared_first_step_and_micro_batches_leave_the_gradient_alone(size):
    policy = Linear()
    advantages = group_advantages(draw(B, G, F, seed=3)).values
    short, long = sample(policy).steps, sample(policy, shared=False).steps
    whole = gradient(policy, micro_batches(short, advantages))
    policy.weight.data += 0.01 * draw(2, 2, seed=4)  # away from ratio 1 too
    moved = gradient(policy, micro_batches(short, advantages), clip=1e-3)
    assert (whole - moved).abs().max() > 1e-6
    for steps in (short, long):
        parts = micro_batches(steps, advantages, size)
        assert sum(p.weight for p in parts) == pytest.approx(1)
        torch.testing.assert_close(gradient(policy, parts, clip=1e-3), moved, atol=1e-12, rtol=1e-9)


def test_ranks_with_fewer_contexts_do_as_many_passes():
    policy = Linear()
    advantages = group_advantages(draw(B, G, F, seed=3)).values
    steps = sample(policy).steps
    parts = micro_batches(steps, advantages, size=1, passes=5)
    assert [p.weight for p in parts] == pytest.approx([1 / 3] * 3 + [0, 0])
    torch.testing.assert_close(gradient(policy, parts), gradient(policy, micro_batches(steps, advantages)))
    with pytest.raises(ValueError, match="need 3 passes"):
        micro_batches(steps, advantages, size=1, passes=2)


def test_rows_know_their_context():
    steps = sample(Linear(), shared=False).steps
    parts = micro_batches(steps, draw(B, G, F), size=5)
    assert torch.cat([p.contexts for p in parts]).tolist() == [b for b in range(B) for _ in range(G)]
    assert [p.contexts.tolist() for p in micro_batches(sample(Linear()).steps, draw(B, G, F), size=2)] == [[0, 1], [2]]


def test_several_stochastic_steps():
    policy = Linear()
    schedule = hybrid_schedule(karras_sigmas(4, 0.05, 10.0), [0, 2], "drift", 0.3)
    result = sample(policy, schedule)
    assert [s.x.shape[1] for s in result.steps] == [1, G] and result.steps[1].transition is schedule[2]
    advantages = group_advantages(draw(B, G, F, seed=3)).values
    both = gradient(policy, micro_batches(result.steps, advantages, size=2))
    each = [gradient(policy, micro_batches([s], advantages)) for s in result.steps]
    torch.testing.assert_close(both, (each[0] + each[1]) / 2)


def test_whole_clip_advantages_and_skipped_frames():
    policy = Linear()
    (step,) = sample(policy).steps
    rewards = draw(B, G, F, seed=3)
    per_clip = group_advantages(rewards.mean(-1, keepdim=True)).values
    spread = per_clip.expand(-1, -1, F)
    whole = gradient(policy, micro_batches([step], per_clip))
    torch.testing.assert_close(whole, gradient(policy, micro_batches([step], spread)))
    # leaving out frame 0 is a mean over the other frames
    advantages = group_advantages(rewards).values
    silent = advantages.clone()
    silent[..., 0] = 0
    skipped = gradient(policy, micro_batches([step], advantages), skip_frames=1)
    torch.testing.assert_close(skipped, gradient(policy, micro_batches([step], silent)) * F / (F - 1))


def test_a_small_step_makes_the_best_sample_more_likely():
    policy = Linear()
    result = sample(policy)
    rewards = draw(B, G, F, seed=3)
    advantages = group_advantages(rewards).values
    policy.weight.data -= 1e-3 * gradient(policy, micro_batches(result.steps, advantages))
    loss = policy_loss(policy, result.steps[0], advantages)
    assert loss.loss < policy_loss(Linear(), result.steps[0], advantages).loss


def test_anchors_pull_to_the_reference():
    policy, (step,) = Linear(), sample(Linear()).steps
    none = torch.zeros(B, G, F, dtype=torch.float64)
    at_home = policy_loss(policy, step, none, reference=step.clean, kl_weight=1.0, drift_weight=1.0)
    assert at_home.loss == at_home.kl == at_home.drift == 0
    policy.weight.data += 0.1
    away = policy_loss(policy, step, none, reference=step.clean, kl_weight=2.0, drift_weight=3.0)
    shift = policy(step.x[:, 0], 0) - step.clean[:, 0]
    torch.testing.assert_close(away.drift, shift.square().mean())
    leverage, std = step.transition.leverage, step.transition.std
    torch.testing.assert_close(away.kl, away.drift * leverage**2 / (2 * std**2))
    torch.testing.assert_close(away.loss.detach(), 2 * away.kl + 3 * away.drift)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(policy, step, none, kl_weight=1.0)


def test_denoising_loss_weighs_every_level_alike():
    latents, noise = draw(4000, 1, 1, 2, 2), draw(4000, 1, 1, 2, 2, seed=1)

    def idle(x, sigma):  # output v = 0
        return x / (sigma.view(-1, 1, 1, 1, 1) ** 2 + 1)

    for level in (0.05, 1.0, 50.0):
        sigma = torch.full((4000,), level, dtype=torch.float64)
        assert denoising_loss(idle, latents, noise, sigma).item() == pytest.approx(1, abs=0.05)
    assert denoising_loss(lambda x, s: latents, latents, noise, sigma) == 0


def test_policy_gradient_points_along_the_pathwise_gradient():
    """Mean over many samples of the score-function estimate is the derivative through the sampler."""
    policy = Linear()
    weights = draw(1, 1, *SHAPE, seed=8)

    def reward(latents):
        return (latents * weights).sum((-3, -2, -1))

    g = 40_000
    result = sample(policy, b=1, g=g)
    pathwise = torch.autograd.grad(pathwise_loss(policy, result.steps[0], SCHEDULE[1:], reward), policy.weight)[0]
    # the linear policy's own derivative, by hand: later steps multiply by a fixed matrix M
    matrix = torch.eye(2, dtype=torch.float64)
    for t in SCHEDULE[1:]:
        w = t.target / t.sigma
        matrix = matrix @ (w * torch.eye(2).double() + (1 - w) * policy.weight.detach())
    slope = torch.einsum("fdhw,cd->fchw", weights[0, 0], matrix) / F
    by_hand = -SCHEDULE[0].leverage * torch.einsum("fchw,fdhw->cd", result.steps[0].x[0, 0], slope)
    torch.testing.assert_close(pathwise, by_hand, atol=1e-9, rtol=1e-9)

    advantages = group_advantages(reward(result.latents), scale="none", bound=math.inf).values
    estimate = gradient(policy, micro_batches(result.steps, advantages), reduction="sum")
    # every frame acts on its own reward only here, so the per-frame estimate is unbiased
    assert torch.nn.functional.cosine_similarity(estimate.flatten(), pathwise.flatten(), dim=0) > 0.98
    assert (estimate.norm() / pathwise.norm()).item() == pytest.approx(1, abs=0.1)


# the sanity task


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sanity_task_raises_the_group_reward(seed):
    """Known target: the mean group reward rises within 50 iterations."""
    torch.manual_seed(seed)
    b, g, f, c, s = 8, 8, 3, 4, 8
    net = nn.Sequential(nn.Conv2d(c, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, c, 3, padding=1))
    target = torch.randn(1, 1, f, c, 1, 1).expand(b, g, -1, -1, s, s)
    frames = nn.Parameter(torch.zeros(f, c, 1, 1))
    schedule = hybrid_schedule(karras_sigmas(4, 0.05, 5.0))
    optimizer = torch.optim.Adam([*net.parameters(), frames], lr=3e-3, eps=1e-12)

    def denoise(x, sigma):
        scaled = x / math.hypot(sigma, 1)
        v = net(scaled.flatten(0, 1)).view_as(x) + frames
        return x / (sigma**2 + 1) - sigma / math.hypot(sigma, 1) * v

    history = []
    for _ in range(50):
        result = rollout(denoise, torch.randn(b, 1, f, c, s, s), torch.randn(1, b, g, f, c, s, s), schedule)
        rewards = -(result.latents - target).square().mean((-3, -2, -1))
        history.append(rewards.mean().item())
        advantages = group_advantages(rewards).values
        optimizer.zero_grad()
        for part in micro_batches(result.steps, advantages, size=4):
            (part.weight * policy_loss(denoise, part.step, part.advantages, rescale=True).loss).backward()
        optimizer.step()
    first, last = sum(history[:5]) / 5, sum(history[-5:]) / 5
    assert last > first + 0.3 * abs(first), history
