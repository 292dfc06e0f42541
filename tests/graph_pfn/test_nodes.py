import csv
import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric import datasets
from torch_geometric.data import Data, InMemoryDataset

from datamodules import NodeClassification
from datamodules.nodes import (
    clean_edges,
    download,
    kind_of,
    prepare_column,
    principal_components,
    read_data,
    structure_columns,
    table_of,
)


def write(folder, nodes, edges):
    folder.mkdir(exist_ok=True)
    for name, rows in (("nodes", nodes), ("edges", edges)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    return str(folder)


HEADER = ["id", "age", "share", "town", "label"]
NODES = [
    ["a", "10", "0.1", "Rome", "yes"],
    ["b", "20", "0.2", "", "no"],
    ["c", "", "0.7", "Bern", "yes"],
    ["d", "40", "0.8", "Rome", "no"],
    ["e", "50", "0.9", "Rome", ""],
    ["f", "60", "0.5", "Bern", "yes"],
]
EDGES = [["source", "target"], ["a", "b"], ["b", "a"], ["c", "c"], ["a", "c"], ["d", "e"], ["d", "e"]]


def test_a_users_tables(tmp_path, caplog):
    data = NodeClassification(write(tmp_path / "g", [HEADER, *NODES], EDGES), labels_per_class=1, val_fraction=0.3)
    data.setup()
    nodes = data.nodes
    assert nodes.class_names == ["no", "yes"]
    assert nodes.y.tolist() == [1, 0, 1, 0, -1, 1]
    assert nodes.node == list("abcdef")
    assert nodes.x.isfinite().all()
    assert {tuple(e) for e in nodes.edge_index.T.tolist()} == {(0, 1), (1, 0), (0, 2), (2, 0), (3, 4), (4, 3)}
    said = "\n".join(data.said)
    for words in (
        "1 loops and 1 duplicates",
        "age: numeric",
        "1 missing",
        "share: fraction",
        "town: categorical",
        "1 nodes unlabelled",
    ):
        assert words in said
    parts = torch.stack([data.parts[p] for p in ("train", "val", "test")]).int()
    assert parts.sum(0).tolist() == [1, 1, 1, 1, 0, 1]
    batch = next(iter(data.predict_dataloader()))
    assert batch.query.tolist() == [False, False, False, False, True, False]
    assert (batch.context | batch.query).all()


def test_parquet_reads_like_csv(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    write(tmp_path / "g", [HEADER, *NODES], EDGES)
    expected = NodeClassification(str(tmp_path / "g"), labels_per_class=1)
    expected.setup()
    columns = {
        k: [None if v == "" else v for v in values] for k, values in zip(HEADER, zip(*NODES, strict=True), strict=True)
    }
    columns["age"] = [None if v is None else float(v) for v in columns["age"]]
    (tmp_path / "g" / "nodes.csv").unlink()
    parquet.write_table(pa.table(columns), tmp_path / "g" / "nodes.parquet")
    data = NodeClassification(str(tmp_path / "g"), labels_per_class=1)
    data.setup()
    assert torch.equal(data.nodes.x, expected.nodes.x)
    assert torch.equal(data.nodes.y, expected.nodes.y)


def test_edges_may_be_parquet_and_ids_numbers(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "g").mkdir()
    nodes = {"id": [10, 20, 30, 40], "x": [1.5, None, 2.5, 3.5], "old": [True, False, True, None], "y": [0, 1, 0, 1]}
    parquet.write_table(pa.table(nodes), tmp_path / "g" / "nodes.parquet")
    parquet.write_table(pa.table({"src": [10, 20], "dst": [20, 40]}), tmp_path / "g" / "edges.parquet")
    data = NodeClassification(str(tmp_path / "g"), labels_per_class=1)
    data.setup()
    assert data.nodes.node == ["10", "20", "30", "40"]
    assert {tuple(e) for e in data.nodes.edge_index.T.tolist()} == {(0, 1), (1, 0), (1, 3), (3, 1)}
    assert "column x: numeric (3 different values), 1 missing" in "\n".join(data.said)
    assert "column old: numeric (2 different values), 1 missing" in "\n".join(data.said)


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        ([HEADER, *NODES], [["source", "target"], ["a", "zz"]], "joins node 'zz'"),
        ([HEADER, *NODES, NODES[0]], EDGES, "'a' more than once"),
        ([HEADER, *[[*r[:4], ""] for r in NODES]], EDGES, "no node has a label"),
        ([HEADER, *[[*r[:4], "yes"] for r in NODES]], EDGES, "all labelled nodes are of one class"),
        ([["id", "age", "label"], *[[r[0], "3", r[4]] for r in NODES]], EDGES, "constant or ignored"),
        ([HEADER, NODES[0], ["b", "2"]], EDGES, "line 3: 2 cells"),
        ([["name", "label"], ["a", "x"]], EDGES, "no column for the nodes' ids"),
        ([HEADER, *NODES], [["left", "right"], ["a", "b"]], "no column for an end of the edges"),
    ],
)
def test_what_is_wrong_with_tables_is_named(tmp_path, nodes, edges, words):
    with pytest.raises(ValueError, match=words):
        NodeClassification(write(tmp_path / "g", nodes, edges), labels_per_class=1).setup()


