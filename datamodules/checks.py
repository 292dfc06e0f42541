"""What is refused everywhere in the same words: numbers out of range, and files that cannot be read."""

import csv
import errno
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a disk that takes no more; never to be reported as anything else."""


def check_least(least: float, **numbers: float | None) -> None:
    """Refuse numbers below `least`, and what is not a number; None is left open and passes.

    Raises:
        ValueError: Naming the number.
    """
    for name, number in numbers.items():
        if number is not None and not number >= least:
            raise ValueError(f"{name} {number} must be at least {least}")


def check_above(limit: float, **numbers: float | None) -> None:
    """Refuse numbers at or below `limit`, and what is not a number; None is left open and passes.

    Raises:
        ValueError: Naming the number.
    """
    for name, number in numbers.items():
        if number is not None and not number > limit:
            raise ValueError(f"{name} {number} must be above {limit}")


def check_fractions(**fractions: float) -> None:
    """Refuse parts that are none of, or all of, a whole.

    Raises:
        ValueError: Naming the number.
    """
    for name, fraction in fractions.items():
        if not 0 < fraction < 1:
            raise ValueError(f"{name} {fraction} is outside (0, 1)")


def check_ranges(least: float, **ranges: Sequence[float]) -> None:
    """Refuse ranges that fall, or begin below `least`.

    Raises:
        ValueError: Naming the range.
    """
    for name, (low, high) in ranges.items():
        if not low <= high:
            raise ValueError(f"{name} [{low}, {high}]: the lower number comes first")
        if not least <= low:
            raise ValueError(f"{name} [{low}, {high}] must begin at {least} or above")


def check_seeds(**seeds: int) -> None:
    """Refuse seeds that some generator cannot take.

    Raises:
        ValueError: Naming the seed.
    """
    for name, seed in seeds.items():
        if not 0 <= seed < 2**32:
            raise ValueError(f"{name} {seed} is outside 0 to {2**32 - 1}")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: Naming the file, if it is in another encoding or no text.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}): save it as UTF-8") from None


def read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a CSV file; empty lines are none.

    Raises:
        ValueError: Naming file and line, if a row has another number of cells than the header, a column's name comes
            twice, or there is no row.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    header: list[str] = []
    rows = []
    try:
        for row in reader:
            if row and not header:
                header = row
            elif row:
                rows.append(row)
                if len(row) != len(header):
                    raise ValueError(f"{path}, line {reader.line_num}: {len(row)} cells, the header has {len(header)}")
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise ValueError(f"{path} has the column {twice[0]!r} more than once")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return header, rows


def read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an `.npz` file; none that would execute code.

    Raises:
        ValueError: Naming the file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # numpy raises many kinds for a broken file
        raise ValueError(f"{path} cannot be read as .npz: {' '.join(str(error).split())}") from None
