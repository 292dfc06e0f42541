"""Losses of the closed loop: centred kernel alignment (CKA), its layer weights, and their sum with CE and KL.

Equation numbers are those that the official code's comments give. All of it runs in float32 (float64 for float64
input), also under autocast, and knows no rank: where a batch is spread over ranks, gather the features first.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F


def _full_precision(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _flat(x: torch.Tensor) -> torch.Tensor:
    """`[b ...] -> [b d]` in the order of memory: Gram matrices do not depend on it, and nothing is copied."""
    order = sorted(range(1, x.dim()), key=x.stride, reverse=True)
    return x.permute(0, *order).flatten(1)


def linear_cka(x: torch.Tensor, y: torch.Tensor, unbiased: bool = False, cka_grad: str = "exact") -> torch.Tensor:
    """Linear CKA of two sets of features of the same B inputs (Kornblith et al. 2019; the paper's Eq. 8).

    `<K_c, Q_c> / (|K_c| |Q_c| + 1e-9)` with the centred Gram matrices `K_c`, `Q_c` of the flattened features and
    Frobenius norms; in [0, 1]. Of a layer without any spike it is 0, with gradient 0 (the official formula: NaN).
    The biased form is inflated when B is far below the number of features: keep B at 64 or more.

    Args:
        x: Student features `[B, ...]`.
        y: Teacher features `[B, ...]`.
        unbiased: Use HSIC_1 (`hsic`, needs B >= 4): `xy / (sqrt|xx| sqrt|yy| + 1e-6)`; it may leave [0, 1].
        cka_grad: "exact", or "numerator_half" for the gradient of the official training code of 2025-09: half of the
            numerator's, the denominator constant (biased form only). The value is the same.

    Returns:
        Scalar, float32 or float64.

    Raises:
        ValueError: if the batch sizes differ or `cka_grad` is unknown.
    """
    if len(x) != len(y):
        raise ValueError(f"linear_cka: {len(x)} inputs against {len(y)}; features must be of the same images")
    if cka_grad not in ("exact", "numerator_half"):
        raise ValueError(f'linear_cka: cka_grad is "exact" or "numerator_half", not {cka_grad!r}')
    with torch.autocast(x.device.type, enabled=False):
        x, y = (_full_precision(_flat(z)) for z in (x, y))
        if unbiased:
            return cka_from_hsic(hsic(x @ x.T, y @ y.T)).to(x.dtype)
        # centring the columns of x is the same as centring its Gram matrix on both sides, and cheaper
        x, y = x - x.mean(0), y - y.mean(0)
        k, q = x @ x.T, y @ y.T
        numerator = (k * q).sum()
        # vector_norm, unlike sqrt of a sum of squares, has gradient 0 at 0
        denominator = torch.linalg.vector_norm(k) * torch.linalg.vector_norm(q) + 1e-9
        if cka_grad == "numerator_half":
            numerator, denominator = (numerator + numerator.detach()) / 2, denominator.detach()
        return numerator / denominator


def hsic(gram_x: torch.Tensor, gram_y: torch.Tensor) -> torch.Tensor:
    """Unbiased HSIC_1 of two Gram matrices (Song et al. 2012, Eq. 5), and of each with itself.

    With zeroed diagonals, n inputs:
    `[tr(KQ) + (1'K1)(1'Q1) / ((n-1)(n-2)) - 2/(n-2) 1'KQ1] / (n (n-3))`.

    Args:
        gram_x: `[n, n]`, for example `simulate(..., reduce=gram).features[name]`.
        gram_y: `[n, n]`.

    Returns:
        `[3]` float64: HSIC of (x, y), (x, x), (y, y). Average these over batches, then call `cka_from_hsic`.

    Raises:
        ValueError: if n < 4.
    """
    n = len(gram_x)
    if n < 4:
        raise ValueError(f"hsic: the unbiased estimator needs at least 4 inputs in a batch, got {n}")
    # float64: the three terms nearly cancel where the features have a large mean
    gram_x, gram_y = (g.double() - torch.diag(g.diagonal()) for g in (gram_x, gram_y))

    def one(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        sums = k.sum() * q.sum() / ((n - 1) * (n - 2))
        return ((k * q).sum() + sums - 2 / (n - 2) * (k.sum(0) @ q.sum(1))) / (n * (n - 3))

    return torch.stack([one(gram_x, gram_y), one(gram_x, gram_x), one(gram_y, gram_y)])


def cka_from_hsic(terms: torch.Tensor) -> torch.Tensor:
    """CKA from `hsic`'s terms (xy, xx, yy), `[3] -> []`: `xy / (sqrt|xx| sqrt|yy| + 1e-6)`; 0 for a silent layer."""
    own = terms[1:].abs()
    silent = own == 0  # the gradient of a square root is infinite there
    norms = torch.where(silent, 0.0, torch.where(silent, 1.0, own).sqrt())
    return terms[0] / (norms[0] * norms[1] + 1e-6)


def batch_mean_cka(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """Unbiased CKA over several batches: `hsic` terms `[3]` each, averaged first, as in the official code."""
    return cka_from_hsic(torch.stack(list(terms)).mean(0))


def layer_weights(cka: torch.Tensor, clamp: bool = True) -> torch.Tensor:
    """Adaptive weights from the initial conversion loss (the paper's Eq. 9).

    `w_l = e_l / sum_j e_j` with `e_l = 1 - CKA_l`; uniform where the sum is 0.

    Args:
        cka: Initial CKA per layer `[L]`.
        clamp: Floor `e_l` at 0: the unbiased estimator can exceed 1. The official code does not.

    Returns:
        `[L]`, summing to 1.
    """
    loss = 1 - cka
    if clamp:
        loss = loss.clamp(min=0)
    total = loss.sum()
    return torch.full_like(loss, 1 / len(loss)) if total == 0 else loss / total


class ClosedLoopLoss(NamedTuple):
    """The loss and its parts, scalars except `cka`.

    Attributes:
        total: `(1-alpha) task + alpha [beta global_kl + (1-beta) local]`, the paper's Eq. 5.
        task: Cross-entropy of the student with the labels, in nats.
        global_kl: `tau^2 KL(teacher || student)` of the softened class probabilities, mean over the batch (Eq. 7).
        local: `sum_l w_l (1 - CKA_l)` (Eq. 8).
        cka: `[L]`, CKA of each monitored layer, detached.
    """

    total: torch.Tensor
    task: torch.Tensor
    global_kl: torch.Tensor
    local: torch.Tensor
    cka: torch.Tensor


def closed_loop_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    student_features: Mapping[str, torch.Tensor],
    teacher_features: Mapping[str, torch.Tensor],
    weights: torch.Tensor,
    alpha: float = 0.5,
    beta: float = 0.1,
    tau: float = 2.0,
    unbiased: bool = False,
    cka_grad: str = "exact",
) -> ClosedLoopLoss:
    """The loss of closed-loop fine-tuning (the paper's Eqs. 5, 7 and 8).

    Args:
        student_logits: Time-mean logits `[B, K]`.
        teacher_logits: `[B, K]`.
        labels: Class ids `[B]` int64.
        student_features: Layer name -> rate features `[B', ...]`; B' may exceed B where they were gathered over ranks.
        teacher_features: The same names -> activations `[B', ...]`.
        weights: `[L]` in the order of `student_features`, see `layer_weights`.
        alpha: Share of distillation, in [0, 1]; 0 leaves the cross-entropy.
        beta: Share of the global term in the distillation, in [0, 1]; 1 leaves CKA out of the gradient.
        tau: Temperature > 0.
        unbiased: See `linear_cka`.
        cka_grad: See `linear_cka`.
    """
    with torch.autocast(student_logits.device.type, enabled=False):
        student_logits, teacher_logits = _full_precision(student_logits), _full_precision(teacher_logits)
        task = F.cross_entropy(student_logits, labels)
        global_kl = tau**2 * F.kl_div(
            F.log_softmax(student_logits / tau, dim=1),
            F.log_softmax(teacher_logits / tau, dim=1),
            reduction="batchmean",
            log_target=True,
        )
        share = alpha * (1 - beta)
        cka = student_logits.new_zeros(len(student_features))
        if student_features:
            # without a share in the loss, CKA is only measured
            pairs = [(x if share else x.detach(), teacher_features[name]) for name, x in student_features.items()]
            cka = torch.stack([linear_cka(x, y, unbiased, cka_grad) for x, y in pairs])
        local = (weights.to(cka) * (1 - cka)).sum()
        total = (1 - alpha) * task + alpha * beta * global_kl + share * local
    return ClosedLoopLoss(total, task, global_kl, local, cka.detach())