def test_a_class_smaller_than_labels_per_class_is_mentioned(tmp_path):
    data = NodeClassification(write(tmp_path / "g", [HEADER, *NODES], EDGES), labels_per_class=3)
    data.setup()
    assert "labels_per_class 3: a class has 2 labelled nodes, 1 are trained on" in "\n".join(data.said)
    assert not [line for line in data.said if "has 3 labelled nodes, 3" in line]


def test_a_class_without_training_node_is_named(tmp_path):
    header = [*HEADER, "split"]
    split = ["train", "test", "train", "test", "", "val"]
    nodes = [[*row, part] for row, part in zip(NODES, split, strict=True)]
    with pytest.raises(ValueError, match="class 'no' has no training node"):
        NodeClassification(write(tmp_path / "g", [header, *nodes], EDGES)).setup()


def test_columns_can_be_overruled(tmp_path):
    folder = write(tmp_path / "g", [HEADER, *NODES], EDGES)
    data = NodeClassification(folder, columns={"age": "categorical", "share": "ignore"}, labels_per_class=1)
    data.setup()
    assert "age: categorical" in "\n".join(data.said)
    assert "share" not in "\n".join(data.said)
    with pytest.raises(ValueError, match="no column agee"):
        NodeClassification(folder, columns={"agee": "numeric"}, labels_per_class=1).setup()
    with pytest.raises(ValueError, match="town holds words"):
        NodeClassification(folder, columns={"town": "numeric"}, labels_per_class=1).setup()


def graph(n=40, f=6, **more):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, f, generator=generator)
    edges = torch.randint(n, (2, 80), generator=generator)
    return Data(x=x, edge_index=edges, y=torch.arange(n) % 3, **more)


def test_a_saved_data_object(tmp_path):
    torch.save(graph(), tmp_path / "g.pt")
    data = NodeClassification(str(tmp_path / "g.pt"), labels_per_class=4)
    data.setup()
    assert data.nodes.classes == 3
    assert [int(data.parts[p].sum()) for p in ("train", "val", "test")] == [12, 3, 25]
    again = NodeClassification(str(tmp_path / "g.pt"), labels_per_class=4)
    again.setup()
    assert all(torch.equal(data.parts[p], again.parts[p]) for p in data.parts)
    other = NodeClassification(str(tmp_path / "g.pt"), labels_per_class=4, seed=1)
    other.setup()
    assert not torch.equal(data.parts["train"], other.parts["train"])


def test_minus_one_is_unknown_beside_other_classes_only(tmp_path):
    for y, names in ((torch.arange(40) % 3 - 1, ["0", "1"]), (torch.arange(40) % 2 * 2 - 1, ["-1", "1"])):
        object_ = graph()
        object_.y = y
        torch.save(object_, tmp_path / "g.pt")
        data = NodeClassification(str(tmp_path / "g.pt"), labels_per_class=4)
        data.setup()
        assert data.nodes.class_names == names


