"""A bar for what takes minutes outside Lightning's own loops."""

import sys
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from tqdm import tqdm


class Bar(Protocol):
    """What `progress` gives; tqdm's bars are such."""

    def __enter__(self) -> "Bar": ...
    def __exit__(self, *error: Any) -> Any: ...
    def update(self) -> Any:
        """One step is done."""

    def set_description(self, what: str) -> Any:
        """Say what is being done now."""


def progress(trainer: Trainer, what: str, total: int) -> Bar:
    """A bar beside the trainer's: on rank 0, and only where the trainer shows one.

    Args:
        trainer: of the run.
        what: is being done.
        total: steps of it.

    Returns:
        To be used in a `with` statement. A line in Rich's display if that runs, which swallows other bars; otherwise
        tqdm's on stderr.
    """
    own = trainer.progress_bar_callback
    shown = trainer.is_global_zero and own is not None and getattr(own, "is_enabled", True)
    if shown and isinstance(own, RichProgressBar) and own.progress is not None:
        live = own.progress.live
        if live.is_started and live.console.is_terminal:
            return _RichBar(own.progress, what, total)
    calm = 0.1 if sys.stderr.isatty() else 10  # seconds between two states, in a terminal and in a log
    return tqdm(desc=what, total=total, disable=not shown, leave=False, mininterval=calm, dynamic_ncols=True)


class _RichBar:
    """A line of its own in a display of Rich."""

    def __init__(self, display: Any, what: str, total: int) -> None:
        self.display, self.line = display, display.add_task(what, total=total)

    def __enter__(self) -> "_RichBar":
        return self

    def __exit__(self, *error: Any) -> None:
        self.display.remove_task(self.line)

    def update(self) -> None:
        self.display.update(self.line, advance=1, refresh=True)

    def set_description(self, what: str) -> None:
        self.display.update(self.line, description=what, refresh=True)
