"""What a FedHPro client adds to its cross-entropy. Pure functions of tensors.

Axes: `b` samples of a batch, `n` samples of a client, `c` classes, `i` hyper-prototypes of a class, `d`
    features.
Equation numbers are those of the paper (arXiv 2605.13475); "released" means github.com/mala-lab/FedHPro.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mean feature of each class: the client's prototypes.

    Args:
        features: `(n, d)`, floating.
        labels: `(n,)`, int64 in `[0, num_classes)`.
        num_classes: Number of rows of the result.

    Returns:
        Means `(num_classes, d)`, zero where the client has no sample, and counts `(num_classes,)`, int64.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    sums = features.new_zeros(num_classes, features.shape[1]).index_add_(0, labels, features)
    return sums / counts.clamp(min=1)[:, None], counts


def client_margin(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    kind: Literal["distance", "inner"] = "distance",
    normalize: bool = False,
) -> Tensor:
    """Client margin d_k: how far apart the client's own classes lie (Eq. 10 and 11).

    `d_k = sum over ordered pairs c1 != c2 of |p_c1 - p_c2| / (C - 1)^2`, pairs of classes that the client
    holds, C all classes. The released code sums inner products instead of distances.

    Args:
        features: `(n, d)` features of the whole client under the received model.
        labels: `(n,)`, int64.
        num_classes: C.
        kind: `"distance"` is the paper's, `"inner"` the released code's.
        normalize: Scale each prototype to length 1 first. The raw margin of the paper easily reaches several
            units, which at a temperature of 0.05 makes the loss linear; the normalised one stays within about
            2.

    Returns:
        Scalar; 0 for a client with fewer than two classes.
    """
    means, counts = class_means(features, labels, num_classes)
    prototypes = means[counts > 0]
    if len(prototypes) < 2:
        return features.new_zeros(())
    if normalize:
        prototypes = F.normalize(prototypes, dim=1)
    if kind == "distance":
        pairs = torch.cdist(prototypes, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
    elif kind == "inner":
        pairs = prototypes @ prototypes.T
        pairs = pairs - pairs.diag().diag()
    else:
        raise ValueError(f"margin kind is 'distance' or 'inner', not {kind!r}")
    return pairs.sum() / (num_classes - 1) ** 2


def class_similarity(features: Tensor, hyper_prototypes: Tensor) -> Tensor:
    """Similarity of each sample to each class: the mean cosine to the class's hyper-prototypes.

    Args:
        features: `(b, d)`.
        hyper_prototypes: `(c, i, d)`; a constant for the clients.

    Returns:
        `(b, c)` in [-1, 1].
    """
    # The mean of cosines is linear in the normalised anchors, so they are averaged first (and not normalised
    # again).
    anchors = F.normalize(hyper_prototypes, dim=2).mean(1)
    return F.normalize(features, dim=1) @ anchors.T


def hpcl_loss(
    features: Tensor,
    labels: Tensor,
    hyper_prototypes: Tensor,
    margin: float | Tensor = 0.0,
    tau: float = 0.05,
    variant: Literal["paper", "code"] = "paper",
    reduction: Literal["mean", "none"] = "mean",
    divide_again: bool | None = None,
) -> Tensor:
    """Hyper-prototype contrastive loss (Eq. 12).

    Paper: `log(1 + sum_{j != y} exp((s_j + d_k) / tau) / exp(s_y / tau))`, mean over the batch, `s` being
    `class_similarity`. Released code: `-log(exp(s_y / tau) / (sum_j exp(s_j / tau) + m))`, mean over the
    batch and divided by the batch size once more.

    Args:
        features: `(b, d)`.
        labels: `(b,)`, int64.
        hyper_prototypes: `(c, i, d)`.
        margin: d_k of the paper (added to the similarities) or m of the code (added to the denominator).
        tau: Temperature, above 0.
        variant: Which formula.
        reduction: `"none"` returns the `(b,)` losses before any averaging.
        divide_again: Divide the mean by the batch size once more; by default as in the variant.

    Returns:
        Scalar, or `(b,)`.
    """
    logits = class_similarity(features, hyper_prototypes) / tau
    if variant == "paper":
        others = 1 - F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        losses = F.cross_entropy(logits + others * (margin / tau), labels, reduction="none")
    elif variant == "code":
        total = logits.logsumexp(1)  # log(e^total + m) without leaving the log scale
        losses = total + torch.log1p(margin * torch.exp(-total)) - logits.gather(1, labels[:, None]).squeeze(1)
    else:
        raise ValueError(f"HPCL variant is 'paper' or 'code', not {variant!r}")
    again = variant == "code" if divide_again is None else divide_again
    return losses if reduction == "none" else losses.mean() / (len(labels) if again else 1)


def hpal_loss(features: Tensor, labels: Tensor, hyper_prototypes: Tensor, normalize: bool = False) -> Tensor:
    """Hyper-prototype alignment loss (Eq. 13): Huber, threshold 1, to the own class's mean.

    The mean is over the batch and the dimensions; the paper does not print its reduction.

    Args:
        features: `(b, d)`.
        labels: `(b,)`, int64.
        hyper_prototypes: `(c, i, d)`.
        normalize: Scale both sides to length 1, as the released code does. The loss is then `(1 - cos) / d`.

    Returns:
        Scalar.
    """
    targets = hyper_prototypes.mean(1)[labels]
    if normalize:
        features, targets = F.normalize(features, dim=1), F.normalize(targets, dim=1)
    return F.smooth_l1_loss(features, targets)
