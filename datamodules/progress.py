"""A bar for work that takes a while before the first batch."""

import sys
from typing import Any


def progress(what: str, total: int) -> Any:
    """A bar on stderr that appears after a second, on the first rank alone.

    Args:
        what: is being done, in a few words.
        total: number of pieces.

    Returns:
        A `tqdm`: a context manager with `update(n)`.
    """
    from lightning_utilities.core.rank_zero import rank_zero_only
    from tqdm import tqdm

    other_rank = getattr(rank_zero_only, "rank", 0) != 0  # set by lightning
    calm = 0.1 if sys.stderr.isatty() else 10  # seconds between two states, in a terminal and in a log
    return tqdm(desc=what, total=total, delay=1, mininterval=calm, disable=other_rank, dynamic_ncols=True)
