import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modules.most.balance import balance_loss, load_by_modality, segment_load, segment_values
from lightning_modules.most.moe import route


def uniform(modality: torch.Tensor, e: int, k: int):
    """A router that knows nothing: equal scores, picks spread evenly by hand."""
    n = modality.numel()
    groups = (torch.arange(e) >= e // 2).long()
    allowed = modality.reshape(-1, 1) == groups
    routing = route(torch.zeros(n, e), allowed, k)
    start = modality.reshape(-1, 1) * (e // 2)
    spread = start + (torch.arange(n)[:, None] * k + torch.arange(k)) % (e // 2)
    return routing._replace(indices=spread)


def test_published_check_values():
    """Zero router weights, 64 experts, top 6: 1.0 for one modality, about a half for an even mix; ours 1.0
    for any mix."""
    valid = torch.ones(4, 64, dtype=torch.bool)
    text = torch.zeros(4, 64, dtype=torch.int64)
    mix = text.clone()
    mix[:, ::2] = 1
    for form in ("sequence", "flat", "modality"):
        assert balance_loss(uniform(text, 64, 6), text, valid, form) == pytest.approx(1.0, abs=1e-5)
    assert balance_loss(uniform(mix, 64, 6), mix, valid, "sequence") == pytest.approx(0.5, abs=0.02)
    assert balance_loss(uniform(mix, 64, 6), mix, valid, "modality") == pytest.approx(1.0, abs=0.02)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(["sequence", "flat", "modality"]))
def test_against_loops(seed, form):
    g = torch.Generator().manual_seed(seed)
    b, t, e, k = 3, 5, 6, 2
    modality = torch.randint(0, 3, (b, t), generator=g)
    valid = torch.rand(b, t, generator=g) < 0.7
    logits = torch.randn(b * t, e, generator=g, dtype=torch.float64)
    groups = torch.tensor([0, 1, 0, 1, 1, 0])
    routing = route(logits, modality.reshape(-1, 1) == groups, k)
    tokens = [(i, j, i * t + j) for i in range(b) for j in range(t) if valid[i, j]]
    if form == "sequence":
        segments = [[n for i, _, n in tokens if i == s] for s in range(b)]
    elif form == "flat":
        segments = [[n for *_, n in tokens]]
    else:
        segments = [[n for i, j, n in tokens if modality[i, j] == m] for m in (0, 1)]
    values = []
    for s, members in enumerate(segments):
        if not members:
            continue
        inside = [x for x in range(e) if form != "modality" or groups[x] == s]
        total = 0.0
        for x in inside:
            f = len(inside) / (k * len(members)) * sum(int(routing.load[n, x]) for n in members)
            if form == "modality":
                p = sum((logits[n, x].exp() / logits[n, inside].exp().sum()).item() for n in members)
            else:
                p = sum(routing.scores[n, x].item() for n in members)
            total += f * p / len(members)
        values.append(total)
    expected = sum(values) / max(len(values), 1)
    assert balance_loss(routing, modality, valid, form).item() == pytest.approx(expected, rel=1e-9)


def test_sums_add_over_halves_of_a_batch():
    """What ranks exchange: the flat and the per-modality loss of a batch follow from the sums of its
    halves."""
    g = torch.Generator().manual_seed(1)
    modality = torch.randint(0, 2, (4, 6), generator=g)
    valid = torch.rand(4, 6, generator=g) < 0.8
    logits = torch.randn(24, 8, generator=g)
    groups = torch.arange(8) % 2
    whole = route(logits, modality.reshape(-1, 1) == groups, 2)
    halves = [whole._replace(**{n: getattr(whole, n)[h] for n in whole._fields}) for h in (slice(12), slice(12, 24))]
    for form in ("flat", "modality"):
        parts = [
            segment_load(h, modality[i], valid[i], form) for h, i in zip(halves, (slice(2), slice(2, 4)), strict=True)
        ]
        total = type(parts[0])(*(a + b for a, b in zip(*parts, strict=True)))
        values = segment_values(total, 2)
        assert values.mean() == pytest.approx(balance_loss(whole, modality, valid, form).item(), rel=1e-5)


def test_load_by_modality_counts_picks():
    modality = torch.tensor([[0, 1, 1, 2]])
    valid = torch.tensor([[True, True, False, True]])
    routing = route(torch.randn(4, 4), modality.reshape(-1, 1) == torch.tensor([0, 0, 1, 1]), 2)
    assert load_by_modality(routing, modality, valid).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
