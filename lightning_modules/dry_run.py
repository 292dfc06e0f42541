"""What a setup needs, without training: `fulgurite fit --dry_run`."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_modules.hub import FILES


class Memory(NamedTuple):
    """Bytes that training keeps on one device.

    Attributes:
        weights: parameters and buffers.
        gradients: of the trained parameters; under DDP a second time, for what is being sent.
        optimizer: state of the optimisers.
    """

    weights: float
    gradients: float
    optimizer: float


def build_on_meta(trainer: Trainer, model: LightningModule) -> list[Optimizer]:
    """Build a module and its optimisers on the meta device: shapes and types without memory.

    The trainer is told that a checkpoint will fill the module, so that no weights are read or measured.

    Args:
        trainer: has the module and, if there are data, the data module attached.
        model: not built yet.

    Returns:
        The optimisers, each with the state that it has after a step.
    """
    trainer.ckpt_path = "to be filled"
    model.setup("fit")
    with torch.device("meta"), trainer.precision_plugin.module_init_context():
        model.configure_model()
    model.to("meta")  # what configure_model put on the CPU by name
    configured: Any = model.configure_optimizers()
    if isinstance(configured, dict):
        configured = configured["optimizer"]
    elif isinstance(configured, tuple) and isinstance(configured[0], list):
        configured = configured[0]
    optimizers = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group |= {"fused": False, "foreach": False}  # kernels for real devices; the state is the same
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    return optimizers


def memory(model: nn.Module, optimizers: list[Optimizer], devices: int = 1, strategy: str = "one") -> Memory:
    """Estimate what training keeps on one device.

    Not counted: activations, the batch, the blocks that FSDP2 gathers while they run, half-precision copies that
    autocast makes, averages of weights, and what a method keeps outside its modules.

    Args:
        model: on any device, the meta device included.
        optimizers: that have made a step.
        devices: that share the work.
        strategy: `one` device; `ddp`, which keeps everything on each and gradients twice; `fsdp2`, which shards all
            but the buffers.
    """
    share = devices if strategy == "fsdp2" else 1
    gradients = sum(_bytes(p) for p in model.parameters() if p.requires_grad) / share
    state = sum(_bytes(v) for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, Tensor))
    return Memory(
        sum(map(_bytes, model.parameters())) / share + sum(map(_bytes, model.buffers())),
        gradients * (2 if strategy == "ddp" else 1),
        state / share,
    )


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def describe(value: Any, name: str = "batch", indent: str = "  ") -> Iterator[str]:
    """Lines with the name, type and shape of everything in a batch; of a list, its first item."""
    if isinstance(value, (Tensor, np.ndarray)):
        dtype = str(value.dtype).removeprefix("torch.")
        yield f"{indent}{name}: {dtype} {list(value.shape)}"
        return
    inner: dict[str, Any] = {}
    kind = type(value).__name__
    if is_dataclass(value):
        inner = {f.name: getattr(value, f.name) for f in fields(value)}
    elif hasattr(value, "_asdict"):
        inner = value._asdict()
    elif isinstance(value, dict):
        inner = {str(k): v for k, v in value.items()}
    elif isinstance(value, (list, tuple)):
        kind = f"{kind} of {len(value)}"
        inner = {"[0]": value[0]} if len(value) else {}
    yield f"{indent}{name}: {kind}"
    for key, part in inner.items():
        yield from describe(part, key, indent + "  ")


def _parts(module: nn.Module, indent: str) -> Iterator[str]:
    """A line for each part that has parameters; of a single part, its own parts too."""
    counts = {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()}
    counts = {name: count for name, count in counts.items() if count}
    for name, count in counts.items():
        yield f"{indent}{name}: {count:,}"
    if len(counts) == 1:
        yield from _parts(module.get_submodule(next(iter(counts))), indent + "  ")


def _zeros(data: LightningDataModule) -> tuple[Any, str]:
    """In place of images that are not there: one image of zeros of the size that the options say, and that size."""
    side, channels = (getattr(data, name, None) for name in ("image_size", "channels"))
    if side is None or channels is None:
        return None, ""
    image = torch.zeros(1, channels, side, side)
    text = f"; where its size matters, an image is {channels} x {side} x {side}: data.channels and data.image_size"
    return SimpleNamespace(train_dataloader=lambda: [(image,)]), text


def _absent(model: LightningModule) -> Iterator[str]:
    """Files of weights that the module's options name and that are not there."""
    for name, value in model.hparams.items():
        for source in value if isinstance(value, list) else [value]:
            if isinstance(source, str) and Path(source).suffix in FILES and not Path(source).exists():
                yield f"{name} {source}"


def dry_run(trainer: Trainer, model: LightningModule, data: LightningDataModule | None, devices: int) -> Iterator[str]:
    """Lines about the sizes of a fit: batch, parameters, memory. Prepares the data, and builds the rest on paper.

    Args:
        trainer: of one process on the CPU.
        model: not built yet.
        data: if it is not available, the lines say why, and the module is built without it where it can be, perhaps
            with an image of zeros of the size that the data's options give.
        devices: that the fit would have; 1 if that is open.

    Raises:
        ValueError: as the fit itself would.
        FileNotFoundError: likewise.
    """
    missing: Exception | None = None
    batch, instead = None, ""
    if data is not None:
        trainer._data_connector.attach_data(model, datamodule=data)
        try:
            data.prepare_data()
            data.setup("fit")
            batch = next(iter(data.train_dataloader()))
        except (ValueError, OSError) as error:
            missing = error
            trainer.datamodule, instead = _zeros(data)
    model.trainer = trainer
    try:
        optimizers = build_on_meta(trainer, model)
    except (ValueError, RuntimeError) as error:  # the second where zeros do not fit
        raise missing or error from None
    yield f"{type(model).__module__}.{type(model).__name__}; nothing is trained or written"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield f"parameters: {sum(p.numel() for p in model.parameters()):,}"
    yield f"trainable:  {trained:,}"
    yield from _parts(model, "  ")
    for name in _absent(model):
        yield f"not there, and a fit needs it: {name}"
    yield "memory on each device in MiB, estimated:"
    yield f"  {'':20}{'weights':>12}{'gradients':>12}{'optimiser':>12}{'sum':>12}"
    rows = [("one device", 1, "one"), ("DDP", 2, "ddp")]
    rows += [(f"FSDP2 on {n} devices", n, "fsdp2") for n in sorted({2, 8, devices} - {1})]
    for label, n, strategy in rows:
        parts = memory(model, optimizers, n, strategy)
        yield f"  {label:20}" + "".join(f"{x / 2**20:12,.1f}" for x in (*parts, sum(parts)))
    yield "  not counted: activations, the batch, blocks that FSDP2 gathers while they run, autocast's copies, averages"
    yield "  of weights, what a method keeps outside its modules"
    if missing is not None:
        yield f"batch: no data ({' '.join(str(missing).split())}){instead}"
    elif batch is not None:
        yield "batch of all devices together:"
        yield from describe(batch, type(data).__name__)