def test_given_splits_and_values(tmp_path):
    masks = {
        f"{p}_mask": torch.stack([(torch.arange(40) + i) % 3 == k for i in range(2)], 1)
        for k, p in enumerate(("train", "val", "test"))
    }
    object_ = graph(**masks)
    object_.y = torch.linspace(0, 1, 40)
    torch.save(object_, tmp_path / "g.pt")
    data = NodeClassification(str(tmp_path / "g.pt"), split_index=1)
    data.setup()
    assert data.nodes.classes == 0
    assert torch.equal(data.parts["val"], masks["val_mask"][:, 1])
    with pytest.raises(ValueError, match="has 2 splits"):
        NodeClassification(str(tmp_path / "g.pt"), split_index=2).setup()


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_file_that_executes_code_is_refused(tmp_path, capsys):
    torch.save({"x": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="refused"):
        read_data(tmp_path / "bad.pt")
    assert "executed" not in capsys.readouterr().out


def test_karate_needs_no_download():
    data = NodeClassification()
    data.prepare_data()
    data.setup()
    assert data.nodes.x.shape == (34, 10)
    assert data.nodes.classes == 4
    assert len(list(data.train_dataloader())) == 10


def test_unknown_sources_are_named():
    with pytest.raises(ValueError, match="did you mean Planetoid"):
        NodeClassification("Planetiod/Cora").setup()
    with pytest.raises(FileNotFoundError, match="no file"):
        NodeClassification("nowhere.pt").setup()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("planetoid/cora", "no data set planetoid: did you mean Planetoid"),
        ("utils", "no data set utils"),
        ("Planetoid", "Planetoid stands for several data sets: name one"),
        ("Planetoid/", "Planetoid stands for several"),
        ("FacebookPagePage/x", "takes no name: leave out /x"),
        ("HeterophilousGraphDataset/Foo", "HeterophilousGraphDataset/Foo: unknown name"),
        ("KarateClub", "made, not fetched"),
    ],
)
def test_names_that_torch_geometric_does_not_take(source, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        NodeClassification(source, data_dir=str(tmp_path / "data")).prepare_data()
    assert not (tmp_path / "data").exists()


@pytest.fixture
def fetched(monkeypatch):
    """A data set of torch-geometric whose second file needs what the test puts in `server`."""
    server = {"reachable": False, "fetches": 0, "graphs": 1, "error": ConnectionResetError("the peer hung up")}

    class Fetched(InMemoryDataset):
        raw_file_names = ("a.txt", "b.txt")
        processed_file_names = "data.pt"

        def __init__(self, root, name):
            self.name = name
            super().__init__(root)
            self.load(self.processed_paths[0])

        @property
        def raw_dir(self):
            return str(Path(self.root) / self.name / "raw")

        @property
        def processed_dir(self):
            return str(Path(self.root) / self.name / "processed")

        def download(self):
            server["fetches"] += 1
            for path in self.raw_paths:
                Path(path).write_text("half")
                if path.endswith("b.txt") and not server["reachable"]:
                    raise server["error"]
                Path(path).write_text("whole")

        def process(self):
            assert [Path(path).read_text() for path in self.raw_paths] == ["whole", "whole"]
            self.save([graph()] * server["graphs"], self.processed_paths[0])

    monkeypatch.setattr(datasets, "Fetched", Fetched, raising=False)
    monkeypatch.setattr(datasets, "__all__", [*datasets.__all__, "Fetched"])
    return server


def test_an_interrupted_download_leaves_nothing_that_counts_as_complete(fetched, tmp_path):
    data = NodeClassification("Fetched/one", data_dir=str(tmp_path / "data"), labels_per_class=4)
    with pytest.raises(FileNotFoundError, match=r"Fetched/one is not in .*data/Fetched .*the peer hung up"):
        data.prepare_data()
    assert not list((tmp_path / "data").iterdir())
    fetched["error"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError) as full:
        data.prepare_data()
    assert full.value.errno == errno.ENOSPC, "a full disk is not called a missing download"
    assert not list((tmp_path / "data").iterdir())
    # what an interruption by other means has left in the place itself
    (tmp_path / "data" / "Fetched" / "one" / "raw").mkdir(parents=True)
    (tmp_path / "data" / "Fetched" / "one" / "raw" / "a.txt").write_text("half")
    fetched |= {"reachable": True, "fetches": 0}
    data.prepare_data()
    data.setup()
    assert data.nodes.classes == 3
    NodeClassification("Fetched/one", data_dir=str(tmp_path / "data"), labels_per_class=4).setup()
    assert fetched["fetches"] == 1, "it is fetched once"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["Fetched"]
    NodeClassification("Fetched/two", data_dir=str(tmp_path / "data")).prepare_data()
    assert sorted(path.name for path in (tmp_path / "data" / "Fetched").iterdir()) == ["one", "two"]


def test_files_put_in_place_by_hand_need_no_network(fetched, tmp_path):
    raw = tmp_path / "data" / "Fetched" / "one" / "raw"
    raw.mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (raw / name).write_text("whole")
    NodeClassification("Fetched/one", data_dir=str(tmp_path / "data")).prepare_data()
    assert fetched["fetches"] == 0


def test_several_graphs_are_refused_not_dropped(fetched, tmp_path):
    fetched |= {"reachable": True, "graphs": 3}
    with pytest.raises(ValueError, match="Fetched/one has 3 graphs"):
        NodeClassification("Fetched/one", data_dir=str(tmp_path / "data")).prepare_data()


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (
            ["trian", "test", "train", "test", "", "val"],
            r"nodes\.csv has the split 'trian' for node 'a': needed is train",
        ),
        (["", "test", "", "val", "", "val"], "a split without a labelled training node: use split random"),
        (["", "", "", "", "train", "val"], "a split without a labelled training node"),
    ],
)
def test_a_split_that_cannot_be_used_is_not_replaced_by_another(splits, message, tmp_path):
    nodes = [[*HEADER, "split"], *([*row, part] for row, part in zip(NODES, splits, strict=True))]
    for split in ("auto", "given"):
        with pytest.raises(ValueError, match=message):
            NodeClassification(write(tmp_path / "g", nodes, EDGES), split=split).setup()


