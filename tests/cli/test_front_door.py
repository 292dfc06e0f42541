"""The commands as a user types them."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import cli
import configs
from tests.helpers import column, newest_run, run, weights

ROOT = Path(__file__).parents[2]
QUICK = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "3", "--trainer.num_sanity_val_steps", "0"]
FIT = ["fit", "-c", "ann_snn/digits_source", *QUICK, "--trainer.log_every_n_steps", "1"]


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_first_screens_come_before_torch(option):
    code = f"import sys, cli; cli.main([{option!r}]); sys.exit('torch' in sys.modules)"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fulgurite" in done.stdout
    assert time.perf_counter() - start < 5  # usually 0.1 s; torch alone takes several


def test_configs_are_listed_with_what_they_do(capsys):
    cli.main(["configs"])
    listed = capsys.readouterr().out
    for name in configs.names():
        assert name in listed
        assert len(configs.description(name)) > 20, f"{name}: its first line should say what it does"
        assert configs.find(name) == configs.find(f"configs/{name}.yaml")
    headings = [line.split(":")[0] for line in listed.splitlines() if not line.startswith(" ")]
    assert headings == list(dict.fromkeys(name.split("/")[0] for name in configs.names()))
    cli.main(["configs", "graph_pfn"])
    only = capsys.readouterr().out.splitlines()
    assert len(only) == 1 + sum(name.startswith("graph_pfn/") for name in configs.names())
    assert only[0].startswith("graph_pfn: ") and "overlays" not in only[0]


def test_fit_test_and_predict_share_a_run_folder(tmp_path, capsys):
    folder = run(FIT, tmp_path)
    assert folder.parts[-3:-1] == ("ann_snn", "digits_source")
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "metrics.csv", "checkpoints"}
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    saved = (folder / "config.yaml").read_text()
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["train/loss"]) for row in rows) == 3

    config, last = str(folder / "config.yaml"), str(folder / "checkpoints" / "last.ckpt")
    quiet = ["--trainer.enable_progress_bar", "false"]
    cli.main(["test", "-c", config, "--ckpt_path", last, *quiet])
    assert set(json.loads((folder / "test_metrics.json").read_text())) == {"test/accuracy", "test/loss"}
    cli.main(["predict", "-c", config, "--ckpt_path", last, *quiet])
    with (folder / "predictions.csv").open() as file:
        predictions = list(csv.DictReader(file))
    assert [row["name"] for row in predictions] == [str(i) for i in range(360)]
    assert sum(float(predictions[0][f"probability_{k}"]) for k in range(10)) == pytest.approx(1, abs=1e-4)
    assert (folder / "config.yaml").read_text() == saved
    with (folder / "metrics.csv").open() as file:
        assert sum(bool(row["train/loss"]) for row in csv.DictReader(file)) == 3  # kept by the test
    assert newest_run(tmp_path) == folder  # no other folder was made


def test_the_printed_command_runs(tmp_path, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        run(FIT, tmp_path)
    command = next(m for m in caplog.messages if "fulgurite test" in m).split("fulgurite ")[1].split()
    cli.main([*command, "--trainer.enable_progress_bar", "false"])
    assert (newest_run(tmp_path) / "test_metrics.json").is_file()


def test_flags_beat_the_checkpoint_which_beats_defaults(tmp_path):
    folder = run([*FIT, "--model.label_smoothing", "0.25", "--model.optimizer.lr", "0.004"], tmp_path)
    last = folder / "checkpoints" / "last.ckpt"
    hparams = torch.load(last, weights_only=True)["hyper_parameters"]
    assert hparams["label_smoothing"] == 0.25

    more = [*FIT, "--trainer.max_epochs", "2", "--ckpt_path", str(last)]
    run([*more, "--model.optimizer.lr", "0.5"], tmp_path)
    content = torch.load(last, weights_only=True)
    assert content["epoch"] == 1
    assert content["hyper_parameters"]["label_smoothing"] == 0.25  # the config does not name it
    assert content["hyper_parameters"]["optimizer"]["init_args"]["lr"] == 0.5  # the flag is what was built ...
    assert content["optimizer_states"][0]["param_groups"][0]["initial_lr"] == 0.004  # ... the state keeps its own


def test_a_misnamed_list_of_callbacks_is_appended_to(tmp_path):
    folder = run([*FIT, "--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateMonitor"], tmp_path)
    assert (folder / "checkpoints" / "last.ckpt").is_file()


def test_same_seed_same_weights(tmp_path):
    a, b = run(FIT, tmp_path / "a"), run([*FIT, "--data.num_workers", "2"], tmp_path / "b")
    first, second = (weights(r / "checkpoints" / "last.ckpt") for r in (a, b))
    assert all(torch.equal(first[k], second[k]) for k in first)
    c = weights(run([*FIT, "--seed_everything", "1"], tmp_path / "c") / "checkpoints" / "last.ckpt")
    assert not all(torch.equal(first[k], c[k]) for k in first)


def test_predict_labels_a_folder_of_images(tmp_path):
    from torchvision.io import write_png

    folder = run(FIT, tmp_path)
    (tmp_path / "mine" / "more").mkdir(parents=True)
    for name in ("b.png", "a.png", "more/c.png"):
        write_png(torch.randint(0, 256, (1, 20, 30), dtype=torch.uint8), str(tmp_path / "mine" / name))
    config, last = str(folder / "config.yaml"), str(folder / "checkpoints" / "last.ckpt")
    args = ["predict", "-c", config, "--ckpt_path", last, "--data.predict_folder", str(tmp_path / "mine")]
    cli.main([*args, "--trainer.enable_progress_bar", "false"])
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["name"]).name for row in rows] == ["a.png", "b.png", "c.png"]
    assert all(0 <= int(row["class"]) < 10 for row in rows)


def test_a_network_of_the_folder_one_stands_in(tmp_path):
    """The console command finds it, and classes have the names of their folders."""
    from torchvision.io import write_png

    Path("my_network.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(192, 2), nn.ReLU())\n"
    )
    for i, place in enumerate(["train/cat", "train/dog", "test/cat", "test/dog"] * 5):
        Path("pets", place).mkdir(parents=True, exist_ok=True)
        write_png(torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8), f"pets/{place}/{i}.png")
    console = Path(sys.executable).with_name("fulgurite")
    fit = [console, "fit", "-c", "ann_snn/digits_source", "-c", "trainer/smoke", "--model.network", "my_network.Net"]
    fit += ["--model.network_args", "{}", "--data.source", "pets", "--data.image_size", "8", "--data.batch_size", "2"]
    done = subprocess.run(fit, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = newest_run(Path("runs"))
    config, last = str(folder / "config.yaml"), str(folder / "checkpoints" / "last.ckpt")
    cli.main(["predict", "-c", config, "--ckpt_path", last, "--trainer.enable_progress_bar", "false"])
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"probability_cat", "probability_dog"} < rows[0].keys()
    assert {row["class"] for row in rows} <= {"cat", "dog"}


def test_a_run_needs_its_source_no_more(tmp_path):
    from safetensors.torch import load_file, save_file

    from lightning_modules.ann_snn.source import SHIPPED

    source = tmp_path / "source.safetensors"
    save_file(load_file(SHIPPED / "digits.safetensors"), source)
    args = ["fit", "-c", "ann_snn/digits", *QUICK, "--model.weights", str(source), "--model.test_time_steps", "[]"]
    folder = run([*args, "--trainer.limit_val_batches", "1"], tmp_path)
    source.unlink()
    config, last = str(folder / "config.yaml"), folder / "checkpoints" / "last.ckpt"
    before = weights(last)
    cli.main(["test", "-c", config, "--ckpt_path", str(last), "--trainer.enable_progress_bar", "false"])
    assert json.loads((folder / "test_metrics.json").read_text())["test/ann_accuracy"] > 0.95
    run(["fit", "-c", config, "--ckpt_path", str(last), "--trainer.max_epochs", "2"], tmp_path)
    after = weights(last)
    assert before.keys() == after.keys()
    assert torch.equal(before["layer_weights"], after["layer_weights"])


SMOKE = ["fit", "-c", "ann_snn/digits_source", "-c", "trainer/smoke", "--trainer.accelerator", "cpu"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A smoke run without the overlay that is looked at."""
    return run(SMOKE, tmp_path_factory.mktemp("plain"))


