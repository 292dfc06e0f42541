import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modules.ann_snn.losses import (
    batch_mean_cka,
    cka_from_hsic,
    closed_loop_loss,
    hsic,
    layer_weights,
    linear_cka,
)


def features(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 10**6), n=st.integers(4, 12), d=st.integers(1, 20), scale=st.floats(0.01, 100))
@settings(max_examples=40, deadline=None)
def test_cka_properties(seed, n, d, scale):
    x, y = features(n, d, seed=seed), features(n, 7, seed=seed + 1)
    cka = linear_cka(x, y)
    assert -1e-12 <= cka <= 1 + 1e-12
    k, q = (float((c @ c.T).norm()) for c in (x - x.mean(0), y - y.mean(0)))

    def close(norms: float) -> dict[str, float]:
        """Tolerances: what the denominator's 1e-9 is beside the norms."""
        return {"rtol": 1e-9 + 1e-9 / norms, "atol": 1e-9}

    torch.testing.assert_close(linear_cka(x, x), torch.ones_like(cka), **close(k * k))
    rotation = torch.linalg.qr(features(d, d, seed=seed + 2))[0]
    torch.testing.assert_close(linear_cka(scale * x @ rotation + 3.0, y), cka, **close(min(1, scale**2) * k * q))
    torch.testing.assert_close(linear_cka(y, x), cka)


def test_cka_by_definition():
    x, y = features(6, 2, 3), features(6, 4, seed=1)
    h = torch.eye(6, dtype=torch.float64) - 1 / 6
    k, q = h @ x.flatten(1) @ x.flatten(1).T @ h, h @ y @ y.T @ h
    torch.testing.assert_close(linear_cka(x, y), (k * q).sum() / (k.norm() * q.norm() + 1e-9))


def test_exact_gradient_and_its_orthogonality():
    x, y = features(5, 4).requires_grad_(), features(5, 3, seed=1)
    assert torch.autograd.gradcheck(lambda z: linear_cka(z, y), x)
    assert torch.autograd.gradcheck(lambda z: linear_cka(z, y, unbiased=True), x)
    grad = torch.autograd.grad(linear_cka(x, y), x)[0]
    assert abs((grad * (x - x.mean(0))).sum()) < 1e-9  # CKA does not change with the scale of x


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("cka_grad", ["exact", "numerator_half"])
def test_silent_layer(unbiased, cka_grad):
    x = torch.zeros(6, 3, requires_grad=True)
    cka = linear_cka(x, torch.randn(6, 4), unbiased, cka_grad)
    cka.backward()
    assert cka == 0 and not x.grad.any()


def test_small_batches_inflate_the_biased_form_only():
    pairs = [(features(8, 2000, seed=s), features(8, 2000, seed=s + 100)) for s in range(20)]
    assert min(linear_cka(x, y) for x, y in pairs) > 0.9
    assert abs(sum(linear_cka(x, y, unbiased=True) for x, y in pairs) / 20) < 0.1


def test_hsic_by_sums_over_tuples():
    """HSIC_1 is the mean over distinct (i, j, q, r) of k_ij (l_ij + l_qr - 2 l_iq): brute force."""
    from itertools import permutations

    k, q = (z @ z.T for z in (features(5, 3), features(5, 2, seed=1)))
    brute = [k[a, b] * (q[a, b] + q[c, d] - 2 * q[a, c]) for a, b, c, d in permutations(range(5), 4)]
    torch.testing.assert_close(hsic(k, q)[0], torch.stack(brute).mean())
    with pytest.raises(ValueError, match="at least 4"):
        hsic(k[:3, :3], q[:3, :3])


def test_batches_are_averaged_before_the_ratio():
    terms = [
        hsic(x @ x.T, y @ y.T) for x, y in [(features(6, 3, seed=s), features(6, 3, seed=s + 9)) for s in range(3)]
    ]
    xy, xx, yy = torch.stack(terms).mean(0)
    torch.testing.assert_close(batch_mean_cka(terms), xy / (xx.abs().sqrt() * yy.abs().sqrt() + 1e-6))
    assert cka_from_hsic(torch.zeros(3)) == 0


def test_float32_under_autocast():
    x, y = torch.randn(8, 50), torch.randn(8, 40)
    expected = linear_cka(x.bfloat16().float(), y)
    with torch.autocast("cpu", torch.bfloat16):
        cka = linear_cka(x.bfloat16(), y)
    assert cka.dtype == torch.float32
    torch.testing.assert_close(cka, expected)


@given(st.lists(st.floats(-0.5, 1.2), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_layer_weights(cka):
    cka = torch.tensor(cka, dtype=torch.float64)
    weights = layer_weights(cka)
    assert (weights >= 0).all() and abs(weights.sum() - 1) < 1e-9
    torch.testing.assert_close(layer_weights(torch.full_like(cka, 0.3)), torch.full_like(cka, 1 / len(cka)))
    torch.testing.assert_close(layer_weights(torch.ones_like(cka)), torch.full_like(cka, 1 / len(cka)))


def problem():
    torch.manual_seed(0)
    logits = torch.randn(6, 5, requires_grad=True)
    student = {k: torch.randn(6, 3, 2, requires_grad=True) for k in "ab"}
    teacher = {k: torch.randn(6, 3, 2) for k in "ab"}
    return logits, torch.randn(6, 5), torch.randint(5, (6,)), student, teacher, torch.tensor([0.3, 0.7])


def test_loss_by_definition():
    logits, target, labels, student, teacher, weights = problem()
    loss = closed_loop_loss(logits, target, labels, student, teacher, weights, alpha=0.4, beta=0.3, tau=3.0)
    p, log_q = (target / 3).softmax(1), (logits / 3).log_softmax(1)
    kl = 9 * (p * (p.log() - log_q)).sum(1).mean()
    local = sum(w * (1 - linear_cka(student[k], teacher[k])) for k, w in zip("ab", weights, strict=True))
    torch.testing.assert_close(loss.global_kl, kl)
    torch.testing.assert_close(loss.task, F.cross_entropy(logits, labels))
    torch.testing.assert_close(loss.local, local)
    torch.testing.assert_close(loss.total, 0.6 * loss.task + 0.4 * (0.3 * kl + 0.7 * local))
    assert loss.cka.shape == (2,) and not loss.cka.requires_grad


def test_ends_of_alpha_and_beta():
    logits, target, labels, student, teacher, weights = problem()
    only_ce = closed_loop_loss(logits, target, labels, student, teacher, weights, alpha=0.0)
    torch.testing.assert_close(only_ce.total, F.cross_entropy(logits, labels))
    no_cka = closed_loop_loss(logits, target, labels, student, teacher, weights, beta=1.0)
    no_cka.total.backward()
    assert all(x.grad is None for x in student.values()) and no_cka.local > 0
    assert closed_loop_loss(logits, target, labels, {}, {}, torch.empty(0)).local == 0


def test_gathered_features_may_be_more_than_the_logits():
    logits, target, labels, student, teacher, weights = problem()
    half = closed_loop_loss(logits[:3], target[:3], labels[:3], student, teacher, weights)
    torch.testing.assert_close(half.local, closed_loop_loss(*problem()).local)


def test_errors():
    with pytest.raises(ValueError, match="same images"):
        linear_cka(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="numerator_half"):
        linear_cka(torch.ones(4, 2), torch.ones(4, 2), cka_grad="half")
