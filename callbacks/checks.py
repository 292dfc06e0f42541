"""What a callback asks of the run that it is put into."""

from typing import Any

from lightning.pytorch.callbacks import Callback


def require(callback: Callback, fits: bool, needs: str, found: Any) -> None:
    """Refuse a run that the callback cannot accompany.

    Args:
        callback: who asks.
        fits: whether the run has what it needs.
        needs: what that is.
        found: the module or the data module of the run, or none.

    Raises:
        ValueError: unless it fits.
    """
    if not fits:
        there = "nothing" if found is None else type(found).__name__
        name = type(callback).__name__
        raise ValueError(f"callbacks.{name} needs {needs}, and found {there}: remove it from trainer.callbacks")
