"""The closed loop on real images: against training-free conversions, and term by term.

    python benchmarks/ann_snn_comparison.py run --data cifar10 --weights SOURCE.ckpt [--rows closed] [--seeds 0]
    python benchmarks/ann_snn_comparison.py table

Each row and seed is one JSON file below `benchmarks/results/ann_snn/<name>`, written the moment it exists; rows that
exist are passed over, so the script can be stopped and started again, and two of them can share the work by seeds.
`--data` takes whatever `ImageClassification` takes as its source; SOURCE.ckpt comes from `ann_snn/cifar10_source`.
Nothing is selected on test images: every row takes the same steps at a fixed setting, and its last weights count.
"""

import argparse
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything

from callbacks.figures import new_figure
from datamodules import ImageClassification
from lightning_modules import AnnSnn
from lightning_modules.ann_snn.conversion import convert, simulate

RESULTS = Path(__file__).parent / "results" / "ann_snn"
PICTURES = Path(__file__).parents[1] / "docs" / "images"
TIME_STEPS = [1, 2, 4, 8, 16, 32, 64]
IMAGES = {8: None, 32: 5000, 64: 2000}  # up to T = 8 on all test images, up to 32 and 64 on the first batches of them
LAYER = {"conversion": "layer", "percentile": 99.9}  # the paper's start
CHANNEL = {"conversion": "channel", "half_threshold": True}  # the strong start; percentiles chosen on validation images
DISTIL = {"alpha": 1.0, "beta": 0.9, "train_threshold": True, "train_v0": True}  # no cross-entropy: the same
OPEN_LOOP = {
    "open_layer": {"mode": "layer", "percentile": 99.9},
    "open_channel_max": {"mode": "channel", "percentile": 100.0, "half_threshold": True},
    "open_channel_999": {"mode": "channel", "percentile": 99.9, "half_threshold": True},
    "open_channel_99": {"mode": "channel", "percentile": 99.0, "half_threshold": True},
}
ROWS: dict[str, dict[str, Any]] = {
    "closed_t8": {**CHANNEL, "percentile": 99.0, "time_steps": 8, **DISTIL},
    "closed_t32": {**CHANNEL, "percentile": 99.9, "time_steps": 32, **DISTIL},
    "closed_mixed": {**CHANNEL, "percentile": 99.9, "time_steps": [8, 32], **DISTIL},
    # the paper's start and objective, and its terms one by one, at T = 8
    "layer_closed_t8": {**LAYER, "time_steps": 8},
    "layer_ce_only_t8": {**LAYER, "time_steps": 8, "alpha": 0.0},
    "layer_ce_kl_t8": {**LAYER, "time_steps": 8, "beta": 1.0},
    "layer_kl_only_t8": {**LAYER, "time_steps": 8, "alpha": 1.0, "beta": 1.0},
    "layer_ce_cka_t8": {**LAYER, "time_steps": 8, "beta": 0.0},
    "layer_cka_only_t8": {**LAYER, "time_steps": 8, "alpha": 1.0, "beta": 0.0},
    "layer_uniform_t8": {**LAYER, "time_steps": 8, "weighting": "uniform"},
    "layer_dynamic_t8": {**LAYER, "time_steps": 8, "weighting": "dynamic"},
}
TERMS = [name for name in ROWS if name.startswith("layer_") and name != "layer_closed_t8"]  # tested up to T = 8
WHAT = {
    "open_layer": "open loop, per layer, 99.9 %",
    "open_channel_max": "open loop, per channel, maximum, half threshold",
    "open_channel_999": "open loop, per channel, 99.9 %, half threshold",
    "open_channel_99": "open loop, per channel, 99 %, half threshold",
    "closed_t8": "closed loop, per-channel start (99 %), T = 8",
    "closed_t32": "closed loop, per-channel start (99.9 %), T = 32",
    "closed_mixed": "closed loop, per-channel start (99.9 %), T drawn from 8, 32",
    "layer_closed_t8": "closed loop, per-layer start, T = 8, the paper's objective",
    "layer_ce_only_t8": "... CE only (alpha 0)",
    "layer_ce_kl_t8": "... CE + KL (beta 1)",
    "layer_kl_only_t8": "... KL only (alpha 1, beta 1)",
    "layer_ce_cka_t8": "... CE + CKA (beta 0)",
    "layer_cka_only_t8": "... CKA only (alpha 1, beta 0)",
    "layer_uniform_t8": "... uniform instead of adaptive weights",
    "layer_dynamic_t8": "... dynamic weights",
}


