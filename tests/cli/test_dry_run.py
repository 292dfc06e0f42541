"""`--dry_run`: sizes of every method, the paper's included, without memory and without a file written."""

import json
import os
import re
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import cli
import configs
from lightning_modules.dry_run import describe, memory
from tests.helpers import refusal
from tests.small import smaller

MEBIBYTE = 2**20


def dry_run(args: list[str], capsys: pytest.CaptureFixture) -> str:
    """Run it; nothing may be left behind. Returns what was printed."""
    capsys.readouterr()
    before = set(os.listdir())
    cli.main(["fit", "-c", *args, "--dry_run"])
    assert {p for p in os.listdir() if p != "data"} <= before, "something was written"
    return capsys.readouterr().out


def number(text: str, name: str) -> int:
    return int(re.search(rf"{name}: +([\d,]+)", text)[1].replace(",", ""))


def images(side: int, channels: int) -> str:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 60), ("test", 20)):
        shape = (n, side, side, channels)
        arrays[f"{part}_images"] = rng.integers(0, 256, shape if channels > 1 else shape[:3], dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(n) % 10
    np.savez("images.npz", **arrays)
    return "images.npz"


def test_digits_as_it_is(capsys):
    text = dry_run(["ann_snn/digits"], capsys)
    assert "lightning_modules.ann_snn.module.AnnSnn" in text
    assert number(text, "teacher") + number(text, "student") == number(text, "parameters")
    assert number(text, "trainable") == number(text, "student")  # all of it, and nothing of the teacher
    assert "image: float32 [100, 1, 8, 8]" in text
    assert "label: int64 [100]" in text
    rows = {
        name.strip(): [float(x.replace(",", "")) for x in figures.split()]
        for name, figures in re.findall(r"^  (one device|DDP|FSDP2 on \d+ devices) +([\d., ]+)$", text, re.MULTILINE)
    }
    trained = number(text, "trainable") * 4 / MEBIBYTE
    weights, gradients, state, total = rows["one device"]
    assert gradients == pytest.approx(trained, abs=0.05)
    assert state == pytest.approx(2 * trained, abs=0.05)  # Adam's two moments
    assert total == pytest.approx(weights + gradients + state, abs=0.11)
    assert rows["DDP"][1] == pytest.approx(2 * gradients, abs=0.11)
    assert rows["FSDP2 on 8 devices"][2] == pytest.approx(state / 8, abs=0.05)


def test_weights_that_are_not_there_are_named(capsys):
    """Sizes are known without them; a fit would not begin."""
    assert "not there" not in dry_run(["ann_snn/digits"], capsys)
    text = dry_run(["ann_snn/digits", "--model.init_from", "gone.ckpt"], capsys)
    assert "\nnot there, and a fit needs it: init_from gone.ckpt\n" in text
    text = dry_run(["graph_pfn/paper_finetuning"], capsys)
    assert len(re.findall("not there, and a fit needs it: init_from", text)) == 2


METHODS = [name for name in configs.names() if name.split("/")[0] not in configs.OVERLAYS]
REFUSED = {  # what nobody but the user has, and what the one line names
    "dyn_vpp/paper_calvin": "videos 'data/calvin'",
    "most/paper_stage1": "speech source 'data/libriheavy/manifest.jsonl'",
    "most/paper_stage2": "speech source 'data/dialogues/manifest.jsonl'",
    "most/spoken_digits_real": "speech source 'data/spoken_digits/manifest.jsonl'",
}
NO_DATA = {"ann_snn/cifar10", "ann_snn/cifar10_source", "ann_snn/paper_cifar10", "fedhpro/digit_domains"}
NO_DATA |= {"fedhpro/paper_cifar10", "graph_pfn/paper_finetuning"}


def dear(name: str) -> bool:
    """Data that are made on the spot: demonstrations, videos, speech, large graphs."""
    data = yaml.safe_load(configs.find(name).read_text())["data"]["init_args"]
    return name not in REFUSED and bool({data.get("source"), data.get("prior")} & {"metaworld", "made", "paper"})


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("dry")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if dear(n) else ()) for n in METHODS])
def test_every_config_as_shipped_without_a_network(name, home, capsys, monkeypatch):
    """It prints sizes, or says in one line what the user must supply."""
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # refuses
    if name in REFUSED:
        assert REFUSED[name] in refusal(["fit", "-c", name, "--dry_run"], capsys)
        return
    text = dry_run([str(smaller(name, home)) if dear(name) or name == "focal_policy/recordings" else name], capsys)
    assert number(text, "parameters") >= number(text, "trainable") > 0
    assert "FSDP2 on 8 devices" in text
    assert ("batch of all devices together:" in text) == (name not in NO_DATA)
    assert name not in NO_DATA or re.search("batch: no data .*put", text)


LITE = {  # DeepSeek-V2-Lite's published configuration
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    "max_position_embeddings": 4096,
}  # fmt: skip


