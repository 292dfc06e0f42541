"""Speed and memory of GraphPFN's prior and network, as ratios to the official code.

    python benchmarks/graph_pfn.py [prior] [forward] [limix16m] [memory]

The official figures were taken with one thread on a machine where a 1024 x 1024 x 1024 float32 product takes 18.6 ms of
CPU time; here they are multiplied by (this machine's product / 18.6 ms). All times are CPU times of one thread.
Results go to `benchmarks/results/graph_pfn_speed/<part>.json`. `memory` needs about seven minutes of CPU time
and the resource module. How well it predicts: `benchmarks/graph_pfn_comparison.py`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from datamodules import GraphPrior
from lightning_modules.graph_pfn.losses import Question, prediction_loss
from lightning_modules.graph_pfn.network import PublishedConfig, PublishedNetwork

RESULTS = Path(__file__).parent / "results" / "graph_pfn_speed"
PRODUCT = 18.6e-3  # CPU seconds of the product where the official figures were taken


def cpu(function: Callable[[], object], repeats: int, warmup: int = 1) -> list[float]:
    """CPU seconds of each call."""
    times = []
    for i in range(warmup + repeats):
        start = time.process_time()
        function()
        if i >= warmup:
            times.append(time.process_time() - start)
    return times


def carry() -> float:
    """This machine's time of the product relative to the other's."""
    a, b = torch.randn(2, 1024, 1024)
    return float(np.median(cpu(lambda: a @ b, 20, 3))) / PRODUCT


def prior() -> dict:
    """Graphs per second at the reduced size; the official sampler draws 2,000 graphs in 0.176 CPU s each."""
    settings = {"nodes": [100, 500], "sparse_degree": [1.5, 20], "dense_degree": [20, 60]}
    data = GraphPrior("paper", settings, seed=0)
    index = iter(range(10_000))
    times = cpu(lambda: data.sample(next(index)), 200)
    official = 0.176 * carry()
    return {
        "mean_cpu_seconds": float(np.mean(times)),
        "median_cpu_seconds": float(np.median(times)),
        "official_mean_here": official,
        "times_the_graphs_per_second": official / float(np.mean(times)),
    }


def question(n: int, edges: int, f: int, context: int, classes: int) -> Question:
    """A random question with `edges` undirected edges."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randperm(n * (n - 1) // 2, generator=generator)[:edges] if n < 5000 else None
    if key is None:  # rejection: the pairs do not fit into memory
        pairs = torch.randint(n, (2, 2 * edges), generator=generator)
        pairs = pairs[:, pairs[0] < pairs[1]].unique(dim=1)
        pairs = pairs[:, torch.randperm(pairs.shape[1], generator=generator)[:edges]]
    else:
        pairs = torch.triu_indices(n, n, 1)[:, key]
    x = torch.randn(n, f, generator=generator)
    return Question(x, torch.arange(context) % classes, torch.cat([pairs, pairs.flip(0)], 1))


def forward() -> dict:
    """The small published network: embed 64, 4 heads, hidden 128, 4 blocks; official 82 and 173 ms."""
    model = PublishedNetwork(PublishedConfig(width=64, heads=4, hidden=128, blocks=4))
    q = question(256, 1500, 8, 64, 3)
    y = torch.arange(192) % 3

    def step() -> None:
        prediction_loss(model([q])[0].query, y, "classification").backward()

    with torch.no_grad():
        times = cpu(lambda: model([q]), 20, 3)
    both, scale = cpu(step, 10, 2), carry()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward_ms": 1e3 * float(np.median(times)),
        "official_forward_ms_here": 82 * scale,
        "forward_ratio": 82e-3 * scale / float(np.median(times)),
        "forward_backward_ms": 1e3 * float(np.median(both)),
        "official_forward_backward_ms_here": 173 * scale,
        "forward_backward_ratio": 173e-3 * scale / float(np.median(both)),
    }


def limix16m() -> dict:
    """LimiX-16M with adapters on 1,000 nodes, 16 columns, 300 labels, 10,000 edges; official 6.8 s."""
    model, q = PublishedNetwork(PublishedConfig()), question(1000, 10_000, 16, 300, 3)
    with torch.no_grad():
        seconds, scale = float(np.median(cpu(lambda: model([q]), 3))), carry()
    return {"seconds": seconds, "official_seconds_here": 6.8 * scale, "ratio": 6.8 * scale / seconds}


def memory() -> dict:
    """Peak memory of LimiX-16M with adapters on a graph of the size of Tolokers, with 8 random columns."""
    import resource

    model, q = PublishedNetwork(PublishedConfig()), question(11_758, 519_000, 18, 5_879, 2)
    start = time.process_time()
    with torch.no_grad():
        model([q])
    return {
        "peak_gb_of_the_process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "estimate_gb": model.peak_bytes(11_758, 18, 1_038_000) / 1e9,
        "parameters": sum(p.numel() for p in model.parameters()),
        "cpu_seconds": time.process_time() - start,
    }


def main() -> None:
    """Measure the parts asked for."""
    parts = {"prior": prior, "forward": forward, "limix16m": limix16m, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in parser.parse_args().parts or parts:
        result = {"command": f"python benchmarks/graph_pfn.py {name}", **parts[name]()}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
