"""Speed and memory of one closed-loop training step, as ratios within one run.

    python benchmarks/ann_snn.py [--batches 16 64] [--time-steps 8] [--repeats 5]
    python benchmarks/ann_snn.py --allocator      # what keep_freed_memory gains; 9 GB of memory

Compares, on a CIFAR ResNet-20 with 32x32 images, one thread: a training step (teacher, simulation, loss with CKA,
backward pass, Adam)
- as shipped: all time steps at once, the constant part of the network once, fused neuron;
- memory-optimised: the same, with currents and membranes recomputed in the backward pass;
- step by step: T calls of the converted network, features summed by hooks, as the authors' code does it, re-created
  from the description of the method on spikingjelly's own scaler, neuron, scaler modules.
Times are CPU seconds; the variants take turns and medians are compared. Memory, each variant in a process of its own:
the bytes of all tensors that a step makes and holds at its peak (scratch memory of kernels is not seen), and the growth
of the resident set in two steps (which also holds what the C allocator keeps for later). Writes
`benchmarks/results/ann_snn/speed.json`. About two minutes of CPU time.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.ann2snn import Converter, RateCodingRecipe
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.ann_snn.conversion import capture, convert, prepare, simulate, teacher_features
from lightning_modules.ann_snn.losses import closed_loop_loss
from lightning_modules.ann_snn.networks import CifarResNet
from lightning_modules.memory import keep_freed_memory

VARIANTS = ("shipped", "memory_optimised", "step_by_step")


def training_step(variant: str, batch: int, time_steps: int) -> Callable[[], float]:
    """One variant's training step on random images; returns a function that runs it and gives the loss."""
    torch.manual_seed(0)
    ann = CifarResNet(20)
    with torch.no_grad():
        for _ in range(10):  # settle the batch statistics, so that every layer has something to fire at
            ann(torch.randn(16, 3, 32, 32))
    ann.eval()
    x, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    teacher, student = prepare(ann), convert(ann, [x])
    student.memory_optimised = variant == "memory_optimised"
    monitored = student.monitored
    weights = torch.full((len(monitored),), 1 / len(monitored))
    network: torch.nn.Module = student
    if variant == "step_by_step":
        with redirect_stderr(StringIO()):  # the calibration's progress bar
            network = Converter(RateCodingRecipe([x], mode="99.9%")).convert(ann).requires_grad_(True)

    def by_steps() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sums: dict[str, torch.Tensor] = {}

        def add(label: str, spikes: torch.Tensor) -> None:
            sums[label] = sums[label] + spikes if label in sums else spikes

        functional.reset_net(network)
        logits: torch.Tensor | float = 0.0
        with capture(network, {label: f"{pair.student}.scaler1" for label, pair in monitored.items()}, add):
            for _ in range(time_steps):
                logits = logits + network(x)
        return logits / time_steps, {label: total / time_steps for label, total in sums.items()}

    optimizer = torch.optim.Adam(network.parameters(), 1e-5)

    def step() -> float:
        with torch.no_grad():
            teacher_logits, targets = teacher_features(teacher, x, monitored)
        if variant == "step_by_step":
            logits, features = by_steps()
        else:
            logits, _, features = simulate(student, x, time_steps)
        loss = closed_loop_loss(logits, teacher_logits, labels, features, targets, weights).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        functional.reset_net(network)
        return loss.item()

    return step


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors made inside the context; `peak` is the most that was alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return out

    def forget(self, key: int, size: int) -> None:
        """A storage was freed."""
        self.known.discard(key)
        self.now -= size


def peak_memory(variant: str, batch: int, time_steps: int) -> dict[str, float]:
    """MB of live tensors at the peak of a training step, and MB that two steps add to the resident set.

    To be called in a process of its own, whose parent is still small: a child's maximum starts at its parent's.
    """
    torch.set_num_threads(1)
    step = training_step(variant, batch, time_steps)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kilobytes elsewhere
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        step()
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit / 1e6
    with LiveTensors() as tensors:
        step()
    return {"tensors": tensors.peak / 1e6, "resident": resident}


def speed(batch: int, time_steps: int, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each variant; the variants take turns."""
    steps = {variant: training_step(variant, batch, time_steps) for variant in VARIANTS}
    losses = {variant: step() for variant, step in steps.items()}  # also the warm-up
    assert max(losses.values()) - min(losses.values()) < 0.05, f"the variants disagree: {losses}"
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(repeats):
        for variant, step in steps.items():
            start = time.process_time()
            step()
            times[variant].append(time.process_time() - start)
    return {variant: statistics.median(values) for variant, values in times.items()}


def step_seconds(time_steps: int, repeats: int, keep: bool) -> float:
    """Median CPU seconds of the shipped step at batch 64; call it in a process of its own."""
    torch.set_num_threads(1)
    assert not keep or keep_freed_memory(), "only glibc has this setting"
    step = training_step("shipped", 64, time_steps)
    step()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    return statistics.median(times)


def allocator(repeats: int) -> None:
    """With and without `keep_freed_memory`, at T = 8 and 32."""
    report: dict = {"command": " ".join(["python", *sys.argv]), "batch": 64, "repeats": repeats, "cpu_seconds": {}}
    for time_steps in (8, 32):
        seconds = {}
        for keep in (False, True):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                seconds["kept" if keep else "given back"] = pool.submit(
                    step_seconds, time_steps, repeats, keep
                ).result()
        report["cpu_seconds"][time_steps] = seconds
        print(f"T = {time_steps}: {seconds}, ratio {seconds['given back'] / seconds['kept']:.2f}")
    write(report, "allocator.json")


def write(report: dict, name: str) -> None:
    """Keep the report among the results."""
    path = Path(__file__).parent / "results" / "ann_snn" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--time-steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--allocator", action="store_true", help="time steps with and without keep_freed_memory")
    args = parser.parse_args()
    if args.allocator:
        return allocator(args.repeats)
    torch.set_num_threads(1)
    peaks: dict[int, dict[str, dict[str, float]]] = {batch: {} for batch in args.batches}
    for batch in args.batches:
        for variant in VARIANTS:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                peaks[batch][variant] = pool.submit(peak_memory, variant, batch, args.time_steps).result()
    rows = []
    for batch in args.batches:
        repeats = args.repeats * (2 if batch <= 16 else 1)
        seconds, memory = speed(batch, args.time_steps, repeats), peaks[batch]
        row = {
            "batch": batch,
            "time_steps": args.time_steps,
            "repeats": repeats,
            "cpu_seconds": seconds,
            "peak_mb": memory,
            "speed_ratio": seconds["step_by_step"] / seconds["shipped"],
            "speed_ratio_memory_optimised": seconds["step_by_step"] / seconds["memory_optimised"],
            "memory_ratio": memory["step_by_step"]["tensors"] / memory["shipped"]["tensors"],
            "memory_ratio_memory_optimised": memory["step_by_step"]["tensors"] / memory["memory_optimised"]["tensors"],
        }
        rows.append(row)
        print(f"batch {batch}, T = {args.time_steps}")
        for variant in VARIANTS:
            ratio = seconds["step_by_step"] / seconds[variant]
            peak = memory[variant]
            print(
                f"  {variant:17}{seconds[variant]:7.3f} s ({ratio:.2f}x)"
                f"  peak: tensors {peak['tensors']:5.0f} MB, resident {peak['resident']:5.0f} MB"
            )
    report = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
        "memory": "tensors: live bytes at the peak of a step; resident: growth of ru_maxrss over two steps",
        "rows": rows,
    }
    write(report, "speed.json")


if __name__ == "__main__":
    main()
