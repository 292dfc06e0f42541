"""GraphPFN in context against models trained on the same labels of real graphs.

    python benchmarks/graph_pfn_comparison.py [--data FOLDER] [--graphs cora ...] [--splits 10] [--labels 5 20]

Every method gets the same 16 standardised principal components and the same labelled nodes. Graphs above 2,000 nodes
are cut to the ball of 2,000 nodes around a random node, another one in each split. A split is two JSON files below
`benchmarks/results/graph_pfn`, written the moment they exist: what GraphPFN predicts in `<digest of the weights>`,
what the others do in `baselines`. A second start goes on where the first one stopped, and ends with the table. `--data`
names a folder of `<graph>.pt` files; without it the public downloads are used.
"""

import argparse
import hashlib
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GCNConv, LabelPropagation
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import scatter

sys.path.insert(0, str(Path(__file__).parents[1]))
from datamodules.nodes import clean_edges, download, read_data
from lightning_modules import GraphPFN
from lightning_modules.graph_pfn.module import score

RESULTS = Path(__file__).parent / "results" / "graph_pfn"
GRAPHS = {  # name -> public source of torch-geometric, metric
    "cora": ("Planetoid/Cora", "accuracy"),
    "citeseer": ("Planetoid/CiteSeer", "accuracy"),
    "facebook_pages": ("FacebookPagePage", "accuracy"),
    "chameleon_filtered": (None, "accuracy"),
    "minesweeper": ("HeterophilousGraphDataset/Minesweeper", "auc"),
    "twitch_ptbr": ("Twitch/PT", "auc"),
    "tolokers": ("HeterophilousGraphDataset/Tolokers", "auc"),
    "reed98": ("LINKXDataset/reed98", "accuracy"),
}
METHODS = {  # folder of results -> methods in it; "" stands for the digest of the weights
    "": ["graphpfn", "graphpfn_without_graph"],
    "baselines": ["gcn", "mlp", "label_propagation", "logistic", "logistic_on_smoothed"],
}
COMPONENTS, BALL = 16, 2000
COMMAND = "python benchmarks/graph_pfn_comparison.py"


