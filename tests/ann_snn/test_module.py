"""The LightningModule: wiring, checkpoints, pretrained folders."""

import json

import pytest
import torch
from lightning.pytorch import Trainer

import callbacks
import datamodules
import lightning_modules
from datamodules import ImageClassification
from lightning_modules import AnnSnn, ImageClassifier
from lightning_modules.ann_snn.conversion import simulate
from lightning_modules.ann_snn.source import build, load_weights

STRONG = {"conversion": "channel", "percentile": 99.0, "half_threshold": True}


def digits(**options):
    data = ImageClassification(**options)
    data.setup()
    return data


def quick(folder, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0, "max_epochs": 1}
    return Trainer(default_root_dir=folder, **{**quiet, **limits, **options})


@pytest.fixture(scope="module")
def converted():
    module = AnnSnn(**STRONG, time_steps=[2, 4])
    module.convert_with(list(digits().calibration_dataloader())[:3])
    return module


def test_layer_weights_are_those_of_each_time_step(converted):
    assert converted.layer_weights.shape == (2, 3)
    torch.testing.assert_close(converted.layer_weights.sum(1), torch.ones(2))
    assert not torch.allclose(converted.layer_weights[0], converted.layer_weights[1])


def test_forward_is_the_time_mean(converted):
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(converted(x), simulate(converted.student, x, 4).logits)
    assert torch.equal(converted(x, 2), simulate(converted.student, x, 2).logits)


def test_teacher_and_student_stay_in_evaluation_mode(converted):
    converted.train()
    assert converted.training
    assert not any(m.training for m in converted.teacher.modules())
    assert not any(m.training for m in converted.student.modules())
    converted.eval()


def test_training_lowers_the_loss_and_leaves_the_teacher_alone(tmp_path, converted):
    module = AnnSnn(**STRONG, time_steps=2, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    data = digits(batch_size=50)
    module.convert_with(list(data.calibration_dataloader())[:3])
    before = {k: v.clone() for k, v in module.teacher.state_dict().items()}
    thresholds = {k: v.clone() for k, v in module.student.state_dict().items() if "threshold" in k}
    x, y = (torch.cat(z) for z in zip(*[b[:2] for b in data.val_dataloader()], strict=True))
    accuracy = lambda: (module(x).argmax(1) == y).float().mean().item()  # noqa: E731
    start = accuracy()
    quick(tmp_path, max_epochs=2, limit_train_batches=1.0, limit_val_batches=0).fit(module, datamodule=data)
    assert accuracy() > start + 0.03
    assert all(torch.equal(v, before[k]) for k, v in module.teacher.state_dict().items())
    assert thresholds and all(
        torch.equal(v, thresholds[k]) for k, v in module.student.state_dict().items() if k in thresholds
    )


def test_a_checkpoint_needs_nothing_but_its_file(tmp_path):
    module = AnnSnn(**STRONG, time_steps=2, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    trainer = quick(tmp_path)
    trainer.fit(module, datamodule=digits())
    path = tmp_path / "x.ckpt"
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    content["hyper_parameters"]["weights"] = "gone.pt"  # the source's file may be gone
    torch.save(content, path)
    loaded = AnnSnn.load_from_checkpoint(path)
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(loaded(x), module(x))
    assert torch.equal(loaded.teacher(x), module.teacher(x))
    assert torch.equal(loaded.layer_weights, module.layer_weights)


def test_pretrained_folder(tmp_path, converted):
    converted.save_pretrained(tmp_path / "snn")
    assert {p.name for p in (tmp_path / "snn").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    again = AnnSnn.from_pretrained(tmp_path / "snn")
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(again(x), converted(x))
    config = json.loads((tmp_path / "snn" / "config.json").read_text())
    (tmp_path / "snn" / "config.json").write_text(json.dumps(config | {"format": 99}))
    with pytest.raises(ValueError, match="upgrade fulgurite"):
        AnnSnn.from_pretrained(tmp_path / "snn")
    (tmp_path / "snn" / "config.json").write_text(json.dumps(config | {"class": "Other"}))
    with pytest.raises(ValueError, match="not written by AnnSnn"):
        AnnSnn.from_pretrained(tmp_path / "snn")
    with pytest.raises(FileNotFoundError, match="cannot be fetched"):
        AnnSnn.from_pretrained("nobody/nothing")


def test_init_from_takes_weights_only(tmp_path, converted):
    trainer = quick(tmp_path)
    module = AnnSnn(**STRONG, time_steps=2)
    trainer.fit(module, datamodule=digits())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = AnnSnn(**STRONG, time_steps=[2, 3], init_from=str(tmp_path / "x.ckpt"))  # at another T, too
    fresh = quick(tmp_path, limit_train_batches=0)
    fresh.fit(again, datamodule=digits())
    assert fresh.global_step == 0
    for name, value in module.state_dict().items():
        assert name == "layer_weights" or torch.equal(again.state_dict()[name], value), name
    assert again.layer_weights.shape == (2, 3)  # measured anew
    torch.testing.assert_close(again.layer_weights.sum(1), torch.ones(2))


def test_init_from_a_folder_takes_the_spiking_network_and_the_teacher_of_weights(tmp_path, converted):
    folder = tmp_path / "snn"
    with torch.no_grad():
        next(converted.student.parameters()).mul_(1.5)
    converted.save_pretrained(folder)
    again = AnnSnn(**STRONG, time_steps=2, init_from=str(folder))
    quick(tmp_path, limit_train_batches=0).fit(again, datamodule=digits())
    for part in ("student", "teacher"):
        for name, value in getattr(converted, part).state_dict().items():
            assert torch.equal(getattr(again, part).state_dict()[name], value), (part, name)


@pytest.mark.parametrize(
    "options",
    [
        {"weighting": "dynamic"},
        {"weighting": "uniform", "train_threshold": True, "train_v0": True},
        {"weight_estimator": "unbiased_stepgram", "unbiased_cka": True},
        {"memory_optimised": True, "cka_grad": "numerator_half", "train_fused_bias": False},
    ],
)
def test_options_train(tmp_path, options):
    adam = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)  # noqa: E731
    module = AnnSnn(**STRONG, time_steps=2, calibration_batches=2, weight_batches=2, optimizer=adam, **options)
    data = digits()
    module.convert_with(list(data.calibration_dataloader())[:2])
    before = {n: p.detach().clone() for n, p in module.student.named_parameters()}
    trainer = quick(tmp_path, max_epochs=2, limit_train_batches=2)
    trainer.fit(module, datamodule=data)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])
    trained = [n for n, p in module.student.named_parameters() if not torch.equal(p, before[n])]
    assert any(n.endswith("conv1.weight") for n in trained)
    assert any("threshold" in n for n in trained) == options.get("train_threshold", False)
    assert any("v0" in n for n in trained) == options.get("train_v0", False)
    assert any(n.endswith("conv1.bias") for n in trained) == options.get("train_fused_bias", True)


