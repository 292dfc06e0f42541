"""Modality-aware mixture of experts (MAMoE) on the MoE families of transformers.

Every routed expert belongs to the text group or to the audio group; a token is sent only to experts of its
own modality, and the shared expert sees all tokens (MoST, arXiv:2601.10272, Algorithm 1). The experts stay
fused as transformers keeps them ([E, 2I, H] and [E, H, I]), so that its grouped matrix products do the work.

Axes: n tokens (batch times time), e experts, k picks per token, h hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

TEXT, AUDIO, NEITHER = 0, 1, 2
MaskPosition = Literal["after_softmax", "before_softmax"]


class Routing(NamedTuple):
    """What the router decided for n tokens.

    Attributes:
        logits: float [n, e], before any mask.
        scores: float [n, e], probabilities with the experts of other groups set to 0 (`s'` in the paper).
        weights: float [n, k], the factor of each picked expert.
        indices: int64 [n, k], the picked experts, in no particular order.
        allowed: bool [n, e], the experts of the token's group.
    """

    logits: Tensor
    scores: Tensor
    weights: Tensor
    indices: Tensor
    allowed: Tensor

    @property
    def load(self) -> Tensor:
        """Picks per token and expert, int64 [n, e]; tokens that belong to no group pick nothing."""
        picks = torch.zeros_like(self.allowed, dtype=torch.int64).scatter_(1, self.indices, 1)
        return picks * self.allowed


def modality_of(input_ids: Tensor, audio_first: int, audio_last: int) -> Tensor:
    """Modality of each token from its id: 0 text, 1 audio, 2 neither (ids above the audio range).

    Args:
        input_ids: int64, any shape.
        audio_first: the first id of the audio range.
        audio_last: the last id of the audio range, included.

    Returns:
        int64 of the same shape, values 0 to 2.
    """
    return (input_ids >= audio_first).long() + (input_ids > audio_last).long()


def expert_groups(partition: str | Sequence[int] | None, num_experts: int, top_k: int) -> tuple[int, ...] | None:
    """Group of every expert.

    Args:
        partition: "contiguous" (the first half is text: the paper), "interleaved" (even is text:
            expert-parallel ranks, which hold consecutive experts, then serve both modalities), a list of 0
            (text) and 1 (audio) with one entry per expert, or None for no groups (the VanillaMoE ablation).
        num_experts: number of routed experts.
        top_k: experts per token.

    Returns:
        e numbers, 0 (text) or 1 (audio), or None.

    Raises:
        ValueError: if the list has another length or other values, or if a group has fewer than `top_k`
            experts.
    """
    if partition is None:
        return None
    if partition == "contiguous":
        groups = tuple(int(e >= num_experts // 2) for e in range(num_experts))
    elif partition == "interleaved":
        groups = tuple(e % 2 for e in range(num_experts))
    elif isinstance(partition, str):
        raise ValueError(f"partition {partition!r} is unknown: use contiguous, interleaved, a list of 0 and 1, or null")
    else:
        groups = tuple(partition)
        if len(groups) != num_experts or not set(groups) <= {TEXT, AUDIO}:
            raise ValueError(
                f"partition needs one 0 (text) or 1 (audio) for each of the {num_experts} experts, "
                f"got {list(partition)}"
            )
    for name, group in (("text", TEXT), ("audio", AUDIO)):
        size = groups.count(group)
        if size < top_k:
            raise ValueError(
                f"the {name} group has {size} experts, fewer than the {top_k} that each token picks: "
                "lower num_experts_per_tok or change partition"
            )
    return groups


def route(
    logits: Tensor,
    allowed: Tensor,
    top_k: int,
    mask: MaskPosition = "after_softmax",
    renormalise: bool = False,
    scale: float = 1.0,
) -> Routing:
    """Pick `top_k` experts inside each token's group (MoST, Algorithm 1).

    With `s = softmax(logits)` over all experts and `s' = s` inside the group, 0 outside, the picks are the
    largest of `s'` and their weights are `scale * s'`, or `s' / sum of the picked s'` when `renormalise`
    (then without `scale`). Experts outside the group are never picked, not even where all of `s'` underflows
    to 0. A token with no allowed expert gets weights 0.

    Args:
        logits: float [n, e].
        allowed: bool [n, e].
        top_k: picks per token, at most the size of the smallest group.
        mask: "after_softmax" is the paper: out-of-group logits still take part in the softmax, so weights sum
            to less than 1. "before_softmax" normalises inside the group: a different model.
        renormalise: divide the weights of the picks by their sum.
        scale: `routed_scaling_factor`.
    """
    if mask == "before_softmax":  # the lowest finite number, so that a row without allowed experts has no NaN
        scores = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1)
    else:
        scores = logits.softmax(-1)
    indices = scores.detach().masked_fill(~allowed, -1).topk(top_k, dim=-1, sorted=False).indices
    scores = scores.masked_fill(~allowed, 0)
    weights = scores.gather(-1, indices)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) if renormalise else weights * scale
    return Routing(logits, scores, weights, indices, allowed)


class ModalityRouter(nn.Module):
    """The router of one block, in float32 whatever the precision around it.

    Args:
        weight: [e, h], shared with the router it replaces.
        groups: 0 or 1 per expert, as from `expert_groups`, or None to allow all experts to all tokens.
        top_k: picks per token.
        mask: see `route`.
        renormalise: see `route`.
        scale: see `route`.
    """

    groups: Tensor | None

    def __init__(
        self,
        weight: nn.Parameter,
        groups: Sequence[int] | None,
        top_k: int,
        mask: MaskPosition = "after_softmax",
        renormalise: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = weight
        table = None if groups is None else torch.tensor(groups, device=weight.device)
        self.register_buffer("groups", table, persistent=False)  # checkpoints keep the base model's keys
        self.top_k, self.mask, self.renormalise, self.scale = top_k, mask, renormalise, scale

    def forward(self, hidden: Tensor, modality: Tensor | None) -> Routing:
        """Route `hidden` [n, h] by `modality` int64 [n] (None is allowed without groups)."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.float(), self.weight.float())
        if self.groups is None:
            allowed = torch.ones_like(logits, dtype=torch.bool)
        else:
            assert modality is not None
            allowed = modality[:, None] == self.groups
        return route(logits, allowed, self.top_k, self.mask, self.renormalise, self.scale)


