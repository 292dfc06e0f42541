"""Weights & Biases without a network, read back from the run's own files."""

import csv
import json
from pathlib import Path

import pytest

from tests.helpers import run
from tests.small import smaller


def records(folder: Path) -> list:
    """The records of an offline run: protocol buffers in a LevelDB log (blocks of 32 KiB, records cut into pieces)."""
    from wandb.proto import wandb_internal_pb2

    data = next(folder.rglob("run-*.wandb")).read_bytes()
    found, message, at = [], b"", 7  # after the header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            found.append(record)
            message = b""
    return found


def rows(content: list) -> list[dict[str, str]]:
    """What was logged, step by step: values as JSON."""
    return [{i.key or "/".join(i.nested_key): i.value_json for i in r.history.item} for r in content if r.history.item]


def check_tables(folder: Path, names: set[str]) -> None:
    """Each named table is in the run folder, and with the same content in the files of W&B."""
    for name in names:
        with (folder / f"{name}.csv").open() as file:
            columns, *expected = csv.reader(file)
        path = max(folder.rglob(f"media/table/{name}_*.table.json"), key=lambda p: p.stat().st_mtime_ns)
        table = json.loads(path.read_text())
        assert table["columns"] == columns
        got = [["" if cell is None else str(cell) for cell in row] for row in table["data"]]
        assert got == expected and expected, name


def test_offline_run_holds_metrics_config_pictures_and_tables(tmp_path):
    import wandb

    args = ["fit", "-c", "ann_snn/digits", "-c", "logger/wandb_offline", "--trainer.max_epochs", "1"]
    args += ["--trainer.limit_train_batches", "2", "--trainer.log_every_n_steps", "1", "--model.test_time_steps", "[]"]
    folder = run(args, tmp_path)
    wandb.finish()
    wandb.teardown()  # its service writes the file when it stops
    content = records(folder)
    history = rows(content)
    logged = set().union(*history)
    assert {"train/loss", "train/task", "train/global_kl", "train/local", "val/accuracy"} <= logged
    config = {u.key for r in content for u in (*r.config.update, *r.run.config.update)}
    assert {"cli", "alpha", "time_steps"} <= config
    pictures = [json.loads(v) for row in history for k, v in row.items() if "images/separated" in v]
    assert len(pictures) >= 2
    assert {"val_accuracy/_type", "val_layers/_type"} <= logged
    check_tables(folder, {"val_accuracy", "val_layers"})
    assert len(list(folder.rglob("media/images/*.png"))) >= 2
    assert (folder / "metrics.csv").is_file()


def test_a_resumed_fit_and_a_test_go_on_in_the_same_run(tmp_path, monkeypatch):
    import wandb

    args = ["fit", "-c", "ann_snn/digits_source", "-c", "logger/wandb_offline", "-c", "trainer/smoke"]
    folder = run(args, tmp_path)
    wandb.finish()
    last = str(folder / "checkpoints" / "last.ckpt")
    run([*args, "--trainer.max_epochs", "2", "--ckpt_path", last], tmp_path)
    wandb.finish()
    run(["test", "-c", str(folder / "config.yaml"), "--ckpt_path", last], tmp_path)
    wandb.finish()
    wandb.teardown()
    ids = [p.name.split("-")[3] for p in folder.glob("wandb/offline-run-*")]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    check_tables(folder, {"test_metrics"})

    (folder / "test_metrics.csv").unlink()
    monkeypatch.setenv("WANDB_MODE", "disabled")  # how to try something without a trace in W&B
    config = tmp_path / "online.yaml"
    config.write_text((folder / "config.yaml").read_text().replace("offline: true", "offline: false"))
    run(["test", "-c", str(config), "--ckpt_path", last], tmp_path)
    assert (folder / "test_metrics.csv").is_file()
    assert len(list(folder.glob("wandb/*run-*"))) == 3
    wandb.finish()
    wandb.teardown()  # W&B reads its environment once a process: a later test must not be disabled too


SHOWN = {  # a config of every other method: its pictures, films and sounds; and its tables
    "fedhpro/digits": ({"clients", "features"}, {"val_federation"}),
    "graph_pfn/prior_tiny": ({"in_context", "prior_statistics"}, {"real_graphs"}),
    "focal_policy/metaworld": ({"val_reach-v3_chunks", "val_reach-v3_rollout"}, {"val_episodes"}),
    "most/spoken_digits": ({"expert_load", "samples"}, {"val_expert_load", "val_transcripts"}),
    "dyn_vpp/metaworld_base": ({"videos_val"}, {"val_clips"}),
}


@pytest.mark.long
@pytest.mark.parametrize("config", SHOWN)
def test_every_method_shows_its_work(config, tmp_path):
    import wandb

    args = ["-c", str(smaller(config, tmp_path)), "-c", "logger/wandb_offline", "-c", "trainer/smoke"]
    folder = run(["fit", *args, "--trainer.accelerator", "cpu"], tmp_path / "runs")
    wandb.finish()
    wandb.teardown()
    history = rows(records(folder))
    logged = set().union(*history)
    assert {"train/loss", "trainer/global_step"} <= logged
    assert any(name.startswith("val/") for name in logged)
    shown = {name.removesuffix("/_type") for name in logged if name.endswith("/_type")}
    pictures, tables = SHOWN[config]
    assert pictures | tables <= shown
    check_tables(folder, tables)
    drawn = {path.stem for path in (folder / "plots").glob("*.png")}
    assert drawn <= shown, "each picture of the run folder is in W&B as well"
