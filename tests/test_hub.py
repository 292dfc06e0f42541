"""Folders of `save_pretrained`: all methods write and read them alike, and say what is wrong with a broken one."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lightning_modules
from lightning_modules import hub
from lightning_modules.distributed import read_checkpoint, read_metadata


def ann_snn(folder: Path) -> None:
    module = lightning_modules.AnnSnn(time_steps=2)
    module.convert_with([torch.randn(8, 1, 8, 8)])
    module.save_pretrained(folder)


def fedhpro(folder: Path) -> None:
    from tests.fedhpro import toys

    toys.module("FedAvg").save_pretrained(folder)


def graph_pfn(folder: Path) -> None:
    lightning_modules.GraphPFN.from_pretrained("tiny").save_pretrained(folder)


def focal_policy(folder: Path) -> None:
    from tests.focal_policy import toys

    module = toys.policy(action_dim=2, state_dim=3, point_channels=0, image_crop=0)
    module.configure_model()
    module.save_pretrained(folder)


def most(folder: Path) -> None:
    from tests.most.test_module import model

    module = model()
    module.configure_model()
    module.save_pretrained(folder)


def video(folder: Path) -> None:
    module = lightning_modules.VideoDiffusion(init_from="metaworld")
    module.configure_model()
    module.save_pretrained(folder)


MAKE = {
    "AnnSnn": ann_snn,
    "FedHPro": fedhpro,
    "GraphPFN": graph_pfn,
    "FocalPolicy": focal_policy,
    "MoST": most,
    "VideoDiffusion": video,
}


@pytest.fixture(scope="module", params=MAKE)
def saved(request, tmp_path_factory):
    """The name of a class, and a folder that it wrote."""
    folder = tmp_path_factory.mktemp("saved") / request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MAKE[request.param](folder)
    return request.param, folder


def copied(saved, tmp_path: Path) -> tuple[type, Path, Path]:
    """The class, a copy of its folder, and the file with weights in it."""
    name, folder = saved
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights = "unet/diffusion_pytorch_model" if name == "VideoDiffusion" else "model"
    return getattr(lightning_modules, name), copy, copy / f"{weights}.safetensors"


def test_a_model_card_is_written_once(saved):
    name, folder = saved
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: fulgurite\n") and f"{name}.from_pretrained(" in card
    numbers = sum(t.numel() for f in folder.rglob("*.safetensors") for t in load_file(f).values())
    assert f"{numbers:,} numbers" in card
    (folder / "README.md").write_text("mine")
    MAKE[name](folder)
    assert (folder / "README.md").read_text() == "mine"
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_an_id_on_the_hub_is_fetched(saved, monkeypatch):
    name, folder = saved
    asked = []

    def snapshot_download(source, allow_patterns, ignore_patterns):
        asked.append((source, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    kind = getattr(lightning_modules, name)
    kind.from_pretrained("somebody/something")
    assert {source for source, _ in asked} == {"somebody/something"}
    wanted = {p.relative_to(folder) for p in folder.rglob("*") if p.suffix in (".json", ".safetensors")}
    patterns = {pattern for _, some in asked for pattern in some}
    assert all(any(path.match(p) for p in patterns) for path in wanted), "something was not asked for"

    def offline(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match=r"somebody/something is no folder .*: no route$"):
        kind.from_pretrained("somebody/something")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def one_less(path: Path) -> None:
    state = load_file(path)
    state.pop(sorted(state)[0])
    save_file(state, path)


BREAK = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "junk": lambda path: path.write_bytes(b"<html>not found</html>"),
    "truncated": truncated,
    "one_less": one_less,
}


@pytest.mark.parametrize("damage", BREAK)
def test_broken_weights_are_named(saved, damage, tmp_path):
    kind, folder, weights = copied(saved, tmp_path)
    BREAK[damage](weights)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        kind.from_pretrained(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]", json.dumps({"class": "Other"}), "alien"])
def test_a_broken_config_is_named(saved, content, tmp_path):
    kind, folder, _ = copied(saved, tmp_path)
    if content == "alien":
        content = json.dumps(json.loads((folder / "config.json").read_text()) | {"alien": 1})
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json") as error:
        kind.from_pretrained(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_nothing_is_left_of_a_folder_that_could_not_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        hub.write_folder(tmp_path / "a", torch.nn.Linear, 1, {}, {"x": torch.ones(2)})
    assert not list((tmp_path / "a").iterdir())
    (tmp_path / "b").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        hub.write_folder(tmp_path / "b", torch.nn.Linear, 1, {}, {})


def test_tied_weights_and_views_are_written(tmp_path):
    base = torch.randn(4, 3)
    state = {"a": base, "tied": base, "part": base[1:], "turned": base.T}
    hub.write_folder(tmp_path, torch.nn.Linear, 1, {}, state)
    again = hub.read_state(tmp_path)
    assert all(torch.equal(again[name], value) for name, value in state.items())


NO_CHECKPOINTS = {
    "empty": b"",
    "junk": b"junk",
    "page": b"<html><body>404</body></html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
    "zeros": bytes(1000),
    "zip": b"PK\x03\x04" + bytes(100),
    "bytes": bytes(range(256)) * 8,
    "pickle": b"\x80\x04\x95",
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_what_is_no_checkpoint_is_refused_in_one_line(kind, tmp_path):
    path = tmp_path / "x.ckpt"
    path.write_bytes(NO_CHECKPOINTS[kind])
    with pytest.raises(ValueError, match=r"x\.ckpt") as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"x\.ckpt"):
        hub.read_state(path)
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / ".metadata").write_bytes(NO_CHECKPOINTS[kind])
    (folder / "meta.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"\.metadata") as error:
        read_metadata(folder)
    assert "\n" not in str(error.value)
