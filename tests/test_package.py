"""The package as it is installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import configs

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_wheel_holds_configs_and_weights(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    assert {"cli.py", "lightning_modules/py.typed", "lightning_modules/ann_snn/weights/digits.safetensors"} <= names
    assert {f"configs/{name}.yaml" for name in configs.names()} <= names
    target = tmp_path / "installed"
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(target)
    code = "import cli, configs, sys; assert configs.__file__.startswith(sys.argv[1]); cli.main(sys.argv[2:])"
    # reads the shipped weights; without the report
    args = ["fit", "-c", "ann_snn/digits", "-c", "trainer/smoke", "--trainer.enable_progress_bar", "false"]
    args += ["--model.test_time_steps", "[]", "--trainer.callbacks", "lightning.pytorch.callbacks.ModelCheckpoint"]
    args += ["--trainer.callbacks.save_last", "true"]
    run = [sys.executable, "-c", code, str(target), *args]
    subprocess.run(run, check=True, cwd=tmp_path, env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"})
    assert list((tmp_path / "runs").rglob("last.ckpt"))


def test_importing_one_method_loads_no_other():
    code = (
        "import sys, lightning_modules; lightning_modules.ImageClassifier;"
        "heavy = {'diffusers', 'torch_geometric', 'mujoco', 'flwr'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.long
def test_startup_adds_little_to_the_imports():
    """From `fulgurite fit` to the first step: under 3/4 of the CPU time that torch and lightning take to import.

    Measured: 0.47, 2.8 s beside 5.9 s. A ratio, since seconds are another number on another processor.
    """
    from benchmarks.startup import FIT, IMPORTS, cpu_seconds

    assert min(cpu_seconds(FIT) / cpu_seconds(IMPORTS) - 1 for _ in range(2)) < 0.75
