"""The allocator's setting does what it is for: freed tensors come back without new pages."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from lightning_modules.memory import keep_freed_memory
keep = {keep}
assert not keep or keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):  # small tensors settle in the gaps first
    torch.zeros(1 << 26).add_(1)  # 256 MB
before = faults()
for _ in range(4):
    torch.zeros(1 << 26).add_(1)
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_freed_tensors_cost_no_new_pages():
    faults = {
        keep: int(
            subprocess.run([sys.executable, "-c", SCRIPT.format(keep=keep)], capture_output=True, check=True).stdout
        )
        for keep in (False, True)
    }
    assert faults[False] > 100_000  # 4 KB pages of four tensors
    assert faults[True] < 1_000
