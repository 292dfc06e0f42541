"""The allocator's setting does what it is for: freed tensors come back without new pages."""

import subprocess
import sys

import pytest

import cli
import lightning_modules.memory

SCRIPT = """
import resource, torch
from lightning_modules.memory import keep_freed_memory
assert not {keep} or keep_freed_memory()
for _ in range(30):
    torch.zeros(1 << 24).add_(1)  # 64 MB, 16,384 pages of 4 KB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_freed_tensors_cost_no_new_pages():
    faults = {}
    for keep in (False, True):
        done = subprocess.run([sys.executable, "-c", SCRIPT.format(keep=keep)], capture_output=True, check=True)
        faults[keep] = int(done.stdout)
    # not exactly once: a small tensor may settle in a gap, then the next large one starts behind it
    assert faults[False] - faults[True] > 15 * 16_384


def test_the_command_line_asks_for_it_first(monkeypatch):
    order = []
    monkeypatch.setattr(lightning_modules.memory, "keep_freed_memory", lambda: order.append("memory"))
    monkeypatch.setattr(cli, "front_door", lambda: lambda args: order.append(args[0]))
    cli.run(["fit"])
    assert order == ["memory", "fit"]
