import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

from datamodules import GraphPrior
from datamodules.graph_attributes import Adjacency, graph_transformer, root_causes
from datamodules.graph_prior import PaperPrior, SmallPrior, clamp_outliers, make_categorical
from datamodules.graph_structure import (
    Rejected,
    attach_preferentially,
    ball,
    block_model,
    degrees,
    expected_edges,
    geometric_graph,
    graph_statistics,
    largest_component,
    normalised_propensity,
    random_partition,
    simple_pairs,
)

REDUCED = {"nodes": [80, 160], "sparse_degree": [1.5, 10], "dense_degree": [10, 20], "features": [4, 20]}


def same(a, b) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("prior", "changes"), [("small", {}), ("paper", REDUCED), ("paper", REDUCED | {"attributes_first": 1.0})]
)
def test_graphs_are_what_the_batch_promises(prior, changes):
    data = GraphPrior(prior, changes, seed=3)
    for i in range(6):
        task = data.sample(i)
        n = len(task.x)
        assert task.x.dtype == torch.float32
        assert task.x.isfinite().all()
        assert 0 < task.n_context < n == len(task.y)
        source, target = task.edge_index
        assert (source != target).all()
        key = source * n + target
        assert len(key.unique()) == len(key)
        assert torch.equal(key.sort()[0], (target * n + source).sort()[0])
        if task.classes:
            assert task.y.dtype == torch.int64
            for part in (task.y[: task.n_context], task.y[task.n_context :]):
                assert part.unique().tolist() == list(range(task.classes))
        else:
            assert task.y.dtype == torch.float32
        if prior == "paper":
            assert task.x.shape[1] >= 4
            assert (task.x[: task.n_context] != task.x[0]).any(0).all()
            torch.testing.assert_close(task.x.mean(0), torch.zeros(task.x.shape[1]), atol=1e-3, rtol=0)


def test_a_graph_depends_on_seed_and_index_alone():
    data = GraphPrior(seed=1)
    forward = [data.sample(i) for i in range(6)]
    backward = [GraphPrior(seed=1).sample(i) for i in reversed(range(6))][::-1]
    assert all(same(a, b) for a, b in zip(forward, backward, strict=True))
    assert not same(data.sample(0), GraphPrior(seed=2).sample(0))


@pytest.mark.parametrize(("prior", "changes"), [("small", {}), ("paper", REDUCED)])
def test_workers_change_nothing(prior, changes):
    here, there = (
        GraphPrior(prior, changes, batch_size=2, graphs_per_epoch=6, num_workers=w).train_dataloader() for w in (0, 2)
    )
    for a, b in zip(here, there, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_graphs_carry_their_number():
    data = GraphPrior(batch_size=2, graphs_per_epoch=4, validation_graphs=3)
    loader = data.train_dataloader()
    assert [task.number for batch in loader for task in batch] == [0, 1, 2, 3]
    loader.sampler.set_epoch(1)
    assert [task.number for batch in loader for task in batch] == [4, 5, 6, 7]
    assert len({task.number for batch in data.val_dataloader() for task in batch}) == 3


def test_epochs_and_validation_have_their_own_graphs():
    data = GraphPrior(batch_size=2, graphs_per_epoch=4, validation_graphs=4)
    loader = data.train_dataloader()
    first = [task for batch in loader for task in batch]
    loader.sampler.set_epoch(1)
    second = [task for batch in loader for task in batch]
    loader = data.val_dataloader()
    validation = [task for batch in loader for task in batch]
    assert not any(same(a, b) for a in first for b in [*second, *validation])
    loader.sampler.set_epoch(3)  # as Lightning does, for validation too
    again = [task for batch in loader for task in batch]
    assert all(same(a, b) for a, b in zip(validation, again, strict=True))


def test_graphs_of_a_batch_share_their_size():
    data = GraphPrior(settings={"scm": 0.0, "regression": 0.0}, batch_size=4)
    sizes = [len(data.sample(i).x) for i in range(12)]
    assert [len(set(sizes[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]


def test_an_unknown_setting_is_named():
    with pytest.raises(ValueError, match="no setting node; it has nodes"):
        GraphPrior("paper", {"node": [1, 2]})


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_partition(n, parts, minimum, seed):
    n = n + parts * minimum
    sizes = random_partition(np.random.default_rng(seed), n, parts, minimum)
    assert sizes.sum() == n
    assert len(sizes) == parts
    assert sizes.min() >= minimum


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 30), st.integers(0, 200), st.integers(0, 99))
def test_simple_pairs_are_those_of_a_set(n, m, seed):
    rng = np.random.default_rng(seed)
    source, target = rng.integers(n, size=(2, m))
    expected = sorted({(min(a, b), max(a, b)) for a, b in zip(source.tolist(), target.tolist(), strict=True) if a != b})
    assert [tuple(pair) for pair in simple_pairs(source, target, n).T.tolist()] == expected


def test_largest_component():
    pairs, kept = largest_component(np.array([[0, 1, 4], [1, 2, 5]]), 6)
    assert kept.tolist() == [True, True, True, False, False, False]
    assert pairs.tolist() == [[0, 1], [1, 2]]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 25), st.integers(0, 60), st.integers(0, 99), st.data())