def make_data(options: argparse.Namespace, seed: int) -> ImageClassification:
    data = ImageClassification(
        source=options.data,
        batch_size=options.batch_size,
        train_size=options.train_images,
        augment=["crop", "flip"],
        mean=options.mean,
        std=options.std,
        seed=seed,
        val_fraction=0.1,
    )
    data.prepare_data()
    data.setup()
    return data


@torch.no_grad()
def evaluate(
    network: Any, data: ImageClassification, split: str, images: int | None, largest: int = 64
) -> dict[str, Any]:
    """Which images are right at each T up to the largest, for a spiking network or (at T = 0) the source."""
    loader = data.val_dataloader() if split == "val" else data.test_dataloader()
    right: dict[int, list[np.ndarray]] = {}
    seen = 0
    for batch in loader:
        if images is not None and seen >= images:
            break
        if hasattr(network, "neurons"):
            most = max(t for t, n in IMAGES.items() if t <= largest and (n is None or seen < n))
            prefix = simulate(network, batch.image, most, chunk=8).prefix_logits
            logits = {t: prefix[t - 1] for t in TIME_STEPS if t <= most}
        else:
            logits = {0: network(batch.image)}
        for t, values in logits.items():
            right.setdefault(t, []).append((values.argmax(1) == batch.label).numpy())
        seen += len(batch.label)
    rows = {t: np.concatenate(v)[:images] for t, v in right.items()}
    return {
        "images": {str(t): len(v) for t, v in rows.items()},
        "accuracy": {str(t): float(v.mean()) for t, v in rows.items()},
        "right": {str(t): np.packbits(v).tobytes().hex() for t, v in rows.items() if t in (0, 4, 8, 32)},
    }


