"""Pictures of a federation."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from callbacks.federated_pictures import FederatedPictures, accuracies, anchor_cosines, clients_figure, features_figure
from tests.fedhpro import toys


def test_cosines_of_anchors_that_know_their_class():
    means = 3 * torch.eye(4, 8)
    z, labels = means.repeat_interleave(5, 0), torch.arange(4).repeat_interleave(5)
    own, other = anchor_cosines(z, labels, means - means.mean(0))
    assert own == pytest.approx(1, abs=1e-6) and other == pytest.approx(-1 / 3, abs=1e-6)
    own, other = anchor_cosines(z, labels, torch.eye(8)[4:])
    assert own == pytest.approx(0, abs=1e-6) and other == pytest.approx(0, abs=1e-6)


def test_figures_draw():
    figure = clients_figure(np.arange(6).reshape(2, 3), ["a", "b", "long name"])
    assert len(figure.axes[0].texts) == 6
    figure = features_figure(torch.rand(20, 5), torch.arange(20) % 3, torch.rand(3, 5), ["a", "b", "c"])
    assert len(figure.axes[0].collections) == 2
    assert len(features_figure(torch.rand(20, 5), torch.arange(20) % 3, None, ["a", "b", "c"]).axes[0].collections) == 1


def table(path):
    with path.open() as file:
        return {
            (r["part"], r["name"]): [float(r["training_images"]), float(r["accuracy"])] for r in csv.DictReader(file)
        }


def test_domains_have_rows_of_their_own(tmp_path):
    data = SimpleNamespace(
        domains=["mnist", "usps"],
        table=SimpleNamespace(domains=torch.tensor([0, 0, 1])),
        counts=lambda: np.array([[1, 0], [1, 1]]),
    )
    logged = {"accuracy": 0.5, "accuracy_mnist": 0.25, "accuracy_usps": 1.0, "accuracy_client_1": 0.75}
    trainer = SimpleNamespace(
        datamodule=data, callback_metrics={f"test/{k}": torch.tensor(v) for k, v in logged.items()}
    )
    assert [tuple(row.values()) for row in accuracies(trainer, "test")] == [
        ("all", "", 3, 0.5),
        ("domain", "mnist", 2, 0.25),
        ("domain", "usps", 1, 1.0),
        ("client", "1", 2, 0.75),
    ]


def test_a_run_draws_and_logs(tmp_path):
    trainer = toys.trainer(1, tmp_path, callbacks=[FederatedPictures()], enable_checkpointing=False)
    trainer.fit(toys.module(), toys.data())
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"clients.png", "features.png"}
    assert -1 <= trainer.callback_metrics["val/anchor_cosine_own"] <= 1
    rows, logged = table(tmp_path / "val_federation.csv"), trainer.callback_metrics
    assert rows["all", ""] == pytest.approx([180, logged["val/accuracy"].item()])
    clients = [key for key in rows if key[0] == "client"]
    assert sum(rows[key][0] for key in clients) == 180 and clients
    for key in clients:
        assert rows[key][1] == pytest.approx(logged[f"val/accuracy_client_{key[1]}"].item())
    trainer.test(trainer.lightning_module, toys.data(), verbose=False)
    assert table(tmp_path / "test_federation.csv")["all", ""][1] == pytest.approx(
        trainer.callback_metrics["test/accuracy"].item()
    )
    trainer.validate(toys.module("FedAvg"), toys.data(), verbose=False)  # without anchors
