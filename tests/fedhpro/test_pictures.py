"""Pictures of a federation."""

import numpy as np
import pytest
import torch

from callbacks.federated_pictures import FederatedPictures, anchor_cosines, clients_figure, features_figure
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


def test_a_run_draws_and_logs(tmp_path):
    trainer = toys.trainer(1, tmp_path, callbacks=[FederatedPictures()], enable_checkpointing=False)
    trainer.fit(toys.module(), toys.data())
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"clients.png", "features.png"}
    assert -1 <= trainer.callback_metrics["val/anchor_cosine_own"] <= 1
    trainer.validate(toys.module("FedAvg"), toys.data(), verbose=False)  # without anchors