def test_a_ball_holds_no_node_while_a_nearer_one_is_missing(n, m, seed, data):
    rng = np.random.default_rng(seed)
    pairs = simple_pairs(*rng.integers(n, size=(2, m)), n)
    size = data.draw(st.integers(1, n))
    kept = ball(rng, pairs, n, size)
    assert len(np.unique(kept)) == size
    joined = csr_array((np.ones(pairs.shape[1]), (pairs[0], pairs[1])), shape=(n, n))
    away = np.minimum(shortest_path(joined, directed=False, unweighted=True, indices=kept[0]), n)
    assert (np.diff(away[kept]) >= 0).all()
    assert away[kept].max() <= np.delete(away, kept).min(initial=n)


def test_graphs_cut_from_larger_ones_have_a_larger_largest_class():
    def largest(balls):
        prior = SmallPrior(nodes=(150, 150), balls=balls, scm=0.0, regression=0.0)
        graphs = [prior(np.random.default_rng(i), np.random.default_rng(99 + i)) for i in range(60)]
        assert all(len(g.x) <= 150 for g in graphs)
        return np.mean([torch.bincount(g.y).max().item() / len(g.y) for g in graphs])

    assert largest(1.0) > largest(0.0) + 0.08


def test_a_cut_without_a_class_of_four_is_drawn_again():
    pairs, y = np.stack([np.arange(19), np.arange(1, 20)]), np.arange(20) // 2
    with pytest.raises(Rejected, match="no class has four nodes"):
        SmallPrior()._cut(np.random.default_rng(0), pairs, np.zeros((20, 1), np.float32), y, 20)
    x, kept = SmallPrior()._cut(np.random.default_rng(0), pairs, np.arange(20.0)[:, None], np.arange(20) // 17, 20)[1:]
    assert sorted(x[:, 0]) == list(range(17)) and set(kept) == {0}


def test_block_model_has_the_expected_edges_and_propensities():
    rng = np.random.default_rng(0)
    group = np.repeat([0, 1, 2], [20, 30, 50])
    for _ in range(3):
        state = rng.bit_generator.state
        source, target = block_model(rng, group, 2000.0, 0.1)
        rng.bit_generator.state = state
        uniforms = rng.random(2 + 3 + 3)
        expected = expected_edges(np.array([20, 30, 50]), 2000.0, 0.1, uniforms)
        rng.poisson(expected)
        weight = rng.zipf(rng.uniform(2, 3), 100).astype(float) if rng.random() < 0.5 else rng.random(100)
        propensity = normalised_propensity(weight, group)
        counted = np.zeros((3, 3))
        np.add.at(counted, (group[source], group[target]), 1)
        np.testing.assert_allclose(counted, expected, atol=5 * np.sqrt(expected.max()))
        inside = group[source] == group[target]
        assert (source[inside] != target[inside]).all()
        # Between groups, ends are drawn in proportion to the propensities.
        across = (group[source] == 0) & (group[target] == 2)
        share = np.bincount(target[across], minlength=100)[50:] / across.sum()
        np.testing.assert_allclose(share, propensity[50:], atol=5 * math.sqrt(0.25 / across.sum()))
        # Within a group, the second end is drawn among the others: P(u, v) = p_u p_v / (1 - p_u).
        p = propensity[:20]
        joint = p[:, None] * p / (1 - p[:, None])
        np.fill_diagonal(joint, 0)
        both = inside & (group[source] == 0)
        share = np.bincount(target[both], minlength=100)[:20] / both.sum()
        np.testing.assert_allclose(share, joint.sum(0), atol=5 * math.sqrt(0.25 / both.sum()))


def test_preferential_attachment_is_proportional_to_degree():
    rng = np.random.default_rng(0)
    star = np.array([[0] * 9, list(range(1, 10))])  # the centre has half of all edge ends
    hits = [attach_preferentially(rng, star, 10, 1, 1)[0, -1] == 0 for _ in range(2000)]
    assert abs(np.mean(hits) - 0.5) < 0.05
    grown = attach_preferentially(rng, star, 10, 30, 2)
    assert degrees(grown, 40)[10:].min() >= 1
    assert simple_pairs(*grown, 40).shape == grown.shape


def test_geometric_graph_joins_near_points():
    position = np.random.default_rng(0).standard_normal((60, 2))
    pairs = geometric_graph(np.random.default_rng(1), position, 6.0)
    assert pairs.shape[1] == 180
    length = np.linalg.norm(position[pairs[0]] - position[pairs[1]], axis=1)
    everyone = np.linalg.norm(position[:, None] - position, axis=2)
    assert length.mean() < 0.4 * everyone.mean()


def test_statistics_of_two_triangles():
    pairs = np.array([[0, 1, 0, 3, 4, 3], [1, 2, 2, 4, 5, 5]])
    edges = np.concatenate([pairs, pairs[::-1]], axis=1)
    found = graph_statistics(edges, np.array([0, 0, 0, 1, 1, 1]), 6)
    assert found == {"mean_degree": 2.0, "clustering": 1.0, "adjusted_homophily": 1.0}
    assert graph_statistics(edges, np.array([0, 1, 0, 1, 0, -1]), 6)["adjusted_homophily"] < 0.2
    assert math.isnan(graph_statistics(edges, np.ones(6), 6)["adjusted_homophily"])


def test_dense_and_sparse_attention_agree():
    rng = np.random.default_rng(0)
    n, d = 80, 5
    pairs = simple_pairs(*rng.integers(n, size=(2, 40)), n)
    graph = Adjacency.of(pairs, n)
    assert 16 * len(graph.matrix.indices) < n * n
    z = rng.standard_normal((n, d)).astype(np.float32)
    qkv = (rng.standard_normal((3 * d, d)).astype(np.float32), rng.standard_normal(3 * d).astype(np.float32))
    out = (rng.standard_normal((2, d)).astype(np.float32), rng.standard_normal(2).astype(np.float32))
    query, key, value = np.split(z @ qkv[0].T + qkv[1], 3, axis=1)
    weight = np.exp(query @ key.T / math.sqrt(d)) * (graph.matrix.toarray() + np.eye(n))
    expected = weight / weight.sum(1, keepdims=True) @ value @ out[0].T + out[1]
    np.testing.assert_allclose(graph_transformer(graph, z, qkv, out), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["normal", "uniform", "mixed"])
def test_root_causes(strategy):
    causes = root_causes(np.random.default_rng(0), 500, 40, strategy, True)
    assert causes.shape == (500, 40)
    assert causes.dtype == np.float32
    if strategy == "uniform":
        assert causes.min() >= 0
        assert causes.max() <= 1


def test_outliers_are_clamped_and_categories_are_ordinal():
    x = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32)
    x[0, 0] = 1e6
    clamped = clamp_outliers(x)
    assert clamped[0, 0] < 10
    np.testing.assert_array_equal(clamped[1:, 1:], np.clip(x[1:, 1:], -5, 5))
    codes = make_categorical(np.random.default_rng(1), x, 1.0)
    changed = (codes != x).any(0)
    assert changed.any()
    assert (codes[:, changed] == codes[:, changed].round()).all()