def paper_ann_snn():
    data = ["--data.source", images(32, 3), "--data.batch_size", "4"]
    return ["ann_snn/paper_cifar10", *data, "--model.weights", "null"]


def paper_fedhpro():
    return ["fedhpro/paper_cifar10", "--data.sources", f"[{images(32, 3)}]", "--data.clients", "2"]


def paper_finetuning():
    return ["graph_pfn/paper_finetuning", "--data.source", "karate", "--data.components", "16"]


def paper_pretraining():
    return ["graph_pfn/paper_pretraining", "--data.prior", "small"]


def paper_policy():
    from tests.focal_policy.toys import recording

    source = [
        "--data.source",
        str(recording(Path(), d=4)),
        "--data.keys.point_cloud",
        "cloud",
        "--data.batch_size",
        "8",
    ]
    return ["focal_policy/paper_metaworld", *source]


def paper_speech(stage: str):
    with wave.open("silence.wav", "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(16_000))
    row = {"audio": "silence.wav", "text": "one", "answer": "two", "answer_audio": "silence.wav"}
    rows = [row | {"split": ("train", "val", "test")[i % 3]} for i in range(30)]
    Path("text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model.tokenizer", "[one, two]", "--model.encoder", "log_mel"]
    data = ["--data.source", "text.jsonl", "--data.more", "null", "--data.shares", "null", "--data.batch_size", "4"]
    return [f"most/{stage}", "--model.language_model", json.dumps(LITE), *words, *data]


def paper_video():
    """A folder as Stable Video Diffusion's, of which a dry run reads the layout alone: it has no weights."""
    from lightning_modules.dyn_vpp.networks import SMALL_AUTOENCODER, SVD_UNET
    from tests.dyn_vpp.toys import write_folder

    for part, layout in (("unet", SVD_UNET), ("vae", SMALL_AUTOENCODER)):
        Path("svd", part).mkdir(parents=True)
        Path("svd", part, "config.json").write_text(json.dumps(layout))
    model = ["--model.init_from", "svd", "--model.text_encoder", "null"]
    data = ["--data.source", str(write_folder(Path("clips"), 6, 70)), "--data.size", "64", "--data.batch_size", "2"]
    data += ["--data.tokens", "20"]
    return ["dyn_vpp/paper_calvin", *model, *data]


# the command, the part of the module, and its published number of parameters, with a tolerance
PUBLISHED = {
    # a ResNet-18 for 32 x 32 images, of whose 4,800 normalised channels a folded BatchNorm leaves one number of two
    "ann_snn/paper_cifar10": (paper_ann_snn, "student", 11_173_962 - 4_800, 0),
    "fedhpro/paper_cifar10": (paper_fedhpro, "parameters", 1_228_970, 0),  # ResNet-10 of width 32
    "graph_pfn/paper_finetuning": (paper_finetuning, "network", 20_090_701, 0),
    "graph_pfn/paper_pretraining": (paper_pretraining, "network", 20_090_701, 0),
    "focal_policy/paper_metaworld": (paper_policy, "model", 255.07e6, 2e-5),  # the U-Net
    # DeepSeek-V2-Lite's 15.7 billion, and the speech tokens
    "most/paper_stage1": (lambda: paper_speech("paper_stage1"), "network", 15.7e9, 5e-3),
    "most/paper_stage2": (lambda: paper_speech("paper_stage2"), "network", 15.7e9, 5e-3),
    "dyn_vpp/paper_calvin": (paper_video, "unet", 1_524_623_082, 0),
}


def test_every_paper_config_has_a_published_size():
    assert set(PUBLISHED) == {name for name in METHODS if "/paper_" in name}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name, capsys):
    case, part, count, relative = PUBLISHED[name]
    command = case()
    assert command[0] == name
    text = dry_run(command, capsys)
    assert number(text, part) == pytest.approx(count, rel=relative)
    assert "FSDP2 on 8 devices" in text
    assert "batch of all devices together" in text


def test_a_fit_and_its_dry_run_refuse_alike(capsys):
    args = ["fit", "-c", "ann_snn/digits", "--data.source", "nowhere.npz"]
    assert refusal([*args, "--dry_run"], capsys) == refusal(args, capsys)


def test_memory_of_each_strategy():
    model = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert memory(model, [optimizer]) == (4e6, 4e6, 4e6)
    assert memory(model, [optimizer], 4, "ddp") == (4e6, 8e6, 4e6)
    assert memory(model, [optimizer], 4, "fsdp2") == (1e6, 1e6, 1e6)
    model.weight.requires_grad_(False)
    assert memory(model, []) == (4e6, 0, 0)


def test_nested_batches_are_described():
    lines = list(describe({"x": torch.zeros(2, 3), "names": ["a", "b"], "rest": [np.zeros(4, dtype=np.int8)]}))
    assert [line.strip() for line in lines] == [
        "batch: dict", "x: float32 [2, 3]", "names: list of 2", "[0]: str", "rest: list of 1", "[0]: int8 [4]",
    ]  # fmt: skip
