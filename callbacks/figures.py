"""Pictures and tables of a run: a file in its folder, and the same in every logger that shows such things."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure

from callbacks.files import whole_file


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
        The path written, or `None` on ranks other than 0 and in a `fast_dev_run`.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:
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


def log_table(trainer: Trainer, name: str, rows: Sequence[Mapping[str, Any]]) -> Path | None:
    """Save `rows` as `<run>/<name>.csv` and hand them to the loggers that show tables, such as W&B.

    Args:
        trainer: its `default_root_dir` is the run folder.
        name: of the table, a file name without ending.
        rows: all with the same columns; numbers, truth values, strings, or `None` for an empty cell.

    Returns:
        The path written, or `None` without rows, on ranks other than 0 and in a `fast_dev_run`.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run or not rows:
        return None
    columns = list(rows[0])
    data = [[row[column] for column in columns] for row in rows]
    path = Path(trainer.default_root_dir) / f"{name}.csv"
    with whole_file(path) as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(data)
    for logger in trainer.loggers:
        if hasattr(logger, "log_table"):
            logger.log_table(key=name, columns=columns, data=data)
    return path
