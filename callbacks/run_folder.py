"""The run folder: one place for the config, the checkpoints, the metrics and the pictures of a run."""

import json
import os
import shlex
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from callbacks.figures import log_table
from callbacks.files import whole_file
from datamodules.checks import check_least

CONFIG = "config.yaml"


def new_run_folder(root: Path, name: str) -> Path:
    """A path `<root>/<name>/<time>-<four hex digits>` that does not exist yet. It is not made here.

    Processes that a launcher starts for other ranks on this machine inherit the path of the first one.

    Raises:
        ValueError: if a file stands where a folder should be, or the place cannot be written to.
    """
    inherited = os.environ.get("FULGURITE_RUN")
    if inherited and "LOCAL_RANK" in os.environ:
        return Path(inherited)
    folder = root.resolve() / name / f"{datetime.now():%Y-%m-%d_%H%M%S}-{os.urandom(2).hex()}"
    for parent in folder.parents:
        if parent.exists():
            if not parent.is_dir():
                raise ValueError(f"cannot make the run folder {folder}: {parent} is a file")
            if not os.access(parent, os.W_OK):
                raise ValueError(f"cannot make the run folder {folder}: no permission to write in {parent}")
            break
    os.environ["FULGURITE_RUN"] = str(folder)
    return folder


def run_folder_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, or `None` if it lies elsewhere."""
    folder = checkpoint.resolve().parent.parent
    return folder if (folder / CONFIG).is_file() else None


class _Rows(ExperimentWriter):
    """Appends to `metrics.csv` instead of deleting what an earlier start of the same run wrote."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if path.is_file():
            with path.open() as file:
                self.metrics_keys = sorted(file.readline().strip().split(","))

    def _check_log_dir_exists(self) -> None: ...

    def log_hparams(self, params: dict[str, Any]) -> None:
        """Nothing: `config.yaml` holds them."""

    def save(self) -> None:
        """Append the rows; `config.yaml` takes the place of Lightning's `hparams.yaml`."""
        super(ExperimentWriter, self).save()


class MetricsCsv(CSVLogger):
    """`metrics.csv` in the run folder; a resumed run and a later test append to it.

    Args:
        save_dir: the run folder.
        flush_logs_every_n_steps: how often rows are written to disk, at least 1.
    """

    def __init__(self, save_dir: str = "{run}", flush_logs_every_n_steps: int = 100) -> None:
        check_least(1, flush_logs_every_n_steps=flush_logs_every_n_steps)
        super().__init__(save_dir, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps)

    @property
    def experiment(self) -> Any:
        """The writer of the rows, made on first use on rank 0."""
        # of all nodes: no other rank makes a folder
        if self._experiment is None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            self._experiment = _Rows(self.log_dir)
        return super().experiment


class RunFolder(SaveConfigCallback):
    """Writes `config.yaml` once, beside the checkpoints, and the figures of a test.

    These are `test_metrics.json`, and `test_metrics.csv`, a table in W&B. All ranks agree on the folder of rank 0. The
    id of a W&B run is kept in the checkpoint, so that a resumed fit and a later test go on in the same W&B run. After a
    fit the command of the test is printed. A fit that fails before its first checkpoint, its first logged row and the
    end of its first epoch leaves no folder behind.
    """

    def __init__(self, parser: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, save_to_log_dir=False, **kwargs)
        self.wandb_id: str | None = None
        self._new = not Path(config.trainer.default_root_dir).exists()  # nothing else has written to it yet
        self._epoch_finished = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Agree on the folder; save the config of a fit."""
        trainer._default_root_dir = trainer.strategy.broadcast(str(trainer.default_root_dir))
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                self.wandb_id = logger.experiment.id
        if stage == "fit":
            self._keep_config(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero and stage == "fit":
                logger.experiment.config.update({"cli": self.config.as_dict()}, allow_val_change=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A test or a prediction that has no fit before it keeps its config too, once it has come to its end."""
        self._keep_config(trainer)

    def _keep_config(self, trainer: Trainer) -> None:
        path = Path(trainer.default_root_dir) / CONFIG
        if trainer.is_global_zero and not trainer.fast_dev_run and not path.exists():
            with whole_file(path) as unfinished:
                self.parser.save(self.config, unfinished, skip_none=False, overwrite=True, multifile=False)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing more: `setup` has saved it."""

    def state_dict(self) -> dict[str, Any]:
        """The id of the W&B run, if there is one."""
        return {"wandb_id": self.wandb_id}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what to run next."""
        checkpoint = next((c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)), None)
        if trainer.fast_dev_run or checkpoint is None:
            return
        path = checkpoint.best_model_path or checkpoint.last_model_path
        if path:
            config = Path(trainer.default_root_dir) / CONFIG
            rank_zero_info(f"Test it with:\n  fulgurite test -c {_near(config)} --ckpt_path {_near(Path(path))}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A fit that ends before its first checkpoint, logged row and finished epoch leaves nothing behind."""
        if not trainer.is_global_zero or trainer.state.fn != "fit" or not self._new:
            return
        for logger in trainer.loggers:
            logger.finalize("failed")  # writes the rows that wait, and closes files
        if not self._epoch_finished and not _has_results(trainer):
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    import wandb

                    wandb.finish(exit_code=1)
            shutil.rmtree(trainer.default_root_dir, ignore_errors=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember that the run has come so far."""
        self._epoch_finished = True

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the test's figures as JSON."""
        if trainer.is_global_zero and not trainer.fast_dev_run:
            metrics = {k: v.item() if torch.is_tensor(v) else v for k, v in trainer.callback_metrics.items()}
            path = Path(trainer.default_root_dir) / "test_metrics.json"
            with whole_file(path) as unfinished:
                unfinished.write_text(json.dumps(dict(sorted(metrics.items())), indent=1) + "\n")
            log_table(trainer, "test_metrics", [{"metric": k, "value": v} for k, v in sorted(metrics.items())])


def _has_results(trainer: Trainer) -> bool:
    """Whether a run has a checkpoint, or will have one, or has logged a row."""
    folder = Path(trainer.default_root_dir)
    if any(path.is_file() for path in (folder / "checkpoints").rglob("*")):
        return True
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "last_model_path", "") or getattr(callback, "save_on_exception", True):
            return True
    elsewhere = any(not isinstance(logger, CSVLogger) for logger in trainer.loggers)
    return (folder / "metrics.csv").exists() or (elsewhere and bool(trainer.logged_metrics))


def _near(path: Path) -> str:
    """Relative to the current folder where it lies below it, quoted for the shell where it must be."""
    here = Path.cwd()
    return shlex.quote(str(path.resolve().relative_to(here) if path.resolve().is_relative_to(here) else path))
