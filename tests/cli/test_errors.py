"""Errors a user will make: one line that names the culprit, exit code 2, no traceback, nothing half-written."""

import io
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_modules.distributed import read_checkpoint
from tests.helpers import refusal

ROOT = Path(__file__).parents[2]
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
    torch.save(meta, folder / "meta.pt")


def arrays(path, **changes):
    images, labels = np.zeros((20, 8, 8), dtype=np.uint8), np.arange(20) % 10
    known = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels} | changes
    np.savez(path, **{name: array for name, array in known.items() if array is not None})


def not_a_number(path):
    from tests.focal_policy.test_robots import episodes, write_hdf5

    data = episodes()
    data[3][0][7, 2] = float("nan")
    write_hdf5(path, data)


def without_actions(path):
    import h5py

    with h5py.File(path, "w") as file:
        file["data/demo_0/obs/state"] = np.zeros((20, 3))


def half_a_recording(path):
    np.savez(path, state=np.zeros((500, 3)), action=np.zeros((500, 2)), length=np.array([250, 250]))
    path.write_bytes(path.read_bytes()[:9000])


def lerobot(path):
    (path / "meta").mkdir(parents=True)
    (path / "meta" / "info.json").write_text("{unclosed")


def graph(path, edges, split="", encoding="utf-8"):
    path.mkdir()
    rows = "".join(f"n{i},{i % 2},{i},{split}\n" for i in range(20))
    (path / "nodes.csv").write_text("id,label,größe,split\n" + rows, encoding=encoding)
    (path / "edges.csv").write_text("source,target\n" + edges)


def clips(path, encoding="utf-8"):
    from tests.dyn_vpp.toys import write_folder

    write_folder(path)
    table = (path / "captions.csv").read_text().replace("right", "à droite")
    (path / "captions.csv").write_text(table, encoding=encoding)


def picture(path):
    for part in ("train", "test"):
        (path / part / "cat").mkdir(parents=True)
        for i in range(4):
            (path / part / "cat" / f"{i}.png").write_bytes(b"not a picture")


