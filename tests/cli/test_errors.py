"""Errors a user will make: one line that names the culprit, exit code 2, no traceback, nothing half-written."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from lightning_modules.distributed import read_checkpoint
from tests.helpers import refusal

FIT = ["fit", "-c", "ann_snn/digits_source"]


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def sharded_bomb(folder):
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    torch.save({}, folder / "meta.pt")


def sharded(folder, meta, lr=0.1):
    import torch.distributed.checkpoint as dcp

    dcp.save({"state_dict": {"w": torch.zeros(2)}, "optimizer_0": {"lr": lr}}, checkpoint_id=folder)
    torch.save(meta, Path(folder) / "meta.pt")


def sharded_bomb_in_a_rank(folder):
    """The metadata is harmless; an entry of a rank's file that is not a tensor would execute code."""
    sharded(folder, {}, lr=Bomb())


def checkpoint_of_another_class(path):
    torch.save({"state_dict": {}, "hyper_parameters": {"_class_path": "lightning_modules.AnnSnn"}}, path)


CASES = {
    "unknown command": (["fitt"], "did you mean fit"),
    "unknown config": (["fit", "-c", "ann_snn/digit"], "did you mean ann_snn/digits"),
    "unknown config without a folder": (["fit", "-c", "digits"], "ann_snn/digits"),
    "unknown option": ([*FIT, "--trainer.max_epoch", "3"], "--trainer.max_epoch"),
    "unknown model option": ([*FIT, "--model.label_smooting", "0.1"], "did you mean label_smoothing"),
    "unknown data option": ([*FIT, "--data.batchsize", "3"], "did you mean batch_size"),
    "wrong type": ([*FIT, "--data.batch_size", "many"], "batch_size"),
    "unknown model": ([*FIT, "--model", "lightning_modules.Unknown"], "lightning_modules.Unknown"),
    "unknown module": ([*FIT, "--model", "nowhere.Model"], "nowhere"),
    "unknown network": ([*FIT, "--model.network", "nowhere.Net"], "nowhere.Net"),
    "network that is none": ([*FIT, "--model.network", "os.system"], "no nn.Module"),
    "wrong network option": ([*FIT, "--model.network_args", "{depth: 3}"], "depth"),
    "missing data file": ([*FIT, "--data.source", "mine.npz"], "mine.npz"),
    "missing weights": ([*FIT, "--model.weights", "mine.pt"], "mine.pt"),
    "checkpoint by a word": ([*FIT, "--ckpt_path", "last"], "name the file"),
    "missing checkpoint": ([*FIT, "--ckpt_path", "mine.ckpt"], "mine.ckpt does not exist"),
    "bad checkpoint": ([*FIT, "--ckpt_path", "bad.ckpt"], "bad.ckpt cannot be read"),
    "checkpoint that executes code": ([*FIT, "--ckpt_path", "bomb.ckpt"], "would execute code on load"),
    "weights that execute code": ([*FIT, "--model.weights", "bomb.ckpt"], "would execute code on load"),
    "sharded checkpoint that executes code": ([*FIT, "--ckpt_path", "bomb"], "not safe to read"),
    "consolidate a bomb": (["consolidate", "bomb"], "not safe to read"),
    "sharded checkpoint whose rank executes code": ([*FIT, "--ckpt_path", "bomb_in_rank"], "not safe to read"),
    "consolidate a bomb in a rank": (["consolidate", "bomb_in_rank"], "not safe to read"),
    "consolidate a file": (["consolidate", "other.ckpt"], "other.ckpt is one file already"),
    "sharded checkpoint on one device": ([*FIT, "--ckpt_path", "sharded"], "fulgurite consolidate sharded"),
    "consolidate nothing": (["consolidate", "nowhere"], "nowhere does not exist"),
    "checkpoint of another class": ([*FIT, "--ckpt_path", "other.ckpt"], "was saved by lightning_modules.AnnSnn"),
    "weights in place of a checkpoint": ([*FIT, "--ckpt_path", "weights.pt"], "weights.pt holds weights alone"),
    "checkpoint that does not fit": ([*FIT, "--ckpt_path", "misfit.ckpt"], "Missing key(s) in state_dict"),
    "no model": (["test", "--ckpt_path", "other.ckpt"], "test.model"),
    "batch of nothing": ([*FIT, "--data.batch_size", "0"], "batch_size 0"),
    "FSDP1 on CPU": ([*FIT, "-c", "strategy/fsdp1", "--trainer.accelerator", "cpu"], "strategy/fsdp2"),
    "too many devices": ([*FIT, "--trainer.accelerator", "cpu", "--trainer.devices", "4096"], "4096"),
    "unknown strategy": ([*FIT, "--trainer.strategy", "bogus"], "bogus"),
    "run folder is a file": ([*FIT, "--trainer.default_root_dir", "file"], "is a file"),
    "batch larger than data": ([*FIT, "--data.batch_size", "5000"], "batch_size 5000"),
    "unreadable npz": ([*FIT, "--data.source", "broken.npz"], "broken.npz cannot be read"),
    "more classes than outputs": ([*FIT, "--model.network_args", "{classes: 3}"], "the data have 10 classes"),
    "images of another shape": ([*FIT, "--model.network_args", "{in_channels: 3}"], "images of shape [1, 8, 8]"),
    "source that does not fit the data": (
        ["fit", "-c", "ann_snn/digits", "--model.weights", "null", "--model.network_args", "{classes: 3}"],
        "the data have 10 classes",
    ),
    "no network": ([*FIT, "--data.source", "cifar10"], "cannot be downloaded"),
    "broken yaml": (["fit", "-c", "broken.yaml"], "broken.yaml"),
}


