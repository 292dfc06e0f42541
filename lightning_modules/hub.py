"""Folders of `save_pretrained`: written whole or not at all, read from a path or from the Hugging Face hub.

folder/config.json         format version, class, options
folder/model.safetensors   weights
folder/README.md           a model card, written once and yours to edit
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_modules.distributed import read_checkpoint

Kind = TypeVar("Kind")
FILES = (".ckpt", ".pt", ".pth", ".safetensors")  # what ends so is a file, not an id on the hub

CARD = """---
library_name: fulgurite
tags:
- {name}
---

# {name}

{purpose}

```python
from lightning_modules import {name}

model = {name}.from_pretrained("FOLDER OR HUB ID")
```

{parameters:,} numbers in all. The options are in `config.json`. What the model was trained on, and how good it is, is
for you to add.
"""


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder whose files are moved to `folder` at the end; nothing is left of it after an error.

    Args:
        folder: made if need be; files of the same names are replaced.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        yield unfinished
        for path in sorted(p for p in unfinished.rglob("*") if p.is_file()):
            target = folder / path.relative_to(unfinished)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_folder(
    folder: str | Path, kind: type[nn.Module], version: int, config: dict[str, Any], state: dict[str, Tensor]
) -> None:
    """Write weights, config and, where there is none, a model card.

    Args:
        folder: made if need be.
        kind: the class whose `from_pretrained` reads it.
        version: of the format.
        config: plain values.
        state: a state dict; shards are gathered.
    """
    from safetensors.torch import save_file

    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in state.items():
        tensor = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        whole[name] = tensor.clone() if place in seen else tensor  # tied weights are stored twice
        seen.add(place)
    with new_folder(folder) as unfinished:
        save_file(whole, unfinished / "model.safetensors")
        described = {"format": version, "class": kind.__name__, **config}
        (unfinished / "config.json").write_text(json.dumps(described, indent=1) + "\n")
        write_card(unfinished, Path(folder), kind, sum(t.numel() for t in whole.values()))


def write_card(unfinished: Path, folder: Path, kind: type[nn.Module], numbers: int) -> None:
    """Put a model card into `unfinished`, unless `folder` has one already."""
    if not (folder / "README.md").exists():
        purpose = (kind.__doc__ or "").strip().split("\n\n")[0]
        card = CARD.format(name=kind.__name__, purpose=" ".join(purpose.split()), parameters=numbers)
        (unfinished / "README.md").write_text(card)


def fetch(source: str | Path, files: tuple[str, ...] = ("config.json", "model.safetensors")) -> Path:
    """The folder `source`, or the one that is downloaded if it is an id on the hub.

    Args:
        source: a folder or an id.
        files: patterns of what is downloaded.

    Raises:
        FileNotFoundError: if there is no such folder and it cannot be downloaded.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.suffix in FILES or folder.exists():
        raise FileNotFoundError(f"{source} is no folder of save_pretrained" if folder.exists() else f"no file {source}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=list(files), ignore_patterns=["*.fp16.safetensors"]))
    except Exception as error:  # the hub raises many kinds
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise FileNotFoundError(f"{source} is no folder and cannot be fetched from the hub: {reason}") from None


def read_config(source: str | Path, class_name: str, newest: int) -> tuple[Path, dict[str, Any]]:
    """Find a folder that `save_pretrained` wrote and read its `config.json`.

    Args:
        source: a folder, or an id on the hub.
        class_name: the class that must have written it.
        newest: the newest format version that can be read.

    Returns:
        The folder, and the config without its `format` and `class`.

    Raises:
        FileNotFoundError: if there is no such folder and it cannot be downloaded.
        ValueError: if it was written by another class, or by a newer version, or cannot be read.
    """
    folder = fetch(source)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it was not written by save_pretrained")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict) or config.pop("class", None) != class_name:
        raise ValueError(f"{path} was not written by {class_name}")
    version = config.pop("format", 0)
    if version > newest:
        raise ValueError(f"{path} has format {version}, this version reads up to {newest}: upgrade fulgurite")
    return folder, config


def instantiate(kind: type[Kind], config: dict[str, Any], folder: Path) -> Kind:
    """`kind(**config)`.

    Raises:
        ValueError: naming the folder whose config does not fit.
    """
    try:
        return kind(**config)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{folder / 'config.json'} does not describe a {kind.__name__}: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is broken.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None


def read_state(source: str | Path) -> dict[str, Tensor]:
    """A state dict: of a checkpoint, of a safetensors file, or of a folder of `save_pretrained` or its id on the hub.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is broken, sharded, or would execute code on load.
    """
    path = Path(source)
    if (path / ".metadata").is_file():
        raise ValueError(f"{path} is a sharded checkpoint: join it with `fulgurite consolidate` first")
    if path.is_dir() or not (path.exists() or path.suffix in FILES):
        return read_tensors(fetch(path) / "model.safetensors")
    if path.suffix == ".safetensors":
        return read_tensors(path)
    content = read_checkpoint(path)
    state = content.get("state_dict", content)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def fill(module: nn.Module, state: dict[str, Tensor], source: str | Path) -> None:
    """Load a state dict, all of it.

    Raises:
        ValueError: naming `source` and what does not fit.
    """
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()[:300]  # the last of the complaints
        raise ValueError(f"{source} does not fit {type(module).__name__}: {reason}") from None


def without(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries whose names begin with `prefix`, less it; all of them if none does."""
    inner = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    return inner or state
