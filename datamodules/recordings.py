"""Readers of recorded robot demonstrations: robomimic HDF5, diffusion-policy zarr, LeRobot folders, our own `.npz`.

All give the same thing: `Recordings`, the frames of all episodes one after the other, in memory.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMATS = "robomimic .hdf5, diffusion-policy .zarr (folder or .zarr.zip), a LeRobot folder (with meta/info.json)"


class Keys(NamedTuple):
    """Where the quantities are in a file; None takes the default of its format.

    Attributes:
        state: Names whose values are joined into the state.
        point_cloud: Name of the point clouds.
        image: Name of the pictures.
        action: Name of the actions.
    """

    state: Sequence[str] | None = None
    point_cloud: str | None = None
    image: str | None = None
    action: str | None = None


class Recordings(NamedTuple):
    """Episodes one after the other, `f` frames in all.

    Attributes:
        observation: Those present of `state` float32 `(f, d)`, `point_cloud` float32 `(f, n, c)`, `image` uint8
            `(f, h, w, 3)`.
        action: float32 `(f, d)`.
        length: int64 `(episodes,)`, frames of each episode.
        name: What an episode is called in messages.
    """

    observation: dict[str, np.ndarray]
    action: np.ndarray
    length: np.ndarray
    name: list[str]


def read(path: Path, keys: Keys) -> Recordings:
    """Read a file or folder of any of the known formats, and check it.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is of no known format, lacks a quantity, mixes sizes, or holds values that are not finite
            (naming episode and frame).
    """
    if not path.exists():
        raise FileNotFoundError(f"demonstrations {path} do not exist")
    if path.suffix in (".hdf5", ".h5"):
        episodes = _hdf5(path, keys)
    elif path.name.endswith((".zarr", ".zarr.zip")):
        episodes = _zarr(path, keys)
    elif (path / "meta" / "info.json").is_file():
        episodes = _lerobot(path, keys)
    elif path.suffix == ".npz":
        episodes = _npz(path)
    else:
        raise ValueError(f"{path} is of no known format: {FORMATS}")
    return join(episodes, path)


class _Episode(NamedTuple):
    name: str
    observation: dict[str, np.ndarray]
    action: np.ndarray


def join(episodes: list[_Episode], path: Path) -> Recordings:
    """Check episodes one by one and put them one after the other."""
    if not episodes:
        raise ValueError(f"{path} holds no episode")
    first = episodes[0]
    for episode in episodes:
        size, expected = episode.action.shape[-1], first.action.shape[-1]
        if size != expected:
            raise ValueError(
                f"{path}: actions of {episode.name} have {size} dimensions, those of {first.name} {expected}: "
                "demonstrations of different robots cannot be mixed"
            )
        for name, values in {"action": episode.action, **episode.observation}.items():
            if len(values) != len(episode.action):
                raise ValueError(
                    f"{path}: {episode.name} has {len(values)} frames of {name} and {len(episode.action)} actions"
                )
            if name != "action" and values.shape[1:] != first.observation[name].shape[1:]:
                shapes = f"{list(values.shape[1:])}, in {first.name} {list(first.observation[name].shape[1:])}"
                raise ValueError(f"{path}: {name} of {episode.name} has the shape {shapes}")
            if values.dtype.kind == "f":
                bad = ~np.isfinite(values).reshape(len(values), -1).all(1)
                if bad.any():
                    raise ValueError(
                        f"{path}: {name} of {episode.name} is not finite in frame {bad.argmax()}"
                        + (f" and {bad.sum() - 1} more" if bad.sum() > 1 else "")
                    )
    return Recordings(
        {k: np.concatenate([e.observation[k] for e in episodes]) for k in first.observation},
        np.concatenate([e.action for e in episodes]),
        np.array([len(e.action) for e in episodes]),
        [e.name for e in episodes],
    )


def _quantities(
    arrays: Mapping[str, Any], keys: Keys, state: str, action: str, where: str
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pick observation and action from array-likes; `state` and `action` are the format's own names."""

    def wanted(name: str) -> np.ndarray:
        if name not in arrays:
            raise ValueError(
                f"{where} has no {name!r} but {', '.join(sorted(arrays))}; name what you want in data.keys"
            )
        return np.asarray(arrays[name][...])

    observation = {}
    states = keys.state if keys.state is not None else [state] * (state in arrays)
    if states:
        parts = [wanted(name) for name in states]
        observation["state"] = np.concatenate([p.reshape(len(p), -1) for p in parts], axis=1).astype(np.float32)
    if keys.point_cloud:
        observation["point_cloud"] = wanted(keys.point_cloud).astype(np.float32)
    if keys.image:
        image = wanted(keys.image)
        if image.ndim == 4 and image.shape[1] == 3 != image.shape[3]:
            image = image.transpose(0, 2, 3, 1)
        if image.ndim != 4 or image.shape[3] != 3:
            raise ValueError(f"{where}: {keys.image} has the shape {list(image.shape)}, needed is [frames, h, w, 3]")
        observation["image"] = image if image.dtype == np.uint8 else _to_uint8(image, f"{where}: {keys.image}")
    if not observation:
        wanted(state)
    actions = wanted(keys.action or action)
    return observation, actions.reshape(len(actions), -1).astype(np.float32)


