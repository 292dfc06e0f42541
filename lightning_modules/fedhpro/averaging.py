"""Averages of complete state dicts, weighted by the number of samples. Pure functions of tensors."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

State = Mapping[str, Tensor]


def sums_device(device: torch.device) -> torch.device:
    """Where float64 sums are kept: on the device itself, or on the CPU for Apple's GPUs, which have no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def double(tensor: Tensor) -> Tensor:
    """A float64 copy without gradient, on `sums_device`."""
    return tensor.detach().to(sums_device(tensor.device)).double()


def flatten(state: State) -> Tensor:
    """All floating entries (BatchNorm statistics included), in the order of the keys, as a float64 `(p,)`."""
    return torch.cat([double(v).flatten() for v in state.values() if v.is_floating_point()])


def unflatten(vector: Tensor, like: State) -> dict[str, Tensor]:
    """The inverse of `flatten`: new tensors shaped, typed and placed as in `like`, without its integer entries."""
    result, start = {}, 0
    for name, value in like.items():
        if value.is_floating_point():
            part = vector[start : start + value.numel()].view(value.shape)
            result[name] = part.to(value.dtype).to(value.device)
            start += value.numel()
    return result


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, or the tensor itself, without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict, of sharded entries this rank's shards; the tensors share the network's memory."""
    return {name: local(tensor) for name, tensor in network.state_dict().items()}


@torch.no_grad()
def step_towards(network: nn.Module, average: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step of the server's optimiser from the current weights towards the clients' average.

    The gradient is `current - average` (Reddi et al., ICLR 2021), so plain SGD with learning rate 1 ends at the
    average. Floating buffers (BatchNorm statistics) take the average itself; integer ones stay.

    Args:
        network: The global model, changed in place.
        average: `(p,)` float64, as `flatten` orders the network's state (this rank's shards).
        optimizer: Of the network's parameters.
    """
    state = local_state(network)
    target = unflatten(average, state)
    for name, parameter in network.named_parameters():
        parameter.grad = torch.empty_like(parameter)
        local(parameter.grad).copy_(state[name] - target[name])
    optimizer.step()
    optimizer.zero_grad()
    for name, buffer in network.named_buffers():
        if name in target:
            buffer.copy_(target[name])


def weighted_average(states: Iterable[State], sizes: Iterable[int]) -> dict[str, Tensor]:
    """FedAvg: `sum_k n_k / N w_k` over complete state dicts, summed in float64.

    States are consumed one after the other, so a generator keeps memory at two models. Every entry is copied
    on the way: the released driver stores references to one model that it goes on training, and its "average"
    is the last client's model.

    Args:
        states: One state dict a client, all with the same keys and shapes.
        sizes: Samples of each client, n_k.

    Returns:
        A new state dict. Integer entries (BatchNorm's batch counters) are the largest over the clients.

    Raises:
        ValueError: No client, or no sample at all.
    """
    counters: dict[str, Tensor] = {}
    total: Tensor | None = None
    weight, like = 0, None
    for state, size in zip(states, sizes, strict=True):
        weighted = flatten(state) * size
        total = weighted if total is None else total + weighted
        weight += size
        like = {k: v.detach() for k, v in state.items()} if like is None else like
        for name, value in state.items():
            if not value.is_floating_point():
                counters[name] = torch.maximum(counters[name], value) if name in counters else value.clone()
    if total is None or like is None or weight == 0:
        raise ValueError("nothing to average: no client sent a model trained on at least one sample")
    return {k: {**counters, **unflatten(total / weight, like)}[k] for k in like}


def assign(sizes: Mapping[int, int], ranks: int) -> dict[int, int]:
    """Spread clients over ranks: largest first, each to the rank with the least work so far.

    Args:
        sizes: Samples of each client, by id.
        ranks: Number of ranks.

    Returns:
        Rank of each client; a rank may get none.
    """
    load, rank_of = [0] * ranks, {}
    for client in sorted(sizes, key=lambda k: (-sizes[k], k)):
        rank_of[client] = load.index(min(load))
        load[rank_of[client]] += sizes[client]
    return rank_of


def alike(sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Group clients with equally many samples, to be trained together.

    Args:
        sizes: Samples of each client, by id.
        most: Clients in a group, at least 1.

    Returns:
        Groups of at most `most` ids; every client is in one.
    """
    by_size: dict[int, list[int]] = {}
    for client, size in sizes.items():
        by_size.setdefault(size, []).append(client)
    return [ids[i : i + most] for ids in by_size.values() for i in range(0, len(ids), most)]
