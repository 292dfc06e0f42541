"""The round loop: equalities, resumption, what is logged and refused."""

import csv
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import FSDPStrategy

from datamodules import ImageClassification
from lightning_modules import FedHPro
from lightning_modules.fedhpro.averaging import weighted_average
from lightning_modules.fedhpro.clients import features, train_client
from lightning_modules.fedhpro.matching import class_gradients, match_hyper_prototypes
from lightning_modules.fedhpro.strategies import FedAvg, head_of
from tests.fedhpro import toys
from tests.helpers import column, run

BATCHNORM = {"network": "ResNet10", "network_args": {"in_channels": 1, "width": 4}}


def fit(rounds=2, data=None, model=None, **options):
    model = model or toys.module(**options)
    trainer = toys.trainer(rounds)
    trainer.fit(model, data or toys.data())
    return model, trainer


@pytest.mark.parametrize("network", [{}, BATCHNORM], ids=["plain", "batchnorm"])
def test_a_round_is_the_weighted_average_of_the_clients(network):
    options = {"train_size": 100} if network else {}
    model, trainer = fit(1, toys.data(**options), strategy="FedAvg", **network)
    assert trainer.global_step == 1
    start, data = toys.module("FedAvg", **network), toys.data(**options)
    data.setup()
    states = []
    for client in data.round(0).clients:
        local = toys.module("FedAvg", **network).network
        train_client(local, client, start.strategy, start.training_plan, 0)
        states.append(local.state_dict())
    average = weighted_average(states, [len(p) for p in data.parts])
    for name, value in model.network.state_dict().items():
        if value.is_floating_point():  # BatchNorm's counters stay
            torch.testing.assert_close(value, average[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "args"),
    [
        ("FedProx", {"mu": 0.0}),
        ("Moon", {"mu": 0.0}),
        ("HyperPrototypes", {"contrastive_weight": 0.0, "alignment_weight": 0.0}),
    ],
)
def test_zero_weights_equal_fedavg_exactly(strategy, args):
    plain, _ = fit(strategy="FedAvg")
    ours, _ = fit(strategy=strategy, strategy_args=args)
    assert torch.equal(toys.weights(plain), toys.weights(ours))
    learned, _ = fit(strategy=strategy)
    assert not torch.equal(toys.weights(plain), toys.weights(learned))


@pytest.mark.parametrize(
    ("strategy", "rounds"), [("HyperPrototypes", 1), ("FedTGP", 2), ("HyperPrototypes with GN", 1)]
)
def test_clients_trained_together_equal_one_by_one(strategy, rounds):
    """Five clients of 40, 39, 39, 39, 39 images: one alone, then two and two."""
    data = {"clients": 5, "partition": "even", "train_size": 218}
    options = {"local_optimizer": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), "lr": None}
    if strategy.endswith("GN"):
        options |= {"network": "ResNet10", "network_args": {"in_channels": 1, "width": 4, "norm": "gn"}}
    strategy = strategy.split()[0]
    one, first = fit(rounds, toys.data(**data), strategy=strategy, **options)
    together, second = fit(rounds, toys.data(**data), strategy=strategy, clients_together=2, **options)
    assert sorted(len(p) for p in first.datamodule.parts) == [39, 39, 39, 39, 40]
    for name, value in one.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], value, atol=1e-5, rtol=1e-5)
    start = toys.module(strategy, **options)
    assert (toys.weights(one) - toys.weights(start)).abs().max() > 1e-3
    for name, value in first.logged_metrics.items():
        assert float(second.logged_metrics[name]) == pytest.approx(float(value), abs=1e-3), name


