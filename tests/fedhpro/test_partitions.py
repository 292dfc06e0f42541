"""Partitions: every index once, and what each promises about its parts."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.partitions import (
    by_domain,
    deal_held_out,
    dirichlet,
    dirichlet_balanced,
    even,
    long_tail,
    long_tail_counts,
    quantity,
    shards,
)

LABELS = np.random.default_rng(0).integers(0, 7, 600)
MAKERS = {
    "dirichlet": lambda k, seed: dirichlet(LABELS, k, 0.3, seed),
    "dirichlet_balanced": lambda k, seed: dirichlet_balanced(LABELS, k, 0.5, seed),
    "shards": lambda k, seed: shards(LABELS, k, 2, seed),
    "quantity": lambda k, seed: quantity(len(LABELS), k, 0.5, seed),
    "even": lambda k, seed: even(len(LABELS), k, seed),
    "domain": lambda k, seed: by_domain(LABELS, [k // 7 + (d < k % 7) for d in range(7)], seed),
}


@pytest.mark.parametrize("kind", MAKERS)
@given(clients=st.integers(7, 33), seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_every_index_once_and_reproducible(kind, clients, seed):
    parts = MAKERS[kind](clients, seed)
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all(np.array_equal(a, b) for a, b in zip(parts, MAKERS[kind](clients, seed), strict=True))
    sizes = [len(p) for p in parts]
    if kind in ("dirichlet_balanced", "even"):
        assert max(sizes) - min(sizes) <= 1
    if kind == "shards":
        assert max(len(np.unique(LABELS[p])) for p in parts) <= 2 * 2  # a piece may span two classes
    if kind == "domain":
        assert all(len(np.unique(LABELS[p])) == 1 for p in parts)


def test_seeds_differ():
    assert not np.array_equal(dirichlet(LABELS, 7, 0.5, 0)[0], dirichlet(LABELS, 7, 0.5, 1)[0])


def test_small_alpha_is_more_skewed():
    def classes_held(alpha):
        return np.mean([len(np.unique(LABELS[p])) for p in dirichlet(LABELS, 10, alpha, 0)])

    assert classes_held(0.05) < classes_held(0.5) < classes_held(100)


def test_long_tail_of_cifar10():
    counts = long_tail_counts(5000, 10, 100)
    assert counts == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50] and sum(counts) == 12_406


def test_long_tail_keeps_those_counts():
    labels = np.repeat(np.arange(5), 40)
    kept = long_tail(labels, 10, seed=3)
    assert np.bincount(labels[kept]).tolist() == long_tail_counts(40, 5, 10)
    assert len(np.unique(kept)) == len(kept)


def test_long_tail_of_an_unbalanced_set_fits():
    labels = np.repeat([0, 1, 2], [4, 10, 10])
    assert np.bincount(labels[long_tail(labels, 4, 0)]).tolist() == [4, 2, 1]


@given(alpha=st.floats(0, 1e9, exclude_min=True), clients=st.integers(1, 12), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_any_alpha_deals_every_index_once(alpha, clients, seed):
    for parts in (dirichlet(LABELS, clients, alpha, seed), quantity(len(LABELS), clients, alpha, seed)):
        assert len(parts) == clients
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@given(alpha=st.floats(max_value=0) | st.floats(min_value=1e9, exclude_min=True) | st.just(float("nan")))
@settings(max_examples=20, deadline=None)
def test_other_alphas_are_refused(alpha):
    for deal in (
        lambda: dirichlet(LABELS, 4, alpha, 0),
        lambda: dirichlet_balanced(LABELS, 4, alpha, 0),
        lambda: quantity(len(LABELS), 4, alpha, 0),
    ):
        with pytest.raises(ValueError, match="alpha is .*: give a number above 0"):
            deal()


@given(rho=st.floats(1, 1e6), classes=st.integers(2, 12), largest=st.floats(1, 1e5))
@settings(max_examples=30, deadline=None)
def test_a_tail_falls_by_rho(rho, classes, largest):
    counts = long_tail_counts(largest, classes, rho)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == int(largest) and abs(counts[-1] - largest / rho) <= 1


@pytest.mark.parametrize("rho", [0.5, 0, -1, float("nan"), float("inf")])
def test_other_tails_are_refused(rho):
    with pytest.raises(ValueError, match="long_tail is .*: give at least 1"):
        long_tail(LABELS, rho, 0)


def test_impossible_partitions_say_so():
    with pytest.raises(ValueError, match="long_tail needs at least 2 classes"):
        long_tail(np.zeros(5, dtype=int), 10, 0)
    with pytest.raises(ValueError, match="classes_per_client is 0"):
        shards(LABELS, 4, 0, 0)
    with pytest.raises(ValueError, match="use fewer clients"):
        dirichlet_balanced(np.zeros(3, dtype=int), 4, 0.5, 0)
    with pytest.raises(ValueError, match="raise alpha"), warnings.catch_warnings():
        warnings.simplefilter("error")
        dirichlet_balanced(np.zeros(100, dtype=int), 10, 0.001, 0)


def test_held_out_images_go_to_clients_that_hold_their_kind():
    clients = [np.array([0] * 30 + [1] * 10), np.array([1] * 30), np.array([], int)]
    kinds = np.array([0] * 50 + [1] * 400 + [2] * 5)
    owner = deal_held_out(kinds, clients, 0)
    assert (owner[kinds == 0] == 0).all() and (owner[kinds == 2] == -1).all()
    shares = np.bincount(owner[kinds == 1], minlength=3) / 400
    assert shares[2] == 0 and 0.18 < shares[0] < 0.32  # a quarter expected, 3 standard deviations
    assert np.array_equal(owner, deal_held_out(kinds, clients, 0))
    assert not np.array_equal(owner, deal_held_out(kinds, clients, 1))
