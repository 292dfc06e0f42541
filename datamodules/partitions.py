"""How images are dealt to clients. Pure numpy; the partitions return one index array per client.

Each index is dealt exactly once, and the result is a function of the arguments, the seed included.
"""

from collections.abc import Sequence

import numpy as np

GROUP = 10  # clients that the released partitioner treats together


def long_tail_counts(largest: float, num_classes: int, rho: float) -> list[int]:
    """Samples kept of each class: `int(largest * (1 / rho)^(c / (C - 1)))`.

    Args:
        largest: Samples of class 0; the released code takes the number of samples divided by C.
        num_classes: C, at least 2.
        rho: Imbalance factor, finite and at least 1: class 0 has rho times the samples of the last class.

    Raises:
        ValueError: Fewer than two classes, or rho below 1.
    """
    if num_classes < 2:
        raise ValueError(f"long_tail needs at least 2 classes, the data have {num_classes}: leave it out")
    if not 1 <= rho < float("inf"):  # also not a number
        raise ValueError(f"long_tail is {rho}: give at least 1, which means no tail, or leave it out")
    return [int(largest * (1.0 / rho) ** (c / (num_classes - 1.0))) for c in range(num_classes)]


def long_tail(labels: np.ndarray, rho: float, seed: int) -> np.ndarray:
    """Indices of a long-tailed subset, class after class.

    Class 0 keeps `n / C` samples, or as many as make the tail fit a set that is not balanced. Classes are shuffled
    with the calls of the released code (a legacy generator), so equal seeds give equal subsets.

    Args:
        labels: `(n,)`, int.
        rho: See `long_tail_counts`.
        seed: Of the shuffles.

    Raises:
        ValueError: Fewer than two classes, or rho below 1.
    """
    num_classes = int(labels.max()) + 1
    long_tail_counts(1, num_classes, rho)  # refuses what has no tail
    have = np.bincount(labels)
    share = (1.0 / rho) ** (np.arange(num_classes) / (num_classes - 1.0))
    largest = min(len(labels) / num_classes, (have / share)[have > 0].min())
    random = np.random.RandomState(seed)
    kept = []
    for c, count in enumerate(long_tail_counts(largest, num_classes, rho)):
        own = np.flatnonzero(labels == c)
        random.shuffle(own)
        kept.append(own[:count])
    return np.concatenate(kept)


def check_alpha(alpha: float) -> None:
    """Refuse a concentration that is none.

    Raises:
        ValueError: Alpha is not a number above 0.
    """
    if not 0 < alpha <= 1e9:  # also not a number
        raise ValueError(f"alpha is {alpha}: give a number above 0 and up to 1e9, or use partition even")


