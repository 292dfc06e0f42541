"""Predicted videos beside the expert's."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.figures import log_figure, new_figure


class VideoGrid(Callback):
    """Draws clips of the expert, the prediction before training and the prediction now, frame by frame.

    For `VideoDiffusion` and `DynVPP`: after each validation and after a test, `<run>/plots/videos_val.png` or
    `videos_test.png`, and the same picture in the loggers. Predictions are the ODE sampler's, always from the same
    noise.

    Args:
        clips: How many, spread evenly over the split's first batch.
    """

    def __init__(self, clips: int = 4) -> None:
        self.clips = clips
        self._before: Tensor | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Predict before the first step; a resumed run has no such row."""
        if trainer.ckpt_path is None:
            self._before = self._predict(trainer.datamodule.val_dataloader(), pl_module)[1]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the first validation clips."""
        if not trainer.sanity_checking:
            self._draw(trainer, pl_module, trainer.datamodule.val_dataloader(), "videos_val", self._before)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the first test clips."""
        self._draw(trainer, pl_module, trainer.datamodule.test_dataloader(), "videos_test", None)

    def _predict(self, loader: Any, pl_module: LightningModule) -> tuple[Tensor, Tensor, list[str]]:
        batch = next(iter(loader))
        here = torch.linspace(0, len(batch.index) - 1, min(self.clips, len(batch.index))).long()
        video, tokens = batch.video[here].to(pl_module.device), batch.tokens[here].to(pl_module.device)
        captions = [batch.caption[i] for i in here.tolist()]
        with torch.no_grad():
            predicted = pl_module(video[:, 0], tokens, captions, batch.index[here].tolist())
        return (video / 2 + 0.5).cpu(), predicted.cpu(), captions

    def _draw(
        self, trainer: Trainer, pl_module: LightningModule, loader: Any, name: str, before: Tensor | None
    ) -> None:
        expert, now, captions = self._predict(loader, pl_module)
        rows = {"expert": expert, "before": before, "now": now}
        log_figure(trainer, name, grid({k: v for k, v in rows.items() if v is not None}, captions))


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