def test_hyper_priors_stay_in_their_ranges():
    prior = PaperPrior()
    drawn = [prior.draw_scm(np.random.default_rng(i)) for i in range(300)]
    assert {s.convolution for s in drawn} == {"gcn", "sage-mean", "sage-min", "sage-max", "gt"}
    assert {round(10 * s.convolved) for s in drawn} == set(range(11))
    assert min(s.features for s in drawn) >= 4
    assert max(s.features for s in drawn) <= 100
    assert min(s.layers for s in drawn) >= 2
    assert min(s.causes for s in drawn) >= 1
    assert 0.35 < np.mean([s.causal for s in drawn]) < 0.65
    assert 0.35 < np.mean([s.activation is None for s in drawn]) < 0.65


@pytest.mark.parametrize(
    ("prior", "settings", "message"),
    [
        ("small", {"nodes": [500, 100]}, r"settings.nodes \[500, 100\]: the lower number comes first"),
        ("small", {"nodes": [1, 2]}, "start of settings.nodes 1 must be at least 20"),
        ("small", {"nodes": 500}, "settings.nodes is 500, needed is a pair of whole numbers"),
        ("small", {"nodes": [100]}, "needed is a pair"),
        ("small", {"nodes": ["few", "many"]}, "needed is a pair"),
        ("small", {"nodes": [20.5, 30]}, "pair of whole numbers"),
        ("small", {"degree": [0, 5]}, "settings.degree .* must begin at"),
        ("small", {"larger": [0.5, 2]}, r"settings.larger \[0.5, 2\] must begin at 1"),
        ("small", {"scm": 1.5}, r"settings.scm 1.5 is outside \[0, 1\]"),
        ("small", {"scm": "half"}, "settings.scm is 'half'"),
        ("small", {"per_class": [0, 2]}, "settings.per_class"),
        ("paper", {"features": [1, 3]}, "end of settings.features 3 must be at least 4"),
        ("paper", {"context": [0.5, 1.0]}, "no node is left to predict"),
        ("paper", {"context": [1e-5, 1e-5]}, "leaves none to learn from"),
        ("paper", {"tries": 0}, "settings.tries 0"),
    ],
)
def test_settings_of_which_no_graph_can_be_drawn(prior, settings, message):
    with pytest.raises(ValueError, match=message):
        GraphPrior(prior, settings)


def test_a_prior_that_rejects_every_graph_says_why(monkeypatch):
    with pytest.raises(ValueError, match="none of 1000 graphs passes .*too few for a subgraph.* widen settings"):
        GraphPrior("paper", {"nodes": [20, 25]}).sample(0)
    unusable = Rejected("no column varies")
    monkeypatch.setattr(SmallPrior, "_finish", lambda *_: (_ for _ in ()).throw(unusable))
    with pytest.raises(ValueError, match="none of 1000 graphs passes .*no column varies.* widen settings"):
        GraphPrior("small", {"nodes": [20, 25]}).sample(0)


@pytest.mark.parametrize("nodes", [20, 32, 33])
def test_graphs_with_values_may_be_as_small_as_any(nodes):
    prior = GraphPrior(settings={"nodes": [nodes, nodes], "regression": 1.0, "scm": 1.0}, batch_size=2)
    for i in range(10):
        assert 0 < len(prior.sample(i).y) <= nodes
