"""The federated data module."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.io import write_png

from datamodules import FederatedImages
from tests.fedhpro import toys


def ready(**options) -> FederatedImages:
    data = toys.data(**options)
    data.setup()
    return data


@pytest.fixture
def two_sets(tmp_path):
    """Two image sets of other sizes and channels, as files."""
    rng = np.random.default_rng(0)
    for name, shape in (("small", (8, 8)), ("large", (12, 12, 3))):
        arrays = {}
        for split, n in (("train", 90), ("test", 30)):
            arrays[f"{split}_images"] = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
            arrays[f"{split}_labels"] = np.arange(n)[:, None] % 3
        np.savez(tmp_path / f"{name}.npz", **arrays)
    return [str(tmp_path / "small.npz"), str(tmp_path / "large.npz")]


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet_balanced", "shards", "quantity", "even"])
def test_every_training_image_has_one_client(partition):
    data = ready(partition=partition)
    rows = np.concatenate(data.parts)
    assert np.array_equal(np.sort(rows), np.arange(len(data.table.labels)))
    assert data.counts().sum() == 180 and data.counts().shape == (4, 10)  # 200 less a tenth for validation


def test_splits_are_disjoint():
    data = FederatedImages()
    data.setup()
    digits = [{p.numpy().tobytes() for p in table.pixels} for table in data._splits.values()]
    sizes = [len(table.labels) for table in data._splits.values()]
    assert sum(sizes) == 1797
    # (a few scans are equal, but equal scans in two splits would be a leak only if an index were used twice)
    assert sum(len(d) for d in digits) >= 1790
    assert len(set().union(*digits)) >= 1790


def test_batches_cover_the_client_and_depend_on_seed_and_epoch_alone():
    client = ready().client(0)

    def epoch(client, number, size=7):
        batches = list(client.batches(number, size))
        return torch.cat([i for i, _ in batches]), torch.cat([y for _, y in batches]), [len(y) for _, y in batches]

    images, labels, sizes = epoch(client, 3)
    assert sum(sizes) == len(client) and max(sizes) - min(sizes) <= 1
    assert torch.equal(labels.sort().values, client.labels.sort().values)
    again, _, _ = epoch(ready().client(0), 3, size=11)  # another batch size: the same order and augmentation
    assert torch.equal(images, again)
    assert not torch.equal(images, epoch(client, 4)[0])
    assert not torch.equal(images, epoch(ready(seed=1).client(0), 3)[0])


def test_augmentation_is_off_where_it_should_be():
    plain, client = ready(augment=[]).client(0), ready().client(0)
    rows = client.order(2)
    assert torch.equal(client.images(rows), plain.images(rows))
    assert torch.equal(torch.cat([i for i, _ in plain.batches(2, 8)]), plain.images(rows))
    shifted = torch.cat([i for i, _ in client.batches(2, 8)])
    changed = (shifted != plain.images(rows)).flatten(1).any(1)
    assert 0.5 < changed.float().mean() < 1


def test_participation():
    data = ready(participation=0.5)
    chosen = [tuple(c.id for c in data.round(r).clients) for r in range(20)]
    assert all(len(c) == 2 and c == tuple(sorted(c)) for c in chosen)
    assert len(set(chosen)) > 2 and {k for c in chosen for k in c} == {0, 1, 2, 3}
    assert chosen == [tuple(c.id for c in ready(participation=0.5).round(r).clients) for r in range(20)]


def test_domains(two_sets):
    options = {"sources": two_sets, "partition": "domain", "train_size": None, "test_size": None, "image_size": 8}
    data = ready(**options, channels=1)
    assert data.domains == ["small", "large"] and data.table.pixels.shape == (162, 1, 8, 8)
    held = [set(data.table.domains[part].tolist()) for part in data.parts]
    assert held == [{0}, {0}, {1}, {1}]
    batch = next(iter(data.test_dataloader()))
    assert batch.image.shape == (60, 1, 8, 8) and batch.domain.bincount().tolist() == [30, 30]
    uneven = ready(**options, channels=3, clients_per_domain=[1, 3])
    assert uneven.table.pixels.shape[1] == 3
    assert [set(uneven.table.domains[part].tolist()) for part in uneven.parts] == [{0}, {1}, {1}, {1}]


def test_long_tail_leaves_evaluation_balanced():
    data = ready(train_size=None, long_tail=10, partition="even")
    counts = data.counts().sum(0)
    assert counts[0] > 8 * counts[9] and (np.diff(counts) < 0).all()
    assert np.ptp(np.bincount(data._splits["val"].labels.numpy())) <= 2


def test_folder_of_images_and_prediction(tmp_path):
    folder = str(toys.pets(tmp_path / "pets", 10))
    options = {"sources": [folder], "clients": 2, "partition": "even", "train_size": None, "test_size": None}
    data = ready(**options, image_size=8, predict_folder=folder)
    assert data.classes == ["cat", "dog"] and data.domains == ["pets"]
    assert data.counts().sum() + len(data._splits["val"].labels) == 16
    batch = next(iter(data.predict_dataloader()))
    assert batch.image.shape == (20, 3, 8, 8) and batch.label.eq(-1).all() and batch.name[0].endswith("cat/0.png")
    with pytest.raises(ValueError, match="set image_size"):
        ready(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients 0 must be at least 1"),
        ({"participation": 0.1}, "participation 0.1 of 4 clients selects nobody"),
        ({"participation": 0.0}, "selects nobody"),
        ({"participation": 1.5}, "selects nobody: choose between 0.25 and 1"),
        ({"val_fraction": 0.0}, "val_fraction"),
        ({"long_tail": 0.5}, "long_tail is 0.5: give at least 1"),
        ({"alpha": 0.0, "allow_empty": True}, "alpha is 0.0: give a number above 0"),
        ({"alpha": float("nan"), "partition": "quantity", "allow_empty": True}, "alpha is nan"),
        ({"partition": "shards", "classes_per_client": 0}, "classes_per_client 0 must be at least 1"),
        ({"train_size": 0}, "train_size 0 must be at least 1"),
        ({"test_size": 0}, "test_size 0 must"),
        ({"images_per_client": 0}, "images_per_client 0 must"),
        ({"eval_batch_size": 0}, "eval_batch_size 0 must"),
        ({"channels": 2}, "channels is 2: give 1 or 3"),
        ({"train_size": 1}, "val_fraction 0.1 leaves none of the 1 training images of digits"),
        ({"augment": ["rotate"]}, "rotate"),
        ({"clients": 500}, "180 images cannot be dealt to 500 clients"),
        ({"clients": 60, "alpha": 0.01}, "of 60 clients without images .*raise alpha"),
        ({"images_per_client": 1}, "is held by no client"),
        ({"train_size": 5000}, "train_size 5000 is more than the 1437 images of digits"),
        ({"partition": "domain"}, "partition domain cannot deal 1 sources"),
        ({"mean": [0.1, 0.2]}, "1 channels"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        ready(**options)


def test_missing_source():
    with pytest.raises(FileNotFoundError, match=r"'nowhere\.npz' is neither a file"):
        FederatedImages(sources=["nowhere.npz"])


def test_domains_that_do_not_fit(two_sets, tmp_path):
    with pytest.raises(ValueError, match="the same images twice"):
        FederatedImages(sources=["digits", "digits"])
    with pytest.raises(ValueError, match="set image_size and channels"):
        ready(sources=two_sets, train_size=None, test_size=None)
    with pytest.raises(ValueError, match="share their classes"):
        ready(sources=["digits", two_sets[0]], train_size=None, test_size=None)
    with pytest.raises(ValueError, match=r"clients_per_domain \[4\]"):
        options = {"sources": two_sets, "train_size": None, "test_size": None, "image_size": 8, "channels": 1}
        ready(**options, partition="domain", clients_per_domain=[4])


def test_empty_clients_take_no_part():
    data = ready(clients=30, alpha=0.05, allow_empty=True)
    empty = {k for k, part in enumerate(data.parts) if len(part) == 0}
    assert empty and not empty & {c.id for c in data.round(0).clients}
    assert len(data.round(0).clients) == 30 - len(empty)


def test_resume_with_another_federation_is_refused():
    state = ready().state_dict()
    for options, message in (
        ({"clients": 5}, "clients 4, the data have 5"),
        ({"seed": 3}, "seed 0, the data have 3"),
        ({"partition": "even"}, "partition dirichlet, the data have even"),
        ({"alpha": 0.4}, "the checkpoint's clients hold other images"),
        ({"train_size": 210}, "the checkpoint's clients hold other images"),
    ):
        with pytest.raises(ValueError, match=message):
            ready(**options).load_state_dict(state)
    ready(participation=0.5, augment=[]).load_state_dict(state)


def test_one_class_has_no_tail(tmp_path):
    arrays = {f"{split}_images": np.zeros((20, 8, 8), dtype=np.uint8) for split in ("train", "test")}
    arrays |= {f"{split}_labels": np.zeros(20, dtype=int) for split in ("train", "test")}
    np.savez(tmp_path / "one.npz", **arrays)
    options = {"sources": [str(tmp_path / "one.npz")], "train_size": None, "test_size": None, "partition": "even"}
    with pytest.raises(ValueError, match="long_tail needs at least 2 classes, the data have 1: leave it out"):
        ready(**options, long_tail=10)


def written(path, shape, labels):
    """An `.npz` file of random images."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return {"sources": [str(path)], "partition": "even", "train_size": None, "test_size": None}


