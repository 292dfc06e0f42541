"""Readers of recorded robot demonstrations: robomimic HDF5, diffusion-policy zarr, LeRobot folders, our own `.npz`.

All give the same thing: `Recordings`, the frames of all episodes one after the other, in memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.checks import read_npz, read_text

FORMATS = "robomimic .hdf5, diffusion-policy .zarr (folder or .zarr.zip), a LeRobot folder (with meta/info.json)"


class Keys(NamedTuple):
    """Where the quantities are in a file; None takes the default of its format.

    In HDF5 a name is a path inside a demonstration, such as `actions_abs` or `obs/robot/eef`; `obs/` may be left out.

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
        ValueError: If it is of no known format, is broken, lacks a quantity, mixes sizes, or holds values that are
            not finite (naming episode and frame).
    """
    if not path.exists():
        raise FileNotFoundError(f"demonstrations {path} do not exist")
    if path.suffix in (".hdf5", ".h5"):
        reader = _hdf5
    elif path.name.endswith((".zarr", ".zarr.zip")):
        reader = _zarr
    elif (path / "meta" / "info.json").is_file():
        reader = _lerobot
    elif path.suffix == ".npz":
        reader = _npz
    else:
        raise ValueError(f"{path} is of no known format: {FORMATS}")
    try:
        return join(reader(path, keys), path)
    except ImportError:
        raise
    except Exception as error:  # every library raises its own kinds for a broken file, and few name it
        if str(path) in str(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from error


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
        if not len(episode.action):
            raise ValueError(f"{path}: {episode.name} has no frame: leave it out")
        if episode.observation.keys() != first.observation.keys():
            there, expected = (", ".join(e.observation) for e in (episode, first))
            raise ValueError(f"{path}: {episode.name} has {there}, but {first.name} {expected}: all need the same")
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
    _convert_pictures(episodes, path)
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
        name = name if name in arrays else name.removeprefix("obs/")
        if name not in arrays:
            raise ValueError(
                f"{where} has no {name!r} but {', '.join(sorted(arrays))}; name what you want in data.keys"
            )
        if not hasattr(arrays[name], "shape"):
            raise ValueError(f"{where}: {name} is a group: name an array in data.keys")
        values = np.asarray(arrays[name][...])
        if values.dtype.kind not in "fiub":
            raise ValueError(f"{where}: {name} holds no numbers, it is {values.dtype}")
        if not values.ndim or not values.size:
            raise ValueError(f"{where}: {name} has no frames, its shape is {list(values.shape)}")
        return values

    observation = {}
    states = keys.state if keys.state is not None else [state] * (state in arrays)
    states = [states] if isinstance(states, str) else states
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
        observation["image"] = image
    if not observation:
        wanted(state)
    actions = wanted(keys.action or action)
    return observation, actions.reshape(len(actions), -1).astype(np.float32)


def _convert_pictures(episodes: list[_Episode], path: Path) -> None:
    """Bring pictures to uint8, from floats in [0, 1] or, as diffusion-policy stores them, in [0, 255].

    Which of them it is cannot be seen in a dark picture, so one file has one kind.
    """
    kinds: dict[str, str] = {}
    for episode in episodes:
        if (image := episode.observation.get("image")) is None or image.dtype == np.uint8:
            kinds.setdefault("uint8", episode.name)
            continue
        low, high = float(image.min()), float(image.max())
        if not (low >= 0 and high <= 255):
            raise ValueError(
                f"{path}: image of {episode.name} has values from {low:g} to {high:g}: pictures are uint8, or floats "
                "in [0, 1] or [0, 255]"
            )
        unit = image.dtype.kind == "f" and high <= 1
        kinds.setdefault(f"{image.dtype.name} in [0, {1 if unit else 255}]", episode.name)
        episode.observation["image"] = (image * (255 if unit else 1)).round().astype(np.uint8)
    if len(kinds) > 1:
        found = " and ".join(f"{kind} ({name})" for kind, name in kinds.items())
        raise ValueError(f"{path} mixes pictures of the kinds {found}: convert them to one")


def _hdf5(path: Path, keys: Keys) -> list[_Episode]:
    """Robomimic: `data/demo_<i>/{actions, obs/<name>}`, and whatever else a demonstration holds, by its path."""
    import h5py

    episodes = []
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} cannot be read as HDF5: {error}") from None
    with file:
        if not isinstance(file.get("data"), h5py.Group):
            raise ValueError(f"{path} has no group 'data': it is not laid out as robomimic's files")
        for name in sorted(file["data"], key=lambda name: (len(name), name)):  # demo_2 before demo_10
            group = file["data"][name]
            if not isinstance(group, h5py.Group):
                raise ValueError(f"{path}: data/{name} is no group: it is not laid out as robomimic's files")
            inside = dict(_arrays(group))
            observed = {p.removeprefix("obs/"): x for p, x in inside.items() if p.startswith("obs/")}
            arrays = observed | {p: x for p, x in inside.items() if not p.startswith("obs/")}
            episodes.append(_Episode(name, *_quantities(arrays, keys, "state", "actions", f"{path}: {name}")))
    return episodes


def _arrays(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every array below a group of HDF5, and its path; links too, which `group.visit` passes over."""
    for name, value in group.items():
        if hasattr(value, "shape"):
            yield above + name, value
        else:
            yield from _arrays(value, f"{above}{name}/")