@pytest.mark.long
def test_compile_changes_no_figure(plain, tmp_path, monkeypatch):
    compiled, before = [], torch.nn.Module.compile

    def compile(module, **options):
        compiled.append((type(module), options["backend"]))
        before(module, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    folder = run([*SMOKE, "-c", "trainer/compile", "--trainer.callbacks.backend=eager"], tmp_path)
    assert set(compiled) == {(torch.nn.Conv2d, "eager"), (torch.nn.Linear, "eager")}
    for name in ("train/loss", "val/loss"):
        assert column(folder, name) == pytest.approx(column(plain, name), rel=1e-5)
    a, b = (weights(x / "checkpoints" / "last.ckpt") for x in (folder, plain))
    assert a.keys() == b.keys()


@pytest.mark.long
def test_bf16_stays_close_and_keeps_its_weights_in_float32(plain, tmp_path):
    folder = run([*SMOKE, "-c", "trainer/bf16"], tmp_path)
    for name in ("train/loss", "val/loss"):
        here, there = column(folder, name), column(plain, name)
        assert here != there  # rounded
        assert here == pytest.approx(there, rel=0.05)
    tensors = weights(folder / "checkpoints" / "last.ckpt").values()
    assert {x.dtype for x in tensors if x.is_floating_point()} == {torch.float32}


@pytest.mark.long
def test_tensorboard_holds_the_figures_of_the_csv(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run([*SMOKE, "-c", "logger/tensorboard"], tmp_path)
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "metrics.csv", "checkpoints", "tensorboard"}
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("train/loss", "val/loss", "val/accuracy"):
        assert [x.value for x in events.Scalars(name)] == pytest.approx(column(folder, name))
        assert column(folder, name)


@pytest.mark.parametrize("first", ["test", "predict", "validate"])
def test_what_is_run_without_a_fit_keeps_its_config_too(first, tmp_path):
    made = run([first, "-c", "graph_pfn/karate", "--data.seed", "3"], tmp_path)
    for second in ("fit", "test" if first == "predict" else "predict"):
        args = [second, "-c", str(made / "config.yaml"), "-c", "trainer/smoke"]
        again = run(args, tmp_path)
        assert again != made and "seed: 3" in (again / "config.yaml").read_text()
