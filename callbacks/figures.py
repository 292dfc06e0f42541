"""Pictures of a run: a PNG in its folder, and a picture in every logger that shows pictures."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure


def new_figure(width: float = 6.0, height: float = 4.0) -> Figure:
    """A figure in inches that no window system and no global state knows of."""
    return Figure(figsize=(width, height), layout="constrained", dpi=120)


def log_figure(trainer: Trainer, name: str, figure: Figure) -> Path | None:
    """Save `figure` as `<run>/plots/<name>.png` and hand it to W&B and TensorBoard.

    Args:
        trainer: its `default_root_dir` is the run folder.
        name: of the picture, a file name without ending.
        figure: drawn without pyplot (see `new_figure`).

    Returns:
        The path written, or `None` on ranks other than 0.
    """
    if not trainer.is_global_zero:
        return None
    path = Path(trainer.default_root_dir) / "plots" / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(key=name, images=[str(path)])
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, global_step=trainer.global_step)
    return path