class SwiGLU(nn.Module):
    """`down(act(gate x) * up x)`: the shared expert given to a family that has none.

    Its down projection starts at 0, so that adding it changes nothing at step 0.
    """

    def __init__(self, hidden: int, width: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.act_fn = ACT2FN[activation]
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., h] to [..., h]."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Family:
    """What differs between the MoE families of transformers.

    Attributes:
        shared: name of the shared expert in the block, or None where the family has none.
        shared_gate: name of the linear layer whose sigmoid weighs the shared expert, or None.
        renormalise: whether picked weights are divided by their sum; None: `norm_topk_prob` of the
            configuration.
        scaled: whether weights are multiplied by the configuration's `routed_scaling_factor`.
    """

    shared: str | None = None
    shared_gate: str | None = None
    renormalise: bool | None = None
    scaled: bool = False


FAMILIES = {
    # transformers' DeepSeek-V2 router does not read norm_topk_prob
    "deepseek_v2": Family(shared="shared_experts", renormalise=False, scaled=True),
    "qwen2_moe": Family(shared="shared_expert", shared_gate="shared_expert_gate"),
    "qwen3_moe": Family(),
    "olmoe": Family(),
    "mixtral": Family(renormalise=True),  # its optional training jitter is not applied
}


def experts_of_one_token(experts: Any, hidden: Tensor, routing: Routing) -> Tensor:
    """`sum over picks of weight * expert(x)` for a single token, float [1, h] to [1, h], without gradient.

    Generation on a CPU spends its time here; sorting one token's picks by expert takes longer than to visit them.
    """
    picks = routing.indices[0].tolist()
    gate, up = torch.cat([F.linear(hidden, experts.gate_up_proj[e]) for e in picks]).chunk(2, -1)  # k i
    active = experts.act_fn(gate) * up
    rows = torch.cat([F.linear(active[i : i + 1], experts.down_proj[e]) for i, e in enumerate(picks)])  # k h
    return (rows * routing.weights.T).sum(0, keepdim=True).to(hidden.dtype)


