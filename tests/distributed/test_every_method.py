"""Every method under FSDP2 on two processes: trained, saved in shards, joined into one file, tested on one device.

The test on two ranks and the one on a single device give the same figures, with test sets that two ranks cannot share
evenly. One launch serves all methods.
"""

import json

import numpy as np
import pytest

import cli
from tests.distributed.pair import launch
from tests.small import smaller

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

CONFIGS = {  # one of each LightningModule, with what makes its test batches uneven
    "ann_snn/digits_source": ["--data.source", "odd.npz"],  # 37 test images
    "ann_snn/digits": ["--data.batch_size", "53"],
    "fedhpro/digits": ["--data.eval_batch_size", "53"],
    "graph_pfn/karate": [],
    "focal_policy/recordings": ["--data.batch_size", "7"],
    "most/spoken_digits": ["--data.batch_size", "7"],
    "dyn_vpp/metaworld_base": ["--data.eval_batch_size", "5"],
}
FIT = {  # what keeps it short
    "ann_snn/digits_source": ["--data.source", "odd.npz"],
    "ann_snn/digits": ["--model.test_time_steps", "[1, 8]"],
    "most/spoken_digits": ["--model.num_units", "16", "--model.unit_frames", "1500"],
}
QUIET = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
WHOLE = ["--trainer.limit_test_batches", "1.0"]
ALONE = ["--trainer.strategy", "auto", "--trainer.devices", "1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    sharded = "--trainer.strategy.init_args.save_distributed_checkpoint=true"
    rng, images = np.random.default_rng(0), {}
    for part, n in (("train", 120), ("test", 37)):
        images |= {
            f"{part}_images": rng.integers(0, 256, (n, 8, 8), dtype=np.uint8),
            f"{part}_labels": np.arange(n) % 10,
        }
    np.savez(folder / "odd.npz", **images)
    cases = []
    for name, uneven in CONFIGS.items():
        run = folder / name.replace("/", "_")
        fit = ["fit", "-c", str(smaller(name, folder)), "-c", "trainer/smoke", "-c", "strategy/fsdp2", sharded]
        test = ["test", "-c", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
        cases.append({"name": name, "run": str(run), "args": [*fit, *FIT.get(name, []), *QUIET]})
        cases.append({"name": f"{name} test", "run": str(run), "args": [*test, *WHOLE, *uneven, *QUIET]})
    output = launch(cases, folder, timeout=900)
    assert "CASE" not in output, output[-6000:]
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_are_joined_and_tested_alone(runs, name, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    run = runs / name.replace("/", "_")
    last = run / "checkpoints" / "last.ckpt"
    assert last.is_dir()
    pair = json.loads((run / "test_metrics.json").read_text())
    cli.main(["consolidate", str(last)])
    file = capsys.readouterr().out.strip()
    test = ["test", "-c", str(run / "config.yaml"), "--ckpt_path", file, *QUIET, *ALONE]
    cli.main([*test, *WHOLE, *CONFIGS[name]])
    alone = json.loads((run / "test_metrics.json").read_text())
    for figures in (pair, alone):
        for key in [k for k in figures if "latency" in k or "shuffled" in k]:  # which audio is exchanged is the rank's
            del figures[key]
    assert alone == pytest.approx(pair, rel=1e-4, abs=1e-6, nan_ok=True)