def _zarr(path: Path, keys: Keys) -> list[_Episode]:
    """Diffusion policy: `data/<name>` over all frames and `meta/episode_ends`."""
    import zarr

    try:
        store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
        root: Any = zarr.open_group(store, mode="r")
        ends = np.asarray(root["meta/episode_ends"][:])
        arrays = {name: root["data"][name] for name in root["data"]}
    except Exception as error:  # zarr and its stores raise many kinds
        raise ValueError(f"{path} is not laid out as diffusion-policy's zarr files: {error}") from None
    observation, action = _quantities(arrays, keys, "state", "action", str(path))
    return _cut(observation, action, ends, path)


def _npz(path: Path, keys: Keys) -> list[_Episode]:
    """What `datamodules.metaworld.collect` writes, under its own names."""
    arrays = read_npz(path)
    if not {"action", "length"} <= arrays.keys():
        raise ValueError(f"{path} has no arrays 'action' and 'length'")
    own = Keys(**{name: name if name in arrays else None for name in ("point_cloud", "image")})
    observation, action = _quantities(arrays, own, "state", "action", str(path))
    return _cut(observation, action, np.cumsum(arrays["length"]), path)


def _cut(observation: dict[str, np.ndarray], action: np.ndarray, ends: np.ndarray, path: Path) -> list[_Episode]:
    ends = ends.astype(np.int64)
    if ends.ndim != 1 or not len(ends) or ends[0] < 1 or (np.diff(ends) < 1).any() or ends[-1] != len(action):
        shown = ", ".join(str(end) for end in ends.ravel()[:8]) + (", ..." if ends.size > 8 else "")
        raise ValueError(f"{path}: episodes end at {shown}: needed are rising numbers, the last {len(action)} (frames)")
    parts = {k: np.split(v, ends[:-1]) for k, v in observation.items()}
    return [
        _Episode(f"episode {i}", {k: v[i] for k, v in parts.items()}, a)
        for i, a in enumerate(np.split(action, ends[:-1]))
    ]


def _lerobot(path: Path, keys: Keys) -> list[_Episode]:
    """LeRobot v2 and v3: parquet files below `data/`, described by `meta/info.json`."""
    import pyarrow.parquet as pq
    from pyarrow import concat_tables

    about = path / "meta" / "info.json"
    try:
        features = json.loads(read_text(about)).get("features", {})
        kind = features.get(keys.image, {}).get("dtype")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{about} is no description of a LeRobot data set: {error}") from None
    if keys.image and kind == "video":
        raise ValueError(f"{path}: {keys.image} is stored as video; convert it to an image column, or use the state")
    files = sorted((path / "data").rglob("*.parquet"))
    if not files:
        raise ValueError(f"{path} has no parquet file below data/")
    names = [*(keys.state or ["observation.state"]), keys.point_cloud, keys.image, keys.action or "action"]
    wanted = ["episode_index", "frame_index", *(n for n in names if n)]
    tables = []
    for file in files:
        try:
            there = pq.read_schema(file).names
            tables.append(pq.read_table(file, columns=[n for n in wanted if n in there]))
        except Exception as error:  # pyarrow raises many kinds for a broken file
            raise ValueError(f"{file} cannot be read as Parquet: {' '.join(str(error).split())}") from None
        missing = [name for name in wanted[:2] if name not in there]
        if missing:
            raise ValueError(f"{file} has no column {' and no column '.join(missing)}; it has {', '.join(there)}")
        if not tables[-1].schema.equals(tables[0].schema):
            columns = [", ".join(f"{f.name} ({f.type})" for f in table.schema) for table in (tables[-1], tables[0])]
            raise ValueError(f"{file} has the columns {columns[0]}, but {files[0].name} has {columns[1]}")
    table = concat_tables(tables).sort_by([("episode_index", "ascending"), ("frame_index", "ascending")])
    if not len(table):
        raise ValueError(f"{path} holds no frame")

    arrays = {name: _column(table[name].to_pylist(), f"{path}: {name}") for name in table.column_names}
    observation, action = _quantities(arrays, keys, "observation.state", "action", str(path))
    _, counts = np.unique(table["episode_index"].to_numpy(), return_counts=True)
    return _cut(observation, action, np.cumsum(counts), path)


def _column(values: list[Any], what: str) -> np.ndarray:
    """Numbers, or pictures as PNG or JPEG bytes."""
    try:
        return np.stack([_decode(v) for v in values]) if isinstance(values[0], dict) else np.asarray(values)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"{what} cannot be read: {error}") from None


def _decode(picture: dict[str, Any]) -> np.ndarray:
    import io

    from PIL import Image

    if not picture.get("bytes"):
        raise ValueError("a row holds no picture")
    return np.asarray(Image.open(io.BytesIO(picture["bytes"])).convert("RGB"))
