"""FedHPro against seven baselines and its controls, on image sets of yours.

    python benchmarks/fedhpro_comparison.py run --setting digit_domains --sources mnist.npz usps.npz digits
    python benchmarks/fedhpro_comparison.py run --setting office --sources office/amazon office/dslr office/webcam ...
    python benchmarks/fedhpro_comparison.py run --setting cifar10_dirichlet05 --sources cifar10
    python benchmarks/fedhpro_comparison.py table

A source is whatever `FederatedImages` takes. For every row the learning rate of the clients is chosen from `--lrs` by
the accuracy on validation images (mean of the last five rounds and of `--tuning_seeds`); while the best is at an end
of those tried, the next one beyond (by a factor of two) is tried as well. `--tuned_on` takes over what was chosen in
another setting. Then `--seeds` are run with it. The budget (rounds, epochs, batch, network) is one for all. The figure
of merit is the test accuracy, mean of the last five rounds; with several domains the mean over domains. Each run is one
JSON file below `benchmarks/results/fedhpro/<setting>`, written the moment it exists; runs that exist are passed over,
so the script can be stopped and started again; one that was made with other options of the data is an error.
`--jobs 2` runs two rows at a time.
"""

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from datamodules import FederatedImages
from lightning_modules import FedHPro

RESULTS = Path(__file__).parent / "results" / "fedhpro"
LAST = 5  # rounds that count
ANCHORS = {"tau": 0.2, "margin_normalize": True}
WEAKER = {"contrastive_weight": 0.3, "alignment_weight": 0.3}
ROWS: dict[str, dict[str, Any]] = {  # name: arguments; the strategy is named before "_", or in STRATEGY
    "FedAvg": {},
    "FedProx": {"mu": 0.01},
    "Moon": {"mu": 1.0},
    "FedProto": {},
    "FPL": {},
    "FedTGP": {},
    "CReFF": {},
    "HyperPrototypes": ANCHORS,
    "FrozenHyperPrototypes": ANCHORS,
    "AveragedPrototypes": ANCHORS,
    "ZeroPrototype": {},
    "NoMargin": ANCHORS,
    "ContrastiveOnly": ANCHORS,
    "AlignmentOnly": ANCHORS,
    "HeadRetraining": ANCHORS,
    "PaperAnchors": {"tau": 0.05, "margin_normalize": False},
    # other values of what the baselines' authors tune, beside those above
    "FedProx_mu0.001": {"mu": 0.001},
    "FedProx_mu0.1": {"mu": 0.1},
    "Moon_mu0.1": {"mu": 0.1},
    "Moon_mu5": {"mu": 5.0},
    "FedProto_weight0.1": {"weight": 0.1},
    "FedProto_weight10": {"weight": 10.0},
    "FPL_tau0.1": {"tau": 0.1},
    "FPL_tau0.5": {"tau": 0.5},
    "FedTGP_weight0.1": {"weight": 0.1},
    "FedTGP_weight1": {"weight": 1.0},
    "HyperPrototypes_tau0.5": ANCHORS | {"tau": 0.5},
    "HyperPrototypes_weight0.3": ANCHORS | WEAKER,
    "FrozenHyperPrototypes_weight0.3": ANCHORS | WEAKER,
    # other ways to match, which move the hyper-prototypes further
    "Matching_lr1": ANCHORS | {"lr": 1.0},
    "Matching_lr10": ANCHORS | {"lr": 10.0},
    "Matching_adam": ANCHORS | {"optimizer": "adam", "lr": 0.01},
    "Matching_mse": ANCHORS | {"distance": "mse", "lr": 10.0},
    "Matching_new_head": ANCHORS | {"matching_head": "new", "lr": 1.0},
}
STRATEGY = {"PaperAnchors": "HyperPrototypes", "Matching": "HyperPrototypes"}
MATCHING = ("hyper_prototype_move", "matching_loss_before", "matching_loss_after")
DOMAINS = {"partition": "domain", "val_fraction": 0.2}
CIFAR = {"train_size": 5000, "test_size": 2000, "clients": 10, "val_fraction": 0.2}
SETTINGS: dict[str, dict[str, Any]] = {
    "digit_domains": DOMAINS  # pixels in [0, 1]; the other settings have them in [-1, 1]
    | {"image_size": 16, "channels": 1, "mean": [0.0], "std": [1.0]}
    | {"clients": 9, "images_per_client": 60, "train_size": 1200, "test_size": 350},
    "office": DOMAINS | {"image_size": 32, "channels": 3, "clients": 8, "images_per_client": 80},
    "cifar10_dirichlet05": CIFAR | {"partition": "dirichlet", "alpha": 0.5},
    "cifar10_dirichlet005": CIFAR | {"partition": "dirichlet", "alpha": 0.05},
    "cifar10_longtail100": CIFAR | {"partition": "dirichlet_balanced", "alpha": 0.5, "long_tail": 100},
}
BARS = {"digit_domains": 1.5, "office": 4.0}  # points of FedHPro above FedAvg, with every seed above it
BAR = -1.0  # the same of the other settings, without a condition on seeds


