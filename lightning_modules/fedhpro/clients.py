"""A client's round: what it computes from the received model, its local training, what it sends back.

Knows neither Lightning nor ranks; the Flower app runs the same function.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from lightning_modules.fedhpro.strategies import FedAvg

CHUNK = 512  # images per forward pass when no gradient is needed


class Client(Protocol):
    """The data of one client. `datamodules.federated.Client` is one."""

    @property
    def id(self) -> int:
        """Number of the client, from 0."""

    @property
    def labels(self) -> Tensor:
        """`(n,)`, int64."""

    def images(self, rows: Tensor) -> Tensor:
        """Images `(m, channels, h, w)` of `rows` `(m,)`, float, normalised, not augmented."""

    def order(self, epoch: int) -> Tensor:
        """A permutation `(n,)` of the client's rows that depends on the seed and the epoch alone."""

    def batches(self, epoch: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented training images `(b, channels, h, w)` and labels `(b,)`, each row once."""


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains.

    Attributes:
        epochs: E, passes over the client's data in a round.
        batch_size: Images a step.
        optimizer: Makes the optimiser of one client and round from the parameters; its state does not outlive them.
        seed: Of dropout and other random layers; combined with the round and the client.
    """

    epochs: int
    batch_size: int
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    seed: int = 0


@dataclass(frozen=True)
class ClientReport:
    """What comes out of a client's round beside the trained weights.

    Attributes:
        sent: Tensors for the server, as the strategy's `after` names them.
        images: Training images that the next two numbers are about: all of the client's, or this rank's part.
        loss: Mean training loss of the last local epoch.
        accuracy: Share of the images that the client labels right while it trains on them in that epoch, in [0, 1].
        figures: Numbers of the strategy to log.
    """

    sent: dict[str, Tensor]
    images: int
    loss: float
    accuracy: float
    figures: dict[str, float]


@torch.no_grad()
def features(network: nn.Module, client: Client, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Features of a client's images, in eval mode and float32.

    Args:
        network: Returns `(z, logits)`; left in eval mode.
        client: Whose images.
        rows: Which, `(m,)`; all by default.

    Returns:
        Features `(m, d)` and labels `(m,)`.
    """
    network.eval()
    rows = torch.arange(len(client.labels), device=client.labels.device) if rows is None else rows
    z = torch.cat([network(client.images(chunk))[0].float() for chunk in rows.split(CHUNK)])
    return z, client.labels[rows]


def train_client(
    network: nn.Module,
    client: Client,
    strategy: "FedAvg",
    training: LocalTraining,
    round_number: int,
    part: tuple[int, int] = (0, 1),
) -> ClientReport:
    """One client's round, in place on `network`, which holds the received weights.

    Args:
        network: The received model; trained in place.
        client: Its data.
        strategy: What it adds to cross-entropy, and what it sends.
        training: How it trains.
        round_number: From 0; with the client's id it decides every random draw.
        part: `(rank, ranks)` when several ranks train one client together: each takes every `ranks`-th image of a
            batch, and the weights make the average of their gradients that of the whole batch. Loss and accuracy
            are then those of this rank's images.

    Returns:
        The report. The trained weights are in `network`.

    Raises:
        ValueError: The loss is no longer finite, or BatchNorm gets a batch of one image.
    """
    rank, ranks = part
    first_epoch = round_number * training.epochs
    with torch.random.fork_rng(devices=[client.labels.device.index] if client.labels.is_cuda else []):
        torch.manual_seed(hash((training.seed, round_number, client.id)) % 2**63)
        state = strategy.before(network, client, first_epoch)
        network.train()
        optimizer = training.optimizer(network.parameters())
        total: Tensor | int
        correct: Tensor | int
        for epoch in range(first_epoch, first_epoch + training.epochs):
            total = correct = seen = 0
            for images, labels in client.batches(epoch, training.batch_size):
                weight = 1.0
                if ranks > 1:
                    weight = len(labels[rank::ranks]) * ranks / len(labels)
                    own = slice(rank, None, ranks) if weight else slice(0, 1)  # every rank takes part in every step
                    images, labels = images[own], labels[own]
                try:
                    z, logits = network(images)
                except ValueError as error:  # of BatchNorm, where one image leaves one value per channel
                    if len(images) > 1:
                        raise
                    raise ValueError(
                        f"client {client.id} has a batch of a single image, of {len(client.labels)}, which BatchNorm "
                        "cannot train on: set norm to gn, raise local_batch_size, or give each client more images"
                    ) from error
                loss = F.cross_entropy(logits.float(), labels)
                loss = loss + strategy.penalty(state, network, images, z.float(), labels)
                optimizer.zero_grad()
                (loss if ranks == 1 else loss * weight).backward()
                optimizer.step()
                if weight:
                    total = total + loss.detach() * len(labels)
                    correct = correct + (logits.detach().argmax(1) == labels).sum()
                    seen += len(labels)
            mean_loss = _finite(float(total) / max(seen, 1), client, round_number)
        sent = strategy.after(network, client, state)
    return ClientReport(sent, seen, mean_loss, int(correct) / max(seen, 1), state.get("figures", {}))


def train_together(
    network: nn.Module, clients: Sequence[Client], strategy: "FedAvg", training: LocalTraining, round_number: int
) -> Iterator[ClientReport]:
    """The round of several clients at once: `train_client` for each, with one step for all (`torch.func.vmap`).

    The weights of the k clients are stacked along a first axis, and so are their batches. What that needs:

    * clients with equally many images, so that their batches have the same shapes;
    * a network without BatchNorm, whose statistics `vmap` cannot keep apart;
    * a strategy whose `penalty` is free of data-dependent branches and does not read the network's parameters
      (`FedAvg.together`);
    * an optimiser that works entry by entry (SGD with momentum, Adam; not one that takes norms of tensors).

    Dropout draws other masks than one client after the other does.

    Args:
        network: The received model.
        clients: At least one, with equally many images.
        strategy: What it adds to cross-entropy, and what it sends.
        training: How they train.
        round_number: From 0.

    Yields:
        The report of each client in turn; `network` then holds its trained weights.

    Raises:
        ValueError: A loss is no longer finite.
    """
    first_epoch = round_number * training.epochs
    buffers, device = dict(network.named_buffers()), clients[0].labels.device

    def loss_of_one(weights: dict[str, Tensor], state: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        z, logits = functional_call(network, (weights, buffers), (images,))
        loss = F.cross_entropy(logits.float(), labels) + strategy.penalty(state, network, images, z.float(), labels)
        return loss, (logits.detach().argmax(1) == labels).sum()

    loss_of_each = vmap(loss_of_one, randomness="different")
    with torch.random.fork_rng(devices=[device.index] if device.type == "cuda" else []):
        torch.manual_seed(hash((training.seed, round_number, clients[0].id)) % 2**63)
        states = [strategy.before(network, client, first_epoch) for client in clients]
        stacked = tree_map(lambda *leaves: torch.stack([torch.as_tensor(x, device=device) for x in leaves]), *states)
        network.train()
        weights = {
            name: p.detach().expand(len(clients), *p.shape).clone().requires_grad_()
            for name, p in network.named_parameters()
        }
        optimizer = training.optimizer(weights.values())
        total: Any  # tensors (k,) after the first batch
        correct: Any
        for epoch in range(first_epoch, first_epoch + training.epochs):
            total = correct = 0
            for batches in zip(*(c.batches(epoch, training.batch_size) for c in clients), strict=True):
                images, labels = (torch.stack(tensors) for tensors in zip(*batches, strict=True))  # k b ...
                losses, right = loss_of_each(weights, stacked, images, labels)
                optimizer.zero_grad()
                losses.sum().backward()
                optimizer.step()
                total = total + losses.detach() * labels.shape[1]
                correct = correct + right
    for i, client in enumerate(clients):
        size = len(client.labels)
        mean_loss = _finite(float(total[i]) / size, client, round_number)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(weights[name][i])
        sent = strategy.after(network, client, states[i])
        yield ClientReport(sent, size, mean_loss, int(correct[i]) / size, states[i].get("figures", {}))


def _finite(loss: float, client: Client, round_number: int) -> float:
    if not math.isfinite(loss):
        raise ValueError(f"client {client.id}: the loss is {loss} in round {round_number}; lower the learning rate")
    return loss
