"""MAMoE against VanillaMoE and NoShared on real spoken digits, at equal parameters and steps.

    python benchmarks/most_comparison.py run [--source data/spoken_digits/manifest.jsonl] [--seeds 0 1 2] [--epochs 6]
    python benchmarks/most_comparison.py table [--epochs 6]

Every row (variant and seed) is a JSON file in benchmarks/results/most/epochs_N/ as soon as it is measured; rows that
exist are skipped, so a stopped run goes on where it was. The setting is configs/most/spoken_digits_real.yaml; its data
are the Free Spoken Digit Dataset as a manifest (`audio`, `text`, `speaker`, `split`) and voices made on the spot.
`table` writes the table (Markdown) and the figure of the card.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = Path(__file__).parent / "results" / "most"
CONFIG = "most/spoken_digits_real"
MODEL = "--model.init_args"
# NoShared: the width of the shared expert (128) is spread over the 8 routed experts, so that parameters stay equal
VARIANTS: dict[str, list[str]] = {
    "mamoe": [],
    "vanilla": [f"{MODEL}.partition", "null"],
    "no_shared": [f"{MODEL}.shared_expert", "false", f"{MODEL}.language_model.moe_intermediate_size", "80"],
}
SHOWN = (
    *("wer", "cer", "wer_unseen_speakers", "text_loss"),
    *("unit_error", "unit_likelihood_accuracy", "tts_stopped", "tts_wer_own_judge"),
)


def measure(variant: str, seed: int, source: str, epochs: int, data_dir: Path) -> dict:
    """Train and test one row in this process."""
    import cli

    runs = data_dir / "most_comparison" / f"{variant}_{seed}"
    options = ["--data.init_args.source", source, "--data.init_args.data_dir", str(data_dir)]
    options += ["--data.init_args.seed", str(seed), "--seed_everything", str(seed), *VARIANTS[variant]]
    options += ["--trainer.max_epochs", str(epochs), "--trainer.check_val_every_n_epoch", str(epochs)]
    options += ["--trainer.default_root_dir", str(runs), "--trainer.enable_progress_bar", "false"]
    start = time.process_time()
    cli.main(["fit", "-c", CONFIG, *options])
    seconds = time.process_time() - start
    run = max(runs.rglob("config.yaml"), key=lambda path: path.stat().st_mtime).parent
    cli.main(["test", "-c", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    scores = json.loads((run / "test_metrics.json").read_text())
    return {"variant": variant, "seed": seed, "epochs": epochs, "fit_cpu_seconds": seconds} | scores


def run(options: argparse.Namespace) -> None:
    """Measure the rows that are missing."""
    folder = RESULTS / f"epochs_{options.epochs}"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for variant in options.only:
            path = folder / f"{variant}_{seed}.json"
            if path.is_file():
                print(f"{path.name} exists")
                continue
            row = measure(variant, seed, options.source, options.epochs, options.data_dir)
            row["command"] = (
                f"python benchmarks/most_comparison.py run --source MANIFEST --seeds {seed} --only {variant} "
                f"--epochs {options.epochs}"
            )
            path.write_text(json.dumps(row, indent=1) + "\n")


def table(folder: Path) -> None:
    """Mean and standard deviation over seeds, as Markdown and as a figure."""
    from matplotlib.figure import Figure

    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*_[0-9]*.json"))]
    found = [v for v in VARIANTS if any(row["variant"] == v for row in rows)]
    names = [n for n in SHOWN if any(f"test/{n}" in row for row in rows)]
    cells = {
        v: {n: [r[f"test/{n}"] for r in rows if r["variant"] == v and f"test/{n}" in r] for n in names} for v in found
    }
    lines = ["| variant | seeds | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for variant in found:
        values = [cells[variant][n] for n in names]
        shown = [f"{mean(x):.3f}" + (f" ± {stdev(x):.3f}" if len(x) > 1 else "") if x else "-" for x in values]
        lines.append(f"| {variant} | {max(map(len, values))} | " + " | ".join(shown) + " |")
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(2, -(-len(names) // 2), squeeze=False).flat
    for axis, name in zip(axes, names, strict=False):  # of an odd number, the last place stays empty
        for i, variant in enumerate(found):
            axis.plot([i] * len(cells[variant][name]), cells[variant][name], "o")
        axis.set_title(name, fontsize=8)
        axis.set_xticks(range(len(found)), found, rotation=30, fontsize=7)
        axis.set_ylim(0, 1.1 * max(max(x, default=0) for x in (cells[v][name] for v in found)))
    figure.savefig(folder / "comparison.png", dpi=120)
    print("\n".join(lines))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--source", default="data/spoken_digits/manifest.jsonl", help="manifest of real single words")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    options = parser.parse_args()
    table(RESULTS / f"epochs_{options.epochs}") if options.action == "table" else run(options)


if __name__ == "__main__":
    main()
