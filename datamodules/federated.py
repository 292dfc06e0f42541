"""Images spread over clients: label skew, quantity skew, domain skew and long tails; all data held as tensors."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.checks import check_fractions, check_least, check_seeds
from datamodules.images import (
    DOWNLOADS,
    Arrays,
    Files,
    _digits,
    _image_paths,
    _npz,
    augment,
    check_normalisation,
    download,
    fit,
    stratified,
)
from datamodules.order import Draw, GlobalBatches, Loader, counter_uniform, describe, ranks
from datamodules.partitions import (
    by_domain,
    check_alpha,
    deal_held_out,
    dirichlet,
    dirichlet_balanced,
    even,
    long_tail,
    long_tail_counts,
    quantity,
    shards,
)

Partition = Literal["dirichlet", "dirichlet_balanced", "shards", "quantity", "domain", "even"]


class FederatedBatch(NamedTuple):
    """A batch for evaluation or prediction.

    Attributes:
        image: float32 `[b, c, h, w]`, in [0, 1] and then normalised by the data module's `mean` and `std`.
        label: int64 `[b]`, class number; -1 where there is none (prediction).
        domain: int64 `[b]`, position in `domain_names`.
        client: int64 `[b]`, the client whose held-out image it is; -1 where it is nobody's (test and prediction).
        index: int64 `[b]`, position in the split.
        name: `b` strings, the file or the position in the split.
        domain_names: one name per source.
        clients: number of clients.
    """

    image: Tensor
    label: Tensor
    domain: Tensor
    client: Tensor
    index: Tensor  # type: ignore[assignment] # instead of tuple's method
    name: list[str]
    domain_names: list[str]
    clients: int


@dataclass(frozen=True)
class Table:
    """Images in memory.

    Attributes:
        pixels: uint8 `[n, c, h, w]`.
        labels: int64 `[n]`.
        domains: int64 `[n]`, number of the source.
        mean: float32 `[c, 1, 1]`, of pixels in [0, 1].
        std: float32 `[c, 1, 1]`.
    """

    pixels: Tensor
    labels: Tensor
    domains: Tensor
    mean: Tensor
    std: Tensor

    def to(self, device: torch.device) -> "Table":
        """The same table on another device; itself if it is there already."""
        if self.pixels.device == device:
            return self
        return replace(self, **{k: v.to(device) for k, v in vars(self).items()})

    def normalize(self, pixels: Tensor) -> Tensor:
        """Uint8 to normalised float32, same shape."""
        return (pixels.float() / 255 - self.mean) / self.std


@dataclass(frozen=True)
class Client:
    """One client: some rows of a table. Its order and augmentation depend on (seed, epoch, row of the table) alone.

    Attributes:
        id: number of the client, from 0.
        rows: int64 `[n]`, its rows of the table, on the table's device.
        table: the images of all clients.
        augment: see `datamodules.images.augment`.
        seed: of the order and the augmentation.
    """

    id: int
    rows: Tensor
    table: Table
    augment: tuple[str, ...] = ()
    seed: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """Int64 `[n]`."""
        return self.table.labels[self.rows]

    def images(self, rows: Tensor) -> Tensor:
        """Normalised, not augmented images `[m, c, h, w]` of the client's rows `[m]`."""
        return self.table.normalize(self.table.pixels[self.rows[rows]])

    def _draws(self, epoch: int) -> Tensor:  # n 5: order, then augmentation
        return counter_uniform(self.seed, epoch, self.rows.cpu().numpy(), 5).to(self.rows.device)

    def order(self, epoch: int) -> Tensor:
        """A permutation `[n]` of the client's rows."""
        return self._draws(epoch)[:, 0].argsort(stable=True)

    def batches(self, epoch: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented, normalised images and labels, each row once.

        The epoch is cut into `ceil(n / batch_size)` batches of nearly equal size, so that none is left with a single
        image, which BatchNorm cannot use, unless the client has one image, or an odd number and `batch_size` is 2.
        """
        draws = self._draws(epoch)
        for order in draws[:, 0].argsort(stable=True).tensor_split(-(-len(self) // batch_size)):
            rows = self.rows[order]
            pixels = self.table.pixels[rows]
            if self.augment:
                pixels = augment(pixels, self.augment, draws[order, 1:])
            yield self.table.normalize(pixels), self.table.labels[rows]


class FederatedRound(NamedTuple):
    """What one training step gets: the clients of a round, the same on every rank.

    Attributes:
        number: of the round, from 0.
        clients: those that take part, by id.
        sizes: images of every client of the federation.
        num_classes: classes of the federation.
    """

    number: int
    clients: list[Client]
    sizes: list[int]
    num_classes: int


class FederatedImages(LightningDataModule):
    """Images dealt to the clients of a federation.

    An epoch of training is one round: `train_dataloader` yields one `FederatedRound`. Validation images are split off
    before the clients get theirs; test images are the sources' own. Each validation image counts as held out by one of
    the clients that hold its class in its domain, drawn in proportion to how many images of that kind they have.

    Args:
        sources: one or more image sets; each is a domain. `digits` (1,797 scans of 8x8, in scikit-learn), a set that
            torchvision downloads (`cifar10`, `cifar100`, `fashion_mnist`, `mnist`, `usps`, `svhn`), an `.npz` file in
            the layout of MedMNIST (`train_images`, `train_labels`, `test_images`, `test_labels`; `val_` arrays are
            added to the training images), or a folder `<class>/*.jpg`. Several sources must have the same classes,
            unless `class_names` are given.
        class_names: the federation's classes, in the order of their numbers. A source's classes are then found by
            name (those of an `.npz` file are named by their numbers), and it may lack some.
        data_dir: where downloads are kept.
        clients: number of clients, K.
        partition: `dirichlet` (each class is split by Dir(alpha)), `dirichlet_balanced` (the same with clients of
            equal size, the released partitioner), `shards` (pieces of the label-sorted data), `quantity` (client
            sizes by Dir(alpha)), `domain` (each client sees one source), or `even`.
        alpha: concentration of the Dirichlet distribution, above 0; small is more skewed.
        classes_per_client: pieces per client, at least 1, with `shards`.
        clients_per_domain: clients of each source, with `domain`; by default as even as can be.
        long_tail: imbalance factor rho, at least 1: class c keeps `n / C * (1 / rho) ** (c / (C - 1))` training images;
            none keeps all. The validation and test images stay balanced.
        participation: share of the clients that take part in a round, in (0, 1].
        allow_empty: let clients without images be; they take no part. Otherwise they are an error.
        images_per_client: use at most so many images of each client.
        train_size: draw so many training images of each source first (all by default).
        test_size: draw so many test images of each source (all by default).
        val_fraction: part of the training images that validates, in (0, 1).
        test_fraction: part of a folder without its own test images that tests, in (0, 1).
        eval_batch_size: images per batch of evaluation, over all ranks together.
        augment: of `crop`, `flip`, `autoaugment`, for local training.
        image_size: side in pixels to bring all images to (scaled, the centre cut out); by default that of the source.
        channels: 1 or 3; by default those of the source.
        mean: per channel, of pixels in [0, 1]; 0.5 by default.
        std: per channel; 0.5 by default.
        seed: of splits, partition, participation, order and augmentation.
        predict_folder: a folder of images (searched at every depth) that `predict` labels; without it, the test images.

    Attributes:
        classes: names of the classes, after `setup`.
        domains: names of the sources.
        parts: the rows of each client in `table`, after `setup`.
        held_out: int64 `[validation images]`, the client of each, or -1; after `setup`.
        table: all training images, after `setup`.

    Raises:
        ValueError: a number is out of range.
        FileNotFoundError: there is no such source.
    """

    __str__ = describe

    def __init__(
        self,
        sources: list[str] | None = None,
        data_dir: str = "data",
        clients: int = 10,
        partition: Partition = "dirichlet",
        alpha: float = 0.5,
        classes_per_client: int = 2,
        clients_per_domain: list[int] | None = None,
        long_tail: float | None = None,
        participation: float = 1.0,
        allow_empty: bool = False,
        images_per_client: int | None = None,
        train_size: int | None = None,
        test_size: int | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        eval_batch_size: int = 500,
        augment: list[str] | None = None,
        image_size: int | None = None,
        channels: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        seed: int = 0,
        predict_folder: str | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__()
        if unknown := set(augment or ()) - {"crop", "flip", "autoaugment"}:
            raise ValueError(f"augment has {sorted(unknown)}: known are crop, flip and autoaugment")
        check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
        check_least(1, clients=clients, images_per_client=images_per_client, classes_per_client=classes_per_client)
        check_least(1, train_size=train_size, test_size=test_size)
        check_least(1, image_size=image_size, eval_batch_size=eval_batch_size)
        check_seeds(seed=seed)
        if partition in ("dirichlet", "dirichlet_balanced", "quantity"):
            check_alpha(alpha)
        if long_tail is not None:
            long_tail_counts(1, 2, long_tail)
        if class_names is not None and (not class_names or len(set(class_names)) < len(class_names)):
            raise ValueError(f"class_names {class_names} needs at least one name, and none twice")
        if channels not in (None, 1, 3):
            raise ValueError(f"channels is {channels}: give 1 or 3, or leave it out")
        if not 0 < participation <= 1 or round(participation * clients) == 0:
            raise ValueError(
                f"participation {participation} of {clients} clients selects nobody: "
                f"choose between {1 / clients:.3g} and 1"
            )
        self.sources, self.data_dir = list(sources or ["digits"]), Path(data_dir)
        for source in self.sources:
            if source != "digits" and source not in DOWNLOADS and not Path(source).exists():
                known = ", ".join(("digits", *DOWNLOADS))
                raise FileNotFoundError(f"image source {source!r} is neither a file or folder nor one of {known}")
        self.clients, self.partition, self.alpha = clients, partition, alpha
        self.classes_per_client, self.clients_per_domain = classes_per_client, clients_per_domain
        self.long_tail, self.participation, self.allow_empty = long_tail, participation, allow_empty
        self.images_per_client, self.train_size, self.test_size = images_per_client, train_size, test_size
        self.val_fraction, self.test_fraction, self.eval_batch_size = val_fraction, test_fraction, eval_batch_size
        self.augment, self.image_size, self.channels = tuple(augment or ()), image_size, channels
        self.mean, self.std, self.seed, self.predict_folder = mean, std, seed, predict_folder
        self.class_names = class_names
        self.classes: list[str] = []
        check_normalisation(mean, std, channels)
        if partition == "domain":
            self._clients_per_domain()
        if len(set(self.sources)) < len(self.sources):
            raise ValueError(f"sources {', '.join(self.sources)} name the same images twice")
        names = [source if source in ("digits", *DOWNLOADS) else Path(source).stem for source in self.sources]
        self.domains = names if len(set(names)) == len(names) else self.sources

    # ---------------------------------------------------------------------------------------------- reading

    def prepare_data(self) -> None:
        """Download what is missing."""
        for source in self.sources:
            if source in DOWNLOADS:
                download(source, self.data_dir)

    def setup(self, stage: str | None = None) -> None:
        """Read, split off validation images, deal the rest.

        Raises:
            ValueError: the sources do not fit together, the partition is impossible, a client is empty, or a class
                is held by nobody.
        """
        if self.classes:
            return
        splits: dict[str, list[tuple[Tensor, np.ndarray]]] = {"train": [], "val": [], "test": []}
        classes: list[str] = []
        for number, source in enumerate(self.sources):
            train, test, names = self._read(source)
            if self.class_names is not None:
                train, test = _renumber([train, test], names, self.class_names, source)
                names = self.class_names
            if classes and names != classes:
                raise ValueError(
                    f"{source} has the classes {', '.join(names)}, {self.sources[0]} has {', '.join(classes)}: "
                    "the domains of a federation share their classes, or give class_names"
                )
            classes = names
            train = _draw(train, self.train_size, source, "train_size", [self.seed, 1, number])
            if math.ceil(len(train[1]) * self.val_fraction) >= len(train[1]):
                raise ValueError(
                    f"val_fraction {self.val_fraction} leaves none of the {len(train[1])} training images of {source} "
                    "for training: use more images, or lower val_fraction"
                )
            kept, off = stratified(train[1], self.val_fraction, self.seed)
            splits["train"].append((train[0][kept], train[1][kept]))
            splits["val"].append((train[0][off], train[1][off]))
            splits["test"].append(_draw(test, self.test_size, source, "test_size", [self.seed, 2, number]))
        self._splits = {name: self._join(parts) for name, parts in splits.items()}
        self.table = self._splits["train"]
        self.parts = self._deal(classes)
        kinds = {  # class and domain in one number
            name: (table.domains * len(classes) + table.labels).numpy() for name, table in self._splits.items()
        }
        self.held_out = torch.from_numpy(
            deal_held_out(kinds["val"], [kinds["train"][p] for p in self.parts], self.seed)
        )
        self.classes = classes

    def _read(self, source: str) -> tuple[tuple[Tensor, np.ndarray], tuple[Tensor, np.ndarray], list[str]]:
        """Training and test images (uint8 pixels, labels) of a source, and its classes."""
        if source == "digits":
            stores = _digits()
        elif source in DOWNLOADS:
            stores = _npz(self.data_dir / f"{source}.npz")
        elif Path(source).is_dir():
            pixels, labels, names = self._read_folder(Path(source))
            kept, off = stratified(labels, self.test_fraction, 0)  # always the same test images
            return (pixels[kept], labels[kept]), (pixels[off], labels[off]), names
        else:
            stores = _npz(Path(source))
        train = [stores[name] for name in ("train", "val") if name in stores]
        pixels = torch.cat([self._fit(store.pixels, source) for store in train])
        labels = np.concatenate([store.labels for store in train])
        return (pixels, labels), (self._fit(stores["test"].pixels, source), stores["test"].labels), stores["classes"]

    def _read_folder(self, folder: Path) -> tuple[Tensor, np.ndarray, list[str]]:
        if self.image_size is None:
            raise ValueError(f"{folder} is a folder of images of any size: set image_size")
        names = sorted(p.name for p in folder.iterdir() if p.is_dir())
        if len(names) < (2 if self.class_names is None else 1):
            raise ValueError(f"{folder} needs one folder of images per class, it has {len(names)}")
        paths = [_image_paths(folder / name) for name in names]
        labels = np.repeat(np.arange(len(names)), [len(p) for p in paths])
        size = (self.image_size, self.image_size)
        files = Files([p for own in paths for p in own], labels, size, self.channels or 3)
        return files.read(np.arange(len(labels))), labels, names

    def _fit(self, pixels: Tensor, source: str) -> Tensor:
        """Bring uint8 images `[n, c, h, w]` to the common size and channels."""
        from torchvision.transforms.v2.functional import rgb_to_grayscale

        match self.channels, pixels.shape[1]:
            case (3, 1):
                pixels = pixels.expand(-1, 3, -1, -1)
            case (1, 3):
                pixels = rgb_to_grayscale(pixels)
            case (int(wanted), have) if wanted != have:
                raise ValueError(
                    f"{source} has images of {have} channels, of which channels {wanted} cannot be made: "
                    "store 1 or 3, or leave channels out"
                )
        return fit(pixels, self.image_size, self.image_size) if self.image_size else pixels

    def _join(self, parts: list[tuple[Tensor, np.ndarray]]) -> Table:
        shapes = {tuple(pixels.shape[1:]) for pixels, _ in parts}
        if len(shapes) > 1:
            raise ValueError(f"the sources have images of the shapes {sorted(shapes)}: set image_size and channels")
        (channels, *_) = next(iter(shapes))
        check_normalisation(self.mean, self.std, channels)
        mean, std = self.mean or [0.5] * channels, self.std or [0.5] * channels
        return Table(
            pixels=torch.cat([pixels for pixels, _ in parts]),
            labels=torch.from_numpy(np.concatenate([labels for _, labels in parts])),
            domains=torch.arange(len(parts)).repeat_interleave(torch.tensor([len(p) for p, _ in parts])),
            mean=torch.tensor(mean)[:, None, None],
            std=torch.tensor(std)[:, None, None],
        )

    # ---------------------------------------------------------------------------------------------- dealing

    def _deal(self, classes: list[str]) -> list[np.ndarray]:
        labels, domains = self.table.labels.numpy(), self.table.domains.numpy()
        needed = np.bincount(labels, minlength=len(classes)) > 0
        if self.class_names is None and not needed.all():  # with class_names, the sources need not have them all
            raise ValueError(
                f"the sources have no training image of class {', '.join(np.array(classes)[~needed])}: number "
                "the classes of an .npz file from 0 without gaps, raise train_size, or give class_names"
            )
        kept = np.arange(len(labels)) if self.long_tail is None else long_tail(labels, self.long_tail, self.seed)
        labels, domains = labels[kept], domains[kept]
        if len(labels) < self.clients and not self.allow_empty:
            raise ValueError(f"{len(labels)} images cannot be dealt to {self.clients} clients: use fewer clients")
        match self.partition:
            case "dirichlet":
                parts = dirichlet(labels, self.clients, self.alpha, self.seed)
            case "dirichlet_balanced":
                parts = dirichlet_balanced(labels, self.clients, self.alpha, self.seed)
            case "shards":
                parts = shards(labels, self.clients, self.classes_per_client, self.seed)
            case "quantity":
                parts = quantity(len(labels), self.clients, self.alpha, self.seed)
            case "domain":
                parts = by_domain(domains, self._clients_per_domain(), self.seed)
            case "even":
                parts = even(len(labels), self.clients, self.seed)
            case _:
                raise ValueError(f"unknown partition {self.partition!r}")
        if self.images_per_client and self.partition in ("dirichlet", "dirichlet_balanced", "shards"):
            # these list a client's images class after class: mixed first, so that every class keeps its share
            random = np.random.default_rng([self.seed, 4])
            parts = [random.permutation(part) for part in parts]
        parts = [kept[part[: self.images_per_client]] for part in parts]
        empty = [k for k, part in enumerate(parts) if len(part) == 0]
        if empty and not self.allow_empty:
            raise ValueError(
                f"{self.partition} leaves {len(empty)} of {self.clients} clients without images (the first is client "
                f"{empty[0]}): raise alpha, use fewer clients, another seed, or allow_empty"
            )
        held = np.bincount(self.table.labels.numpy()[np.concatenate(parts)], minlength=len(classes))
        if (missing := np.flatnonzero(needed & (held == 0))).size:
            raise ValueError(
                f"class {classes[missing[0]]} is held by no client: raise images_per_client or train_size, or lower "
                "long_tail"
            )
        return parts

    def _clients_per_domain(self) -> list[int]:
        count = len(self.sources)
        if count < 2 or self.clients < count:
            raise ValueError(f"partition domain cannot deal {count} sources to {self.clients} clients")
        chosen = self.clients_per_domain or [len(p) for p in np.array_split(np.arange(self.clients), count)]
        if len(chosen) != count or sum(chosen) != self.clients or min(chosen) < 1:
            raise ValueError(
                f"clients_per_domain {chosen} needs {count} numbers above 0, one a source, {self.clients} in all"
            )
        return chosen

    def counts(self) -> np.ndarray:
        """Images of each client and class, int64 `[clients, classes]`."""
        labels = self.table.labels.cpu().numpy()
        return np.stack([np.bincount(labels[part], minlength=len(self.classes)) for part in self.parts])

    def client(self, number: int) -> Client:
        """One client; its rows and the table are on the device of the table."""
        rows = torch.from_numpy(self.parts[number]).to(self.table.pixels.device)
        return Client(number, rows, self.table, self.augment, self.seed)

    def round(self, number: int) -> FederatedRound:
        """The clients of a round: a draw that depends on (seed, number) alone, among those that have images."""
        sizes = [len(part) for part in self.parts]
        able = np.flatnonzero(sizes)
        online = min(round(self.participation * self.clients), len(able))
        draw = counter_uniform(self.seed, number, able, 1)[:, 0].argsort(stable=True)[:online]
        chosen = [self.client(int(k)) for k in sorted(able[draw.numpy()])]
        return FederatedRound(number, chosen, sizes, len(self.classes))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The table is copied to the device once, and stays there."""
        if not isinstance(batch, FederatedRound):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        self.table = self.table.to(device)
        return batch._replace(clients=[self.client(client.id) for client in batch.clients])

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must agree on."""
        rows = [self.table.labels.cpu().numpy(), np.array([len(part) for part in self.parts]), *self.parts]
        dealt = hashlib.sha256(np.concatenate(rows).tobytes()).hexdigest()
        same = {"clients": self.clients, "classes": len(self.classes), "partition": self.partition, "seed": self.seed}
        return {**same, "dealt": dealt}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare, where a fit goes on; any federation may test a model.

        Raises:
            ValueError: the checkpoint belongs to another federation.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        for name, now in self.state_dict().items():
            if (then := state_dict.get(name, now)) != now:
                if name == "dealt":
                    raise ValueError("the checkpoint's clients hold other images: resume with the same data options")
                raise ValueError(f"the checkpoint has {name} {then}, the data have {now}: resume with the same")

    # ---------------------------------------------------------------------------------------------- loaders

    def train_dataloader(self) -> Loader:
        """One `FederatedRound` per epoch, the same on every rank."""
        return Loader(_Rounds(self), GlobalBatches(1, 1, shuffle=False, drop_last=False))

    def val_dataloader(self) -> Loader:
        """All validation images."""
        return self._loader(_Evaluation(self._splits["val"], self.domains, self.clients, owners=self.held_out))

    def test_dataloader(self) -> Loader:
        """All test images."""
        return self._loader(_Evaluation(self._splits["test"], self.domains, self.clients))

    def predict_dataloader(self) -> Loader:
        """The images of `predict_folder`, or the test images."""
        if self.predict_folder is None:
            return self.test_dataloader()
        table = self._splits["test"]
        paths = _image_paths(Path(self.predict_folder))
        _, channels, height, width = table.pixels.shape
        files = Files(paths, np.full(len(paths), -1), (height, width), channels)
        return self._loader(_Evaluation(table, self.domains, self.clients, files))

    def _loader(self, dataset: "_Evaluation") -> Loader:
        order = GlobalBatches(len(dataset), self.eval_batch_size, shuffle=False, drop_last=False, **ranks(self))
        return Loader(dataset, order)


class _Rounds(Dataset[FederatedRound]):
    def __init__(self, data: FederatedImages) -> None:
        self.data = data

    def __len__(self) -> int:
        return 1

    def __getitems__(self, draw: Draw) -> FederatedRound:
        return self.data.round(draw.epoch)


class _Evaluation(Dataset[FederatedBatch]):
    """The images of a table in their order, or files in the table's normalisation."""

    def __init__(
        self,
        table: Table,
        domain_names: list[str],
        clients: int,
        files: Files | None = None,
        owners: Tensor | None = None,
    ) -> None:
        self.table, self.domain_names, self.clients = table, domain_names, clients
        self.store = files or Arrays(table.pixels, table.labels.numpy())
        nobody = torch.full((len(self),), -1)
        self.domains = nobody if files else table.domains
        self.owners = nobody if owners is None else owners

    def __len__(self) -> int:
        return len(self.store.labels)

    def __getitems__(self, draw: Draw) -> FederatedBatch:
        return FederatedBatch(
            image=self.table.normalize(self.store.read(draw.items)),
            label=torch.from_numpy(self.store.labels[draw.items]),
            domain=self.domains[torch.from_numpy(draw.items)],
            client=self.owners[torch.from_numpy(draw.items)],
            index=torch.from_numpy(draw.items),
            name=[self.store.name(i) for i in draw.items],
            domain_names=self.domain_names,
            clients=self.clients,
        )


def _renumber(
    splits: list[tuple[Tensor, np.ndarray]], names: list[str], wanted: list[str], source: str
) -> list[tuple[Tensor, np.ndarray]]:
    """The same images, labels as positions in `wanted` instead of `names`."""
    for c in np.unique(np.concatenate([labels for _, labels in splits])):
        if names[c] not in wanted:
            raise ValueError(
                f"{source} has a class {names[c]!r}, the federation has {', '.join(wanted)}: rename it or leave it out"
            )
    number = np.array([wanted.index(name) if name in wanted else -1 for name in names])
    return [(pixels, number[labels]) for pixels, labels in splits]


def _draw(
    images: tuple[Tensor, np.ndarray], size: int | None, source: str, option: str, seed: Iterable[int]
) -> tuple[Tensor, np.ndarray]:
    """A seeded subset of `size` images, all without a size."""
    pixels, labels = images
    if size is None:
        return images
    if size > len(labels):
        raise ValueError(f"{option} {size} is more than the {len(labels)} images of {source}")
    chosen = np.sort(np.random.default_rng(list(seed)).permutation(len(labels))[:size])
    return pixels[chosen], labels[chosen]
