"""The sweep files: valid for W&B, and every command line that its agent would start is one of ours.

`wandb` ships no schema of sweeps: W&B's own is in the package `sweeps`, which pins a numpy that does not go with ours.
So the test marked long reads it from that package's wheel; the default one has a stricter schema of what is used here.
"""

import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml

import cli
import configs
from tests.helpers import column, run
from tests.small import smaller

SWEEPS = sorted(configs.ROOT.glob("*/sweep.yaml"))

NUMBER = {"type": "number"}
DISTRIBUTIONS = ["uniform", "log_uniform_values", "int_uniform"]
PARAMETER = {  # docs.wandb.ai, "Sweep configuration options": what of it is used here
    "oneOf": [
        {"properties": {"values": {"type": "array", "minItems": 1}}, "required": ["values"]},
        {"properties": {"value": {}}, "required": ["value"]},
        {
            "properties": {"distribution": {"enum": DISTRIBUTIONS}, "min": NUMBER, "max": NUMBER},
            "required": ["distribution", "min", "max"],
        },
    ],
}
for form in PARAMETER["oneOf"]:
    form |= {"type": "object", "additionalProperties": False}
HYPERBAND = {"properties": {"type": {"const": "hyperband"}, "min_iter": {"type": "integer", "minimum": 1}}}
METRIC = {"properties": {"name": {"type": "string"}, "goal": {"enum": ["minimize", "maximize"]}}}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["program", "method", "metric", "parameters", "command"],
    "properties": {
        "program": {"type": "string"},
        "method": {"enum": ["bayes", "random", "grid"]},
        "metric": METRIC | {"type": "object", "required": ["name", "goal"], "additionalProperties": False},
        "early_terminate": HYPERBAND | {"type": "object", "required": ["type"], "additionalProperties": False},
        "run_cap": {"type": "integer", "minimum": 1},
        "command": {"type": "array", "items": {"type": "string"}, "contains": {"const": "${args}"}},
        "parameters": {"type": "object", "minProperties": 1, "additionalProperties": PARAMETER},
    },
}


def draw(parameter: dict, rng: random.Random):
    """One value, as W&B's random search would draw it."""
    if "values" in parameter:
        return rng.choice(parameter["values"])
    low, high = parameter["min"], parameter["max"]
    if parameter["distribution"] == "log_uniform_values":
        return low * (high / low) ** rng.random()
    return rng.randint(low, high) if parameter["distribution"] == "int_uniform" else rng.uniform(low, high)


def command(sweep: dict, seed: int) -> list[str]:
    """The command line that W&B's agent would start, without the program."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    rng = random.Random(seed)
    drawn = {name: {"value": draw(parameter, rng)} for name, parameter in sweep["parameters"].items()}
    args = create_sweep_command_args({"args": drawn})["args"]
    assert sweep["command"][0] == "${program}"
    return [part for piece in sweep["command"][1:] for part in (args if piece == "${args}" else [piece])]


def test_every_method_has_a_sweep():
    methods = {name.split("/")[0] for name in configs.names()} - set(configs.OVERLAYS)
    assert {path.parent.name for path in SWEEPS} == methods


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.parent.name)
def test_sweep_is_valid_and_its_commands_parse(path, capsys):
    sweep = yaml.safe_load(path.read_text())
    jsonschema.validate(sweep, SCHEMA)
    for parameter in sweep["parameters"].values():
        if "distribution" in parameter:
            assert parameter["min"] < parameter["max"]
    for seed in range(3):
        args = command(sweep, seed)
        name = args[args.index("-c") + 1]
        assert name.split("/")[0] == path.parent.name
        with pytest.raises(SystemExit) as stopped:
            cli.main([*args, "--print_config"])
        assert stopped.value.code == 0
        parsed = yaml.safe_load(capsys.readouterr().out)
        for key in sweep["parameters"]:
            part, *names = key.split(".")
            value = parsed[part]["init_args"]
            for inner in names:
                value = value[inner] if inner in value else value["init_args"][inner]
            given = next(a.split("=", 1)[1] for a in args if a.startswith(f"--{key}="))
            assert value == yaml.safe_load(given), key
        watched = [c.get("init_args", {}).get("monitor") for c in parsed["trainer"]["callbacks"]]
        assert sweep["metric"]["name"] in watched, "the best checkpoint is the one that the sweep looks for"


@pytest.mark.long
def test_sweeps_are_valid_by_the_schema_of_wandb(tmp_path):
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    got = subprocess.run([*download, "--dest", str(tmp_path), "sweeps<1"], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"no package `sweeps` to be had here: {got.stderr[-200:]}")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        validator = jsonschema.Draft7Validator(json.loads(wheel.read("sweeps/config/schema.json")))
    assert not validator.is_valid({"method": "luck", "parameters": {}})
    for path in SWEEPS:
        assert not list(validator.iter_errors(yaml.safe_load(path.read_text()))), path


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sweeps")


SHORTER = {"most": ["--model.num_units", "16", "--model.unit_frames", "1500"]}
DRAWN = [(path, seed) for path in SWEEPS for seed in range(3)]


@pytest.mark.parametrize(
    ("path", "seed"),
    [
        pytest.param(
            p, s, id=f"{p.parent.name} {s}", marks=() if (p.parent.name, s) == ("graph_pfn", 0) else pytest.mark.long
        )
        for p, s in DRAWN
    ],
)
def test_sampled_commands_run(path, seed, tmp_path, home):
    """Each with less data and one step, offline; what the sweep looks for is logged."""
    sweep = yaml.safe_load(path.read_text())
    args = command(sweep, seed)
    args[args.index("-c") + 1] = str(smaller(args[args.index("-c") + 1], home))
    ours = {"logger/wandb": "logger/wandb_offline", "--model.init_from=base.ckpt": "--model.init_from=metaworld"}
    args = [ours.get(arg, arg) for arg in args]
    smoke = ["-c", "trainer/smoke", "--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"]
    folder = run([*args, *smoke, *SHORTER.get(path.parent.name, []), "--trainer.accelerator", "cpu"], tmp_path)
    assert column(folder, sweep["metric"]["name"])
    assert list(folder.glob("wandb/offline-run-*"))
