import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset

import datamodules
from datamodules.order import GlobalBatches, Loader, counter_uniform, describe


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitems__(self, draw):
        return draw.epoch, draw.items.tolist()


@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 200), batch_size=st.integers(1, 50), world=st.integers(1, 5), shuffle=st.booleans())
def test_evaluation_covers_each_item_once_on_any_number_of_ranks(size, batch_size, world, shuffle):
    if size < world:
        with pytest.raises(ValueError, match="cannot be split"):
            GlobalBatches(size, batch_size, shuffle=shuffle, drop_last=False, world_size=world)
        return
    parts = [
        list(GlobalBatches(size, batch_size, shuffle=shuffle, drop_last=False, rank=r, world_size=world))
        for r in range(world)
    ]
    assert len({len(p) for p in parts}) == 1  # as many batches on every rank
    assert all(len(draw.items) for p in parts for draw in p)  # none of them empty
    seen = np.concatenate([draw.items for p in parts for draw in p])
    assert sorted(seen.tolist()) == list(range(size))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 8), per_rank=st.integers(1, 8), world=st.integers(1, 4), epoch=st.integers(0, 3))
def test_ranks_share_the_batches_of_one_process(n, per_rank, world, epoch):
    batch_size = per_rank * world
    size = n * batch_size + batch_size - 1
    options = {"shuffle": True, "drop_last": True, "seed": 3}
    one = GlobalBatches(size, batch_size, **options)
    ranks = [GlobalBatches(size, batch_size, rank=r, world_size=world, **options) for r in range(world)]
    for order in (one, *ranks):
        order.set_epoch(epoch)
    assert len(one) == n
    for whole, *slices in zip(one, *ranks, strict=True):
        assert whole.items.tolist() == [i for s in slices for i in s.items.tolist()]


def test_order_depends_on_seed_and_epoch():
    def first(seed, epoch):
        order = GlobalBatches(100, 10, shuffle=True, drop_last=True, seed=seed)
        order.set_epoch(epoch)
        return next(iter(order)).items.tolist()

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(s, e)) for s in (0, 1) for e in (0, 1)}) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_goes_on_where_it_was_stored(workers):
    def loader():
        order = GlobalBatches(23, 4, shuffle=True, drop_last=True, seed=1)
        return Loader(Numbers(23), order, num_workers=workers)

    whole = loader()
    whole.sampler.set_epoch(2)
    expected = list(whole)
    assert len(expected) == len(whole) == 5

    stopped = loader()
    stopped.sampler.set_epoch(2)
    batches = iter(stopped)
    begin = [next(batches) for _ in range(2)]
    state = stopped.state_dict()

    resumed = loader()
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(2)  # as Lightning does
    assert begin + list(resumed) == expected
    assert resumed.state_dict() == {"epoch": 2, "position": 5}
    resumed.sampler.set_epoch(3)
    assert len(list(resumed)) == 5  # the next epoch is whole again


def test_a_batch_that_does_not_split_is_refused():
    with pytest.raises(ValueError, match="batch_size 5 is the global batch"):
        GlobalBatches(10, 5, shuffle=True, drop_last=True, world_size=2)
    with pytest.raises(ValueError, match="batch_size 0 must be"):
        GlobalBatches(10, 0, shuffle=True, drop_last=False)
    with pytest.raises(ValueError, match="larger than the 3 items"):
        GlobalBatches(3, 5, shuffle=True, drop_last=True)


def test_counter_numbers_do_not_depend_on_the_batch():
    items = np.arange(1000)
    together = counter_uniform(7, 3, items, 5)
    shuffled = np.random.default_rng(0).permutation(items)
    assert torch.equal(counter_uniform(7, 3, shuffled, 5), together[torch.from_numpy(shuffled)])
    assert torch.equal(counter_uniform(7, 3, items[:10], 3), together[:10, :3])
    assert not torch.equal(counter_uniform(7, 4, items, 5), together)
    assert not torch.equal(counter_uniform(8, 3, items, 5), together)


def test_counter_numbers_are_uniform_and_independent():
    x = counter_uniform(0, 0, np.arange(200_000), 2).double()
    assert x.min() >= 0 and x.max() < 1
    histogram = torch.histc(x, 100, 0, 1) / x.numel()
    assert (histogram - 0.01).abs().max() < 5 * (0.01 * 0.99 / x.numel()) ** 0.5
    centred = x - 0.5
    assert (centred[:, 0] * centred[:, 1]).mean().abs() < 5 / 12 / 200_000**0.5
    assert (centred[1:, 0] * centred[:-1, 0]).mean().abs() < 5 / 12 / 200_000**0.5


@pytest.mark.parametrize(
    ("name", "options", "batches"),
    [
        ("ImageClassification", {"batch_size": 100}, "12 train, 2 val, 4 test"),
        ("FederatedImages", {"clients": 3}, "1 train, 1 val, 1 test"),
        ("NodeClassification", {}, "10 train, 1 val, 1 test"),
        ("GraphPrior", {"batch_size": 4, "graphs_per_epoch": 8}, "2 train, 16 val"),
    ],
)
def test_a_data_module_prints_as_what_it_holds(name, options, batches, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = getattr(datamodules, name)(**options)
    str(data)  # no error
    data.prepare_data()
    data.setup("fit")
    assert str(data) == f"{name}, batches: {batches}"


def test_every_data_module_prints_so():
    kinds = [value for name in datamodules.__all__ if isinstance(value := getattr(datamodules, name), type)]
    kinds = [kind for kind in kinds if issubclass(kind, LightningDataModule)]
    assert len(kinds) == 7 and all(kind.__str__ is describe for kind in kinds)
