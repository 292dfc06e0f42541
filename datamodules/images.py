"""Images with one label each: scikit-learn digits, CIFAR, Fashion-MNIST, `.npz` files and folders of images."""

import math
import os
import shutil
import socket
import sys
import tempfile
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.checks import DISK_FULL, check_fractions, check_least, check_seeds, read_npz
from datamodules.order import Draw, GlobalBatches, Loader, counter_uniform, describe, ranks

ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".webp")

# torchvision class, mean and standard deviation per channel of the training images in [0, 1]
DOWNLOADS = {
    "cifar10": ("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), (50_000, 10_000)),
    "cifar100": ("CIFAR100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), (50_000, 10_000)),
    "fashion_mnist": ("FashionMNIST", (0.2860,), (0.3530,), (60_000, 10_000)),
    "mnist": ("MNIST", (0.1307,), (0.3081,), (60_000, 10_000)),
    "usps": ("USPS", (0.2469,), (0.2989,), (7_291, 2_007)),
    "svhn": ("SVHN", (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), (73_257, 26_032)),
}
DEFAULTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "digits": ((0.3,), (0.38,)),
    **{source: (mean, std) for source, (_, mean, std, _) in DOWNLOADS.items()},
}


class Images(NamedTuple):
    """A batch.

    Attributes:
        image: float32 `[b, c, h, w]`, in [0, 1] and then normalised by the data module's `mean` and `std`.
        label: int64 `[b]`, class number; -1 where there is none (prediction).
        index: int64 `[b]`, position in the split.
        name: `b` strings, the file or the position in the split.
    """

    image: Tensor
    label: Tensor
    index: Tensor  # type: ignore[assignment] # instead of tuple's method
    name: list[str]


class Arrays(NamedTuple):
    """Images in memory: uint8 `[n, c, h, w]` and labels int64 `[n]`."""

    pixels: Tensor
    labels: np.ndarray

    def read(self, items: np.ndarray) -> Tensor:
        """Uint8 `[b, c, h, w]`."""
        return self.pixels[torch.from_numpy(items)]

    def name(self, item: int) -> str:
        """Position as a string."""
        return str(item)


class Files(NamedTuple):
    """Images on disk, decoded when read: paths, labels int64 `[n]`, (height, width) and channels to bring them to."""

    paths: list[str]
    labels: np.ndarray
    size: tuple[int, int]
    channels: int

    def read(self, items: np.ndarray) -> Tensor:
        """Uint8 `[b, c, h, w]`, cut by `fit`; 16 bits a channel become 8.

        Raises:
            ValueError: naming every file that cannot be decoded, or is an animation.
        """
        from torchvision.io import ImageReadMode, decode_image

        mode = {1: ImageReadMode.GRAY, 4: ImageReadMode.RGB_ALPHA}.get(self.channels, ImageReadMode.RGB)
        images, bad = [], []
        for path in (self.paths[item] for item in items):
            try:
                image = decode_image(path, mode=mode)
            except RuntimeError as error:
                bad.append(f"{path} cannot be read as an image: {str(error).splitlines()[0]}")
                continue
            if image.ndim > 3:
                bad.append(f"{path} is an animation of {len(image)} pictures: keep one, or leave it out")
                continue
            if image.dtype == torch.uint16:
                image = (image.float() / 257).round().to(torch.uint8)  # 65535 becomes 255
            images.append(fit(image, *self.size))
        if bad:
            raise ValueError("; ".join(bad))
        return torch.stack(images)

    def name(self, item: int) -> str:
        """The path."""
        return self.paths[item]


def fit(pixels: Tensor, height: int, width: int) -> Tensor:
    """Scale uint8 images `[..., h, w]`, sides in proportion, until they just cover `height` x `width`; cut the rest."""
    from torchvision.transforms.v2.functional import center_crop, resize

    h, w = pixels.shape[-2:]
    if w * height >= h * width:
        size = [height, max(width, int(height * w / h))]
    else:
        size = [max(height, int(width * h / w)), width]
    return center_crop(resize(pixels, size, antialias=True), [height, width])


class Split(Dataset[Images]):
    """Some items of a store, normalised and perhaps augmented; `__getitems__` makes a whole batch at once."""

    def __init__(
        self,
        store: Arrays | Files,
        items: np.ndarray,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        augment: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        self.store, self.items, self.augment, self.seed = store, items, augment, seed
        self.mean = torch.tensor(mean)[:, None, None]
        self.std = torch.tensor(std)[:, None, None]

    def __len__(self) -> int:
        return len(self.items)

    def __getitems__(self, draw: Draw) -> Images:
        items = self.items[draw.items]
        pixels = self.store.read(items)
        if self.augment:
            pixels = augment(pixels, self.augment, counter_uniform(self.seed, draw.epoch, items, 4))
        return Images(
            image=(pixels.float() / 255 - self.mean) / self.std,
            label=torch.from_numpy(self.store.labels[items]),
            index=torch.from_numpy(draw.items),
            name=[self.store.name(i) for i in items],
        )


def augment(pixels: Tensor, steps: tuple[str, ...], numbers: Tensor) -> Tensor:
    """Augment a batch; everything random comes from `numbers`.

    Args:
        pixels: uint8 `[b, c, h, w]`.
        steps: of `crop` (pad by an eighth of the side, cut a random window), `flip` (left-right, one in two) and
            `autoaugment` (torchvision's CIFAR-10 policy, Cubuk et al. 2019; one image at a time), in this order.
        numbers: float32 `[b, 4]`, uniform in [0, 1).

    Returns:
        Uint8 `[b, c, h, w]`.
    """
    b, _, h, w = pixels.shape
    if "crop" in steps:
        pad = max(h // 8, 1)
        padded = F.pad(pixels, (pad,) * 4)
        top = (numbers[:, 0] * (2 * pad + 1)).long()
        left = (numbers[:, 1] * (2 * pad + 1)).long()
        count = partial(torch.arange, device=pixels.device)
        rows = (top[:, None] + count(h))[:, None, :, None]  # b 1 h 1
        columns = (left[:, None] + count(w))[:, None, None, :]  # b 1 1 w
        channels = count(pixels.shape[1])[None, :, None, None]
        pixels = padded[count(b)[:, None, None, None], channels, rows, columns]
    if "flip" in steps:
        pixels = torch.where(numbers[:, 2, None, None, None] < 0.5, pixels.flip(-1), pixels)
    if "autoaugment" in steps:
        from torchvision.transforms.v2 import AutoAugment, AutoAugmentPolicy

        policy = AutoAugment(AutoAugmentPolicy.CIFAR10)
        with torch.random.fork_rng(devices=[]):
            images = []
            for image, number in zip(pixels, numbers[:, 3], strict=True):
                torch.manual_seed(int(number * 2**24))
                images.append(policy(image))
        pixels = torch.stack(images)
    return pixels


def check_normalisation(mean: list[float] | None, std: list[float] | None, channels: int | None) -> None:
    """Refuse what pixels cannot be normalised by; None is left open.

    Raises:
        ValueError: naming `mean` or `std`.
    """
    for name, numbers in (("mean", mean), ("std", std)):
        if numbers is None:
            continue
        if len(numbers) != (channels or len(numbers) or 1):
            needed = f"each of the {channels} channels" if channels else "each channel"
            raise ValueError(f"{name} {numbers} needs one number for {needed}")
        if not np.isfinite(numbers).all() or (name == "std" and min(numbers) <= 0):
            raise ValueError(f"{name} {numbers} must be finite" + (" and above 0" if name == "std" else ""))


class ImageClassification(LightningDataModule):
    """Images with one label each.

    The validation images are a seeded, stratified part of the training images (or the file's own); the test images
    are never touched by training, calibration or selection.

    Args:
        source: `digits` (1,797 scans of 8x8, in scikit-learn; a fixed fifth is the test split), `cifar10`,
            `cifar100`, `fashion_mnist`, `mnist`, `usps` or `svhn` (downloaded once into `data_dir`), an `.npz` file in
            the layout of MedMNIST (`train_images` uint8 `[n, h, w]` or `[n, h, w, c]`, `train_labels` `[n]` or
            `[n, 1]`, the same for `test_` and, if there, `val_`), or a folder with `train/<class>/*.jpg`,
            `test/<class>/*.jpg` and, if there, `val/`.
        data_dir: where downloads are kept.
        batch_size: images per batch over all ranks together.
        val_fraction: part of the training images that validates, in (0, 1).
        train_size: use only so many training images, drawn with `seed` (all by default).
        augment: of `crop`, `flip`, `autoaugment`, for training batches.
        image_size: side in pixels to which the images of a folder are brought.
        channels: 3 or 1, for the images of a folder.
        mean: per channel, of pixels in [0, 1]; by default those of the source, or 0.5.
        std: per channel; by default that of the source, or 0.5.
        seed: of the split, the order and the augmentation.
        num_workers: processes that prepare batches.
        predict_folder: a folder of images (searched at every depth) that `predict` labels; without it, the test split.

    Attributes:
        classes: names of the classes, after `setup`.

    Raises:
        ValueError: a number is out of range.
        FileNotFoundError: there is no such source.
    """

    __str__ = describe

    def __init__(
        self,
        source: str = "digits",
        data_dir: str = "data",
        batch_size: int = 100,
        val_fraction: float = 0.1,
        train_size: int | None = None,
        augment: list[str] | None = None,
        image_size: int = 224,
        channels: int = 3,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        seed: int = 0,
        num_workers: int = 0,
        predict_folder: str | None = None,
    ) -> None:
        super().__init__()
        unknown = set(augment or ()) - {"crop", "flip", "autoaugment"}
        if unknown:
            raise ValueError(f"augment has {sorted(unknown)}: known are crop, flip and autoaugment")
        check_fractions(val_fraction=val_fraction)
        check_least(1, batch_size=batch_size, train_size=train_size, image_size=image_size)
        check_least(0, num_workers=num_workers)
        check_seeds(seed=seed)
        if channels not in (1, 3):
            raise ValueError(f"channels is {channels}: give 1 or 3")
        if source not in ("digits", *DOWNLOADS) and not Path(source).exists():
            known = ", ".join(("digits", *DOWNLOADS))
            raise FileNotFoundError(f"image source {source!r} is neither a file or folder nor one of {known}")
        known_channels = len(DEFAULTS[source][0]) if source in DEFAULTS else channels if Path(source).is_dir() else None
        check_normalisation(mean, std, known_channels)
        self.source, self.data_dir, self.batch_size = source, Path(data_dir), batch_size
        self.val_fraction, self.train_size, self.augment = val_fraction, train_size, tuple(augment or ())
        self.image_size, self.channels, self.seed, self.num_workers = image_size, channels, seed, num_workers
        self.mean, self.std, self.predict_folder = mean, std, predict_folder
        self.classes: list[str] = []

    # ---------------------------------------------------------------------------------------------- reading

    def prepare_data(self) -> None:
        """Download what is missing."""
        if self.source in DOWNLOADS:
            download(self.source, self.data_dir)

    def setup(self, stage: str | None = None) -> None:
        """Read and split."""
        if self.classes:
            return
        if self.source == "digits":
            stores = _digits()
        elif self.source in DOWNLOADS:
            stores = _npz(self.data_dir / f"{self.source}.npz")
        elif Path(self.source).is_dir():
            stores = _folder(Path(self.source), self.image_size, self.channels)
        else:
            stores = _npz(Path(self.source))
        self.classes = stores.pop("classes")
        channels = self.channels if isinstance(stores["train"], Files) else stores["train"].pixels.shape[1]
        mean, std = DEFAULTS.get(self.source, ((0.5,) * channels, (0.5,) * channels))
        check_normalisation(self.mean, self.std, channels)
        self._mean, self._std = tuple(self.mean or mean), tuple(self.std or std)
        train = np.arange(len(stores["train"].labels))
        if "val" not in stores:
            if math.ceil(len(train) * self.val_fraction) >= len(train):
                raise ValueError(f"{self.source}: val_fraction {self.val_fraction} of {len(train)} images leaves none")
            train, val = stratified(stores["train"].labels, self.val_fraction, self.seed)
            stores["val"] = stores["train"]
        else:
            val = np.arange(len(stores["val"].labels))
        if self.train_size is not None:
            if self.train_size > len(train):
                raise ValueError(f"train_size {self.train_size} is more than the {len(train)} training images")
            train = np.sort(np.random.default_rng([self.seed, 1]).permutation(train)[: self.train_size])
        self._stores = stores
        self._items = {"train": train, "val": val, "test": np.arange(len(stores["test"].labels))}

    def split(self, name: str, *, augment: bool = False) -> Split:
        """The `train`, `val` or `test` images; only `augment=True` changes them from epoch to epoch."""
        steps = self.augment if augment else ()
        return Split(self._stores[name], self._items[name], self._mean, self._std, augment=steps, seed=self.seed)

    def add_noise(self, images: Images, sigma: float) -> Tensor:
        """Gaussian noise on the pixels, the same for an image whenever it is asked for.

        `clip(pixel + sigma n, 0, 1)` on pixels in [0, 1], then normalised again; `n` depends on (seed, index) alone.

        Args:
            images: a batch, on any device.
            sigma: standard deviation, in units of the pixel range.

        Returns:
            Float32 `[b, c, h, w]`, in place of `images.image`.
        """
        mean, std = (torch.tensor(v, device=images.image.device)[:, None, None] for v in (self._mean, self._std))
        n = images.image[0].numel()
        u = counter_uniform(self.seed, 0, images.index.cpu().numpy(), 2 * n)
        normal = (-2 * torch.log1p(-u[:, :n])).sqrt() * torch.cos(2 * torch.pi * u[:, n:])  # Box and Muller
        pixels = images.image * std + mean + sigma * normal.view_as(images.image).to(images.image.device)
        return (pixels.clamp(0, 1) - mean) / std

    # ---------------------------------------------------------------------------------------------- loaders

    def _loader(self, split: Split, *, train: bool) -> Loader:
        order = GlobalBatches(
            len(split), self.batch_size, shuffle=train, drop_last=train, seed=self.seed, **ranks(self)
        )
        return Loader(split, order, num_workers=self.num_workers, pin_memory=torch.cuda.is_available())

    def train_dataloader(self) -> Loader:
        """Shuffled, augmented, whole batches only."""
        return self._loader(self.split("train", augment=True), train=True)

    def val_dataloader(self) -> Loader:
        """All validation images."""
        return self._loader(self.split("val"), train=False)

    def test_dataloader(self) -> Loader:
        """All test images."""
        return self._loader(self.split("test"), train=False)

    def predict_dataloader(self) -> Loader:
        """The images of `predict_folder`, or the test images."""
        if self.predict_folder is None:
            return self.test_dataloader()
        store = self._stores["train"]
        size, channels = (
            (store.size, store.channels)
            if isinstance(store, Files)
            else ((store.pixels.shape[-2], store.pixels.shape[-1]), len(self._mean))
        )
        paths = _image_paths(Path(self.predict_folder))
        files = Files(paths, np.full(len(paths), -1), size, channels)
        return self._loader(Split(files, np.arange(len(paths)), self._mean, self._std), train=False)

    def calibration_dataloader(self) -> Loader:
        """Training images in a fixed random order, not augmented, the same batches on every rank."""
        split = self.split("train")
        return Loader(split, GlobalBatches(len(split), self.batch_size, shuffle=True, drop_last=True, seed=self.seed))


# ------------------------------------------------------------------------------------------------- sources


def stratified(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the kept and of the split-off items, both sorted; class shares are kept where they can be."""
    from sklearn.model_selection import train_test_split

    counts = np.bincount(labels)
    n_off = round(len(labels) * fraction)
    possible = counts[counts > 0].min() >= 2 and n_off >= (counts > 0).sum()
    kept, off = train_test_split(
        np.arange(len(labels)), test_size=fraction, random_state=seed, stratify=labels if possible else None
    )
    return np.sort(kept), np.sort(off)


def _digits() -> dict[str, Any]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.from_numpy((digits.images * (255 / 16)).round().astype(np.uint8))[:, None]
    labels = digits.target.astype(np.int64)
    train, test = stratified(labels, 0.2, seed=0)  # always the same test images
    return {
        "train": Arrays(pixels[train], labels[train]),
        "test": Arrays(pixels[test], labels[test]),
        "classes": [str(d) for d in range(10)],
    }


def _npz(path: Path) -> dict[str, Any]:
    arrays = read_npz(path)
    stores: dict[str, Any] = {}
    for split in ("train", "val", "test"):
        if split == "val" and "val_images" not in arrays:
            continue
        for key in (f"{split}_images", f"{split}_labels"):
            if key not in arrays:
                raise ValueError(f"{path} has no array {key!r}; it has {', '.join(arrays) or 'none'}")
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"].reshape(-1)
        channels_first = images.ndim == 4 and images.shape[1] <= 4 < images.shape[3]
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or channels_first:
            raise ValueError(
                f"{path}: {split}_images is {images.dtype} {list(images.shape)}, "
                "needed is uint8 [n, h, w] or [n, h, w, c]"
            )
        if not np.issubdtype(labels.dtype, np.integer) or len(labels) != len(images) or labels.min(initial=0) < 0:
            raise ValueError(
                f"{path}: {split}_labels needs one class number >= 0 for each of the {len(images)} images, "
                f"it is {labels.dtype} {list(labels.shape)}"
            )
        pixels = torch.from_numpy(images if images.ndim == 4 else images[..., None])
        stores[split] = Arrays(pixels.permute(0, 3, 1, 2).contiguous(), labels.astype(np.int64))
        if not images.size:
            raise ValueError(f"{path}: {split}_images holds no image, its shape is {list(images.shape)}")
        if stores[split].pixels.shape[1:] != stores["train"].pixels.shape[1:]:
            raise ValueError(
                f"{path}: {split}_images are of another size than train_images: {list(images.shape)} and "
                f"{list(arrays['train_images'].shape)}"
            )
        if labels.max() > stores["train"].labels.max():
            raise ValueError(f"{path}: {split}_labels has class {labels.max()}, which train_labels lacks")
    stores["classes"] = [str(i) for i in range(int(stores["train"].labels.max()) + 1)]
    return stores


def _image_paths(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise FileNotFoundError(f"image folder {folder} does not exist")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    other = [str(p) for p in files if p.suffix.lower() not in ENDINGS]
    if other:
        sys.stderr.write(f"left out, not an image ({', '.join(ENDINGS)}): {', '.join(other)}\n")
    paths = [str(p) for p in files if p.suffix.lower() in ENDINGS]
    if not paths:
        raise ValueError(f"{folder} holds no image ({', '.join(ENDINGS)})")
    return paths


def _folder(folder: Path, size: int, channels: int) -> dict[str, Any]:
    for split in ("train", "test"):
        if not (folder / split).is_dir():
            raise FileNotFoundError(f"{folder} has no folder {split}/: needed are train/<class>/ and test/<class>/")
    classes = sorted(p.name for p in (folder / "train").iterdir() if p.is_dir())
    if not classes:
        raise ValueError(f"{folder / 'train'} has no folders: needed is one for each class, with its images")
    stores: dict[str, Any] = {"classes": classes}
    for split in ("train", "val", "test"):
        if split == "val" and not (folder / split).is_dir():
            continue
        new = sorted(p.name for p in (folder / split).iterdir() if p.is_dir() and p.name not in classes)
        if new:
            raise ValueError(f"{folder / split} has classes that train/ lacks: {', '.join(new)}")
        paths, labels = [], []
        for number, name in enumerate(classes):
            if (folder / split / name).is_dir():
                found = _image_paths(folder / split / name)
                paths += found
                labels += [number] * len(found)
        if not paths:
            raise ValueError(f"{folder / split} holds no folder of a class")
        stores[split] = Files(paths, np.array(labels), (size, size), channels)
    return stores


def download(source: str, data_dir: Path) -> Path:
    """Bring a public data set to `<data_dir>/<source>.npz`; does nothing when it is there.

    The files are fetched and checked by torchvision in a folder of their own, and only a complete result is moved to
    its place, so an interrupted download leaves nothing behind and two processes leave one good copy.

    Raises:
        FileNotFoundError: without a network, saying what to put where.
    """
    import torchvision

    target = data_dir / f"{source}.npz"
    if target.is_file():
        return target
    class_name, _, _, sizes = DOWNLOADS[source]
    dataset = getattr(torchvision.datasets, class_name)
    data_dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{source}-", dir=data_dir))
    try:
        with _short_timeout():
            how = {s: {"split": s} if source == "svhn" else {"train": s == "train"} for s in ("train", "test")}
            try:  # the original files, if someone put them there
                parts = {s: dataset(data_dir, download=False, **how[s]) for s in how}
            except (RuntimeError, OSError):
                parts = {s: dataset(work, download=True, **how[s]) for s in how}
        arrays: dict[str, Any] = {}
        for (split, part), size in zip(parts.items(), sizes, strict=True):
            if len(part) != size:
                raise ValueError(f"{class_name} has {len(part)} {split} images instead of {size}")
            pixels = np.asarray(part.data)
            arrays[f"{split}_images"] = pixels.transpose(0, 2, 3, 1) if source == "svhn" else pixels
            arrays[f"{split}_labels"] = np.asarray(part.labels if source == "svhn" else part.targets)
        np.savez(work / "all.npz", **arrays)
        os.replace(work / "all.npz", target)
    except (urllib.error.URLError, OSError, RuntimeError) as error:
        if getattr(error, "errno", None) in DISK_FULL:
            raise
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"{class_name} is not in {data_dir} and cannot be downloaded ({reason}): put torchvision's files of it "
            f"there, or {target.name} with arrays train_images, train_labels, test_images and test_labels"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


@contextmanager
def _short_timeout(seconds: float = 15.0) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
