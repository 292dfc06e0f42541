"""The Flower app: two rounds of it are two rounds of the Lightning simulation."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.fedhpro import toys

pytest.importorskip("flwr", reason="extra `flower` is not installed")

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


@pytest.mark.long
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
    flower = FlowerStrategy(server, [str(c) for c in range(10)], min_available_nodes=4)
    result = flower.start(InProcess(config, 4), ArrayRecord(floating(start)), num_rounds=2)

    model, data = read_config(str(config))
    toys.trainer(2).fit(model, data)
    assert (toys.weights(model) - toys.weights(server)).abs().max() < 1e-5
    for name, value in model.strategy.state_dict().items():
        torch.testing.assert_close(server.strategy.state_dict()[name], value, atol=1e-5, rtol=0)
    arrays = result.arrays.to_torch_state_dict()
    assert all(torch.equal(arrays[k], v) for k, v in server.network.state_dict().items())
    assert 0 <= accuracy(server, data.val_dataloader()) <= 1


def ask(folder, classes, node):
    """What a site with this node config answers to the first message of a federation with these classes."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

    from lightning_modules.fedhpro.flower import client_app, floating, read_config

    model = CONFIG["model"]["init_args"]
    small = {**model, "strategy": "HyperPrototypes", "num_classes": len(classes)}
    small["network_args"] = {**model["network_args"], "in_channels": 3}
    data = {"clients": 4, "image_size": 8, "channels": 3, "train_size": 1200, "alpha": 0.1}  # more than a site has
    content = {
        "model": {"class_path": "lightning_modules.FedHPro", "init_args": small},
        "data": {"class_path": "datamodules.FederatedImages", "init_args": data},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    server, _ = read_config(str(path))
    records = {
        "arrays": ArrayRecord(floating(server.network.state_dict())),
        "shared": ArrayRecord({"hyper_prototypes": server.strategy.hyper_prototypes}),
        "config": ConfigRecord({"server-round": 1, "classes": classes}),
    }
    message = Message(RecordDict(records), dst_node_id=1, message_type="train")
    return client_app(message, Context(1, 1, node, RecordDict(), {"config": str(path)})).content


def pictures(folder, names):
    from torchvision.io import write_png

    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(10):
            write_png(torch.full((3, 9, 9), 50 * number + i, dtype=torch.uint8), str(folder / name / f"{i}.png"))
    return str(folder)


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize("held", [["cat", "dog"], ["horse", "cat"], ["dog"]])
def test_a_site_finds_its_classes_by_name(held, tmp_path):
    classes = ["horse", "dog", "cat", "ant"]
    answer = ask(tmp_path, classes, {"sources": pictures(tmp_path / "mine", held), "client": 7})
    holders = answer["sent"].to_torch_state_dict()["holders"]
    assert [name for name, here in zip(classes, holders, strict=True) if here] == [c for c in classes if c in held]
    assert answer["metrics"]["client"] == 7
    assert answer["metrics"]["num-examples"] == round(
        len(held) * 10 * 0.8 * 0.9 - 0.5
    )  # a fifth tests, a tenth validates


@pytest.mark.usefixtures("in_a_task")
def test_an_npz_site_may_lack_a_middle_class(tmp_path):
    images, labels = np.zeros((20, 8, 8), dtype=np.uint8), np.array([0, 2]).repeat(10)
    np.savez(tmp_path / "my.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    answer = ask(tmp_path, ["0", "1", "2", "3"], {"sources": str(tmp_path / "my.npz"), "client": 0})
    assert answer["sent"].to_torch_state_dict()["holders"].tolist() == [1, 0, 1, 0]
    with pytest.raises(
        ValueError, match=r"my\.npz has a class '2', the federation has 0, 1: rename it or leave it out"
    ):
        ask(tmp_path, ["0", "1"], {"sources": str(tmp_path / "my.npz"), "client": 0})


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize("participation", [0.3, 0.6, 0.65])
def test_as_many_sites_take_part_as_clients_in_the_simulation(participation, tmp_path, monkeypatch):
    from flwr.app import ConfigRecord, Context, RecordDict

    from lightning_modules.fedhpro import flower

    data = {**CONFIG["data"]["init_args"], "participation": participation}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "data": {**CONFIG["data"], "init_args": data}}))
    asked = []

    def start(strategy, grid, arrays, **_):
        asked.append(len(list(strategy.configure_train(1, arrays, ConfigRecord(), grid))))

    monkeypatch.setattr(flower.FlowerStrategy, "start", start)
    context = Context(1, 1, {}, RecordDict(), {"config": str(path), "rounds": 1})
    flower._serve(InProcess(path, 4), context)
    simulated = toys.data(participation=participation)
    simulated.setup()
    assert asked == [len(simulated.round(0).clients)]


@pytest.mark.usefixtures("in_a_task")
def test_a_site_that_does_not_fit_is_refused(tmp_path):
    from lightning_modules.fedhpro.flower import FlowerStrategy

    mine = pictures(tmp_path / "mine", ["cat", "dgo"])
    with pytest.raises(ValueError, match="mine has a class 'dgo', the federation has cat, dog: rename it or leave it"):
        ask(tmp_path, ["cat", "dog"], {"sources": mine, "client": 0})
    with pytest.raises(ValueError, match="needs a number of its own"):
        ask(tmp_path, ["cat", "dgo"], {"sources": mine})
    with pytest.raises(ValueError, match="the data have 3 classes, num_classes is 10"):
        FlowerStrategy(toys.module(), ["a", "b", "c"])
