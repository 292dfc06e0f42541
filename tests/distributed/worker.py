"""Runs in two processes: every case that a test in this folder asks for, one after the other.

`python -m tests.distributed.worker CASES.json`: a list of {"name", "args"} and perhaps "run", the
run folder, each `args` a command line of the CLI.
The processes are started by `pair.launch` with the variables that torchrun sets.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    import cli

    rank = os.environ["RANK"]
    for case in cases:
        os.environ.pop("FULGURITE_RUN", None)
        if "run" in case:  # as Lightning's own launcher would hand it on; without it the ranks must agree by themselves
            os.environ["FULGURITE_RUN"] = case["run"]
        try:
            if case.get("code"):
                exec(case["code"], {})
            else:
                cli.main(case["args"])
        except SystemExit as stopped:
            if stopped.code:
                print(f"CASE {case['name']} ended with {stopped.code}", flush=True)
        except Exception:
            print(f"CASE {case['name']} failed on rank {rank}\n{traceback.format_exc()}", flush=True)
            os._exit(1)  # the other rank would wait for ever in a collective


if __name__ == "__main__":
    main()