@pytest.mark.parametrize(("held", "missing"), [([0, 2, 5], "1, 3, 4"), (range(1, 11), "0")])
def test_classes_without_images_are_named(held, missing, tmp_path):
    options = written(tmp_path / "gaps.npz", (8, 8), np.repeat(list(held), 20))
    with pytest.raises(ValueError, match=f"no training image of class {missing}: number the classes"):
        ready(**options)
    named = ready(**options, class_names=[str(c) for c in held], long_tail=4)
    assert named.counts().sum(0).min() > 0
    lacking = ready(**options, class_names=[str(c) for c in range(11)], long_tail=4)  # the tail of what there is
    assert np.flatnonzero(lacking.counts().sum(0)).tolist() == list(held)


def test_channels_that_cannot_be_made_are_refused(tmp_path):
    options = written(tmp_path / "rgba.npz", (8, 8, 4), np.arange(60) % 3)
    assert ready(**options).table.pixels.shape[1] == 4
    for channels in (1, 3):
        with pytest.raises(ValueError, match=rf"rgba\.npz has images of 4 channels, .* channels {channels} cannot"):
            ready(**options, channels=channels)
    with pytest.raises(ValueError, match=r"uint8 \[60, 3, 9, 9\], needed is uint8 \[n, h, w\] or \[n, h, w, c\]"):
        ready(**written(tmp_path / "first.npz", (3, 9, 9), np.arange(60) % 3))