LIGHTNING = {"pytorch-lightning_version": "2.6.6", "hyper_parameters": {}}
REST = {"epoch": 0, "global_step": 0, "loops": {}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
ANOTHER = {"state_dict": {}, "hyper_parameters": {"_class_path": "lightning_modules.AnnSnn"}}
FILES = {  # made where the command names them
    "file": lambda p: p.write_text(""),
    "bad.ckpt": lambda p: p.write_bytes(b"not a checkpoint"),
    "cut.ckpt": lambda p: (torch.save({"w": torch.zeros(5000)}, p), p.write_bytes(p.read_bytes()[:9000])),
    "list.ckpt": lambda p: torch.save([torch.zeros(2)], p),
    "bomb.ckpt": lambda p: torch.save({"state_dict": Bomb()}, p, pickle_protocol=2),
    "bomb": sharded_bomb,
    # the metadata is harmless; an entry of a rank's file that is not a tensor would execute code
    "bomb_in_rank": lambda p: sharded(p, {}, lr=Bomb()),
    "other.ckpt": lambda p: torch.save(ANOTHER, p),
    "weights.pt": lambda p: torch.save({"w": torch.zeros(2)}, p),
    "misfit.ckpt": lambda p: torch.save({"state_dict": {"w": torch.zeros(2)}, **LIGHTNING, **REST}, p),
    "sharded": lambda p: sharded(p, LIGHTNING),
    "run": lambda p: (p / "checkpoints").mkdir(parents=True),
    "empty_folder": Path.mkdir,
    "broken.yaml": lambda p: p.write_text("model: [unclosed"),
    "empty.yaml": lambda p: p.write_text(""),
    "list.yaml": lambda p: p.write_text("- 1\n- 2\n"),
    "typing.yaml": lambda p: p.write_text("modle: {class_path: lightning_modules.AnnSnn}\n"),
    "binary.yaml": lambda p: p.write_bytes(bytes(range(128, 256))),
    "broken.npz": lambda p: p.write_bytes(b"not an archive"),
    "float.npz": lambda p: arrays(p, train_images=np.full((20, 8, 8), np.nan)),
    "short.npz": lambda p: arrays(p, test_labels=np.arange(3)),
    "unlabelled.npz": lambda p: arrays(p, train_labels=None),
    "new_class.npz": lambda p: arrays(p, test_labels=np.arange(20)),
    "broken_pictures": picture,
    "nan.hdf5": not_a_number,
    "line.jsonl": lambda p: p.write_text('{"text": "one"}\nnot JSON\n'),
    "silent.jsonl": lambda p: p.write_text(json.dumps({"audio": "gone.wav", "text": "one"}) + "\n"),
    "no_actions.hdf5": without_actions,
    "half.npz": half_a_recording,
    "lerobot": lerobot,
    "number.jsonl": lambda p: p.write_text('{"text": 7}\n'),
    "binary.jsonl": lambda p: p.write_bytes(bytes(range(128, 256))),
    "strange_edges": lambda p: graph(p, "n0,n99\n"),
    "misspelt_split": lambda p: graph(p, "n0,n1\n", split="trian"),
    "latin_nodes": lambda p: graph(p, "n0,n1\n", encoding="latin-1"),
    "clips": clips,
    "latin_clips": lambda p: clips(p, encoding="latin-1"),
    "flat.pt": lambda p: torch.save({"w": torch.zeros(2)}, p),
}
GRAPH, SPEECH = ["fit", "-c", "graph_pfn/karate"], ["fit", "-c", "most/spoken_digits"]
ROBOT = ["fit", "-c", "focal_policy/recordings"]
CLIENTS, VIDEO = ["fit", "-c", "fedhpro/digits"], ["fit", "-c", "dyn_vpp/metaworld_base"]


@contextmanager
def no_network() -> Iterator[None]:
    """Nothing can be reached."""

    def urlopen(*args, **kwargs):
        raise OSError("no network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urllib.request.urlopen", urlopen)
        yield


@contextmanager
def interrupted() -> Iterator[None]:
    """The connection breaks in the middle of a download."""

    class Broken(io.BytesIO):
        length = 170_000_000
        headers: dict = {}  # noqa: RUF012
        url = "https://example.org/data"

        def read(self, size=-1):
            if self.tell():
                raise ConnectionResetError("the peer hung up")
            return super().read(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urllib.request.urlopen", lambda *args, **kwargs: Broken(b"x" * 5000))
        yield


@contextmanager
def no_key() -> Iterator[None]:
    """W&B is asked for, and no account is known."""
    import netrc

    import wandb

    wandb.teardown()  # W&B reads its environment once a process, and an earlier test may have used it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "online")
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setenv("NETRC", "no_netrc")
        patch.setattr(netrc, "netrc", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
        yield
    wandb.teardown()  # nor may a later one inherit this mode


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond 20 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
    "checkpoint that is a run folder": ([*FIT, "--ckpt_path", "run"], "name run/checkpoints/last.ckpt"),
    "name outside the runs": ([*FIT, "--name", "../../x"], "name ../../x leads out of the folder of runs"),
    "GPUs that are not there": ([*FIT, "--trainer.accelerator", "cpu", "--trainer.devices", "[0, 1]"], "give a number"),
    "misspelt section": ([*FIT, "--modle.alpha", "1"], "did you mean --model.alpha"),
    "misspelt trainer option": ([*FIT, "--trainer.acelerator", "cpu"], "did you mean --trainer.accelerator"),
    "misspelt optimiser": ([*FIT, "--model.optimizer", "torch.optim.Adamm"], "has no attribute 'Adamm'"),
    "options as a list": ([*FIT, "--model.init_args", "[1]"], "init_args takes names and values, not a list"),
    "no config of that name": (["configs", "zzz"], "no shipped config has zzz in its name"),
    "W&B without a key": ([*FIT, "-c", "logger/wandb", "-c", "trainer/smoke"], "-c logger/wandb_offline", no_key),
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
    "no network": ([*FIT, "--data.source", "cifar10"], "cannot be downloaded", no_network),
    "interrupted download": ([*FIT, "--data.source", "cifar10"], "cannot be downloaded", interrupted),
    "data folder is a file": ([*FIT, "--data.source", "cifar10", "--data.data_dir", "file"], "file", no_network),
    "full disk": ([*FIT, "-c", "trainer/smoke"], "disk is full", full_disk),
    "broken yaml": (["fit", "-c", "broken.yaml"], "broken.yaml"),
    "config without content": (["fit", "-c", "empty.yaml"], "empty.yaml has no sections"),
    "config that is a list": (["fit", "-c", "list.yaml"], "list.yaml has no sections"),
    "config with a mistyped key": ([*FIT, "-c", "typing.yaml"], "modle"),
    "config that is no text": (["fit", "-c", "binary.yaml"], "binary.yaml is no valid YAML"),
    "config that is a folder": (["fit", "-c", "empty_folder"], "empty_folder"),
    "config without a name": (["fit", "-c"], "-c"),
    "half a checkpoint": ([*FIT, "--ckpt_path", "cut.ckpt"], "cut.ckpt cannot be read"),
    "checkpoint that is a list": ([*FIT, "--ckpt_path", "list.ckpt"], "list.ckpt holds a list"),
    "checkpoint that is an empty folder": ([*FIT, "--ckpt_path", "empty_folder"], "no sharded checkpoint"),
    "consolidate an empty folder": (["consolidate", "empty_folder"], "no sharded checkpoint"),
    "consolidate onto a file": (["consolidate", "sharded", "--output", "file"], "file exists already"),
    "images that are no bytes": ([*FIT, "--data.source", "float.npz"], "train_images is float64"),
    "fewer labels than images": ([*FIT, "--data.source", "short.npz"], "test_labels needs one class number"),
    "images without labels": ([*FIT, "--data.source", "unlabelled.npz"], "no array 'train_labels'"),
    "class that training lacks": ([*FIT, "--data.source", "new_class.npz"], "test_labels has class 19"),
    "unreadable picture": (
        [*FIT, "--data.source", "broken_pictures", "--data.batch_size", "2", "--data.channels", "1"],
        ".png cannot be read as an image",
    ),
    "folder of pictures without train": ([*FIT, "--data.source", "empty_folder"], "has no folder train/"),
    "number out of range": (["fit", "-c", "ann_snn/digits", "--model.alpha", "2"], "alpha 2.0 is outside [0, 1]"),
    "no time steps": (["fit", "-c", "ann_snn/digits", "--model.time_steps", "0"], "must be at least 1"),
    "negative epochs": ([*FIT, "--trainer.max_epochs", "-5"], "max_epochs"),
    "too many batches": ([*FIT, "--trainer.limit_train_batches", "2.5"], "limit_train_batches"),
    "compile without blocks": ([*CLIENTS, "-c", "trainer/compile", "-c", "trainer/smoke"], "leave out trainer/compile"),
    "unknown precision": ([*FIT, "--trainer.precision", "7"], "precision"),
    "seed that is a word": ([*FIT, "--seed_everything", "many"], "seed_everything"),
    "unknown accelerator": ([*FIT, "--trainer.accelerator", "bogus"], "bogus"),
    "not a number in a recording": (
        ["fit", "-c", "focal_policy/recordings", "--data.source", "nan.hdf5"],
        "state of demo_3 is not finite in frame 7",
    ),
    "recording without actions": (
        [*ROBOT, "--data.source", "no_actions.hdf5"],
        "no_actions.hdf5: demo_0 has no 'actions'",
    ),
    "half a recording": ([*ROBOT, "--data.source", "half.npz"], "half.npz cannot be read"),
    "recording with a broken description": ([*ROBOT, "--data.source", "lerobot"], "lerobot/meta/info.json"),
    "tail before the success": (["fit", "-c", "focal_policy/metaworld", "--data.tail", "-1"], "tail -1"),
    "manifest with a number for a text": ([*SPEECH, "--data.source", "number.jsonl"], "line 1: text is 7"),
    "manifest that is no text": ([*SPEECH, "--data.source", "binary.jsonl"], "binary.jsonl is not text in UTF-8"),
    "words in the wrong order": ([*SPEECH, "--data.made.words", "[4, 1]"], "made.words [4, 1]: the lower number"),
    "manifest with a broken line": ([*SPEECH, "--data.source", "line.jsonl"], "line 2"),
    "manifest with a missing file": ([*SPEECH, "--data.source", "silent.jsonl"], "gone.wav"),
    "edge to an unknown node": ([*GRAPH, "--data.source", "strange_edges"], "joins node 'n99'"),
    "split that is misspelt": ([*GRAPH, "--data.source", "misspelt_split"], "has the split 'trian' for node 'n0'"),
    "nodes in another encoding": (
        [*GRAPH, "--data.source", "latin_nodes"],
        "latin_nodes/nodes.csv is not text in UTF-8",
    ),
    "public graph in lower case": ([*GRAPH, "--data.source", "planetoid/cora"], "did you mean Planetoid"),
    "public graph without its name": ([*GRAPH, "--data.source", "Planetoid"], "name one, as Planetoid/NAME"),
    "prior with a falling range": (
        ["fit", "-c", "graph_pfn/prior_tiny", "--data.settings", "{nodes: [500, 100]}"],
        "settings.nodes [500, 100]: the lower number comes first",
    ),
    "graph file without a graph": ([*GRAPH, "--data.source", "flat.pt"], "flat.pt"),
    "more than all nodes": ([*GRAPH, "--data.train_fraction", "2"], "train_fraction 2.0"),
    "weights of another layout": ([*GRAPH, "--model.init_from", "weights.pt"], "weights.pt"),
    "more clients than images": ([*CLIENTS, "--data.clients", "5000"], "5000 clients"),
    "nobody takes part": ([*CLIENTS, "--data.participation", "0.01"], "selects nobody"),
    "unknown federated strategy": ([*CLIENTS, "--model.strategy", "FedSomething"], "FedSomething"),
    "missing videos": ([*VIDEO, "--data.source", "nowhere"], "nowhere"),
    "captions in another encoding": ([*VIDEO, "--data.source", "latin_clips"], "latin_clips/captions.csv is not text"),
    "videos on a full disk": ([*VIDEO, "--data.source", "clips"], "disk is full", full_disk),
    "pictures without a size": ([*VIDEO, "--data.size", "0"], "size 0 must be at least 1"),
    "vocabulary of nothing": ([*VIDEO, "--data.vocabulary", "1"], "vocabulary 1 must be at least 2"),
    "deviation of nothing": ([*FIT, "--data.std", "[0]"], "std [0.0] must be finite and above 0"),
    "fewer than no images": ([*FIT, "--data.train_size", "-5"], "train_size -5 must be at least 1"),
    "seed below 0": ([*CLIENTS, "--data.seed", "-1"], "seed -1 is outside"),
}


@pytest.mark.parametrize("case", CASES)
def test_refusal(case, tmp_path, capsys):
    args, message, *during = CASES[case]
    made = [name for name in FILES if name in args]
    for name in made:
        FILES[name](Path(name))
    before = set(tmp_path.rglob("*"))
    with during[0]() if during else nullcontext():
        line = refusal(args, capsys)
    assert message in line
    left = {p.name for p in set(tmp_path.rglob("*")) - before if p.is_file()}
    # a run whose disk is full has begun; what it wrote is whole
    assert left <= ({"config.yaml", "metrics.csv"} if full_disk in during else set())
    assert not Path("executed").exists()


def test_a_refusal_as_the_user_sees_it(tmp_path):
    """A process of its own: what libraries print on their way out would show here."""
    command = [sys.executable, "-m", "cli", "fit", "-c", "ann_snn/digit"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["fulgurite:"], done.stderr
    assert "did you mean ann_snn/digits" in done.stderr
    assert not list(tmp_path.iterdir())


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
