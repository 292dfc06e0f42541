"""Closed-loop ANN-to-SNN fine-tuning.

"High-Fidelity ANN-to-SNN Conversion via Closed-Loop CKA Distillation", ICML 2026. Symbols: B images, T time steps,
K classes, L monitored layers. What computes lies in `conversion`, `neurons` and `losses`; the card (README.md) maps
equations to functions and lists where this differs from the authors' code.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_modules.ann_snn.classifier import prediction
from lightning_modules.ann_snn.conversion import (
    SpikingNetwork,
    convert,
    gram,
    prepare,
    rebuild,
    simulate,
    teacher_features,
)
from lightning_modules.ann_snn.losses import batch_mean_cka, closed_loop_loss, hsic, layer_weights, linear_cka
from lightning_modules.ann_snn.source import build, check_data, load_weights
from lightning_modules.distributed import gather_with_gradient, shard
from lightning_modules.hub import fill, instantiate, read_config, read_state, write_folder

FORMAT = 1  # of save_pretrained


class AnnSnn(LightningModule):
    """Converts a trained ReLU network into a spiking one and fine-tunes that against the original.

    `L = (1-alpha) CE + alpha [beta tau^2 KL(teacher || student) + (1-beta) sum_l w_l (1 - CKA_l)]` (Eq. 5), with
    CKA between the student's time-mean output and the teacher's activation of every residual block, by
    backpropagation through all T steps.

    Before the first fit the network is converted with calibration images of the data module
    (`calibration_dataloader`, or else `train_dataloader`); without a `Trainer`, call `convert_with` first. Batches are
    `datamodules.images.Images`, or tuples that begin with image float32 `[b, c, h, w]` and label int64 `[b]`.

    Logged: `train/loss`, its parts `train/task`, `train/global_kl` (nats), `train/local` (1 - CKA), `train/accuracy`;
    `val/accuracy` and `test/accuracy` (fraction of images at the training T, the mean over them if there are
    several), the same at each T as `.../accuracy_t<T>`, and the teacher's as `.../ann_accuracy`.

    Args:
        network: class path of the source network; see `lightning_modules.ann_snn.source.build`.
        network_args: its keyword arguments.
        weights: of the source: shipped (`digits`), a file, or torchvision's name; see `load_weights`.
        time_steps: T in training; of a list one is drawn for each batch, so that one network serves every T.
        test_time_steps: T at which validation and test report accuracy, beside those of training.
        conversion: thresholds per `layer` (as in the paper) or per `channel`.
        percentile: of the activations that becomes the threshold; 99.9 in the paper, 100 is the maximum.
        half_threshold: start the membranes at half the threshold.
        calibration_batches: batches that calibrate the thresholds; all of the training images by default.
        alpha: share of distillation, in [0, 1].
        beta: share of the global KL term in the distillation, in [0, 1].
        tau: temperature of the KL term.
        weighting: `adaptive` weights from the initial conversion loss (Eq. 9), `uniform`, or `dynamic` (Eq. 9 anew
            in every epoch).
        weight_estimator: CKA behind the weights: `biased` on rates as in the loss, or `unbiased_stepgram` as in the
            authors' code (unbiased HSIC, mean of the Gram matrices of the steps).
        weight_batches: batches behind the weights; 5 in the authors' code.
        unbiased_cka: use the unbiased estimator in the loss.
        cka_grad: `exact`, or `numerator_half` as in an early version of the authors' code.
        train_fused_bias: train the biases that come from folding BatchNorm (frozen in the authors' code).
        train_threshold: train the thresholds.
        train_v0: train the membranes' start, per channel.
        memory_optimised: recompute currents and membranes in the backward pass instead of keeping them.
        optimizer: by default Adam with learning rate 1e-5, as in the paper.
        lr_scheduler: stepped after every batch, since fine-tuning takes few epochs; none by default.
        init_from: a checkpoint of this class, or a folder of `save_pretrained` or its id on the hub, whose weights to
            start from, instead of a conversion; the layer weights are measured anew. A folder has no teacher: that is
            `weights`.
    """

    block_types = (nn.Conv2d, nn.Linear)

    def __init__(
        self,
        network: str = "lightning_modules.ann_snn.networks.SmallResNet",
        network_args: dict[str, Any] | None = None,
        weights: str | None = "digits",
        time_steps: int | list[int] = 4,
        test_time_steps: list[int] | None = None,
        conversion: Literal["layer", "channel"] = "layer",
        percentile: float = 99.9,
        half_threshold: bool = False,
        calibration_batches: int | None = None,
        alpha: float = 0.5,
        beta: float = 0.1,
        tau: float = 2.0,
        weighting: Literal["adaptive", "uniform", "dynamic"] = "adaptive",
        weight_estimator: Literal["biased", "unbiased_stepgram"] = "biased",
        weight_batches: int = 5,
        unbiased_cka: bool = False,
        cka_grad: Literal["exact", "numerator_half"] = "exact",
        train_fused_bias: bool = True,
        train_threshold: bool = False,
        train_v0: bool = False,
        memory_optimised: bool = False,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # outside the CLI these are functions, which a checkpoint cannot hold
        self.hparams.update({k: None for k in ("optimizer", "lr_scheduler") if callable(self.hparams[k])})
        self.time_steps = [time_steps] if isinstance(time_steps, int) else list(time_steps)
        for name, steps in (("time_steps", self.time_steps or [0]), ("test_time_steps", test_time_steps or [1])):
            if min(steps) < 1:
                raise ValueError(f"{name} {steps} must be at least 1")
        if weight_batches < 1:
            raise ValueError(f"weight_batches {weight_batches} must be at least 1")
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} {value} is outside [0, 1]")
        if tau <= 0:
            raise ValueError(f"tau {tau} must be above 0")
        self.report_time_steps = sorted({*self.time_steps, *(test_time_steps or [])})
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.teacher: nn.Module | None = None
        self.student: SpikingNetwork | None = None
        self.input_shape: list[int] | None = None
        names = ["train_accuracy", *(f"{s}_t{t}" for s in ("val", "test") for t in (0, *self.report_time_steps))]
        self.metrics: Any = nn.ModuleDict({name: MeanMetric() for name in names})  # T = 0 is the teacher

    # ------------------------------------------------------------------------------------------- building

    def _conversion_settings(self) -> dict[str, Any]:
        keys = ("percentile", "half_threshold", "train_fused_bias", "train_threshold", "train_v0")
        return {"mode": self.hparams["conversion"], **{k: self.hparams[k] for k in keys}}

    def build_source(self, *, with_weights: bool = True) -> nn.Module:
        """The source network, prepared for conversion, frozen and in evaluation mode."""
        network = build(self.hparams["network"], self.hparams["network_args"])
        if with_weights and self.hparams["weights"]:
            load_weights(network, self.hparams["weights"])
        return prepare(network).requires_grad_(False)

    def convert_with(self, batches: Iterable[Any], device: torch.device | None = None) -> None:
        """Build teacher and student, calibrate the thresholds, and measure the layer weights.

        Args:
            batches: calibration batches, of training images, the same on every rank. Iterated twice.
            device: where to calibrate; the CPU by default.
        """
        device = device or torch.device("cpu")
        self.teacher = self.build_source().to(device)

        def images(n: int | None) -> Iterable[Tensor]:
            return (_image(batch).to(device) for batch in islice(batches, n))

        data = self._trainer and self.trainer.datamodule
        check_data(self.teacher, next(iter(images(1))), len(getattr(data, "classes", ())))
        self.student = convert(self.teacher, images(self.hparams["calibration_batches"]), **self._conversion_settings())
        self.student.memory_optimised = self.hparams["memory_optimised"]
        few = list(images(self.hparams["weight_batches"]))
        self.input_shape = list(few[0].shape[1:])
        self.register_buffer("layer_weights", self._measure_all_weights(few))  # [number of T, L]

    def _measure_all_weights(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.measure_weights(images, t) for t in self.time_steps]).float()

    def _build_empty(self, input_shape: list[int]) -> None:
        """The same structure without data, for a checkpoint to fill."""
        self.teacher = self.build_source(with_weights=False)
        self.student = rebuild(self.teacher, input_shape, **self._conversion_settings())
        self.student.memory_optimised = self.hparams["memory_optimised"]
        self.input_shape = list(input_shape)
        self.register_buffer("layer_weights", torch.zeros(len(self.time_steps), len(self.student.monitored)))

    @torch.no_grad()
    def measure_weights(self, images: Iterable[Tensor], time_steps: int) -> Tensor:
        """Weights of the monitored layers `[L]` by the present conversion loss at T (Eq. 9)."""
        assert self.teacher is not None and self.student is not None
        names = list(self.student.monitored)
        if self.hparams["weighting"] == "uniform":
            return torch.full((len(names),), 1 / len(names))
        stepgram = self.hparams["weight_estimator"] == "unbiased_stepgram"
        per_batch = []
        for x in images:
            _, teacher = teacher_features(self.teacher, x, self.student.monitored)
            student = simulate(self.student, x, time_steps, reduce=gram if stepgram else None).features
            if stepgram:
                terms = [hsic(student[k], teacher[k].flatten(1) @ teacher[k].flatten(1).T) for k in names]
            else:
                terms = [linear_cka(student[k], teacher[k]) for k in names]
            per_batch.append(torch.stack(terms))
        stacked = torch.stack(per_batch)  # batches L (3)
        cka = torch.stack([batch_mean_cka(stacked[:, i]) for i in range(len(names))]) if stepgram else stacked.mean(0)
        return layer_weights(cka.cpu())

    def configure_model(self) -> None:
        """Convert, or build the structure that a checkpoint will fill; shard under FSDP2. Runs once."""
        if self._trainer is not None and self.student is None:
            start = self.trainer.ckpt_path or self.hparams["init_from"]
            device = self.trainer.strategy.root_device
            if start:
                with torch.device("cpu"):  # a conversion looks at values, which the meta device does not have
                    batches = islice(self._calibration_loader(), self.hparams["weight_batches"])
                    few = [_image(b).to(device) for b in batches]
                    self._build_empty(list(few[0].shape[1:]))
                if not self.trainer.ckpt_path:
                    self.load_weights_from(start)
                    self.to(device)
                    self.layer_weights = self._measure_all_weights(few)
            else:
                self.convert_with(self._calibration_loader(), device)
        if self.student is not None and self.device_mesh is not None:
            assert self.teacher is not None
            shard(self.teacher, self.block_types, self.device_mesh)
            # recomputing a piece needs the weights that its forward pass used: gather all of them once per step then
            shard(self.student, () if self.hparams["memory_optimised"] else self.block_types, self.device_mesh)

    def _calibration_loader(self) -> Any:
        data = self.trainer.datamodule
        if data is None:
            raise ValueError("AnnSnn needs calibration images: use a data module, or call convert_with(batches) first")
        return data.calibration_dataloader() if hasattr(data, "calibration_dataloader") else data.train_dataloader()

    def load_weights_from(self, source: str | Path) -> None:
        """Take weights from `source` (see `init_from`), and nothing else of it."""
        state = read_state(source)
        if "layer_weights" not in state:  # of the student alone
            assert self.student is not None and self.teacher is not None
            self.teacher.load_state_dict(self.build_source().state_dict())
            fill(self.student, state, f"init_from {source}")
        else:
            fill(self, state | {"layer_weights": self.layer_weights}, f"init_from {source}")  # those may be of other T

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the size of the images, from which the structure can be rebuilt."""
        checkpoint["input_shape"] = self.input_shape

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the structure if there is none yet (`load_from_checkpoint`)."""
        if self.student is None:
            self._build_empty(checkpoint["input_shape"])

    def train(self, mode: bool = True) -> "AnnSnn":
        """Teacher and student always stay in evaluation mode: no dropout, no batch statistics."""
        super().train(mode)
        for network in (self.teacher, self.student):
            if network is not None:
                network.eval()
        return self

    # ------------------------------------------------------------------------------------------- training

    def forward(self, image: Tensor, time_steps: int | None = None) -> Tensor:
        """Images `[b, c, h, w]`, normalised as in training, -> time-mean logits `[b, k]` after T steps.

        `time_steps` defaults to the largest T of training.
        """
        assert self.student is not None, "not converted yet: call convert_with(batches)"
        return simulate(self.student, image, time_steps or max(self.time_steps)).logits

    def draw_time_steps(self) -> int:
        """Index of this batch's T, the same on every rank: a function of seed and step."""
        if len(self.time_steps) == 1:
            return 0
        return int(np.random.default_rng([torch.initial_seed(), self.global_step]).integers(len(self.time_steps)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One batch at one T."""
        assert self.teacher is not None and self.student is not None
        image, label = batch[:2]
        drawn = self.draw_time_steps()
        with torch.no_grad():
            teacher_logits, targets = teacher_features(self.teacher, image, self.student.monitored)
        out = simulate(self.student, image, self.time_steps[drawn])
        loss = closed_loop_loss(
            out.logits,
            teacher_logits,
            label,
            {k: gather_with_gradient(v) for k, v in out.features.items()},  # CKA couples the whole global batch
            {k: gather_with_gradient(v) for k, v in targets.items()},
            self.layer_weights[drawn],
            alpha=self.hparams["alpha"],
            beta=self.hparams["beta"],
            tau=self.hparams["tau"],
            unbiased=self.hparams["unbiased_cka"],
            cka_grad=self.hparams["cka_grad"],
        )
        metric = self.metrics["train_accuracy"]
        metric((out.logits.argmax(1) == label).float())
        n = len(label)
        self.log("train/loss", loss.total, batch_size=n, sync_dist=True, prog_bar=True)
        for name in ("task", "global_kl", "local"):
            self.log(f"train/{name}", getattr(loss, name), batch_size=n, sync_dist=True)
        self.log("train/accuracy", metric, batch_size=n, on_step=False, on_epoch=True)
        return loss.total

    def on_train_epoch_start(self) -> None:
        """Dynamic weights: Eq. 9 for the student as it is now."""
        if self.hparams["weighting"] == "dynamic" and self.current_epoch > 0:
            batches = islice(self._calibration_loader(), self.hparams["weight_batches"])
            self.layer_weights.copy_(self._measure_all_weights([_image(b).to(self.device) for b in batches]))

    def configure_optimizers(self) -> Any:
        """Adam on the student, unless another optimiser is given."""
        assert self.student is not None
        parameters = [p for p in self.student.parameters() if p.requires_grad]
        optimizer = self.optimizer(parameters) if self.optimizer else torch.optim.Adam(parameters, lr=1e-5)
        if self.lr_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.lr_scheduler(optimizer), "interval": "step"}]

    # ----------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, batch: Any, stage: str) -> None:
        assert self.teacher is not None and self.student is not None
        image, label = batch[:2]
        prefix = simulate(self.student, image, self.report_time_steps[-1], chunk=16).prefix_logits
        correct = {t: (prefix[t - 1].argmax(1) == label).float() for t in self.report_time_steps}
        correct[0] = (self.teacher(image).argmax(1) == label).float()
        for t, values in correct.items():
            self.metrics[f"{stage}_t{t}"](values)
            name = f"{stage}/accuracy_t{t}" if t else f"{stage}/ann_accuracy"
            self.log(name, self.metrics[f"{stage}_t{t}"], on_step=False, on_epoch=True, batch_size=len(label))

    def _log_accuracy(self, stage: str) -> None:
        mean = torch.stack([self.metrics[f"{stage}_t{t}"].compute() for t in self.time_steps]).mean()
        self.log(f"{stage}/accuracy", mean, prog_bar=True, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Accuracy at every reported T, in one pass."""
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        """The figure that selects a checkpoint."""
        self._log_accuracy("val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Accuracy at every reported T, in one pass."""
        self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        """The figure at the training T."""
        self._log_accuracy("test")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """`index`, `name`, `label` and `probability` `[b, k]` at the largest T of training."""
        return prediction(batch, self(batch.image))

    # --------------------------------------------------------------------------------------------- reuse

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the spiking network as `model.safetensors`, `config.json` and a model card; the teacher is not kept."""
        assert self.student is not None and self.input_shape is not None, "not converted yet"
        config = {
            "input_shape": self.input_shape,
            "time_steps": self.time_steps,
            **{k: self.hparams[k] for k in ("network", "network_args", "conversion")},
            **{k: v for k, v in self._conversion_settings().items() if k != "mode"},
        }
        write_folder(folder, AnnSnn, FORMAT, config, self.student.state_dict())

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "AnnSnn":
        """Rebuild the spiking network from a folder, or from an id on the Hugging Face hub.

        Raises:
            FileNotFoundError: if there is no such folder and it cannot be downloaded.
            ValueError: if the folder was written by another class or a newer version.
        """
        folder, config = read_config(source, "AnnSnn", FORMAT)
        input_shape = config.pop("input_shape", None)
        module = instantiate(cls, config | {"weights": None}, folder)
        module._build_empty(input_shape)
        assert module.student is not None
        fill(module.student, read_state(folder), folder)
        return module.eval()


def _image(batch: Any) -> Tensor:
    return batch if isinstance(batch, Tensor) else batch[0]
