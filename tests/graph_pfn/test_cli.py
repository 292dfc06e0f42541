"""What a user types: predictions on tables, fine-tuning that does harm, and refusals in one line."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import cli
from lightning_modules import GraphPFN
from tests.helpers import column, refusal, run, weights

PREDICT = ["predict", "-c", "graph_pfn/own_graph"]


def predicted(args: list[str], folder: Path) -> list[dict[str, str]]:
    """Rows of the table that a command writes below `folder`."""
    more = ["--trainer.default_root_dir", str(folder), "--trainer.enable_progress_bar", "false"]
    cli.main([*PREDICT, *args, *more])
    (path,) = folder.rglob("predictions.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def planted(rng: np.random.Generator, label: np.ndarray, degree: int = 8, own: float = 0.9) -> np.ndarray:
    """Edges (2, m) of a graph in which a share `own` of the ends stays in its class."""
    source = np.repeat(np.arange(len(label)), degree // 2)
    anyone = rng.integers(len(label), size=len(source))
    friend = np.array([rng.choice(np.flatnonzero(label == label[s])) for s in source])
    return np.stack([source, np.where(rng.random(len(source)) < own, friend, anyone)])


def tables(folder: Path, known: int = 12) -> list[str]:
    """A graph of 60 people in two camps, some of whom are labelled; returns their true camps."""
    rng = np.random.default_rng(0)
    camp = np.arange(60) % 2
    rows = [["id", "age", "share", "town", "name", "always", "label"]]
    for i, c in enumerate(camp.tolist()):
        age = "" if i == 3 else f"{30 + 10 * c + rng.normal():.6f}"
        town = ["Bern", "Rome"][c if rng.random() < 0.7 else 1 - c] if i != 5 else ""
        label = ["left", "right"][c] if i < known else ""
        rows.append([f"n{i}", age, f"{rng.random():.3f}", town, f"person {i}", "1", label])
    folder.mkdir()
    edges = [["source", "target"], ["n0", "n0"], *[[f"n{a}", f"n{b}"] for a, b in planted(rng, camp).T.tolist()]]
    for name, lines in (("nodes", rows), ("edges", edges)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    return [["left", "right"][c] for c in camp]


def test_predictions_on_tables_are_a_table_and_say_what_they_assume(tmp_path, caplog):
    truth = tables(tmp_path / "mine")
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        rows = predicted(["--data.source", str(tmp_path / "mine")], tmp_path / "runs")
    said = "\n".join(caplog.messages)
    for words in (
        "60 nodes; ",
        "1 loops",
        "of one direction made undirected",
        "target: 2 classes, left (6), right (6); 48 nodes unlabelled",
        "column age: numeric (59 different values), 1 missing become the most frequent value",
        "column share: fraction",
        "column town: categorical (2 different values), 1 missing",
        "column name: words, another one at every node, left out",
        "column always: constant or empty, left out",
        "predict: the 12 labelled nodes are the context, the other 48 are predicted",
    ):
        assert words in said
    assert list(rows[0]) == ["node", "prediction", "probability_left", "probability_right"]
    assert [row["node"] for row in rows] == [f"n{i}" for i in range(12, 60)]
    for row in rows:
        left, right = (float(row[f"probability_{side}"]) for side in ("left", "right"))
        assert left + right == pytest.approx(1, abs=1e-4)
        assert row["prediction"] == ("left" if left > right else "right")
    assert np.mean([row["prediction"] == truth[i] for i, row in enumerate(rows, 12)]) > 0.8


def test_values_are_predicted_in_their_own_units(tmp_path):
    tables(tmp_path / "mine", known=40)
    lines = (tmp_path / "mine" / "nodes.csv").read_text()
    (tmp_path / "mine" / "nodes.csv").write_text(lines.replace("left", "1000.5").replace("right", "1200.25"))
    rows = predicted(["--data.source", str(tmp_path / "mine"), "--data.task", "regression"], tmp_path / "runs")
    assert list(rows[0]) == ["node", "prediction"]
    assert len(rows) == 20
    values = np.array([float(row["prediction"]) for row in rows])
    assert ((values > 900) & (values < 1300)).all()
    assert values[1::2].mean() > values[::2].mean() + 50  # the odd nodes are the ones of the right camp


def test_fine_tuning_that_harms_stops_early_and_keeps_the_shipped_weights(tmp_path):
    folder = run(["fit", "-c", "graph_pfn/karate", "--model.learning_rate", "1"], tmp_path)
    scores = column(folder, "val/score")
    assert len(scores) == 1 + 4  # the epoch in context, then the patience of the config
    assert max(scores) == scores[0]
    best, last = (weights(folder / "checkpoints" / f"{name}.ckpt") for name in ("best", "last"))
    shipped = GraphPFN.from_pretrained("tiny").network.state_dict()
    assert all(torch.equal(best[f"network.{name}"], value) for name, value in shipped.items())
    assert not all(torch.equal(last[f"network.{name}"], value) for name, value in shipped.items())


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


def edit(file: str, old: str, new: str, count: int = -1) -> None:
    path = Path("mine", file)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, count))


def saved(**changes) -> None:
    label = torch.arange(40) % 2
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    torch.save(Data(**({"x": torch.randn(40, 3), "edge_index": edges, "y": label} | changes)), "mine.pt")


BAD = {
    "no label": (lambda: [edit("nodes.csv", f",{c}\n", ",\n") for c in ("left", "right")], "no node has a label"),
    "one class": (lambda: edit("nodes.csv", ",right\n", ",left\n"), "of one class, 'left'"),
    "no target": (lambda: edit("nodes.csv", "label", "camp"), "no column for the labels"),
    "unknown id": (lambda: edit("edges.csv", "n1,", "n999,", 1), "joins node 'n999'"),
    "same id twice": (lambda: edit("nodes.csv", "n7,", "n8,", 1), "has the id 'n8' more than once"),
    "a cell too many": (lambda: edit("nodes.csv", "n7,", "n7,8,", 1), "line 9: 8 cells, the header has 7"),
    "no edges": (lambda: Path("mine/edges.csv").unlink(), "has no edges.csv and no edges.parquet"),
    "edges without rows": (lambda: Path("mine/edges.csv").write_text("source,target\n"), "edges.csv has no rows"),
    "no folder": (lambda: Path("mine").rename("other"), "mine is no folder here"),
    "broken Parquet": (lambda: Path("mine/nodes.csv").rename("mine/nodes.parquet"), "cannot be read as Parquet"),
    "constant columns": (
        lambda: Path("mine/nodes.csv").write_text("id,age,label\n" + "".join(f"n{i},3,{i % 2}\n" for i in range(60))),
        "all 1 feature columns are constant",
    ),
    "memory": (lambda: None, "3 columns and 210 edges needs about", "--model.memory_gb", "0.001"),
    "misspelt column": (lambda: None, "no column agee; there are age", "--data.columns", "{agee: numeric}"),
    "words as numbers": (lambda: None, "column town holds words", "--data.columns", "{town: numeric}"),
    "values of words": (lambda: None, "regression needs numbers", "--data.task", "regression"),
    "file with code": (lambda: torch.save({"x": Harmful()}, "mine.pt"), "code when loaded; refused", "mine.pt"),
    "file with a list": (lambda: torch.save([torch.zeros(3)], "mine.pt"), "holds a list, not a", "mine.pt"),
    "file of bytes": (lambda: Path("mine.pt").write_bytes(b"no"), "mine.pt cannot be read", "mine.pt"),
    "no file": (lambda: None, "no file mine.pt", "mine.pt"),
    "negative node": (lambda: saved(edge_index=torch.tensor([[0], [-1]])), "joins node -1, it has the", "mine.pt"),
    "short mask": (lambda: saved(train_mask=torch.ones(9)), "9 rows of train_mask for 40 nodes", "mine.pt"),
    "no target in a file": (lambda: saved(y=None), "mine.pt has no y", "mine.pt"),
    "pickled weights": (
        lambda: torch.save({"config": Harmful(), "state_dict": {}}, "LimiX-16M.ckpt"),
        "python -m lightning_modules.graph_pfn.checkpoints LimiX-16M.ckpt LimiX-16M.safetensors",
        *("--model.layout", "limix16m", "--model.init_from", "LimiX-16M.ckpt"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(case, tmp_path, capsys):
    make, message, *more = BAD[case]
    tables(Path("mine"))
    make()
    source = more if more and more[0].endswith(".pt") else ["mine", *more]
    assert message in refusal([*PREDICT, "--data.source", *source, "--trainer.accelerator", "cpu"], capsys)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_cells_that_are_no_numbers_are_counted_and_filled(kind, tmp_path, caplog):
    tables(tmp_path / "mine")
    path = tmp_path / "mine" / "nodes.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[9][1] = kind
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        rows = predicted(["--data.source", str(tmp_path / "mine")], tmp_path / "runs")
    assert "column age: numeric (58 different values), 2 missing" in "\n".join(caplog.messages)
    assert len(rows) == 48
    assert "nan" not in {value for row in rows for value in row.values()}
