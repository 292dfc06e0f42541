"""Synthetic graphs with attributes and targets, for pretraining GraphPFN.

Two priors: `PaperPrior`, the released one with all its hyper-priors, and `SmallPrior`, which teaches a small model in
minutes on a CPU. A graph is a function of (seed, index) alone, whatever the number of workers and ranks; with
`SmallPrior`, where the graphs of a batch have something in common, also of the size of the batch.

Source: GraphPFN (arXiv 2509.21489), `graphpfn` 0.1.1, version 1.3 of the released configuration; `SmallPrior` is ours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.random import Generator, Philox
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.checks import check_least, check_ranges, check_seeds
from datamodules.graph_attributes import (
    PRIOR_ACTIVATIONS,
    Adjacency,
    Array,
    Scm,
    neighbour_mean,
    random_activation,
    sample_attributes,
    standardise,
)
from datamodules.graph_structure import (
    Floats,
    Ints,
    Rejected,
    ball,
    block_model,
    both_directions,
    geometric_graph,
    graph_statistics,
    largest_component,
    simple_pairs,
    two_level_graph,
)
from datamodules.nodes import NodeClassification, Nodes
from datamodules.order import Draw, GlobalBatches, Loader, describe, ranks


class GraphTask(NamedTuple):
    """One graph, some of whose nodes are labelled.

    Attributes:
        x: features (n, f), float32, standardised over all nodes.
        edge_index: (2, m) int64, both directions of every edge, no loops.
        y: targets of all nodes (n,): class labels 0 to classes - 1 (int64) or standardised values (float32).
        n_context: the first `n_context` nodes are labelled, the others are to be predicted.
        classes: number of classes, 0 for regression.
        number: of the graph under its seed, from which what is drawn about it in training follows.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    n_context: int
    classes: int
    number: int = 0


# --- distributions ----------------------------------------------------------------------------------------------------


