import multiprocessing

import numpy as np
import pytest
import torch

from datamodules import ImageClassification
from datamodules.images import augment, download, stratified


def ready(**options):
    data = ImageClassification(**options)
    data.prepare_data()
    data.setup()
    return data


def write_npz(path, **changes):
    rng = np.random.default_rng(0)
    arrays = {}
    for split, n in (("train", 40), ("test", 12)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (n, 6, 6, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(n) % 4)[:, None]
    np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})
    return str(path)


def test_digits_are_split_without_overlap_and_the_test_images_never_change():
    a, b = ready(), ready(seed=1)
    assert torch.equal(a.split("test").store.pixels, b.split("test").store.pixels)
    train, val = a._items["train"], a._items["val"]
    assert not set(train) & set(val)
    assert len(train) + len(val) == len(a.split("train").store.labels) == 1437
    assert len(a.split("test")) == 360
    assert not np.array_equal(val, b._items["val"])
    whole = torch.cat([a.split(s).store.pixels for s in ("train", "test")]).flatten(1)
    assert len(whole) == 1797


def test_a_batch_is_what_it_says():
    batch = next(iter(ready(batch_size=32).train_dataloader()))
    assert batch.image.shape == (32, 1, 8, 8) and batch.image.dtype == torch.float32
    assert batch.label.shape == (32,) and batch.label.dtype == torch.int64
    assert abs(batch.image.mean()) < 0.2 and 0.8 < batch.image.std() < 1.2


def test_augmentation_is_a_function_of_seed_epoch_and_item():
    data = ready(augment=["crop", "flip"])

    def epoch(number, workers):
        data.num_workers = workers
        loader = data.train_dataloader()
        loader.sampler.set_epoch(number)
        batches = list(loader)
        index = torch.cat([b.index for b in batches])
        return torch.cat([b.image for b in batches]), index

    (a, i), (b, j), (c, k) = epoch(0, 0), epoch(0, 2), epoch(1, 0)
    assert torch.equal(i, j) and torch.equal(a, b)
    same = {n.item(): x for n, x in zip(i, a, strict=True)}
    changed = [not torch.equal(same[n.item()], x) for n, x in zip(k, c, strict=True) if n.item() in same]
    assert sum(changed) > len(changed) / 2


def test_crop_and_flip_against_slicing():
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    out = augment(pixels, ("crop", "flip"), torch.tensor([[0.0, 0.99, 0.9, 0.0], [0.5, 0.5, 0.1, 0.0]]))
    padded = torch.nn.functional.pad(pixels, (2, 2, 2, 2))
    assert torch.equal(out[0], padded[0, :, 0:16, 4:20])
    assert torch.equal(out[1], pixels[1].flip(-1))


def test_autoaugment_depends_on_its_number_only():
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    numbers = torch.rand(3, 4)
    before = torch.random.get_rng_state()
    a = augment(pixels, ("autoaugment",), numbers)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(a[1:2], augment(pixels[1:2], ("autoaugment",), numbers[1:2]))


def test_noise_is_the_same_for_an_image_whenever_it_is_asked_for():
    data = ready(batch_size=50)
    (a, *_), whole = list(data.test_dataloader()), next(iter(ready(batch_size=360).test_dataloader()))
    assert torch.equal(data.add_noise(a, 0.1), data.add_noise(whole, 0.1)[: len(a.index)])
    assert torch.allclose(data.add_noise(a, 0.0), a.image, atol=1e-6)
    grey = a._replace(image=torch.full_like(a.image, (0.5 - 0.3) / 0.38))
    spread = (data.add_noise(grey, 0.1) * 0.38 + 0.3 - 0.5).std()
    assert spread.item() == pytest.approx(0.1, rel=0.05)


def test_npz_in_medmnist_layout(tmp_path):
    data = ready(source=write_npz(tmp_path / "x.npz"), batch_size=8)
    assert data.classes == ["0", "1", "2", "3"]
    assert next(iter(data.test_dataloader())).image.shape == (6, 3, 6, 6)
    assert len(data.split("train")) == 36 and len(data.split("val")) == 4
    val = np.zeros((5, 6, 6, 3), np.uint8)
    data = ready(source=write_npz(tmp_path / "y.npz", val_images=val, val_labels=np.arange(5) % 4))
    assert len(data.split("train")) == 40 and len(data.split("val")) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_labels": None}, "has no array 'test_labels'"),
        ({"train_images": np.zeros((40, 6, 6, 3), np.float32)}, "train_images is float32"),
        ({"train_labels": np.arange(39)}, "one class number >= 0 for each of the 40 images"),
        ({"train_labels": np.full(40, -1)}, "class number >= 0"),
        ({"test_labels": np.full(12, 9)}, "has class 9, which train_labels lacks"),
    ],
)
def test_bad_npz_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ready(source=write_npz(tmp_path / "bad.npz", **changes))


