"""How pretraining on synthetic graphs carries over to real ones, and how alike the two are."""

from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback

from callbacks.figures import log_figure, new_figure
from lightning_modules.graph_pfn.module import GraphPFN, score


class GraphEvaluation(Callback):
    """Predicts on real graphs in context after every validation, and draws what came of it.

    The graphs are those of the data module (`GraphPrior(real=...)`). Logged: `real/<graph>`, the score on the graph's
    validation nodes (accuracy, with two classes average precision, for values R²). At the end of a fit,
    `plots/in_context.png` shows the curves and `plots/prior_statistics.png` where the real graphs lie in the prior's
    distributions of mean degree, clustering and adjusted homophily.

    Args:
        graphs: synthetic graphs behind the second picture; 0 leaves it out.
    """

    def __init__(self, graphs: int = 100) -> None:
        self.graphs = graphs
        self.curves: dict[str, list[tuple[int, float]]] = {}

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Score every real graph."""
        if trainer.sanity_checking or not isinstance(pl_module, GraphPFN):
            return
        for name, nodes in trainer.datamodule.real_graphs().items():
            x, edges, y, context, query = (t.to(pl_module.device) for t in nodes[:5])
            output = pl_module.predict_nodes(x, edges, y, context, nodes.classes)
            value = score(output[query[~context]], y[query], nodes.classes)["score"]
            pl_module.log(f"real/{name}", value, rank_zero_only=True)
            self.curves.setdefault(name, []).append((trainer.global_step, float(value)))

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
        if self.graphs:
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
