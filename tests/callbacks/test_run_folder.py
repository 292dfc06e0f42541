import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.figures import log_figure, new_figure
from callbacks.run_folder import MetricsCsv, RunFolder, _near


@pytest.mark.parametrize("variables", [{"SLURM_LOCALID": "1", "SLURM_PROCID": "1"}, {"LOCAL_RANK": "0", "RANK": "8"}])
def test_only_the_first_rank_of_all_nodes_makes_the_folder(tmp_path, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", int(variables.get("RANK") or variables["SLURM_PROCID"]))
    _ = MetricsCsv(str(tmp_path / "other")).experiment  # as the trainer does on every rank
    assert not (tmp_path / "other").exists()
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    _ = MetricsCsv(str(tmp_path / "first")).experiment
    assert (tmp_path / "first").is_dir()


def test_a_printed_path_is_one_word_for_the_shell(tmp_path):
    for path in (tmp_path / "my runs" / "last.ckpt", Path("/elsewhere/it's here"), tmp_path / "plain"):
        assert len(shlex.split(_near(path))) == 1
    assert _near(tmp_path / "plain") == "plain"


class Module(LightningModule):
    """Fails at a given place."""

    def __init__(self, fails=""):
        super().__init__()
        self.layer, self.fails = nn.Linear(2, 1), fails

    def training_step(self, batch, batch_idx):
        self.maybe("step")
        loss = self.layer(batch[0]).mean()
        self.log("train/loss", loss)
        self.maybe("logged")
        return loss

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.maybe("epoch 1")

    def test_step(self, batch, batch_idx):
        self.maybe("test")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def maybe(self, place):
        if place == self.fails:
            raise RuntimeError(place)


class Draws(Callback):
    """Draws a picture when training starts, or fails in setup."""

    def __init__(self, fails=""):
        self.fails = fails

    def setup(self, trainer, pl_module, stage):
        if self.fails == "setup":
            raise RuntimeError("setup")

    def on_train_start(self, trainer, pl_module):
        log_figure(trainer, "drawn", new_figure())


class Parser:
    def save(self, config, path, **_):
        Path(path).write_text("config")


def trainer(folder, *callbacks, loggers=(), **options):
    config = SimpleNamespace(trainer=SimpleNamespace(default_root_dir=str(folder)), as_dict=dict)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "max_epochs": 2}
    callbacks = [*callbacks, RunFolder(Parser(), config)]
    quiet |= {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks), "log_every_n_steps": 3}
    return Trainer(default_root_dir=folder, callbacks=callbacks, logger=list(loggers), **quiet | options)


def loader():
    return DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=1)


def every_logger(folder):
    return [MetricsCsv(str(folder)), TensorBoardLogger(folder, name="", version="tensorboard")]


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        ("setup", None),
        ("step", None),
        ("logged", None),  # not yet a row in the file
        ("epoch 1", {"config.yaml", "plots"}),
    ],
)
def test_a_fit_that_fails_before_it_has_something_leaves_nothing(tmp_path, fails, left):
    folder = tmp_path / "runs" / "new"
    loggers = every_logger(folder) if fails == "step" else [MetricsCsv(str(folder))] if fails == "logged" else []
    with pytest.raises(RuntimeError, match=fails):
        trainer(folder, Draws(fails), loggers=loggers).fit(Module(fails), loader())
    assert left == ({p.name for p in folder.iterdir()} if folder.exists() else None)


def test_a_failed_wandb_run_leaves_nothing(tmp_path):
    folder = tmp_path / "new"
    logger = WandbLogger(save_dir=str(folder), offline=True)
    with pytest.raises(RuntimeError, match="step"):
        trainer(folder, Draws(), loggers=[logger]).fit(Module("step"), loader())
    assert not folder.exists()


def test_a_fit_that_has_something_keeps_it(tmp_path):
    class FailsLater(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("later")

    rows, saved = tmp_path / "rows", tmp_path / "saved"
    checkpoint = ModelCheckpoint(saved / "checkpoints", every_n_train_steps=1)
    for run in (trainer(rows, loggers=[MetricsCsv(str(rows))], log_every_n_steps=1), trainer(saved, checkpoint)):
        with pytest.raises(RuntimeError, match="later"):
            run.fit(FailsLater(), loader())
    assert {p.name for p in rows.iterdir()} == {"config.yaml", "metrics.csv"}
    assert {p.name for p in saved.iterdir()} == {"config.yaml", "checkpoints"}


def test_a_folder_that_was_there_is_never_removed(tmp_path):
    (tmp_path / "config.yaml").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    for fails in ("setup", "step"):
        with pytest.raises(RuntimeError, match=fails):
            trainer(tmp_path, Draws(fails)).fit(Module(fails), loader())
    with pytest.raises(RuntimeError, match="test"):
        trainer(tmp_path).test(Module("test"), loader(), verbose=False)
    assert (tmp_path / "config.yaml").read_text() == "old"
    assert (tmp_path / "notes.txt").read_text() == "mine"
