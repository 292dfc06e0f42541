"""What the methods share about ranks: the FSDP2 strategy, sharding, gathering with gradients, means, consolidation."""

import io
import pickle
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

_META = "meta.pt"  # where Lightning puts what is not a tensor of the model or an optimiser


class FSDP2Strategy(ModelParallelStrategy):
    """Fully sharded data parallelism over all processes, on GPUs (NCCL) or CPUs (gloo).

    Lightning's `ModelParallelStrategy` takes the number of *nodes* as the data-parallel size when it is "auto"; here
    it is the number of processes. Sharded checkpoints are inspected before anything in them is unpickled.

    Args:
        save_distributed_checkpoint: `False` writes one ordinary file; `True` a folder with one file per rank, which
            `fulgurite consolidate` turns into an ordinary file.
        process_group_backend: by default NCCL on GPUs and gloo on CPUs.
    """

    def __init__(self, save_distributed_checkpoint: bool = False, process_group_backend: str | None = None) -> None:
        super().__init__(
            data_parallel_size=1,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
        )

    def setup_environment(self) -> None:
        """Spread the data-parallel axis over all processes of all nodes."""
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a folder; refuse a folder whose metadata would run code."""
        if Path(checkpoint_path).is_dir():
            read_metadata(Path(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only=True)


def shard(module: nn.Module, block_types: Iterable[type[nn.Module]], mesh: DeviceMesh | None) -> nn.Module:
    """Shard each block of the given types, then the rest (FSDP2). Does nothing without a mesh or when already done.

    What is sharded is what is called: parameters are gathered when a block's `forward` runs, so its weights must not
    be used from outside.

    Args:
        module: built on any device, the meta device included.
        block_types: types of the blocks that are gathered one at a time.
        mesh: `LightningModule.device_mesh`, whose `data_parallel` axis is used; `None` outside FSDP2.

    Returns:
        The same module.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if mesh is None or isinstance(module, FSDPModule):
        return module
    data_parallel = mesh["data_parallel"]
    block_types = tuple(block_types)
    for block in module.modules():
        if isinstance(block, block_types) and block is not module:
            fully_shard(block, mesh=data_parallel)
    fully_shard(module, mesh=data_parallel)
    return module


def gather_with_gradient(x: Tensor) -> Tensor:
    """The slices of all ranks, joined along the first axis in the order of the ranks, with gradients.

    The backward pass sums over ranks. A loss computed from the gathered tensor on every rank, followed by the
    averaging of gradients that DDP and FSDP do, therefore has the gradient of one process with the whole batch.

    Args:
        x: `[b, ...]`, the same shape on every rank.

    Returns:
        `[world * b, ...]`; `x` itself on one process.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return x
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(x.contiguous()))


def gather_batch(x: Tensor) -> Tensor:
    """The slices of all ranks, joined along the first axis, without gradients; their lengths may differ.

    Args:
        x: `[b_r, ...]`, equal on every rank but for the first axis.

    Returns:
        `[sum of b_r, ...]`; `x` itself on one process.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return x
    x = x.detach()
    lengths = [torch.zeros((), dtype=torch.long, device=x.device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor(len(x), device=x.device))
    longest = int(max(lengths))
    padded = torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]).contiguous()
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(n)] for part, n in zip(parts, lengths, strict=True)])


