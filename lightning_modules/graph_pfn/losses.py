"""What GraphPFN is asked and trained with: questions, answers, the in-context loss and masked graph modelling.

Axes: `n` nodes, `f` columns, `m` directed edges, `c` classes, `d` token width, `g` column groups of `p` columns.
Source: GraphPFN (arXiv 2509.21489), `graphpfn` 0.1.1 package.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Task = Literal["classification", "regression"]


class Question(NamedTuple):
    """One graph with some labels, the labelled nodes first.

    Attributes:
        x: features (n, f), float32; NaN where missing.
        y: targets of the first nodes (n_context,): labels (int64) or values (float32).
        edges: (2, m) int64, both directions, no loops and duplicates; None for a table without a graph.
    """

    x: Tensor
    y: Tensor
    edges: Tensor | None


class Answer(NamedTuple):
    """What a network makes of a question.

    Attributes:
        query: logits (n - n_context, c) or values (n - n_context,) of the nodes after the context.
        target: final target tokens (n, d).
        features: reconstructed features (n, g, p) in units of context deviations, if asked for.
    """

    query: Tensor
    target: Tensor
    features: Tensor | None = None


def prediction_loss(query: Tensor, y: Tensor, task: Task) -> Tensor:
    """Cross-entropy over all logits (nats), or squared error, averaged over the query nodes.

    Args:
        query: logits (q, c) or values (q,).
        y: labels (q,) int64 or values (q,).
        task: which of the two.
    """
    return F.cross_entropy(query, y) if task == "classification" else F.mse_loss(query, y)


def context_baseline(y_context: Tensor, y: Tensor, task: Task) -> Tensor:
    """Loss of predicting the context's class frequencies (with one extra count per class), or its mean.

    Args:
        y_context: targets of the context (k,).
        y: targets of the query nodes (q,).
        task: how they are read.
    """
    if task == "regression":
        return (y - y_context.mean()).square().mean()
    classes = int(torch.maximum(y_context.max(), y.max())) + 1
    count = torch.bincount(y_context, minlength=classes) + 1
    return -(count / count.sum()).log()[y].mean()


class HiddenEdges(NamedTuple):
    """Edges taken out of a graph.

    Attributes:
        visible: edges that stay (2, m - k).
        pairs: k hidden edges, then as many pairs that are not joined (2, 2 k).
        joined: (2 k,) float32, 1 for the former.
    """

    visible: Tensor
    pairs: Tensor
    joined: Tensor


def hide_edges(edges: Tensor, n: int, rate: float, both: bool, generator: torch.Generator | None = None) -> HiddenEdges:
    """Hide a share of the edges and draw as many pairs of nodes that are not joined.

    Args:
        edges: (2, m), both directions.
        n: number of nodes.
        rate: probability that an edge is hidden; at most 1,000,000 are.
        both: hide both directions of an edge together. The released code draws each direction by itself, which mostly
            leaves the other one visible.
        generator: source of randomness.
    """
    m = edges.shape[1]
    device = edges.device
    draw = torch.rand(m, generator=generator, device=generator.device if generator else device).to(device)
    if both:
        key = edges.amin(0) * n + edges.amax(0)
        draw = draw[torch.unique(key, return_inverse=True)[1]]
    hidden = draw < rate
    hidden &= hidden.cumsum(0) <= 1_000_000
    count = int(hidden.sum())
    wanted = torch.randint(
        n, (2, 4 * count + 16), generator=generator, device=generator.device if generator else device
    ).to(device)
    free = (wanted[0] != wanted[1]) & ~torch.isin(wanted[0] * n + wanted[1], edges[0] * n + edges[1])
    negatives = wanted[:, free][:, :count]
    pairs = torch.cat([edges[:, hidden], negatives], 1)
    joined = torch.cat([torch.ones(count), torch.zeros(negatives.shape[1])]).to(device)
    return HiddenEdges(edges[:, ~hidden], pairs, joined)


def edge_loss(head: nn.Module, target: Tensor, hidden: HiddenEdges) -> Tensor:
    """Binary cross-entropy (nats) of telling hidden edges from pairs that are not joined; 0 if none was hidden."""
    if len(hidden.joined) == 0:
        return target.sum() * 0
    return F.binary_cross_entropy_with_logits(head(target, hidden.pairs), hidden.joined)


def hide_features(
    x: Tensor, rate: float, replace: Literal["permute", "missing"], generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Hide a share of the cells.

    Args:
        x: (n, f).
        rate: probability that a cell is hidden.
        replace: put there a value of the same column from a random row, or NaN.
        generator: source of randomness, on the CPU.

    Returns:
        The table with replacements, and the hidden cells (n, f) bool.
    """
    hidden = (torch.rand(x.shape, generator=generator) < rate).to(x.device)
    if replace == "missing":
        return x.masked_fill(hidden, torch.nan), hidden
    rows = torch.randint(len(x), x.shape, generator=generator).to(x.device)
    return torch.where(hidden, x.gather(0, rows), x), hidden


def feature_loss(features: Tensor, x: Tensor, n_context: int, hidden: Tensor) -> Tensor:
    """Squared error on the hidden cells, in units of the context's deviations; 0 if none was hidden.

    Args:
        features: reconstruction (n, g, p).
        x: true features (n, f).
        n_context: number of context rows.
        hidden: (n, f) bool.
    """
    mean, std = x[:n_context].mean(0), x[:n_context].std(0).clamp(min=1e-6)
    error = (features.flatten(1)[:, : x.shape[1]] - (x - mean) / std).square()
    return error[hidden].mean() if hidden.any() else features.sum() * 0