def _log_uniform(rng: Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _scaled_truncated(rng: Generator, low: float, high: float) -> float:
    """Normal truncated to [0, 1e6] with mean m ~ LogU(low, high) and deviation m * LogU(0.01, 1)."""
    mean = _log_uniform(rng, low, high)
    std = mean * _log_uniform(rng, 0.01, 1.0)
    while True:
        value = rng.normal(mean, std)
        if 0 <= value <= 1e6:
            return value


def _coin(rng: Generator) -> bool:
    return bool(rng.random() < 0.5)


# --- features and targets ---------------------------------------------------------------------------------------------


def clamp_outliers(x: Array, threshold: float = 4.0) -> Array:
    """Clamp columns to mean ± `threshold` deviations, the second time with statistics that leave outliers out.

    NaN is left out of the statistics and kept.
    """

    def limits(values: Array) -> tuple[Array, Array]:
        mean, std = np.nanmean(values, 0), np.maximum(np.nanstd(values, 0, ddof=1), 1e-6)
        return mean - threshold * std, mean + threshold * std

    low, high = limits(x)
    low, high = limits(np.where((x >= low) & (x <= high), x, np.nan))
    return np.clip(x, low, high)


def scale(x: Array) -> Array:
    """Standardise columns (unbiased deviation, at least 1e-6), clip to ±100; NaN is left out and kept."""
    std = np.maximum(np.nanstd(x, 0, ddof=1), 1e-6)
    return np.clip((x - np.nanmean(x, 0)) / std, -100, 100).astype(np.float32)


def count_exceeded(x: Array, boundaries: Array) -> Ints:
    """How many `boundaries` (k,) each value of `x` (n,) exceeds."""
    return np.searchsorted(np.sort(boundaries), x, side="left")


def renumber(codes: Ints, permutation: Ints) -> Ints:
    """Replace each code by `permutation[its rank among the codes present]`."""
    return permutation[np.unique(codes, return_inverse=True)[1]]


def _permuted(rng: Generator, codes: Ints) -> Ints:
    return renumber(codes, rng.permutation(len(np.unique(codes))))


def make_categorical(rng: Generator, x: Array, probability: float, most: int = 256) -> Array:
    """With `probability`, turn a random share of the columns into ordinal codes of random cells between values."""
    if rng.random() >= probability:
        return x
    x = x.copy()
    for column in np.flatnonzero(rng.random(x.shape[1]) < rng.random()):
        categories = min(max(round(rng.gamma(1, 10)), 2), most)
        boundaries = x[rng.integers(len(x), size=categories - 1), column]
        codes = count_exceeded(x[:, column], boundaries)
        x[:, column] = _permuted(rng, codes) if rng.random() > 0.3 else codes
    return x


def binary_labels(y: Array, quantile: float, flip: bool) -> Ints:
    """1 below the quantile, 0 above; the other way round with `flip`."""
    return ((y < np.quantile(y, quantile)) ^ flip).astype(np.int64)


def rank_labels(y: Array, boundaries: Array, permutation: Ints | None, reverse: bool) -> Ints:
    """Number of boundaries exceeded, then permuted, then reversed."""
    codes = count_exceeded(y, boundaries)
    if permutation is not None:
        codes = renumber(codes, permutation)
    return len(boundaries) - codes if reverse else codes


def _labels(rng: Generator, y: Array, task: str, classes: int, quantile: float) -> Array | Ints:
    y = scale(y[:, None])[:, 0]
    if task == "regression":
        return y
    if task == "binary":
        codes = binary_labels(y, quantile, _coin(rng))
    else:
        boundaries = y[rng.integers(len(y), size=classes - 1)]
        codes = count_exceeded(y, boundaries)
        if rng.random() > 0.2:
            codes = _permuted(rng, codes)
        if _coin(rng):
            codes = classes - 1 - codes
    return _permuted(rng, codes)


def _around_means(rng: Generator, owner: Ints, part: Ints, scale: Floats) -> Array:
    """Unit Gaussians around the means of communities, which lie around those of their classes.

    Args:
        rng: source of randomness.
        owner: class of each community.
        part: community of each node (n,).
        scale: (f,) deviation of the means in each column, times sqrt(f / 2).

    Returns:
        (n, f).
    """
    f, own = len(scale), rng.uniform(0, 0.7)
    of_class = rng.standard_normal((owner.max() + 1, f))[owner]
    of_part = rng.standard_normal((len(owner), f))
    means = scale * math.sqrt(2 / f) * ((1 - own) * of_class + own * of_part)
    return means[part].astype(np.float32) + rng.standard_normal((len(part), f), dtype=np.float32)


def _covered(y: Ints, n_context: int, classes: int) -> bool:
    """Exactly `classes` classes, each among the context and among the rest."""
    return len(np.unique(y)) == len(np.unique(y[:n_context])) == len(np.unique(y[n_context:])) == classes


MOST_REJECTED = 1000
"""Draws in a row of which one must pass; with the default settings, most do."""


def _nothing_passes(prior: Any, reason: str) -> str:
    return f"{type(prior).__name__}: none of {MOST_REJECTED} graphs passes ({reason}): widen settings such as nodes"


# --- the released prior -----------------------------------------------------------------------------------------------


@dataclass
class PaperPrior:
    """The released prior: two-level block models with preferential attachment, then GNN-SCM attributes and targets.

    Attributes:
        nodes: smallest and largest wanted number of nodes, log-uniform.
        sparse_degree: mean degree of one half of the graphs, log-uniform.
        dense_degree: mean degree of the other half, log-uniform.
        features: smallest and largest number of features, uniform.
        context: smallest and largest share of labelled nodes, uniform.
        attributes_first: share of graphs whose classes are drawn first and become the groups of a block model
            (in the code, not in the released configuration; multiclass only).
        categorical: probability that some columns become categorical.
        tries: draws with one configuration before a new one is drawn.
    """

    nodes: tuple[int, int] = (1000, 5000)
    sparse_degree: tuple[float, float] = (1.5, 100.0)
    dense_degree: tuple[float, float] = (100.0, 500.0)
    features: tuple[int, int] = (4, 100)
    context: tuple[float, float] = (0.05, 0.5)
    attributes_first: float = 0.0
    categorical: float = 0.2
    tries: int = 3

    def draw_scm(self, rng: Generator) -> Scm:
        """Draw the hyper-parameters of attributes and targets."""
        return Scm(
            features=int(rng.integers(self.features[0], self.features[1] + 1)),
            causes=1 + round(_scaled_truncated(rng, 1, 12)),
            layers=2 + round(_scaled_truncated(rng, 1, 6)),
            hidden=4 + round(_scaled_truncated(rng, 5, 130)),
            noise=_scaled_truncated(rng, 1e-4, 0.3),
            noise_per_unit=_coin(rng),
            init=_scaled_truncated(rng, 0.01, 10),
            dropout=0.9 * rng.beta(*rng.uniform(0.1, 5.0, 2)),
            blocks=_coin(rng),
            causal=_coin(rng),
            y_is_effect=_coin(rng),
            in_clique=_coin(rng),
            sort_features=_coin(rng),
            use_degree=_coin(rng),
            use_pagerank=_coin(rng),
            strategy=("normal", "mixed", "uniform")[rng.integers(3)],
            drawn_statistics=_coin(rng),
            convolution=("gcn", "sage-mean", "sage-min", "sage-max", "gt")[rng.integers(5)],
            convolved=rng.integers(11) / 10,
            activation=None if _coin(rng) else PRIOR_ACTIVATIONS[rng.integers(len(PRIOR_ACTIVATIONS))],
        )

    def __call__(self, rng: Generator) -> GraphTask:
        """Draw a graph that passes the filters.

        Raises:
            ValueError: none of `MOST_REJECTED` draws passes.
        """
        reason = ""
        for _ in range(MOST_REJECTED):
            n = round(_log_uniform(rng, *self.nodes))
            degree = _log_uniform(rng, *(self.sparse_degree if _coin(rng) else self.dense_degree))
            n_context = int(n * rng.uniform(*self.context))
            attributes_first = rng.random() < self.attributes_first
            task = "multiclass" if attributes_first else ("regression", "binary", "multiclass")[rng.integers(3)]
            classes = int(rng.integers(2, 11)) if task == "multiclass" else 2
            quantile = rng.uniform(0.01, 0.99)
            scm = self.draw_scm(rng)
            structure: dict[str, Any] = {
                "attached_share": rng.uniform(0, 0.3),
                "attached_degree": 2,
                "subgraphs": int(rng.integers(2, 9)),
                "first_level_share": rng.uniform(0.05, 0.95),
                "smallest_subgraph": 64,
                "groups": int(rng.integers(2, 9)),
                "offdiagonal": 0.1,
            }
            for _ in range(self.tries):
                try:
                    y: Array | Ints
                    if attributes_first:
                        pairs, x, y = self._attributes_first(rng, n, degree, scm, classes, quantile)
                    else:
                        pairs, size = two_level_graph(rng, n, degree, **structure)
                        if n_context >= size:
                            raise Rejected("the largest component has no node left to predict")
                        x, value = sample_attributes(rng, pairs, size, scm)
                        y = _labels(rng, value, task, classes, quantile)
                    return self._finish(rng, pairs, x, y, n_context, 0 if task == "regression" else classes)
                except Rejected as error:
                    reason = str(error)
        raise ValueError(_nothing_passes(self, reason))

    def _attributes_first(
        self, rng: Generator, n: int, degree: float, scm: Scm, classes: int, quantile: float
    ) -> tuple[Ints, Array, Ints]:
        scm.convolved, scm.use_degree, scm.use_pagerank = 0.0, False, False
        x, value = sample_attributes(rng, np.empty((2, 0), dtype=np.int64), n, scm)
        y = _labels(rng, value, "multiclass", classes, quantile).astype(np.int64)
        order = np.argsort(y, kind="stable")
        x, y = x[order], y[order]
        source, target = block_model(rng, y, degree, 0.1)
        pairs, kept = largest_component(simple_pairs(source, target, n), n)
        x, y = x[kept], y[kept]
        order = rng.permutation(len(y))
        pairs = np.argsort(order)[pairs]
        return simple_pairs(pairs[0], pairs[1], len(y)), x[order], y[order]

    def _finish(
        self, rng: Generator, pairs: Ints, x: Array, y: Array | Ints, n_context: int, classes: int
    ) -> GraphTask:
        if not 0 < n_context < len(y):
            raise Rejected("no node to learn from or none to predict")
        x = scale(clamp_outliers(make_categorical(rng, x, self.categorical)))[:, rng.permutation(x.shape[1])]
        x = x[:, (x[:n_context] != x[0]).any(0)]
        if x.shape[1] < 4:
            raise Rejected("fewer than 4 columns vary among the context nodes")
        if classes and not _covered(y.astype(np.int64), n_context, classes):
            raise Rejected("a class is missing from the context or from the rest")
        return _as_task(pairs, x, y, n_context, classes)


def _as_task(pairs: Ints, x: Array, y: Array | Ints, n_context: int, classes: int) -> GraphTask:
    return GraphTask(
        torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)),
        torch.from_numpy(both_directions(pairs)),
        torch.from_numpy(np.ascontiguousarray(y, dtype=np.int64 if classes else np.float32)),
        int(n_context),
        int(classes),
    )


