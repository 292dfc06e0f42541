"""MAMoE against VanillaMoE and NoShared at equal parameters and steps.

    python benchmarks/most_comparison.py run [--seeds 0 1 2] [--epochs 20] [--real MANIFEST] [--only mamoe ...]
    python benchmarks/most_comparison.py table

Every row (variant and seed) is a JSON file below benchmarks/results/most/ as soon as it is measured; rows that exist
are skipped, so a stopped run goes on where it was. `--real` adds real speech: a manifest of single words with
`speaker` and `split`, such as the Free Spoken Digit Dataset; one to five recordings of a speaker are joined into an
utterance, and speakers without training rows are unseen speakers. `table` writes the table (Markdown) and the figure
of the card.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean, stdev

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = Path(__file__).parent / "results" / "most"
CONFIG = "most/spoken_digits"
MODEL = "--model.init_args"
# NoShared: the width of the shared expert (128) is spread over the 8 routed experts, so that parameters stay equal
VARIANTS: dict[str, list[str]] = {
    "mamoe": [],
    "vanilla": [f"{MODEL}.partition", "null"],
    "no_shared": [f"{MODEL}.shared_expert", "false", f"{MODEL}.language_model.moe_intermediate_size", "80"],
}
SHOWN = ("wer", "wer_unseen_speakers", "wer_shuffled", "text_loss", "unit_error", "unit_likelihood_accuracy",
         "tts_stopped", "tts_wer_own_judge")  # fmt: skip


def join_words(manifest: Path, folder: Path, utterances: dict[str, int], most_words: int, seed: int = 0) -> Path:
    """Join recordings of one speaker into utterances of 1 to `most_words` words: a manifest and its audio.

    Training rows are joined for training and, on other sentences, for validation; test rows only for the test.
    """
    import soundfile

    from datamodules.speech import read_audio, read_manifest

    target = folder / "manifest.jsonl"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows, sound = read_manifest(manifest), {}
    lines = []
    for part, count in utterances.items():
        source = "test" if part == "test" else "train"
        speakers = sorted({row.speaker for row in rows if row.split == source})
        for i in range(count):
            own = [r for r in rows if r.speaker == speakers[i % len(speakers)] and r.split == source]
            chosen = [own[j] for j in rng.integers(0, len(own), rng.integers(1, most_words + 1))]
            for row in chosen:
                if row.audio not in sound:
                    sound[row.audio] = read_audio(row.audio, 16_000, row.start, row.duration)
            name = f"{part}_{i:05d}.flac"
            soundfile.write(folder / name, np.concatenate([sound[row.audio] for row in chosen]), 16_000)
            text = " ".join(row.text for row in chosen)
            lines.append({"audio": name, "text": text, "speaker": chosen[0].speaker, "split": part})
    target.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return target


def measure(variant: str, seed: int, epochs: int, real: Path | None, data_dir: Path, extra: list[str]) -> dict:
    """Train and test one row in this process."""
    import cli

    runs = data_dir / "most_comparison" / f"{variant}_{seed}"
    common = ["--data.init_args.data_dir", str(data_dir), "--trainer.default_root_dir", str(runs), *extra]
    if real is not None:
        common += ["--data.init_args.more", json.dumps([str(real)])]
    start = time.process_time()
    options = [*VARIANTS[variant], "--seed_everything", str(seed), "--data.init_args.seed", str(seed)]
    cli.main(
        [
            "fit",
            "-c",
            CONFIG,
            *options,
            "--trainer.max_epochs",
            str(epochs),
            "--trainer.enable_progress_bar",
            "false",
            *common,
        ]
    )
    seconds = time.process_time() - start
    run = max(runs.glob("*/*/*/config.yaml"), key=lambda path: path.stat().st_mtime).parent
    cli.main(["test", "-c", str(run / "config.yaml"), "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), *extra])
    scores = json.loads((run / "test_metrics.json").read_text())
    return {
        "variant": variant,
        "seed": seed,
        "epochs": epochs,
        "real": real is not None,
        "cpu_seconds": seconds,
    } | scores


def run(options: argparse.Namespace) -> None:
    """Measure the rows that are missing."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    real = None
    if options.real:
        counts = {"train": 4000, "val": 300, "test": 500}
        real = join_words(Path(options.real), options.data_dir / "joined_words", counts, 5)
    for seed in options.seeds:
        for variant in options.only:
            path = RESULTS / f"{variant}_{seed}.json"
            if path.is_file():
                print(f"{path.name} exists")
                continue
            row = measure(variant, seed, options.epochs, real, options.data_dir, options.extra)
            row["command"] = "python benchmarks/most_comparison.py " + " ".join(sys.argv[1:])
            path.write_text(json.dumps(row, indent=1) + "\n")


def table() -> None:
    """Mean and standard deviation over seeds, as Markdown and as a figure."""
    from matplotlib.figure import Figure

    rows = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*_[0-9]*.json"))]
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
    (RESULTS / "table.md").write_text("\n".join(lines) + "\n")
    figure = Figure(figsize=(2.2 * len(names), 3), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for i, variant in enumerate(found):
            axis.plot([i] * len(cells[variant][name]), cells[variant][name], "o")
        axis.set_title(name, fontsize=8)
        axis.set_xticks(range(len(found)), found, rotation=30, fontsize=7)
        axis.set_ylim(bottom=0)
    figure.savefig(RESULTS / "comparison.png", dpi=120)
    print("\n".join(lines))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--real", help="manifest of real single words")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further options of fit and test")
    options = parser.parse_args()
    table() if options.action == "table" else run(options)


if __name__ == "__main__":
    main()
