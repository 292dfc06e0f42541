import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modules.graph_pfn.inference import (
    Ensemble,
    codebook,
    combine,
    draw_members,
    episode,
    fewest_members,
    letter_log_probabilities,
    predict,
    view,
)
from lightning_modules.graph_pfn.losses import (
    Answer,
    context_baseline,
    edge_loss,
    feature_loss,
    hide_edges,
    hide_features,
)


def ring(n: int) -> torch.Tensor:
    nodes = torch.arange(n)
    edges = torch.stack([nodes, nodes.roll(-1)])
    return torch.cat([edges, edges.flip(0)], 1)


@settings(deadline=None, max_examples=6)
@given(st.integers(4, 14), st.integers(3, 10), st.integers(0, 3))
def test_perfect_letters_decode_to_the_class(classes, letters, extra):
    classes = max(classes, letters + 1)
    count = max(2, fewest_members(classes, letters) + extra)
    book = codebook(classes, count, letters, torch.Generator().manual_seed(classes))
    assert book.shape == (classes, count)
    assert book.min() >= 0
    assert book.max() < letters
    assert len(book.unique(dim=0)) == classes
    for column in book.T[:classes]:
        sizes = torch.bincount(column, minlength=letters)[1:]
        assert sizes.max() - sizes.min() <= 1
    members = draw_members(3, classes, Ensemble(count, letters=letters), torch.Generator())
    truth = torch.arange(classes)
    logs = []
    for member in members:
        sure = torch.full((classes, letters), -math.inf)
        sure[torch.arange(classes), member.codes[truth]] = 0.0
        logs.append(sure)
    assert torch.equal(combine(logs, members, letters).argmax(1), truth)


def test_members_needed():
    assert [fewest_members(c, 10) for c in (2, 10, 11, 18, 100)] == [1, 1, 2, 2, 12]


class Oracle:
    """Answers with the label of the context node whose first column is nearest, in the codes it was shown."""

    def __init__(self) -> None:
        self.asked = []

    def __call__(self, questions, task):
        (q,) = questions
        self.asked.append(q)
        n = len(q.y)
        nearest = (q.x[n:, :1] - q.x[:n, 0]).abs().argmin(1)
        if task == "regression":
            return [Answer(q.y[nearest], q.x)]
        logits = torch.full((len(nearest), 10), -3.0)
        logits[torch.arange(len(nearest)), q.y[nearest]] = 3.0
        return [Answer(logits, q.x)]


@pytest.mark.parametrize("classes", [2, 3, 10, 13])
def test_an_ensemble_undoes_its_permutations(classes):
    n = 4 * classes
    y = torch.arange(n) % classes
    x = torch.stack([y.float(), torch.zeros(n)], 1)
    context = torch.arange(n) < 2 * classes
    shuffled = torch.randperm(n)
    oracle = Oracle()
    settings = Ensemble(members=5, permute_columns=False, random_columns=3)
    out = predict(oracle, x[shuffled], y[shuffled], ring(n), context[shuffled], classes, settings)
    assert torch.equal(out.argmax(1), y[shuffled][~context[shuffled]])
    torch.testing.assert_close(out.sum(1), torch.ones(len(out)))
    assert len(oracle.asked) == max(5, fewest_members(classes, 10))
    question = oracle.asked[0]
    assert question.x.shape == (n, 5)
    assert question.y.unique().tolist() == list(range(min(classes, 10)))
    if classes > 2:
        assert any(not torch.equal(a.y, question.y) for a in oracle.asked)
    # Edges still join the same nodes once the context is in front.
    joined = torch.zeros(n, n)
    joined[tuple(ring(n))] = 1
    order = torch.argsort(~context[shuffled], stable=True)
    again = torch.zeros(n, n)
    again[tuple(question.edges)] = 1
    assert torch.equal(again, joined[order][:, order])


def test_values_are_given_back_in_their_own_units():
    y = torch.linspace(100, 200, 10)
    x = torch.stack([y, y], 1)
    context = torch.arange(10) % 2 == 0
    out = predict(Oracle(), x, y, None, context, 0, Ensemble(3, random_columns=0))
    assert set(out.tolist()) <= {round(v, 3) for v in y[context].tolist()} | set(y[context].tolist())