def test_an_empty_split_column_is_none(tmp_path):
    nodes = [[*HEADER, "split"], *([*row, ""] for row in NODES)]
    data = NodeClassification(write(tmp_path / "g", nodes, EDGES), labels_per_class=1)
    data.setup()
    assert "split: random" in "\n".join(data.said)


def test_tables_that_are_no_text_or_no_parquet(tmp_path):
    folder = write(tmp_path / "g", [HEADER, *NODES], EDGES)
    (tmp_path / "g" / "nodes.csv").write_bytes("id,label\na,é\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"nodes\.csv is not text in UTF-8"):
        NodeClassification(folder).setup()
    (tmp_path / "g" / "nodes.csv").unlink()
    (tmp_path / "g" / "nodes.parquet").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"nodes\.parquet cannot be read as Parquet"):
        NodeClassification(folder).setup()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.arange(7)}, "7 rows of y for 40 nodes"),
        ({"y": torch.zeros(40, 3)}, "120 rows of y for 40 nodes"),
        ({"train_mask": torch.ones(7, dtype=torch.bool)}, "7 rows of train_mask for 40 nodes"),
        ({"edge_index": torch.tensor([[0, 99], [1, 2]])}, "joins node 99"),
    ],
)
def test_a_data_object_whose_parts_do_not_fit(changes, message, tmp_path):
    object_ = graph()
    for name, value in changes.items():
        object_[name] = value
    torch.save(object_, tmp_path / "mine.pt")
    with pytest.raises(ValueError, match=message) as error:
        NodeClassification(str(tmp_path / "mine.pt")).setup()
    assert "mine.pt" in str(error.value)


def test_clean_edges():
    edges, said = clean_edges(np.array([[0, 1, 2, 2, 0], [1, 0, 2, 3, 1]]), 4)
    assert {tuple(e) for e in edges.T.tolist()} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert said.startswith("5 edges given: 1 loops and 1 duplicates removed, 1 of one direction made undirected, 2")
    assert clean_edges(np.empty((2, 0), dtype=np.int64), 4)[0].shape == (2, 0)