def _to_uint8(image: np.ndarray, what: str) -> np.ndarray:
    """Float pictures: in [0, 1], or in [0, 255] as diffusion-policy stores them."""
    low, high = float(image.min()), float(image.max())
    if not (low >= 0 and high <= 255):
        raise ValueError(
            f"{what} has values from {low:g} to {high:g}: pictures are uint8, or floats in [0, 1] or [0, 255]"
        )
    return (image * (255 if high <= 1 else 1)).round().astype(np.uint8)


def _hdf5(path: Path, keys: Keys) -> list[_Episode]:
    """Robomimic: `data/demo_<i>/{actions, obs/<name>}`."""
    import h5py

    episodes = []
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} cannot be read as HDF5: {error}") from None
    with file:
        if "data" not in file:
            raise ValueError(f"{path} has no group 'data': it is not laid out as robomimic's files")
        for name in sorted(file["data"], key=lambda name: (len(name), name)):  # demo_2 before demo_10
            group = file["data"][name]
            arrays = {"actions": group["actions"], **group["obs"]}
            episodes.append(_Episode(name, *_quantities(arrays, keys, "state", "actions", f"{path}: {name}")))
    return episodes


def _zarr(path: Path, keys: Keys) -> list[_Episode]:
    """Diffusion policy: `data/<name>` over all frames and `meta/episode_ends`."""
    import zarr

    store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
    try:
        root: Any = zarr.open_group(store, mode="r")
        ends = np.asarray(root["meta/episode_ends"][:])
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not laid out as diffusion-policy's zarr files: {error}") from None
    arrays = {name: root["data"][name] for name in root["data"]}
    observation, action = _quantities(arrays, keys, "state", "action", str(path))
    return _cut(observation, action, ends)


def _npz(path: Path) -> list[_Episode]:
    """What `datamodules.metaworld.collect` writes."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {k: file[k] for k in file.files}
    if not {"action", "length"} <= arrays.keys():
        raise ValueError(f"{path} has no arrays 'action' and 'length'")
    action, length = arrays["action"], arrays["length"]
    observation = {k: arrays[k] for k in ("state", "point_cloud", "image") if k in arrays}
    return _cut(observation, action, np.cumsum(length))


def _cut(observation: dict[str, np.ndarray], action: np.ndarray, ends: np.ndarray) -> list[_Episode]:
    parts = {k: np.split(v, ends[:-1]) for k, v in observation.items()}
    return [
        _Episode(f"episode {i}", {k: v[i] for k, v in parts.items()}, a)
        for i, a in enumerate(np.split(action, ends[:-1]))
    ]


def _lerobot(path: Path, keys: Keys) -> list[_Episode]:
    """LeRobot v2 and v3: parquet files below `data/`, described by `meta/info.json`."""
    import pyarrow.parquet as pq
    from pyarrow import concat_tables

    info = json.loads((path / "meta" / "info.json").read_text())
    features = info.get("features", {})
    if keys.image and features.get(keys.image, {}).get("dtype") == "video":
        raise ValueError(f"{path}: {keys.image} is stored as video; convert it to an image column, or use the state")
    files = sorted((path / "data").rglob("*.parquet"))
    if not files:
        raise ValueError(f"{path} has no parquet file below data/")
    names = [*(keys.state or ["observation.state"]), keys.point_cloud, keys.image, keys.action or "action"]
    wanted = ["episode_index", "frame_index", *(n for n in names if n)]
    tables = []
    for file in files:
        there = pq.read_schema(file).names
        tables.append(pq.read_table(file, columns=[n for n in wanted if n in there]))
    table = concat_tables(tables).sort_by([("episode_index", "ascending"), ("frame_index", "ascending")])

    arrays = {name: _column(table[name].to_pylist()) for name in table.column_names}
    observation, action = _quantities(arrays, keys, "observation.state", "action", str(path))
    _, counts = np.unique(table["episode_index"].to_numpy(), return_counts=True)
    return _cut(observation, action, np.cumsum(counts))


def _column(values: list[Any]) -> np.ndarray:
    """Numbers, or pictures as PNG or JPEG bytes."""
    return np.stack([_decode(v) for v in values]) if isinstance(values[0], dict) else np.asarray(values)


def _decode(picture: dict[str, Any]) -> np.ndarray:
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(picture["bytes"])).convert("RGB"))
