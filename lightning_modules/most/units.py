"""Unit tokens: k-means clusters of encoder frames, with a hash by which vocoders know them."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_modules.hub import read_tensors


class Units(nn.Module):
    """Maps frames to the nearest of k centroids.

    Args:
        count: k.
        feature_size: size of a frame.
    """

    def __init__(self, count: int, feature_size: int) -> None:
        super().__init__()
        self.centroids = nn.Buffer(torch.zeros(count, feature_size))

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.centroids)

    @property
    def hash(self) -> str:
        """Of the centroids: equal for equal unit sets; 16 hexadecimal digits."""
        if self.centroids.is_meta:  # only the sizes are wanted
            return "0" * 16
        return hashlib.sha256(self.centroids.float().cpu().numpy().tobytes()).hexdigest()[:16]

    def fit(self, frames: np.ndarray, seed: int = 0) -> "Units":
        """Learn the centroids from frames [n, f] by k-means.

        Raises:
            ValueError: if there are fewer frames than units.
        """
        from sklearn.cluster import MiniBatchKMeans

        if len(frames) < self.count:
            raise ValueError(f"{len(frames)} frames cannot make {self.count} units: use more audio or fewer units")
        kmeans = MiniBatchKMeans(self.count, random_state=seed, n_init=1, batch_size=4096, max_iter=30).fit(frames)
        self.centroids.copy_(torch.from_numpy(kmeans.cluster_centers_))
        return self

    def forward(self, frames: Tensor) -> Tensor:
        """Nearest centroid of each frame: [..., f] to int64 [...]."""
        with torch.autocast(frames.device.type, enabled=False):
            # |x - c|^2 without |x|^2, which is the same for all c
            return (self.centroids.square().sum(-1) - 2 * frames.float() @ self.centroids.T).argmin(-1)

    def save(self, path: str | Path) -> None:
        """Write the centroids as safetensors, the hash in the metadata."""
        save_file({"centroids": self.centroids.float().cpu()}, path, {"format_version": "1", "hash": self.hash})

    @classmethod
    def load(cls, path: Path) -> "Units":
        """Read what `save` wrote.

        Raises:
            ValueError: if the file is no unit set, or its content does not have the hash it states.
        """
        centroids = read_tensors(path).get("centroids")
        if centroids is None:
            raise ValueError(f"{path} is no unit set: it has no centroids")
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        units = cls(*centroids.shape)
        units.centroids.copy_(centroids)
        if metadata.get("hash") != units.hash:
            raise ValueError(f"{path} states the hash {metadata.get('hash')} but its units have {units.hash}")
        return units


def deduplicate(units: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of equal units as one: units int64 [n] to (units [m], lengths of the runs [m])."""
    return torch.unique_consecutive(units, return_counts=True)
