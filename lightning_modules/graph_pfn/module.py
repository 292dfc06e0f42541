"""GraphPFN: predictions on a graph from a few labelled nodes, in one forward pass.

"GraphPFN: A Prior-Data Fitted Graph Foundation Model", ICML 2026, arXiv 2509.21489. What computes lies in `network`
(the published layout), `small` (ours, for laptops), `losses` and `inference`; the card (README.md) maps parts of the
paper to functions and lists deviations.
"""

import math
from dataclasses import fields
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_modules.distributed import shard
from lightning_modules.graph_pfn.adapter import EdgeHead
from lightning_modules.graph_pfn.losses import (
    Answer,
    Question,
    Task,
    context_baseline,
    edge_loss,
    feature_loss,
    hide_edges,
    hide_features,
    prediction_loss,
)
from lightning_modules.graph_pfn.network import AdaptedBlock, PublishedConfig, PublishedNetwork
from lightning_modules.graph_pfn.small import SmallBlock, SmallConfig, SmallNetwork

LAYOUTS = {"tiny": (SmallConfig, SmallNetwork), "limix16m": (PublishedConfig, PublishedNetwork)}


class GraphPFN(LightningModule):
    """In-context prediction on graphs.

    Batches that are lists of `datamodules.graph_prior.GraphTask` pretrain the network.

    Logged in pretraining: `train/loss`, its parts `train/prediction` (nats, or squared error), `train/edges`,
    `train/features`; `train/gain` (prediction loss minus that of the context's class frequencies, or mean: negative
    once the model has learnt something); the same as `val/...`, and `val/accuracy` (fraction of query nodes).

    Args:
        layout: `tiny`, small enough to pretrain on a CPU, or `limix16m`, the published one.
        sizes: changes to the layout's sizes, attributes of `SmallConfig` or `PublishedConfig`.
        trained: which weights learn: `all`, or the `adapters` alone (with the edge head and the feature decoder), as
            in the paper's pretraining.
        edge_weight: weight of the loss on hidden edges in pretraining; 0.1 in the paper.
        edge_rate: share of the edges that is hidden when `edge_weight` is above 0.
        hide_both_directions: hide an edge in both directions; the released code draws each direction by itself.
        feature_weight: weight of the loss on hidden features in pretraining; only in the published layout.
        feature_rate: share of the cells that is hidden when `feature_weight` is above 0.
        learning_rate: of the default optimiser, AdamW.
        weight_decay: of the default optimiser; not on biases and norms.
        warmup: optimiser steps until the full learning rate in pretraining, then a cosine to zero; 1,000 in the paper.
        optimizer: another optimiser for all trained weights.
        lr_scheduler: another schedule, stepped every step.
        seed: of what is drawn in training steps: each is a function of (seed, step, rank).
    """

    block_types = (AdaptedBlock, SmallBlock)

    def __init__(
        self,
        layout: Literal["tiny", "limix16m"] = "tiny",
        sizes: dict[str, Any] | None = None,
        trained: Literal["all", "adapters"] = "all",
        edge_weight: float = 0.0,
        edge_rate: float = 0.1,
        hide_both_directions: bool = False,
        feature_weight: float = 0.0,
        feature_rate: float = 0.1,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup: int = 1000,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # outside the CLI these are functions, which a checkpoint cannot hold
        self.hparams.update({k: None for k in ("optimizer", "lr_scheduler") if callable(self.hparams[k])})
        config, _ = LAYOUTS[layout]
        unknown = set(sizes or {}) - {field.name for field in fields(config)}
        if unknown:
            known = ", ".join(field.name for field in fields(config))
            raise ValueError(f"layout {layout} has no size {', '.join(sorted(unknown))}; it has {known}")
        for name in ("edge_rate", "feature_rate"):
            if not 0 <= self.hparams[name] < 1:
                raise ValueError(f"{name} {self.hparams[name]} is outside [0, 1)")
        if feature_weight and layout == "tiny":
            raise ValueError("layout tiny has no feature decoder: set feature_weight to 0")
        self.config = config(**(sizes or {}))
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.network: PublishedNetwork | SmallNetwork | None = None
        self.edge_head: EdgeHead | None = None

    # ------------------------------------------------------------------------------------------- building

    def configure_model(self) -> None:
        """Build the network, and shard it under FSDP2. Runs once."""
        if self.network is None:
            self.network = LAYOUTS[self.hparams["layout"]][1](self.config)
            if self.hparams["edge_weight"]:
                hidden = getattr(self.config, "hidden", 4 * self.config.width)
                self.edge_head = EdgeHead(self.config.width, hidden)
            if self.hparams["trained"] == "adapters":
                self.network.requires_grad_(False)
                for parameter in self.adapter_parameters():
                    parameter.requires_grad_(True)
        shard(self.network, self.block_types, self.device_mesh)

    def adapter_parameters(self) -> list[nn.Parameter]:
        """Weights of the graph adapters and of the feature decoder."""
        modules: list[nn.Module] = []
        for module in self.network.modules():
            if isinstance(module, AdaptedBlock):
                modules += [module.conv, module.mlp]
            elif isinstance(module, SmallBlock):
                modules += [module.graph_attention, module.norms[4], module.norms[5], module.mlps[2]]
        if isinstance(self.network, PublishedNetwork):
            modules.append(self.network.feature_decoder)
        return [parameter for module in modules for parameter in module.parameters()]

    def configure_optimizers(self) -> Any:
        """AdamW, warm-up and cosine, unless others are given."""
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer:
            optimizer = self.optimizer(trained)
        else:
            decayed = [p for p in trained if p.ndim > 1]
            plain = [p for p in trained if p.ndim <= 1]
            groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(
                groups, lr=self.hparams["learning_rate"], weight_decay=self.hparams["weight_decay"]
            )
        if self.lr_scheduler:
            schedule = self.lr_scheduler(optimizer)
        else:
            warmup, total = self.hparams["warmup"], int(self.trainer.estimated_stepping_batches)
            schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---------------------------------------------------------------------------------------- pretraining

    def forward(
        self, questions: list[Question], task: Task = "classification", reconstruct: bool = False
    ) -> list[Answer]:
        """Answer questions; see `PublishedNetwork.forward` and `SmallNetwork.forward`."""
        self.configure_model()
        return self.network(questions, task, reconstruct)

    def _pretrain(self, tasks: list[Any], generator: torch.Generator) -> dict[str, Tensor]:
        """Losses of a list of `GraphTask`, each the mean over its graphs."""
        h = self.hparams
        parts: dict[str, list[Tensor]] = {"prediction": [], "baseline": [], "edges": [], "features": []}
        hits: list[Tensor] = []
        for kind in ("classification", "regression"):
            chosen = [t for t in tasks if (t.classes == 0) == (kind == "regression")]
            hidden_edges, hidden_cells, questions = [], [], []
            for t in chosen:
                x, edges = t.x, t.edge_index
                if h["edge_weight"]:
                    hidden_edges.append(hide_edges(edges, len(x), h["edge_rate"], h["hide_both_directions"], generator))
                    edges = hidden_edges[-1].visible
                if h["feature_weight"]:
                    x, cells = hide_features(x, h["feature_rate"], "permute", generator)
                    hidden_cells.append(cells)
                questions.append(Question(x, t.y[: t.n_context], edges))
            answers = self(questions, kind, bool(h["feature_weight"])) if questions else []
            for i, (t, answer) in enumerate(zip(chosen, answers, strict=True)):
                y = t.y[t.n_context :]
                parts["prediction"].append(prediction_loss(answer.query, y, kind))
                parts["baseline"].append(context_baseline(t.y[: t.n_context], y, kind))
                if h["edge_weight"]:
                    parts["edges"].append(edge_loss(self.edge_head, answer.target, hidden_edges[i]))
                if h["feature_weight"]:
                    parts["features"].append(feature_loss(answer.features, t.x, t.n_context, hidden_cells[i]))
                if kind == "classification":
                    hits.append((answer.query.argmax(1) == y).float().mean())
        losses = {name: torch.stack(values).mean() for name, values in parts.items() if values}
        losses["gain"] = losses["prediction"].detach() - losses.pop("baseline")
        losses["loss"] = losses["prediction"]
        for name in ("edges", "features"):
            if name in losses:
                losses["loss"] = losses["loss"] + h[name.rstrip("s") + "_weight"] * losses[name]
        if hits:
            losses["accuracy"] = torch.stack(hits).mean()
        return losses

    def _generator(self) -> torch.Generator:
        """Randomness that depends on seed, step and rank alone."""
        seed = (self.hparams["seed"] * 1_000_003 + self.global_step) * 4099 + self.global_rank
        return torch.Generator().manual_seed(seed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One optimiser step."""
        losses = self._pretrain(batch, self._generator())
        losses.pop("accuracy", None)
        names = {f"train/{name}": value for name, value in losses.items()}
        self.log_dict(names, batch_size=len(batch), prog_bar=True, sync_dist=True)
        return losses["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same losses on fixed graphs."""
        losses = self._pretrain(batch, torch.Generator().manual_seed(batch_idx))
        names = {f"val/{name}": value for name, value in losses.items()}
        self.log_dict(names, batch_size=len(batch), prog_bar=True, sync_dist=True)


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: linear from 0.01 to 1 over `warmup` steps, then a cosine to 0 at `total`."""
    if step < warmup:
        return 0.01 + 0.99 * step / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))
