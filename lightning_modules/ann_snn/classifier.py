"""Training of a source network: plain image classification."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_modules.ann_snn.source import build, check_data, load_weights
from lightning_modules.distributed import log_means, shard


class ImageClassifier(LightningModule):
    """Trains a network with cross entropy, so that it can be converted by `AnnSnn`.

    Batches are `datamodules.images.Images`, or tuples that begin with image float32 `[b, c, h, w]` and label int64
    `[b]`. Logged: `train/loss` (nats), `train/accuracy`, `val/loss`, `val/accuracy`, `test/loss`, `test/accuracy`
    (fractions of images).

    Args:
        network: class path of the network; see `lightning_modules.ann_snn.source.build`.
        network_args: its keyword arguments.
        weights: start from these instead of random ones; see `load_weights`.
        optimizer: by default SGD with learning rate 0.1, momentum 0.9 (Nesterov) and weight decay 5e-4.
        lr_scheduler: stepped once per epoch; by default a cosine to 0 over all epochs.
        label_smoothing: of the cross entropy.
    """

    block_types = (nn.Conv2d, nn.Linear)

    def __init__(
        self,
        network: str,
        network_args: dict[str, Any] | None = None,
        weights: str | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # outside the CLI these are functions, which a checkpoint cannot hold
        self.hparams.update({k: None for k in ("optimizer", "lr_scheduler") if callable(self.hparams[k])})
        self.network: nn.Module | None = None
        self.optimizer, self.lr_scheduler, self.label_smoothing = optimizer, lr_scheduler, label_smoothing
        self.accuracy: Any = nn.ModuleDict({"train_": MeanMetric(), "val": MeanMetric(), "test": MeanMetric()})

    def configure_model(self) -> None:
        """Build the network once; shard it under FSDP2."""
        if self.network is None:
            self.network = build(self.hparams["network"], self.hparams["network_args"])
            if self.hparams["weights"] and self._trainer is not None and self.trainer.ckpt_path is None:
                load_weights(self.network, self.hparams["weights"])
            data: Any = self._trainer and self.trainer.datamodule
            if hasattr(data, "calibration_dataloader"):
                with torch.device("cpu"):  # where images are made, also when the network is built on the meta device
                    image = next(iter(data.calibration_dataloader()))[0]
                device = next(self.network.parameters()).device
                check_data(self.network, image.to(device), len(getattr(data, "classes", ())))
        shard(self.network, self.block_types, self.device_mesh)

    def forward(self, image: Tensor) -> Tensor:
        """Images `[b, c, h, w]` -> logits `[b, k]`."""
        assert self.network is not None, "call configure_model() first"
        return self.network(image)

    def _step(self, batch: Any, stage: str) -> Tensor:
        image, label = batch[:2]
        logits = self(image)
        smoothing = self.label_smoothing if stage == "train" else 0.0
        loss = F.cross_entropy(logits.float(), label, label_smoothing=smoothing)
        metric = self.accuracy["train_" if stage == "train" else stage]
        metric((logits.argmax(1) == label).float())
        if stage == "train":
            self.log("train/loss", loss, batch_size=len(label), sync_dist=True, prog_bar=True)
        else:
            log_means(self, {f"{stage}/loss": loss}, len(label))
        self.log(f"{stage}/accuracy", metric, batch_size=len(label), on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross entropy."""
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """`index`, `name`, `label` and `probability` `[b, k]`."""
        return prediction(batch, self(batch.image))

    def configure_optimizers(self) -> Any:
        """SGD and a cosine, unless others are given."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer is not None:
            optimizer = self.optimizer(parameters)
        else:
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
        if self.lr_scheduler is not None:
            return [optimizer], [self.lr_scheduler(optimizer)]
        epochs = max(self.trainer.max_epochs or 1, 1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)]


def prediction(batch: Any, logits: Tensor) -> dict[str, Any]:
    """One row per image for `callbacks.PredictionWriter`, from logits float `[b, k]`."""
    probability = logits.float().softmax(1)
    return {"index": batch.index, "name": batch.name, "label": probability.argmax(1), "probability": probability}