def test_what_cannot_be_trained_together_is_refused():
    for strategy, options, message in (
        ("FedAvg", BATCHNORM, "clients with BatchNorm cannot be trained together"),
        ("FedProx", {}, "FedProx cannot train clients together"),
        ("Moon", {}, "Moon cannot train clients together"),
        ("FPL", {}, "FPL cannot train clients together"),
        ("AveragedPrototypes", {}, "AveragedPrototypes cannot train"),
    ):
        with pytest.raises(ValueError, match=message):
            toys.module(strategy, clients_together=2, **options)
    for name in ("clients_together", "local_epochs", "local_batch_size", "num_classes"):
        with pytest.raises(ValueError, match=f"{name} 0 must be at least 1"):
            toys.module("FedAvg", **{name: 0})


def under(strategy, **options):
    """A trainer as far as `setup` looks at it: FSDP1 cannot be built without a GPU."""
    return SimpleNamespace(strategy=strategy, **options)


@pytest.mark.parametrize(
    ("strategy", "options", "trainer", "message"),
    [
        ("FedAvg", {}, lambda: toys.trainer(1, strategy="ddp", sync_batchnorm=True), "sync_batchnorm would mix"),
        ("FedAvg", {}, lambda: under(FSDPStrategy()), "does not run under FSDP1: use -c strategy/fsdp2"),
    ],
)
def test_trainers_that_are_refused(strategy, options, trainer, message):
    model = toys.module(strategy, **options)
    model.trainer = trainer()
    with pytest.raises(ValueError, match=message):
        model.setup("fit")


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("FedAvg", BATCHNORM, "under FSDP2 .* BatchNorm does not: set norm to gn"),
        ("FedProx", {}, "FedProx reads parameters .* use strategy/ddp, not FSDP2"),
        ("Moon", {}, "Moon reads parameters .* use strategy/ddp"),
        ("HeadRetraining", {}, "HeadRetraining reads parameters .* use strategy/ddp"),
        ("HyperPrototypes", {"variant": "code"}, "HyperPrototypes reads parameters .* use strategy/ddp"),
        ("FedAvg", {"clients_together": 2}, "under FSDP2 .* set clients_together to 1"),
    ],
)
def test_what_cannot_be_sharded_is_refused(strategy, options, message):
    model = toys.module(strategy, build=False, **options)
    model._device_mesh = object()  # what the strategy of a sharded run sets
    with pytest.raises(ValueError, match=message):
        model.configure_model()


def test_variant_code_sets_what_the_card_lists():
    card = Path(inspect.getfile(FedHPro)).with_name("README.md").read_text()
    rows = [line for line in card.splitlines() if re.match(r"\| \d+ \|", line)]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[4])}
    expected = {  # paper, code
        "distance": ("cos", "coord"),
        "divide_again": (False, True),
        "margin": ("distance", "none"),
        "contrastive_form": ("paper", "code"),
        "contrastive_divide": (False, True),
        "alignment_normalize": (False, True),
        "head_retraining": (False, True),
        "matching_head": ("received", "new"),
        "gradient_samples": (0, 100),
    }
    assert expected.keys() | {"lr"} <= listed
    for number, variant in enumerate(("paper", "code")):
        model = toys.module(variant=variant, lr=None)
        assert {name: getattr(model.strategy, name) for name in expected} == {k: v[number] for k, v in expected.items()}
        optimizer = model.training_plan.optimizer(model.network.parameters())
        assert optimizer.param_groups[0]["lr"] == (0.01, 0.1)[number]


def test_the_progress_bar_shows_round_and_clients(monkeypatch):
    shown = []
    for bar in (RichProgressBar(), TQDMProgressBar()):
        trainer = toys.trainer(2, enable_progress_bar=True, callbacks=[bar])
        model = toys.module("FedAvg")

        def progress(number, done, clients, bar=bar, model=model):
            FedHPro.progress(model, number, done, clients)
            tasks = bar.progress.tasks[bar.train_progress_bar_id] if isinstance(bar, RichProgressBar) else None
            shown.append(tasks.description if tasks else bar.train_progress_bar.desc)

        monkeypatch.setattr(model, "progress", progress)
        trainer.fit(model, toys.data())
    texts = [f"Round {r}/2, {k}/4 clients" for r in (1, 2) for k in (1, 2, 3, 4)]
    assert [text.removesuffix(": ") for text in shown] == texts * 2


