"""Class gradients and matching against autograd."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modules.fedhpro.matching import (
    class_gradients,
    head_gradients,
    match_features,
    match_hyper_prototypes,
    matching_distance,
    matching_slope,
    retrain_head,
)

DISTANCES = ("cos", "cos_eps", "coord", "mse")


def problem(seed, classes=6, per_class=4, dim=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)  # noqa: E731
    return draw(classes, per_class, dim), 0.5 * draw(classes, dim), 0.1 * draw(classes), draw(classes, dim)


def matching_loss(s, classes, weight, bias, targets, distance):
    own = F.one_hot(classes, len(weight)).to(s.dtype)
    losses, slope = matching_slope(s @ weight.T + bias, own, weight, targets, distance)
    return losses, slope @ weight


def printed_distance(b, a, kind):
    """The distances as they are printed, for autograd."""
    size = {"cos": 0, "cos_eps": 1e-6}
    if kind in size:
        return 1 - (a * b).sum() / (a.norm() * b.norm() + size[kind])
    return (a - b).square().sum() if kind == "mse" else (1 - a * b / ((a * b).abs() + 1e-6)).sum()


def double_backward(s, weight, bias, targets, classes, distance):
    """The loss and its gradient as the paper's Eq. 6 to 8 read, with a second derivative."""
    s = s.clone().requires_grad_()
    losses = []
    for row, c in enumerate(classes.tolist()):
        inner = F.cross_entropy(s[row] @ weight.T + bias, torch.full((s.shape[1],), c))
        (gradient,) = torch.autograd.grad(inner, s, create_graph=True)
        losses.append(printed_distance(gradient[row].mean(0), targets[row], distance))
    losses = torch.stack(losses)
    return losses.detach(), torch.autograd.grad(losses.sum(), s)[0]


@pytest.mark.parametrize("distance", DISTANCES)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 7), per_class=st.integers(1, 5), dim=st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_closed_form_equals_double_backward(distance, seed, classes, per_class, dim):
    s, weight, bias, targets = problem(seed, classes, per_class, dim)
    chosen = torch.randperm(classes, generator=torch.Generator().manual_seed(seed))[: max(1, classes - 1)]
    loss, gradient = matching_loss(s[chosen], chosen, weight, bias, targets[chosen], distance)
    expected_loss, expected = double_backward(s[chosen], weight, bias, targets[chosen], chosen, distance)
    torch.testing.assert_close(loss, expected_loss, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-6)