def ball(edges: np.ndarray, n: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Nodes around a random node, breadth first, ascending; other starts are added while there are too few."""
    order = np.argsort(edges[0], kind="stable")
    start = np.searchsorted(edges[0][order], np.arange(n + 1))
    target = edges[1][order]
    seen = np.zeros(n, dtype=bool)
    queue: list[int] = []
    for first in rng.permutation(n):
        if len(queue) >= size:
            break
        if seen[first]:
            continue
        seen[first] = True
        position = len(queue)
        queue.append(int(first))
        while position < len(queue) < size:
            near = target[start[queue[position]] : start[queue[position] + 1]]
            near = rng.permutation(near[~seen[near]])[: size - len(queue)]
            seen[near] = True
            queue += near.tolist()
            position += 1
    return np.sort(queue)


def one_split(data: Any, seed: int, labels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, edges, classes (-1 unknown) and context of one split."""
    rng = np.random.default_rng([seed, 20260])
    n = data.num_nodes
    edges, _ = clean_edges(data.edge_index.numpy(), n)
    kept = ball(edges, n, BALL, rng) if n > BALL else np.arange(n)
    number = np.full(n, -1)
    number[kept] = np.arange(len(kept))
    edges = number[edges]
    edges = edges[:, (edges >= 0).all(0)]
    x = data.x.to_dense().numpy()[kept].astype(np.float64)
    x = x[:, x.std(0) > 0]
    if x.shape[1] > COMPONENTS:
        x = PCA(COMPONENTS, svd_solver="randomized", random_state=0).fit_transform(x)
    x = (x - x.mean(0)) / x.std(0)
    y = data.y.reshape(-1).numpy()[kept].copy()
    y[y < 0] = -1
    for c in np.unique(y[y >= 0]):
        if (y == c).sum() < 4:
            y[y == c] = -1
    present = np.unique(y[y >= 0])
    y = np.where(y >= 0, np.searchsorted(present, y), -1)
    context = np.zeros(len(y), dtype=bool)
    for c in range(len(present)):
        members = rng.permutation(np.flatnonzero(y == c))
        context[members[: min(labels, len(members) // 2)]] = True
    parts = (x.astype(np.float32), edges, y.astype(np.int64), context)
    return tuple(map(torch.from_numpy, parts))  # type: ignore[return-value]


def smooth(x: Tensor, edges: Tensor) -> Tensor:
    """Two steps of D^-1/2 (A + I) D^-1/2."""
    (source, target), weight = gcn_norm(edges, num_nodes=len(x))
    for _ in range(2):
        x = scatter(weight[:, None] * x[source], target, 0, len(x), "sum")
    return x


def logistic(x: Tensor, y: Tensor, context: Tensor, classes: int) -> Tensor:
    """Probabilities (n, classes) of logistic regression."""
    model = LogisticRegression(max_iter=1000).fit(x[context].numpy(), y[context].numpy())
    return torch.from_numpy(model.predict_proba(x.numpy()))


class Gcn(torch.nn.Module):
    """Two layers; without edges it is an MLP."""

    def __init__(self, f: int, classes: int, graph: bool) -> None:
        super().__init__()
        layer = (lambda a, b: GCNConv(a, b, cached=True)) if graph else torch.nn.Linear
        self.first, self.second, self.graph = layer(f, 32), layer(32, classes), graph

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Logits (n, classes)."""
        more = (edges,) if self.graph else ()
        x = F.dropout(self.first(x, *more).relu(), 0.5, self.training)
        return self.second(x, *more)


def trained(x: Tensor, edges: Tensor, y: Tensor, context: Tensor, classes: int, graph: bool, seed: int) -> Tensor:
    """Probabilities of a network trained for 200 epochs (Adam, rate 0.01, weight decay 5e-4, dropout 0.5)."""
    torch.manual_seed(seed)
    model = Gcn(x.shape[1], classes, graph)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges)[context], y[context]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return model(x, edges).softmax(1)


def propagated(edges: Tensor, y: Tensor, context: Tensor) -> Tensor:
    """Label propagation, 50 steps, alpha 0.9, with a little of the context's class shares where nothing arrives."""
    out = LabelPropagation(50, 0.9)(y.clamp(min=0), edges, mask=context)
    return out + 1e-6 * torch.bincount(y[context]) / context.sum()


def measure(model: GraphPFN, data: Any, seed: int, labels: int, names: list[str]) -> dict:
    """The methods `names` on one split."""
    x, edges, y, context = one_split(data, seed, labels)
    classes = int(y.max()) + 1
    query = (y >= 0) & ~context

    def in_context(graph: Tensor | None) -> Tensor:
        out = torch.zeros(len(x), classes)
        out[~context] = model.predict_nodes(x, graph, y, context, classes, seed)
        return out

    methods = {
        "graphpfn": lambda: in_context(edges),
        "graphpfn_without_graph": lambda: in_context(None),
        "gcn": lambda: trained(x, edges, y, context, classes, True, seed),
        "mlp": lambda: trained(x, edges, y, context, classes, False, seed),
        "label_propagation": lambda: propagated(edges, y, context),
        "logistic": lambda: logistic(x, y, context, classes),
        "logistic_on_smoothed": lambda: logistic(smooth(x, edges), y, context, classes),
    }
    row = {"nodes": len(x), "edges": edges.shape[1] // 2, "classes": classes, "labels": int(context.sum())}
    row["majority"] = float(torch.bincount(y[query]).max() / query.sum())
    for name in names:
        start = time.process_time()
        output = methods[name]()
        seconds = time.process_time() - start
        scores = score(output[query], y[query], classes)
        row[name] = {k: round(float(v), 5) for k, v in scores.items() if k != "score"} | {"seconds": round(seconds, 3)}
    return row


def read_rows(own: str, graph: str, labels: int) -> list[dict]:
    """The splits of a graph that all methods have done, each one dictionary."""
    folders = [RESULTS / (folder or own) for folder in METHODS]
    paths = [[folder / path.name for folder in folders] for path in sorted(folders[0].glob(f"{graph}_{labels}_*.json"))]
    return [
        {key: value for path in pair for key, value in json.loads(path.read_text()).items()}
        for pair in paths
        if all(path.exists() for path in pair)
    ]


def table(own: str, graphs: list[str], labels: list[int]) -> str:
    """The means over the splits that exist, in points, the paired differences to the GCN, and what follows."""
    names = [name for group in METHODS.values() for name in group]
    means: dict[tuple[int, str], dict[str, float]] = {}
    lines = []
    for k in labels:
        lines += ["", f"{k} labels per class", "", "| graph (splits) | metric | " + " | ".join(names) + " | to gcn |"]
        lines.append("|---" * (len(names) + 3) + "|")
        seconds = []
        for g in graphs:
            if not (rows := read_rows(own, g, k)):
                continue
            metric = GRAPHS[g][1]
            values = np.array([[100 * row[name][metric] for name in names] for row in rows])
            seconds += [[row[name]["seconds"] for name in names] for row in rows]
            means[k, g] = dict(zip(names, values.mean(0).tolist(), strict=True))
            gap = values[:, 0] - values[:, names.index("gcn")]
            error = gap.std(ddof=1) / len(gap) ** 0.5 if len(gap) > 1 else float("nan")
            cells = " | ".join(f"{v:.1f}" for v in values.mean(0))
            lines.append(f"| {g} ({len(rows)}) | {metric} | {cells} | {gap.mean():+.1f} ± {error:.1f} |")
        if seconds:
            lines.append("| CPU seconds | | " + " | ".join(f"{s:.2f}" for s in np.mean(seconds, 0)) + " | |")
    return "\n".join([*lines, "", *conclusions(means)])


def conclusions(means: dict[tuple[int, str], dict[str, float]]) -> list[str]:
    """The differences that tell whether the model is any good, in points: (labels, graph) -> method -> mean score."""
    six = [g for g in GRAPHS if g not in ("tolokers", "reed98")]

    def gaps(graphs: list[str], k: int, name: str, others: list[str]) -> str:
        parts = [(g, means[k, g][name] - max(means[k, g][o] for o in others)) for g in graphs if (k, g) in means]
        mean = np.mean([value for _, value in parts]) if parts else float("nan")
        return ", ".join(f"{g} {value:+.1f}" for g, value in parts) + f"; mean {mean:+.1f}"

    baselines = ["logistic", "mlp", "label_propagation", "gcn"]
    lines = [
        "GraphPFN to the best of the four baselines, 5 labels: " + gaps(six[:3], 5, "graphpfn", baselines),
        *(f"GraphPFN to the GCN, {k} labels: " + gaps(six, k, "graphpfn", ["gcn"]) for k in (5, 20)),
    ]
    for k in (5, 20):
        lines += [
            f"With to without the graph, {k} labels: " + gaps(six[:3], k, "graphpfn", ["graphpfn_without_graph"]),
            f"GraphPFN to logistic on smoothed, {k} labels: " + gaps(six, k, "graphpfn", ["logistic_on_smoothed"]),
            f"Without the graph to logistic, {k} labels: " + gaps(six, k, "graphpfn_without_graph", ["logistic"]),
        ]
    return lines


def digest(model: GraphPFN) -> str:
    """Eight characters that stand for the weights, so that rows of different ones never mix."""
    values = torch.cat([p.detach().flatten() for p in model.network.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:8]


def load(name: str, folder: Path | None) -> Any:
    """A graph from `folder`, or its public download; None, with a word, where there is neither."""
    if folder:
        return read_data(folder / f"{name}.pt")
    if GRAPHS[name][0] is None:
        print(f"{name} has no public download in torch-geometric: bring {name}.pt with --data")
        return None
    return download(GRAPHS[name][0], Path("data"))


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of <graph>.pt files instead of the public downloads")
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=GRAPHS)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--labels", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--weights", default="tiny", help="shipped weights, or a folder of save_pretrained")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = GraphPFN.from_pretrained(arguments.weights)
    own = digest(model)
    loaded: dict[str, Any] = {}
    for seed, name, labels, folder in product(range(arguments.splits), arguments.graphs, arguments.labels, METHODS):
        path = RESULTS / (folder or own) / f"{name}_{labels}_{seed}.json"
        if path.exists():
            continue
        if name not in loaded:
            loaded[name] = load(name, arguments.data)
        if loaded[name] is None:
            continue
        row = {
            "graph": name,
            "seed": seed,
            "labels_per_class": labels,
            "command": COMMAND + ("" if folder else f" --weights {arguments.weights}"),
        }
        row |= measure(model, loaded[name], seed, labels, METHODS[folder])
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(row, indent=1) + "\n")
        unfinished.rename(path)
    print(table(own, arguments.graphs, arguments.labels))


if __name__ == "__main__":
    main()