@pytest.mark.parametrize("case", CASES)
def test_refusal(case, tmp_path, capsys, monkeypatch):
    args, message = CASES[case]
    Path("file").write_text("")
    Path("bad.ckpt").write_bytes(b"not a checkpoint")
    Path("broken.npz").write_bytes(b"not an archive")
    Path("broken.yaml").write_text("model: [unclosed")
    torch.save({"state_dict": Bomb()}, "bomb.ckpt", pickle_protocol=2)
    sharded_bomb(Path("bomb"))
    sharded_bomb_in_a_rank("bomb_in_rank")
    checkpoint_of_another_class("other.ckpt")
    lightning = {"pytorch-lightning_version": "2.6.6", "hyper_parameters": {}}
    torch.save({"w": torch.zeros(2)}, "weights.pt")
    rest = {"epoch": 0, "global_step": 0, "loops": {}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    torch.save({"state_dict": {"w": torch.zeros(2)}, **lightning, **rest}, "misfit.ckpt")
    sharded("sharded", lightning)

    def no_network(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    before = set(os.listdir())
    line = refusal(args, capsys)
    assert message in line
    left = {p for p in set(os.listdir()) - before if any(Path(p).rglob("*")) and Path(p).name != "data"}
    assert not any(f for p in left for f in Path(p).rglob("*") if f.is_file())
    assert not Path("executed").exists()


def test_a_monitor_that_is_not_logged(capsys):
    stop = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/nope"]
    assert "val/nope" in refusal([*FIT, "-c", "trainer/smoke", *stop], capsys)


def test_weights_from_before_the_zip_format(tmp_path):
    """Sources published years ago are such files; they are read as safely."""
    path = tmp_path / "old.th"
    torch.save({"state_dict": {"w": torch.arange(3.0)}}, path, _use_new_zipfile_serialization=False)
    assert read_checkpoint(path)["state_dict"]["w"].tolist() == [0, 1, 2]
    torch.save({"state_dict": Bomb()}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="would execute code on load"):
        read_checkpoint(path)
    assert not Path("executed").exists()
