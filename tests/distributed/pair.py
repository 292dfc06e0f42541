"""Two processes on this machine, gloo on 127.0.0.1; one pair serves all tests of a session."""

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
_pair: list[subprocess.Popen] = []


def _start() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "tests",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "tests.distributed.worker"]
        pipe = subprocess.PIPE
        _pair.append(subprocess.Popen(command, env=env, cwd=ROOT, stdin=pipe, stdout=pipe))


@atexit.register
def _stop() -> None:
    for process in _pair:
        process.kill()
        process.wait()
    _pair.clear()


def _finished(process: subprocess.Popen, seconds: float) -> bool:
    """Whether the process says so in time, instead of ending or hanging."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], max(seconds, 0))
    return bool(ready) and os.read(process.stdout.fileno(), 100) == b"done\n"


def launch(cases: list[dict], folder: Path, timeout: float = 280) -> str:
    """Run the cases in the pair of processes; returns what they printed. Fails if a process fails or hangs."""
    (folder / "cases.json").write_text(json.dumps(cases))
    if not _pair:
        _start()
    for process in _pair:
        assert process.stdin is not None
        process.stdin.write(f"{folder}\n".encode())
        process.stdin.flush()
    end = time.monotonic() + timeout
    finished = all(_finished(process, end - time.monotonic()) for process in _pair)
    if not finished:
        _stop()
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    output = "\n".join(log.read_text() for log in logs if log.exists())
    assert finished, output[-6000:]
    return output
