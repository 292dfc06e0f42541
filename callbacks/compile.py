"""torch.compile, block by block."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class Compile(Callback):
    """Compiles in place every module of the types in the method's `block_types`; names of weights stay as they are.

    Args:
        backend: of `torch.compile`; the default needs a C++ compiler on CPUs.
        dynamic: compile once for all shapes; by default torch decides.

    Raises:
        ValueError: if the method does not say what its blocks are.
    """

    def __init__(self, backend: str = "inductor", dynamic: bool | None = None) -> None:
        self.backend, self.dynamic = backend, dynamic
        self._done = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a method without blocks."""
        if not getattr(pl_module, "block_types", None):
            raise ValueError(f"{type(pl_module).__name__} names no block_types: leave out trainer/compile")

    def _compile(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._done:
            return
        types: Any = pl_module.block_types
        for module in pl_module.modules():
            if isinstance(module, tuple(types)):
                module.compile(backend=self.backend, dynamic=self.dynamic)
        self._done = True

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _compile
