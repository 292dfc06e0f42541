import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modules.focal_policy.losses import (
    consistency_objective,
    dct,
    dct_matrix,
    foresight_composite_objective,
    frequency_term,
    interpolate,
    time_term,
)


def windows(b: int = 5, length: int = 12, d: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    actions, noise = torch.randn(2, b, length, d, generator=g, dtype=torch.float64)
    return actions, noise


@pytest.mark.parametrize("length", [1, 2, 5, 12, 20])
def test_dct_matrix_is_orthonormal_and_agrees_with_scipy(length):
    from scipy.fft import dct as scipy_dct

    matrix = dct_matrix(length, torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(length, dtype=torch.float64), atol=1e-12, rtol=0)
    x = torch.randn(3, length, 2, dtype=torch.float64)
    expected = torch.from_numpy(scipy_dct(x.numpy(), axis=1, norm="ortho"))
    torch.testing.assert_close(dct(x), expected, atol=1e-12, rtol=0)


def test_a_test_run_before_training_does_not_spoil_the_kept_matrix():
    """Lightning tests in inference mode, whose tensors no backward pass may use."""
    dct_matrix.cache_clear()
    x = torch.randn(1, 6, 2, requires_grad=True)
    with torch.inference_mode():
        dct(x)
    dct(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_constant_window_has_only_the_lowest_frequency():
    gap = dct(torch.ones(1, 12, 1, dtype=torch.float64))[0, :, 0]
    assert gap[0] == pytest.approx(12**0.5)
    assert gap[1:].abs().max() < 1e-12


@settings(deadline=None, max_examples=25)
@given(b=st.integers(1, 4), length=st.integers(1, 20), d=st.integers(1, 5), scale=st.floats(1e-3, 1e3))
def test_parseval_dct_l2_is_the_summed_squared_error(b, length, d, scale):
    x, y = (scale * w for w in windows(b, length, d))
    expected = (x - y).square().sum() / b
    assert float(frequency_term(x, y).mean()) == pytest.approx(float(expected), rel=1e-10)


def test_modes_relate_as_they_must():
    x, y = windows()
    l2 = frequency_term(x, y).mean()
    # Softmax weights are at most 1, and the mean over dimensions divides by d.
    assert frequency_term(x, y, "dct_softmax").mean() <= l2
    torch.testing.assert_close(frequency_term(x, y, "dct_band", band_weights=[1.0] * 12).mean(), l2)
    low = frequency_term(x, y, "dct_band", band_weights=[1.0] + [0.0] * 11).mean()
    # The lowest coefficient is the mean over steps times sqrt(l).
    torch.testing.assert_close(low, 12 * (x - y).mean(1).square().sum() / 5)
    torch.testing.assert_close(frequency_term(x, y, "dct_l1").mean(), dct(x - y).abs().sum() / 5)
    assert frequency_term(x, y, "none").mean() == 0


def test_softmax_weights_carry_no_gradient():
    x, y = windows(b=1, length=3, d=1)
    x.requires_grad_()
    frequency_term(x, y, "dct_softmax").mean().backward()
    gap = dct(x.detach() - y)
    expected = torch.einsum("kn,bkd->bnd", dct_matrix(3, torch.float64), 2 * gap * gap.square().softmax(1))
    torch.testing.assert_close(x.grad, expected)


def test_unknown_modes_and_missing_weights_say_so():
    x, y = windows()
    with pytest.raises(ValueError, match="dct_l3"):
        frequency_term(x, y, "dct_l3")
    with pytest.raises(ValueError, match="12 numbers"):
        frequency_term(x, y, "dct_band", band_weights=[1.0])
    with pytest.raises(ValueError, match="at least 0"):
        frequency_term(x, y, "dct_band", band_weights=[1.0] * 11 + [-1.0])


def test_padded_steps_do_not_count():
    x, y = windows()
    valid = torch.ones(5, 12, dtype=torch.bool)
    valid[0, 3:] = False
    valid[1] = False  # an all-padded window
    changed = torch.where(valid[:, :, None], x, x + 7)
    for term in (time_term, frequency_term):
        torch.testing.assert_close(term(changed, y, valid=valid).mean(), term(x, y, valid=valid).mean())
    expected = (x - y).square().mean(-1)[valid].mean()
    torch.testing.assert_close(time_term(x, y, valid).mean(), expected)
    # The scale does not depend on how much is padded: mean over valid elements, times l d.
    torch.testing.assert_close(frequency_term(x, y, valid=valid).mean(), 12 * 4 * expected)
    nothing = torch.zeros(5, 12, dtype=torch.bool)
    assert time_term(x, y, nothing).mean() == 0
    assert frequency_term(x, y, valid=nothing).mean() == 0


def true_velocity(actions, noise):
    return lambda x, s: actions - noise


def test_the_true_velocity_has_no_loss():
    actions, noise = windows()
    g = torch.Generator().manual_seed(1)
    tau, r = torch.rand(2, 5, generator=g, dtype=torch.float64)
    velocity = true_velocity(actions, noise)
    for terms in (
        foresight_composite_objective(velocity, actions, noise, tau, r, action_steps=4),
        consistency_objective(velocity, actions, noise, tau, r),
    ):
        for term in terms.values():
            assert term.mean() < 1e-20


def test_the_composite_objective_in_closed_form():
    """With v = u + e for constant e: F(s) = M_1 + (1 - s) e."""
    actions, noise = windows()
    tau, r = torch.full((5,), 0.3, dtype=torch.float64), torch.full((5,), 0.9, dtype=torch.float64)
    velocity = lambda x, s: actions - noise + 2.0  # noqa: E731
    terms = foresight_composite_objective(velocity, actions, noise, tau, r, action_steps=4)
    assert float(terms["time"].mean()) == pytest.approx((2 * (0.7 - 0.1)) ** 2)
    assert float(terms["freq"].mean()) == pytest.approx(12 * 4 * (2 * 0.7) ** 2)


@pytest.mark.parametrize(("start", "time_scope", "freq_scope"), [(0, "proximal", "window"), (1, "window", "proximal")])
def test_each_term_sees_only_its_scope(start, time_scope, freq_scope):
    actions, noise = windows()
    tau, r = torch.full((5,), 0.3, dtype=torch.float64), torch.full((5,), 0.9, dtype=torch.float64)
    error = torch.zeros_like(actions).requires_grad_()
    terms = foresight_composite_objective(
        lambda x, s: actions - noise + 1 + error,
        actions,
        noise,
        tau,
        r,
        action_steps=4,
        proximal_start=start,
        time_scope=time_scope,
        freq_scope=freq_scope,
    )
    for name, scope in (("time", time_scope), ("freq", freq_scope)):
        (gradient,) = torch.autograd.grad(terms[name].mean(), error, retain_graph=True)
        touched = gradient.abs().sum((0, 2)) > 0
        steps = range(start, start + 4) if scope == "proximal" else range(12)
        assert touched.nonzero().flatten().tolist() == list(steps)


def test_no_gradient_flows_through_the_anchor():
    actions, noise = windows()
    tau, r = torch.full((5,), 0.3, dtype=torch.float64), torch.full((5,), 0.9, dtype=torch.float64)
    calls = []

    def velocity(x, s):
        calls.append(torch.is_grad_enabled())
        return torch.zeros_like(x).requires_grad_()

    foresight_composite_objective(velocity, actions, noise, tau, r, action_steps=4)
    assert calls == [True, False]
    calls.clear()
    consistency_objective(velocity, actions, noise, tau, r)
    assert calls == [True, True]
    consistency_objective(velocity, actions, noise, tau, r, stop_gradient=True)
    assert calls[2:] == [True, False]


def test_consistency_objective_by_brute_force():
    actions, noise = windows(b=6, length=4, d=2)
    tau = torch.tensor([0.01, 0.3, 0.495, 0.5, 0.75, 0.995], dtype=torch.float64)
    r = (tau + 0.01).clamp(max=1)
    velocity = lambda x, s: torch.sin(3 * x) + s[:, None, None]  # noqa: E731
    terms = consistency_objective(velocity, actions, noise, tau, r)
    time = speed = 0.0
    for b, (t, u) in enumerate(zip(tau, r, strict=True)):
        end = 0.5 if t <= 0.5 else 1.0
        point = lambda s, b=b: s * actions[b : b + 1] + (1 - s) * noise[b : b + 1]  # noqa: E731
        v_t, v_u = velocity(point(t), t[None]), velocity(point(u), u[None])
        f_t = point(t) + (end - t) * v_t
        f_u = point(torch.tensor(end)) if u >= 1 else point(u) + (end - u) * v_u
        time += (f_t - f_u).square().mean() / 6
        if end - t > 1.01 * 0.01:
            speed += (v_t - v_u).square().mean() / 6
    torch.testing.assert_close(terms["time"].mean(), time)
    torch.testing.assert_close(terms["velocity"].mean(), speed)


def test_interpolation_ends_at_noise_and_data():
    actions, noise = windows(b=2)
    torch.testing.assert_close(interpolate(actions, noise, torch.zeros(2, dtype=torch.float64)), noise)
    torch.testing.assert_close(interpolate(actions, noise, torch.ones(2, dtype=torch.float64)), actions)