# --- a prior for small models -----------------------------------------------------------------------------------------


@dataclass
class SmallPrior:
    """A mix for small models: mostly class-first graphs, small, often with few labels per class.

    The released prior has almost no label homophily, which a small model does not live long enough to learn from.
    Here classes are drawn first for most graphs, with communities within classes. Their features are either a few
    columns in any order, or the standardised principal components of a wide table, in which classes, communities and
    nuisances compete for the first components. All graphs of one batch share their size (less the nodes of very rare
    classes where a graph is cut), whether they are regression, and whether edges are left out.

    Attributes:
        nodes: smallest and largest number of nodes, log-uniform.
        degree: smallest and largest mean degree, log-uniform.
        features: smallest and largest number of features, uniform.
        scm: share of graphs from the released prior at small size.
        geometric: share of graphs from points in a latent space; the rest is class-first.
        heterophilous: share of class-first graphs whose edges prefer other classes.
        uninformative: share of class-first graphs whose edges ignore classes.
        separation: smallest and largest distance of class means, in deviations, log-uniform.
        reduced: share of class-first graphs whose features are principal components.
        wide: smallest and largest number of columns before the reduction, log-uniform.
        diffused: share of class-first graphs with edges whose features are seen at the neighbours.
        balls: share of class-first and geometric graphs that are the surroundings of one node in a larger graph, as
            graphs too large for the memory are cut: there the class of that node often outnumbers the others.
        larger: smallest and largest number of times that such a graph is larger, log-uniform.
        balanced: share of contexts with equally many labels per class.
        per_class: smallest and largest number of labels per class in those, log-uniform.
        regression: share of batches that are regression.
        edgeless: share of batches without edges: keeps the use of features alive.
    """

    nodes: tuple[int, int] = (100, 1500)
    degree: tuple[float, float] = (1.5, 60.0)
    features: tuple[int, int] = (4, 16)
    scm: float = 0.2
    geometric: float = 0.25
    heterophilous: float = 0.2
    uninformative: float = 0.15
    separation: tuple[float, float] = (0.4, 3.5)
    reduced: float = 0.6
    wide: tuple[int, int] = (24, 128)
    diffused: float = 0.15
    balls: float = 0.4
    larger: tuple[float, float] = (2.0, 10.0)
    balanced: float = 0.7
    per_class: tuple[int, int] = (2, 25)
    regression: float = 0.05
    edgeless: float = 0.2

    def __call__(self, rng: Generator, shared: Generator) -> GraphTask:
        """Draw a graph; `shared` is the same for all graphs of a batch.

        Raises:
            ValueError: none of `MOST_REJECTED` draws passes.
        """
        reason = ""
        n = round(_log_uniform(shared, *self.nodes))
        regression, edgeless = shared.random() < self.regression, shared.random() < self.edgeless
        for _ in range(MOST_REJECTED):
            try:
                kind = rng.random()
                if regression or kind < self.scm:
                    pairs, x, y = self._scm(rng, n, regression)
                else:
                    cut = rng.random() < self.balls
                    whole = round(n * _log_uniform(rng, *self.larger)) if cut else n
                    if kind < self.scm + self.geometric:
                        pairs, x, y = self._geometric(rng, whole)
                    else:  # more communities in a larger graph, so that a part of it is not like the whole
                        pairs, x, y = self._class_first(rng, whole, 16 if cut else 4)
                    if cut:
                        pairs, x, y = self._cut(rng, pairs, x, y, n)
                return self._finish(rng, pairs, x, y, regression, edgeless)
            except Rejected as error:
                reason = str(error)
        raise ValueError(_nothing_passes(self, reason))

    def _degree(self, rng: Generator, n: int) -> float:
        return min(_log_uniform(rng, *self.degree), n / 4)

    def _scm(self, rng: Generator, n: int, regression: bool) -> tuple[Ints, Array, Array | Ints]:
        scm = PaperPrior(features=self.features).draw_scm(rng)
        scm.layers, scm.hidden = min(scm.layers, 4), min(scm.hidden, 32)
        pairs, size = two_level_graph(
            rng,
            n,
            self._degree(rng, n),
            attached_share=rng.uniform(0, 0.3),
            attached_degree=2,
            subgraphs=int(rng.integers(2, 9)),
            first_level_share=rng.uniform(0.05, 0.95),
            smallest_subgraph=min(32, n - 1),  # else a graph of 32 nodes with values is never found
            groups=int(rng.integers(2, 7)),
            offdiagonal=0.1,
        )
        x, y = sample_attributes(rng, pairs, size, scm)
        x = make_categorical(rng, x, 0.2)
        if regression:
            return pairs, x, scale(y[:, None])[:, 0]
        task = "binary" if _coin(rng) else "multiclass"
        return pairs, x, _labels(rng, y, task, int(rng.integers(2, 8)), rng.uniform(0.05, 0.95))

    def _classes(self, rng: Generator, n: int) -> Ints:
        """Class of each node, ascending, 2 to 10 classes of random shares."""
        classes = int(rng.integers(2, 11)) if rng.random() < 0.4 else int(rng.integers(2, 6))
        share = rng.dirichlet(np.full(classes, _log_uniform(rng, 1, 30)))
        return np.sort(rng.choice(classes, n, p=share))

    def _cut(self, rng: Generator, pairs: Ints, x: Array, y: Ints, n: int) -> tuple[Ints, Array, Ints]:
        """The `n` nodes around a random node, less those of classes with fewer than four of them."""
        kept = ball(rng, pairs, len(y), n)
        kept = kept[np.bincount(y[kept])[y[kept]] >= 4]
        if not len(kept):
            raise Rejected("no class has four nodes in the part that is cut out")
        number = np.full(len(y), -1)
        number[kept] = np.arange(len(kept))
        pairs = number[pairs]
        return np.sort(pairs[:, (pairs >= 0).all(0)], 0), x[kept], y[kept]

    def _class_first(self, rng: Generator, n: int, communities: int = 4) -> tuple[Ints, Array, Ints]:
        y = np.unique(self._classes(rng, n), return_inverse=True)[1]
        classes = y[-1] + 1
        # Every class consists of up to `communities` communities with their own feature means.
        part = np.sort(y * communities + rng.integers(int(rng.integers(1, communities + 1)), size=n))
        part = np.unique(part, return_inverse=True)[1]
        owner = np.zeros(part[-1] + 1, dtype=np.int64)
        owner[part] = y
        x = self._reduced(rng, owner, part) if rng.random() < self.reduced else self._columns(rng, owner, part)
        kind = rng.random()
        density = rng.random((len(owner), len(owner)))
        same = owner[:, None] == owner
        if kind < self.uninformative:
            part = part[rng.permutation(n)]
            density = np.where(np.eye(len(owner), dtype=bool), 1.0, _log_uniform(rng, 0.02, 1) * density)
        elif kind < self.uninformative + self.heterophilous:
            prefers = rng.random((classes, classes)) ** _log_uniform(rng, 1, 6)
            prefers[np.arange(classes), np.arange(classes)] *= rng.random()
            density = (prefers + prefers.T)[owner][:, owner] * (0.2 + density)
        else:
            community = _log_uniform(rng, 0.05, 1)  # density between communities of one class
            density = np.where(same, community * (0.3 + 0.7 * density), _log_uniform(rng, 0.005, 0.4) * density)
            np.fill_diagonal(density, 0.3 + 0.7 * rng.random(len(owner)))
        pairs = self._planted(rng, part, (density + density.T) / 2, self._degree(rng, n))
        if rng.random() < self.diffused:
            noise = rng.standard_normal(x.shape, dtype=np.float32)
            x = standardise(neighbour_mean(Adjacency.of(pairs, n), x)) + _log_uniform(rng, 0.1, 2) * noise
        return pairs, x, y

    def _columns(self, rng: Generator, owner: Ints, part: Ints) -> Array:
        """A few Gaussian columns around the means of classes and communities, unequally informative, then warped."""
        f = int(rng.integers(self.features[0], self.features[1] + 1))
        weight = rng.permutation(np.arange(1, f + 1) ** -rng.uniform(0, 1.5))
        weight *= math.sqrt(f) / np.linalg.norm(weight)
        x = _around_means(rng, owner, part, _log_uniform(rng, *self.separation) * weight)
        kind = rng.random()
        if kind < 0.25:
            x = x @ np.linalg.qr(rng.standard_normal((f, f)))[0].astype(np.float32)
        elif kind < 0.5:
            x = random_activation(rng, ("tanh", "exp", "leaky_relu", "sign", "square")[rng.integers(5)], x)
        elif kind < 0.6:
            x = make_categorical(rng, x, 1.0, 12)
        return x

    def _reduced(self, rng: Generator, owner: Ints, part: Ints) -> Array:
        """Principal components of a wide table: means of classes and communities, a few nuisances, noise.

        Half of the tables are 0/1, of columns that are more or less rare, like bags of words.
        """
        n, wide = len(part), round(_log_uniform(rng, *self.wide))
        scale = rng.random(wide) ** rng.uniform(0, 3)  # few or many columns carry something
        scale *= math.sqrt(wide) / np.linalg.norm(scale)
        low, high = self.separation
        x = _around_means(rng, owner, part, _log_uniform(rng, 1.5 * low, 2 * high) * scale)
        strength = _log_uniform(rng, 0.5, 4) * np.arange(1, rng.integers(1, 9)) ** -rng.uniform(0, 1)
        nuisance = (strength * scale[:, None] / math.sqrt(wide) * rng.standard_normal((wide, len(strength)))).T
        x += rng.standard_normal((n, len(strength)), dtype=np.float32) @ nuisance.astype(np.float32)
        if _coin(rng):
            rarest = _log_uniform(rng, 0.02, 0.3)
            share = np.exp(rng.uniform(math.log(rarest), math.log(0.5), wide))
            limit = np.sort(x, 0)[((1 - share) * n).astype(np.int64), np.arange(wide)]
            x = (x >= limit).astype(np.float32)
        x -= x.mean(0)
        k = min(self.features[1], wide, n // 4)
        axes = np.linalg.eigh(x.T @ x)[1][:, : -k - 1 : -1]
        return x @ axes

    def _planted(self, rng: Generator, part: Ints, density: Floats, degree: float) -> Ints:
        """Edges between communities of given density, between nodes of uneven propensity."""
        n, sizes = len(part), np.bincount(part, minlength=len(density))
        tail = rng.uniform(1.5, 4)
        propensity = (1 - rng.random(n)) ** (-1 / tail) if _coin(rng) else 0.2 + rng.random(n)
        propensity /= np.bincount(part, weights=propensity, minlength=len(density))[part]
        wanted = np.triu(density * sizes[:, None] * sizes)
        count = rng.poisson(wanted * (0.5 * n * degree / wanted.sum()))
        first, second = np.nonzero(count)
        first, second = np.repeat(first, count[first, second]), np.repeat(second, count[first, second])
        order = np.argsort(part, kind="stable")
        mass = np.cumsum(propensity[order])  # community i owns [i, i + 1)

        def draw(where: Ints) -> Ints:
            return order[np.minimum(np.searchsorted(mass, where + rng.random(len(where))), n - 1)]

        return simple_pairs(draw(first), draw(second), n)

    def _geometric(self, rng: Generator, n: int) -> tuple[Ints, Array, Ints]:
        k, classes = int(rng.integers(2, 7)), int(rng.integers(2, 8))
        clusters = int(rng.integers(1, 9))
        centre = _log_uniform(rng, 0.3, 4) * rng.standard_normal((clusters, k))
        z = (centre[rng.integers(clusters, size=n)] + rng.standard_normal((n, k))).astype(np.float32)
        pairs = geometric_graph(rng, z, self._degree(rng, n))
        f = int(rng.integers(self.features[0], self.features[1] + 1))
        hidden = np.tanh(standardise(z) @ rng.standard_normal((k, 32), dtype=np.float32))
        x = hidden @ rng.standard_normal((32, f), dtype=np.float32)
        x = standardise(x) + _log_uniform(rng, 0.3, 5) * rng.standard_normal((n, f), dtype=np.float32)
        score = np.tanh(_log_uniform(rng, 0.3, 2) * standardise(z) @ rng.standard_normal((k, 16), dtype=np.float32))
        score = score @ rng.standard_normal((16, classes), dtype=np.float32)
        return pairs, x, score.argmax(1)

    def _finish(
        self, rng: Generator, pairs: Ints, x: Array, y: Array | Ints, regression: bool, edgeless: bool
    ) -> GraphTask:
        n = len(y)
        order = rng.permutation(n)
        if regression:
            classes = 0
            n_context = int(n * rng.uniform(0.05, 0.5))
        else:
            y = np.unique(y, return_inverse=True)[1]
            classes = int(y.max()) + 1
            if classes < 2 or np.bincount(y).min() < 2:
                raise Rejected("a class is missing from the context or from the rest")
            y = rng.permutation(classes)[y]
            if rng.random() < self.balanced:
                wanted = round(_log_uniform(rng, *self.per_class))
                taken = np.minimum(wanted, np.bincount(y) // 2)
                rank = np.empty(n, dtype=np.int64)  # position of a node among its class, in random order
                for label in range(classes):
                    members = order[y[order] == label]
                    rank[members] = np.arange(len(members))
                labelled = rank < taken[y]
                order = order[np.argsort(~labelled[order], kind="stable")]
                n_context = int(labelled.sum())
            else:
                n_context = int(n * rng.uniform(0.05, 0.5))
                if not _covered(y[order], n_context, classes):
                    raise Rejected("a class is missing from the context or from the rest")
        if not np.isfinite(x).all():
            raise Rejected("a value is not finite")
        with np.errstate(all="ignore"):  # a column that overflows is dropped
            x = scale(clamp_outliers(x))
            x = x[:, x.std(0) > 0][:, : self.features[1]]
        if x.shape[1] < 1:
            raise Rejected("no column varies")
        pairs = np.argsort(order)[pairs][:, : 0 if edgeless else None]
        return _as_task(pairs, x[order], y[order], n_context, classes)


def check_settings(prior: PaperPrior | SmallPrior) -> None:
    """Refuse settings of which no graph can be drawn.

    Raises:
        ValueError: naming the setting.
    """
    for field in fields(prior):
        name, value, default = f"settings.{field.name}", getattr(prior, field.name), field.default
        pair = isinstance(default, tuple)
        kind = int if isinstance(default[0] if isinstance(default, tuple) else default, int) else float
        numbers = list(value) if pair and isinstance(value, (list, tuple)) else [value]
        right = len(numbers) == 1 + pair and all(
            isinstance(number, (int, kind)) and not isinstance(number, bool) for number in numbers
        )
        if not right:
            whole = "whole number" if kind is int else "number"
            raise ValueError(f"{name} is {value!r}, needed is " + (f"a pair of {whole}s" if pair else f"one {whole}"))
        if pair:
            check_ranges(1 if kind is int else 1e-6, **{name: numbers})
        elif kind is int:
            check_least(1, **{name: value})
        elif not 0 <= value <= 1:
            raise ValueError(f"{name} {value} is outside [0, 1]")
    if isinstance(prior, PaperPrior):
        if prior.context[1] >= 1:
            raise ValueError(f"settings.context {list(prior.context)} must end below 1, or no node is left to predict")
        if prior.nodes[1] * prior.context[1] < 1:
            raise ValueError(f"settings.context {list(prior.context)} of so few nodes leaves none to learn from")
        check_least(4, **{"the end of settings.features": prior.features[1]})  # fewer columns are rejected
    else:
        check_least(20, **{"the start of settings.nodes": prior.nodes[0]})
        check_ranges(1.0, **{"settings.larger": prior.larger})


# --- data module ------------------------------------------------------------------------------------------------------


def _generator(seed: int, index: int) -> Generator:
    return Generator(Philox(key=np.array([seed, index], dtype=np.uint64)))


class _Graphs(Dataset[list[GraphTask]]):
    def __init__(self, sample: Callable[[int], GraphTask], per_epoch: int, new_in_every_epoch: bool) -> None:
        self.sample = sample
        self.per_epoch = per_epoch
        self.new_in_every_epoch = new_in_every_epoch

    def __len__(self) -> int:
        return self.per_epoch

    def __getitems__(self, draw: Draw) -> list[GraphTask]:
        first = draw.epoch * self.per_epoch if self.new_in_every_epoch else 0
        return [self.sample(first + int(item)) for item in draw.items]


class GraphPrior(LightningDataModule):
    """Batches of synthetic graphs: lists of `GraphTask`.

    Graph number `i` is a function of (`seed`, i), with the small prior of (`seed`, i, `batch_size`): neither workers
    nor ranks nor an interruption change it. Validation graphs are numbered from the top, so they are never seen in
    training.

    Args:
        prior: `small`, a mix for small models (`SmallPrior`), or `paper`, the released prior (`PaperPrior`).
        settings: changes to the prior's attributes, for example `{nodes: [100, 500]}`.
        batch_size: graphs per optimiser step, all ranks together.
        graphs_per_epoch: training graphs in an epoch; every epoch has new ones.
        validation_graphs: fixed graphs for validation.
        num_workers: processes that draw graphs; 0 draws them in the training process.
        seed: of all graphs.
        real: real graphs to look at during pretraining, each the arguments of a `NodeClassification`.

    Raises:
        ValueError: a number is out of range, or the prior has no such setting.
    """

    __str__ = describe

    def __init__(
        self,
        prior: Literal["small", "paper"] = "small",
        settings: dict[str, Any] | None = None,
        batch_size: int = 8,
        graphs_per_epoch: int = 1600,
        validation_graphs: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        real: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        kind = SmallPrior if prior == "small" else PaperPrior
        unknown = set(settings or {}) - {field.name for field in fields(kind)}
        if unknown:
            raise ValueError(
                f"the {prior} prior has no setting {', '.join(sorted(unknown))}; it has "
                f"{', '.join(field.name for field in fields(kind))}"
            )
        self.prior = kind(**(settings or {}))
        check_settings(self.prior)
        check_least(1, batch_size=batch_size, graphs_per_epoch=graphs_per_epoch, validation_graphs=validation_graphs)
        check_least(0, num_workers=num_workers)
        check_seeds(seed=seed)
        self.batch_size = batch_size
        self.graphs_per_epoch = graphs_per_epoch
        self.validation_graphs = validation_graphs
        self.num_workers = num_workers
        self.seed = seed
        self.real = real or []
        self._real: dict[str, Nodes] = {}

    def sample(self, index: int) -> GraphTask:
        """Draw graph number `index` (0 to 2**62)."""
        rng = _generator(self.seed, index)
        if isinstance(self.prior, PaperPrior):
            return self.prior(rng)._replace(number=index)
        shared = _generator(self.seed, 2**63 + index // self.batch_size)
        return self.prior(rng, shared)._replace(number=index)

    def _validation(self, index: int) -> GraphTask:
        return self.sample(2**62 + index)

    def _loader(self, sample: Callable[[int], GraphTask], size: int, training: bool) -> Loader:
        batches = GlobalBatches(size, self.batch_size, shuffle=False, drop_last=training, seed=self.seed, **ranks(self))
        return Loader(_Graphs(sample, size, training), batches, num_workers=self.num_workers)

    def train_dataloader(self) -> Loader:
        """New graphs in every epoch."""
        return self._loader(self.sample, self.graphs_per_epoch, True)

    def val_dataloader(self) -> Loader:
        """The same graphs every time, although Lightning tells this loader the epoch, too."""
        return self._loader(self._validation, self.validation_graphs, False)

    def real_graphs(self) -> dict[str, Nodes]:
        """The real graphs by name; training nodes are the context, validation nodes the query."""
        if not self._real:
            for settings in self.real:
                data = NodeClassification(**settings)
                data.setup()
                name = Path(data.source).stem.lower()
                self._real[name] = data.batch(data.parts["train"], data.parts["val"])
        return self._real

    def statistics(self, count: int) -> tuple[dict[str, NDArray[Any]], dict[str, dict[str, float]]]:
        """Statistics of the first `count` synthetic graphs that have edges, and of the real ones.

        Returns:
            Statistic -> values, and name -> statistic -> value; see `graph_statistics`.
        """
        rows = []
        for i in range(count):
            task = self.sample(i)
            if task.edge_index.shape[1]:
                rows.append(graph_statistics(task.edge_index.numpy(), task.y.numpy(), len(task.y)))
        prior = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        real = {
            name: graph_statistics(nodes.edge_index.numpy(), nodes.y.numpy(), len(nodes.y))
            for name, nodes in self.real_graphs().items()
        }
        return prior, real
