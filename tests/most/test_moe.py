import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_modules.most.moe import (
    FAMILIES,
    expert_groups,
    make_modality_aware,
    modality_of,
    moe_blocks,
    route,
)
from tests.most.toys import language_model

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
MODALITY = modality_of(IDS, 40, 63)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["after_softmax", "before_softmax"]),
    st.booleans(),
    st.sampled_from([1.0, 30.0, 1000.0]),
)
def test_route_against_a_loop(seed, mask, renormalise, temperature):
    """Picks and weights of each token, one at a time in float64; never outside the group, underflow
    included."""
    g = torch.Generator().manual_seed(seed)
    n, e, k = 7, 10, 3
    logits = torch.randn(n, e, generator=g, dtype=torch.float64) * temperature
    groups = torch.tensor([0, 1] * 5)[torch.randperm(e, generator=g)]
    modality = torch.randint(0, 3, (n,), generator=g)
    allowed = modality[:, None] == groups
    out = route(logits, allowed, k, mask, renormalise, scale=1.5)
    for t in range(n):
        inside = [i for i in range(e) if allowed[t, i]]
        if not inside:
            assert (out.weights[t] == 0).all()
            assert out.load[t].sum() == 0
            continue
        assert set(out.indices[t].tolist()) <= set(inside)
        assert len(set(out.indices[t].tolist())) == k
        among = inside if mask == "before_softmax" else range(e)
        shifted = (logits[t] - logits[t, list(among)].max()).exp()
        p = shifted / shifted[list(among)].sum()
        best = sorted(inside, key=lambda i: -p[i])[:k]
        weights = p[best]
        weights = weights / (weights.sum() + 1e-20) if renormalise else weights * 1.5
        torch.testing.assert_close(out.weights[t].sort().values, weights.sort().values, atol=1e-12, rtol=1e-9)


def test_out_of_group_logits_get_gradient_only_with_the_mask_after_the_softmax():
    logits = torch.randn(1, 4, requires_grad=True)
    allowed = torch.tensor([[True, True, False, False]])
    for mask, reached in (("after_softmax", True), ("before_softmax", False)):
        (grad,) = torch.autograd.grad(route(logits, allowed, 1, mask).weights.sum(), logits)
        assert (grad[0, 2:] != 0).any() == reached


def test_partitions():
    assert expert_groups("contiguous", 6, 2) == (0, 0, 0, 1, 1, 1)
    assert expert_groups("interleaved", 6, 2) == (0, 1, 0, 1, 0, 1)
    assert expert_groups([1, 0, 0, 0], 4, 1) == (1, 0, 0, 0)
    assert expert_groups(None, 6, 2) is None


@pytest.mark.parametrize(
    ("partition", "top_k", "words"),
    [
        ("contiguous", 4, "fewer than the 4"),
        ([0, 0, 0, 0, 0, 1], 2, "the audio group has 1 experts"),
        ([0, 1, 2, 0, 1, 1], 1, "one 0 (text) or 1 (audio)"),
        ([0, 1], 1, "each of the 6 experts"),
        ("halves", 1, "unknown"),
    ],
)
def test_bad_partitions_are_refused_in_one_line(partition, top_k, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")) as error:
        expert_groups(partition, 6, top_k)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_all_experts_allowed_is_the_base_model(family, experts):
    base = language_model(family)
    base.set_experts_implementation(experts)
    with torch.no_grad():
        expected = base(IDS).logits
        keys = set(base.state_dict())
        model = make_modality_aware(base, partition=None)
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-6, rtol=0)
        assert set(model.state_dict()) == keys


@pytest.mark.parametrize("family", FAMILIES)
def test_picks_stay_in_the_group_and_training_reaches_every_part(family):
    model = make_modality_aware(language_model(family), "interleaved").train()
    loss = model(IDS, modality_ids=MODALITY, labels=IDS).loss
    loss.backward()
    groups = torch.arange(8) % 2
    for block in moe_blocks(model):
        assert torch.equal(groups[block.routing.indices], MODALITY.reshape(-1, 1).expand(-1, 2))
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = make_modality_aware(language_model()).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(IDS, modality_ids=MODALITY, labels=IDS).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad)


def test_shared_expert_added_changes_nothing_at_first_and_can_be_dropped():
    base = language_model("olmoe")
    plain = make_modality_aware(copy.deepcopy(base))
    added = make_modality_aware(base, add_shared_width=20)
    with torch.no_grad():
        a, b = (m(IDS, modality_ids=MODALITY).logits for m in (plain, added))
    assert torch.equal(a, b)
    assert any("shared_expert" in n for n in added.state_dict())
    without = make_modality_aware(language_model("deepseek_v2"), shared=False)
    assert not any("shared" in n for n in without.state_dict())


def test_router_stays_in_float32_under_autocast_and_bfloat16():
    model = make_modality_aware(language_model())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(IDS, modality_ids=MODALITY)
    assert all(b.routing.logits.dtype == torch.float32 for b in moe_blocks(model))
    with torch.no_grad():
        model.bfloat16()(IDS, modality_ids=MODALITY)
    assert all(b.routing.logits.dtype == torch.float32 for b in moe_blocks(model))


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"add_shared_width": 8}, "already has a shared expert"),
        ({"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}, {}, "group_limited_greedy"),
        ({"num_experts_per_tok": 5}, {}, "fewer than the 5"),
    ],
)
def test_models_that_cannot_be_converted(changes, options, words):
    with pytest.raises(ValueError, match=words):
        make_modality_aware(language_model(**changes), **options)


def test_block_is_captured_as_one_graph():
    """No graph break in the block (what block-wise `torch.compile` needs), and the same numbers."""
    model = make_modality_aware(language_model())
    block = moe_blocks(model)[0]
    hidden = torch.randn(2, 5, 32)
    modality = MODALITY[:, :5].contiguous()
    with torch.no_grad():
        expected = block(hidden, modality)
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(hidden, modality), expected)
    assert block.routing.indices.shape == (10, 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_token_is_computed_as_one_of_many(family, dtype):
    """The short way of generation against the experts of transformers, which run where gradients are wanted."""
    model = make_modality_aware(language_model(family)).to(dtype)
    hidden = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    for block in moe_blocks(model):
        for token, modality in zip(hidden[:, None], torch.tensor([[[0]], [[1]], [[0]]]), strict=True):
            expected = block(token, modality).detach()
            with torch.no_grad():
                torch.testing.assert_close(block(token, modality), expected)
