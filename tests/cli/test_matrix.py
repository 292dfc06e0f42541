"""Every shipped config: with every overlay it parses, and offline it really runs all four commands.

Both lists come from the folder: a new config is covered without writing a test. One that needs something that is not
there is named in `NEEDS`; what makes one small enough is in `tests/small.py`.
"""

import csv
import json
from importlib import import_module
from itertools import cycle, product
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule

import cli
import configs
from tests.helpers import newest_run
from tests.small import smaller

METHODS = [name for name in configs.names() if name.split("/")[0] not in configs.OVERLAYS]
OVERLAYS = {
    kind: [name for name in configs.names() if name.startswith(f"{kind}/")]
    for kind in ("strategy", "logger", "trainer")
}


class _GotIt(Exception):
    pass


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    """The front door's own parser, made once."""
    found = []

    class Parse(cli.front_door()):
        def parse_arguments(self, parser, args) -> None:
            found.append(parser)
            raise _GotIt

    with pytest.raises(_GotIt):
        Parse(["fit"])
    return found[0]


PAIRS = list(product(OVERLAYS["strategy"], OVERLAYS["logger"]))
FIRST = {name.split("/")[0]: name for name in reversed(METHODS)}.values()  # one config of each method


def each_once(number: int) -> list[tuple[str, str]]:
    """Every strategy and every logger in as few pairs as possible; other pairs for another number."""
    strategies, loggers = OVERLAYS["strategy"], OVERLAYS["logger"]
    rounds = range(max(len(strategies), len(loggers)))
    return [(strategies[i % len(strategies)], loggers[(i + number) % len(loggers)]) for i in rounds]


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        *(pytest.param(name, PAIRS, id=f"{name} every pair") for name in FIRST),
        *(pytest.param(n, each_once(i), id=n) for i, n in enumerate(METHODS) if n not in FIRST),
        *(
            pytest.param(n, PAIRS, id=f"{n} every pair", marks=pytest.mark.long)  # a tenth of a second each
            for n in METHODS
            if n not in FIRST
        ),
    ],
)
def test_every_config_parses_with_every_overlay(name, pairs, parser):
    """Every strategy with every logger; overlays of the trainer touch other keys and take turns."""
    for pair, other in zip(pairs, cycle(OVERLAYS["trainer"]), strict=False):
        overlays = [*pair, other]
        files = [part for n in (name, *overlays) for part in ("-c", str(configs.find(n)))]
        trainer = parser.parse_args(["fit", *files]).fit.trainer
        for overlay in overlays:
            for key, value in yaml.safe_load(configs.find(overlay).read_text())["trainer"].items():
                got = trainer[key.rstrip("+")]
                if key == "strategy":
                    assert got.class_path == value["class_path"]
                elif key == "logger":
                    assert [x.class_path for x in got] == [x["class_path"] for x in value]
                elif key == "callbacks+":
                    assert [x.class_path for x in got][-len(value) :] == [x["class_path"] for x in value]
                    assert len(got) > len(value), "the config's own callbacks stay"
                else:
                    assert got == value, (overlay, key)


NEEDS = {  # what is not there offline
    "ann_snn/cifar10": "CIFAR-10",
    "ann_snn/cifar10_source": "CIFAR-10",
    "fedhpro/digit_domains": "MNIST and USPS",
    "most/spoken_digits_real": "recordings",
}
OFFLINE = [name for name in METHODS if name not in NEEDS and not name.split("/")[1].startswith("paper_")]
START = {  # stage 3 of a method starts from stage 2
    "dyn_vpp/metaworld": ("dyn_vpp/metaworld_base", "init_from"),
}
CHEAP = ("ann_snn/digits_source", "graph_pfn/karate")


def fit(name: str, home: Path) -> Path:
    """A smoke run; returns its folder. Made once for all tests of this file."""
    runs = home / name / "runs"
    if not runs.exists():
        args = ["fit", "-c", str(smaller(name, home)), "-c", "trainer/smoke", "--trainer.accelerator", "cpu"]
        if name in START:
            before, option = START[name]
            args += [f"--model.{option}", str(fit(before, home) / "checkpoints" / "last.ckpt")]
        cli.main([*args, "--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", str(runs)])
    return newest_run(runs)


COMMANDS = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


def load_data_class(config: Path) -> type:
    """The data module of a config: made-up graphs, for one, have nothing to test on."""
    module, _, name = yaml.safe_load(config.read_text())["data"]["class_path"].rpartition(".")
    return getattr(import_module(module), name)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def validated(folder: Path) -> list[dict[str, float]]:
    """The rows of `metrics.csv` with figures of a validation, and those figures."""
    with (folder / "metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if k.startswith("val/") and v} for row in csv.DictReader(file)]
    return [row for row in rows if row]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in CHEAP else pytest.mark.long) for n in OFFLINE])
def test_every_offline_config_runs(name, home):
    folder = fit(name, home)
    config, last = folder / "config.yaml", folder / "checkpoints" / "last.ckpt"
    assert last.is_file()
    data = load_data_class(config)
    offered = [c for c, hook in COMMANDS.items() if getattr(data, hook) is not getattr(LightningDataModule, hook)]
    assert "validate" in offered
    during_fit = validated(folder)
    for command in offered:
        cli.main([command, "-c", str(config), "--ckpt_path", str(last), "--trainer.enable_progress_bar", "false"])
    (again,) = validated(folder)[len(during_fit) :]
    during_fit[-1].pop("val/reward_gain", None)  # over the base, which is measured when a fit begins
    assert again == pytest.approx(during_fit[-1], rel=1e-4, abs=1e-6, nan_ok=True), "the same weights and data"
    header = (folder / "metrics.csv").read_text().splitlines()[0].split(",")
    stages = {column.split("/")[0] for column in header if "/" in column}
    assert {"train", "val", *({"test"} & set(offered))} <= stages, header
    assert "test" not in offered or json.loads((folder / "test_metrics.json").read_text())
    assert "predict" not in offered or list(folder.glob("predictions.*")), "every config writes what it predicts"
