"""How pretraining on synthetic graphs carries over to real ones, and how alike the two are."""

from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback

from callbacks.checks import require
from callbacks.figures import log_figure, log_table, new_figure
from callbacks.progress import progress
from datamodules.checks import check_least
from lightning_modules.graph_pfn.module import GraphPFN, score


class GraphEvaluation(Callback):
    """Predicts on real graphs in context after every validation, and draws what came of it.

    The graphs are those of the data module (`GraphPrior(real=...)`). Logged: `real/<graph>`, the score on the graph's
    validation nodes (accuracy, with two classes average precision, for values R²). At the end of a fit,
    `plots/in_context.png` shows the curves and `plots/prior_statistics.png` where the real graphs lie in the prior's
    distributions of mean degree, clustering and adjusted homophily; `real_graphs.csv`, a table in W&B, has the first,
    the best and the last score of each graph.

    Args:
        graphs: synthetic graphs behind the second picture; 0 leaves it out.
    """

    def __init__(self, graphs: int = 100) -> None:
        check_least(0, graphs=graphs)
        self.graphs = graphs
        self.curves: dict[str, list[tuple[int, float]]] = {}

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse another method, and in a fit or a validation other data.

        Raises:
            ValueError: if the method is not GraphPFN, or the data have no real graphs.
        """
        require(self, isinstance(pl_module, GraphPFN), "the method GraphPFN", pl_module)
        data = trainer.datamodule
        unused = stage in ("test", "predict")
        require(self, unused or hasattr(data, "real_graphs"), "data with real graphs, such as GraphPrior", data)

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Score every real graph."""
        if trainer.sanity_checking:
            return
        assert isinstance(pl_module, GraphPFN)
        graphs = trainer.datamodule.real_graphs()
        with progress(trainer, "Real graphs", len(graphs)) as bar:
            for name, nodes in graphs.items():
                bar.set_description(f"Predicting {len(nodes.y)} nodes of {name}")
                x, edges, y, context, query = (t.to(pl_module.device) for t in nodes[:5])
                output = pl_module.predict_nodes(x, edges, y, context, nodes.classes)
                value = score(output[query[~context]], y[query], nodes.classes)["score"]
                pl_module.log(f"real/{name}", value, rank_zero_only=True)
                self.curves.setdefault(name, []).append((trainer.global_step, float(value)))
                bar.update()

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Draw the pictures."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        if self.curves:
            figure = new_figure()
            axes = figure.subplots()
            for name, curve in self.curves.items():
                axes.plot(*zip(*curve, strict=True), label=name)
            axes.set(xlabel="optimiser steps", ylabel="score in context", title="Real graphs, never trained on")
            axes.legend()
            log_figure(trainer, "in_context", figure)
            log_table(trainer, "real_graphs", [_row(name, curve) for name, curve in self.curves.items()])
        if self.graphs:
            with progress(trainer, f"Statistics of {self.graphs} synthetic graphs", 1):
                prior, real = trainer.datamodule.statistics(self.graphs)
            figure = new_figure(12, 3.5)
            for axes, (name, values) in zip(figure.subplots(1, len(prior)), prior.items(), strict=True):
                axes.hist(values[np.isfinite(values)], 30, color="0.7", label="prior")
                for i, (graph, statistics) in enumerate(real.items()):
                    axes.axvline(statistics[name], color=f"C{i}", label=graph)
                axes.set(xlabel=name.replace("_", " "), ylabel="graphs")
            axes.legend()
            log_figure(trainer, "prior_statistics", figure)

    def state_dict(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """The curves so far."""
        return {"curves": self.curves}

    def load_state_dict(self, state: dict[str, dict[str, list[tuple[int, float]]]]) -> None:
        """Go on with the stored curves."""
        self.curves = state["curves"]


def _row(name: str, curve: list[tuple[int, float]]) -> dict[str, Any]:
    """Scores of a graph along the fit, and the optimiser step of the best."""
    step, best = max(curve, key=lambda point: point[1])
    return {"graph": name, "first": curve[0][1], "best": best, "best_step": step, "last": curve[-1][1]}