def test_columns_are_prepared_by_kind():
    rng = np.random.default_rng(0)
    skewed = np.exp(3 * rng.standard_normal(500))
    normal = prepare_column(skewed, "numeric", False, 0)[:, 0]
    assert abs(normal.mean()) < 0.1
    assert 0.9 < normal.std() < 1.2
    assert (np.argsort(normal[np.argsort(skewed)]) == np.arange(500)).mean() > 0.9
    uniform = prepare_column(rng.random(500) ** 3, "fraction", False, 0)
    assert 0 <= uniform.min() < 0.01 < 0.99 < uniform.max() <= 1
    words = np.array(["b", None, "a", "b"], dtype=object)
    assert prepare_column(words, "categorical", False, 0).tolist() == [[1], [1], [0], [1]]
    assert prepare_column(words, "categorical", True, 0).tolist() == [[0, 1], [0, 1], [1, 0], [0, 1]]
    holes = np.array([1.0, np.inf, np.nan, 1.0, 2.0])
    assert np.isfinite(prepare_column(holes, "numeric", False, 0)).all()
    assert [kind_of(v) for v in (words, skewed, np.array([0, 0.5, 1.0]), np.array([0.0, 1, 1]))] == [
        "categorical",
        "numeric",
        "fraction",
        "numeric",
    ]


def test_laplacian_eigenvectors():
    n = 12
    nodes = np.arange(n)
    edges = np.concatenate([[nodes, np.roll(nodes, 1)], [np.roll(nodes, 1), nodes]], axis=1)
    columns = structure_columns(edges, n, 2)
    np.testing.assert_allclose(columns[:, 0], np.log(3))
    adjacency = np.zeros((n, n))
    adjacency[tuple(edges)] = 0.5
    for v in columns[:, 2:].T:
        np.testing.assert_allclose(adjacency @ v, np.cos(2 * np.pi / n) * v, atol=1e-6)


def test_a_graph_without_features_and_edges_has_nothing_to_go_by(tmp_path):
    torch.save(Data(edge_index=torch.tensor([[3], [3]]), y=torch.arange(20) % 2, num_nodes=20), tmp_path / "g.pt")
    data = NodeClassification(str(tmp_path / "g.pt"))
    data.setup()
    with pytest.raises(ValueError, match="all feature columns are constant"):
        data.train_dataloader()