def test_drawn_time_steps_depend_on_seed_and_step(converted):
    torch.manual_seed(3)
    a = converted.draw_time_steps()
    assert a == converted.draw_time_steps()
    draws = set()
    for seed in range(20):
        torch.manual_seed(seed)
        draws.add(converted.draw_time_steps())
    assert draws == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_steps": 0}, "time_steps"),
        ({"time_steps": []}, "time_steps"),
        ({"test_time_steps": [0, 2]}, "test_time_steps"),
        ({"weight_batches": 0}, "weight_batches"),
        ({"alpha": 1.5}, "alpha"),
        ({"beta": -0.1}, "beta"),
        ({"tau": 0.0}, "tau"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        AnnSnn(**options)


def test_weights_of_a_lightning_checkpoint_and_a_state_dict(tmp_path):
    source = build("lightning_modules.ann_snn.networks.SmallResNet")
    load_weights(source, "digits")
    wrapped = {f"network.{k}": v for k, v in source.state_dict().items()} | {"accuracy.x": torch.zeros(1)}
    torch.save({"state_dict": wrapped}, tmp_path / "a.ckpt")
    torch.save({f"module.{k}": v for k, v in source.state_dict().items()}, tmp_path / "b.pt")
    for path in ("a.ckpt", "b.pt"):
        other = build("lightning_modules.ann_snn.networks.SmallResNet")
        load_weights(other, str(tmp_path / path))
        assert all(torch.equal(v, other.state_dict()[k]) for k, v in source.state_dict().items())
    with pytest.raises(ValueError, match="does not fit"):
        load_weights(build("lightning_modules.ann_snn.networks.CifarResNet"), "digits")


def test_networks_and_weights_of_torchvision(monkeypatch):
    from torchvision.models import ResNet18_Weights

    network = build("torchvision.models.resnet18", {"num_classes": 1000})
    state = {k: torch.full_like(v, 0.5) for k, v in network.state_dict().items()}
    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", lambda self, **options: state)
    load_weights(network, "ResNet18_Weights.IMAGENET1K_V1")
    assert all((v == 0.5).all() for k, v in network.state_dict().items() if v.is_floating_point())
    with pytest.raises(ValueError, match=r"no weights 'ResNet18_Weights.NOPE'"):
        load_weights(network, "ResNet18_Weights.NOPE")

    def offline(self, **options):
        raise OSError("no route")

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", offline)
    with pytest.raises(FileNotFoundError, match=r"ResNet18_Weights.IMAGENET1K_V1 could not be downloaded"):
        load_weights(network, "ResNet18_Weights.IMAGENET1K_V1")
    with pytest.raises(ValueError, match="nope"):
        build("torchvision.models.get_model", {"name": "nope"})


def test_names_are_lazy():
    assert set(lightning_modules.__all__) <= set(dir(lightning_modules))
    for package in (lightning_modules, datamodules, callbacks):
        assert all(isinstance(getattr(package, name), type) for name in package.__all__)  # each name exists
    assert lightning_modules.ImageClassifier is ImageClassifier
    with pytest.raises(AttributeError, match="attribute Nothing"):
        _ = lightning_modules.Nothing