def test_float32_equals_double_backward():
    s, weight, bias, targets = problem(0, 10, 5, 64, torch.float32)
    classes = torch.arange(10)
    _, gradient = matching_loss(s, classes, weight, bias, targets, "cos")
    torch.testing.assert_close(
        gradient, double_backward(s, weight, bias, targets, classes, "cos")[1], atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("distance", DISTANCES)
def test_absent_classes_stay_bit_for_bit(distance, optimizer):
    s, weight, bias, targets = problem(1)
    present = torch.tensor([True, False, True, False, True, True])
    before = s.clone()
    new, trace = match_hyper_prototypes(s, weight, bias, targets, present, 7, 0.1, distance, optimizer)
    assert torch.equal(s, before), "the input must not change"
    assert torch.equal(new[~present], s[~present])
    assert not torch.equal(new[present], s[present])
    assert trace.shape == (8,)


@pytest.mark.parametrize(("distance", "lr"), [("cos", 0.1), ("cos_eps", 0.1), ("mse", 0.1)])
def test_loss_falls(distance, lr):
    s, weight, bias, targets = problem(2)
    _, trace = match_hyper_prototypes(s, weight, bias, targets, torch.ones(6, dtype=torch.bool), 30, lr, distance)
    assert (trace.diff() <= 0).all()


def test_no_class_present():
    s, weight, bias, targets = problem(3)
    new, trace = match_hyper_prototypes(s, weight, bias, targets, torch.zeros(6, dtype=torch.bool))
    assert torch.equal(new, s)
    assert trace.eq(0).all()


@pytest.mark.parametrize("distance", DISTANCES)
def test_zero_target_is_finite(distance):
    s, weight, bias, targets = problem(4)
    loss, gradient = matching_loss(s, torch.arange(6), weight, bias, torch.zeros_like(targets), distance)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_unknown_distance():
    with pytest.raises(ValueError, match="cos_eps"):
        matching_distance(torch.ones(1, 2), torch.ones(1, 2), "euclid")


def test_class_gradients_against_autograd():
    g = torch.Generator().manual_seed(5)
    z = torch.randn(30, 8, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 4, (30,), generator=g)  # class 4 is absent
    weight = torch.randn(5, 8, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, generator=g, dtype=torch.float64, requires_grad=True)
    gradients, counts = class_gradients(z, labels, weight.detach(), bias.detach())
    for_weight, for_bias = head_gradients(z, labels, weight.detach(), bias.detach())
    halves = [
        class_gradients(z[part], labels[part], weight.detach(), bias.detach())
        for part in ([*range(9)], [*range(9, 30)])
    ]
    again, _ = class_gradients(z, labels, weight.detach(), bias.detach(), divide_again=True)
    for c in range(5):
        own = z[labels == c].requires_grad_()
        assert counts[c] == len(own)
        if not len(own):
            assert gradients[c].eq(0).all() and for_weight[c].eq(0).all() and for_bias[c].eq(0).all()
            continue
        loss = F.cross_entropy(own @ weight.T + bias, torch.full((len(own),), c))
        by_z, by_weight, by_bias = torch.autograd.grad(loss, (own, weight, bias))
        torch.testing.assert_close(gradients[c], by_z.sum(0))  # of the mean loss, so the sum is Eq. 5's mean
        torch.testing.assert_close(again[c], by_z.mean(0))
        torch.testing.assert_close(for_weight[c], by_weight)
        torch.testing.assert_close(for_bias[c], by_bias)
    joined = sum(g * n[:, None] for g, n in halves) / counts.clamp(min=1)[:, None]
    torch.testing.assert_close(joined, gradients)


def test_match_features_falls_and_leaves_absent_classes():
    g = torch.Generator().manual_seed(6)
    z = torch.randn(200, 8, generator=g)
    labels = torch.randint(0, 3, (200,), generator=g)
    z[torch.arange(200), labels] += 3
    weight, bias = torch.randn(4, 8, generator=g), torch.zeros(4)
    targets = head_gradients(z, labels, weight, bias)
    present = torch.tensor([True, True, True, False])
    start = torch.randn(4, 10, 8, generator=g)

    def distance(features):
        made = head_gradients(features[:3].flatten(0, 1), torch.arange(3).repeat_interleave(10), weight, bias)
        return sum((1 - F.cosine_similarity(a[:3], b[:3], dim=-1)).sum() for a, b in zip(made, targets, strict=True))

    end = match_features(start, weight, bias, *targets, present, steps=50)
    assert torch.equal(end[3], start[3])
    assert distance(end) < 0.5 * distance(start)


def test_match_features_steps_down_the_printed_distance():
    g = torch.Generator().manual_seed(9)
    weight, bias, start = torch.randn(3, 5, generator=g), torch.randn(3, generator=g), torch.randn(3, 4, 5, generator=g)
    targets = torch.randn(3, 3, 5, generator=g), torch.randn(3, 3, generator=g)
    z = start.clone().requires_grad_()
    distance = torch.zeros(())
    for c in range(3):
        head = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        loss = F.cross_entropy(F.linear(z[c], *head), torch.full((4,), c))
        for made, target in zip(torch.autograd.grad(loss, head, create_graph=True), targets, strict=True):
            distance = distance + (1 - F.cosine_similarity(made, target[c], dim=-1)).sum()
    (slope,) = torch.autograd.grad(distance, z)
    end = match_features(start, weight, bias, *targets, torch.ones(3, dtype=torch.bool), steps=1, lr=0.1)
    torch.testing.assert_close(end, start - 0.1 * slope)


def test_unknown_optimizer_is_refused():
    s, weight, bias, targets = problem(0)
    with pytest.raises(ValueError, match="optimizer is one of sgd, adam, not 'adamw'"):
        match_hyper_prototypes(s, weight, bias, targets, torch.ones(6, dtype=torch.bool), optimizer="adamw")


def test_retrained_head_separates_the_features_and_is_reproducible():
    g = torch.Generator().manual_seed(7)
    features = torch.randn(3, 20, 6, generator=g) + 4 * torch.eye(3, 6)[:, None]
    weight, bias = retrain_head(features, torch.Generator().manual_seed(1))
    right = (features @ weight.T + bias).argmax(-1) == torch.arange(3)[:, None]
    assert right.float().mean() > 0.95
    assert torch.equal(weight, retrain_head(features, torch.Generator().manual_seed(1))[0])


def test_retrained_head_takes_the_steps_of_sgd():
    features = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(8))
    weight, bias = retrain_head(features, torch.Generator().manual_seed(2), epochs=0)
    head = torch.nn.Linear(4, 2)
    head.weight.data.copy_(weight)
    head.bias.data.copy_(bias)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    F.cross_entropy(head(features.flatten(0, 1)), torch.tensor([0, 0, 0, 1, 1, 1])).backward()
    optimizer.step()
    after = retrain_head(features, torch.Generator().manual_seed(2), epochs=1, batch_size=6)
    torch.testing.assert_close(after[0], head.weight.data)
    torch.testing.assert_close(after[1], head.bias.data)
