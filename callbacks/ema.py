"""An exponential moving average of the weights, on one device, under DDP and under FSDP2."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from datamodules.checks import check_above, check_least

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def ema_decay(step: int, decay: float, power: float | None, inverse_gamma: float = 1.0, start: int = 0) -> float:
    """The decay after `step` updates.

    Constant without `power`; otherwise `min(decay, 1 - (1 + step / inverse_gamma) ** -power)`, 0 until `start`, the
    warm-up that diffusion models use (Karras et al.'s and diffusers' `EMAModel`).
    """
    step = step - start
    if step <= 0:
        return 0.0
    return decay if power is None else min(decay, 1 - (1 + step / inverse_gamma) ** -power)


class EMA(Callback):
    """Keeps averaged weights, and evaluates with them.

    After every optimiser step `average = d * average + (1 - d) * weight` with `d` from `ema_decay`, in float32, each
    rank on the part of the weights that it holds; a weight that is unfrozen later joins in then. Frozen weights,
    buffers, and the weights of batch normalisation, which belong to its running statistics, are not averaged but used
    as they are (so does diffusion policy's `EMAModel`). Validation, test and prediction run with the averaged weights;
    the checkpoint's `state_dict` holds the raw ones (which `load_from_checkpoint` and `init_from` therefore give), and
    the averages are saved as the state of this callback, whole (memory on saving: one float32 copy of the trainable
    weights on the CPU), so that a run can go on with another strategy or number of ranks.

    Args:
        decay: largest decay, in [0, 1).
        power: exponent of the warm-up, above 0; none means a constant decay.
        inverse_gamma: time scale of the warm-up in steps, above 0.
        start: steps before averaging begins; until then the average is the weights.

    Raises:
        ValueError: if one of them is out of range.
    """

    def __init__(
        self, decay: float = 0.999, power: float | None = None, inverse_gamma: float = 1.0, start: int = 0
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay {decay} is outside [0, 1)")
        check_above(0, power=power, inverse_gamma=inverse_gamma)
        check_least(0, start=start)
        self.decay, self.power, self.inverse_gamma, self.start = decay, power, inverse_gamma, start
        self.average: dict[str, Tensor] = {}
        self.updates = 0
        self._last_step = 0
        self._loaded: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] = {}

    @property
    def state_key(self) -> str:
        """One average per setting."""
        return self._generate_state_key(decay=self.decay, power=self.power)

    # ------------------------------------------------------------------------------------------- averaging

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the weights, or from the stored averages."""
        self._last_step = trainer.global_step
        self._prepare(pl_module)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average once for every batch in which an optimiser stepped."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        self.updates += 1
        weight = 1 - ema_decay(self.updates, self.decay, self.power, self.inverse_gamma, self.start)
        for name, parameter in _trainable(pl_module):
            if name not in self.average:  # it was frozen until now
                self.average[name] = parameter.detach().float().clone()
            self.average[name].lerp_(parameter.detach().float(), weight)

    @torch.no_grad()
    def _prepare(self, pl_module: LightningModule) -> None:
        if self.average and not self._loaded:
            return
        loaded, self._loaded = self._loaded, {}
        for name, parameter in _trainable(pl_module):
            average = parameter.detach().float().clone()
            if name in loaded:
                average.copy_(_like(loaded[name], parameter))
            self.average[name] = average

    # ------------------------------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def _swap_in(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.average and not self._loaded:
            return
        _reshard(pl_module)
        self._prepare(pl_module)
        for name, parameter in _trainable(pl_module):
            if name in self.average:
                self._raw[name] = parameter.detach().clone()
                parameter.copy_(self.average[name])

    @torch.no_grad()
    def _swap_out(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _reshard(pl_module)
        for name, parameter in _trainable(pl_module):
            if name in self._raw:
                parameter.copy_(self._raw[name])
        self._raw = {}

    on_validation_start = on_test_start = on_predict_start = _swap_in
    on_validation_end = on_test_end = on_predict_end = _swap_out

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the raw weights behind."""
        self._swap_out(trainer, pl_module)

    # ------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Number of updates and the whole averages on the CPU (on every rank: gathering needs them all)."""
        average = self.average or self._loaded
        return {"updates": self.updates, "average": {k: _whole(v) for k, v in average.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the averages until the weights that they belong to are there."""
        self.updates, self._loaded, self.average = state["updates"], state["average"], {}


def _trainable(module: LightningModule) -> list[tuple[str, Tensor]]:
    fixed = {p for part in module.modules() if isinstance(part, BATCH_NORMS) for p in part.parameters(recurse=False)}
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad and p not in fixed]


def _reshard(module: LightningModule) -> None:
    """After a forward pass without a backward, FSDP2 leaves the outermost weights gathered: shard them again."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu().clone()


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of `parameter`."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    return distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements)
