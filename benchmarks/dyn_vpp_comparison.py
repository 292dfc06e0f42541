"""Dyn-VPP against its base, more supervised training, and copying the first frame, on held-out Meta-World episodes.

    python benchmarks/dyn_vpp_comparison.py run [--rows ...] [--seeds 0 1 2] [--lr 3e-4] [--iterations 100] [...]
    python benchmarks/dyn_vpp_comparison.py table

Rows: `base`; `post`, the post-training; `steps_<lr>` and `compute_<lr>`, more supervised training of the base with as
many optimiser steps, or as many passes of the U-Net, as `post` (a backward pass counts as two); `small`, post-training
with 8 contexts and learning rate 1e-3, a control that should fail. All start from the same base, have the same
schedule, average their weights alike and are scored on the same contexts with the same noise. Copying the first frame
is a column of every row. `post_<lr>` is `post` with another learning rate, for choosing one. `more_<lr>` is 500 more
supervised steps of 32 clips, which tell whether the base has converged. `policy_base` and `policy_post` train a policy
on the features of the base or of the seed's post-trained model (`--models`, where `post` leaves it) and count its
successes in the simulator.

A row is one JSON file below `benchmarks/results/dyn_vpp/comparison` (or `--results`), written the moment it exists,
with command, seed, budget and the scores of each context; a second start with the same settings goes on where the
first one stopped.
`--stage val` scores validation episodes, for choosing a setting with one seed. `table` prints differences of paired
contexts with a bootstrap over episodes (contexts of one episode are alike), and draws the curves.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

sys.path.insert(0, str(Path(__file__).parents[1]))
from callbacks import EMA, Rollouts
from callbacks.figures import new_figure
from datamodules import ExpertVideos
from datamodules.order import Draw
from lightning_modules import DynVPP, VideoDiffusion, VideoPolicy
from lightning_modules.dyn_vpp.metrics import centroid_error, colour_centroid, group_diversity, high_frequency_energy
from lightning_modules.dyn_vpp.rewards import cosine_reward, l1_reward, latent_reward

RESULTS = Path(__file__).parent / "results" / "dyn_vpp" / "comparison"
ARM = (0.43, 0.08, 0.08)
"""Colour of the robot arm in the ray-cast pictures: the object whose centre is measured."""
LATENTS: dict[int, torch.Tensor] = {}
"""Of the clips, by number: all rows of a run have the same base, so each clip is encoded once."""
KEPT = (
    "base", "sigma_min", "sigma_max", "steps", "contexts", "group", "iterations", "inner_epochs", "lr", "warmup",
    "anchor", "ema", "episodes", "test_episodes", "apart", "eval_group", "frames", "stride", "policy_steps",
    "policy_episodes",
)  # fmt: skip


def clips(data: ExpertVideos, split: str, apart: int, size: int = 16) -> Iterator[tuple[Any, list[int]]]:
    """Batches of every `apart`-th clip of a split, and the episode of each."""
    chosen = data.clips(split)
    for items in np.array_split(np.arange(0, len(chosen), apart), -(-len(chosen) // (apart * size))):
        yield chosen.__getitems__(Draw(0, items)), chosen.episode[items].tolist()


@torch.no_grad()
def evaluate(module: VideoDiffusion, data: ExpertVideos, split: str, apart: int) -> dict[str, Any]:
    """Scores of each context, all without the given frame; energies for sharpness."""
    module.eval()
    rows: dict[str, list] = {}
    for batch, episodes in clips(data, split, apart):
        expert, hybrid, ode = module.generate(batch)
        wide = expert[:, None]
        video = module.model.decode(ode)
        # decoding moves the arm's centre by itself: against the decoded expert, what the prediction does is left
        centres = {"centroid_error": batch.video / 2 + 0.5, "centroid_decoded": module.model.decode(expert)}
        values = {
            "reward": latent_reward(hybrid, wide)[..., 1:].mean((1, 2)),
            "reward_ode": latent_reward(ode, expert)[:, 1:].mean(1),
            "reward_copy": latent_reward(expert[:, :1], expert)[:, 1:].mean(1),
            "l1": -l1_reward(hybrid, wide)[..., 1:].mean((1, 2)),
            "cosine": cosine_reward(hybrid, wide)[..., 1:].mean((1, 2)),
            "diversity": group_diversity(hybrid)[:, 1:].mean(1),
            "energy": high_frequency_energy(hybrid)[..., 1:].mean((1, 2)),
            "energy_expert": high_frequency_energy(expert)[:, 1:].mean(1),
        }
        for name, pictures in centres.items():
            values[name] = centroid_error(video, colour_centroid(pictures, ARM), ARM)[:, 1:].nanmean(1)
        for name, value in values.items():
            rows.setdefault(name, []).extend(value.tolist())
        rows.setdefault("episode", []).extend(episodes)
    return rows


class Curve(Callback):
    """Keeps what is logged in training, and the gradient's cosine before the first and after the last step."""

    def __init__(self, probe: bool) -> None:
        self.probe, self.values, self.cosines = probe, [], []

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Share the encoded clips with the other rows."""
        module._latents = LATENTS

    def _cosine(self, trainer: Trainer, module: LightningModule) -> None:
        if self.probe:
            batch = next(iter(trainer.datamodule.train_dataloader()))
            self.cosines.append(module.gradient_cosine(batch))

    on_train_start = on_train_end = _cosine

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """Reward, or supervised loss, of the step."""
        seen = trainer.callback_metrics
        name = "train/reward" if "train/reward" in seen else "train/loss"
        self.values.append(float(seen[name]))


def passes_per_iteration(options: argparse.Namespace) -> float:
    """Passes of the U-Net over a clip for one optimiser step of the post-training, per context."""
    sampling = 1 + (options.steps - 1) * options.group
    return sampling / options.inner_epochs + 3 + 3 * (options.anchor > 0)


def plan(name: str, options: argparse.Namespace) -> tuple[int, float, int]:
    """Optimiser steps, learning rate and contexts of a row."""
    if name == "base":
        return 0, 0.0, options.contexts
    if name == "small":
        return options.iterations, 1e-3, 8
    if name == "post":
        return options.iterations, options.lr, options.contexts
    kind, lr = name.split("_")
    if kind == "more":
        return 500, float(lr), 32
    factor = passes_per_iteration(options) / 3 if kind == "compute" else 1.0
    return round(options.iterations * factor), float(lr), options.contexts


def experts(options: argparse.Namespace, **more: Any) -> ExpertVideos:
    """The data, ready."""
    data = ExpertVideos(
        frames=options.frames,
        stride=options.stride,
        episodes=options.episodes,
        test_episodes=options.test_episodes,
        data_dir=options.data,
        processes=options.processes,
        seed=0,
        **more,
    )
    data.prepare_data()
    data.setup()
    return data


def quiet_trainer(options: argparse.Namespace, steps: int, callbacks: list[Callback]) -> Trainer:
    """Trains for so many steps, validates and writes nothing."""
    return Trainer(
        max_steps=steps or -1,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        default_root_dir=options.data,
    )


def run_one(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and score one row."""
    seed_everything(seed, verbose=False)
    steps, lr, contexts = plan(name, options)
    data = experts(options, batch_size=contexts)

    def factor(step: int) -> float:
        """Up in a straight line, then down to 0."""
        return min((step + 1) / (options.warmup + 1), max(0, steps - step) / max(1, steps - options.warmup))

    shared = {"init_from": options.base, "steps": options.steps}
    shared |= {"sigma_min": options.sigma_min, "sigma_max": options.sigma_max}
    shared |= {"p_mean": 0.0, "p_std": 1.6, "seed": seed, "eval_group": options.eval_group, "rows": 128}
    shared |= {"optimizer": lambda p: torch.optim.Adam(p, lr=lr, eps=1e-12)}
    shared |= {"lr_scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, factor)}
    post = name.startswith("post") or name == "small"
    module: VideoDiffusion
    if post:
        settings: dict[str, Any] = {"scale": "none", "skip_frames": 1, "rescale": True, "micro_batch": 32}
        settings |= {"inner_epochs": options.inner_epochs, "anchor_weight": options.anchor}
        module = DynVPP(group=options.group, **settings, **shared)
    else:
        module = VideoDiffusion(**shared)
    curve, ema = Curve(post), EMA(options.ema)
    trainer = quiet_trainer(options, steps, [ema, curve])
    start = time.process_time()
    if steps:
        trainer.fit(module, data)
        module.load_state_dict(module.state_dict() | ema.average)
    else:
        module.configure_model()
        module._latents = LATENTS
    trained = time.process_time() - start
    if options.models and name == "post":
        module.save_pretrained(Path(options.models) / f"post-{seed}")
    contexts_scored = evaluate(module, data, options.stage, options.apart)
    return {"contexts": contexts_scored, "curve": curve.values, "cosines": curve.cosines, "training_cpu_s": trained}


def run_policy(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a policy as `configs/dyn_vpp/metaworld_policy.yaml` does, on one of the models, and evaluate it."""
    seed_everything(seed, verbose=False)
    if name == "policy_post" and not options.models:
        raise SystemExit("policy_post needs --models, the folder where `post` has left its models")
    policy = VideoPolicy(
        init_from=options.base if name == "policy_base" else str(Path(options.models) / f"post-{seed}"),
        horizon=12,
        action_steps=8,
        sigma_max=options.sigma_max,
        queries=4,
        width=64,
        former_layers=2,
        layers=2,
        heads=4,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.9, 0.9), weight_decay=0.05),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, options.policy_steps),
        seed=seed,
    )
    rollouts = Rollouts(options.policy_episodes, picture=0, latency_calls=0)
    trainer = quiet_trainer(options, options.policy_steps, [rollouts])
    data = experts(options, batch_size=32, every=2)
    start = time.process_time()
    trainer.fit(policy, data)
    trained = time.process_time() - start
    if options.stage == "val":
        trainer.limit_val_batches = 1.0
        (metrics,) = trainer.validate(policy, data, verbose=False)
    else:
        (metrics,) = trainer.test(policy, data, verbose=False)
    found = {name.split("/")[1]: value for name, value in metrics.items()}
    return {"policy": found, "training_cpu_s": trained}


def run(options: argparse.Namespace) -> None:
    """Run what is missing."""
    torch.set_num_threads(1)
    budget = {k: v for k, v in vars(options).items() if k in KEPT}
    for seed in options.seeds:
        for name in options.rows:
            path = folder(options) / f"{name}-{seed}.json"
            if path.exists() and json.loads(path.read_text())["budget"] == budget:
                continue
            # where things lie on this machine means nothing elsewhere
            command = " ".join(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)
            row = {"row": name, "seed": seed, "budget": budget, "command": command}
            row |= (run_policy if name.startswith("policy") else run_one)(name, seed, options)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps(row) + "\n")
            unfinished.rename(path)
            print(name, seed, {k: round(v, 4) for k, v in (row.get("policy") or means(row)).items()}, flush=True)
    table(options)


def folder(options: argparse.Namespace) -> Path:
    """Where the rows of a stage and a sampler lie."""
    return options.results / options.stage / f"sigma{options.sigma_max:g}to{options.sigma_min:g}_steps{options.steps}"


def means(row: dict[str, Any]) -> dict[str, float]:
    """Means over contexts, and the sharpness."""
    found = {k: float(np.nanmean(v)) for k, v in row["contexts"].items() if k not in ("episode", "energy_expert")}
    found["sharpness"] = found.pop("energy") / float(np.mean(row["contexts"]["energy_expert"]))
    return found


def lower_bound(differences: np.ndarray, episodes: np.ndarray, draws: int = 2000) -> float:
    """Lower end of the 95 % interval of the mean: bootstrap over episodes, whole ones."""
    numbers = np.unique(episodes)
    kept = ~np.isnan(differences)
    sums = np.array([differences[kept & (episodes == e)].sum() for e in numbers])
    counts = np.array([(kept & (episodes == e)).sum() for e in numbers])
    picked = np.random.default_rng(0).integers(len(numbers), size=(draws, len(numbers)))
    return float(np.quantile(sums[picked].sum(1) / counts[picked].sum(1), 0.025))


def table(options: argparse.Namespace) -> None:
    """Print the rows, the paired differences of `post`, the policies, and draw the curves."""
    rows = [json.loads(p.read_text()) for p in sorted(folder(options).glob("*.json"))]
    policies = [row for row in rows if "policy" in row]
    rows = [row for row in rows if "contexts" in row]
    names = ("reward", "reward_ode", "reward_copy", "l1", "cosine", "centroid_error", "centroid_decoded")
    names += ("sharpness", "diversity")
    print(f"\n| row | seed | {' | '.join(names)} | gradient cosine |\n|{'---|' * (len(names) + 3)}")
    for row in rows:
        found = means(row)
        cosines = " to ".join(f"{c:.2f}" for c in row["cosines"])
        print(f"| {row['row']} | {row['seed']} | {' | '.join(f'{found[n]:.4f}' for n in names)} | {cosines} |")
    print(
        "\nPost-training minus row: mean, and lower 95 % bound over episodes. Centre: how far the arm's centre is from"
    )
    print("where it is, and from where the decoded expert has it (pixels, upper bound). The last two are shares.\n")
    heads = ("reward", "bound", "ODE reward", "bound", "centre", "bound", "decoded centre", "bound")
    heads += ("sharpness", "diversity")
    print(f"| trained | row | seed | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 3)}")
    trained = [row for row in rows if row["row"].startswith("post") or row["row"] == "small"]
    for post in trained:
        others = {row["row"]: row for row in rows if row["seed"] == post["seed"] and not row["row"].startswith("post")}
        if "base" in others:
            others["copy"] = others["base"]
        ours, episodes = post["contexts"], np.array(post["contexts"]["episode"])
        for name, other in others.items():
            if other is post or (post["row"] == "small" and name != "base"):
                continue
            cells = []
            for key in ("reward", "reward_ode", "centroid_error", "centroid_decoded"):
                sign = -1 if key.startswith("centroid") else 1
                if name == "copy" and sign < 0:
                    cells += ["", ""]
                    continue
                theirs = other["contexts"]["reward_copy" if name == "copy" else key]
                gain = sign * (np.array(ours[key]) - np.array(theirs))
                cells += [f"{v:+.4f}" for v in (sign * np.nanmean(gain), sign * lower_bound(gain, episodes))]
            now, then = means(post), means(other)
            shares = [now[k] / then[k] for k in ("sharpness", "diversity")]
            cells += ["", ""] if name == "copy" else [f"{100 * v:.1f} %" for v in shares]
            print(f"| {post['row']} | {name} | {post['seed']} | {' | '.join(cells)} |")
    if policies:
        tasks = [k for k in policies[0]["policy"] if k.startswith("success_rate")]
        print(f"\n| policy on | seed | {' | '.join(tasks)} |\n|{'---|' * (len(tasks) + 2)}")
        for row in policies:
            cells = " | ".join(f"{row['policy'][k]:.3f}" for k in tasks)
            print(f"| {row['row'].removeprefix('policy_')} | {row['seed']} | {cells} |")
    figure = new_figure(7, 4)
    axis = figure.subplots()
    for row in trained:
        axis.plot(row["curve"], label=f"{row['row']}, seed {row['seed']}", linewidth=0.9)
    axis.set_xlabel("iteration")
    axis.set_ylabel("reward of the training groups")
    if trained:
        axis.legend(fontsize=7)
        figure.savefig(folder(options) / "curves.png")


def main() -> None:
    """Parse and go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    rows = ["base", "post", "steps_1e-4", "steps_3e-4", "compute_1e-4", "compute_3e-4", "small"]
    parser.add_argument("--rows", nargs="+", default=rows)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--stage", choices=("val", "test"), default="test")
    parser.add_argument("--base", default="metaworld", help="shipped weights, a folder or a checkpoint")
    parser.add_argument("--sigma-min", type=float, default=0.14)
    parser.add_argument("--sigma-max", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=2, help="of the sampler")
    parser.add_argument("--contexts", type=int, default=64, help="of a batch")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=100, help="optimiser steps of the post-training")
    parser.add_argument("--inner-epochs", type=int, default=1, help="optimiser steps of a rollout")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=5, help="steps in which the learning rate rises")
    parser.add_argument("--anchor", type=float, default=1e-3, help="weight of the supervised loss in the post-training")
    parser.add_argument("--ema", type=float, default=0.9)
    parser.add_argument("--episodes", type=int, default=150, help="training episodes of each task, the base's")
    parser.add_argument("--test-episodes", type=int, default=15, help="held-out episodes of each task")
    parser.add_argument("--apart", type=int, default=3, help="every how many clips of an episode is a context")
    parser.add_argument("--frames", type=int, default=4, help="of a clip, the base's")
    parser.add_argument("--stride", type=int, default=8, help="recorded frames between two of a clip, the base's")
    parser.add_argument("--eval-group", type=int, default=4, help="samples of a context")
    parser.add_argument("--models", help="folder for the models of `post`, which `policy_post` reads")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--policy-steps", type=int, default=1000)
    parser.add_argument("--policy-episodes", type=int, default=50, help="of each task in the simulator")
    parser.add_argument("--data", default="data", help="where episodes are kept")
    parser.add_argument("--processes", type=int, help="that make episodes; all cores by default")
    options = parser.parse_args()
    {"run": run, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
