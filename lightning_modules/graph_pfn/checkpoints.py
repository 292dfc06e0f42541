"""Names of the published checkpoints, and how they become safetensors.

Backbone: `LimiX-16M.ckpt` (a pickle with `config` and `state_dict`; its block keys lack `.base`). Adapters:
`graphpfn-adapters-1_3.pt` (`state_dict`, prefix `tfm.module.`). Version 1.0: `graphpfn-v1.ckpt` (`model`, prefix
`tfm.`). The network of `network.py` uses the names that remain once prefix and `.base` are settled.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_modules.distributed import read_checkpoint
from lightning_modules.hub import read_tensors

_PREFIX = re.compile(r"^(tfm\.)?(module\.)?")
_BACKBONE_BLOCK = re.compile(r"^(transformer_encoder\.layers\.\d+)\.(feature_attentions|sequence_attentions)\.")
_BACKBONE_MLP = re.compile(r"^(transformer_encoder\.layers\.\d+)\.(mlp\.\d+\.mlp\.)")


def to_published_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of a published checkpoint to those of `PublishedNetwork`.

    Args:
        state: a backbone's, the adapters', or a whole model's state dict, with or without its prefix.

    Returns:
        The same tensors under this package's names. An edge head (version 1.0) keeps its `edge_head.` prefix.
    """
    renamed = {}
    for name, tensor in state.items():
        name = _PREFIX.sub("", name)
        name = _BACKBONE_BLOCK.sub(r"\1.base.\2.", name)
        renamed[_BACKBONE_MLP.sub(r"\1.base.\2", name)] = tensor
    return renamed


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read published weights without executing anything in them.

    Args:
        path: a `.safetensors` file, or a `.pt`/`.ckpt` file that holds nothing but tensors and plain values.

    Returns:
        Tensors under this package's names.

    Raises:
        ValueError: the file would execute code when loaded.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return to_published_names(read_tensors(path))
    try:
        content = read_checkpoint(path)
    except ValueError as error:
        if "execute code" not in str(error):
            raise
        raise ValueError(
            f"{path} holds pickled objects that run code when loaded; if you trust its source, convert it once with "
            f"`python -m lightning_modules.graph_pfn.checkpoints {path} {path.with_suffix('.safetensors')}`"
        ) from None
    return tensors_of(content)


def tensors_of(content: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of a published checkpoint under this package's names, from below `state_dict` or `model` or the top."""
    for key in ("state_dict", "model"):
        if isinstance(content.get(key), dict):
            content = content[key]
            break
    return to_published_names({name: value for name, value in content.items() if isinstance(value, Tensor)})


def convert(source: str | Path, target: str | Path) -> None:
    """Convert a trusted pickle to safetensors. This executes whatever the pickle says.

    Args:
        source: the published `.ckpt`.
        target: the `.safetensors` file to write.

    Raises:
        ValueError: the file cannot be read, or holds no tensors.
    """
    try:
        content = torch.load(source, map_location="cpu", weights_only=False)
    except Exception as error:  # a pickle raises whatever it likes
        raise ValueError(f"{source} cannot be read: {' '.join(str(error).split())}") from None
    state = tensors_of(content) if isinstance(content, dict) else {}
    if not state:
        raise ValueError(f"{source} holds no tensors by name: needed is the published .ckpt")
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in state.items()}, target)


def main(arguments: list[str] | None = None) -> None:
    """`python -m lightning_modules.graph_pfn.checkpoints SOURCE TARGET`."""
    parser = argparse.ArgumentParser(description="Convert a TRUSTED pickled checkpoint to safetensors.")
    parser.add_argument("source", help="the published checkpoint; loading it executes code in it")
    parser.add_argument("target", help="the .safetensors file to write")
    paths = parser.parse_args(arguments)
    try:
        convert(paths.source, paths.target)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
