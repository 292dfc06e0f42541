"""Random graphs: degree-corrected stochastic block models on two levels, preferential attachment, latent geometry.

Graphs are undirected and simple, as arrays `pairs` (2, m) int64 with `pairs[0] < pairs[1]`. Every function draws from
the generator it is given and nothing else.

Source: prior of GraphPFN (arXiv 2509.21489), `graphpfn` 0.1.1, version 1.3 of the released configuration.
"""

import math

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components

Ints = NDArray[np.int64]
Floats = NDArray[np.floating]


class Rejected(Exception):
    """A draw that the prior does not accept; it is drawn again."""


def simple_pairs(source: Ints, target: Ints, n: int) -> Ints:
    """Undirected simple graph from any list of edges.

    Args:
        source: (k,) node numbers.
        target: (k,) node numbers.
        n: number of nodes.

    Returns:
        (2, m), sorted, without loops and duplicates.
    """
    low, high = np.minimum(source, target), np.maximum(source, target)
    keep = low != high
    key = low[keep] * n + high[keep]
    if n * n <= 64 * len(key):  # a bitmap is faster than sorting when the graph is not very sparse
        seen = np.zeros(n * n, dtype=bool)
        seen[key] = True
        key = np.flatnonzero(seen)
    else:
        key = np.unique(key)
    return np.stack([key // n, key % n])


def both_directions(pairs: Ints) -> Ints:
    """Undirected pairs (2, m) as directed edges (2, 2 m)."""
    return np.concatenate([pairs, pairs[::-1]], axis=1)


def degrees(pairs: Ints, n: int) -> Ints:
    """Number of neighbours of each node, (n,)."""
    return np.bincount(pairs.ravel(), minlength=n)


def largest_component(pairs: Ints, n: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Keep the largest connected component.

    Args:
        pairs: (2, m).
        n: number of nodes.

    Returns:
        Its pairs under new, order-preserving numbers, and the kept nodes (n,) bool.
    """
    count, label = connected_components(
        coo_array((np.ones(pairs.shape[1], dtype=bool), (pairs[0], pairs[1])), shape=(n, n)), directed=False
    )
    if count == 1:
        return pairs, np.ones(n, dtype=bool)
    kept = label == np.bincount(label).argmax()
    number = np.cumsum(kept) - 1
    return number[pairs[:, kept[pairs[0]]]], kept


def ball(rng: Generator, pairs: Ints, n: int, size: int) -> Ints:
    """Nodes around a random node, breadth first, neighbours in random order.

    Args:
        rng: generator.
        pairs: (2, m).
        n: number of nodes.
        size: nodes wanted, at most n; where the component has fewer, random other nodes are added.

    Returns:
        (size,) node numbers.
    """
    order = rng.permutation(n)  # breadth-first search takes neighbours by number
    place = np.argsort(order)
    source, target = both_directions(place[pairs])
    matrix = csr_array((np.ones(len(source), dtype=bool), (source, target)), shape=(n, n))
    near = breadth_first_order(matrix, 0, return_predecessors=False)
    far = np.setdiff1d(np.arange(n), near)
    return order[np.concatenate([near, far])[:size]]


def parts_from_cuts(n: int, minimum: int, cuts: Ints) -> Ints:
    """Sizes of the parts that `cuts`, distinct numbers in 1..rest-1, mark in `rest = n - (minimum - 1) * parts`."""
    rest = n - (minimum - 1) * (len(cuts) + 1)
    return np.diff(np.concatenate([[0], np.sort(cuts), [rest]])) + (minimum - 1)


def random_partition(rng: Generator, n: int, parts: int, minimum: int) -> Ints:
    """Cut `n` at random into `parts` sizes of at least `minimum` each."""
    if parts * minimum > n:
        raise Rejected(f"{n} nodes cannot be cut into {parts} groups of at least {minimum}")
    rest = n - (minimum - 1) * parts
    return parts_from_cuts(n, minimum, 1 + rng.choice(rest - 1, parts - 1, replace=False))


def expected_edges(sizes: Ints, average_degree: float, offdiagonal: float, uniforms: Floats) -> Floats:
    """Expected number of edges of each pair of groups.

    `uniforms[0] < 0.5` chooses uniform density: 1 within groups, one value for all pairs of groups. Otherwise every
    group and every pair draws its own. The densities times the group sizes are normalised to `n * degree / 2`.

    Args:
        sizes: (g,) group sizes.
        average_degree: wanted mean degree.
        offdiagonal: largest density between groups relative to that within.
        uniforms: U(0, 1) draws: choice, [g diagonal values,] base value, [g (g - 1) / 2 pair values]; those in
            brackets only without uniform density.

    Returns:
        (g, g) float64, upper triangle.
    """
    g = len(sizes)
    uniform, rest = uniforms[0] < 0.5, uniforms[1:]
    upper = np.triu_indices(g, 1)
    if uniform:
        density = np.eye(g)
        density[upper] = offdiagonal * rest[0]
    else:
        density = np.diag(rest[:g])
        root = np.sqrt(rest[:g])
        density[upper] = offdiagonal * rest[g + 1 : g + 1 + len(upper[0])] * (root[upper[0]] * root[upper[1]])
    edges = density * sizes[:, None] * sizes[None, :]
    return edges * (0.5 * sizes.sum() * average_degree / edges.sum())


def normalised_propensity(weight: Floats, group: Ints) -> Floats:
    """Degree weights (n,) divided by their sum within each node's group (n,)."""
    return weight / np.bincount(group, weights=weight)[group]


def block_model(rng: Generator, group: Ints, average_degree: float, offdiagonal: float) -> tuple[Ints, Ints]:
    """Degree-corrected stochastic block model for given groups.

    Each pair of groups gets a Poisson number of edges. Within a group both ends are drawn without replacement, between
    groups with replacement, in proportion to the nodes' propensities.

    Args:
        rng: source of randomness.
        group: (n,) group of each node, ascending, 0 to g - 1, no group empty.
        average_degree: wanted mean degree, before duplicates vanish.
        offdiagonal: see `expected_edges`.

    Returns:
        Ends of the edges, duplicates included: two arrays (k,).

    Raises:
        Rejected: a group is empty.
    """
    sizes = np.bincount(group)
    if (sizes == 0).any():
        raise Rejected("a group is empty")
    g = len(sizes)
    count = rng.poisson(expected_edges(sizes, average_degree, offdiagonal, rng.random(2 + g + g * (g - 1) // 2)))
    count = np.triu(count)
    np.fill_diagonal(count, np.where(sizes > 1, count.diagonal(), 0))

    weight = rng.zipf(rng.uniform(2, 3), len(group)).astype(float) if rng.random() < 0.5 else rng.random(len(group))
    propensity = normalised_propensity(weight, group)
    start = np.concatenate([[0], np.cumsum(sizes)])
    cumulative = np.concatenate([[0.0], np.cumsum(propensity)])
    floor = cumulative[start]  # group i owns [floor[i], floor[i + 1])

    first, second = np.nonzero(count)
    first, second = np.repeat(first, count[first, second]), np.repeat(second, count[first, second])

    def draw(where: Ints, mass: Floats) -> Ints:
        node = np.searchsorted(cumulative, mass, side="right") - 1
        return np.clip(node, start[where], start[where + 1] - 1)

    span = floor[1:] - floor[:-1]
    source = draw(first, floor[first] + rng.random(len(first)) * span[first])
    # Within a group the first end is cut out of the second end's probability mass.
    taken = np.where(first == second, propensity[source], 0.0)
    mass = floor[second] + rng.random(len(second)) * (span[second] - taken)
    mass = np.where((first == second) & (mass >= cumulative[source]), mass + taken, mass)
    return source, draw(second, mass)


def sbm_groups(rng: Generator, n: int, groups: int) -> Ints:
    """Random groups of `n` nodes, ascending: sizes by random cuts, at least max(4, a tenth of the mean size)."""
    sizes = random_partition(rng, n, groups, max(4, int(0.1 * n / groups)))
    return np.repeat(np.arange(groups), sizes)


def attach_preferentially(rng: Generator, pairs: Ints, n: int, new: int, max_degree: int) -> Ints:
    """Add nodes one by one; each joins 1 to `max_degree` distinct nodes, in proportion to their degree so far.

    Args:
        rng: source of randomness.
        pairs: (2, m) of a graph without isolated nodes.
        n: its number of nodes.
        new: number of nodes to add.
        max_degree: largest number of edges of a new node.

    Returns:
        Pairs of the larger graph, (2, m + added).
    """
    ends = pairs.ravel().tolist()  # a node stands here once per edge, so a uniform draw is proportional to degree
    added = []
    wanted = rng.integers(1, max_degree + 1, new).tolist()
    for node in range(n, n + new):
        k = min(wanted[node - n], node)
        chosen: list[int] = []
        while len(chosen) < k:
            candidate = ends[int(rng.random() * len(ends))]
            if candidate not in chosen:
                chosen.append(candidate)
        for other in chosen:
            added.append((other, node))
            ends += (other, node)
    return np.concatenate([pairs, np.array(added, dtype=np.int64).reshape(-1, 2).T], axis=1)


def two_level_graph(
    rng: Generator,
    n: int,
    average_degree: float,
    attached_share: float,
    attached_degree: int,
    subgraphs: int,
    first_level_share: float,
    smallest_subgraph: int,
    groups: int,
    offdiagonal: float,
) -> tuple[Ints, int]:
    """Graph of the released prior: block models on two levels, then preferential attachment, then shuffled.

    Args:
        rng: source of randomness.
        n: wanted number of nodes.
        average_degree: wanted mean degree.
        attached_share: share of the nodes added by preferential attachment.
        attached_degree: most edges of such a node.
        subgraphs: number of disjoint first-level graphs.
        first_level_share: share of the degree spent on the first level.
        smallest_subgraph: smallest size of a first-level graph.
        groups: groups in every block model.
        offdiagonal: density between groups, see `expected_edges`.

    Returns:
        Pairs (2, m) and the number of nodes, at most `n`: only the largest component is kept.

    Raises:
        Rejected: the draw is not usable.
    """
    base = max(int(n * (1 - attached_share)), smallest_subgraph + 1)
    if base > n:
        raise Rejected(f"{n} nodes are too few for a subgraph of {smallest_subgraph}")
    degree = average_degree
    if attached_share > 0:
        degree = max((degree - attached_share * (1 + attached_degree) / 2) / (1 - attached_share), 1.0)
    share = min(first_level_share, (smallest_subgraph - 1) / degree)
    parts = max(1, min(subgraphs, base // smallest_subgraph))

    parts_ends, offset = [], 0
    for size in random_partition(rng, base, parts, smallest_subgraph).tolist():
        group = sbm_groups(rng, size, min(groups, size))
        parts_ends.append(np.stack(block_model(rng, group, degree * share, offdiagonal)) + offset)
        offset += size
    first = rng.permutation(base)[np.concatenate(parts_ends, axis=1)]
    group = sbm_groups(rng, base, min(groups, base))
    second = rng.permutation(base)[np.stack(block_model(rng, group, degree * (1 - share), offdiagonal))]

    ends = np.concatenate([first, second], axis=1)
    pairs = simple_pairs(ends[0], ends[1], base)
    pairs, kept = largest_component(pairs, base)
    size = int(kept.sum())
    if size < 2:
        raise Rejected("the largest component is a single node")
    pairs = attach_preferentially(rng, pairs, size, n - base, attached_degree)
    size += n - base
    pairs = rng.permutation(size)[pairs]
    return simple_pairs(pairs[0], pairs[1], size), size


def geometric_graph(rng: Generator, position: Floats, average_degree: float) -> Ints:
    """Join the nearest pairs of points.

    Args:
        rng: source of randomness; a node's reach is scaled by exp(0.3 N(0, 1)).
        position: (n, k) points.
        average_degree: wanted mean degree.

    Returns:
        Pairs (2, m), m = n * average_degree / 2 rounded.
    """
    n = len(position)
    square = (position**2).sum(1)
    distance = square[:, None] + square - 2 * position @ position.T
    reach = np.exp(0.3 * rng.standard_normal(n))
    low, high = np.triu_indices(n, 1)
    score = distance[low, high] / (reach[low] * reach[high]) ** 2
    m = min(max(round(n * average_degree / 2), 1), len(score) - 1)
    nearest = np.argpartition(score, m)[:m]
    return simple_pairs(low[nearest], high[nearest], n)


def graph_statistics(edges: Ints, y: Ints | Floats, n: int) -> dict[str, float]:
    """Mean degree, mean local clustering, and adjusted homophily.

    Args:
        edges: (2, m) both directions.
        y: classes of all nodes, below 0 where unknown; values have no homophily.
        n: number of nodes.

    Returns:
        Clustering counts nodes of degree below 2 as 0. Adjusted homophily (Platonov et al., 2023) is
        (h - s) / (1 - s) with h the share of edges within classes and s its expectation given the degrees; NaN for
        values, or without an edge between known nodes.
    """
    adjacency = csr_array((np.ones(edges.shape[1]), (edges[1], edges[0])), shape=(n, n))
    degree = np.bincount(edges[1], minlength=n)
    closed = (adjacency @ adjacency).multiply(adjacency).sum(1)
    clustering = np.where(degree > 1, closed / np.maximum(degree * (degree - 1), 1), 0)
    homophily = math.nan
    if y.dtype.kind == "i":
        ends = y[edges]
        ends = ends[:, (ends >= 0).all(0)]
        if ends.size:
            expected = ((np.bincount(ends[0]) / ends.shape[1]) ** 2).sum()
            if expected < 1:
                homophily = ((ends[0] == ends[1]).mean() - expected) / (1 - expected)
    return {
        "mean_degree": edges.shape[1] / n,
        "clustering": float(clustering.mean()),
        "adjusted_homophily": float(homophily),
    }
