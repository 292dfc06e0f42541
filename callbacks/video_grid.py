"""Predicted videos beside the expert's."""

from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.checks import require
from callbacks.figures import log_figure, log_table, new_figure
from datamodules.checks import check_least
from lightning_modules.dyn_vpp.diffusion import VideoDiffusion
from lightning_modules.dyn_vpp.rewards import latent_reward


class VideoGrid(Callback):
    """Draws clips of the expert, the prediction before training and the prediction now, frame by frame.

    For `VideoDiffusion` and `DynVPP`: after each validation and after a test, `<run>/plots/videos_val.png` or
    `videos_test.png`, and the same picture in the loggers. Predictions are the ODE sampler's, always from the same
    noise, with the weights that are evaluated (those of `EMA`, if it comes first in the list of callbacks).

    Tables, in the run folder and in W&B: after a fit `val_clips.csv`, for each of the clips the reward of the
    predicted frames before training and now, and that of repeating the first frame (see `VideoDiffusion.predict_step`);
    after a test `test_frames.csv`, L1, cosine and reward of each frame over all test clips.

    Args:
        clips: How many, spread evenly over the split's first batch; at least 1.
    """

    def __init__(self, clips: int = 4) -> None:
        check_least(1, clips=clips)
        self.clips = clips
        self._before: _Shown | None = None
        self._now: _Shown | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another method.

        Raises:
            ValueError: If the method predicts no videos, or there is no data module to take clips from.
        """
        require(self, isinstance(pl_module, VideoDiffusion), "the method VideoDiffusion or DynVPP", pl_module)
        data = trainer.datamodule
        require(self, stage == "predict" or data is not None, "a data module such as ExpertVideos", data)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Predict before the first step; a resumed run has no such row."""
        if trainer.ckpt_path is None:
            self._before = self._predict(trainer.datamodule.val_dataloader(), pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the first validation clips."""
        if not trainer.sanity_checking:
            self._now = self._predict(trainer.datamodule.val_dataloader(), pl_module)
            rows = {"expert": self._now.expert} | ({"before": self._before.predicted} if self._before else {})
            log_figure(trainer, "videos_val", grid(rows | {"now": self._now.predicted}, self._now.captions))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the rewards of the drawn clips."""
        if self._now is None:
            return
        before = self._before.reward if self._before else [None] * len(self._now.reward)
        columns = (self._now.captions, before, self._now.reward, self._now.copy_reward)
        names = ("clip", "reward_before", "reward", "copy_reward")
        log_table(trainer, "val_clips", [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)])

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the first test clips."""
        shown = self._predict(trainer.datamodule.test_dataloader(), pl_module)
        log_figure(trainer, "videos_test", grid({"expert": shown.expert, "now": shown.predicted}, shown.captions))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write how far each frame is from the expert's."""
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        rows: list[dict[str, float]] = []
        while (name := f"test/l1_frame_{len(rows)}") in logged:
            l1, cosine = logged[name], logged[f"test/cosine_frame_{len(rows)}"]
            rows.append({"frame": len(rows), "l1": l1, "cosine": cosine, "reward": cosine - l1})
        log_table(trainer, "test_frames", rows)

    def _predict(self, loader: Any, pl_module: LightningModule) -> "_Shown":
        assert isinstance(pl_module, VideoDiffusion) and pl_module.model is not None
        batch = next(iter(loader))
        here = torch.linspace(0, len(batch.index) - 1, min(self.clips, len(batch.index))).long()
        captions = [batch.caption[i] for i in here.tolist()]
        tensors = {k: v[here].to(pl_module.device) for k, v in batch._asdict().items() if k != "caption"}
        chosen = batch._replace(caption=captions, **tensors)
        with torch.no_grad():
            expert, hybrid, ode = pl_module.generate(chosen)
            predicted = pl_module.model.decode(ode)
            seen = pl_module.pictures(chosen)
        scores = (latent_reward(hybrid, expert[:, None]).mean(1), latent_reward(expert[:, :1], expert))
        rewards = (score[:, 1:].mean(1).tolist() for score in scores)
        return _Shown(seen.cpu(), predicted.cpu(), captions, *rewards)


class _Shown(NamedTuple):
    """Expert and predicted clips `[n f 3 h w]` in [0, 1], and what belongs to each."""

    expert: Tensor
    predicted: Tensor
    captions: list[str]
    reward: list[float]
    copy_reward: list[float]


def grid(rows: dict[str, Tensor], captions: list[str]) -> Figure:
    """Two clips side by side, one line per entry of `rows`, one column per frame; videos `[n f 3 h w]` in [0, 1]."""
    n, f = next(iter(rows.values())).shape[:2]
    across = min(n, 2)
    down = -(-n // across)
    figure = new_figure(across * (f + 0.4), down * (len(rows) + 0.3))
    for i, block in enumerate(figure.subfigures(down, across, squeeze=False).flat[:n]):
        block.suptitle(captions[i], fontsize=9)
        axes = block.subplots(len(rows), f, squeeze=False)
        for line, (name, videos) in zip(axes, rows.items(), strict=True):
            line[0].set_ylabel(name)
            for k, axis in enumerate(line):
                axis.imshow(videos[i, k].permute(1, 2, 0).numpy())
                axis.set_xticks([])
                axis.set_yticks([])
    return figure