def test_a_folder_of_the_name_does_not_hide_the_club(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("karate").mkdir()
    data = NodeClassification("karate")
    data.prepare_data()
    data.setup()
    assert len(data.nodes.x) == 34
    with pytest.raises(FileNotFoundError, match=r"karate has no nodes\.csv"):
        NodeClassification("./karate").setup()


def test_numbers_of_classes_keep_all_digits(tmp_path):
    object_ = graph()
    object_.y = torch.tensor([1234567, 1234568], dtype=torch.int64).repeat(20)
    torch.save(object_, tmp_path / "g.pt")
    data = NodeClassification(str(tmp_path / "g.pt"))
    data.setup()
    assert data.nodes.class_names == ["1234567", "1234568"]


@pytest.mark.parametrize("x", [torch.randn(40, 3, requires_grad=True), torch.randn(40, 3).bfloat16()])
def test_features_that_numpy_does_not_take(x, tmp_path):
    object_ = graph()
    object_.x = x
    torch.save(object_, tmp_path / "g.pt")
    data = NodeClassification(str(tmp_path / "g.pt"))
    data.setup()
    assert data.nodes.x.shape == (40, 3)


def test_wide_tables_with_holes_become_principal_components(tmp_path):
    object_ = graph(n=60, f=150)
    object_.x[:, 0] *= 40
    object_.x[:, 5] = 2.0
    object_.x[3, 7], object_.x[4, 8] = torch.nan, torch.inf
    torch.save(object_, tmp_path / "g.pt")
    data = NodeClassification(str(tmp_path / "g.pt"), components=4)
    data.setup()
    said = "\n".join(data.said)
    assert "2 missing or infinite cells become their column's mean" in said
    assert "150 dense columns: standardised, 1 constant left out" in said
    assert "150 columns: reduced to 4 principal components" in said
    x = object_.x.double().numpy()
    x[3, 7], x[4, 8] = np.delete(x[:, 7], 3).mean(), np.delete(x[:, 8], 4).mean()
    x = np.delete(x, 5, axis=1)
    u = np.linalg.svd((x - x.mean(0)) / x.std(0))[0][:, :4]
    found = data.nodes.x.double().numpy()
    np.testing.assert_allclose(np.abs((found.T @ u) / 60**0.5), np.eye(4), atol=1e-3)
    np.testing.assert_allclose(found.std(0), 1, atol=1e-3)
    narrow = NodeClassification(str(tmp_path / "g.pt"), components=200)
    narrow.setup()
    assert narrow.nodes.x.shape == (60, 149)


def test_categories_get_a_column_each_before_principal_components(tmp_path):
    rng = np.random.default_rng(0)
    towns = [["Bern", "Oslo", "Rome"][i % 3] for i in range(30)]
    rows = [[f"n{i}", towns[i], *(f"{v:.4f}" for v in rng.standard_normal(2)), i % 2] for i in range(30)]
    folder = write(tmp_path / "g", [["id", "town", "a", "b", "label"], *rows], [["source", "target"], ["n0", "n1"]])
    data = NodeClassification(folder, components=2)
    data.setup()
    one_hot = np.eye(3)[[["Bern", "Oslo", "Rome"].index(t) for t in towns]]
    numbers = [prepare_column(np.array([float(row[k]) for row in rows]), "numeric", True, 0) for k in (2, 3)]
    expected = principal_components(np.concatenate([one_hot, *numbers], axis=1), 2, 0)
    np.testing.assert_allclose(data.nodes.x.numpy(), expected, atol=1e-5)


def test_a_column_of_names_is_left_out_unless_asked_for(tmp_path):
    nodes = [[*row[:3], f"person {i}", row[4]] for i, row in enumerate(NODES)]
    folder = write(tmp_path / "g", [HEADER, *nodes], EDGES)
    data = NodeClassification(folder, labels_per_class=1)
    data.setup()
    assert "column town: words, another one at every node, left out" in data.said
    asked = NodeClassification(folder, labels_per_class=1, columns={"town": "categorical"})
    asked.setup()
    assert asked.nodes.x.shape[1] == data.nodes.x.shape[1] + 1


def test_a_column_counts_where_it_varies_among_the_nodes_learnt_from(tmp_path):
    header = ["id", "age", "member", "label", "split"]
    split = ["train", "train", "val", "val", "test", ""]
    nodes = [[f"n{i}", i, int(i in (2, 5)), i % 2 if i < 5 else "", split[i]] for i in range(6)]
    data = NodeClassification(write(tmp_path / "g", [header, *nodes], [["source", "target"], ["n0", "n5"]]))
    data.setup()
    (validation,) = data.val_dataloader()
    assert validation.x.shape == (6, 1)
    assert "1 of 2 prepared columns are constant on the 2 labelled nodes to learn from, left out" in data.said
    (everything,) = data.predict_dataloader()
    assert everything.x.shape == (6, 2)  # n2 is labelled, too
    assert "predict: the 5 labelled nodes are the context, the other 1 are predicted" in data.said


def test_columns_without_variation_among_the_nodes_learnt_from(tmp_path):
    header = ["id", "member", "label", "split"]
    nodes = [[f"n{i}", int(i > 3), i % 2, "train" if i < 4 else "test"] for i in range(8)]
    data = NodeClassification(write(tmp_path / "g", [header, *nodes], [["source", "target"], ["n0", "n5"]]))
    data.setup()
    with pytest.raises(ValueError, match="all feature columns are constant on the 4 labelled nodes to learn from"):
        data.train_dataloader()


def test_graphland_comes_unprepared_and_with_its_kinds(monkeypatch, tmp_path):
    class GraphLandDataset:
        raw_paths: tuple[str, ...] = ()

        def __init__(self, root, name, **arguments):
            self.arguments = arguments

        def __len__(self):
            return 1

        def __getitem__(self, i):
            return self.arguments

    monkeypatch.setattr(datasets, "GraphLandDataset", GraphLandDataset)
    given = download("GraphLandDataset/tolokers-2", tmp_path)
    assert given.pop("split") == "RL"
    assert len(given) == 4
    assert set(given.values()) == {None}
    object_ = graph(f=3, x_categorical_mask=torch.tensor([False, True, False]))
    object_.x[:, 1] = torch.arange(40) % 3
    object_.x[4, 1] = torch.nan
    columns = table_of(object_, 0, "it").columns
    assert [kind_of(values) for values in columns.values()] == ["numeric", "categorical", "numeric"]
    assert columns["feature_1"][:5].tolist() == ["0", "1", "2", "0", None]
