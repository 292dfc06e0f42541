"""Two processes give what one gives, under DDP and FSDP2, also where one of them has no audio."""

import json

import pytest
import torch

from datamodules.speech import SpeechText
from tests.distributed.pair import launch
from tests.helpers import column, run

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


NAMES = (
    ("ddp", "sequence"), ("ddp", "modality"), ("fsdp2", "modality"), ("ddp", "written"), ("fsdp2", "written"),
)  # fmt: skip


def arguments(data_dir, balance: str) -> list[str]:
    model, data = "--model.init_args", "--data.init_args"
    return [
        *("fit", "-c", "most/spoken_digits", f"{model}.balance", balance, f"{model}.balance_weight", "0.1"),
        *(f"{data}.data_dir", str(data_dir), f"{data}.made.utterances", "120", f"{data}.made.unseen_utterances", "24"),
        *(f"{data}.batch_size", "8", f"{model}.num_units", "16", f"{model}.unit_frames", "1500"),
        *(f"{model}.vocoder_width", "16", f"{model}.max_response", "20", f"{model}.warmup_steps", "1"),
        *(f"{model}.vocoder_adversarial", "0.02", f"{model}.discriminator_width", "4"),
        *("--trainer.max_epochs", "2", "--trainer.limit_train_batches", "3", "--trainer.limit_val_batches", "1"),
        *("--trainer.check_val_every_n_epoch", "1", "--trainer.log_every_n_steps", "1"),
        *("--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"),
        # plain gradient steps show a difference in gradients as it is
        *(f"{model}.optimizer", "torch.optim.SGD", f"{model}.optimizer.lr", "0.1", f"{model}.vocoder_lr", "0.01"),
    ]


def written(data_dir) -> list[str]:
    """The same with one row per rank, half of them without audio."""
    made = next(data_dir.glob("made_speech/*/manifest.jsonl"))
    spoken = [json.loads(line) for line in made.read_text().splitlines()][:16]
    rows = [row | {"audio": str(made.parent / row["audio"]), "split": "train"} for row in spoken]
    rows[0]["split"] = rows[1]["split"] = "val"
    rows[2]["split"] = rows[3]["split"] = "test"
    rows += [{"text": "one two"}, {"text": "three", "answer": "four"}] * 6
    manifest = data_dir / "written.jsonl"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    batches = list(SpeechText(str(manifest), batch_size=2, bucket_batches=1).train_dataloader())[:6]
    assert {tuple((batch.length > 0).tolist()) for batch in batches} == {(False, False), (False, True), (True, True)}
    options = {
        "model.init_args.tasks": "{asr: 0.3, tts: 0.3, interleaved: 0.2, text: 0.1, instruct: 0.1}",
        "model.init_args.deduplicate": "true",
        "data.init_args.source": str(manifest),
        "data.init_args.batch_size": "2",
        "data.init_args.bucket_batches": "1",
        "data.init_args.augmentation": "null",
        "trainer.max_epochs": "1",
        "trainer.limit_train_batches": "6",
    }
    return [*arguments(data_dir, "modality"), *(x for k, v in options.items() for x in (f"--{k}", v))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    one = {form: run(arguments(folder, form), folder / form) for form in ("sequence", "modality")}
    one["written"] = run(written(folder), folder / "written")
    options = {"sequence": arguments(folder, "sequence"), "modality": arguments(folder, "modality")}
    options["written"] = written(folder)
    cases = [
        {"name": f"{strategy}_{form}", "args": [*options[form], "-c", f"strategy/{strategy}"]}
        for strategy, form in NAMES
    ]
    for case in cases:
        case["run"] = str(folder / case["name"])
    output = launch(cases, folder, timeout=900)
    assert "CASE" not in output, output[-4000:]
    return one | {case["name"]: folder / case["name"] for case in cases}


@pytest.mark.parametrize("name", ["_".join(name) for name in NAMES])
def test_two_processes_equal_one(runs, name):
    form = name.split("_")[1]
    assert len(column(runs[form], "train/token_loss")) == 6
    for quantity in ("train/token_loss", "train/balance", "train/loss", "val/loss", "val/text_loss"):
        one, two = column(runs[form], quantity), column(runs[name], quantity)
        assert two == pytest.approx(one, rel=2e-3), quantity
    a, b = (torch.load(runs[n] / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for n in (form, name))
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], atol=2e-4, rtol=2e-3)