class Curve(Callback):
    """Validation accuracy and matching of every round, test accuracy of the last five."""

    def __init__(self) -> None:
        self.val: list[float] = []
        self.test: list[dict[str, float]] = []
        self.matching: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: FedHPro) -> None:
        """Read what the module has just logged; test in the last rounds."""
        if trainer.sanity_checking:
            return
        logged = {k.removeprefix("val/"): float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        matching = {name: float(trainer.callback_metrics.get(f"train/{name}", math.nan)) for name in MATCHING}
        if not any(math.isnan(value) for value in matching.values()):
            self.matching.append(matching)
        self.val.append(logged.get("accuracy_domain_mean", logged["accuracy"]))
        if trainer.current_epoch >= trainer.max_epochs - LAST:
            self.test.append(test(pl_module, trainer.datamodule))


@torch.no_grad()
def test(model: FedHPro, data: FederatedImages) -> dict[str, float]:
    """Test accuracy of each domain."""
    right, count = torch.zeros(len(data.domains)), torch.zeros(len(data.domains))
    for batch in data.test_dataloader():
        right.index_add_(0, batch.domain, (model(batch.image).argmax(1) == batch.label).float())
        count += torch.bincount(batch.domain, minlength=len(count))
    return dict(zip(data.domains, (right / count).tolist(), strict=True))


def one_run(options: argparse.Namespace, row: str, lr: float, seed: int) -> dict[str, Any]:
    """Train one row; the JSON of the run."""
    start = time.process_time()
    seed_everything(seed, verbose=False)
    setting = data_options(options)
    data = FederatedImages(sources=options.sources, data_dir=options.data_dir, seed=seed, **setting)
    model = FedHPro(
        STRATEGY.get(row.split("_")[0], row.split("_")[0]),
        ROWS[row],
        network="SmallCNN",
        network_args={"in_channels": 3 if options.setting.startswith(("office", "cifar")) else 1},
        local_epochs=options.epochs,
        local_batch_size=options.batch_size,
        local_optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
        seed=seed,
    )
    curve = Curve()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(max_epochs=options.rounds, callbacks=[curve], num_sanity_val_steps=0, **quiet)
    result: dict[str, Any] = {"row": row, "setting": options.setting, "data": setting, "seed": seed, "lr": lr}
    try:
        trainer.fit(model, data)
    except ValueError as error:  # a learning rate at which a client diverges is a result, too
        result["diverged"] = str(error)
    if curve.matching:  # means over rounds
        result["matching"] = {name: statistics.mean(each[name] for each in curve.matching) for name in MATCHING}
    result |= {"val": curve.val, "test": curve.test, "cpu_seconds": time.process_time() - start}
    budget = ("rounds", "epochs", "batch_size", "lrs", "tuned_on", "sources")
    result["budget"] = {k: getattr(options, k) for k in budget}
    # files by their names: where they lie on this machine means nothing elsewhere
    result["budget"]["sources"] = [Path(source).name for source in options.sources]
    command = " ".join(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)
    return result | {"command": command}


def data_options(options: argparse.Namespace) -> dict[str, Any]:
    """The setting's arguments of `FederatedImages`."""
    return SETTINGS[options.setting] | ({"clients": options.clients} if options.clients else {})


def stored(path: Path, make: Any, setting: dict[str, Any]) -> dict[str, Any]:
    """The JSON at `path`, made first if it is not there.

    Raises:
        ValueError: it was made with other options of the data than `setting`. Those of old files are not known.
    """
    if not path.exists():
        result = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result) + "\n")
        part.rename(path)
        scores = f"val {val_score(result):.4f} test {test_score(result):.4f}"
        print(f"{path.stem:40} {scores} {result['cpu_seconds']:.0f} CPU s", flush=True)
    result = json.loads(path.read_text())
    if result.get("data", setting) != setting:
        raise ValueError(
            f"{path} was made with {result['data']}, the setting is now {setting}: move it away, or give another --name"
        )
    return result


