"""FedHPro and its baselines as a LightningModule: one epoch is one round."""

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn

from datamodules.checks import check_least
from lightning_modules.distributed import shard
from lightning_modules.fedhpro.averaging import alike, assign, double, flatten, local_state, step_towards, sums_device
from lightning_modules.fedhpro.clients import Client, ClientReport, LocalTraining, train_client, train_together
from lightning_modules.fedhpro.network import build_network
from lightning_modules.fedhpro.strategies import build_strategy, head_of
from lightning_modules.hub import fill, instantiate, read_config, read_state, without, write_folder

FORMAT = 1  # of what save_pretrained writes
NO_FEDERATION = "FedHPro trains and is judged on the clients of a federation: use datamodules.FederatedImages"


class Round(Protocol):
    """What `training_step` gets; `datamodules.federated.FederatedRound` is one.

    Attributes:
        number: of the round, from 0.
        clients: those that take part, in the same order on every rank.
        sizes: images of every client of the federation.
        num_classes: classes of the federation.
    """

    number: int
    clients: list[Client]
    sizes: list[int]
    num_classes: int


class FedHPro(LightningModule):
    """Federated learning of one global model with hyper-prototypes (ICML 2026, arXiv 2605.13475), or a baseline.

    `Trainer(max_epochs=R)` runs R rounds. Every client of a round trains a copy of the global model on its own data;
    the copies are averaged, weighted by the number of images; the average is the target of one step of the server
    optimiser (plain SGD with learning rate 1 by default, which is federated averaging); then the strategy's server
    step runs. Under DDP the clients are spread over the ranks and there is one all-reduce per round; under FSDP2 all
    ranks train one client after the other, each on a part of every batch.

    Logged per round: `train/loss` (nats) and `train/accuracy` (fraction) over all clients' last local epochs,
    `train/clients`, `train/bytes_down` and `train/bytes_up` (all clients of the round) and the same `_per_client`,
    `train/accuracy_client_<k>`; of FedHPro `train/margin` (mean d_k), `train/matching_loss_before` and `_after`,
    `train/hyper_prototype_move` (relative); `val/loss`, `val/accuracy`, `test/loss`, `test/accuracy`, with several
    domains `val/accuracy_<domain>` and `val/accuracy_domain_mean` (unweighted), and `val/accuracy_client_<k>`, that of
    the global model on the images that client k holds out.

    Args:
        strategy: a class of `lightning_modules.fedhpro.strategies` (`HyperPrototypes` is FedHPro; `FedAvg`, `FedProx`,
            `Moon`, `FedProto`, `FPL`, `FedTGP`, `CReFF` are baselines; `FrozenHyperPrototypes` and others are controls)
            or the dotted path of your own subclass of `FedAvg`.
        strategy_args: its arguments.
        variant: the `paper`'s formulas or those of the released `code`: the default of the FedHPro strategies'
            arguments, and of `lr`.
        network: a class of `lightning_modules.fedhpro.network` (`ResNet10`, `SmallCNN`) or a dotted class path; its
            `forward` returns features `[b, d]` and logits `[b, c]`.
        network_args: its arguments beside `num_classes`.
        num_classes: C.
        local_epochs: E, passes over a client's data per round.
        local_batch_size: images per step of a client.
        lr: learning rate of the clients' plain SGD; by default 0.01 (paper) or 0.1 (code).
        local_optimizer: the clients' optimiser instead of that SGD, made anew for each client and round.
        server_optimizer: what steps the global model towards the average; by default SGD with learning rate 1.
        init_from: start a fit from the global model in this checkpoint or `save_pretrained` folder; server state such
            as hyper-prototypes starts anew. `--ckpt_path` resumes instead.
        log_clients: log each client's accuracies; switch off for hundreds of clients.
        clients_together: train so many clients of equal size at once, their weights stacked (`torch.func.vmap`); the
            memory grows with it. For many small clients, a network without BatchNorm and an optimiser that works
            entry by entry, such as SGD or Adam; not for FedProx, MOON, FPL and averaged prototypes. Clients whose
            number of images nobody shares train alone.
        seed: of random layers in local training and of the server's draws.
    """

    def __init__(
        self,
        strategy: str = "HyperPrototypes",
        strategy_args: dict[str, Any] | None = None,
        variant: Literal["paper", "code"] = "paper",
        network: str = "ResNet10",
        network_args: dict[str, Any] | None = None,
        num_classes: int = 10,
        local_epochs: int = 10,
        local_batch_size: int = 64,
        lr: float | None = None,
        local_optimizer: OptimizerCallable | None = None,
        server_optimizer: OptimizerCallable | None = None,
        init_from: str | None = None,
        log_clients: bool = True,
        clients_together: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if lr is not None and local_optimizer is not None:
            raise ValueError("give lr, or local_optimizer with its own learning rate, not both")
        if variant not in ("paper", "code"):
            raise ValueError(f"variant is paper or code, not {variant!r}")
        check_least(1, num_classes=num_classes, clients_together=clients_together)
        check_least(1, local_epochs=local_epochs, local_batch_size=local_batch_size)
        self.save_hyperparameters(ignore=["local_optimizer", "server_optimizer"])
        self.automatic_optimization = False
        self.strategy = build_strategy(strategy, strategy_args, variant)
        step = lr if lr is not None else {"paper": 0.01, "code": 0.1}[variant]
        self.training_plan = LocalTraining(
            local_epochs, local_batch_size, local_optimizer or (lambda p: torch.optim.SGD(p, lr=step)), seed
        )
        self.server_optimizer, self.log_clients = server_optimizer, log_clients
        self.clients_together = clients_together
        self.network: nn.Module | None = None
        # A copy of the network that clients train. It is kept out of the module tree: its gradients must not be
        # synchronised, and it must not be in checkpoints.
        self._scratch: list[nn.Module] = []
        self._tally: Tensor | None = None
        self._domain_names: list[str] = []

    # --------------------------------------------------------------------------------------------- building

    def configure_model(self) -> None:
        """Build the network and the server's state once; shard the network and its copy under FSDP2."""
        if self.network is None:
            h = self.hparams
            self.network = build_network(h["network"], h["num_classes"], h["network_args"])
            classifier: Any = self.network.classifier
            self.strategy.build(h["num_classes"], classifier.in_features)
            if h["init_from"] and self._trainer is not None and self.trainer.ckpt_path is None:
                fill(self.network, without("network.", read_state(h["init_from"])), f"init_from {h['init_from']}")
        if not self._scratch:
            self._refuse(any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.network.modules()))
            self._scratch.append(copy.deepcopy(self.network))
            for network in (self.network, self._scratch[0]) if self.device_mesh is not None else ():
                sharded: Any = shard(network, getattr(network, "block_types", ()), self.device_mesh)
                # Parameters are read between forward passes (averaging, optimisers), so they are never left whole.
                sharded.set_reshard_after_forward(True)

    def _refuse(self, has_batchnorm: bool) -> None:
        name = self.hparams["strategy"]
        if self.device_mesh is not None:
            if not self.strategy.sharded:
                raise ValueError(f"{name} reads parameters outside the network's forward: use strategy/ddp, not FSDP2")
            if has_batchnorm:
                raise ValueError("under FSDP2 the ranks share a client's batches, BatchNorm does not: set norm to gn")
            if self.clients_together > 1:
                raise ValueError("under FSDP2 the ranks train one client after the other: set clients_together to 1")
        elif self.clients_together > 1:
            if not self.strategy.together:
                raise ValueError(f"{name} cannot train clients together: set clients_together to 1")
            if has_batchnorm:
                raise ValueError("clients with BatchNorm cannot be trained together: set norm to gn, or 1 at a time")

    def setup(self, stage: str) -> None:
        """Refuse what would change the method silently.

        Raises:
            ValueError: synchronised BatchNorm, or FSDP1.
        """
        if getattr(self.trainer.strategy, "_layer_sync", None) is not None:
            raise ValueError("sync_batchnorm would mix the statistics of different clients: leave it off")
        if isinstance(self.trainer.strategy, FSDPStrategy):
            raise ValueError("FedHPro does not run under FSDP1: use -c strategy/fsdp2 or -c strategy/ddp")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The server's optimiser."""
        assert self.network is not None
        parameters = self.network.parameters()
        return self.server_optimizer(parameters) if self.server_optimizer else torch.optim.SGD(parameters, lr=1.0)

    # --------------------------------------------------------------------------------------------- one round

    def training_step(self, batch: Round, batch_idx: int) -> None:
        """One round.

        Raises:
            ValueError: the batch is no round of a federation, or of another number of classes, or the network cannot
                take its images.
        """
        assert self.network is not None
        if not hasattr(batch, "sizes"):
            raise ValueError(NO_FEDERATION)
        if batch.num_classes != self.hparams["num_classes"]:
            raise ValueError(
                f"the data have {batch.num_classes} classes, num_classes is {self.hparams['num_classes']}: set it"
            )
        scratch = self._scratch[0] = self._scratch[0].to(self.device)
        if not self.global_step:
            self._check_image(batch.clients[0].images(torch.zeros_like(batch.clients[0].labels[:1])))
        received = head_of(self.network)
        weights = torch.zeros_like(flatten(local_state(self.network)))
        sent = {n: self._zeros(len(batch.clients), s) for n, s in self.strategy.sends.items()}
        # one row per client: loss, accuracy and figures, times the number of images, and that number
        place, traffic = sums_device(self.device), self.traffic()
        table = torch.zeros(len(batch.clients), 3 + len(self.strategy.figures), device=place, dtype=torch.double)
        for slot, client, report in self._train(scratch, batch):
            weights += flatten(local_state(scratch)) * len(client.labels)
            own = [report.figures[name] for name in self.strategy.figures]
            table[slot] = torch.tensor([report.loss, report.accuracy, *own, 1.0]) * report.images
            self._check_sent(report)
            for name, total in sent.items():
                total[slot if self.strategy.stacked else 0] += double(report.sent[name])
        if self.trainer.world_size > 1:
            # under FSDP2 every rank has its part of each client's weights, and all that the clients send
            _all_reduce([table] if self.device_mesh is not None else [weights, table, *sent.values()])
        if not self.strategy.stacked:
            sent = {name: total[0] for name, total in sent.items()}
        if place != self.device:
            sent = {name: total.float().to(self.device) for name, total in sent.items()}
        sizes = torch.tensor([len(c.labels) for c in batch.clients], device=place, dtype=torch.double)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            optimizer: Any = self.optimizers()
            step_towards(self.network, weights / sizes.sum(), optimizer)
            figures = self.strategy.server(self.network, received, sent, self.draws(batch.number))
        self._log_round(batch, sizes, table[:, :-1] / table[:, -1:], figures, traffic)

    def _train(self, scratch: nn.Module, batch: Round) -> Iterator[tuple[int, Client, ClientReport]]:
        """Train this rank's clients: place in the round, client and report of each, its weights in `scratch`."""
        assert self.network is not None
        part = (self.global_rank, self.trainer.world_size) if self.device_mesh is not None else (0, 1)
        own = {client.id: (slot, client) for slot, client in self._own_clients(batch)}
        done = 0
        for ids in alike({k: len(client.labels) for k, (_, client) in own.items()}, self.clients_together):
            _copy(local_state(self.network), local_state(scratch))
            group = [own[k][1] for k in ids]
            if len(group) == 1:
                reports: Iterable[ClientReport] = [
                    train_client(scratch, group[0], self.strategy, self.training_plan, batch.number, part)
                ]
            else:
                reports = train_together(scratch, group, self.strategy, self.training_plan, batch.number)
            for client, report in zip(group, reports, strict=True):
                yield own[client.id][0], client, report
                done += 1
                self.progress(batch.number, done, len(own))

    def progress(self, number: int, done: int, clients: int) -> None:
        """Show how far the round is, in the bar of a trainer that has one.

        Args:
            number: of the round, from 0.
            done: clients that this rank has trained in it.
            clients: those that it trains in all.
        """
        text = f"Round {number + 1}/{self.trainer.max_epochs}, {done}/{clients} clients"
        match self.trainer.progress_bar_callback:
            case RichProgressBar(progress=bar, train_progress_bar_id=task) if bar is not None and task is not None:
                bar.update(task, description=text)
                bar.refresh()
            case TQDMProgressBar() as callback if callback.is_enabled:
                callback.train_progress_bar.set_description(text)

    def _zeros(self, clients: int, shape: tuple[int, ...]) -> Tensor:
        rows = clients if self.strategy.stacked else 1
        return torch.zeros(rows, *shape, device=sums_device(self.device), dtype=torch.double)

    def _check_image(self, image: Tensor) -> None:
        """Try one image `[1, channels, h, w]` of the data, on the copy, as callbacks may listen to the network."""
        try:
            with torch.no_grad():
                self._scratch[0].to(self.device).eval()(image)
        except RuntimeError as error:
            name, shape, reason = self.hparams["network"], list(image.shape[1:]), str(error).splitlines()[0]
            raise ValueError(
                f"network {name} cannot take the data's images of [channels, h, w] {shape}, which network_args, or "
                f"channels and image_size of the data, must agree on: {reason}"
            ) from None

    def _own_clients(self, batch: Round) -> Iterable[tuple[int, Client]]:
        """The clients that this rank trains, with their place in the round."""
        if self.device_mesh is not None:
            return list(enumerate(batch.clients))
        sizes = {c.id: len(c.labels) for c in batch.clients}
        if self.strategy.stateful:  # the same rank in every round, for what it remembers of the client
            sizes = dict(enumerate(batch.sizes))
        rank_of = assign(sizes, self.trainer.world_size)
        states = self.strategy.client_states
        self.strategy.client_states = {k: s for k, s in states.items() if rank_of[k] == self.global_rank}
        return [(i, c) for i, c in enumerate(batch.clients) if rank_of[c.id] == self.global_rank]

    def _check_sent(self, report: ClientReport) -> None:
        got = {name: tuple(tensor.shape) for name, tensor in report.sent.items()}
        if got != self.strategy.sends:
            raise ValueError(f"strategy {self.hparams['strategy']} sends {got}, but declares {self.strategy.sends}")

    def draws(self, number: int) -> torch.Generator:
        """The generator of the server's draws in a round; the same on every rank."""
        return torch.Generator().manual_seed(hash((self.hparams["seed"], number, -1)) % 2**63)

    def _log_round(
        self, batch: Round, sizes: Tensor, table: Tensor, figures: dict[str, float], traffic: tuple[int, int]
    ) -> None:
        share = sizes / sizes.sum()
        down, up = traffic
        count = len(batch.clients)
        rows = {
            "loss": (share * table[:, 0]).sum(),
            "accuracy": (share * table[:, 1]).sum(),
            "clients": float(count),
            "bytes_down": float(down * count),
            "bytes_up": float(up * count),
            "bytes_down_per_client": float(down),
            "bytes_up_per_client": float(up),
            **dict(zip(self.strategy.figures, table[:, 2:].mean(0), strict=True)),
            **figures,
        }
        if self.log_clients:
            rows |= {f"accuracy_client_{c.id}": table[i, 1] for i, c in enumerate(batch.clients)}
        shown = ("loss", "accuracy", "clients")
        for name, value in rows.items():
            self.log(f"train/{name}", float(value), on_step=True, on_epoch=False, prog_bar=name in shown, batch_size=1)

    def traffic(self) -> tuple[int, int]:
        """Bytes that one client receives and sends in a round that starts now: model and what the strategy adds.

        The model is every floating entry of the state dict, BatchNorm statistics included, in its own dtype.
        """
        assert self.network is not None
        model = sum(v.numel() * v.element_size() for v in self.network.state_dict().values() if v.is_floating_point())
        shared = [getattr(self.strategy, name) for name in self.strategy.shared]
        down = sum(t.numel() * t.element_size() for t in shared)
        up = 4 * sum(torch.Size(shape).numel() for shape in self.strategy.sends.values())
        return model + down, model + up

    # -------------------------------------------------------------------------------------------- evaluation

    def forward(self, image: Tensor) -> Tensor:
        """Images `[b, channels, h, w]`, float32 as the data module normalises them, to logits `[b, c]`."""
        assert self.network is not None
        return self.strategy.logits(self.network, image)

    def on_validation_epoch_start(self) -> None:
        """Start counting."""
        self._tally = None

    def on_test_epoch_start(self) -> None:
        """Start counting."""
        self._tally = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count right answers, by domain and by the client that holds the image out."""
        self._count(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Count right answers, by domain."""
        self._count(batch)

    def _count(self, batch: Any) -> None:
        if not hasattr(batch, "domain"):
            raise ValueError(NO_FEDERATION)
        if self._tally is None:
            self._check_image(batch.image[:1])
        logits = self(batch.image).float()
        if batch.label.max() >= logits.shape[1]:
            raise ValueError(f"the data have a class {batch.label.max()}, num_classes is {logits.shape[1]}: set it")
        if self._tally is None:
            self._domain_names = batch.domain_names
            columns = len(batch.domain_names) + batch.clients
            self._tally = torch.zeros(3, columns, device=sums_device(self.device), dtype=torch.double)
        kinds = [
            F.cross_entropy(logits, batch.label, reduction="none"),
            (logits.argmax(1) == batch.label).float(),
            torch.ones_like(logits[:, 0]),
        ]
        rows = double(torch.stack(kinds))
        domain, client = batch.domain.to(rows.device), batch.client.to(rows.device)
        self._tally.index_add_(1, domain, rows)
        self._tally.index_add_(1, len(batch.domain_names) + client[client >= 0], rows[:, client >= 0])

    def on_validation_epoch_end(self) -> None:
        """Log them."""
        self._log_tally("val")

    def on_test_epoch_end(self) -> None:
        """Log them."""
        self._log_tally("test")

    def _log_tally(self, stage: str) -> None:
        assert self._tally is not None
        if self.trainer.world_size > 1:
            dist.all_reduce(self._tally)
        domains = len(self._domain_names)
        loss, right, count = self._tally[:, :domains]
        rows = {"loss": loss.sum() / count.sum(), "accuracy": right.sum() / count.sum()}
        if domains > 1:
            each = right / count
            rows |= {f"accuracy_{name}": each[i] for i, name in enumerate(self._domain_names)}
            rows["accuracy_domain_mean"] = each.mean()
        if self.log_clients:
            _, right, count = self._tally[:, domains:]
            rows |= {f"accuracy_client_{k}": right[k] / count[k] for k in count.nonzero().flatten().tolist()}
        for name, value in rows.items():
            self.log(f"{stage}/{name}", value.float(), prog_bar=name == "accuracy", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Label images.

        Returns:
            `index` int64 `[b]`, `name` (files, or positions in the split), `label` int64 `[b]` and `probability`
            float32 `[b, c]`.
        """
        if batch_idx == 0:
            self._check_image(batch.image[:1])
        probability = self(batch.image).float().softmax(1)
        return {"index": batch.index, "name": batch.name, "label": probability.argmax(1), "probability": probability}

    # ------------------------------------------------------------------------------------------- checkpoints

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the global model: network and the strategy's server state, `config.json`, a model card."""
        # neither the optimisers, which are functions, nor what LightningCLI adds
        config = {k: v for k, v in self.hparams.items() if not k.startswith("_") and not k.endswith("_optimizer")}
        write_folder(folder, FedHPro, FORMAT, config, self.state_dict())

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "FedHPro":
        """Read what `save_pretrained` wrote.

        Args:
            source: a folder, or an id on the Hugging Face hub.

        Raises:
            FileNotFoundError: if there is no such folder.
            ValueError: if another class or a newer version wrote it.
        """
        folder, config = read_config(source, "FedHPro", FORMAT)
        model = instantiate(cls, config, folder)
        model.configure_model()
        fill(model, read_state(folder), folder)
        return model.eval()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what clients remember (MOON's models), gathered from all ranks."""
        states = [self.strategy.client_states]
        if self.strategy.stateful and self.trainer.world_size > 1:
            states = [{} for _ in range(self.trainer.world_size)]
            dist.all_gather_object(states, self.strategy.client_states)
        checkpoint["client_states"] = {k: state for part in states for k, state in part.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read it back.

        Raises:
            ValueError: the checkpoint is of another number of classes, network or strategy.
        """
        stored = checkpoint["hyper_parameters"]
        for name in ("num_classes", "network", "strategy"):
            if stored[name] != self.hparams[name]:
                raise ValueError(f"the checkpoint has {name} {stored[name]}, this run {self.hparams[name]}")
        self.strategy.client_states = checkpoint["client_states"]


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in source.items():
            target[name].copy_(tensor)


def _all_reduce(tensors: list[Tensor]) -> None:
    """Sum over ranks, in place, in one collective."""
    packed = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(packed)
    for tensor, piece in zip(tensors, packed.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))
