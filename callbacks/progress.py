"""A bar for what takes minutes outside Lightning's own loops."""

import sys

from lightning.pytorch import Trainer
from tqdm import tqdm


def progress(trainer: Trainer, what: str, total: int) -> "tqdm[None]":
    """A bar on stderr, beside the trainer's: on rank 0, and only where the trainer shows one.

    Args:
        trainer: of the run.
        what: is being done.
        total: steps of it.
    """
    bar = trainer.progress_bar_callback
    shown = trainer.is_global_zero and bar is not None and getattr(bar, "is_enabled", True)
    calm = 0.1 if sys.stderr.isatty() else 10  # seconds between two states, in a terminal and in a log
    return tqdm(desc=what, total=total, disable=not shown, leave=False, mininterval=calm, dynamic_ncols=True)
