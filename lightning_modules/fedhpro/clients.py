"""One client's round: what it computes from the received model, its local training, what it sends back.

Knows neither Lightning nor ranks; the Flower app runs the same function.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_modules.fedhpro.strategies import FedAvg

CHUNK = 512  # images per forward pass when no gradient is needed


class Client(Protocol):
    """The data of one client. `datamodules.federated.Client` is one.

    Attributes:
        id: Number of the client, from 0.
        labels: `(n,)`, int64.
    """

    id: int
    labels: Tensor

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
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
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
        ValueError: The loss is no longer finite.
    """
    rank, ranks = part
    first_epoch = round_number * training.epochs
    with torch.random.fork_rng(devices=[client.labels.device.index] if client.labels.is_cuda else []):
        torch.manual_seed(hash((training.seed, round_number, client.id)) % 2**63)
        state = strategy.before(network, client, first_epoch)
        network.train()
        optimizer = training.optimizer(network.parameters())
        for epoch in range(first_epoch, first_epoch + training.epochs):
            total = correct = seen = 0
            for images, labels in client.batches(epoch, training.batch_size):
                weight = 1.0
                if ranks > 1:
                    weight = len(labels[rank::ranks]) * ranks / len(labels)
                    own = slice(rank, None, ranks) if weight else slice(0, 1)  # every rank takes part in every step
                    images, labels = images[own], labels[own]
                z, logits = network(images)
                loss = F.cross_entropy(logits.float(), labels)
                loss = loss + strategy.penalty(state, network, images, z.float(), labels)
                optimizer.zero_grad()
                (loss if ranks == 1 else loss * weight).backward()
                optimizer.step()
                if weight:
                    total = total + loss.detach() * len(labels)
                    correct = correct + (logits.detach().argmax(1) == labels).sum()
                    seen += len(labels)
            mean_loss = float(total) / max(seen, 1)
            if not math.isfinite(mean_loss):
                raise ValueError(
                    f"client {client.id}: the loss is {mean_loss} in round {round_number}; lower the learning rate"
                )
        sent = strategy.after(network, client, state)
    return ClientReport(sent, seen, mean_loss, int(correct) / max(seen, 1), state.get("figures", {}))