class ModalityAwareMoE(nn.Module):
    """MAMoE block: routed experts by modality, plus the shared expert for all tokens.

    It takes over the parts of a block of transformers under their names, so state-dict keys stay those of the
    base model.

    Attributes:
        routing: the decisions of the last forward pass, read by the load-balance loss and by callbacks. None
            before it.
    """

    def __init__(self, experts: nn.Module, gate: ModalityRouter, shared: dict[str, nn.Module], family: Family) -> None:
        super().__init__()
        self.experts = experts
        self.gate = gate
        for name, module in shared.items():
            self.add_module(name, module)
        self.shared_name = family.shared if family.shared in shared else None
        self.shared_gate_name = family.shared_gate if family.shared_gate in shared else None
        self.routing: Routing | None = None

    def forward(self, hidden: Tensor, modality: Tensor | None = None) -> Tensor:
        """`y = sum over picks of weight * expert(x) + shared(x)`.

        Args:
            hidden: float [b, t, h].
            modality: int64 [b, t], 0 text, 1 audio, 2 neither (only the shared expert acts).

        Returns:
            float [b, t, h].
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        routing = self.gate(flat, None if modality is None else modality.reshape(-1))
        self.routing = routing
        alone = len(flat) == 1 and flat.device.type == "cpu" and not torch.is_grad_enabled()
        if alone and not torch.compiler.is_compiling():
            out = experts_of_one_token(self.experts, flat, routing).view_as(hidden)
        else:
            out = self.experts(flat, routing.indices, routing.weights).view_as(hidden)
        if self.shared_name is None:
            return out
        shared = self.get_submodule(self.shared_name)(hidden)
        if self.shared_gate_name is not None:
            shared = self.get_submodule(self.shared_gate_name)(hidden).sigmoid() * shared
        return out + shared


class ModalityAwareLayer(nn.Module):
    """Mixin for a decoder layer: its parts stay, and the MoE block also gets the modality."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, modality_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """What the layer of transformers computes: float [b, t, h] to [b, t, h]; modalities int64 [b, t]."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        moe = isinstance(self.mlp, ModalityAwareMoE)
        return hidden_states + (self.mlp(normed, modality_ids) if moe else self.mlp(normed))


@cache
def _modality_aware(layer_class: type[nn.Module]) -> type[nn.Module]:
    return type(layer_class.__name__, (ModalityAwareLayer, layer_class), {})


def make_modality_aware(
    model: PreTrainedModel,
    partition: str | Sequence[int] | None = "contiguous",
    mask: MaskPosition = "after_softmax",
    shared: bool = True,
    add_shared_width: int = 0,
) -> PreTrainedModel:
    """Turn an MoE language model of transformers into a modality-aware one, in place; weights stay the same.

    Afterwards `model(input_ids or inputs_embeds, modality_ids=...)` takes int64 [b, t] modalities, which
    travel to every layer as a keyword argument (and so survive gradient checkpointing). Decoder layers get a
    subclass of their own class, as FSDP2 does; state-dict keys stay those of the base model.

    Args:
        model: a causal language model of a family in `FAMILIES`.
        partition: see `expert_groups`.
        mask: see `route`.
        shared: False drops the shared expert (the NoShared ablation).
        add_shared_width: width of a shared expert to add where the family has none; 0 adds none.

    Returns:
        The same object.

    Raises:
        ValueError: for another family, for group-limited routing, or for a shared expert where it cannot be
            added.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{config.model_type} is not a known mixture of experts: use one of {', '.join(FAMILIES)}, "
            "or upcycle a dense model"
        )
    if getattr(config, "topk_method", None) == "group_limited_greedy" and (config.n_group or 1) > 1:
        raise ValueError("topk_method group_limited_greedy is not supported together with modality groups")
    family = FAMILIES[config.model_type]
    if add_shared_width and family.shared:
        raise ValueError(f"{config.model_type} already has a shared expert: set add_shared_width to 0")
    if add_shared_width:
        family = Family("shared_expert", None, family.renormalise, family.scaled)
    groups = expert_groups(partition, config.num_experts, config.num_experts_per_tok)
    renormalise = config.norm_topk_prob if family.renormalise is None else family.renormalise
    for layer in model.model.layers:
        layer.__class__ = _modality_aware(type(layer))  # type: ignore[arg-type] # classes are hashable
        block = layer.mlp
        if not hasattr(block, "experts"):  # a dense layer
            continue
        weight = block.gate.weight
        gate = ModalityRouter(
            weight,
            groups,
            config.num_experts_per_tok,
            mask,
            renormalise,
            config.routed_scaling_factor if family.scaled else 1.0,
        )
        parts: dict[str, nn.Module] = {}
        if shared and add_shared_width:
            parts["shared_expert"] = SwiGLU(config.hidden_size, add_shared_width, config.hidden_act).to(weight.device)
        elif shared and family.shared:
            parts = {name: getattr(block, name) for name in (family.shared, family.shared_gate) if name}
        layer.mlp = ModalityAwareMoE(block.experts, gate, parts, family).train(block.training)
    return model


def moe_blocks(model: nn.Module) -> list[ModalityAwareMoE]:
    """The modality-aware blocks of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, ModalityAwareMoE)]
