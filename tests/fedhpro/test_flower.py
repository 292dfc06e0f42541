"""The Flower app: two rounds of it are two rounds of the Lightning simulation."""

from pathlib import Path

import pytest
import torch
import yaml

from tests.fedhpro import toys

pytest.importorskip("flwr", reason="extra `flower` is not installed")
pytestmark = pytest.mark.long

CONFIG = {
    "seed_everything": 0,
    "model": {
        "class_path": "lightning_modules.FedHPro",
        "init_args": {
            "network": "SmallCNN",
            "network_args": {"in_channels": 1, "width": 4, "dim": 16},
            "local_epochs": 1,
            "local_batch_size": 16,
            "lr": 0.05,
        },
    },
    "data": {
        "class_path": "datamodules.FederatedImages",
        "init_args": {"clients": 4, "train_size": 200, "test_size": 60, "augment": ["crop"]},
    },
}


class InProcess:
    """Flower's `Grid`, as far as a strategy uses it: clients answer in this process."""

    def __init__(self, config: Path, clients: int):
        from flwr.app import Context, RecordDict

        self.contexts = {
            node: Context(1, node, {"partition-id": node - 1}, RecordDict(), {"config": str(config)})
            for node in range(1, clients + 1)
        }

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, timeout=None):
        from lightning_modules.fedhpro.flower import client_app

        return [client_app(message, self.contexts[message.metadata.dst_node_id]) for message in messages]


@pytest.fixture
def in_a_task(monkeypatch):
    """Messages want to know the task they are made in, which Flower sets before it calls an app."""
    task = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(task, name, 1)


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize("strategy", ["HyperPrototypes", "Moon", "FPL"])
def test_two_rounds_equal_the_simulation(strategy, tmp_path):
    from flwr.app import ArrayRecord

    from lightning_modules.fedhpro.flower import FlowerStrategy, accuracy, floating, read_config

    config = tmp_path / "config.yaml"
    CONFIG["model"]["init_args"]["strategy"] = strategy
    config.write_text(yaml.safe_dump(CONFIG))
    server, _ = read_config(str(config))
    start = server.network.state_dict()
    flower = FlowerStrategy(server, min_available_nodes=4)
    result = flower.start(InProcess(config, 4), ArrayRecord(floating(start)), num_rounds=2)

    model, data = read_config(str(config))
    toys.trainer(2).fit(model, data)
    assert (toys.weights(model) - toys.weights(server)).abs().max() < 1e-5
    for name, value in model.strategy.state_dict().items():
        torch.testing.assert_close(server.strategy.state_dict()[name], value, atol=1e-5, rtol=0)
    arrays = result.arrays.to_torch_state_dict()
    assert all(torch.equal(arrays[k], v) for k, v in server.network.state_dict().items())
    assert 0 <= accuracy(server, data.val_dataloader()) <= 1