def gather_rows(rows: dict[str, Any]) -> dict[str, Any]:
    """Join a dict of lists or CPU tensors over the ranks, in the order of the ranks; no gradients.

    Every rank gets the whole. On one process the input is returned.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows
    parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, rows)
    first = parts[0]
    return {
        k: torch.cat([p[k] for p in parts]) if isinstance(v, Tensor) else [x for p in parts for x in p[k]]
        for k, v in first.items()
    }


# ---------------------------------------------------------------------------------------------- checkpoints


class _Allowed(pickle.Unpickler):
    """Reads the metadata of a sharded checkpoint: plain containers and PyTorch's own records, nothing that acts."""

    _NAMES = {  # noqa: RUF012
        ("builtins", "set"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code; refused")


def read_metadata(folder: Path) -> Any:
    """The `.metadata` of a sharded checkpoint, read with an allow-list, and a look at the pickles that it points to.

    PyTorch reads what is not a tensor (a learning rate, say) from the ranks' files with `weights_only=False`. So each
    of these entries is read here first, with `weights_only=True`.

    Raises:
        FileNotFoundError: if the folder is no sharded checkpoint.
        ValueError: if reading it would need anything that is not on the list.
    """
    path = folder / ".metadata"
    if not path.is_file() or not (folder / _META).is_file():
        raise FileNotFoundError(f"{folder} is no sharded checkpoint: it has no .metadata and {_META}")
    try:
        with path.open("rb") as file:
            metadata = _Allowed(file).load()
        for index, place in metadata.storage_data.items():
            if type(metadata.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata":
                path = folder / place.relative_path
                if place.transform_descriptors:
                    raise pickle.UnpicklingError("an entry is compressed, and so cannot be looked at")
                with path.open("rb") as file:
                    file.seek(place.offset)
                    torch.load(io.BytesIO(file.read(place.length)), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is not safe to read: {_reason(error)}") from None
    except Exception as error:  # what a broken file makes an unpickler raise has no common kind
        raise ValueError(f"{path} is broken: {_reason(error) or type(error).__name__}") from None
    return metadata


def _reason(error: Exception) -> str:
    """What PyTorch says after its advice to trust the file."""
    return " ".join(str(error).split()).split("WeightsUnpickler error: ")[-1][:200]


def read_checkpoint(path: Path, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """What a checkpoint holds beside tensors (hyper-parameters, loops, callbacks), without running code from it.

    Args:
        path: a file, or the folder of a sharded checkpoint.
        keys: only these entries.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it would execute code on load, or is no checkpoint.
    """
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    if path.is_dir():
        read_metadata(path)
    file = path / _META if path.is_dir() else path
    try:
        # files of PyTorch before 1.6 are no zip archives and cannot be mapped into memory
        mmap = not path.is_dir() and zipfile.is_zipfile(file)
        content = torch.load(file, weights_only=True, map_location="cpu", mmap=mmap)
    except pickle.UnpicklingError as error:
        reason = _reason(error)
        if "GLOBAL" in reason or "Trying to" in reason or "Unsupported class" in reason:
            raise ValueError(f"checkpoint {path} would execute code on load; refused") from None
        raise ValueError(f"checkpoint {path} cannot be read: {reason}") from None
    except Exception as error:  # what a broken file makes an unpickler raise has no common kind
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"checkpoint {path} cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"checkpoint {path} holds a {type(content).__name__}, not a checkpoint")
    return content if keys is None else {k: content[k] for k in keys if k in content}


def log_means(module: LightningModule, values: dict[str, Tensor], count: int, prog_bar: bool = False) -> None:
    """Log the mean over all samples of an evaluation, whatever their spread over batches and ranks.

    Lightning's own reduction over ranks divides by a rounded number of samples where ranks have unequal ones.

    Args:
        module: In a step that every rank takes.
        values: Means over this rank's samples, by log name.
        count: Of these samples; with 0 the values do not count, not even if they are not a number.
        prog_bar: Whether the progress bar shows them.
    """
    stacked = torch.stack([value.detach().float() for value in values.values()])
    totals = torch.cat([(stacked * count if count else torch.zeros_like(stacked)), stacked.new_tensor([float(count)])])
    if module.trainer.world_size > 1:
        totals = module.trainer.strategy.reduce(totals, reduce_op="sum")
    if samples := int(totals[-1]):
        means = dict(zip(values, totals[:-1] / samples, strict=True))
        module.log_dict(means, batch_size=samples, prog_bar=prog_bar, rank_zero_only=False)


def consolidate(folder: Path, output: Path | None = None) -> Path:
    """Turn a sharded checkpoint into one ordinary file that a single process resumes from, tests and loads.

    Args:
        folder: written by FSDP2 with `save_distributed_checkpoint=True`.
        output: the file to write; by default the folder's name with `.consolidated.ckpt`.

    Returns:
        The file written.

    Raises:
        FileNotFoundError: if `folder` is no sharded checkpoint.
        FileExistsError: if `output` exists.
        ValueError: if the metadata is not safe to read.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    output = output or folder.with_name(folder.name.removesuffix(".ckpt") + ".consolidated.ckpt")
    if output.exists():
        raise FileExistsError(f"{output} exists already: name another file with --output")
    if folder.is_file():
        raise ValueError(f"{folder} is one file already: there is nothing to join")
    checkpoint = read_checkpoint(folder)  # also checks that the metadata is safe
    tensors: dict[str, Any] = {}
    _load_state_dict(
        tensors, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    optimizers = sorted((k for k in tensors if k.startswith("optimizer_")), key=lambda k: int(k.split("_")[1]))
    checkpoint |= {
        "state_dict": tensors.get("state_dict", {}),
        # an optimiser without state, such as plain SGD, leaves no trace of it in the files
        "optimizer_states": [{"state": {}, **tensors[k]} for k in optimizers],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".part")
    try:
        torch.save(checkpoint, unfinished)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{output} cannot be written, is the disk full? ({str(error).splitlines()[0]})") from None
    else:
        return unfinished.rename(output)
    finally:
        unfinished.unlink(missing_ok=True)


def consolidate_main(args: list[str]) -> None:
    """`fulgurite consolidate DIR [--output FILE]`."""
    import argparse

    parser = argparse.ArgumentParser(
        "fulgurite consolidate", description="Turn a sharded checkpoint into one ordinary file."
    )
    parser.add_argument("folder", type=Path, help="the checkpoint folder that FSDP2 wrote")
    parser.add_argument("--output", type=Path, help="the file to write (default: beside the folder)")
    options = parser.parse_args(args)
    sys.stdout.write(f"{consolidate(options.folder, options.output)}\n")