@pytest.mark.parametrize("image_size", [None, 12])
def test_prediction_cuts_images_as_training_does(image_size, tmp_path):
    options = written(tmp_path / "wide.npz", (10, 16), np.arange(60) % 3)
    data = ready(**options, image_size=image_size, predict_folder=str(tmp_path / "files"))
    (tmp_path / "files").mkdir()
    with np.load(tmp_path / "wide.npz") as arrays:
        for i, image in enumerate(arrays["test_images"]):
            write_png(torch.from_numpy(image)[None], str(tmp_path / "files" / f"{i:02d}.png"))
    files, arrays = (next(iter(loader)).image for loader in (data.predict_dataloader(), data.test_dataloader()))
    assert files.shape[2:] == ((10, 16) if image_size is None else (12, 12)) and torch.equal(files, arrays)


def test_sixteen_bits_a_channel_become_eight(tmp_path):
    folder = toys.pets(tmp_path / "pets", 10)
    grey = np.arange(81, dtype=np.uint16).reshape(9, 9) * 257
    Image.fromarray(grey).save(folder / "cat" / "0.png")
    data = ready(sources=[str(folder)], partition="even", clients=2, train_size=None, test_size=None, image_size=9)
    stored = torch.cat([table.pixels for table in data._splits.values()])
    assert (stored == torch.arange(81, dtype=torch.uint8).view(9, 9)).flatten(1).all(1).sum() == 1


def test_all_bad_images_of_a_folder_are_named(tmp_path):
    folder = toys.pets(tmp_path / "pets", 10)
    (folder / "cat" / "1.png").write_bytes(b"no image")
    (folder / "dog" / "2.png").write_bytes(b"nor this")
    frames = [Image.new("L", (9, 9), shade) for shade in (0, 255)]
    frames[0].save(folder / "dog" / "3.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=r"1\.png cannot .*2\.png cannot .*3\.gif is an animation of 2 pictures"):
        ready(sources=[str(folder)], train_size=None, test_size=None, image_size=9)


@pytest.mark.parametrize(
    "how", [{"partition": "dirichlet"}, {"partition": "dirichlet_balanced"}, {"partition": "shards"}]
)
def test_images_per_client_keeps_the_shares_of_the_classes(how):
    options = {"train_size": None, "clients": 5, "alpha": 1.0, "classes_per_client": 3, **how}
    whole, cut = (ready(**options, images_per_client=n).counts() for n in (None, 100))
    assert (cut.sum(1) == np.minimum(whole.sum(1), 100)).all()
    shares = [counts / counts.sum(1, keepdims=True) for counts in (whole, cut)]
    assert np.abs(shares[0] - shares[1]).sum(1).max() < 0.35  # cut class after class: above 1
    assert np.array_equal(cut, ready(**options, images_per_client=100).counts())


def test_mixed_partitions_are_cut_as_they_are():
    for partition in ("even", "quantity"):
        whole, cut = (ready(partition=partition, images_per_client=n, alpha=5.0) for n in (None, 20))
        assert all(np.array_equal(a[:20], b) for a, b in zip(whole.parts, cut.parts, strict=True))


def test_classes_are_found_by_name(two_sets, tmp_path):
    names = ["2", "fox", "0", "1"]
    options = {"sources": two_sets[:1], "partition": "even", "train_size": None, "test_size": None}
    plain, named = ready(**options), ready(**options, class_names=names)
    assert named.classes == names and named.counts().shape == (4, 4)
    held = []
    for data in (plain, named):  # by image, as other numbers make other splits
        pairs = [pair for t in data._splits.values() for pair in zip(t.pixels, t.labels, strict=True)]
        held.append({pixels.numpy().tobytes(): data.classes[c] for pixels, c in pairs})
    assert held[0] == held[1] and len(held[0]) == 120
    with pytest.raises(ValueError, match=r"small\.npz has a class '1', the federation has 0, 2: rename it or leave it"):
        ready(**options, class_names=["0", "2"])
    lacking = ready(
        sources=["digits", two_sets[0]],
        partition="even",
        train_size=None,
        test_size=None,
        class_names=[str(c) for c in range(10)],
    )
    assert lacking.table.labels[lacking.table.domains == 1].max() == 2
