"""FedHPro as a real federation: a Flower ServerApp and ClientApp around the same functions (extra `flower`).

A client does one local round with `clients.train_client`; the server averages with `averaging.weighted_average` and
runs the strategy's server step. Both read the model and, on a client, the data from one of our YAML configs, whose
path is `config` in Flower's run config. A message holds

* to the client: `arrays` (floating entries of the global state dict), `shared` (the strategy's tensors), `config`
  (`server-round`, and `classes`, the names of the federation's classes);
* back: `arrays` (the trained ones), `sent` (what the strategy's clients send), `metrics` (`num-examples`, `client`,
  `loss`, `accuracy`).

A site with data of its own names them in Flower's node config: `sources="my.npz"`, and `client` with a number of its
own. Its classes are found by name among the federation's, which the server sends; it may lack some. Without `sources`,
a site takes part number `partition-id` of the config's partition, as Flower's simulation does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule
from torch import Tensor

from datamodules.federated import Client, FederatedImages
from lightning_modules.fedhpro.averaging import double, flatten, step_towards, weighted_average
from lightning_modules.fedhpro.clients import train_client
from lightning_modules.fedhpro.module import FedHPro
from lightning_modules.fedhpro.strategies import head_of

OWN_SOURCES = 'sources="my.npz" client=3'


def floating(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The floating entries of a state dict: what is averaged, and so what travels."""
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def read_config(path: str) -> tuple[FedHPro, FederatedImages]:
    """The model, built, and the data module of one of our configs.

    Args:
        path: YAML file with the sections `model` and `data`, and perhaps `seed_everything`, which decides the initial
            weights.
    """
    config = yaml.safe_load(Path(path).read_text())
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FedHPro, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    torch.manual_seed(config.get("seed_everything") or 0)
    made = parser.instantiate_classes(parser.parse_object({name: config[name] for name in ("model", "data")}))
    made.model.configure_model()
    return made.model, made.data


