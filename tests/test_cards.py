"""Every Python example of the README and the cards runs: those of a file in their order, in one namespace.

An example that needs more says so behind `python` in its fence: `download`, or `extra:NAME` for an extra of
pyproject.toml.
What an example takes for granted (a checkpoint, somebody's images) is in `GIVEN`, by the name of the card's folder.
"""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted(ROOT.glob("lightning_modules/*/README.md"))]
FENCE = re.compile(r"^```python *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTRAS = {"robots": "metaworld", "speech": "soundfile", "flower": "flwr"}  # a library of each


def save(model: LightningModule, path: str) -> None:
    """The checkpoint of a run that has not begun."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(accelerator="cpu", logger=False, enable_model_summary=False)
    trainer.strategy.connect(model)
    model.configure_model()
    trainer.save_checkpoint(path)


SECTIONS = ("Equation to function", "Differences to the released code", "Ranks", "Measured")


@pytest.mark.parametrize("card", FILES[1:], ids=lambda path: path.parent.name)
def test_cards_have_the_same_sections(card):
    text = card.read_text()
    assert text.startswith("# ")
    assert [name for name in SECTIONS if f"\n## {name}\n" not in text] == []


def fedhpro() -> dict:
    from lightning_modules import FedHPro

    save(FedHPro(network="SmallCNN", network_args={"in_channels": 1}, num_classes=10), "RUN/checkpoints/last.ckpt")
    return {"images": torch.rand(2, 1, 8, 8)}


def graph_pfn() -> dict:
    from datamodules import NodeClassification

    data = NodeClassification("karate", labels_per_class=2)
    data.setup()
    return data.nodes._asdict() | {"context": data.parts["train"]}


def focal_policy() -> dict:
    from tests.focal_policy.toys import recording
    from tests.helpers import run

    args = ["--data.source", str(recording(Path())), "--model.widths", "[8, 16, 16]", "-c", "trainer/smoke"]
    folder = run(["fit", "-c", "focal_policy/recordings", *args, "--trainer.accelerator", "cpu"], Path())
    return {"file": folder / "checkpoints" / "last.ckpt", "state": torch.zeros(4).numpy()}


def most() -> dict:
    from tests.most.toys import language_model

    language_model("deepseek_v2").save_pretrained("deepseek-ai/DeepSeek-V2-Lite")  # a small one in its place
    return {"input_ids": torch.zeros(1, 4, dtype=torch.long), "modality": torch.tensor([[0, 0, 1, 1]])}


def dyn_vpp() -> dict:
    from lightning_modules import DynVPP, VideoDiffusion, VideoPolicy
    from tests.dyn_vpp.test_policy import SIZES
    from tests.dyn_vpp.toys import UNET

    save(VideoDiffusion(UNET, tokens=4, vocabulary=64, steps=2), "base.ckpt")
    save(DynVPP("base.ckpt", steps=2), "best.ckpt")
    policy = VideoPolicy("base.ckpt", **SIZES)
    policy.configure_model()
    policy.model.fit(torch.randn(9, 4))
    policy.save_pretrained("policy")
    given = {"image": torch.zeros(1, 3, 16, 16), "tokens": torch.ones(1, 4, dtype=torch.long)}
    return given | {"frame": torch.zeros(16, 16, 3, dtype=torch.uint8).numpy()}


GIVEN = {f.__name__: f for f in (fedhpro, graph_pfn, focal_policy, most, dyn_vpp)}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.parent.name if f.parent != ROOT else "README")
def test_examples_run(file, capsys):
    examples = FENCE.findall(file.read_text())
    assert examples, "a card shows how its module is used"
    runnable = []
    for marks, code in examples:
        for mark in marks.split():
            kind, _, extra = mark.partition(":")
            assert kind == "download" or extra in EXTRAS, f"{mark} is no mark"
            if extra:
                pytest.importorskip(EXTRAS[extra])
        if "download" not in marks.split():
            runnable.append(code)
    torch.manual_seed(0)
    names = GIVEN[file.parent.name]() if runnable and file.parent.name in GIVEN else {}
    for code in runnable:
        exec(compile(code, str(file), "exec"), names)
