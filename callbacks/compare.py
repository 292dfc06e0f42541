"""A metric of several runs in one picture: `python -m callbacks.compare RUN1 RUN2 --metric val/accuracy`."""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.ticker import MaxNLocator

from callbacks.figures import new_figure
from callbacks.run_folder import CONFIG


def read_metric(folder: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps (of FedHPro: rounds) and values of a metric, as a run logged them in `metrics.csv`.

    Raises:
        FileNotFoundError: the folder is not that of a run.
        ValueError: the run did not log the metric.
    """
    path = folder / "metrics.csv"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no metrics.csv: name the folder of a run")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if row.get(metric)]
    if not rows:
        raise ValueError(f"{path} has no {metric}; it has {', '.join(reader.fieldnames or ())}")
    return [int(row["step"]) for row in rows], [float(row[metric]) for row in rows]


def differences(folders: Sequence[Path]) -> list[str]:
    """What sets each run apart, for a legend: the settings of model, data and seed that are not those of all runs.

    Returns:
        One text a run, such as `strategy=FedAvg`; the name of the folder, where its settings are those of another run.
    """
    settings = []
    for folder in folders:
        config = yaml.safe_load(path.read_text()) if (path := folder / CONFIG).is_file() else {}
        settings.append(dict(_leaves({k: config.get(k) for k in ("model", "data", "seed_everything")})))
    names = [k for k in dict.fromkeys(k for s in settings for k in s) if len({str(s.get(k)) for s in settings}) > 1]
    texts = [", ".join(f"{k.rpartition('.')[2]}={s[k]}" for k in names if s.get(k) is not None) for s in settings]
    return [text if text and texts.count(text) == 1 else f.name for text, f in zip(texts, folders, strict=True)]


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name, node


def compare(folders: Sequence[Path], metric: str, picture: Path) -> None:
    """Draw a metric of several runs over their steps.

    Args:
        folders: of the runs.
        metric: a column of their `metrics.csv`.
        picture: file to write; its ending is the format.

    Raises:
        FileNotFoundError: a folder is not that of a run.
        ValueError: a run did not log the metric, or the format is unknown.
    """
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for folder, label in zip(folders, differences(folders), strict=True):
        axes.plot(*read_metric(folder, metric), label=label)
    axes.set(xlabel="step", ylabel=metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(picture)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; `arguments` instead of those of the process."""
    parser = argparse.ArgumentParser(prog="python -m callbacks.compare", description="Draw runs in one picture.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--metric", default="val/accuracy", help="column of metrics.csv")
    parser.add_argument("--picture", type=Path, default=Path("compared.png"), help="file to write")
    options = parser.parse_args(arguments)
    try:
        compare([run.resolve() for run in options.runs], options.metric, options.picture)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{options.picture}\n")


if __name__ == "__main__":
    main()
