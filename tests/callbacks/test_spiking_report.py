"""The figures of the report, against direct calculations."""

import csv
import json

import pytest
import torch
from lightning.pytorch import Trainer

from callbacks import SpikingReport
from callbacks.spiking_report import load_student
from datamodules import ImageClassification
from lightning_modules import AnnSnn
from lightning_modules.ann_snn.conversion import convert, simulate, teacher_features
from lightning_modules.ann_snn.energy import measure_energy
from lightning_modules.ann_snn.losses import batch_mean_cka, hsic


@torch.no_grad()
def test_every_figure(tmp_path):
    torch.manual_seed(0)
    start = {"mode": "channel", "percentile": 98.0}
    module = AnnSnn(conversion="channel", percentile=98.0, time_steps=[2, 4], calibration_batches=2)
    data = ImageClassification(batch_size=60)
    data.setup()
    module.convert_with(data.calibration_dataloader())
    for parameter in module.student.parameters():  # as if it had been trained
        parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    report = SpikingReport(time_steps=(5, 1), noise=(0.0, 0.3), chunk=2)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(default_root_dir=tmp_path, limit_test_batches=2, callbacks=[report], **options)
    logged = trainer.test(module, datamodule=data, verbose=False)[0]
    found = json.loads((tmp_path / "report_test.json").read_text())
    assert {p.stem for p in (tmp_path / "plots").iterdir()} == {
        f"test_{name}" for name in ("accuracy", "cka", "firing_rate", "noise")
    }

    batches = [batch for batch, _ in zip(data.test_dataloader(), range(2), strict=False)]
    x, y = (torch.cat(parts) for parts in zip(*[b[:2] for b in batches], strict=True))
    right = lambda logits: (logits.argmax(-1) == y).float().mean().item()  # noqa: E731
    assert found["images"] == 120 and found["time_steps"] == [1, 5] and found["trained_at"] == [2, 4]
    ann = right(module.teacher(x))
    assert found["ann_accuracy"] == pytest.approx(ann)
    calibration = [b.image for b in data.calibration_dataloader()]
    settings = {"mode": "channel", "percentile": 99.0, "half_threshold": True}
    strongest = convert(module.teacher, calibration, warn=False, **settings)
    networks = {"open loop, per channel, half threshold": strongest, "closed loop": module.student}
    assert set(found["accuracy"]) == {"open loop, per layer", *networks}
    for name, network in networks.items():
        expected = [right(simulate(network, x, t).logits) for t in (1, 5)]
        assert found["accuracy"][name] == pytest.approx(expected)
        assert found["relative_accuracy"][name] == pytest.approx([value / ann for value in expected])
    assert logged["test/closed_loop_t5"] == pytest.approx(found["accuracy"]["closed loop"][1])

    assert found["blocks"] == list(module.student.monitored)
    before = convert(module.teacher, calibration[:2], **start)
    for when, network in (("before", before), ("after", module.student)):
        terms = []
        for batch in batches:
            rates = simulate(network, batch.image, 4).features
            _, targets = teacher_features(module.teacher, batch.image, module.student.monitored)
            flat = [(rates[k].flatten(1).double(), targets[k].flatten(1).double()) for k in rates]
            terms.append([hsic(a @ a.T, b @ b.T) for a, b in flat])
        expected = [float(batch_mean_cka(layer)) for layer in zip(*terms, strict=True)]
        assert found["cka"][when] == pytest.approx(expected, abs=1e-4)
    assert found["cka"]["before"] != pytest.approx(found["cka"]["after"], abs=1e-3)

    energy = measure_energy(module.student, x, 4)
    assert found["firing_rate"] == pytest.approx(energy.firing_rates, rel=1e-4)
    assert found["energy_nj"] == pytest.approx({"ann": energy.ann, "closed_loop": energy.snn, "at": 4}, rel=1e-4)

    for name, layer in energy.layers.items():
        expected = {"macs": layer.macs, "synops": layer.operations, "accumulates": layer.accumulates}
        assert found["operations"][name] == pytest.approx(expected, rel=1e-4)
    assert found["operations"].keys() == energy.layers.keys()

    with (tmp_path / "test_layers.csv").open() as file:
        layers = {row["layer"]: row for row in csv.DictReader(file)}
    assert layers.keys() == energy.layers.keys() | energy.firing_rates.keys()
    per_layer = [float(layers[name]["energy_nj"]) for name in energy.layers]
    assert sum(per_layer) == pytest.approx(found["energy_nj"]["closed_loop"])
    assert [float(layers[name]["firing_rate"]) for name in found["firing_rate"]] == list(found["firing_rate"].values())
    with (tmp_path / "test_accuracy.csv").open() as file:
        rows = {(row["network"], row["time_steps"]): row for row in csv.DictReader(file)}
    assert len(rows) == 1 + 2 * len(found["accuracy"])
    assert float(rows["ANN", ""]["accuracy"]) == pytest.approx(ann)
    assert float(rows["closed loop", "5"]["accuracy"]) == found["accuracy"]["closed loop"][1]
    assert float(rows["closed loop", "1"]["relative"]) == found["relative_accuracy"]["closed loop"][0]

    noisy = torch.cat([data.add_noise(batch, 0.3) for batch in batches])
    assert found["noise"]["sigma"] == [0.0, 0.3]
    assert found["noise"]["ann"] == pytest.approx([ann, right(module.teacher(noisy))])
    assert found["noise"]["closed_loop"] == pytest.approx([right(module(z, 4)) for z in (x, noisy)])


@torch.no_grad()
def test_the_matrix_of_training_and_test_time_steps(tmp_path):
    """A network trained at another T is a row of its own; what is no such network is refused."""
    data = ImageClassification(batch_size=60)
    data.setup()
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    modules = {}
    for t, percentile in ((2, 90.0), (3, 99.0)):
        modules[t] = AnnSnn(conversion="channel", percentile=percentile, half_threshold=True, time_steps=t)
        modules[t].convert_with([next(iter(data.calibration_dataloader()))])
    saver = Trainer(default_root_dir=tmp_path, **options)
    saver.strategy.connect(modules[2])
    saver.save_checkpoint(tmp_path / "t2.ckpt")

    report = SpikingReport(time_steps=(1, 2, 3), noise=(), others=[str(tmp_path / "t2.ckpt")])
    trainer = Trainer(default_root_dir=tmp_path, limit_test_batches=1, callbacks=[report], **options)
    trainer.test(modules[3], datamodule=data, verbose=False)
    accuracy = json.loads((tmp_path / "report_test.json").read_text())["accuracy"]
    batch = next(iter(data.test_dataloader()))
    for t, name in ((2, "closed loop, trained at T = 2"), (3, "closed loop")):
        right = [(modules[t](batch.image, k).argmax(1) == batch.label).float().mean().item() for k in (1, 2, 3)]
        assert accuracy[name] == pytest.approx(right)

    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    for name, message in (("foreign.ckpt", "is not a checkpoint of AnnSnn"), ("none.ckpt", "does not exist")):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            load_student(str(tmp_path / name))
