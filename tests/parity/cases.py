"""Find the arrays that the code is checked against.

By default the copies in `tests/parity/data`, or the folder in `FULGURITE_PARITY_DIR`. Below it every method has a
folder; each `.npz` file in it (at any depth), and each folder with a `config.json`, is one case. A method's test
module maps name patterns to checks, so that new files of known names run without new code, and a file that no
pattern knows fails instead of being passed over.
"""

import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("FULGURITE_PARITY_DIR", Path(__file__).parent / "data"))


def files(method: str) -> list:
    """All cases of a method as pytest parameters, named by their path below the method's folder."""
    base = ROOT / method
    folders = {p.parent for p in base.rglob("config.json")}
    cases = sorted(folders | {p for p in base.rglob("*.npz") if p.parent not in folders})
    if not cases:
        return [pytest.param(None, id="none", marks=pytest.mark.skip(reason=f"no arrays below {base}"))]
    return [pytest.param(path, id=path.relative_to(base).as_posix()) for path in cases]


def check(path: Path, checks: dict[str, Callable[[Path], None]]) -> None:
    """Run the check of the first pattern that matches the case's name."""
    for pattern, function in checks.items():
        if fnmatch(path.name, pattern):
            return function(path)
    pytest.fail(f"{path}: no check knows a case of this name; known: {', '.join(checks)}")
