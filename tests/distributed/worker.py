"""Runs in two processes: every case that a test asks for, one after the other.

A line on the standard input names a folder with `cases.json`: a list of {"name", "args"} and perhaps "run", the run
folder, each `args` a command line of the CLI; or {"name", "code"}. What they print goes to `rank<r>.log` there, and
then "done" to the standard output. The processes are started by `pair.launch` with the variables that torchrun sets.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch


def run(folder: Path, rank: str) -> None:
    import cli

    for case in json.loads((folder / "cases.json").read_text()):
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


def main() -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        folder = Path(line.strip())
        os.chdir(folder)
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        run(folder, rank)
        sys.stdout.flush()
        answers.write("done\n")
        answers.flush()


if __name__ == "__main__":
    main()
