"""FocalPolicy against its baseline and its parts, in the simulator.

    python benchmarks/focal_policy_comparison.py run [--tasks ...] [--variants ...] [--seeds 0 1 2] [--steps 1000] [...]
    python benchmarks/focal_policy_comparison.py table

Every variant has the same network, demonstrations (scripted Meta-World experts, point clouds by rays), batches, steps,
learning rate and averaging of weights; only objective and time sampler differ. `flowpolicy` is FlowPolicy's consistency
objective; `step` is plain regression of the endpoint from a uniform time, without the consistency objective's two
segments, velocity term and target network; `anchored` adds the time sampler to it, `composite` the foresight term,
`full` both. A row (task, variant, seed) is one JSON file below `benchmarks/results/focal_policy/<name>`, written the
moment it exists, with command, seed and budget; a second start goes on where the first one stopped, and one with
another budget needs another `--name`. `--stage val` evaluates on the validation layouts, for choosing a setting with
one seed; the figures of the card use `test`, whose layouts nothing else sees. `table` prints means and standard
deviations over seeds, and draws them.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parents[1]))
from callbacks import EMA, Rollouts
from callbacks.figures import new_figure
from datamodules import RobotDemonstrations
from datamodules.metaworld import Observation
from lightning_modules import FocalPolicy

RESULTS = Path(__file__).parent / "results" / "focal_policy"
HORIZON, ACTION_DIM = 12, 4
TASKS = ("drawer-open-v3", "sweep-into-v3", "stick-push-v3")
"""Of the easy, medium and very hard groups; among seven tried with one seed of `step` on validation layouts, those
that it solves neither nearly always nor nearly never at this budget."""
ANCHORED = {"time_sampler": "v0"}
STEP = {"time_sampler": "cfm"}
TIME_ONLY = {"time_scope": "window", "freq_weight": 0.0, "freq_mode": "none"}
MEASURES = ("success_rate", "discontinuity", "overlap_disagreement", "jerk", "high_band_energy", "latency_ms")


def variants(freq_weight: float, proximal_start: int) -> dict[str, dict]:
    """Options of `FocalPolicy` by name of the variant.

    The weight is that of "dct_l2", a sum over the window; "dct_softmax" is a mean over dimensions with weights that
    sum to one over frequencies, so it is multiplied by their number to weigh as much when all differences are alike.
    """
    composite = {"freq_weight": freq_weight, "proximal_start": proximal_start}
    low_first = np.linspace(2, 0, HORIZON).tolist()
    softmax = {"freq_mode": "dct_softmax", "freq_weight": freq_weight * HORIZON * ACTION_DIM}
    return {
        "flowpolicy": {"objective": "consistency"},
        "step": STEP | TIME_ONLY,
        "anchored": ANCHORED | TIME_ONLY,
        "composite": STEP | composite,
        "full": ANCHORED | composite,
        "full_softmax": ANCHORED | composite | softmax,
        "full_band": ANCHORED | composite | {"freq_mode": "dct_band", "band_weights": low_first},
        "full_released": ANCHORED | {"freq_weight": 1e-4, "proximal_start": 0},
        "endpoint": {"time_sampler": "terminal"} | TIME_ONLY,
    }


def run_one(task: str, variant: dict, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train and evaluate one row."""
    seed_everything(seed, verbose=False)
    data = RobotDemonstrations(
        tasks=[task],
        episodes=options.episodes,
        observe=Observation(state="robot", points=options.points),
        tail=options.tail,
        batch_size=options.batch,
        seed=seed,
        data_dir=options.data,
        processes=options.processes,
    )
    policy = FocalPolicy(
        **variant,
        widths=options.widths,
        warmup_steps=min(100, options.steps // 10),
        optimizer=lambda p: torch.optim.AdamW(p, lr=options.lr, betas=(0.95, 0.999), weight_decay=1e-6, fused=True),
        seed=seed,
    )
    rollouts = Rollouts(options.evaluate, picture=0)
    trainer = Trainer(
        max_steps=options.steps,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[EMA(0.9999, power=0.75, start=2), rollouts],
        default_root_dir=options.data,
    )
    data.prepare_data()
    start = time.process_time()
    trainer.fit(policy, data)
    trained = time.process_time() - start
    if options.stage == "val":
        trainer.limit_val_batches = 1.0
        (metrics,) = trainer.validate(policy, data, verbose=False)
    else:
        (metrics,) = trainer.test(policy, data, verbose=False)
    found = {name.split("/")[1]: value for name, value in metrics.items()}
    return found | {"training_cpu_s": trained}


def run(options: argparse.Namespace) -> None:
    """Run what is missing."""
    torch.set_num_threads(1)
    chosen = variants(options.freq_weight, options.proximal_start)
    budget = {k: v for k, v in vars(options).items() if k in KEPT}
    for seed in options.seeds:
        for task in options.tasks:
            for name in options.variants or chosen:
                path = folder(options) / f"{task}-{name}-{seed}.json"
                if path.exists():
                    if (made := json.loads(path.read_text())["budget"]) != budget:
                        raise SystemExit(f"{path} was made with {made}: give this run another --name")
                    continue
                metrics = run_one(task, chosen[name], seed, options)
                row = {"task": task, "variant": name, "seed": seed, "budget": budget, "options": chosen[name]}
                given = " ".join(f"--{k.replace('_', '-')} {spell(v)}" for k, v in budget.items())
                chosen_row = f"--tasks {task} --variants {name} --seeds {seed} --stage {options.stage}"
                row["command"] = f"python benchmarks/focal_policy_comparison.py run {chosen_row} {given}"
                row["metrics"] = metrics
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_suffix(".part")
                unfinished.write_text(json.dumps(row, indent=1) + "\n")
                unfinished.rename(path)
                print(task, name, seed, {k: round(v, 3) for k, v in metrics.items() if k in MEASURES}, flush=True)
    table(options)


def folder(options: argparse.Namespace) -> Path:
    """Where the rows of a name and a stage lie."""
    return RESULTS / options.name / options.stage


def spell(value: object) -> str:
    """A value as the command line takes it."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def table(options: argparse.Namespace) -> None:
    """Print mean and deviation over seeds of each task and variant, and draw success and discontinuity.

    The mean over tasks is shown for seeds that have a row of every task.
    """
    rows = [json.loads(p.read_text()) for p in sorted(folder(options).glob("*.json"))]
    tasks = sorted({r["task"] for r in rows})
    names = [n for n in variants(0, 0) if any(r["variant"] == n for r in rows)]
    by_row = {(r["variant"], r["task"], r["seed"]): r["metrics"] for r in rows}
    seeds = sorted({r["seed"] for r in rows})

    def values(chosen: list[str], variant: str, measure: str) -> np.ndarray:
        whole = [s for s in seeds if all((variant, t, s) in by_row for t in chosen)]
        found = [[by_row[variant, t, s].get(measure, np.nan) for t in chosen] for s in whole]
        return np.array([np.mean(v) for v in found if not np.isnan(v).any()])

    def cell(v: np.ndarray) -> str:
        return f"{v.mean():.3g} ± {v.std(ddof=1):.2g} ({len(v)})" if len(v) > 1 else f"{v[0]:.3g} (1)" if len(v) else ""

    for measure in MEASURES:
        head = [*tasks, f"mean of {len(tasks)} tasks"]
        print(
            f"\n{measure}: mean ± deviation (seeds)\n\n| variant | {' | '.join(head)} |\n|{'---|' * (len(tasks) + 2)}"
        )
        for name in names:
            print(f"| {name} | {' | '.join(cell(values(c, name, measure)) for c in [*([t] for t in tasks), tasks])} |")
    figure = new_figure(10, 4)
    for axis, measure in zip(figure.subplots(1, 2), ("success_rate", "discontinuity"), strict=True):
        for i, name in enumerate(names):
            found = values(tasks, name, measure)
            axis.plot([i] * len(found), found, "o", alpha=0.6)
            axis.plot([i - 0.3, i + 0.3], [found.mean()] * 2 if len(found) else [np.nan] * 2, "k-")
        axis.set_xticks(range(len(names)), names, rotation=45)
        axis.set_title(f"{measure}, mean over {len(tasks)} tasks; a dot is a seed")
    figure.savefig(folder(options) / "comparison.png", dpi=120)


KEPT = (
    "episodes", "points", "tail", "batch", "steps", "lr", "widths", "evaluate", "freq_weight", "proximal_start",
)  # fmt: skip


def main() -> None:
    """Parse and go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=list(variants(0, 0)))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--stage", choices=("val", "test"), default="test")
    parser.add_argument("--episodes", type=int, default=10, help="demonstrations of each task")
    parser.add_argument("--evaluate", type=int, default=50, help="episodes of the evaluation")
    parser.add_argument("--name", default="comparison", help="folder of the results")
    parser.add_argument("--steps", type=int, default=1000, help="optimiser steps")
    parser.add_argument("--points", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tail", type=int, default=20, help="steps a demonstration goes on after its success")
    parser.add_argument("--freq-weight", type=float, default=1e-2)
    parser.add_argument("--proximal-start", type=int, default=1)
    parser.add_argument("--data", default="data", help="where demonstrations are kept")
    parser.add_argument("--processes", type=int, help="of the simulator; all cores by default")
    options = parser.parse_args()
    {"run": run, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
