"""Load-balance losses of the modality-aware router.

All forms are one: tokens are put into segments, and each segment s of T_s tokens gives

    L_s = sum_e f_{s,e} P_{s,e},   f_{s,e} = E_s / (K T_s) * picks,   P_{s,e} = 1 / T_s * sum of
    probabilities,

averaged over the segments that have tokens. Segments are the sequences (the published form), the whole batch
(its flat form), or the two modalities (ours). A uniform router gives 1 per modality for any mix of
modalities; the published forms depend on the mix, because the masked scores do not sum to 1 (MoST, section 3;
README, deviations).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_modules.most.moe import AUDIO, TEXT, Routing

BalanceForm = Literal["sequence", "flat", "modality"]


class SegmentLoad(NamedTuple):
    """Sums over the tokens of each segment; they add over ranks.

    Attributes:
        picks: float [s, e], picks of each expert (no gradient).
        mass: float [s, e], sum of probabilities (carries the gradient).
        tokens: float [s].
        choices: float [s], sum over tokens of the number of experts they choose among: tokens * E_s.
    """

    picks: Tensor
    mass: Tensor
    tokens: Tensor
    choices: Tensor


def segment_load(routing: Routing, modality: Tensor, valid: Tensor, form: BalanceForm) -> SegmentLoad:
    """Sum picks and probabilities per segment.

    Args:
        routing: of the n = b * t tokens of a batch.
        modality: int64 [b, t].
        valid: bool [b, t]; False leaves a token out. The official code counts padding: pass all True to
            follow it.
        form: "sequence", "flat" or "modality". The last uses probabilities renormalised inside the group.
    """
    b, t = valid.shape
    probabilities = routing.scores
    if form == "sequence":
        segment, count = torch.arange(b, device=valid.device).repeat_interleave(t), b
    elif form == "flat":
        segment, count = torch.zeros(b * t, dtype=torch.int64, device=valid.device), 1
    else:
        segment, count = modality.reshape(-1), 2
        valid = valid & (modality <= AUDIO)
        # from the logits, since the scores of a whole group can underflow to 0
        lowest = torch.finfo(routing.logits.dtype).min
        probabilities = routing.logits.masked_fill(~routing.allowed, lowest).softmax(-1)
    keep = valid.reshape(-1)
    weight = keep.to(probabilities.dtype)
    # [n, s]: one 1 per valid token; a product with it sums over segments (modality 2 is not valid here)
    member = torch.nn.functional.one_hot(segment.clamp(max=count - 1), count).to(probabilities.dtype) * weight[:, None]
    tokens = member.sum(0)
    if form == "modality":
        choices = (member.T @ routing.allowed.to(member.dtype)).sum(-1)
    else:
        choices = tokens * routing.logits.shape[-1]
    return SegmentLoad(member.T @ routing.load.to(member.dtype), member.T @ probabilities, tokens, choices)


def segment_values(load: SegmentLoad, top_k: int) -> Tensor:
    """`L_s` of each segment, [s]; 0 for a segment without tokens."""
    return load.choices * (load.picks * load.mass).sum(-1) / (top_k * load.tokens.clamp(min=1) ** 3)


def balance_loss(routing: Routing, modality: Tensor, valid: Tensor, form: BalanceForm = "sequence") -> Tensor:
    """Load-balance loss of one block on one device, without its factor alpha: the mean over used segments."""
    load = segment_load(routing, modality, valid, form)
    values = segment_values(load, routing.indices.shape[-1])
    return values.sum() / (load.tokens > 0).sum().clamp(min=1)


def load_by_modality(routing: Routing, modality: Tensor, valid: Tensor) -> Tensor:
    """Picks of every expert by text and by audio tokens, float [2, e]; rows add over batches and ranks."""
    member = torch.stack([(modality == m) & valid for m in (TEXT, AUDIO)]).reshape(2, -1).float()
    return member @ routing.load.float()
