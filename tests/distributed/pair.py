"""Two processes on this machine, gloo on 127.0.0.1."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(cases: list[dict], folder: Path, timeout: float = 280) -> str:
    """Run the cases in one pair of processes; returns what they printed. Fails if a process fails or hangs."""
    listing = folder / "cases.json"
    listing.write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
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
        log = (folder / f"rank{rank}.log").open("w")
        command = [sys.executable, "-m", "tests.distributed.worker", str(listing)]
        processes.append(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    output = "\n".join((folder / f"rank{rank}.log").read_text() for rank in range(2))
    assert codes == [0, 0], output[-6000:]
    return output