def save(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(row) + "\n")
    part.rename(path)
    print(
        path.stem,
        {k: round(v, 4) for k, v in row["test"]["accuracy"].items()},
        f"{row['cpu_seconds']:.0f} CPU s",
        flush=True,
    )


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder = RESULTS / options.name
    budget = {k: getattr(options, k) for k in ("train_images", "epochs", "batch_size", "lr", "test_images")}
    # files by their names: where they lie on this machine means nothing elsewhere
    command = " ".join(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)
    common = {"command": command, "budget": budget}
    source = {"network": options.network, "network_args": {"depth": options.depth}, "weights": options.weights}
    data = make_data(options, 0)
    for name, settings in [("ann", None), *OPEN_LOOP.items()]:
        path = folder / f"{name}.json"
        if path.exists() or 0 not in options.seeds:
            continue
        start = time.process_time()
        network: Any = AnnSnn(**source).build_source()
        if settings is not None:
            network = convert(network, [b.image for b in data.calibration_dataloader()], **settings)
        test = evaluate(network, data, options.split, options.test_images)
        save(path, common | {"row": name, "test": test, "cpu_seconds": time.process_time() - start})
    for seed in options.seeds:
        for name in options.rows:
            path = folder / f"{name}-seed{seed}.json"
            if path.exists():
                continue
            start = time.process_time()
            seed_everything(seed, verbose=False)
            data = make_data(options, seed)
            optimizer = lambda parameters: torch.optim.Adam(parameters, lr=options.lr)  # noqa: E731
            steps = options.epochs * (options.train_images // options.batch_size)
            scheduler = lambda o, n=steps: torch.optim.lr_scheduler.CosineAnnealingLR(o, n)  # noqa: E731
            settings = ROWS[name] | json.loads(options.override)
            largest = 8 if name in TERMS else 64
            module = AnnSnn(**source, **settings, optimizer=optimizer, lr_scheduler=scheduler)
            trainer = Trainer(
                max_epochs=options.epochs,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                limit_val_batches=0,
            )
            trainer.fit(module, datamodule=data)
            trained = time.process_time() - start
            test = evaluate(module.student, data, options.split, options.test_images, largest)
            row = {"row": name, "seed": seed, "settings": settings, "training_cpu_seconds": trained, "test": test}
            save(path, common | row | {"cpu_seconds": time.process_time() - start})


# -------------------------------------------------------------------------------------------------- table


def bits(row: dict[str, Any], t: int) -> np.ndarray:
    packed = np.frombuffer(bytes.fromhex(row["test"]["right"][str(t)]), np.uint8)
    return np.unpackbits(packed)[: row["test"]["images"][str(t)]].astype(float)


def interval(difference: np.ndarray) -> str:
    """Mean of paired differences in points, and the half width of its 95 % interval over images."""
    return f"{100 * difference.mean():+.2f} ± {196 * difference.std(ddof=1) / math.sqrt(len(difference)):.2f}"


def table(options: argparse.Namespace) -> None:
    """Mean and standard deviation over seeds; paired differences with their 95 % intervals over images."""
    folder = RESULTS / options.name
    rows: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("*.json")):
        rows.setdefault(path.stem.split("-seed")[0], []).append(json.loads(path.read_text()))
    ann = bits(rows["ann"][0], 0)
    opened = [name for name in OPEN_LOOP if name in rows]
    n = {t: rows[opened[0]][0]["test"]["images"][str(t)] for t in IMAGES}
    print("ANN " + ", ".join(f"{100 * ann[:k].mean():.2f} % on the {k} test images of T <= {t}" for t, k in n.items()))
    best = {t: max(opened, key=lambda name, t=t: rows[name][0]["test"]["accuracy"][str(t)]) for t in (8, 32)}
    print(f"Strongest open loop at T = 8: {best[8]}, at T = 32: {best[32]}\n")
    print("| network | seeds | " + " | ".join(f"T = {t}" for t in TIME_STEPS), end=" | ")
    print("T = 8: to the strongest open loop | T = 32: to it | T = 32: % of the ANN |")
    print("|---|---|" + "---|" * (len(TIME_STEPS) + 3))
    for name, what in WHAT.items():
        if name not in rows:
            continue
        cells = []
        for t in TIME_STEPS:
            values = [100 * r["test"]["accuracy"][str(t)] for r in rows[name] if str(t) in r["test"]["accuracy"]]
            spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.1f}{spread}" if values else "")
        for t in (8, 32):
            if str(t) not in rows[name][0]["test"]["right"]:
                cells += ["", ""]
                continue
            mean = np.mean([bits(r, t) for r in rows[name]], 0)
            cells.append(interval(mean - bits(rows[best[t]][0], t)))
            if t == 32:
                cells.append(f"{100 * mean.mean() / ann[: len(mean)].mean():.2f}")
        print(f"| {what} | {len(rows[name])} | " + " | ".join(cells) + " |")
    draw(rows, PICTURES / f"ann_snn_{options.name}.png")


def draw(rows: dict[str, list[dict]], path: Path) -> None:
    """Accuracy against T: open loops dashed, closed loops with their range over seeds."""
    figure = new_figure(7.0, 6.0)
    axes = figure.subplots()
    axes.axhline(100 * rows["ann"][0]["test"]["accuracy"]["0"], color="black", label="ANN")
    for name in [*OPEN_LOOP, *(n for n in ROWS if n not in TERMS)]:
        if name not in rows:
            continue
        y = 100 * np.array([[r["test"]["accuracy"][str(t)] for t in TIME_STEPS] for r in rows[name]])  # seeds T
        (line,) = axes.plot(TIME_STEPS, y.mean(0), "o--" if name in OPEN_LOOP else "o-", label=WHAT[name])
        axes.fill_between(TIME_STEPS, y.min(0), y.max(0), color=line.get_color(), alpha=0.3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TIME_STEPS, [str(t) for t in TIME_STEPS])
    axes.set_xlabel("time steps T of the test")
    axes.set_ylabel("accuracy on test images in %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=1, fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--name", default="cifar10", help="folder of the results")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--weights", help="of the source network")
    parser.add_argument("--network", default="lightning_modules.ann_snn.networks.CifarResNet")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--mean", type=float, nargs="+")
    parser.add_argument("--std", type=float, nargs="+")
    parser.add_argument("--train-images", type=int, default=10000)
    parser.add_argument("--test-images", type=int)
    parser.add_argument("--split", choices=["val", "test"], default="test", help="val to choose a setting")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--override", default="{}", help="JSON of module options, to choose a setting on --split val")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    {"run": run, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
