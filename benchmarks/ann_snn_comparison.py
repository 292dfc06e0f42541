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

from datamodules import ImageClassification
from lightning_modules import AnnSnn
from lightning_modules.ann_snn.conversion import convert, simulate

RESULTS = Path(__file__).parent / "results" / "ann_snn"
TIME_STEPS = [1, 2, 4, 8, 16, 32]  # on all images, and
LONG, LONG_IMAGES = 64, 2000  # on the first of them
LAYER = {"conversion": "layer", "percentile": 99.9}
CHANNEL = {"conversion": "channel", "percentile": 99.0, "half_threshold": True}
OPEN_LOOP = {  # percentile 99 was the best of 99, 99.9 and 100 on validation images
    "open_layer": {"mode": "layer", "percentile": 99.9},
    "open_channel_max": {"mode": "channel", "percentile": 100.0, "half_threshold": True},
    "open_channel": {"mode": "channel", "percentile": 99.0, "half_threshold": True},
}
ROWS: dict[str, dict[str, Any]] = {
    # the whole method, from both starts, at one T and with T drawn for each batch
    "closed": {**CHANNEL, "time_steps": [4, 8, 16]},
    "closed_t8": {**CHANNEL, "time_steps": 8},
    "layer_closed_t8": {**LAYER, "time_steps": 8},
    # its terms, from the paper's start at T = 8
    "layer_ce_only_t8": {**LAYER, "time_steps": 8, "alpha": 0.0},
    "layer_ce_kl_t8": {**LAYER, "time_steps": 8, "beta": 1.0},
    "layer_kl_only_t8": {**LAYER, "time_steps": 8, "alpha": 1.0, "beta": 1.0},
    "layer_ce_cka_t8": {**LAYER, "time_steps": 8, "beta": 0.0},
    "layer_cka_only_t8": {**LAYER, "time_steps": 8, "alpha": 1.0, "beta": 0.0},
    "layer_uniform_t8": {**LAYER, "time_steps": 8, "weighting": "uniform"},
    "layer_dynamic_t8": {**LAYER, "time_steps": 8, "weighting": "dynamic"},
}
WHAT = {
    "open_layer": "open loop, per layer, 99.9 %",
    "open_channel_max": "open loop, per channel, maximum, half threshold",
    "open_channel": "open loop, per channel, 99 %, half threshold (the strongest)",
    "closed": "closed loop, per-channel start, T drawn from 4, 8, 16",
    "closed_t8": "closed loop, per-channel start, T = 8",
    "layer_closed_t8": "closed loop, per-layer start, T = 8 (adaptive weights)",
    "layer_ce_only_t8": "... CE only (alpha 0)",
    "layer_ce_kl_t8": "... CE + KL (beta 1)",
    "layer_kl_only_t8": "... KL only (alpha 1, beta 1)",
    "layer_ce_cka_t8": "... CE + CKA (beta 0)",
    "layer_cka_only_t8": "... CKA only (alpha 1, beta 0)",
    "layer_uniform_t8": "... uniform weights",
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
def evaluate(network: Any, data: ImageClassification, split: str, images: int | None) -> dict[str, Any]:
    """Which images are right at each T, for a spiking network or (at T = 0) the source."""
    loader = data.val_dataloader() if split == "val" else data.test_dataloader()
    right: dict[int, list[np.ndarray]] = {}
    seen = 0
    for batch in loader:
        if images is not None and seen >= images:
            break
        seen += len(batch.label)
        if hasattr(network, "neurons"):
            steps = [*TIME_STEPS, LONG] if seen - len(batch.label) < LONG_IMAGES else TIME_STEPS
            prefix = simulate(network, batch.image, steps[-1], chunk=8).prefix_logits
            logits = {t: prefix[t - 1] for t in steps}
        else:
            logits = {0: network(batch.image)}
        for t, values in logits.items():
            right.setdefault(t, []).append((values.argmax(1) == batch.label).numpy())
    rows = {t: np.concatenate(v)[: LONG_IMAGES if t == LONG else None][:images] for t, v in right.items()}
    return {
        "images": max(map(len, rows.values())),
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
            test = evaluate(module.student, data, options.split, options.test_images)
            row = {"row": name, "seed": seed, "settings": settings, "training_cpu_seconds": trained, "test": test}
            save(path, common | row | {"cpu_seconds": time.process_time() - start})


# -------------------------------------------------------------------------------------------------- table


def bits(row: dict[str, Any], t: int) -> np.ndarray:
    packed = np.frombuffer(bytes.fromhex(row["test"]["right"][str(t)]), np.uint8)
    return np.unpackbits(packed)[: row["test"]["images"]].astype(float)


def table(options: argparse.Namespace) -> None:
    """Mean and standard deviation over seeds; paired differences of T = 8 with their 95 % intervals over images."""
    folder = RESULTS / options.name
    rows: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("*.json")):
        rows.setdefault(path.stem.split("-seed")[0], []).append(json.loads(path.read_text()))
    ann = rows["ann"][0]["test"]["accuracy"]["0"]
    n = rows["ann"][0]["test"]["images"]
    print(f"ANN {100 * ann:.2f} % on {n} test images; T = {LONG} on the first {min(LONG_IMAGES, n)}\n")
    print(
        "| network | seeds | "
        + " | ".join(f"T = {t}" for t in TIME_STEPS)
        + " | T = 8 against the strongest open loop |"
    )
    print("|---|---|" + "---|" * (len(TIME_STEPS) + 2))
    for name, what in WHAT.items():
        if name not in rows:
            continue
        cells = []
        for t in [*TIME_STEPS, LONG]:
            values = [100 * r["test"]["accuracy"][str(t)] for r in rows[name]]
            spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.2f}{spread}")
        difference = np.mean([bits(r, 8) for r in rows[name]], 0) - bits(rows["open_channel"][0], 8)[:n]
        half = 1.96 * difference.std(ddof=1) / math.sqrt(len(difference))
        cells.append(f"{100 * difference.mean():+.2f} ± {100 * half:.2f}")
        print(f"| {what} | {len(rows[name])} | " + " | ".join(cells) + " |")


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
    parser.add_argument("--train-images", type=int, default=5000)
    parser.add_argument("--test-images", type=int)
    parser.add_argument("--split", choices=["val", "test"], default="test", help="val to choose a setting")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--override", default="{}", help="JSON of module options, to choose a setting on --split val")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    {"run": run, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
