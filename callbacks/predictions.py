"""What `predict` writes."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from callbacks.checks import require
from callbacks.files import whole_file
from lightning_modules.distributed import gather_rows


class PredictionWriter(Callback):
    """Collects what `predict_step` returns and writes `<run>/predictions.csv`, one row per item.

    `predict_step` returns a dict of one-dimensional tensors or lists `[b]` and matrices `[b, k]`; a matrix becomes k
    columns, named by the module's `prediction_columns[name]` if it has them and numbered otherwise. Where there are
    `label` int64 `[b]` and `probability` `[b, k]`, a `class` column follows the label, and it and the probabilities
    carry the names of the data module's `classes`, or numbers if it has no k of them. An `index`
    column, if there is one, puts the rows of all ranks in order.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the batch on the CPU."""
        require(self, isinstance(outputs, dict), "a predict_step that returns a dict", outputs)
        self._batches.append({k: v.cpu() if isinstance(v, Tensor) else list(v) for k, v in outputs.items()})

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join batches and ranks, and write the table."""
        batches, self._batches = self._batches, []
        rows: dict[str, Any] = {
            k: torch.cat([b[k] for b in batches]) if isinstance(v, Tensor) else [x for b in batches for x in b[k]]
            for k, v in batches[0].items()
        }
        rows = gather_rows(rows)
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "predictions.csv"
            names = getattr(pl_module, "prediction_columns", {})
            if {"label", "probability"} <= rows.keys():
                k = rows["probability"].shape[1]
                known = list(getattr(trainer.datamodule, "classes", []))
                classes = known if len(known) == k else [str(c) for c in range(k)]
                names = {"probability": [f"probability_{c}" for c in classes]} | names
                probability = rows.pop("probability")
                rows |= {"class": [classes[c] for c in rows["label"].tolist()], "probability": probability}
            self._write(path, rows, names)
            trainer.print(f"Predictions are in {path}")

    @staticmethod
    def _write(path: Path, rows: dict[str, Any], names: dict[str, list[str]]) -> None:
        order: Sequence[int] = range(len(next(iter(rows.values()))))
        if "index" in rows:
            order = torch.argsort(rows.pop("index"), stable=True).tolist()
        header, columns = [], []
        for key, values in rows.items():
            if isinstance(values, Tensor) and values.ndim == 2:
                header += names.get(key) or [f"{key}_{i}" for i in range(values.shape[1])]
                columns += values.T.tolist()
            else:
                header.append(key)
                columns.append(values.tolist() if isinstance(values, Tensor) else values)
        with whole_file(path) as unfinished, unfinished.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            for i in order:
                writer.writerow([f"{c[i]:.6g}" if isinstance(c[i], float) else c[i] for c in columns])