@pytest.mark.parametrize("head", ["received", "new"])
def test_matching_in_the_round_uses_the_head_it_says(head):
    """The received head is the one from before the average: a reference to it would be the new one by then."""
    start = toys.module(strategy_args={"matching_head": head})
    data = toys.data()
    data.setup()
    gradients, holders = torch.zeros(10, 16), torch.zeros(10)
    for client in data.round(0).clients:
        z, labels = features(start.network, client)
        own, counts = class_gradients(z, labels, *head_of(start.network))
        gradients += own
        holders += counts > 0
    model, _ = fit(1, strategy_args={"matching_head": head})
    heads = {"received": head_of(start.network), "new": head_of(model.network)}
    ends = {
        name: match_hyper_prototypes(
            start.strategy.hyper_prototypes, *heads[name], gradients / holders.clamp(min=1)[:, None], holders > 0
        )[0]
        for name in heads
    }
    torch.testing.assert_close(model.strategy.hyper_prototypes, ends[head], atol=1e-5, rtol=1e-5)
    assert (ends["received"] - ends["new"]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("strategy", "args", "half"),
    [
        ("HyperPrototypes", {}, 2),
        ("Moon", {}, 2),
        ("FPL", {}, 2),
        ("FedTGP", {}, 2),
        ("CReFF", {"per_class": 5, "steps": 5, "epochs": 5}, 1),
        ("HeadRetraining", {}, 1),
        ("AveragedPrototypes", {}, 2),
    ],
)
def test_resume_is_bit_for_bit(strategy, args, half, tmp_path):
    options = {"participation": 0.75}
    whole, _ = fit(2 * half, toys.data(**options), strategy=strategy, strategy_args=args)
    first = toys.trainer(half, tmp_path)
    first.fit(toys.module(strategy, args), toys.data(**options))
    path = tmp_path / "half.ckpt"
    first.save_checkpoint(path)
    torch.load(path, weights_only=True)
    second = toys.module(strategy, args)
    toys.trainer(2 * half).fit(second, toys.data(**options), ckpt_path=path, weights_only=True)
    assert second.strategy.state_dict().keys() == whole.strategy.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_resume_from_a_checkpoint_of_the_step(tmp_path):
    """A checkpoint that a step count triggers lies before the end of its epoch; no round may be lost or repeated."""
    whole, _ = fit(3)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    toys.trainer(3, tmp_path, callbacks=[saver]).fit(toys.module(), toys.data())
    second = toys.module()
    trainer = toys.trainer(3)
    trainer.fit(second, toys.data(), ckpt_path=tmp_path / "step=2.ckpt")
    assert trainer.global_step == 3
    assert torch.equal(toys.weights(whole), toys.weights(second))


