"""The order of data: a function of (seed, epoch), the same for any number of ranks and workers, and resumable.

* `GlobalBatches` draws batches of the *global* batch size and hands each rank its slice.
* `Loader` iterates over them and keeps its position in the checkpoint, so that a resume in the middle of an epoch
  goes on with the next batch.
* `counter_uniform` gives random numbers that depend on (seed, epoch, item) alone, for augmentation.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler


class Draw(NamedTuple):
    """One rank's part of a global batch.

    Attributes:
        epoch: number of the epoch, for augmentation.
        items: positions in the data set, int64 `[b]`.
    """

    epoch: int
    items: np.ndarray


class GlobalBatches(Sampler[Draw]):
    """Batches whose content depends on (seed, epoch) only; each rank gets its slice of every batch.

    All ranks get the same number of batches. Without `drop_last` the data are cut into `ceil(size / batch_size)`
    batches of nearly equal size, so that no rank is ever left without an item, none is repeated and none is lost.

    Args:
        size: number of items in the data set.
        batch_size: items per global batch (all ranks together).
        shuffle: a new permutation for each epoch; otherwise the stored order.
        drop_last: only whole batches; the items left over change with every epoch's permutation.
        seed: of the permutations.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        ValueError: if a batch cannot be split over the ranks or is empty, or there are too few items for one batch.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        if drop_last and batch_size % world_size:
            raise ValueError(
                f"batch_size {batch_size} is the global batch and does not split over {world_size} ranks: "
                f"choose a multiple of {world_size}"
            )
        if drop_last and size < batch_size:
            raise ValueError(f"batch_size {batch_size} is larger than the {size} items there are: lower it")
        if size < world_size:
            raise ValueError(f"{size} items cannot be split over {world_size} ranks: use fewer devices")
        self.size, self.batch_size, self.shuffle, self.drop_last = size, batch_size, shuffle, drop_last
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.epoch = 0
        self.start = 0  # first batch of the next iteration; the one after it begins at the beginning

    def __len__(self) -> int:
        """Batches in a whole epoch, also when the next iteration starts in the middle of one."""
        if self.drop_last:
            return self.size // self.batch_size
        return max(1, min(-(-self.size // self.batch_size), self.size // self.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; a new one starts with its first batch."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __iter__(self) -> Iterator[Draw]:
        order = np.arange(self.size)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)
        if self.drop_last:
            batches = np.split(order[: len(self) * self.batch_size], len(self))
        else:
            batches = np.array_split(order, len(self))
        start, self.start = self.start, 0
        for batch in batches[start:]:
            yield Draw(self.epoch, np.array_split(batch, self.world_size)[self.rank])


def _as_is(batch: Any) -> Any:
    return batch


class Loader:
    """Iterates over `dataset.__getitems__(draw)` for each draw of `batches`, and remembers where it is.

    It wraps a `DataLoader` instead of being one, so that Lightning leaves its order alone (Lightning replaces the
    sampler of every `DataLoader` under DDP and in `predict`). Lightning stores `state_dict` in its checkpoints.

    Args:
        dataset: has `__getitems__(draw: Draw) -> batch`, which returns the finished batch.
        batches: the order.
        num_workers: processes that call `__getitems__`; 0 calls it here.
        pin_memory: copy batches into page-locked memory, for GPUs.
        collate: applied to what `__getitems__` returns.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: GlobalBatches,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        collate: Callable[[Any], Any] = _as_is,
    ) -> None:
        self.dataset = dataset
        self.sampler = batches  # Lightning looks for this name to set the epoch, and for the next to judge the order
        self.batch_sampler = None
        self.position = 0  # batches of this epoch that were handed out
        self._loader = DataLoader(
            dataset,
            batch_sampler=batches,  # type: ignore[arg-type] # a Draw instead of a list of numbers
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=collate,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.position = self.sampler.start
        for batch in self._loader:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Epoch and number of batches already handed out in it."""
        return {"epoch": self.sampler.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the stored position at the next iteration."""
        self.sampler.epoch, self.sampler.start = state["epoch"], state["position"]
        self.position = state["position"]


def ranks(datamodule: LightningDataModule) -> dict[str, int]:
    """`rank` and `world_size` of the run that a data module belongs to; one rank outside a `Trainer`."""
    trainer = datamodule.trainer
    if trainer is None:
        return {"rank": 0, "world_size": 1}
    return {"rank": trainer.global_rank, "world_size": trainer.world_size}


def describe(datamodule: LightningDataModule) -> str:
    """What a data module prints as: the batches of an epoch in each stage that is set up.

    Lightning's own text takes every loader for a `DataLoader`, and would iterate over a `Loader`.
    """
    batches = []
    for stage in ("train", "val", "test"):
        with suppress(Exception):  # before `setup`, each kind of data raises its own
            batches.append(f"{len(getattr(datamodule, f'{stage}_dataloader')())} {stage}")
    return f"{type(datamodule).__name__}, batches: {', '.join(batches) or 'call setup() first'}"


def counter_uniform(seed: int, epoch: int, items: np.ndarray, n: int) -> Tensor:
    """Uniform numbers in [0, 1) that depend on (seed, epoch, item, column) alone.

    A counter-based generator: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied once per
    coordinate, so that neither workers nor ranks nor the composition of a batch change what an item gets.

    Args:
        seed: of the run.
        epoch: number of the epoch.
        items: int64 `[b]`.
        n: numbers per item.

    Returns:
        float32 `[b, n]`.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state ^ np.uint64(epoch))
        per_item = _mix(state ^ items.astype(np.uint64))
        numbers = _mix(per_item[:, None] + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((numbers >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))


def _mix(z: np.uint64 | np.ndarray) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
