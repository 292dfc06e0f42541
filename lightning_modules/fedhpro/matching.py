"""Class gradients and what the server fits to them. Pure functions of tensors.

Axes: `n` samples, `c` the class whose loss it is, `k` the classes of the head, `i` hyper-prototypes
(or synthetic features) of a class, `d` features. Equation numbers are the paper's (arXiv 2605.13475).
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.fedhpro.losses import class_means

Distance = Literal["cos", "cos_eps", "coord", "mse"]
Optimizer = Literal["sgd", "adam"]
EPS = 1e-6  # the constant in the released code's distances


def class_gradients(
    features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, divide_again: bool = False
) -> tuple[Tensor, Tensor]:
    """Mean gradient of the cross-entropy for the features, class by class (Eq. 5).

    Closed form: `g_c = mean over samples of class c of W^T (softmax(W z + b) - e_c)`.

    Args:
        features: `(n, d)` from the received model in eval mode.
        labels: `(n,)`, int64.
        weight: `(k, d)` of the head.
        bias: `(k,)` of the head.
        divide_again: Divide by the class's sample count once more, as the released code does. It leaves one
            client's cosine alone, but gives clients with few samples more weight in the mean over clients.

    Returns:
        Gradients `(k, d)`, zero for absent classes, and the counts `(k,)`, int64.
    """
    errors = F.softmax(features @ weight.T + bias, dim=1) - F.one_hot(labels, len(weight)).to(features.dtype)
    mean_errors, counts = class_means(errors, labels, len(weight))
    gradients = mean_errors @ weight
    return gradients / counts.clamp(min=1)[:, None] if divide_again else gradients, counts


def head_gradients(features: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of each class's mean cross-entropy for the head: what a CReFF client uploads.

    Args:
        features: `(n, d)`.
        labels: `(n,)`, int64.
        weight: `(k, d)` of the head.
        bias: `(k,)` of the head.

    Returns:
        `(c, k, d)` for the weight and `(c, k)` for the bias, c = k; zero for absent classes.
    """
    errors = F.softmax(features @ weight.T + bias, dim=1) - F.one_hot(labels, len(weight)).to(features.dtype)
    for_weight = features.new_zeros(len(weight), *weight.shape)
    for c in labels.unique().tolist():
        own = labels == c
        for_weight[c] = errors[own].T @ features[own] / own.sum()
    return for_weight, class_means(errors, labels, len(weight))[0]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine over the last axis, `(..., d)` to `(...)`; 0, with gradient 0, where either vector is 0."""
    return F.cosine_similarity(a, b, dim=-1, eps=torch.finfo(a.dtype).tiny)


def matching_distance(produced: Tensor, target: Tensor, kind: Distance = "cos") -> tuple[Tensor, Tensor]:
    """Distance between the gradient that hyper-prototypes produce and the clients' one (Eq. 8), and its slope.

    Args:
        produced: `(c, d)`.
        target: `(c, d)`.
        kind: `"cos"` is the paper's `1 - cosine`. The released code offers `"coord"` (its default),
            `sum_q 1 - a_q b_q / (|a_q b_q| + 1e-6)`, a count of disagreeing signs whose slope exists only through the
            constant; `"cos_eps"`, the cosine with 1e-6 in the denominator; and `"mse"`, `sum_q (a_q - b_q)^2`.

    Returns:
        `(c,)`, at least 0, and its derivative for `produced`, `(c, d)`. Where either vector is 0 the cosine is 0 and
        has no slope.

    Raises:
        ValueError: Unknown kind.
    """
    if kind == "mse":
        gap = produced - target
        return gap.square().sum(-1), 2 * gap
    product = produced * target
    if kind == "coord":
        size = product.abs() + EPS
        return (1 - product / size).sum(-1), -EPS * target / size.square()
    if kind not in ("cos", "cos_eps"):
        raise ValueError(f"distance is one of {', '.join(get_args(Distance))}, not {kind!r}")
    inner = product.sum(-1, keepdim=True)
    tiny = torch.finfo(produced.dtype).tiny
    long, short = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=tiny) for x in (produced, target))
    size = (long * short + (EPS if kind == "cos_eps" else 0)).clamp(min=tiny)
    # d(inner / size) = target / size - inner / size^2 * short * produced / long
    slope = inner / size.square() * short / long * produced - target / size
    return (1 - inner / size).squeeze(-1), torch.where(long * short > tiny, slope, 0)


def matching_slope(
    logits: Tensor, own: Tensor, weight: Tensor, targets: Tensor, distance: Distance
) -> tuple[Tensor, Tensor]:
    """Matching loss of each class, and its derivative for the logits of the hyper-prototypes (Eq. 6 to 8).

    With `P = softmax(S W^T + b)` the gradient that the hyper-prototypes of class c produce is
    `g_hp = mean_i (P_i - e_c) W / I`: the gradient of their mean cross-entropy, averaged over the I rows. It is a
    closed form of S, so its chain rule is written out once instead of asking autograd for a second derivative.

    Args:
        logits: `(c, i, k)`, those of the hyper-prototypes.
        own: `(c, k)`, one-hot class of each row.
        weight: `(k, d)` of the head.
        targets: `(c, d)` mean class gradients of the clients.
        distance: See `matching_distance`.

    Returns:
        Losses `(c,)` and the derivative of their sum `(c, i, k)`; times `weight` it is that for the hyper-prototypes.
    """
    num_hyper = logits.shape[1]
    probabilities = F.softmax(logits, dim=-1)
    produced = (probabilities.mean(1) - own) @ weight / num_hyper
    losses, for_produced = matching_distance(produced, targets, distance)
    for_probability = (for_produced @ weight.T / num_hyper**2)[:, None]  # c 1 k, the same for each i
    weighted = probabilities * for_probability
    return losses, weighted - probabilities * weighted.sum(-1, keepdim=True)


def match_hyper_prototypes(
    hyper_prototypes: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    present: Tensor,
    steps: int = 30,
    lr: float = 0.1,
    distance: Distance = "cos",
    optimizer: Optimizer = "sgd",
) -> tuple[Tensor, Tensor]:
    """The server's update: M steps on the summed matching loss (Eq. 6 to 8), with the head fixed.

    A step of SGD moves the hyper-prototypes by a combination of the head's rows, so their logits move by that
    combination times `W W^T`: the steps run on logits, and the hyper-prototypes are moved once, at the end.

    Args:
        hyper_prototypes: `(k, i, d)`; not changed in place.
        weight: `(k, d)` of the head.
        bias: `(k,)` of the head.
        targets: `(k, d)` class gradients, mean over the clients that hold the class.
        present: `(k,)`, bool: classes that at least one client holds. The others are left as they are, bit for bit.
        steps: M.
        lr: Step size.
        distance: See `matching_distance`.
        optimizer: `"sgd"` without momentum (both sources), or `"adam"`, started afresh at each call.

    Returns:
        New hyper-prototypes `(k, i, d)` and the summed loss before each step and after the last, `(steps + 1,)`.

    Raises:
        ValueError: Unknown distance or optimiser.
    """
    if optimizer not in get_args(Optimizer):
        raise ValueError(f"optimizer is one of {', '.join(get_args(Optimizer))}, not {optimizer!r}")
    classes = present.nonzero().squeeze(1)
    moving = hyper_prototypes[classes].clone()
    weight, bias, targets = weight.detach(), bias.detach(), targets[classes]
    own = F.one_hot(classes, len(weight)).to(moving.dtype)
    stepper = torch.optim.Adam([moving], lr=lr) if optimizer == "adam" else None
    logits, gram, trace = moving @ weight.T + bias, weight @ weight.T, []
    moved = torch.zeros_like(logits)
    for step in range(steps + 1):
        losses, slope = matching_slope(logits, own, weight, targets, distance)
        trace.append(losses.sum())
        if step == steps:
            break
        if stepper:
            moving.grad = slope @ weight
            stepper.step()
            logits = moving @ weight.T + bias
        else:
            moved = moved + slope
            logits = logits - lr * slope @ gram
    updated = hyper_prototypes.clone()
    updated[classes] = moving - lr * moved @ weight if steps and not stepper else moving
    return updated, torch.stack(trace)


def match_features(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    target_weight: Tensor,
    target_bias: Tensor,
    present: Tensor,
    steps: int = 100,
    lr: float = 0.1,
) -> Tensor:
    """Fit synthetic features so that they produce the clients' head gradients (CReFF, IJCAI 2022).

    The distance of class c is `sum over head rows of (1 - cosine)` for the weight plus `1 - cosine` for the
    bias.

    Args:
        features: `(k, m, d)`, m synthetic features a class; not changed in place.
        weight: `(k, d)` of the head at which clients took their gradients.
        bias: `(k,)` of the head.
        target_weight: `(c, k, d)` mean of the clients' weight gradients, c = k.
        target_bias: `(c, k)` mean of their bias gradients.
        present: `(k,)`, bool: classes that a client holds; the others stay as they are.
        steps: Plain SGD steps.
        lr: Step size.

    Returns:
        `(k, m, d)`.
    """
    classes = present.nonzero().squeeze(1)
    weight, bias = weight.detach(), bias.detach()
    own = F.one_hot(classes, len(weight)).to(features.dtype)[:, None]  # c 1 k
    moving = features[classes].clone()
    for _ in range(steps):
        with torch.enable_grad():
            moving.requires_grad_()
            errors = F.softmax(moving @ weight.T + bias, dim=-1) - own  # c m k
            for_weight = errors.transpose(1, 2) @ moving / moving.shape[1]  # c k d
            loss = (1 - cosine(for_weight, target_weight[classes])).sum()
            loss = loss + (1 - cosine(errors.mean(1), target_bias[classes])).sum()
            (gradient,) = torch.autograd.grad(loss, moving)
        moving = moving.detach() - lr * gradient
    updated = features.clone()
    updated[classes] = moving
    return updated


def retrain_head(
    features: Tensor, generator: torch.Generator, epochs: int = 100, batch_size: int = 50, lr: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Train a fresh linear head on synthetic features (CReFF and the released FedHPro code).

    Args:
        features: `(k, m, d)`.
        generator: CPU generator of the initialisation and the order of the batches.
        epochs: Passes over the `k * m` features.
        batch_size: Features a step.
        lr: Step size of plain SGD.

    Returns:
        Weight `(k, d)` and bias `(k,)`.
    """
    num_classes, per_class, dim = features.shape
    rows = features.detach().flatten(0, 1)
    labels = torch.arange(num_classes, device=features.device).repeat_interleave(per_class)
    bound = dim**-0.5  # nn.Linear's own initialisation, drawn from `generator`
    weight = ((2 * torch.rand(num_classes, dim, generator=generator) - 1) * bound).to(rows)
    bias = ((2 * torch.rand(num_classes, generator=generator) - 1) * bound).to(rows)
    for _ in range(epochs):
        for batch in torch.randperm(len(rows), generator=generator).to(rows.device).split(batch_size):
            z = rows[batch]
            errors = F.softmax(z @ weight.T + bias, dim=1) - F.one_hot(labels[batch], num_classes).to(z.dtype)
            weight = weight - lr * (errors.T @ z) / len(batch)
            bias = bias - lr * errors.mean(0)
    return weight, bias
