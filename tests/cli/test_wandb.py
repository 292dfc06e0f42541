"""Weights & Biases without a network, read back from the run's own files."""

import json
from pathlib import Path

from tests.helpers import run


def records(folder: Path) -> list:
    """The records of an offline run."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(next(folder.rglob("run-*.wandb"))))
    found = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def test_offline_run_holds_metrics_config_and_pictures(tmp_path):
    import wandb

    args = ["fit", "-c", "ann_snn/digits", "-c", "logger/wandb_offline", "--trainer.max_epochs", "1"]
    args += ["--trainer.limit_train_batches", "2", "--trainer.log_every_n_steps", "1", "--model.test_time_steps", "[]"]
    folder = run(args, tmp_path)
    wandb.finish()
    content = records(folder)
    history = [{i.key or "/".join(i.nested_key): i.value_json for i in r.history.item} for r in content if r.history.item]
    logged = set().union(*history)
    assert {"train/loss", "train/task", "train/global_kl", "train/local", "val/accuracy"} <= logged
    config = {u.key for r in content for u in (*r.config.update, *r.run.config.update)}
    assert {"cli", "alpha", "time_steps"} <= config
    pictures = [json.loads(v) for row in history for k, v in row.items() if "images/separated" in v]
    assert len(pictures) >= 2
    assert len(list(folder.rglob("media/images/*.png"))) >= 2
    assert (folder / "metrics.csv").is_file()
