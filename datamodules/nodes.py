"""Graphs some of whose nodes are labelled: karate club, torch-geometric's data sets, and a user's own files."""

import inspect
import math
import os
import pickle
import shutil
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.checks import DISK_FULL, check_least, check_seeds, read_csv
from datamodules.order import Draw, GlobalBatches, Loader, describe, ranks

Kind = Literal["numeric", "fraction", "categorical", "dense"]
MISSING = {"", "na", "nan", "null", "none", "n/a"}
GRAPHLAND = ("numerical_features", "fraction_features", "categorical_features", "regression_targets")


class Nodes(NamedTuple):
    """A batch: one graph.

    Attributes:
        x: features (n, f), float32, finite, prepared by the kind of their column.
        edge_index: (2, m) int64, both directions, no loops and duplicates.
        y: classes 0 to classes - 1 (int64) or values (float32); -1 or NaN where unknown (n,).
        context: labelled nodes that may be learnt from (n,) bool.
        query: nodes to predict (n,) bool, none in training.
        classes: number of classes, 0 for regression.
        node: n names.
        class_names: names of the classes, none for regression.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor
    context: Tensor
    query: Tensor
    classes: int
    node: list[str]
    class_names: list[str]


@dataclass
class Table:
    """A graph as it was read.

    Attributes:
        columns: name -> values; numbers (float64, NaN where missing) or strings (object, None where missing).
        dense: (n, k) float32, columns without a meaning of their own such as embeddings or bags of words.
        edges: (2, m) int64 as given.
        target: (n,) numbers or strings as in `columns`.
        masks: split name -> (n,) bool, if the data bring a split.
        node: n names.
    """

    columns: dict[str, NDArray[Any]]
    dense: NDArray[Any]
    edges: NDArray[np.int64]
    target: NDArray[Any]
    masks: dict[str, NDArray[np.bool_]]
    node: list[str]


# --- reading ----------------------------------------------------------------------------------------------------------


def _typed(values: list[Any]) -> NDArray[Any]:
    """Numbers if every value that is there is one, else strings."""
    missing = [
        v is None or (isinstance(v, float) and math.isnan(v)) or str(v).strip().lower() in MISSING for v in values
    ]
    try:
        return np.array([math.nan if gone else float(v) for v, gone in zip(values, missing, strict=True)])
    except (TypeError, ValueError):
        return np.array(
            [None if gone else str(v).strip() for v, gone in zip(values, missing, strict=True)], dtype=object
        )


def read_table(path: Path) -> dict[str, list[Any]]:
    """Columns of a CSV or Parquet file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file cannot be read, a row has another number of cells than the header, or there is no row.
    """
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise ValueError(f"reading {path} needs pyarrow: pip install pyarrow, or bring a CSV file") from None
        try:
            columns = parquet.read_table(path).to_pydict()
        except Exception as error:  # pyarrow raises many kinds for a broken file
            raise ValueError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None
        if not any(columns.values()):
            raise ValueError(f"{path} has no rows")
        return columns
    header, rows = read_csv(path)
    return {name: list(values) for name, values in zip(header, zip(*rows, strict=True), strict=True)}


def _file(folder: Path, stem: str) -> Path:
    for ending in (".csv", ".parquet"):
        if (folder / f"{stem}{ending}").is_file():
            return folder / f"{stem}{ending}"
    raise FileNotFoundError(f"{folder} has no {stem}.csv and no {stem}.parquet")


def _pick(columns: dict[str, Any], names: tuple[str, ...], path: Path, what: str) -> str:
    for name in names:
        if name in columns:
            return name
    raise ValueError(f"{path} has no column for {what}: it has {', '.join(columns)}; expected {' or '.join(names)}")


def read_folder(folder: Path, target: str | None) -> Table:
    """Read `nodes.csv` (or `.parquet`) and `edges.csv`.

    Nodes have an `id`, a `label` (or `y`, or `target`; empty where unknown), perhaps a `split` (`train`, `val`,
    `test`, or empty), and features. Edges have `source` and `target`, ids of nodes.

    Args:
        folder: where they lie.
        target: name of the label's column.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: naming file, line or id that is wrong.
    """
    node_path, edge_path = _file(folder, "nodes"), _file(folder, "edges")
    columns, ends = read_table(node_path), read_table(edge_path)
    key = _pick(columns, ("id", "node", "node_id"), node_path, "the nodes' ids")
    names = [str(v).strip() for v in columns.pop(key)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{node_path} has the id {twice[0]!r} more than once")
    number = {name: i for i, name in enumerate(names)}
    sides = [
        [str(v).strip() for v in ends[_pick(ends, options, edge_path, "an end of the edges")]]
        for options in (("source", "src", "from"), ("target", "dst", "to"))
    ]
    unknown = sorted({name for side in sides for name in side if name not in number})
    if unknown:
        more = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise ValueError(f"{edge_path} joins node {unknown[0]!r}{more}, which {node_path.name} does not have")
    label = _pick(columns, (target,) if target else ("label", "y", "target"), node_path, "the labels")
    labels = _typed(columns.pop(label))
    masks = {}
    if "split" in columns:
        split = np.array(["" if v is None else str(v).strip().lower() for v in columns.pop("split")])
        for row in np.flatnonzero(~np.isin(split, ("train", "val", "test", ""))):
            raise ValueError(
                f"{node_path} has the split {str(split[row])!r} for node {names[row]!r}: needed is train, val, test, "
                "or nothing"
            )
        if (split != "").any():
            masks = {name: split == name for name in ("train", "val", "test")}
    edges = np.array([[number[name] for name in side] for side in sides], dtype=np.int64)
    return Table({k: _typed(v) for k, v in columns.items()}, np.empty((len(names), 0)), edges, labels, masks, names)


def read_data(path: Path) -> Any:
    """Load a `torch_geometric.data.Data` that was saved to a file, without executing code in it.

    Raises:
        ValueError: the file would execute code when loaded, or holds something else.
    """
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import BaseStorage, GlobalStorage

    with torch.serialization.safe_globals([Data, DataEdgeAttr, DataTensorAttr, BaseStorage, GlobalStorage]):
        try:
            data = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a broken file raises many kinds
            reason = str(error)
            if any(words in reason for words in ("GLOBAL", "Trying to", "Unsupported class")):
                raise ValueError(
                    f"{path} holds objects that run code when loaded; refused: save a plain Data"
                ) from None
            if isinstance(error, pickle.UnpicklingError):
                reason = "it is no file of torch.save, or broken"
            raise ValueError(f"{path} cannot be read: {reason.splitlines()[0]}") from None
    if isinstance(data, dict):
        data = Data.from_dict(data)
    if not isinstance(data, Data):
        raise ValueError(f"{path} holds a {type(data).__name__}, not a torch_geometric.data.Data")
    return data


def download(source: str, root: Path) -> Any:
    """A data set of torch-geometric by `Class/name`, for example `Planetoid/Cora`, kept below `root`.

    It is fetched and processed in a folder of its own and moved file by file, so that an interruption leaves nothing
    that would be taken for complete.

    Raises:
        ValueError: there is no such data set, or it has several graphs.
        FileNotFoundError: it is neither there nor can it be fetched.
        OSError: the disk is full.
    """
    from torch_geometric import datasets

    kind, _, name = source.partition("/")
    if kind not in datasets.__all__:
        from difflib import get_close_matches

        named = {known.lower(): known for known in datasets.__all__}
        near = [named[k] for k in get_close_matches(kind.lower(), named, n=3)]
        hint = f"did you mean {' or '.join(near)}?" if near else "try Planetoid/Cora, or a folder with nodes.csv"
        raise ValueError(f"{source} is no folder here, and torch-geometric has no data set {kind}: {hint}")
    dataset, home = getattr(datasets, kind), root / kind
    takes = inspect.signature(dataset).parameters
    if "root" not in takes:
        raise ValueError(
            f"{kind} is made, not fetched: save its Data to a .pt file and give that (karate is here as karate)"
        )
    if "name" in takes and not name:
        raise ValueError(f"{kind} stands for several data sets: name one, as {kind}/NAME (Planetoid/Cora, for example)")
    if name and "name" not in takes:
        raise ValueError(f"{source}: {kind} is one data set and takes no name: leave out /{name}")
    arguments: dict[str, Any] = {"name": name} if name else {}
    if kind == "GraphLandDataset":  # the split of the paper's experiments; columns are prepared here, not there
        arguments |= {"split": "RL"} | {f"{part}_transform": None for part in GRAPHLAND}
    try:
        try:
            found = _if_there(dataset)(str(home), **arguments)
        except _NotThere:
            _fetch(dataset, arguments, home)
            found = _if_there(dataset)(str(home), **arguments)
    except (AssertionError, TypeError) as error:  # that is how torch-geometric refuses arguments
        raise ValueError(
            f"torch-geometric does not make a data set of {source}: {str(error) or 'unknown name'}"
        ) from None
    except Exception as error:  # every data set raises its own kinds
        if getattr(error, "errno", None) in DISK_FULL:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FileNotFoundError(
            f"{source} is not in {home} and could not be fetched ({reason}): put the files there as torch-geometric "
            "would, or remove what is broken there"
        ) from None
    if len(found) != 1:
        raise ValueError(f"{source} has {len(found)} graphs, needed is one graph with labelled nodes")
    return found[0]


class _NotThere(Exception):
    pass


def _if_there(dataset: Any) -> Any:
    """The same class, but it raises `_NotThere` where it would download."""

    def _download(self: Any) -> None:
        if not all(Path(path).exists() for path in self.raw_paths):
            raise _NotThere

    return type(dataset.__name__, (dataset,), {"_download": _download})


def _fetch(dataset: Any, arguments: dict[str, Any], home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    try:
        dataset(str(work), **arguments)
        for file in [path for path in work.rglob("*") if path.is_file()]:
            place = home / file.relative_to(work)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def table_of(data: Any, split: int, name: str) -> Table:
    """A `Data` as a table.

    Wide or purely binary features are `dense`; others become columns, those of an `x_categorical_mask`, which GraphLand
    brings, categories. Features that only number the nodes (an identity matrix) are dropped.

    Args:
        data: with `edge_index`, `y`, and perhaps `x` and masks.
        split: column of masks that bring several splits.
        name: of the source, for messages.
    """
    for key in ("edge_index", "y"):
        if getattr(data, key, None) is None:
            raise ValueError(f"{name} has no {key}")
    n = data.num_nodes
    for key in ("y", "x", "train_mask", "val_mask", "test_mask"):
        size = None if getattr(data, key, None) is None else (data[key].numel() if key == "y" else data[key].size(0))
        if size not in (None, n):
            raise ValueError(f"{name} has {size} rows of {key} for {n} nodes")
    edges = data.edge_index.numpy().astype(np.int64)
    if edges.size and (edges.max() >= n or edges.min() < 0):
        strange = edges.max() if edges.max() >= n else edges.min()
        raise ValueError(f"{name} joins node {strange}, it has the nodes 0 to {n - 1}")
    x = data.x.detach().to_dense().double().numpy() if getattr(data, "x", None) is not None else np.empty((n, 0))
    x = x.reshape(n, -1)
    if x.shape[1] == n and np.array_equal(x, np.eye(n)):
        x = np.empty((n, 0))
    categorical = getattr(data, "x_categorical_mask", None)
    dense = categorical is None and (x.shape[1] > 100 or bool(np.isin(x, (0, 1)).all()))
    columns = {} if dense else {f"feature_{i}": x[:, i] for i in range(x.shape[1])}
    for i in [] if categorical is None else categorical.nonzero().flatten().tolist():
        columns[f"feature_{i}"] = np.array([f"{v:g}" if v == v else None for v in x[:, i]], dtype=object)
    masks = {}
    for part in ("train", "val", "test"):
        mask = getattr(data, f"{part}_mask", None)
        if mask is not None:
            masks[part] = mask.numpy().astype(bool).reshape(n, -1)
            if split >= masks[part].shape[1]:
                raise ValueError(f"{name} has {masks[part].shape[1]} splits: split_index {split} is too high")
            masks[part] = masks[part][:, split]
    y = data.y.detach().reshape(-1).double().numpy()
    wide = x.astype(np.float32) if dense else np.empty((n, 0), dtype=np.float32)
    return Table(columns, wide, edges, y, masks, [str(i) for i in range(n)])


# --- preparing --------------------------------------------------------------------------------------------------------


def clean_edges(edges: NDArray[np.int64], n: int) -> tuple[NDArray[np.int64], str]:
    """Remove loops and duplicates, add missing directions.

    Args:
        edges: (2, m) as given.
        n: number of nodes.

    Returns:
        (2, m') both directions, and a sentence about what was done.
    """
    given = edges.shape[1]
    edges = edges[:, edges[0] != edges[1]]
    directed = np.unique(edges[0] * n + edges[1])
    key = np.unique(edges.min(0) * n + edges.max(0)) if edges.size else directed
    pairs = np.stack([key // n, key % n])
    one_way = 2 * len(key) - len(directed)
    said = (
        f"{given} edges given: {given - edges.shape[1]} loops and {edges.shape[1] - len(directed)} duplicates removed"
    )
    if one_way:
        said += f", {one_way} of one direction made undirected"
    return np.concatenate([pairs, pairs[::-1]], axis=1), f"{said}, {len(key)} undirected edges left"


def kind_of(values: NDArray[Any]) -> Kind:
    """How a column is read: strings are categories, numbers within [0, 1] fractions, other numbers numeric."""
    if values.dtype == object:
        return "categorical"
    known = values[np.isfinite(values)]
    inside = len(known) and known.min() >= 0 and known.max() <= 1 and len(np.unique(known)) > 2
    return "fraction" if inside else "numeric"


def _present(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Which values of a column are there, and finite."""
    return np.array([v is not None for v in values]) if values.dtype == object else np.isfinite(values)


def _most_frequent(column: NDArray[Any]) -> NDArray[Any]:
    """Fill NaN with the most frequent value."""
    missing = np.isnan(column)
    if missing.any():
        values, counts = np.unique(column[~missing], return_counts=True)
        column = np.where(missing, values[counts.argmax()], column)
    return column


def prepare_column(values: NDArray[Any], kind: Kind, one_hot: bool, seed: int) -> NDArray[Any]:
    """Bring a column to the scale that the network expects, without looking at labels.

    Numeric columns are mapped to a normal distribution by their quantiles, fractions to a uniform one, categories to
    codes in the order of their names (or to one column each), `dense` ones are standardised. Missing values become
    the most frequent value.

    Args:
        values: (n,) numbers or strings.
        kind: how they are read.
        one_hot: one column per category.
        seed: of the noise (deviation 1e-5) that breaks ties between quantiles.

    Returns:
        (n, k) float64.
    """
    from sklearn.preprocessing import QuantileTransformer

    if kind == "categorical":
        known = sorted({str(v) for v in values if v is not None and v == v})
        code = {name: i for i, name in enumerate(known)}
        codes = _most_frequent(np.array([code.get(str(v), math.nan) if v == v else math.nan for v in values], float))
        return np.eye(len(known))[codes.astype(int)] if one_hot else codes[:, None]
    column = values.astype(float)
    column[~np.isfinite(column)] = math.nan
    if kind in ("numeric", "fraction"):
        transform = QuantileTransformer(
            n_quantiles=min(len(column), max(min(len(column) // 30, 1000), 10)),
            output_distribution="normal" if kind == "numeric" else "uniform",
            subsample=None,
            random_state=seed,
        )
        noise = np.random.default_rng(seed).normal(0, 1e-5, (len(column), 1))
        column = transform.fit(column[:, None] + noise).transform(column[:, None])[:, 0]
    else:
        column = (column - np.nanmean(column)) / np.nanstd(column)
    return _most_frequent(column)[:, None]


def structure_columns(edges: NDArray[np.int64], n: int, eigenvectors: int) -> NDArray[Any]:
    """Log-degree, log-PageRank and eigenvectors of the normalised Laplacian with the smallest non-zero eigenvalues.

    Args:
        edges: (2, m), both directions.
        n: number of nodes.
        eigenvectors: how many; their sign is fixed by their largest entry.

    Returns:
        (n, 2 + k) float64.
    """
    from scipy.sparse import coo_array, diags_array
    from scipy.sparse.linalg import eigsh

    adjacency = coo_array((np.ones(edges.shape[1]), (edges[1], edges[0])), shape=(n, n)).tocsr()
    degree = np.bincount(edges[1], minlength=n).astype(float)
    rank = np.full(n, 1 / n)
    for _ in range(50):
        rank = 0.15 / n + 0.85 * (adjacency @ (rank / np.maximum(degree, 1)))
    columns = [np.log1p(degree), np.log(rank)]
    k = min(eigenvectors, n - 3) if edges.size else 0
    if k > 0:
        root = diags_array(1 / np.sqrt(np.maximum(degree, 1)))
        _, vectors = eigsh(root @ adjacency @ root, k=k + 1, which="LA", v0=np.ones(n))
        vectors = vectors[:, ::-1][:, 1:]
        vectors *= np.sign(vectors[np.abs(vectors).argmax(0), np.arange(k)])
        columns += list(vectors.T * math.sqrt(n))
    return np.stack(columns, axis=1)


def principal_components(x: NDArray[Any], k: int, seed: int) -> NDArray[Any]:
    """Project (n, f) to its first `k` principal components, each with deviation 1."""
    from sklearn.decomposition import PCA

    k = min(k, x.shape[0] - 1, x.shape[1])
    z = PCA(k, svd_solver="auto", random_state=seed).fit_transform(x)
    return z / np.maximum(z.std(0), 1e-9)


class _Repeated(Dataset[Nodes]):
    """The same graph in every step."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def __getitems__(self, draw: Draw) -> Nodes:
        return self.nodes


class NodeClassification(LightningDataModule):
    """One graph whose nodes carry classes or values; every batch is the whole graph, a `Nodes`.

    Args:
        source: `karate` (34 members of a club, 4 communities, in torch-geometric, no download; a folder of that name
            is `./karate`); a data set of torch-geometric as `Class/name` (`Planetoid/Cora`,
            `HeterophilousGraphDataset/Tolokers`, `GraphLandDataset/tolokers-2`, `FacebookPagePage`, `Twitch/PT`, ...),
            downloaded once; a `.pt` file with a `torch_geometric.data.Data`; or a folder with `nodes.csv` and
            `edges.csv` (or `.parquet`).
        data_dir: where downloads are kept.
        target: column of `nodes.csv` to predict; `label`, `y` or `target` by default.
        task: `classification` (-1 counts as unknown beside 0 and other classes), `regression`, or `auto`: values that
            are not whole numbers, or more than 100 different numbers, are regression.
        columns: column -> `numeric`, `fraction`, `categorical` or `dense`, where the guess that is printed is wrong;
            `ignore` leaves a column out.
        components: most feature columns; beyond, categories get one column each and all go through principal
            components. 16 fits the tiny layout, 64 is the paper's.
        structure: columns made from the graph: -1 makes log-degree, log-PageRank and 8 Laplacian eigenvectors when
            there are no features, k >= 1 adds the first two and k - 1 eigenvectors, 0 adds none.
        split: `given` by the data, `random`, or `auto`: given if there is one.
        split_index: which of several given splits.
        labels_per_class: size of a random training part, in nodes per class; by default `train_fraction`.
        train_fraction: of the labelled nodes, in a random split, stratified.
        val_fraction: of the labelled nodes, in a random split, stratified.
        steps_per_epoch: training batches in an epoch.
        seed: of the split.

    Raises:
        ValueError: a number is out of range.
    """

    __str__ = describe

    def __init__(
        self,
        source: str = "karate",
        data_dir: str = "data",
        target: str | None = None,
        task: Literal["auto", "classification", "regression"] = "auto",
        columns: dict[str, Literal["numeric", "fraction", "categorical", "dense", "ignore"]] | None = None,
        components: int = 16,
        structure: int = -1,
        split: Literal["auto", "given", "random"] = "auto",
        split_index: int = 0,
        labels_per_class: int | None = None,
        train_fraction: float = 0.1,
        val_fraction: float = 0.1,
        steps_per_epoch: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 < train_fraction < 1 or not 0 <= val_fraction < 1:
            raise ValueError(f"train_fraction {train_fraction} and val_fraction {val_fraction} must lie in (0, 1)")
        check_least(-1, structure=structure)
        check_least(0, split_index=split_index)
        check_least(1, components=components, labels_per_class=labels_per_class, steps_per_epoch=steps_per_epoch)
        check_seeds(seed=seed)
        self.source = source
        self.data_dir = Path(data_dir)
        self.target = target
        self.task = task
        self.columns = columns or {}
        self.components = components
        self.structure = structure
        self.split = split
        self.split_index = split_index
        self.labels_per_class = labels_per_class
        self.train_fraction = train_fraction
        self.val_fraction = val_fraction
        self.steps_per_epoch = steps_per_epoch
        self.seed = seed
        self.nodes: Nodes | None = None
        self.parts: dict[str, Tensor] = {}
        self.said: list[str] = []

    # ------------------------------------------------------------------------------------------- reading

    def read(self) -> Table:
        """Read the source."""
        if self.source == "karate":
            from torch_geometric.datasets import KarateClub

            data = KarateClub()[0]
            data.train_mask = None  # one node per class: too few to also validate
            return table_of(data, 0, "karate")
        path = Path(self.source)
        if path.is_dir():
            return read_folder(path, self.target)
        if path.suffix == ".pt":
            if not path.is_file():
                raise FileNotFoundError(f"there is no file {path}")
            return table_of(read_data(path), self.split_index, str(path))
        return table_of(download(self.source, self.data_dir), self.split_index, self.source)

    def prepare_data(self) -> None:
        """Download once, on one process."""
        if self.source != "karate" and not Path(self.source).exists():
            self.read()

    def setup(self, stage: str | None = None) -> None:
        """Read, clean and prepare the graph, and split its labelled nodes. Says what it assumed."""
        if self.nodes is not None:
            return
        table = self.read()
        edges, said = clean_edges(table.edges, len(table.node))
        self.said = [f"{self.source}: {len(table.node)} nodes; {said}"]
        y, class_names = self._labels(table)
        known = y >= 0 if class_names else ~np.isnan(y)
        self.parts = {k: torch.from_numpy(v) for k, v in self._split(table, y, known, bool(class_names)).items()}
        x = self._features(table, edges)
        none = torch.zeros(len(y), dtype=torch.bool)
        self.nodes = Nodes(
            torch.from_numpy(x.astype(np.float32)),
            torch.from_numpy(edges),
            torch.from_numpy(y),
            none,
            none,
            len(class_names),
            table.node,
            class_names,
        )
        if class_names:
            self._check_classes(class_names)
        for line in self.said:
            rank_zero_info(line)

    def _labels(self, table: Table) -> tuple[NDArray[Any], list[str]]:
        """Codes and class names, or values and no names."""
        target = table.target
        strings = target.dtype == object
        known = _present(target)
        if not known.any():
            raise ValueError(f"{self.source}: no node has a label, so there is nothing to learn from")
        distinct = sorted(set(target[known].tolist()))
        if not strings and self.task != "regression" and distinct[:2] == [-1, 0] and len(distinct) > 2:
            self.said.append("target: -1 counts as unknown")
            known &= target != -1
            distinct = distinct[1:]
        regression = self.task == "regression"
        if self.task == "auto" and not strings:
            regression = len(distinct) > 100 or any(v != round(v) for v in distinct)
        if regression:
            if strings:
                raise ValueError(
                    f"{self.source}: the labels are words such as {distinct[0]!r}: regression needs numbers"
                )
            self.said.append(f"target: values, {int(known.sum())} known (regression)")
            return np.where(known, target, np.nan).astype(np.float32), []
        if len(distinct) == 1:
            raise ValueError(f"{self.source}: all labelled nodes are of one class, {distinct[0]!r}")
        code = {value: i for i, value in enumerate(distinct)}
        y = np.array([code[v] if there else -1 for v, there in zip(target.tolist(), known, strict=True)])
        names = [str(v) if strings else f"{v:.15g}" for v in distinct]
        counts = ", ".join(f"{name} ({int((y == i).sum())})" for i, name in enumerate(names[:10]))
        more = "" if len(names) <= 10 else f" and {len(names) - 10} more"
        self.said.append(f"target: {len(names)} classes, {counts}{more}; {int((~known).sum())} nodes unlabelled")
        return y.astype(np.int64), names

    def _split(
        self, table: Table, y: NDArray[Any], known: NDArray[Any], classification: bool
    ) -> dict[str, NDArray[Any]]:
        if self.split == "given" and not {"train", "val", "test"} <= table.masks.keys():
            raise ValueError(f"{self.source} brings no split: use split random")
        if self.split != "random" and table.masks:
            if "train" not in table.masks or not (table.masks["train"] & known).any():
                raise ValueError(f"{self.source} brings a split without a labelled training node: use split random")
            self.said.append("split: as given")
            return {part: table.masks.get(part, np.zeros_like(known)) & known for part in ("train", "val", "test")}
        rng = np.random.default_rng(self.seed)
        parts = {part: np.zeros(len(y), dtype=bool) for part in ("train", "val", "test")}
        groups = [np.flatnonzero(known & (y == c)) for c in range(int(y.max()) + 1)] if classification else None
        for group in groups or [np.flatnonzero(known)]:
            group = rng.permutation(group)
            wanted = self.labels_per_class or max(1, round(self.train_fraction * len(group)))
            train = min(wanted, max(1, len(group) - 1))
            if train < (self.labels_per_class or 0):
                self.said.append(
                    f"labels_per_class {wanted}: a class has {len(group)} labelled nodes, {train} are trained on"
                )
            val = min(max(1, round(self.val_fraction * len(group))), len(group) - train) if self.val_fraction else 0
            for part, chosen in zip(parts, np.split(group, [train, train + val]), strict=True):
                parts[part][chosen] = True
        counts = ", ".join(f"{int(mask.sum())} {part}" for part, mask in parts.items())
        self.said.append(f"split: random with seed {self.seed}, {counts}")
        return parts

    def _features(self, table: Table, edges: NDArray[Any]) -> NDArray[Any]:
        kinds: dict[str, Any] = {name: kind_of(values) for name, values in table.columns.items()}
        unknown = set(self.columns) - set(kinds)
        if unknown:
            raise ValueError(f"there is no column {', '.join(sorted(unknown))}; there are {', '.join(kinds) or 'none'}")
        kinds |= self.columns
        kept = {name: kind for name, kind in kinds.items() if kind != "ignore"}
        for name, kind in list(kept.items()):
            values = table.columns[name]
            if kind != "categorical" and values.dtype == object:
                raise ValueError(f"column {name} holds words: it can only be categorical or ignored")
            there = _present(values)
            distinct = len(set(values[there].tolist()))
            if distinct < 2:
                self.said.append(f"column {name}: constant or empty, left out")
                del kept[name]
                continue
            if values.dtype == object and distinct == there.sum() and name not in self.columns:
                self.said.append(f"column {name}: words, another one at every node, left out")
                del kept[name]
                continue
            gone = f", {int((~there).sum())} missing become the most frequent value" if not there.all() else ""
            self.said.append(f"column {name}: {kind} ({distinct} different values){gone}")
        width = len(kept) + table.dense.shape[1]
        reduce = width > self.components
        parts = [prepare_column(table.columns[name], kind, reduce, self.seed) for name, kind in kept.items()]
        if table.dense.shape[1]:
            dense = table.dense.astype(float)
            broken = ~np.isfinite(dense)
            if broken.any():
                self.said.append(f"{int(broken.sum())} missing or infinite cells become their column's mean")
                dense[broken] = math.nan
                with warnings.catch_warnings():  # a column without any value is constant and dropped below
                    warnings.simplefilter("ignore")
                    dense = np.where(broken, np.nan_to_num(np.nanmean(dense, 0)), dense)
            spread = dense.std(0)
            parts.append((dense[:, spread > 0] - dense[:, spread > 0].mean(0)) / spread[spread > 0])
            self.said.append(
                f"{dense.shape[1]} dense columns: standardised, {int((spread == 0).sum())} constant left out"
            )
        given = len(table.columns) + table.dense.shape[1]
        x = np.concatenate([*parts, np.empty((len(table.node), 0))], axis=1)
        if given and x.shape[1] == 0 and self.structure <= 0:
            raise ValueError(
                f"{self.source}: all {given} feature columns are constant or ignored: set structure to 8 to use the "
                "graph's own columns instead"
            )
        if reduce:
            x = principal_components(x, self.components, self.seed)
            self.said.append(f"{width} columns: reduced to {x.shape[1]} principal components")
        made = 8 if self.structure < 0 and given == 0 else max(self.structure - 1, 0)
        if (self.structure < 0 and given == 0) or self.structure > 0:
            x = np.concatenate([x, structure_columns(edges, len(table.node), made)], axis=1)
            self.said.append(f"log-degree, log-PageRank and {made} Laplacian eigenvectors added as columns")
        return x

    def _check_classes(self, names: list[str]) -> None:
        assert self.nodes is not None, "call setup() first"
        y = self.nodes.y
        for part in ("val", "test"):
            for c in torch.unique(y[self.parts[part]]).tolist():
                if not (y[self.parts["train"]] == c).any():
                    raise ValueError(
                        f"{self.source}: class {names[c]!r} has no training node, so it can never be predicted: "
                        "label one, or use split random"
                    )

    # ------------------------------------------------------------------------------------------- loaders

    def batch(self, context: Tensor, query: Tensor) -> Nodes:
        """The graph with a context and a query, without the columns that are constant in the context.

        Args:
            context: labelled nodes to learn from (n,) bool.
            query: nodes to predict (n,) bool.

        Raises:
            ValueError: all columns are constant in the context.
        """
        assert self.nodes is not None, "call setup() first"
        x = self.nodes.x
        varies = (x[context] != x[context][:1]).any(0)
        labelled = f"constant on the {int(context.sum())} labelled nodes to learn from"
        if len(varies) and not varies.any():
            raise ValueError(f"{self.source}: all feature columns are {labelled}: label others, or set structure to 8")
        line = f"{int((~varies).sum())} of {len(varies)} prepared columns are {labelled}, left out"
        if not varies.all() and line not in self.said:
            self._say(line)
        return self.nodes._replace(x=x[:, varies], context=context, query=query)

    def _say(self, line: str) -> None:
        self.said.append(line)
        rank_zero_info(line)

    def _loader(self, context: Tensor, query: Tensor, steps: int) -> Loader:
        nodes = self.batch(context, query)
        where = ranks(self)
        size = where["world_size"]
        batches = GlobalBatches(steps * size, size, shuffle=False, drop_last=False, seed=self.seed, **where)
        return Loader(_Repeated(nodes), batches)

    def train_dataloader(self) -> Loader:
        """The graph, `steps_per_epoch` times; the training nodes are the context."""
        return self._loader(self.parts["train"], torch.zeros_like(self.parts["train"]), self.steps_per_epoch)

    def val_dataloader(self) -> Loader | list[Nodes]:
        """The graph; training nodes are the context, validation nodes the query. Nothing without validation nodes."""
        return self._loader(self.parts["train"], self.parts["val"], 1) if self.parts["val"].any() else []

    def test_dataloader(self) -> Loader:
        """The graph; training nodes are the context, test nodes the query."""
        if not self.parts["test"].any():
            raise ValueError(f"{self.source}: no labelled node is left to test on")
        return self._loader(self.parts["train"], self.parts["test"], 1)

    def predict_dataloader(self) -> Loader:
        """The graph; all labelled nodes are the context, the others the query.

        When every node is labelled, the training nodes are the context and all others the query.
        """
        assert self.nodes is not None, "call setup() first"
        y = self.nodes.y
        known = ~y.isnan() if self.nodes.classes == 0 else y >= 0
        context = self.parts["train"] if known.all() else known
        labelled = f"{int(context.sum())} {'training' if known.all() else 'labelled'} nodes"
        self._say(f"predict: the {labelled} are the context, the other {int((~context).sum())} are predicted")
        return self._loader(context, ~context, 1)
