"""Node attributes and targets from random structural causal models whose layers look at neighbours ("GNN-SCM").

A random multilayer network maps random root causes to hidden states; each of its linear layers sends a random part of
its output units through a graph convolution. Features and the target are read out of the hidden states.

Axes: `n` nodes, `d` units. Everything is float32. Source: prior of GraphPFN (arXiv 2509.21489), `graphpfn` 0.1.1, in
turn after the MLP-SCM of TabICL; version 1.3 of the released configuration.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import expit

from datamodules.graph_structure import Ints, Rejected, both_directions

Array = NDArray[np.float32]
Convolution = Literal["gcn", "sage-mean", "sage-min", "sage-max", "gt"]


class Adjacency(NamedTuple):
    """Neighbours in compressed rows.

    Attributes:
        matrix: (n, n) of ones.
        degree: (n,) float32.
    """

    matrix: csr_array
    degree: Array

    @classmethod
    def of(cls, pairs: Ints, n: int) -> "Adjacency":
        """From undirected pairs (2, m)."""
        source, target = both_directions(pairs)
        matrix = csr_array((np.ones(len(source), dtype=np.float32), (target, source)), shape=(n, n))
        return cls(matrix, np.diff(matrix.indptr).astype(np.float32))


# --- convolutions -----------------------------------------------------------------------------------------------------


def gcn(graph: Adjacency, z: Array) -> Array:
    """Sum over neighbours of z_u / sqrt(d_u d_v), degrees at least 1."""
    scale = (1 / np.sqrt(np.maximum(graph.degree, 1)))[:, None]
    return scale * (graph.matrix @ (scale * z))


def neighbour_mean(graph: Adjacency, z: Array) -> Array:
    """Mean over neighbours, 0 without any."""
    return (graph.matrix @ z) / np.maximum(graph.degree, 1)[:, None]


def neighbour_extreme(graph: Adjacency, z: Array, extreme: np.ufunc) -> Array:
    """Minimum or maximum over neighbours (`np.minimum`, `np.maximum`), 0 without any."""
    out = np.zeros_like(z)
    some = graph.degree > 0
    starts = graph.matrix.indptr[:-1][some]
    columns = max(1, 2**24 // max(1, len(graph.matrix.indices)))  # keeps the gathered edges below 64 MiB
    for first in range(0, z.shape[1] if some.any() else 0, columns):
        part = slice(first, first + columns)
        out[some, part] = extreme.reduceat(z[:, part][graph.matrix.indices], starts, axis=0)
    return out


def graph_transformer(graph: Adjacency, z: Array, qkv: tuple[Array, Array], out: tuple[Array, Array]) -> Array:
    """One-head dot-product attention over neighbours and the node itself.

    Args:
        graph: neighbours.
        z: (n, d).
        qkv: weight (3 d, d) and bias (3 d,); thirds are query, key, value.
        out: weight (k, d) and bias (k,) of the output map.

    Returns:
        (n, k).
    """
    n, d = z.shape
    query, key, value = np.split(z @ qkv[0].T + qkv[1], 3, axis=1)
    matrix = graph.matrix
    if 16 * len(matrix.indices) > n * n:
        score = query @ key.T / np.float32(math.sqrt(d))
        mask = np.eye(n, dtype=bool)
        mask[np.repeat(np.arange(n), np.diff(matrix.indptr)), matrix.indices] = True
        np.putmask(score, ~mask, -np.inf)
        score -= score.max(1, keepdims=True)
        np.exp(score, out=score)
        mixed = (score @ value) / score.sum(1, keepdims=True)
    else:
        target = np.repeat(np.arange(n), np.diff(matrix.indptr))
        target, source = np.concatenate([target, np.arange(n)]), np.concatenate([matrix.indices, np.arange(n)])
        score = np.empty(len(target), dtype=np.float32)
        step = max(1, 2**23 // d)
        for first in range(0, len(target), step):
            part = slice(first, first + step)
            score[part] = np.einsum("md,md->m", query[target[part]], key[source[part]])
        score /= np.float32(math.sqrt(d))
        top = np.full(n, -np.inf, dtype=np.float32)
        np.maximum.at(top, target, score)
        weight = csr_array((np.exp(score - top[target]), (target, source)), shape=(n, n))
        mixed = (weight @ value) / weight.sum(1)[:, None]
    return mixed @ out[0].T + out[1]


# --- structural columns -----------------------------------------------------------------------------------------------


def log_degree(graph: Adjacency) -> Array:
    """log(1 + degree), (n, 1)."""
    return np.log1p(graph.degree)[:, None]


def log_pagerank(graph: Adjacency, damping: float, iterations: int = 30, tolerance: float = 1e-6) -> Array:
    """log(1e-6 + PageRank), (n, 1); stops early once the l1 change is below `tolerance`."""
    n = len(graph.degree)
    rank = np.full(n, 1 / n, dtype=np.float32)
    inverse = 1 / np.maximum(graph.degree, 1)
    for _ in range(iterations):
        before, rank = rank, np.float32(damping) * (graph.matrix @ (rank * inverse)) + np.float32((1 - damping) / n)
        if np.abs(rank - before).sum() < tolerance:
            break
    return np.log(tolerance + rank)[:, None]


# --- activations ------------------------------------------------------------------------------------------------------


def standardise(x: Array) -> Array:
    """Columns minus mean, divided by (unbiased deviation + 1e-6)."""
    return (x - x.mean(0)) / (x.std(0, ddof=1) + np.float32(1e-6))


def _elu(x: Array, alpha: float = 1.0) -> Array:
    return np.where(x > 0, x, np.float32(alpha) * np.expm1(np.minimum(x, 0)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": np.tanh,
    "leaky_relu": lambda x: np.where(x > 0, x, np.float32(0.01) * x),
    "elu": _elu,
    "identity": lambda x: x,
    "selu": lambda x: np.float32(1.0507009873554805) * _elu(x, 1.6732632423543772),
    "silu": lambda x: x * expit(x),
    "relu": lambda x: np.maximum(x, 0),
    "softplus": lambda x: np.logaddexp(x, np.float32(0)),
    "relu6": lambda x: np.clip(x, 0, 6),
    "hardtanh": lambda x: np.clip(x, -1, 1),
    "sign": lambda x: np.where(x >= 0, np.float32(1), np.float32(-1)),
    "rbf": lambda x: np.exp(-(x * x)),
    "exp": np.exp,
    "sqrt_abs": lambda x: np.sqrt(np.abs(x)),
    "unit_interval_indicator": lambda x: (np.abs(x) <= 1).astype(np.float32),
    "sine": np.sin,
    "square": lambda x: x * x,
    "abs": np.abs,
    "sigmoid": expit,  # not in the released prior
}
PRIOR_ACTIVATIONS = [name for name in ACTIVATIONS if name != "sigmoid"] + ["random_fourier"] * 10


def fourier(x: Array, frequency: Array, phase: Array, weight: Array) -> Array:
    """sum_k w_k sin(f_k u + b_k) of the standardised columns u of `x` (n, d); the rest is (k,)."""
    u = standardise(x)
    flat, out = u.reshape(-1), np.empty(u.size, dtype=np.float32)
    step = 2**20 // len(frequency)
    for first in range(0, len(flat), step):
        part = slice(first, first + step)
        out[part] = np.sin(flat[part, None] * frequency + phase) @ weight
    return out.reshape(u.shape)


def random_activation(rng: Generator, name: str, x: Array) -> Array:
    """Standardise, scale and shift by random scalars, then apply the named function.

    The scale is exp(2 N(0, 1)), the shift N(0, 1). `random_fourier` draws 256 frequencies U(0, 256) with weights
    f^a / ||f^a|| * N(0, 1), a = -exp(U(ln 0.7, ln 3)).
    """
    scale, shift = np.float32(math.exp(2 * rng.standard_normal())), np.float32(rng.standard_normal())
    x = scale * (standardise(x) + shift)
    if name != "random_fourier":
        with np.errstate(over="ignore"):  # callers reject what is not finite
            return ACTIVATIONS[name](x)
    frequency = 256 * rng.random(256)
    phase = 2 * math.pi * rng.random(256)
    decay = frequency ** -math.exp(rng.uniform(math.log(0.7), math.log(3.0)))
    weight = decay / np.linalg.norm(decay) * rng.standard_normal(256)
    return fourier(x, *(a.astype(np.float32) for a in (frequency, phase, weight)))


# --- root causes ------------------------------------------------------------------------------------------------------


def root_causes(rng: Generator, n: int, columns: int, strategy: str, drawn_statistics: bool) -> Array:
    """Independent causes (n, columns): `normal`, `uniform` or `mixed`.

    Args:
        rng: source of randomness.
        n: number of nodes.
        columns: number of causes.
        strategy: `mixed` chooses per column among normal, categorical, Zipf and uniform.
        drawn_statistics: with `normal`, draw mean m ~ N(0, 1) and deviation |N(0, 1) m| for each column.
    """
    if strategy == "uniform":
        return rng.random((n, columns), dtype=np.float32)
    normal = rng.standard_normal((n, columns), dtype=np.float32)
    if strategy == "normal":
        if not drawn_statistics:
            return normal
        mean = rng.standard_normal(columns, dtype=np.float32)
        return normal * np.abs(rng.standard_normal(columns, dtype=np.float32) * mean) + mean
    skip = 0.66 * rng.random(3)
    for column in range(columns):
        if rng.random() > skip[0]:
            continue
        if rng.random() > skip[1]:
            share = np.cumsum(rng.random(rng.integers(2, 21)))
            x = np.searchsorted(share, rng.random(n) * share[-1], side="right").astype(np.float32)
            normal[:, column] = (x - x.mean()) / (x.std(ddof=1) + 1e-6)
        elif rng.random() > skip[2]:
            x = np.minimum(rng.zipf(2 + 2 * rng.random(), n), 10).astype(np.float32)
            normal[:, column] = x - x.mean()
        else:
            normal[:, column] = rng.random(n, dtype=np.float32)
    return normal


# --- layers -----------------------------------------------------------------------------------------------------------


@dataclass
class Scm:
    """What one structural causal model is made with.

    Attributes:
        features: number of features to read out.
        causes: root causes; without `causal` the features themselves are the causes.
        layers: linear layers, at least 2.
        hidden: units of a layer; raised to 1 + 2 * features when `causal`.
        noise: deviation of the noise added by every layer but the first.
        noise_per_unit: draw each unit's deviation as |N(0, noise)|.
        init: deviation of the weights.
        dropout: share of the weights set to zero, unless `blocks`.
        blocks: weights are zero outside random diagonal blocks.
        causal: features and target are hidden units; otherwise causes and the output of one more layer.
        y_is_effect: the target is the last unit of the last layer.
        in_clique: features and target are neighbouring units.
        sort_features: features keep the order of the units.
        use_degree: log-degree is one of the inputs.
        use_pagerank: log-PageRank is one of the inputs.
        strategy: distribution of the causes, see `root_causes`.
        drawn_statistics: see `root_causes`.
        convolution: the graph convolution of all layers.
        convolved: probability that a unit takes the convolution's output.
        activation: name of the activation, or None to draw one for every layer.
    """

    features: int
    causes: int
    layers: int
    hidden: int
    noise: float
    noise_per_unit: bool
    init: float
    dropout: float
    blocks: bool
    causal: bool
    y_is_effect: bool
    in_clique: bool
    sort_features: bool
    use_degree: bool
    use_pagerank: bool
    strategy: str
    drawn_statistics: bool
    convolution: Convolution
    convolved: float
    activation: str | None


def block_weight(rng: Generator, rows: int, columns: int, std: float, blocks: int) -> Array:
    """Zero but for `blocks` diagonal blocks of N(0, std / sqrt(share of entries in blocks))."""
    weight = np.zeros((rows, columns), dtype=np.float32)
    height, width = rows // blocks, columns // blocks
    std = std / math.sqrt(blocks * height * width / (rows * columns))
    for i in range(blocks):
        block = std * rng.standard_normal((height, width), dtype=np.float32)
        weight[i * height : (i + 1) * height, i * width : (i + 1) * width] = block
    return weight


def _linear(rng: Generator, scm: Scm, rows: int, columns: int, first: bool) -> tuple[Array, Array]:
    """Random weight (rows, columns) and bias (rows,); the first matrix of a model has no dropout."""
    limit = 1 / math.sqrt(columns)
    bias = rng.uniform(-limit, limit, rows).astype(np.float32)
    if scm.blocks:
        blocks = int(rng.integers(1, math.ceil(math.sqrt(min(rows, columns))) + 1))
        return block_weight(rng, rows, columns, scm.init, blocks), bias
    drop = 0.0 if first else min(scm.dropout, 0.99)
    weight = rng.standard_normal((rows, columns), dtype=np.float32)
    weight *= np.float32(scm.init / math.sqrt(1 - drop))
    if drop:
        weight *= rng.random((rows, columns), dtype=np.float32) < 1 - drop
    return weight, bias


def convolve(graph: Adjacency, z: Array, kind: Convolution) -> Array:
    """Apply a convolution without weights to (n, d)."""
    if kind == "gcn":
        return gcn(graph, z)
    if kind == "sage-mean":
        return neighbour_mean(graph, z)
    return neighbour_extreme(graph, z, np.minimum if kind == "sage-min" else np.maximum)


def mixed_layer(rng: Generator, graph: Adjacency, scm: Scm, x: Array, units: int, first: bool) -> Array:
    """Linear layer whose units take their convolved value with probability `scm.convolved`: (n, d) to (n, units)."""
    weight, bias = _linear(rng, scm, units, x.shape[1], first)
    z = x @ weight.T + bias
    convolved = rng.random(units) < scm.convolved
    if scm.convolution == "gt":
        qkv = _linear(rng, scm, 3 * units, units, False)
        out = _linear(rng, scm, units, units, False)
        if convolved.any():
            z[:, convolved] = graph_transformer(graph, z, qkv, (out[0][convolved], out[1][convolved]))
    elif convolved.any():
        z[:, convolved] = convolve(graph, z[:, convolved], scm.convolution)
    return z


def read_out(states: Array, features: int, chosen: Ints, y_is_effect: bool, sort_features: bool) -> tuple[Array, Array]:
    """Read features and target out of hidden states.

    Args:
        states: (n, d), all kept layers side by side.
        features: number of features.
        chosen: unit numbers; the first is the target unless `y_is_effect`, the next `features` are the features.
        y_is_effect: the target is the last unit.
        sort_features: features in ascending order of their units.

    Returns:
        (n, features) and (n,).
    """
    columns = chosen[1 : 1 + features]
    if sort_features:
        columns = np.sort(columns)
    return states[:, columns], states[:, -1 if y_is_effect else chosen[0]]


def sample_attributes(rng: Generator, pairs: Ints, n: int, scm: Scm) -> tuple[Array, Array]:
    """Draw features and a target on a graph.

    Args:
        rng: source of randomness.
        pairs: (2, m) undirected.
        n: number of nodes.
        scm: the model; with `convolved` 0 the graph plays no part.

    Returns:
        Features (n, scm.features) and target (n,).

    Raises:
        Rejected: a value is not finite.
    """
    graph = Adjacency.of(pairs, n)
    hidden = max(scm.hidden, 1 + 2 * scm.features) if scm.causal else scm.hidden
    causes = root_causes(rng, n, scm.causes if scm.causal else scm.features, scm.strategy, scm.drawn_statistics)
    inputs = [causes]
    if scm.use_degree:
        inputs.append(log_degree(graph))
    if scm.use_pagerank:
        inputs.append(log_pagerank(graph, 0.6 + 0.3 * rng.random()))
    states: list[Array] = []
    with np.errstate(all="ignore"):  # what overflows is rejected below
        x = mixed_layer(rng, graph, scm, np.concatenate(inputs, axis=1), hidden, first=True)
        widths = [hidden] * (scm.layers - 1) + ([] if scm.causal else [1])
        for units in widths:
            name = scm.activation or PRIOR_ACTIVATIONS[rng.integers(len(PRIOR_ACTIVATIONS))]
            x = mixed_layer(rng, graph, scm, random_activation(rng, name, x), units, first=False)
            std = np.abs(rng.standard_normal(units, dtype=np.float32)) if scm.noise_per_unit else 1
            x = x + rng.standard_normal(x.shape, dtype=np.float32) * (std * np.float32(scm.noise))
            states.append(x)
    if scm.causal:
        flat = np.concatenate(states, axis=1)
        if scm.in_clique:
            start = rng.integers(flat.shape[1] - scm.features)
            chosen = start + rng.permutation(1 + scm.features)
        else:
            chosen = rng.permutation(flat.shape[1] - 1)
        features, target = read_out(flat, scm.features, chosen, scm.y_is_effect, scm.sort_features)
    else:
        features, target = causes, states[-1][:, 0]
    if not (np.isfinite(features).all() and np.isfinite(target).all()):
        raise Rejected("a value is not finite")
    return features, target
