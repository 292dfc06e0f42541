"""Averages of state dicts, and clients over ranks."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_modules.fedhpro import averaging
from lightning_modules.fedhpro.averaging import alike, assign, flatten, sums_device, unflatten, weighted_average


def test_average_of_a_reused_model_is_not_its_last_state():
    model = nn.Linear(2, 2)

    def states():  # one object trained client after client, as in a simulation
        for value in (1.0, 2.0, 3.0):
            nn.init.constant_(model.weight, value)
            yield model.state_dict()

    average = weighted_average(states(), [1, 1, 2])
    assert average["weight"].eq(2.25).all()
    assert model.weight.eq(3).all()


def test_batchnorm_statistics_are_averaged_and_counters_are_not():
    states = []
    for k in range(3):
        bn = nn.BatchNorm2d(2)
        bn.running_mean.fill_(k)
        bn.running_var.fill_(k + 1)
        bn.num_batches_tracked.fill_(10 * k)
        states.append(bn.state_dict())
    average = weighted_average(states, [2, 1, 1])
    assert average["running_mean"].eq(0.75).all()
    assert average["running_var"].eq(1.75).all()
    assert average["num_batches_tracked"] == 20 and average["num_batches_tracked"].dtype == torch.long
    nn.BatchNorm2d(2).load_state_dict(average)


def test_nothing_to_average():
    with pytest.raises(ValueError, match="no client"):
        weighted_average([], [])
    with pytest.raises(ValueError, match="no client"):
        weighted_average([nn.Linear(1, 1).state_dict()], [0])


def test_float64_stays_away_from_apple_gpus():
    assert sums_device(torch.device("mps")) == torch.device("cpu")
    assert sums_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    room = Path(averaging.__file__).parent
    for path in room.glob("*.py"):
        for line in path.read_text().splitlines():
            made = re.search(r"torch\.(double|float64)", line)
            assert not made or "device=place" in line or "device=sums_device(" in line, f"{path.name}: {line}"
            assert "sums_device(" in line or not re.search(r"\.double\(", line), f"{path.name}: {line}"


def test_flatten_round_trip():
    state = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).state_dict()
    back = unflatten(flatten(state), state)
    assert set(state) - set(back) == {"1.num_batches_tracked"}
    assert all(torch.equal(state[k], v) and state[k].dtype == v.dtype for k, v in back.items())


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_every_client_has_one_rank_and_the_load_is_even(sizes, ranks):
    rank_of = assign(sizes, ranks)
    assert rank_of.keys() == sizes.keys()
    assert all(0 <= r < ranks for r in rank_of.values())
    load = [sum(n for k, n in sizes.items() if rank_of[k] == r) for r in range(ranks)]
    assert max(load) - min(load) <= max(sizes.values(), default=0)


def test_assignment_does_not_depend_on_the_order_of_the_clients():
    assert assign({0: 5, 1: 3, 2: 5}, 2) == assign({2: 5, 1: 3, 0: 5}, 2)


def test_alike_groups_equal_sizes():
    groups = alike({3: 5, 0: 7, 2: 5, 9: 5, 4: 7}, 2)
    assert groups == [[3, 2], [9], [0, 4]]
    assert alike({3: 5, 0: 5}, 1) == [[3], [0]] and alike({}, 4) == []
