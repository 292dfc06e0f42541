"""Client losses against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modules.fedhpro.losses import class_similarity, client_margin, hpal_loss, hpcl_loss


def batch(seed, b=7, classes=5, per_class=3, dim=12):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(b, dim, generator=g, dtype=torch.float64).relu()
    return z, torch.randint(0, classes, (b,), generator=g), torch.randn(classes, per_class, dim, generator=g).double()


def test_similarity_is_the_mean_cosine():
    z, _, s = batch(0)
    expected = torch.stack([F.cosine_similarity(z[:, None], s[c][None], dim=-1).mean(1) for c in range(5)], dim=1)
    torch.testing.assert_close(class_similarity(z, s), expected)


@given(seed=st.integers(0, 10**6), margin=st.floats(0, 0.5), tau=st.floats(0.05, 1))
@settings(max_examples=30, deadline=None)
def test_contrast_equals_the_printed_formulas(seed, margin, tau):
    z, labels, s = batch(seed)
    sim = class_similarity(z, s)
    others = F.one_hot(labels, 5) == 0
    own = sim.gather(1, labels[:, None])
    paper = torch.log(1 + (((sim + margin) / tau).exp() * others).sum(1) / (own / tau).exp().squeeze(1))
    code = -torch.log((own / tau).exp().squeeze(1) / ((sim / tau).exp().sum(1) + margin))
    torch.testing.assert_close(hpcl_loss(z, labels, s, margin, tau, reduction="none"), paper)
    torch.testing.assert_close(hpcl_loss(z, labels, s, margin, tau), paper.mean())
    torch.testing.assert_close(hpcl_loss(z, labels, s, margin, tau, "code", reduction="none"), code)
    torch.testing.assert_close(hpcl_loss(z, labels, s, margin, tau, "code"), code.mean() / len(z))
    torch.testing.assert_close(hpcl_loss(z, labels, s, margin, tau, divide_again=True), paper.mean() / len(z))
    torch.testing.assert_close(hpcl_loss(z, labels, s, margin, tau, "code", divide_again=False), code.mean())


def test_contrast_without_margin_is_cross_entropy():
    z, labels, s = batch(1)
    torch.testing.assert_close(
        hpcl_loss(z, labels, s, 0.0, 0.05), F.cross_entropy(class_similarity(z, s) / 0.05, labels)
    )


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_contrast_is_finite_for_a_huge_margin(variant):
    z, labels, s = batch(2)
    z.requires_grad_()
    loss = hpcl_loss(z, labels, s, 100.0, 0.05, variant)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, z)[0].isfinite().all()


def test_unknown_variant():
    z, labels, s = batch(2)
    with pytest.raises(ValueError, match="'code'"):
        hpcl_loss(z, labels, s, variant="both")


def test_normalised_alignment_is_one_minus_cosine_over_d():
    z, labels, s = batch(3)
    cos = F.cosine_similarity(z, s.mean(1)[labels], dim=1)
    torch.testing.assert_close(hpal_loss(z, labels, s, normalize=True), ((1 - cos) / 12).mean(), atol=1e-9, rtol=1e-9)


def test_raw_alignment_is_huber():
    z, labels, s = batch(4)
    u = 3 * z - s.mean(1)[labels]
    expected = torch.where(u.abs() <= 1, u**2 / 2, u.abs() - 0.5).mean()
    assert (u.abs() > 1).any()
    torch.testing.assert_close(hpal_loss(3 * z, labels, s), expected)


def test_margin_counts_ordered_pairs_of_present_classes():
    z = torch.tensor([[0.0, 0], [2, 0], [1, 3], [5, 0]])
    labels = torch.tensor([0, 0, 2, 3])  # means (1, 0), (1, 3), (5, 0): distances 3, 4, 5
    assert client_margin(z, labels, 5).item() == pytest.approx(2 * 12 / 16)
    # inner products 1, 5, 5
    assert client_margin(z, labels, 5, "inner").item() == pytest.approx(2 * 11 / 16)
    # unit vectors (1, 0), (0.316, 0.949), (1, 0)
    gap = ((1 - 10**-0.5) ** 2 + 0.9) ** 0.5
    assert client_margin(z, labels, 5, normalize=True).item() == pytest.approx(2 * 2 * gap / 16, rel=1e-5)


def test_margin_of_one_class_is_zero():
    assert client_margin(torch.randn(4, 3), torch.ones(4, dtype=torch.long), 5) == 0


def test_unknown_margin():
    with pytest.raises(ValueError, match="'inner'"):
        client_margin(torch.randn(4, 3), torch.arange(4), 5, "cosine")
