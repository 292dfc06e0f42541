"""Pictures of a federation: who holds what, and where features and hyper-prototypes lie."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.checks import require
from callbacks.figures import log_figure, log_table, new_figure
from lightning_modules.distributed import gather_rows
from lightning_modules.fedhpro.module import FedHPro


def clients_figure(counts: np.ndarray, classes: list[str]) -> Figure:
    """Heat map of the images of each client (row) and class (column).

    Args:
        counts: int `[clients, classes]`.
        classes: names of the columns.
    """
    figure = new_figure(1.5 + 0.45 * len(classes), 1.2 + 0.3 * len(counts))
    axes = figure.add_subplot()
    image = axes.imshow(counts, cmap="viridis", aspect="auto")
    axes.set(xlabel="class", ylabel="client", title="images")
    axes.set_xticks(range(len(classes)), classes, rotation=90 if max(map(len, classes)) > 2 else 0)
    axes.set_yticks(range(len(counts)))
    if counts.size <= 400:
        for (k, c), count in np.ndenumerate(counts):
            axes.text(c, k, count, ha="center", va="center", fontsize=6, color="w" if count < counts.max() / 2 else "k")
    figure.colorbar(image)
    return figure


def features_figure(z: Tensor, labels: Tensor, anchors: Tensor | None, classes: list[str]) -> Figure:
    """The two principal components of unit-length features, and the anchors in the same plane.

    Args:
        z: float `[n, d]`.
        labels: int64 `[n]`.
        anchors: float `[c, d]`, mean hyper-prototype of each class; none draws features alone.
        classes: names.
    """
    unit = F.normalize(z.float(), dim=1)
    centre = unit.mean(0)
    plane = torch.linalg.svd(unit - centre, full_matrices=False).Vh[:2].T  # d 2
    figure = new_figure(6.5, 5)
    axes = figure.add_subplot()
    points = (unit - centre) @ plane
    colours = labels / max(len(classes) - 1, 1)
    axes.scatter(points[:, 0], points[:, 1], c=colours, cmap="turbo", vmin=0, vmax=1, s=6, alpha=0.6)
    if anchors is not None:
        stars = (F.normalize(anchors.float(), dim=1) - centre) @ plane
        numbers = np.arange(len(anchors)) / max(len(anchors) - 1, 1)
        axes.scatter(
            stars[:, 0], stars[:, 1], c=numbers, cmap="turbo", vmin=0, vmax=1, s=140, marker="*", edgecolors="k"
        )
        for number, star in enumerate(stars.tolist()):
            axes.annotate(str(number), star, xytext=(8, 4), textcoords="offset points")
    axes.set(xlabel="first component", ylabel="second component", title="features (dots), hyper-prototypes (stars)")
    return figure


def anchor_cosines(z: Tensor, labels: Tensor, anchors: Tensor) -> tuple[float, float]:
    """Mean cosine of each class's anchor with the centred mean feature of its own class, and with the others'.

    Near 0 for both: the anchors carry nothing about their classes.

    Args:
        z: float `[n, d]`.
        labels: int64 `[n]`.
        anchors: float `[c, d]`.
    """
    classes = len(anchors)
    counts = torch.bincount(labels, minlength=classes)
    sums = torch.zeros(classes, z.shape[1]).index_add_(0, labels, z.float())
    seen = counts > 0
    means = sums[seen] / counts[seen, None]
    cosines = F.normalize(anchors[seen].float(), dim=1) @ F.normalize(means - means.mean(0), dim=1).T
    own = cosines.diag()
    return own.mean().item(), ((cosines.sum() - own.sum()) / max(cosines.numel() - len(own), 1)).item()


class FederatedPictures(Callback):
    """Draws `plots/clients.png` when a fit starts and `plots/features.png` after its last round.

    Every round it also logs `val/anchor_cosine_own` and `val/anchor_cosine_other` for strategies with
    hyper-prototypes; see `anchor_cosines`. It watches `lightning_modules.FedHPro`, whose network returns features.

    After a fit and after a test, `val_federation.csv` and `test_federation.csv` (tables in W&B): accuracy over all
    images, of each domain and, on the images that it holds out, of each client; and their training images.
    """

    def __init__(self) -> None:
        self._hook: Any = None
        self._features: list[Tensor] = []
        self._labels: list[Tensor] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another method or other data.

        Raises:
            ValueError: if the method is not FedHPro, or the data are not dealt to clients.
        """
        require(self, isinstance(pl_module, FedHPro), "the method FedHPro", pl_module)
        data = trainer.datamodule
        dealt = all(hasattr(data, name) for name in ("counts", "classes", "domains"))
        require(self, stage == "predict" or dealt, "images dealt to clients, such as FederatedImages", data)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Who holds what."""
        data = trainer.datamodule
        log_figure(trainer, "clients", clients_figure(data.counts(), data.classes))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the features that validation computes anyway."""
        assert isinstance(pl_module, FedHPro) and pl_module.network is not None
        self._features, self._labels = [], []
        self._hook = pl_module.network.register_forward_hook(lambda *call: self._features.append(call[2][0].cpu()))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Remember whose they are."""
        self._labels.append(batch.label.cpu())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the cosines; draw after the last round."""
        self._hook.remove()
        rows = gather_rows({"z": torch.cat(self._features), "labels": torch.cat(self._labels)})
        prototypes = getattr(pl_module.strategy, "hyper_prototypes", None)
        anchors = None if prototypes is None else prototypes.mean(1).cpu()
        if anchors is not None:
            own, other = anchor_cosines(rows["z"], rows["labels"], anchors)
            for name, value in (("own", own), ("other", other)):
                pl_module.log(f"val/anchor_cosine_{name}", value, sync_dist=True)
        if (
            trainer.state.fn == "fit"
            and not trainer.sanity_checking
            and trainer.current_epoch + 1 == trainer.max_epochs
        ):
            log_figure(
                trainer, "features", features_figure(**rows, anchors=anchors, classes=trainer.datamodule.classes)
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the accuracies of the last validation."""
        log_table(trainer, "val_federation", accuracies(trainer, "val"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the accuracies of the test."""
        log_table(trainer, "test_federation", accuracies(trainer, "test"))


def accuracies(trainer: Trainer, stage: str) -> list[dict[str, Any]]:
    """A row for all images, for each domain and for each client whose accuracy was logged."""
    data = trainer.datamodule
    per_domain = torch.bincount(data.table.domains.cpu(), minlength=len(data.domains)).tolist()
    per_client = data.counts().sum(1).tolist()
    parts = [("all", "", sum(per_client), "accuracy")]
    parts += [("domain", d, n, f"accuracy_{d}") for d, n in zip(data.domains, per_domain, strict=True)]
    parts += [("client", str(k), n, f"accuracy_client_{k}") for k, n in enumerate(per_client)]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [
        {"part": part, "name": name, "training_images": n, "accuracy": logged[f"{stage}/{key}"]}
        for part, name, n, key in parts
        if f"{stage}/{key}" in logged
    ]