def test_server_momentum_is_resumed(tmp_path):
    options = {"server_optimizer": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)}
    whole, _ = fit(3, **options)
    first = toys.trainer(1, tmp_path)
    first.fit(toys.module(**options), toys.data())
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = toys.module(**options)
    toys.trainer(3).fit(second, toys.data(), ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(toys.weights(whole), toys.weights(second))


def test_log_names_and_traffic():
    model, trainer = fit(1)
    rows = {k: float(v) for k, v in trainer.logged_metrics.items()}
    parameters = sum(p.numel() for p in model.network.parameters())
    assert rows["train/bytes_down_per_client"] == 4 * (parameters + 10 * 5 * 16)
    assert rows["train/bytes_up_per_client"] == 4 * (parameters + 10 * 16 + 10)
    assert rows["train/bytes_down"] == 4 * rows["train/bytes_down_per_client"] and rows["train/clients"] == 4
    assert rows["train/matching_loss_after"] <= rows["train/matching_loss_before"]
    assert 0 < rows["train/hyper_prototype_move"] < 1 and rows["train/margin"] > 0
    assert {"train/loss", "train/accuracy", "train/accuracy_client_3", "val/loss", "val/accuracy"} <= rows.keys()
    assert 0 <= rows["train/accuracy_client_3"] <= 1


def test_traffic_is_that_of_the_round_not_of_the_next():
    down, _ = toys.module("FPL").traffic()  # no cluster yet
    model, trainer = fit(1, strategy="FPL")
    assert float(trainer.logged_metrics["train/bytes_down_per_client"]) == down < model.traffic()[0]


def test_held_out_accuracy_of_each_client():
    data = toys.data(val_fraction=0.3)
    model, trainer = fit(2, data)
    (batch,) = data.val_dataloader()
    right = (model.eval()(batch.image).argmax(1) == batch.label).float()
    for k in range(4):
        logged = trainer.callback_metrics[f"val/accuracy_client_{k}"]
        assert float(logged) == pytest.approx(float(right[batch.client == k].mean()))


def test_learns_and_predicts(tmp_path):
    optimizer = {"lr": None, "local_optimizer": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)}
    args = {"tau": 0.2, "margin_normalize": True}
    model, trainer = fit(6, toys.data(train_size=600), strategy_args=args, local_epochs=2, **optimizer)
    result = trainer.test(model, toys.data(), verbose=False)[0]
    assert result["test/accuracy"] > 0.4
    batches = trainer.predict(model, toys.data())
    rows = batches[0]
    assert rows["probability"].shape == (60, 10) and torch.equal(rows["label"], rows["probability"].argmax(1))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = FedHPro.load_from_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(toys.weights(loaded), toys.weights(model))
    model.save_pretrained(tmp_path / "model")
    shared = FedHPro.from_pretrained(tmp_path / "model")
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(loaded.eval()(images), model.eval()(images))
    assert torch.equal(shared(images), model(images))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        FedHPro.from_pretrained(tmp_path)


