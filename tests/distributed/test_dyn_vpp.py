"""Base and post-training on two processes: losses and weights of one, equal backward passes, sharded checkpoints."""

import csv
import json

import pytest
import torch

import cli
from lightning_modules import DynVPP, VideoDiffusion
from tests.distributed.pair import launch
from tests.dyn_vpp.toys import AUTOENCODER, DATA, UNET, write_folder
from tests.helpers import newest_run, weights

STRATEGIES = ["ddp", "fsdp2"]
SHARDED = "--trainer.strategy.init_args.save_distributed_checkpoint=true"
COUNTED = """
import sys
import cli
from lightning_modules import DynVPP
passes = 0
backward = DynVPP.manual_backward
def counting(self, *args, **kwargs):
    global passes
    passes += 1
    return backward(self, *args, **kwargs)
DynVPP.manual_backward = counting
cli.main({args!r})
DynVPP.manual_backward = backward
print("PASSES", {name!r}, passes, flush=True)
"""


def arguments(folder):
    """Command lines of the two stages, without strategy."""
    shared = [
        *("--data.source", str(folder / "own"), "--data.data_dir", str(folder / "data")),
        *(x for k, v in DATA.items() for x in (f"--data.{k}", str(v))),
        *("--data.eval_every", "2"),
        *("--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1", "--trainer.log_every_n_steps", "1"),
        *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
        *("--trainer.accelerator", "cpu", "--model.steps", "3", "--model.sigma_max", "5", "--model.eval_group", "2"),
        # plain gradient steps show a difference in gradients as it is; Adam would scale rounding errors up
        *("--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.05", "--model.lr_scheduler", "null"),
        *("--trainer.callbacks", "lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.save_last=true"),
    ]
    start = ["--model.init_from", str(folder / "start")]
    base = ["fit", "-c", "dyn_vpp/metaworld_base", *shared, *start, "--model.autoencoder", "null"]
    post = ["fit", "-c", "dyn_vpp/metaworld", *shared, *start]
    post += ["--model.group", "4", "--model.micro_batch", "1", "--model.drift_weight", "0.1"]
    return [*base, "--trainer.max_steps", "4"], [*post, "--trainer.max_steps", "2"]


def command_of_test(run, checkpoint):
    """With batches that two ranks cannot share evenly."""
    return ["test", "-c", str(run / "config.yaml"), "--ckpt_path", str(checkpoint), "--data.eval_batch_size", "3"]


def take_figures(run):
    """Of the test just made; the file is deleted, so that the next test must write its own."""
    file = run / "test_metrics.json"
    figures = json.loads(file.read_text())
    file.unlink()
    return figures


def losses(run, names):
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/loss")]
    return [[float(row[f"train/{name}"]) for name in names] for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Base and post-training on one process, under DDP and under FSDP2; a sharded run and its test."""
    from lightning_modules import LatentVideoAutoencoder

    folder = tmp_path_factory.mktemp("pair")
    write_folder(folder / "own")
    torch.manual_seed(0)
    autoencoder = LatentVideoAutoencoder(AUTOENCODER)
    autoencoder.configure_model()
    autoencoder.save_pretrained(folder / "vae")
    start = VideoDiffusion(UNET, str(folder / "vae"), vocabulary=64, tokens=4)
    start.configure_model()
    start.save_pretrained(folder / "start")
    base, post = arguments(folder)
    cases = []
    for strategy in STRATEGIES:
        cases.append({"name": f"base_{strategy}", "args": [*base, "-c", f"strategy/{strategy}"]})
        args = [*post, "-c", f"strategy/{strategy}"]
        cases.append({"name": f"post_{strategy}", "code": COUNTED.format(args=args, name=strategy)})
    cases.append({"name": "sharded", "args": [*post, "-c", "strategy/fsdp2", SHARDED]})
    for case in cases:
        case["run"] = str(folder / case["name"])
    for name in ("sharded", "post_ddp"):
        last = folder / name / "checkpoints" / "last.ckpt"
        cases.append({"name": f"test {name}", "run": str(folder / name), "args": command_of_test(folder / name, last)})
    output = launch(cases, folder, timeout=900)
    assert "CASE" not in output, output[-4000:]
    found = {case["name"]: folder / case["name"] for case in cases} | {"start": start.state_dict()}
    for name, args in (("base", base), ("post", post)):
        cli.main([*args, "--trainer.default_root_dir", str(folder / name)])
        found[name] = newest_run(folder / name)
    found["passes"] = [line for line in output.splitlines() if line.startswith("PASSES")]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("stage", "names"), [("base", ["loss"]), ("post", ["loss", "anchor", "reward", "drift"])])
def test_two_processes_equal_one(runs, stage, names, strategy):
    one, two = losses(runs[stage], names), losses(runs[f"{stage}_{strategy}"], names)
    assert len(one) == {"base": 4, "post": 2}[stage]
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-4, atol=1e-5)
    a, b = (weights(runs[name] / "checkpoints" / "last.ckpt") for name in (stage, f"{stage}_{strategy}"))
    start = runs["start"]
    assert a.keys() == b.keys()
    moved = sum((a[k] - start[k]).square().sum() for k in a if "unet" in k).sqrt()
    apart = sum((a[k] - b[k]).square().sum() for k in a).sqrt()
    assert moved > 1e-3
    assert apart < 1e-3 * moved


def test_every_rank_does_the_same_backward_passes(runs):
    assert len(runs["passes"]) == 4
    # two optimiser steps, each with a pass of the policy and one of the anchor for each of two contexts of a rank
    assert {line.split()[-1] for line in runs["passes"]} == {"8"}


def test_a_sharded_checkpoint_consolidates_and_serves_one_process(runs, capsys):
    folder = runs["sharded"] / "checkpoints" / "last.ckpt"
    assert folder.is_dir()
    cli.main(["consolidate", str(folder)])
    file = capsys.readouterr().out.strip()
    joined, whole = weights(file), weights(runs["post_fsdp2"] / "checkpoints" / "last.ckpt")
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[k], whole[k]) for k in whole)
    assert DynVPP.load_from_checkpoint(file).model.frames == 4
    # and gives the figures of two ranks, as an ordinary checkpoint does under DDP
    one = ["--trainer.strategy", "auto", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"]
    single_file = runs["post_ddp"] / "checkpoints" / "last.ckpt"
    for run, checkpoint in ((runs["sharded"], file), (runs["post_ddp"], single_file)):
        pair = take_figures(run)
        cli.main([*command_of_test(run, checkpoint), *one])
        assert take_figures(run) == pytest.approx(pair, rel=1e-3, abs=1e-4)