def test_members_see_a_few_columns_each():
    members = draw_members(9, 3, Ensemble(20, max_columns=4), torch.Generator().manual_seed(0))
    assert {len(m.columns) for m in members} == {4}
    assert all(len(m.columns.unique()) == 4 for m in members)
    assert torch.cat([m.columns for m in members]).unique().tolist() == list(range(9))


def test_the_same_seed_gives_the_same_view():
    member = draw_members(4, 5, Ensemble(1, flip_signs=True), torch.Generator().manual_seed(0))[0]
    x, y = torch.randn(9, 4), torch.tensor([3, 1, 1, 4])
    one, two = (view(x, y, None, member, 2, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one.question.x, two.question.x)
    assert one.letters.tolist() == sorted({int(member.codes[c]) for c in (3, 1, 4)})
    torch.testing.assert_close(one.question.x[:, :4].abs(), x[:, member.columns].abs())


def test_absent_letters_have_no_probability():
    out = letter_log_probabilities(torch.zeros(2, 10), torch.tensor([1, 3]), 4)
    torch.testing.assert_close(out.exp(), torch.tensor([[0, 0.5, 0, 0.5]]).expand(2, -1))


@settings(deadline=None, max_examples=25)
@given(st.integers(3, 60), st.integers(2, 5), st.integers(0, 30))
def test_episodes_keep_every_class_and_visit_every_node(n, classes, step):
    y = torch.arange(n) % classes
    context = torch.arange(n) < max(2, n - 2)
    known, asked = episode(context, y, step, 0, classes)
    assert torch.equal(torch.cat([known, asked]).sort()[0], context.nonzero().squeeze(1))
    assert y[known].unique().tolist() == y[context].unique().tolist()
    assert [a.tolist() for a in episode(context, y, step, 0, classes)] == [known.tolist(), asked.tolist()]


def test_one_turn_of_episodes_asks_every_node_once():
    y, context = torch.zeros(16).long(), torch.ones(16, dtype=torch.bool)
    asked = torch.cat([episode(context, y, step, 3, 1)[1] for step in range(4)])
    assert asked.sort()[0].tolist() == list(range(16))


def test_a_single_label_cannot_be_fine_tuned_on():
    with pytest.raises(ValueError, match="at least 2"):
        episode(torch.tensor([True, False]), torch.tensor([0, 0]), 0, 0, 1)


@pytest.mark.parametrize("both", [True, False])
def test_hidden_edges(both):
    edges = ring(200)
    hidden = hide_edges(edges, 200, 0.3, both, torch.Generator().manual_seed(0))
    k = int(hidden.joined.sum())
    assert len(hidden.joined) == 2 * k
    assert hidden.visible.shape[1] + k == 400
    everyone = {tuple(e) for e in edges.T.tolist()}
    positives, negatives = hidden.pairs[:, :k].T.tolist(), hidden.pairs[:, k:].T.tolist()
    assert all(tuple(p) in everyone for p in positives)
    assert not any(tuple(p) in everyone or p[0] == p[1] for p in negatives)
    visible = {tuple(e) for e in hidden.visible.T.tolist()}
    leaks = sum((b, a) in visible for a, b in positives)
    assert (leaks == 0) == both
    loss = edge_loss(lambda target, pairs: torch.zeros(pairs.shape[1]), torch.zeros(200, 4), hidden)
    torch.testing.assert_close(loss, torch.tensor(math.log(2)))


def test_hidden_features():
    x = torch.arange(40.0).view(10, 4)
    permuted, hidden = hide_features(x, 0.5, "permute", torch.Generator().manual_seed(0))
    assert torch.equal(permuted[~hidden], x[~hidden])
    assert (permuted % 4 == x % 4).all()
    missing, hidden = hide_features(x, 0.5, "missing", torch.Generator().manual_seed(0))
    assert torch.equal(missing.isnan(), hidden)
    exact = ((x - x[:5].mean(0)) / x[:5].std(0)).view(10, 2, 2)
    torch.testing.assert_close(feature_loss(exact + 2, x, 5, hidden), torch.tensor(4.0))


def test_baseline_is_the_entropy_of_the_context():
    y = torch.tensor([0] * 50 + [1] * 50)
    torch.testing.assert_close(context_baseline(y, y, "classification"), torch.tensor(math.log(2)))
    torch.testing.assert_close(context_baseline(y.float(), y.float(), "regression"), torch.tensor(0.25))
