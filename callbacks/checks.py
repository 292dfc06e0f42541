"""What a callback asks of its options and of the run that it is put into."""

from typing import Any

from lightning.pytorch.callbacks import Callback


def at_least(low: float, **options: float) -> None:
    """Refuse options below `low`.

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if not value >= low:  # not a number is refused too
            raise ValueError(f"{name} {value} must be at least {low}")


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
