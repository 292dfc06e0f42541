"""GraphPFN: predictions on a graph from a few labelled nodes, in one forward pass.

"GraphPFN: A Prior-Data Fitted Graph Foundation Model", ICML 2026, arXiv 2509.21489. What computes lies in `network`
(the published layout), `small` (ours, for laptops), `losses` and `inference`; the card (README.md) maps parts of the
paper to functions and lists deviations.
"""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_modules.distributed import log_means, shard
from lightning_modules.graph_pfn.adapter import EdgeHead
from lightning_modules.graph_pfn.checkpoints import read_weights
from lightning_modules.graph_pfn.inference import Ensemble, draw_members, episode, predict, view
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
from lightning_modules.graph_pfn.small import SmallBlock, SmallConfig, SmallNetwork, Surroundings
from lightning_modules.hub import FILES, fill, instantiate, read_config, read_state, without, write_folder

FORMAT = 1  # of save_pretrained
SHIPPED = Path(__file__).parent / "tiny"
LAYOUTS = {"tiny": (SmallConfig, SmallNetwork), "limix16m": (PublishedConfig, PublishedNetwork)}


class GraphPFN(LightningModule):
    """In-context prediction on graphs.

    Batches that are lists of `datamodules.graph_prior.GraphTask` pretrain the network. Batches that are
    `datamodules.nodes.Nodes`, one graph with some labels, fine-tune it; validation, test and prediction on them run
    in context, with an ensemble.

    Logged on a graph: `train/loss` (nats, or squared error in deviations); `val/accuracy` (fraction), with two
    classes also `val/average_precision` and `val/auc`, for values `val/r2`; `val/score`, the one that counts
    (accuracy, with two classes average precision, for values R²); the same as `test/...`.

    Logged in pretraining: `train/loss`, its parts `train/prediction` (nats, or squared error), `train/edges`,
    `train/features`; `train/gain` (prediction loss minus that of the context's class frequencies, or mean: negative
    once the model has learnt something); the same as `val/...`, and `val/accuracy` (fraction of query nodes).

    Args:
        layout: `tiny`, small enough to pretrain on a CPU, or `limix16m`, the published one.
        sizes: changes to the layout's sizes, attributes of `SmallConfig` or `PublishedConfig`.
        init_from: weights to start from: `tiny`, which is shipped; a folder of `save_pretrained`; a checkpoint of this
            class; or a list of published files (`LimiX-16M.safetensors`, `graphpfn-adapters-1_3.pt`).
        recipe: `finetune` is AdamW at a constant rate, and a first epoch at rate 0 that only validates what the
            network does in context, so that the best checkpoint is never below it; `pretrain` is warm-up and cosine.
        ensemble: changes to the ensemble, attributes of `Ensemble`. The tiny layout flips signs where the published
            one permutes columns, and appends no random columns.
        memory_gb: a graph that is estimated to need more than this is refused.
        trained: which weights learn: `all`, or the `adapters` alone (with the edge head and the feature decoder), as
            in the paper's pretraining.
        edge_weight: weight of the loss on hidden edges in pretraining; 0.1 in the paper.
        edge_rate: share of the edges that is hidden when `edge_weight` is above 0.
        hide_both_directions: hide an edge in both directions; the released code draws each direction by itself.
        feature_weight: weight of the loss on hidden features in pretraining; only in the published layout.
        feature_rate: share of the cells that is hidden when `feature_weight` is above 0.
        learning_rate: of the default optimiser, AdamW; by default 1e-3 for `pretrain`, 5e-5 for `finetune` (the
            paper searches 5e-6 to 5e-4 on validation data).
        weight_decay: of the default optimiser, not on biases and norms; by default 0.1 and 0.
        warmup: optimiser steps until the full learning rate in pretraining, then a cosine to zero; 1,000 in the paper.
        optimizer: another optimiser for all trained weights.
        lr_scheduler: another schedule, stepped every step.
        seed: of what is drawn in training: what is hidden in a synthetic graph is a function of (seed, number of the
            graph), a fine-tuning episode one of (seed, batch), the same on all ranks.
    """

    block_types = (AdaptedBlock, SmallBlock)

    def __init__(
        self,
        layout: Literal["tiny", "limix16m"] = "tiny",
        sizes: dict[str, Any] | None = None,
        init_from: str | list[str] | None = None,
        recipe: Literal["finetune", "pretrain"] = "finetune",
        ensemble: dict[str, Any] | None = None,
        memory_gb: float = 16.0,
        trained: Literal["all", "adapters"] = "all",
        edge_weight: float = 0.0,
        edge_rate: float = 0.1,
        hide_both_directions: bool = False,
        feature_weight: float = 0.0,
        feature_rate: float = 0.1,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
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
        for name in ("edge_rate", "feature_rate"):
            if not 0 <= self.hparams[name] < 1:
                raise ValueError(f"{name} {self.hparams[name]} is outside [0, 1)")
        if feature_weight and layout == "tiny":
            raise ValueError("layout tiny has no feature decoder: set feature_weight to 0")
        self.config = configured(config(), sizes, f"layout {layout} has no size")
        default = Ensemble() if layout == "limix16m" else Ensemble(10, False, True, 0)
        default = replace(default, letters=self.config.classes)
        self.ensemble = configured(default, ensemble, "the ensemble has no setting")
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.network: Any = None  # a PublishedNetwork or SmallNetwork, built by configure_model
        self.edge_head: Any = None

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
            if self.hparams["init_from"] and self._trainer is not None and not self.trainer.ckpt_path:
                self.load_weights_from(self.hparams["init_from"])
        shard(self.network, self.block_types, self.device_mesh)
        if self.edge_head is not None:
            shard(self.edge_head, (), self.device_mesh)

    def _build(self) -> None:
        """Build the network where no run has, with the weights of `init_from`."""
        if self.network is None:
            self.configure_model()
            if self.hparams["init_from"] and self._trainer is None:
                self.load_weights_from(self.hparams["init_from"])

    def load_weights_from(self, source: str | list[str]) -> None:
        """Take weights from `source` (see `init_from`) and nothing else. What it lacks must be adapters.

        Raises:
            FileNotFoundError: there is no such file or folder.
            ValueError: it does not fit this layout, or would execute code.
        """
        state: dict[str, Tensor] = {}
        for part in [source] if isinstance(source, str) else source:
            path = SHIPPED if part == "tiny" else Path(part)
            if path.is_dir() or not (path.is_file() or path.suffix in FILES):
                state |= read_state(path)
            else:
                state |= without("network.", read_weights(path))  # the prefix is that of a checkpoint of this class
        own = self.network.state_dict()
        state = {k: v for k, v in state.items() if not k.startswith("edge_head.")}
        for name, value in state.items():
            if name not in own or own[name].shape != value.shape:
                here = f"here {list(own[name].shape)}: see sizes" if name in own else "not one of its tensors"
                what = f"init_from {source} does not fit layout {self.hparams['layout']}"
                raise ValueError(f"{what}: {name} {list(value.shape)}, {here}")
        adapters = {id(p) for p in self.adapter_parameters()}
        lacking = [k for k, p in self.network.named_parameters() if k not in state and id(p) not in adapters]
        if lacking:
            raise ValueError(f"init_from {source} lacks {len(lacking)} tensors of the backbone, such as {lacking[0]}")
        self.network.load_state_dict(state, strict=False)

    def adapter_parameters(self) -> list[nn.Parameter]:
        """Weights of the graph adapters and of the feature decoder."""
        modules: list[nn.Module] = []
        for module in self.network.modules():
            if isinstance(module, AdaptedBlock):
                modules += [module.conv, module.mlp]
            elif isinstance(module, Surroundings):
                modules.append(module)
            elif isinstance(module, SmallBlock):
                modules += [module.graph_attention, module.norms[2], module.norms[3], module.mlps[1]]
        if isinstance(self.network, PublishedNetwork):
            modules.append(self.network.feature_decoder)
        return [parameter for module in modules for parameter in module.parameters()]

    def configure_optimizers(self) -> Any:
        """AdamW and the recipe's schedule, unless others are given."""
        pretrain = self.hparams["recipe"] == "pretrain"
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer:
            optimizer = self.optimizer(trained)
        else:
            rate, decay = self.hparams["learning_rate"], self.hparams["weight_decay"]
            rate = rate if rate is not None else 1e-3 if pretrain else 5e-5
            decay = decay if decay is not None else 0.1 if pretrain else 0.0
            groups = [
                {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay},
                {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=rate)
        schedule = self.lr_scheduler(optimizer) if self.lr_scheduler else LambdaLR(optimizer, self._rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        """Factor of the learning rate under the recipe.

        The number of steps is asked for after the first one: asking while the optimiser is made would load the data
        before a checkpoint's position in them is restored.
        """
        if self.hparams["recipe"] == "pretrain":
            total = self.trainer.estimated_stepping_batches if step else 1  # infinite without an end: no cosine
            return warmup_cosine(step, self.hparams["warmup"], max(total, self.hparams["warmup"] + 1))
        first_epoch = -(-self.trainer.num_training_batches // self.trainer.accumulate_grad_batches) if step else 1
        return float(step >= first_epoch)

    # ---------------------------------------------------------------------------------------- pretraining

    def forward(
        self, questions: list[Question], task: Task = "classification", reconstruct: bool = False
    ) -> list[Answer]:
        """Answer questions; see `PublishedNetwork.forward` and `SmallNetwork.forward`."""
        self._build()
        return self.network(questions, task, reconstruct)

    def _pretrain(self, tasks: list[Any]) -> dict[str, Tensor]:
        """Losses of a list of `GraphTask`, each the mean over its graphs; `accuracy` that over those with classes."""
        h = self.hparams
        parts: dict[str, list[Tensor]] = {"prediction": [], "baseline": [], "edges": [], "features": []}
        hits: list[Tensor] = []
        for kind in ("classification", "regression"):
            chosen = [i for i, t in enumerate(tasks) if (t.classes == 0) == (kind == "regression")]
            hidden_edges, hidden_cells, questions = [], [], []
            for t in (tasks[i] for i in chosen):
                x, edges = t.x, t.edge_index
                generator = torch.Generator().manual_seed(h["seed"] * 1_000_003 + t.number)
                if h["edge_weight"]:
                    hidden_edges.append(hide_edges(edges, len(x), h["edge_rate"], h["hide_both_directions"], generator))
                    edges = hidden_edges[-1].visible
                if h["feature_weight"]:
                    x, cells = hide_features(x, h["feature_rate"], "permute", generator)
                    hidden_cells.append(cells)
                questions.append(Question(x, t.y[: t.n_context], edges))
            answers = self(questions, kind, bool(h["feature_weight"])) if questions else []
            for i, (t, answer) in enumerate(zip((tasks[i] for i in chosen), answers, strict=True)):
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
        losses["accuracy"] = torch.stack(hits).mean() if hits else losses["gain"].new_tensor(torch.nan)
        return losses

    # ------------------------------------------------------------------------------------------ one graph

    def predict_nodes(
        self,
        x: Tensor,
        edges: Tensor | None,
        y: Tensor,
        context: Tensor,
        classes: int,
        seed: int | None = None,
    ) -> Tensor:
        """Predict all nodes outside the context, in one forward pass per member of the ensemble.

        Args:
            x: features (n, f), float32, finite.
            edges: (2, m) int64, both directions, no loops and duplicates; None uses the features alone.
            y: classes 0 to classes - 1 (int64) or values (float32) of all nodes (n,), read at the context only.
            context: labelled nodes (n,) bool.
            classes: number of classes; 0 for regression.
            seed: of the ensemble; the module's by default.

        Returns:
            Probabilities (q, classes) or values (q,) of the nodes outside the context, in ascending order.

        Raises:
            ValueError: no node is labelled, or none is not, or there is no column, or the graph needs more memory than
                `memory_gb`.
        """
        self._build()
        if not context.any():
            raise ValueError("no node is labelled, so there is nothing to learn from")
        if context.all():
            raise ValueError("every node is labelled, so there is nothing to predict")
        self._check_size(x, edges, False)
        seed = self.hparams["seed"] if seed is None else seed
        return predict(self, x, y, edges, context, classes, self.ensemble, seed)

    def _check_size(self, x: Tensor, edges: Tensor | None, training: bool) -> None:
        n, f = x.shape[0], x.shape[1] + self.ensemble.random_columns
        if f == 0:
            raise ValueError("the graph has no feature columns: set structure of the data to 8, or random_columns here")
        m = 0 if edges is None else edges.shape[1]
        need = self.network.peak_bytes(n, f, m, training) / 1e9
        if need > self.hparams["memory_gb"]:
            what = "fine-tuning" if training else "predicting"
            raise ValueError(
                f"{what} on {n} nodes, {f} columns and {m // 2} edges needs about {need:.1f} GB, "
                f"above memory_gb {self.hparams['memory_gb']:g}: raise it, lower the number of columns (components) or "
                "take a part of the graph"
            )

    def _finetune(self, nodes: Any, step: int) -> Tensor:
        """Loss of episode number `step`: some labelled nodes predict others, seen by one random member."""
        seed = self.hparams["seed"]
        self._check_size(nodes.x, nodes.edge_index, True)
        known, asked = episode(nodes.context, nodes.y, step, seed, nodes.classes)
        context = torch.zeros_like(nodes.context)
        context[known] = True
        order = torch.argsort(~context, stable=True)
        place = torch.argsort(order)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        coded = nodes.classes > self.ensemble.letters  # the columns of a code are not alike, as permutations are
        settings = self.ensemble if coded else replace(self.ensemble, members=1)
        members = draw_members(nodes.x.shape[1], nodes.classes, settings, generator)
        member = members[int(torch.randint(len(members), (1,), generator=generator))]
        y = nodes.y
        if nodes.classes == 0:
            y = (y - y[known].mean()) / y[known].std(correction=0).clamp(min=1e-6)
        shown = view(
            nodes.x[order],
            y[order[: len(known)]],
            place[nodes.edge_index],
            member,
            self.ensemble.random_columns,
            generator,
        )
        task: Task = "classification" if nodes.classes else "regression"
        query = self([shown.question], task)[0].query[place[asked] - len(known)]
        if nodes.classes == 0:
            return prediction_loss(query, y[asked], task)
        return prediction_loss(query, torch.searchsorted(shown.letters, member.codes.to(y.device)[y[asked]]), task)

    def _evaluate(self, nodes: Any, stage: str) -> None:
        output = self.predict_nodes(nodes.x, nodes.edge_index, nodes.y, nodes.context, nodes.classes)
        chosen = nodes.query[~nodes.context]
        scores = score(output[chosen], nodes.y[nodes.query], nodes.classes)
        self.log_dict({f"{stage}/{k}": v for k, v in scores.items()}, batch_size=1, prog_bar=True, sync_dist=True)

    # ----------------------------------------------------------------------------------------------- steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One optimiser step: a list of graphs pretrains, one graph fine-tunes."""
        if not isinstance(batch, list):
            together = self.trainer.accumulate_grad_batches  # batches of one step, each an episode of its own
            loss = self._finetune(batch, self.global_step * together + batch_idx % together)
            self.log("train/loss", loss, batch_size=1, prog_bar=True)
            return loss + self._all_weights()
        losses = self._pretrain(batch)
        losses.pop("accuracy")
        names = {f"train/{name}": value for name, value in losses.items()}
        self.log_dict(names, batch_size=len(batch), prog_bar=True, sync_dist=True)
        return losses["loss"] + self._all_weights()

    def _all_weights(self) -> Tensor | float:
        """Zero, with every trained weight in its graph.

        A batch without edges, or of one kind of target, leaves some weights out, which DDP does not allow. FSDP does,
        and its shards cannot be added to a loss.
        """
        if self.device_mesh is not None:
            return 0.0
        return 0.0 * sum(p.sum() for p in self.parameters() if p.requires_grad)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The losses of pretraining on fixed graphs, or the scores on a graph's validation nodes."""
        if not isinstance(batch, list):
            return self._evaluate(batch, "val")
        losses = self._pretrain(batch)
        accuracy, classified = losses.pop("accuracy"), sum(t.classes > 0 for t in batch)
        log_means(self, {f"val/{name}": value for name, value in losses.items()}, len(batch), prog_bar=True)
        log_means(self, {"val/accuracy": accuracy}, classified, prog_bar=True)
        return None

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Scores on a graph's test nodes."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Predictions for the query nodes.

        Returns:
            `index` (q,), `node` (q names), `prediction` (q class names, or values), and for classes `probability`
            (q, classes). Ranks other than 0 return nothing, for all have the same graph.
        """
        output = self.predict_nodes(batch.x, batch.edge_index, batch.y, batch.context, batch.classes)
        output = output[batch.query[~batch.context]].cpu()
        index = batch.query.nonzero().squeeze(1).cpu()
        if self.global_rank:
            index, output = index[:0], output[:0]
        result = {"index": index, "node": [batch.node[i] for i in index.tolist()]}
        if batch.classes == 0:
            return result | {"prediction": output}
        self.prediction_columns = {"probability": [f"probability_{name}" for name in batch.class_names]}
        names = [batch.class_names[i] for i in output.argmax(1).tolist()]
        return result | {"prediction": names, "probability": output}

    # ----------------------------------------------------------------------------------------------- reuse

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the network as `model.safetensors`, `config.json` and a model card."""
        self._build()
        config = {k: self.hparams[k] for k in ("layout", "sizes", "ensemble")}
        write_folder(folder, GraphPFN, FORMAT, config, self.network.state_dict())

    @classmethod
    def from_pretrained(cls, source: str | Path = "tiny") -> "GraphPFN":
        """Rebuild a network from `tiny` (shipped), a folder, or an id on the Hugging Face hub.

        Raises:
            FileNotFoundError: there is no such folder and it cannot be downloaded.
            ValueError: the folder was written by another class or a newer version.
        """
        folder, config = read_config(SHIPPED if str(source) == "tiny" else source, "GraphPFN", FORMAT)
        module = instantiate(cls, config, folder)
        module.configure_model()
        fill(module.network, read_state(folder), folder)
        return module.eval()


def configured(default: Any, changes: dict[str, Any] | None, complaint: str) -> Any:
    """A dataclass with some attributes changed; unknown ones are refused by name."""
    known = [field.name for field in fields(default)]
    unknown = sorted(set(changes or {}) - set(known))
    if unknown:
        raise ValueError(f"{complaint} {', '.join(unknown)}; it has {', '.join(known)}")
    return replace(default, **(changes or {}))


def score(output: Tensor, y: Tensor, classes: int) -> dict[str, Tensor]:
    """How good predictions are.

    Args:
        output: probabilities (q, classes) or values (q,).
        y: classes (q,) int64 or values (q,).
        classes: number of classes; 0 for regression.

    Returns:
        `accuracy`; with two classes also `average_precision` and `auc` of class 1; or `r2`. `score` repeats the one
        that counts: accuracy, with two classes average precision, or R².
    """
    from torchmetrics.functional import r2_score
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    if classes == 0:
        r2 = r2_score(output, y)
        return {"r2": r2, "score": r2}
    accuracy = (output.argmax(1) == y).float().mean()
    if classes > 2:
        return {"accuracy": accuracy, "score": accuracy}
    precision = binary_average_precision(output[:, 1], y)
    return {
        "accuracy": accuracy,
        "average_precision": precision,
        "auc": binary_auroc(output[:, 1], y),
        "score": precision,
    }


def warmup_cosine(step: int, warmup: int, total: float) -> float:
    """Factor of the learning rate: linear from 0.01 to 1 over `warmup` steps, then a cosine to 0 at `total`."""
    if step < warmup:
        return 0.01 + 0.99 * step / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))