def test_domains_are_logged_apart(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    paths = []
    for name in ("dark", "light"):
        images, labels = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 10
        arrays = {f"{s}_{k}": v for s in ("train", "test") for k, v in (("images", images), ("labels", labels))}
        np.savez(tmp_path / f"{name}.npz", **arrays)
        paths.append(str(tmp_path / f"{name}.npz"))
    data = toys.data(sources=paths, partition="domain", train_size=None, test_size=None, val_fraction=0.3)
    _, trainer = fit(1, data)
    rows = {k: float(v) for k, v in trainer.callback_metrics.items()}
    mean = (rows["val/accuracy_dark"] + rows["val/accuracy_light"]) / 2
    assert rows["val/accuracy_domain_mean"] == pytest.approx(mean)


def test_init_from_takes_the_weights_alone(tmp_path):
    first, trainer = fit(1, strategy="FedAvg")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    first.save_pretrained(tmp_path / "folder")
    for source in (tmp_path / "a.ckpt", tmp_path / "folder"):
        second = toys.module("FedProx", build=False, init_from=str(source))
        again = toys.trainer(0)
        again.fit(second, toys.data())
        assert torch.equal(toys.weights(first), toys.weights(second)) and again.global_step == 0
    args = {"in_channels": 1, "width": 8, "dim": 16}
    with pytest.raises(ValueError, match=r"a\.ckpt does not fit SmallCNN: size mismatch"):
        toys.trainer(0).fit(
            toys.module(build=False, init_from=str(tmp_path / "a.ckpt"), network_args=args), toys.data()
        )


class Wrong(FedAvg):
    def after(self, network, client, state):
        return {"surprise": torch.zeros(2)}


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="not both"):
        FedHPro(lr=0.1, local_optimizer=torch.optim.Adam)
    with pytest.raises(ValueError, match="the data have a class 9, num_classes is 7"):
        fit(1, num_classes=7)
    with pytest.raises(ValueError, match="the data have 10 classes, num_classes is 11"):
        fit(1, num_classes=11)
    with pytest.raises(ValueError, match="variant is paper or code, not 'both'"):
        toys.module("FedAvg", variant="both")
    images = ImageClassification(batch_size=20)
    for step in (toys.trainer(1).fit, toys.trainer(1, num_sanity_val_steps=0).fit, toys.trainer(1).test):
        with pytest.raises(ValueError, match="clients of a federation: use datamodules.FederatedImages"):
            step(toys.module("FedAvg"), images)
    three = {"network_args": {"in_channels": 3, "width": 4, "dim": 16}}
    for options in ({}, {"limit_val_batches": 0}):
        with pytest.raises(ValueError, match=r"SmallCNN cannot take .* \[channels, h, w\] \[1, 8, 8\], .*network_args"):
            toys.trainer(1, **options).fit(toys.module("FedAvg", **three), toys.data())
    with pytest.raises(ValueError, match="SmallCNN cannot take"):
        toys.trainer(1).predict(toys.module("FedAvg", **three), toys.data())
    with pytest.raises(ValueError, match="surprise"):
        fit(1, strategy="tests.fedhpro.test_module.Wrong")
    first = toys.trainer(1, tmp_path)
    first.fit(toys.module("FedAvg"), toys.data())
    first.save_checkpoint(tmp_path / "a.ckpt")
    for model, data, message in (
        (
            toys.module("FedAvg"),
            toys.data(clients=5),
            "checkpoint has clients 4, the data have 5",
        ),
        (toys.module("FedAvg"), toys.data(seed=3), "checkpoint has seed 0, the data have 3"),
        (toys.module("FedAvg", num_classes=7), toys.data(), "num_classes 10, this run 7"),
        (toys.module("FedProx"), toys.data(), "strategy FedAvg, this run FedProx"),
    ):
        with pytest.raises(ValueError, match=message):
            toys.trainer(2).fit(model, data, ckpt_path=tmp_path / "a.ckpt")
    toys.trainer(0).test(toys.module("FedAvg"), toys.data(clients=5), tmp_path / "a.ckpt", verbose=False)


def test_predict_names_the_classes_of_a_folder_of_images(tmp_path):
    pets = toys.pets(tmp_path / "pets", 12)
    small = [
        *("--data.sources", f"[{pets}]", "--data.clients", "2", "--data.partition", "even"),
        *("--data.image_size", "8", "--data.augment", "null", "--data.val_fraction", "0.2"),
        *("--model.network_args", "{in_channels: 3, width: 4, dim: 16}", "--model.num_classes", "2"),
        *("--model.local_batch_size", "4", "--trainer.max_epochs", "6", "--trainer.accelerator", "cpu"),
    ]
    folder = run(["fit", "-c", "fedhpro/digits", *small], tmp_path / "runs")
    images = ["--data.predict_folder", str(pets)]
    last = str(folder / "checkpoints" / "last.ckpt")
    run(["predict", "-c", str(folder / "config.yaml"), "--ckpt_path", last, *images], tmp_path / "runs")
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24 and list(rows[0]) == ["name", "label", "class", "probability_cat", "probability_dog"]
    assert all(row["class"] == ("cat", "dog")[int(row["label"])] for row in rows)
    assert all(Path(row["name"]).parent.name == row["class"] for row in rows)  # dark and light


@pytest.mark.long
def test_the_quick_start_ends_above_90_percent(tmp_path):
    """Its first 12 rounds of 20."""
    folder = run(["fit", "-c", "fedhpro/digits", "--trainer.max_epochs", "12"], tmp_path)
    assert column(folder, "val/accuracy")[-1] > 0.9


def test_hyper_parameters_are_plain(tmp_path):
    model = toys.module(local_optimizer=lambda p: torch.optim.SGD(p, lr=0.1), lr=None)
    json.dumps(dict(model.hparams))
    assert "local_optimizer" not in model.hparams