def dirichlet(labels: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Label skew: each class is split over the clients by one draw of Dir(alpha). Clients may be empty.

    Args:
        labels: `(n,)`, int.
        clients: Number of clients.
        alpha: Concentration above 0; small is more skewed.
        seed: Of the draws.

    Raises:
        ValueError: Alpha is not a number above 0.
    """
    check_alpha(alpha)
    random = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for c in np.unique(labels):
        own = random.permutation(np.flatnonzero(labels == c))
        cuts = (np.cumsum(random.dirichlet(np.full(clients, alpha)))[:-1] * len(own)).astype(int)
        for part, piece in zip(parts, np.split(own, cuts), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def dirichlet_balanced(
    labels: np.ndarray, clients: int, alpha: float, seed: int, indices: np.ndarray | None = None
) -> list[np.ndarray]:
    """The released partitioner: Dirichlet in groups of ten clients, then a re-cut into parts of equal size.

    Within a group, clients that already hold the average number of samples get nothing of further classes,
    and the draw is repeated until the smallest has half the average. The parts are then joined and cut anew
    into `clients` consecutive parts whose sizes differ by at most 1, so the effective skew is not exactly
    Dir(alpha). The calls to the legacy generator are those of the released code: equal seeds give equal
    partitions.

    Args:
        labels: `(n,)`, int.
        clients: Number of clients.
        alpha: Concentration above 0.
        seed: Of the draws.
        indices: Deal only these, in this order; by default class after class, as the released code lists
            them.

    Raises:
        ValueError: Alpha is not a number above 0, fewer samples than clients, or no draw in 1,000 gives every client
            half the average.
    """
    check_alpha(alpha)
    if indices is None:
        indices = np.argsort(labels, kind="stable")
    if len(indices) < clients:
        raise ValueError(f"{len(indices)} samples cannot be dealt to {clients} clients: use fewer clients")
    random = np.random.RandomState(seed)
    order = np.arange(len(indices))
    random.shuffle(order)
    shuffled = indices[order]
    groups = -(-clients // GROUP)
    share = int(GROUP / clients * len(shuffled)) if groups > 1 else len(shuffled)
    dealt = []
    for g in range(groups):
        pool = shuffled[g * share : None if g == groups - 1 else (g + 1) * share]
        dealt += _dirichlet_group(labels, pool, min(GROUP, clients - g * GROUP), alpha, random)
    return list(np.array_split(np.concatenate(dealt), clients))


def _dirichlet_group(
    labels: np.ndarray, pool: np.ndarray, clients: int, alpha: float, random: np.random.RandomState
) -> list[np.ndarray]:
    average = len(pool) / clients
    for _ in range(1000):
        parts = [pool[:0] for _ in range(clients)]
        for c in range(int(labels.max()) + 1):
            own = pool[labels[pool] == c]
            share = random.dirichlet(np.full(clients, alpha)) * [len(part) < average for part in parts]
            if len(own) == 0:
                continue
            if not share.sum() > 0:  # tiny alphas draw 0 for every open client, or no number at all: start over
                break
            cuts = (np.cumsum(share / share.sum()) * len(own)).astype(int)[:-1]
            parts = [np.concatenate(p) for p in zip(parts, np.split(own, cuts), strict=True)]
        else:
            if min(len(part) for part in parts) >= int(0.5 * average):
                return parts
    raise ValueError(
        f"no Dirichlet({alpha}) split gives each of {clients} clients half the average of {average:.0f} "
        "samples: raise alpha, or use partition dirichlet"
    )


def shards(labels: np.ndarray, clients: int, classes_per_client: int, seed: int) -> list[np.ndarray]:
    """Label skew by shards: pieces of the label-sorted data are dealt to the clients at random.

    Args:
        labels: `(n,)`, int.
        clients: Number of clients.
        classes_per_client: Pieces a client, at least 1; a piece may span two classes.
        seed: Of the deal.

    Raises:
        ValueError: No pieces.
    """
    if classes_per_client < 1:
        raise ValueError(f"classes_per_client is {classes_per_client}: each client gets at least 1 piece")
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], clients * classes_per_client)
    deal = random.permutation(len(pieces)).reshape(clients, classes_per_client)
    return [np.concatenate([pieces[p] for p in row]) for row in deal]


def quantity(size: int, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Quantity skew: client sizes are one draw of Dir(alpha), labels are mixed evenly. Clients may be empty.

    Args:
        size: Number of samples.
        clients: Number of clients.
        alpha: Concentration above 0; small is more skewed.
        seed: Of the draw.

    Raises:
        ValueError: Alpha is not a number above 0.
    """
    check_alpha(alpha)
    random = np.random.default_rng(seed)
    order = random.permutation(size)
    cuts = (np.cumsum(random.dirichlet(np.full(clients, alpha)))[:-1] * size).astype(int)
    return np.split(order, cuts)


def even(size: int, clients: int, seed: int) -> list[np.ndarray]:
    """No skew: equal parts of a shuffled order."""
    return np.array_split(np.random.default_rng(seed).permutation(size), clients)


def by_domain(domains: np.ndarray, clients_per_domain: list[int], seed: int) -> list[np.ndarray]:
    """Domain skew: each client sees one domain, whose samples are dealt evenly to its clients.

    Args:
        domains: `(n,)`, int: domain of each sample.
        clients_per_domain: Clients of domain 0, 1, ...; none of them 0.
        seed: Of the shuffles.
    """
    random = np.random.default_rng(seed)
    parts = []
    for d, count in enumerate(clients_per_domain):
        parts += np.array_split(random.permutation(np.flatnonzero(domains == d)), count)
    return parts


def deal_held_out(kinds: np.ndarray, clients: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Deal held-out images so that each client's are distributed as its training images are.

    Args:
        kinds: int `[n]`, kind (class, or class and domain in one number) of each held-out image.
        clients: int `[n_k]` each, kinds of a client's training images.
        seed: of the draws.

    Returns:
        Int64 `[n]`: the client of each image, drawn among those that hold its kind in proportion to how many they
        hold; -1 if nobody does.
    """
    rng = np.random.default_rng([seed, 3])
    most = max(int(own.max(initial=0)) for own in (kinds, *clients)) + 1
    counts = np.stack([np.bincount(own, minlength=most) for own in clients])
    owner = np.full(len(kinds), -1)
    for kind in np.unique(kinds):
        if (share := counts[:, kind]).any():
            rows = np.flatnonzero(kinds == kind)
            owner[rows] = rng.choice(len(clients), len(rows), p=share / share.sum())
    return owner