def test_pickles_in_npz_are_refused(tmp_path):
    path = write_npz(tmp_path / "p.npz", train_images=np.array([object()] * 40))
    with pytest.raises(ValueError, match="cannot be read as .npz"):
        ready(source=path)


def make_folder(root, size=20):
    from torchvision.io import write_jpeg

    for split, n in (("train", 6), ("test", 2)):
        for label in ("cat", "dog"):
            folder = root / split / label
            folder.mkdir(parents=True)
            for i in range(n):
                write_jpeg(torch.randint(0, 256, (3, size + i, size), dtype=torch.uint8), str(folder / f"{i}.jpg"))
    return root


def test_folder_of_images(tmp_path, capsys):
    root = make_folder(tmp_path / "pets")
    (root / "train" / "cat" / "notes.txt").write_text("x")
    data = ready(source=str(root), image_size=16, batch_size=4, val_fraction=0.25)
    assert "notes.txt" in capsys.readouterr().err
    assert data.classes == ["cat", "dog"]
    batch = next(iter(data.train_dataloader()))
    assert batch.image.shape == (4, 3, 16, 16)
    assert all(("dog" in name) == (label == 1) for name, label in zip(batch.name, batch.label, strict=True))
    data.predict_folder = str(root / "test")
    rows = [n for b in data.predict_dataloader() for n in b.name]
    assert rows == sorted(str(p) for p in (root / "test").rglob("*.jpg"))
    (root / "test" / "dog" / "0.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match="0.jpg cannot be read as an image"):
        list(data.predict_dataloader())


def test_splits_without_images_and_unknown_classes_are_named(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="train has no folders"):
        ready(source=str(tmp_path))
    none = {"test_images": np.zeros((0, 6, 6, 3), np.uint8), "test_labels": np.zeros(0, int)}
    with pytest.raises(ValueError, match="test_images holds no image"):
        ready(source=write_npz(tmp_path / "none.npz", **none))
    for split in ("val", "test"):
        new = {f"{split}_images": np.zeros((3, 6, 6, 3), np.uint8), f"{split}_labels": np.array([0, 9, 1])}
        with pytest.raises(ValueError, match=f"{split}_labels has class 9"):
            ready(source=write_npz(tmp_path / f"{split}.npz", **new))


def test_options_out_of_range_are_named():
    with pytest.raises(ValueError, match="augment has"):
        ImageClassification(augment=["rotate"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ImageClassification(source="nowhere")
    with pytest.raises(ValueError, match="train_size 5000"):
        ready(train_size=5000)


def test_stratified_keeps_shares():
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    kept, off = stratified(labels, 0.1, 0)
    assert np.bincount(labels[off]).tolist() == [10, 5, 1]
    assert sorted([*kept, *off]) == list(range(160))


class _FakeCifar:
    """Stands for torchvision's class: two processes fetch at once, one of them slowly."""

    def __init__(self, root, train, download):
        if not download:
            raise RuntimeError("Dataset not found")
        import time

        time.sleep(0.2)
        n = 50_000 if train else 10_000
        self.data, self.targets = np.zeros((n, 1, 1, 3), np.uint8), [0] * n

    def __len__(self):
        return len(self.targets)


def test_two_processes_leave_one_good_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", _FakeCifar)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=download, args=("cifar10", tmp_path)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["cifar10.npz"]
    with np.load(tmp_path / "cifar10.npz", allow_pickle=False) as file:
        assert file["train_images"].shape == (50_000, 1, 1, 3)


def test_no_network_says_what_to_put_where(tmp_path, monkeypatch):
    import urllib.error

    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(FileNotFoundError, match=r"put torchvision's files of it there, or cifar10.npz"):
        download("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 8, 8), (1, 8, 8)), r"mine\.npz: val_fraction 0.1 of 1 images leaves none"),
        (((9, 0, 8), (1, 0, 8)), r"mine\.npz: train_images holds no image"),
        (((9, 8, 8), (2, 7, 8)), r"mine\.npz: test_images are of another size"),
    ],
)
def test_arrays_that_are_no_images(shapes, message, tmp_path):
    arrays = {}
    for split, shape in zip(("train", "test"), shapes, strict=True):
        arrays |= {f"{split}_images": np.zeros(shape, np.uint8), f"{split}_labels": np.zeros(shape[0], int)}
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        ImageClassification(str(tmp_path / "mine.npz")).setup()


def test_normalisation_must_fit_the_images_of_a_file(tmp_path):
    images, labels = np.zeros((20, 8, 8, 3), np.uint8), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    with pytest.raises(ValueError, match=r"std \[1.0\] needs one number for each of the 3 channels"):
        ImageClassification(str(tmp_path / "a.npz"), std=[1.0]).setup()
