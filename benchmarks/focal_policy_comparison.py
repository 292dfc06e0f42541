"""FocalPolicy against its baseline and its parts, in the simulator.

    python benchmarks/focal_policy_comparison.py run [--tasks ...] [--variants ...] [--seeds 0 1 2] [--steps 2000] [...]
    python benchmarks/focal_policy_comparison.py table

Every variant has the same network, demonstrations (scripted Meta-World experts, point clouds by rays), batches, steps,
learning rate and averaging of weights; only objective and time sampler differ. A row (task, variant, seed) is one JSON
file below `benchmarks/results/focal_policy/comparison`, written the moment it exists, with command, seed and budget;
a second start with the same settings goes on where the first one stopped. `--stage val` evaluates on the validation
layouts, for choosing a setting with one seed; the figures of the card use `test`, whose layouts nothing else sees.
`table` prints means and deviations over seeds, and draws them.
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

RESULTS = Path(__file__).parent / "results" / "focal_policy" / "comparison"
HORIZON, ACTION_DIM = 12, 4
TASKS = ("reach-v3", "sweep-into-v3", "pick-place-v3")  # of the easy, medium and hard groups
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
                path = RESULTS / options.stage / f"{task}-{name}-{seed}.json"
                if path.exists() and json.loads(path.read_text())["budget"] == budget:
                    continue
                metrics = run_one(task, chosen[name], seed, options)
                row = {"task": task, "variant": name, "seed": seed, "budget": budget, "options": chosen[name]}
                # where things lie on this machine means nothing elsewhere
                command = " ".join(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)
                row |= {"command": command, "metrics": metrics}
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_suffix(".part")
                unfinished.write_text(json.dumps(row, indent=1) + "\n")
                unfinished.rename(path)
                print(task, name, seed, {k: round(v, 3) for k, v in metrics.items() if k in MEASURES}, flush=True)
    table(options)


def table(options: argparse.Namespace) -> None:
    """Print mean and deviation over seeds of each task and variant, and draw success and discontinuity."""
    rows = [json.loads(p.read_text()) for p in sorted((RESULTS / options.stage).glob("*.json"))]
    tasks = sorted({r["task"] for r in rows})
    names = [n for n in variants(0, 0) if any(r["variant"] == n for r in rows)]

    def values(task: str | None, variant: str, measure: str) -> np.ndarray:
        picked = [r for r in rows if r["variant"] == variant and task in (None, r["task"])]
        by_seed: dict[int, list[float]] = {}
        for r in picked:
            by_seed.setdefault(r["seed"], []).append(r["metrics"].get(measure, float("nan")))
        return np.array([np.mean(v) for v in by_seed.values()])

    for measure in MEASURES:
        print(f"\n{measure}\n\n| variant | {' | '.join([*tasks, 'mean'])} |\n|{'---|' * (len(tasks) + 2)}")
        for name in names:
            cells = [values(task, name, measure) for task in [*tasks, None]]
            print(
                f"| {name} | " + " | ".join(f"{v.mean():.3g} ± {v.std():.2g}" if len(v) else "" for v in cells) + " |"
            )
    figure = new_figure(10, 4)
    for axis, measure in zip(figure.subplots(1, 2), ("success_rate", "discontinuity"), strict=True):
        found = [values(None, name, measure) for name in names]
        axis.bar(names, [v.mean() for v in found], yerr=[v.std() for v in found], capsize=3)
        axis.set_title(f"{measure}, mean over {len(tasks)} tasks")
        axis.tick_params(axis="x", rotation=45)
    figure.savefig(RESULTS.parent / f"comparison_{options.stage}.png")


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
    parser.add_argument("--steps", type=int, default=2000, help="optimiser steps")
    parser.add_argument("--points", type=int, default=512)
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
