"""FINCH clustering (Sarfraz et al., CVPR 2019), which FPL uses on the clients' prototypes."""

import torch
import torch.nn.functional as F
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from lightning_modules.fedhpro.losses import class_means


def finch(points: Tensor) -> Tensor:
    """The coarsest partition with more than one cluster (the finest, if already that has only one).

    Each point is linked to its nearest neighbour by cosine; connected points form a cluster; the clusters' means
    are the points of the next, coarser partition.

    Args:
        points: `(n, d)`, n at least 1.

    Returns:
        Cluster of each point, `(n,)`, int64 from 0 without gaps.
    """
    labels = _first_neighbours(points)
    while labels.max() > 0:
        means, _ = class_means(points, labels, int(labels.max()) + 1)
        coarser = _first_neighbours(means)[labels]
        if coarser.max() == 0:
            break
        labels = coarser
    return labels


def _first_neighbours(points: Tensor) -> Tensor:
    count = len(points)
    if count == 1:
        return torch.zeros(1, dtype=torch.long, device=points.device)
    unit = F.normalize(points, dim=1)
    nearest = (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(1).cpu().numpy()
    links = coo_array((torch.ones(count).numpy(), (range(count), nearest)), shape=(count, count))
    return torch.from_numpy(connected_components(links, directed=False)[1]).long().to(points.device)