def val_score(result: dict[str, Any]) -> float:
    """Validation accuracy, mean of the last five rounds; 0 if a client diverged."""
    return 0.0 if "diverged" in result else statistics.mean(result["val"][-LAST:])


def test_score(result: dict[str, Any]) -> float:
    """Test accuracy, mean over domains and the last five rounds; 0 if a client diverged."""
    return 0.0 if "diverged" in result else statistics.mean(statistics.mean(each.values()) for each in result["test"])


def run_row(options: argparse.Namespace, row: str) -> None:
    """Choose the learning rate of a row, then run the seeds."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    folder, setting = RESULTS / (options.name or options.setting), data_options(options)
    tried: dict[float, float] = {}
    ahead = list(options.lrs)
    if options.tuned_on:
        tried, ahead = tuning(RESULTS / options.tuned_on, row), []
        best = max(tried, key=tried.__getitem__)
    while ahead:
        for lr in ahead:
            runs = []
            for seed in options.tuning_seeds:
                path = folder / f"{row}-lr{lr:g}-tuning{'' if seed == 100 else seed}.json"
                runs.append(stored(path, lambda lr=lr, seed=seed: one_run(options, row, lr, seed), setting))
            tried[lr] = statistics.mean(map(val_score, runs))
        best = max(tried, key=tried.__getitem__)
        ahead = [best / 2] * (best == min(tried)) + [best * 2] * (best == max(tried))
    for seed in options.seeds:
        path = folder / f"{row}-seed{seed}.json"
        if path.exists() and json.loads(path.read_text())["lr"] != best:
            path.unlink()  # from before the rates were chosen anew
        stored(path, lambda seed=seed: one_run(options, row, best, seed), setting)


def tuning(folder: Path, row: str) -> dict[float, float]:
    """Validation accuracy of each learning rate that was tried for a row, mean of the tuning seeds."""
    found: dict[float, list[float]] = {}
    for path in folder.glob(f"{row}-lr*-tuning*.json"):
        result = json.loads(path.read_text())
        found.setdefault(result["lr"], []).append(val_score(result))
    most = max(map(len, found.values()), default=0)  # a rate that one seed alone has tried was out of the question
    return {lr: statistics.mean(scores) for lr, scores in found.items() if len(scores) == most}


def run(options: argparse.Namespace) -> None:
    """Every row, some at a time."""
    with get_context("fork").Pool(options.jobs) as pool:  # what is imported here need not be imported again
        pool.starmap(run_row, [(options, row) for row in options.rows], chunksize=1)


def table(options: argparse.Namespace) -> None:
    """Print a table and draw a figure of every setting that has results; say which bars hold."""
    from callbacks.figures import new_figure

    for folder in sorted(p for p in RESULTS.iterdir() if p.is_dir()):
        runs: dict[str, dict[int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*-seed*.json")):
            result = json.loads(path.read_text())
            runs.setdefault(result["row"], {})[result["seed"]] = result
        head = ("strategy", "lr", "validation, %", "test accuracy, %", "minus FedAvg, by seed", "minus frozen, by seed")
        print(f"\n{folder.name}\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
        figure = new_figure(7, 4.5)
        axes = figure.add_subplot()
        for number, row in enumerate(r for r in ROWS if r in runs):
            scores = {seed: 100 * test_score(result) for seed, result in runs[row].items()}
            spread = statistics.stdev(scores.values()) if len(scores) > 1 else float("nan")
            gaps = [_gaps(runs, row, other) for other in ("FedAvg", "FrozenHyperPrototypes")]
            shown = [f"{statistics.mean(g):+.1f}: {' '.join(f'{x:+.1f}' for x in g)}" if g else "" for g in gaps]
            lr = next(iter(runs[row].values()))["lr"]
            mean = statistics.mean(scores.values())
            tried = tuning(folder, row)
            val = f"{100 * tried[lr]:.1f}" if lr in tried else ""
            print(f"| {row} | {lr:g} | {val} | {mean:.1f} ± {spread:.1f} | {shown[0]} | {shown[1]} |")
            curves = [result["val"] for result in runs[row].values() if "diverged" not in result]
            if curves and "_" not in row:
                rounds = range(1, len(curves[0]) + 1)
                mean_curve = [100 * statistics.mean(v) for v in zip(*curves, strict=True)]
                axes.plot(rounds, mean_curve, "-" if number < 10 else "--", label=row)  # there are ten colours
        if gap := _gaps(runs, "HyperPrototypes", "FedAvg"):
            setting = next(iter(runs["FedAvg"].values()))["setting"]
            bar, strict = BARS.get(setting, BAR), setting in BARS
            held = statistics.mean(gap) >= bar and (min(gap) > 0 or not strict)
            print(f"bar: FedHPro {bar:+.1f} or more to FedAvg{', every seed positive' if strict else ''}: ", end="")
            print(f"{'held' if held else 'not held'} ({statistics.mean(gap):+.2f})")
        axes.set(xlabel="round", ylabel="validation accuracy, %", title=folder.name)
        axes.legend(fontsize=6)
        figure.savefig(folder / "rounds.png")


def _gaps(runs: dict[str, dict[int, dict[str, Any]]], row: str, other: str) -> list[float]:
    """Points of test accuracy between two rows, seed by seed."""
    if row == other or row not in runs:
        return []
    seeds = [seed for seed in runs[row] if seed in runs.get(other, {})]
    return [100 * (test_score(runs[row][seed]) - test_score(runs[other][seed])) for seed in seeds]


def main() -> None:
    """`run` or `table`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--setting", choices=SETTINGS, required=True)
    running.add_argument("--sources", nargs="+", required=True)
    running.add_argument("--name", help="folder of the results, if not the setting's")
    running.add_argument("--data_dir", default="data")
    first = [row for row in ROWS if "_" not in row]
    running.add_argument("--rows", nargs="+", choices=ROWS, default=first)
    running.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    running.add_argument("--tuning_seeds", nargs="+", type=int, default=[100])
    running.add_argument("--lrs", nargs="+", type=float, default=[0.1, 0.2])
    running.add_argument("--tuned_on", help="folder of a setting whose chosen learning rates are taken over")
    running.add_argument("--rounds", type=int, default=25)
    running.add_argument("--epochs", type=int, default=2)
    running.add_argument("--batch_size", type=int, default=16)
    running.add_argument("--clients", type=int, help="instead of the setting's")
    running.add_argument("--jobs", type=int, default=1, help="rows at a time, one core each")
    commands.add_parser("table")
    options = parser.parse_args()
    {"run": run, "table": table}[options.command](options)


if __name__ == "__main__":
    main()
