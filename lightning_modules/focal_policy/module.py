"""FocalPolicy: foresight-aware visuomotor policy by consistency flow matching.

"FocalPolicy", ICML 2026, arXiv 2605.15944. Symbols: b batch, L horizon, H action steps (a chunk), To history, d action
dimensions. What computes lies in `losses`, `sampler`, `policy`, `network` and `encoders`; the card (README.md) maps
equations to functions and lists where this differs from the released code.
"""

import math
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lightning_modules.distributed import read_checkpoint, shard
from lightning_modules.hub import fill, read_state, without

from .encoders import ImageEncoder, PointEncoder
from .losses import (
    FreqMode,
    Scope,
    Term,
    consistency_objective,
    foresight_composite_objective,
    frequency_term,
    time_term,
)
from .network import ResidualBlock
from .policy import PolicyConfig, PolicyNetwork
from .rollout import RolloutPolicy, load_pretrained, save_pretrained
from .sampler import TimeSampler, flow_times

Objective = Literal["composite", "consistency"]
SIZES = ("action_dim", "state_dim", "point_channels", "image_crop")  # taken from the data where they are left open


class FocalPolicy(LightningModule):
    """Learns a window of actions from demonstrations and generates it with one network call.

    `loss = time + freq_weight * freq` with the composite objective (the paper's), or
    `loss = time + velocity_weight * velocity` with FlowPolicy's consistency objective (its baseline). Each of the
    paper's two ideas can be switched on alone: anchored sampling is `time_scope: window, freq_weight: 0`, the
    composite objective is `time_sampler: cfm`.

    Batches are `datamodules.robots.Windows`: observation `[b, history, ...]`, action `[b, L, d]`, valid `[b, L]`,
    index `[b]`. All randomness of a training sample is a function of (seed, epoch, index).

    Logged, in normalised action units: `train/loss` and its parts `train/time` (mean squared), `train/freq` (sum over
    a window) or `train/velocity`, `train/freq_per_element` (`freq / (L d)`); `val/loss`, `val/executed_error` (mean
    squared error of the executed steps of a generated window), `val/window_error` (of the whole window), and the same
    for `test/`.

    Args:
        action_dim: Dimensions of an action; taken from the data if none.
        state_dim: Size of the state, 0 for none; taken from the data if none.
        point_channels: Numbers per point (3, or 6 with colour), 0 for none; taken from the data if none.
        image_crop: Side in pixels of the crop that the image encoder sees, 0 for no image; if none, 76 if the data
            have images.
        horizon: Steps of a window, chunks times `action_steps`.
        action_steps: Steps executed before the next observation.
        history: Observed steps.
        widths: Channels of the U-Net's levels; the paper's are 512, 1024, 2048.
        time_features: Size of the time embedding.
        kernel_size: Width of the U-Net's kernels.
        groups: Groups of its normalisations.
        point_features: Output of the point encoder.
        state_features: Hidden and output size of the state encoder.
        image_features: Output of the image encoder.
        objective: "composite", or "consistency" for FlowPolicy's.
        time_sampler: Rule of the anchor time, see `sampler.flow_times`; if none, "v0" for composite and "cfm" for
            consistency.
        mean_t: Mean of the first logit-normal draw.
        std_t: Its deviation.
        mean_r: Mean of the second logit-normal draw.
        std_r: Its deviation.
        ratio: Share of samples whose anchor is the earlier of the two draws.
        eps: Smallest flow time, where inference starts.
        delta: Step between the two times of "cfm".
        freq_weight: Weight of the frequency term (lambda). It multiplies a sum over the window: tune it anew when
            horizon or `action_dim` changes.
        freq_mode: See `losses.frequency_term`.
        band_weights: One weight a frequency, for "dct_band".
        time_scope: "proximal" (the executed chunk) or "window".
        freq_scope: "window" or "proximal".
        proximal_start: First step of the proximal chunk: 0 as released, `history - 1` to match what is executed.
        segments: Segments of the consistency objective; 1 with anchored sampling.
        velocity_weight: Weight of its velocity term (alpha).
        stop_gradient: Whether its anchor is held constant, as in Consistency-FM; not in FlowPolicy's code.
        inference_steps: Network calls that generate a window.
        warmup_steps: Steps of linear warm-up before the cosine to 0.
        optimizer: By default AdamW, learning rate 1e-4, betas 0.95 and 0.999, weight decay 1e-6.
        lr_scheduler: Stepped once per optimiser step; by default warm-up and cosine over the whole run.
        seed: Of noise and times.
        init_from: A checkpoint of this class, or a folder of `save_pretrained`, whose weights and normaliser to
            start from.

    Raises:
        ValueError: If a number is out of range, the window does not pass the U-Net, the executed steps do not fit into
            it, or options exclude each other.
    """

    block_types = (ResidualBlock, PointEncoder, ImageEncoder)

    def __init__(
        self,
        action_dim: int | None = None,
        state_dim: int | None = None,
        point_channels: int | None = None,
        image_crop: int | None = None,
        horizon: int = 12,
        action_steps: int = 4,
        history: int = 2,
        widths: list[int] = [512, 1024, 2048],  # noqa: B006
        time_features: int = 128,
        kernel_size: int = 5,
        groups: int = 8,
        point_features: int = 64,
        state_features: int = 64,
        image_features: int = 64,
        objective: Objective = "composite",
        time_sampler: TimeSampler | None = None,
        mean_t: float = 0.6,
        std_t: float = 1.6,
        mean_r: float = 4.0,
        std_r: float = 1.6,
        ratio: float = 0.15,
        eps: float = 0.01,
        delta: float = 0.01,
        freq_weight: float = 1e-4,
        freq_mode: FreqMode = "dct_l2",
        band_weights: list[float] | None = None,
        time_scope: Scope = "proximal",
        freq_scope: Scope = "window",
        proximal_start: int = 0,
        segments: int = 2,
        velocity_weight: float = 1e-5,
        stop_gradient: bool = False,
        inference_steps: int = 1,
        warmup_steps: int = 500,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int = 0,
        init_from: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Outside the CLI these are functions, which a checkpoint cannot hold.
        self.hparams.update({k: None for k in ("optimizer", "lr_scheduler") if callable(self.hparams[k])})
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.time_sampler = time_sampler or ("v0" if objective == "composite" else "cfm")
        # What would be refused in the first step, or never, is refused at once.
        sizes = {name: self.hparams[name] for name in SIZES}
        self._config(**{name: size for name, size in sizes.items() if size is not None})
        chosen = {
            "objective": (objective, Objective),
            "time_sampler": (self.time_sampler, TimeSampler),
            "freq_mode": (freq_mode, FreqMode),
            "time_scope": (time_scope, Scope),
            "freq_scope": (freq_scope, Scope),
        }
        for name, (value, known) in chosen.items():
            if value not in get_args(known):
                raise ValueError(f"{name} {value!r} is none of {', '.join(get_args(known))}")
        ranges = {
            (0, math.inf): ("freq_weight", "velocity_weight", "std_t", "std_r", "warmup_steps"),
            (1, math.inf): ("segments",),
            (0, 1): ("ratio", "delta"),
            (0, 2**32 - 1): ("seed",),
        }
        for (low, high), names in ranges.items():
            for name in names:
                if not low <= self.hparams[name] <= high:
                    raise ValueError(f"{name} {self.hparams[name]} is outside [{low}, {high}]")
        window = torch.zeros(1, horizon if freq_scope == "window" else action_steps, 1)
        frequency_term(window, window, freq_mode, band_weights=band_weights)
        if objective == "consistency" and segments > 1 and self.time_sampler != "cfm":
            raise ValueError(
                f"time_sampler {self.time_sampler} does not keep the anchor in the student's segment: set segments to 1"
            )
        if not 0 <= proximal_start <= horizon - action_steps:
            raise ValueError(f"proximal_start {proximal_start} is outside [0, {horizon - action_steps}]")
        self.network: PolicyNetwork | None = None

    # ------------------------------------------------------------------------------------------- building

    def _config(self, **sizes: int) -> PolicyConfig:
        names = (
            "horizon", "action_steps", "history", "time_features", "kernel_size", "groups", "point_features",
            "state_features", "image_features", "inference_steps", "eps",
        )  # fmt: skip
        return PolicyConfig(
            **sizes, widths=tuple(self.hparams["widths"]), **{name: self.hparams[name] for name in names}
        )

    def setup(self, stage: str) -> None:
        """Take the sizes that were left open from the data, and compare the others.

        Raises:
            ValueError: If the data have other sizes than the policy.
        """
        data = self.trainer.datamodule
        if data is None or not hasattr(data, "normalizer_data"):
            return
        for name in ("horizon", "history", "action_steps"):
            if getattr(data, name) != self.hparams[name]:
                raise ValueError(
                    f"data.{name} is {getattr(data, name)}, model.{name} is {self.hparams[name]}: give both one value"
                )
        shapes = data.shapes()
        found = {
            "action_dim": shapes["action"][-1],
            "state_dim": shapes.get("state", (0,))[-1],
            "point_channels": shapes.get("point_cloud", (0,))[-1],
        }
        for name, size in found.items():
            wanted = self.hparams[name]
            if wanted is None:
                self.hparams[name] = size
            elif wanted and wanted != size:
                raise ValueError(f"model.{name} is {wanted} and the demonstrations have {size}: leave it out")
        if self.hparams["image_crop"] is None:
            self.hparams["image_crop"] = 76 * ("image" in shapes)
        elif self.hparams["image_crop"] and "image" not in shapes:
            raise ValueError(
                f"model.image_crop is {self.hparams['image_crop']} and the demonstrations have no image: leave it out, "
                "or name the images in data.keys (in Meta-World: data.observe)"
            )

    def configure_model(self) -> None:
        """Build the network once; shard it under FSDP2."""
        if self.network is None:
            sizes = {name: self.hparams[name] for name in SIZES}
            if missing := [name for name, size in sizes.items() if size is None]:
                raise ValueError(f"without demonstrations FocalPolicy needs to be told {', '.join(missing)}")
            self.network = PolicyNetwork(self._config(**sizes))
            if self.hparams["init_from"] and self._trainer is not None and self.trainer.ckpt_path is None:
                source = self.hparams["init_from"]
                fill(self.network, without("network.", read_state(source)), f"init_from {source}")
        # What is called is sharded: the encoder and the U-Net, not the module that joins them.
        shard(self.network.obs_encoder, self.block_types, self.device_mesh)
        shard(self.network.model, self.block_types, self.device_mesh)

    def on_fit_start(self) -> None:
        """Fit the normaliser, unless it came with the weights."""
        assert self.network is not None
        if not self.network.normalizer.fitted:
            data = self.trainer.datamodule
            if data is None:
                raise ValueError(
                    "the normaliser is not fitted: use a data module, or call network.normalizer.fit first"
                )
            self.network.normalizer.fit(data.normalizer_data())

    def _require_normalizer(self) -> None:
        assert self.network is not None
        if not self.network.normalizer.fitted:
            raise ValueError("the policy has no normaliser yet: fit it first, or name a checkpoint with --ckpt_path")

    on_validation_start = on_test_start = on_predict_start = _require_normalizer

    # ------------------------------------------------------------------------------------------- training

    def forward(self, observation: dict[str, Tensor], noise: Tensor, steps: int | None = None) -> Tensor:
        """Raw observations `[b, history, ...]` and standard normal noise `[b, L, d]` -> actions `[b, L, d]`.

        Actions are in their own units; `executed` is the slice to execute.
        """
        assert self.network is not None, "call configure_model() first"
        return self.network(observation, noise, steps)

    @property
    def executed(self) -> slice:
        """The steps of a window that are executed: the one of the newest observation and those after it."""
        assert self.network is not None, "call configure_model() first"
        return self.network.config.executed

    def draws(self, index: Tensor, epoch: int) -> tuple[Tensor, list[Tensor], Tensor]:
        """The random numbers of some samples: a function of (seed, epoch, index) alone (Philox, counter-based).

        Returns:
            Noise `[b, L, d]`, the four draws `[b]` that `flow_times` takes, and the corner `[b, 2]` of the image crop.
        """
        length, d = self.hparams["horizon"], self.hparams["action_dim"]
        normal, uniform = [], []
        for item in index.tolist():
            key = np.array([self.hparams["seed"], epoch], dtype=np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, item]))
            normal.append(generator.standard_normal(length * d + 2, dtype=np.float32))
            uniform.append(generator.random(4, dtype=np.float32))
        n = torch.from_numpy(np.stack(normal)).to(self.device)
        u = torch.from_numpy(np.stack(uniform)).to(self.device)
        return n[:, 2:].reshape(-1, length, d), [u[:, 0], n[:, 0], n[:, 1], u[:, 1]], u[:, 2:]

    def objective(self, batch: Any, epoch: int) -> dict[str, Term]:
        """The terms of the loss on a batch, see `losses`."""
        assert self.network is not None
        h, network = self.hparams, self.network
        noise, (u_tau, n_a, n_b, u_mix), corner = self.draws(batch.index, epoch)
        names: tuple[str, ...] = ("mean_t", "std_t", "mean_r", "std_r", "ratio", "eps", "delta")
        tau, r = flow_times(u_tau, n_a, n_b, u_mix, self.time_sampler, **{name: h[name] for name in names})
        actions = network.normalizer("action", batch.action)
        condition = network.condition(batch.observation, corner if self.training else None)

        def velocity(x: Tensor, s: Tensor) -> Tensor:
            return network.velocity(x, s, condition).to(x.dtype)

        shared = {"actions": actions, "noise": noise, "tau": tau, "r": r, "valid": batch.valid}
        if h["objective"] == "consistency":
            names = ("segments", "delta", "stop_gradient")
            return consistency_objective(velocity, **shared, **{name: h[name] for name in names})
        names = ("action_steps", "proximal_start", "time_scope", "freq_scope", "freq_mode", "band_weights")
        return foresight_composite_objective(velocity, **shared, **{name: h[name] for name in names})

    def _mean(self, term: Term) -> Tensor:
        """The mean over the samples of all ranks, with this rank's share of the gradient."""
        count = term.count.detach().float()
        if self._trainer is not None and self.trainer.world_size > 1:
            # Values and gradients are averaged over ranks, so the counts are too.
            count = self.trainer.strategy.reduce(count.clone(), reduce_op="mean")
        return term.total / count.clamp(min=1e-12)

    def _loss(self, terms: dict[str, Term]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and its parts for the log."""
        parts = {name: self._mean(term) for name, term in terms.items()}
        other = "freq" if "freq" in parts else "velocity"
        return parts["time"] + self.hparams[f"{other}_weight"] * parts[other], parts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One batch."""
        loss, parts = self._loss(self.objective(batch, self.current_epoch))
        self.log("train/loss", loss, batch_size=len(batch.index), sync_dist=True, prog_bar=True)
        if "freq" in parts:
            steps = self.hparams["action_steps" if self.hparams["freq_scope"] == "proximal" else "horizon"]
            parts["freq_per_element"] = parts["freq"] / (steps * self.hparams["action_dim"])
        for name, value in parts.items():
            self.log(f"train/{name}", value.detach(), batch_size=len(batch.index), sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, linear warm-up and cosine, unless others are given."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer is not None:
            optimizer = self.optimizer(parameters)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, fused=True)
        if self.lr_scheduler is not None:
            scheduler = self.lr_scheduler(optimizer)
        else:
            warm = self.hparams["warmup_steps"]

            def rate(step: int) -> float:
                if step <= warm:
                    return step / warm if warm else 1.0
                # Asked for only now, in training: asking earlier sets up the loader before a resumed run has given it
                # its position.
                total = self.trainer.estimated_stepping_batches
                return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))

            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    # ----------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, batch: Any, stage: str) -> None:
        """Loss and errors on held-out windows, with the same noise in every epoch."""
        assert self.network is not None
        loss, _ = self._loss(self.objective(batch, 0))
        noise, _, _ = self.draws(batch.index, 0)
        predicted = self.network.normalizer("action", self(batch.observation, noise))
        target = self.network.normalizer("action", batch.action)
        now = self.executed
        errors = {
            "executed_error": time_term(predicted[:, now], target[:, now], batch.valid[:, now]),
            "window_error": time_term(predicted, target, batch.valid),
        }
        values = {"loss": loss} | {name: self._mean(term) for name, term in errors.items()}
        means, windows = torch.stack(list(values.values())), torch.tensor(float(len(batch.index)), device=self.device)
        if self.trainer.world_size > 1:  # Lightning's own reduction would round the mean number of windows
            means = self.trainer.strategy.reduce(means, reduce_op="mean")
            windows = self.trainer.strategy.reduce(windows, reduce_op="sum")
        for name, value in zip(values, means, strict=True):
            self.log(f"{stage}/{name}", value, batch_size=int(windows), prog_bar=name == "loss")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and errors."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and errors."""
        self._evaluate(batch, "test")

    @property
    def prediction_columns(self) -> dict[str, list[str]]:
        """Names of the columns that `predict` writes for an action."""
        h = self.hparams
        return {"action": [f"action_{i}_{j}" for i in range(h["action_steps"]) for j in range(h["action_dim"])]}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """`index` of the window and `action`, the executed steps `[b, H d]` in their own units."""
        noise, _, _ = self.draws(batch.index, 0)
        window = self(batch.observation, noise)
        return {"index": batch.index, "action": window[:, self.executed].flatten(1)}

    # ---------------------------------------------------------------------------------------------- reuse

    def load_averages(self, checkpoint: str | Path) -> "FocalPolicy":
        """Replace the weights by the averages that `callbacks.EMA` kept in a checkpoint.

        Raises:
            ValueError: If the checkpoint has none.
        """
        states = read_checkpoint(Path(checkpoint), ["callbacks"]).get("callbacks", {})
        average = next((s["average"] for name, s in states.items() if name.startswith("EMA")), None)
        if not average:
            raise ValueError(f"{checkpoint} holds no averaged weights: it was trained without callbacks.EMA")
        self.load_state_dict(self.state_dict() | average)
        return self

    def policy(self, seed: int = 0, device: str | torch.device = "cpu") -> RolloutPolicy:
        """The policy as an object for a control loop; it shares the weights where the device is the same."""
        assert self.network is not None, "call configure_model() first"
        return RolloutPolicy(self.network, seed, device)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights and normaliser as `model.safetensors` and the sizes as `config.json`."""
        assert self.network is not None, "call configure_model() first"
        save_pretrained(self.network, folder)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "FocalPolicy":
        """Read what `save_pretrained` wrote, from a folder or a repository of the Hugging Face hub.

        Raises:
            FileNotFoundError: If there is no such folder and it cannot be downloaded.
            ValueError: If the files are of another class or a newer version.
        """
        network = load_pretrained(source)
        options: dict[str, Any] = {k: list(v) if k == "widths" else v for k, v in vars(network.config).items()}
        module = cls(**options)
        module.network = network
        return module.eval()