class FlowerStrategy(FedAvg):
    """Flower's strategy for any of ours: it adds what the server shares, and runs our server step.

    Args:
        model: holds the global model, the strategy and its state; built.
        classes: names of the federation's classes, in the order of their numbers, for sites with data of their own.
        options: of Flower's `FedAvg`.

    Raises:
        ValueError: the model has another number of classes.
    """

    def __init__(self, model: FedHPro, classes: Sequence[str], **options: Any) -> None:
        super().__init__(**{"fraction_evaluate": 0.0, **options})
        if len(classes) != model.hparams["num_classes"]:
            raise ValueError(
                f"the data have {len(classes)} classes, num_classes is {model.hparams['num_classes']}: set it"
            )
        self.model, self.classes = model, list(classes)
        self.optimizer = model.configure_optimizers()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Add the strategy's tensors and the names of the classes to every message."""
        config["classes"] = self.classes
        messages = list(super().configure_train(server_round, arrays, config, grid))
        strategy = self.model.strategy
        shared = ArrayRecord({name: getattr(strategy, name).detach().cpu() for name in strategy.shared})
        for message in messages:
            message.content["shared"] = shared
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the models and run the server step; a round without an answer changes nothing."""
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        if not valid:
            return None, None
        contents = sorted((m.content for m in valid), key=lambda c: c["metrics"]["client"])
        sizes = [int(content["metrics"]["num-examples"]) for content in contents]
        states = [content["arrays"].to_torch_state_dict() for content in contents]
        sent: dict[str, Tensor] = {}
        strategy, network = self.model.strategy, self.model.network
        assert network is not None
        for name in strategy.sends:
            parts = torch.stack([double(content["sent"].to_torch_state_dict()[name]) for content in contents])
            sent[name] = parts if strategy.stacked else parts.sum(0)
        received = head_of(network)
        average = weighted_average(({k: double(v) for k, v in state.items()} for state in states), sizes)
        with torch.no_grad():
            step_towards(network, flatten(average), self.optimizer)
            figures = strategy.server(network, received, sent, self.model.draws(server_round - 1))
        share = dict.fromkeys(("loss", "accuracy"), 0.0)
        for size, content in zip(sizes, contents, strict=True):
            for name in share:
                share[name] += content["metrics"][name] * size / sum(sizes)
        return ArrayRecord(floating(network.state_dict())), MetricRecord({**share, **figures})


def train(message: Message, context: Context, model: FedHPro, client: Client) -> Message:
    """A client's answer to one round's message.

    Args:
        message: from the server.
        context: its state keeps what a strategy's clients remember (MOON's models) between rounds.
        model: built; its weights are overwritten.
        client: the client's data.
    """
    strategy, network = model.strategy, model.network
    assert network is not None
    network.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    for name, tensor in message.content["shared"].to_torch_state_dict().items():
        setattr(strategy, name, tensor)
    if "client_state" in context.state:
        strategy.client_states = {client.id: context.state["client_state"].to_torch_state_dict()}
    round_number = int(message.content["config"]["server-round"]) - 1
    report = train_client(network, client, strategy, model.training_plan, round_number)
    if client.id in strategy.client_states:
        context.state["client_state"] = ArrayRecord(strategy.client_states[client.id])
    metrics = {
        "num-examples": len(client.labels),
        "client": client.id,
        "loss": report.loss,
        "accuracy": report.accuracy,
    }
    content = {
        "arrays": ArrayRecord(floating(network.state_dict())),
        "sent": ArrayRecord({name: tensor.cpu() for name, tensor in report.sent.items()}),
        "metrics": MetricRecord(metrics),
    }
    return Message(content=RecordDict(content), reply_to=message)


client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def _train(message: Message, context: Context) -> Message:
    model, data = read_config(str(context.run_config["config"]))
    site = context.node_config
    if "sources" in site:
        client = own_client(data, str(site["sources"]), list(message.content["config"]["classes"]))
        if "client" not in site:
            raise ValueError(f"a site with its own sources needs a number of its own: --node-config '{OWN_SOURCES}'")
    else:
        data.prepare_data()
        data.setup("fit")
        client = data.client(int(site.get("partition-id", 0)))
    return train(message, context, model, replace(client, id=int(site.get("client", client.id))))


def own_client(data: FederatedImages, source: str, classes: list[str]) -> Client:
    """The client of a site with its own images, number 0.

    Args:
        data: from the federation's config: its image size, channels, normalisation and augmentation are used. All
            images train but its shares for validation and (of a folder) for testing.
        source: a source of `FederatedImages`.
        classes: the federation's.

    Raises:
        ValueError: the source has a class that the federation lacks.
    """
    site = FederatedImages(
        sources=[source],
        data_dir=str(data.data_dir),
        class_names=classes,
        clients=1,
        partition="even",
        val_fraction=data.val_fraction,
        test_fraction=data.test_fraction,
        augment=list(data.augment),
        image_size=data.image_size,
        channels=data.channels,
        mean=data.mean,
        std=data.std,
        seed=data.seed,
    )
    site.prepare_data()
    site.setup("fit")
    return site.client(0)


@server_app.main()
def _serve(grid: Grid, context: Context) -> None:
    model, data = read_config(str(context.run_config["config"]))
    data.prepare_data()
    data.setup("fit")
    everyone = round(data.participation * data.clients)  # as in the simulation
    strategy = FlowerStrategy(
        model,
        data.classes,
        fraction_train=data.participation,
        min_train_nodes=everyone,
        min_available_nodes=data.clients,
    )

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"val_accuracy": accuracy(model, data.val_dataloader())})

    rounds = int(context.run_config["rounds"])
    assert model.network is not None
    strategy.start(grid, ArrayRecord(floating(model.network.state_dict())), num_rounds=rounds, evaluate_fn=evaluate)
    if "output" in context.run_config:
        model.save_pretrained(str(context.run_config["output"]))


@torch.no_grad()
def accuracy(model: FedHPro, batches: Iterable[Any]) -> float:
    """Share of the images that the global model labels right, in [0, 1]."""
    model.eval()
    right = [(model(batch.image).argmax(1) == batch.label).float() for batch in batches]
    return torch.cat(right).mean().item()
