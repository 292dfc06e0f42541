"""Where pretrained folders come from: a path, or the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any


def read_config(source: str | Path, class_name: str, newest: int) -> tuple[Path, dict[str, Any]]:
    """Find a folder that `save_pretrained` wrote and read its `config.json`.

    Args:
        source: a folder, or an id on the hub, of which only safetensors and JSON files are fetched.
        class_name: the class that must have written it.
        newest: the newest format version that can be read.

    Returns:
        The folder, and the config without its `format` and `class`.

    Raises:
        FileNotFoundError: if there is no such folder and it cannot be downloaded.
        ValueError: if it was written by another class, or by a newer version.
    """
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(source), allow_patterns=["*.safetensors", "*.json"]))
        except Exception as error:  # the hub raises many kinds
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FileNotFoundError(f"{source} is no folder and cannot be fetched from the hub: {reason}") from None
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it was not written by save_pretrained")
    config = json.loads(path.read_text())
    if config.pop("class", None) != class_name:
        raise ValueError(f"{path} was not written by {class_name}")
    version = config.pop("format", 0)
    if version > newest:
        raise ValueError(f"{path} has format {version}, this version reads up to {newest}: upgrade fulgurite")
    return folder, config
