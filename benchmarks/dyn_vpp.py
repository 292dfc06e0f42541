"""Speed and memory of Dyn-VPP's rollout and update, as ratios within one run.

    python benchmarks/dyn_vpp.py [--contexts 4] [--group 8] [--repeats 3] [--device cpu]

Compares, on the small U-Net with 8x8 latents:
- rollouts of all contexts and samples as one batch, with the shared first step, against one clip after the other;
- the update on contexts (the group shares the mean of its first step) against the update on every sample;
- peak memory of the update in micro-batches against the update in one pass.
Prints the ratios and writes them to `benchmarks/results/dyn_vpp/speed.json`. Times on a CPU are CPU
times of one thread; variants alternate and medians are compared. The full run takes about a minute of CPU time.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lightning_modules.dyn_vpp.networks import SMALL_UNET, Condition, predict_clean, video_unet
from lightning_modules.dyn_vpp.objective import micro_batches, policy_loss
from lightning_modules.dyn_vpp.sampler import Rollout, hybrid_schedule, karras_sigmas, rollout

FRAMES, SIZE, STEPS = 8, 8, 6
SCHEDULE = hybrid_schedule(karras_sigmas(STEPS, 0.02, 20.0))


def problem(contexts: int, group: int, device: str) -> tuple:
    """A U-Net with random weights, conditions, initial noise, step noise."""
    torch.manual_seed(0)
    unet = video_unet(SMALL_UNET).eval().to(device)
    frame = (4, SIZE, SIZE)
    condition = Condition(
        torch.randn(contexts, 1, *frame, device=device),
        torch.randn(contexts, 4, SMALL_UNET["cross_attention_dim"], device=device),
        torch.tensor([[4.0, 127.0, 0.0]], device=device).repeat(contexts, 1),
    )
    start = torch.randn(contexts, 1, FRAMES, *frame, device=device)
    return unet, condition, start, torch.randn(1, contexts, group, FRAMES, *frame, device=device)


def one_by_one(unet, condition, start, noise) -> torch.Tensor:
    """Every clip on its own: batch 1 in all steps."""
    videos = []
    for b in range(noise.shape[1]):
        denoise = partial(predict_clean, unet, condition=condition.rows(slice(b, b + 1)))
        for g in range(noise.shape[2]):
            videos.append(rollout(denoise, start[b : b + 1], noise[:, b : b + 1, g : g + 1], SCHEDULE).latents)
    return torch.cat(videos).unflatten(0, noise.shape[1:3])[:, :, 0]


def update(unet, condition, result: Rollout, advantages, shared: bool, size: int | None = None) -> None:
    """Forward and backward passes of one update; gradients are left in the network."""
    unet.zero_grad(set_to_none=True)
    steps = result.steps
    if not shared:  # every sample carries a copy of its context's state
        expand = (-1, advantages.shape[1], -1, -1, -1, -1)
        steps = [step._replace(x=step.x.expand(expand), clean=step.clean.expand(expand)) for step in steps]
    for part in micro_batches(steps, advantages, size):
        denoise = partial(predict_clean, unet, condition=condition.rows(part.contexts))
        (part.weight * policy_loss(denoise, part.step, part.advantages, rescale=True).loss).backward()


def medians(variants: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each variant; the variants take turns."""

    def now() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, run in variants.items():
            before = now()
            run()
            if turn:  # the first turn warms up
                times[name].append(now() - before)
    return {name: statistics.median(values) for name, values in times.items()}


def _peak(run: Callable[[], object], device: str, queue) -> None:
    if device == "cpu":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        queue.put(
            (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
        )
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        queue.put(torch.cuda.max_memory_allocated() - before)


def peak_memory(run: Callable[[], object], device: str) -> int:
    """Bytes that `run` needs on top of what is there: in a forked child on the CPU, from the allocator on a GPU."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    if device == "cpu":
        child = context.Process(target=_peak, args=(run, device, queue))
        child.start()
        child.join()
    else:
        _peak(run, device, queue)
    return queue.get()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "dyn_vpp" / "speed.json")
    args = parser.parse_args()
    torch.set_num_threads(1)

    # memory first, while the process has little freed memory that it could use again unseen
    many = 16
    unet, condition, start, noise = problem(many, args.group, args.device)
    denoise = partial(predict_clean, unet, condition=condition)
    result = Rollout(start, rollout(denoise, start, noise, SCHEDULE[:1]).steps)
    advantages = torch.randn(many, args.group, FRAMES, device=args.device)
    update(unet, condition, result, advantages, shared=True, size=1)  # warm-up
    memory = {
        size: peak_memory(partial(update, unet, condition, result, advantages, True, size), args.device)
        for size in (many, 4)
    }

    unet, condition, start, noise = problem(args.contexts, args.group, args.device)
    denoise = partial(predict_clean, unet, condition=condition)
    advantages = torch.randn(args.contexts, args.group, FRAMES, device=args.device)
    result = rollout(denoise, start, noise, SCHEDULE)
    difference = (one_by_one(unet, condition, start, noise) - result.latents).abs().max().item()
    rollouts = medians(
        {
            "one by one": lambda: one_by_one(unet, condition, start, noise),
            # at most 16 clips in a pass: larger ones leave the processor's cache
            "batched": lambda: rollout(partial(denoise, rows=16), start, noise, SCHEDULE),
        },
        args.repeats,
        args.device,
    )

    gradients = []
    for shared in (False, True):
        update(unet, condition, result, advantages, shared)
        gradients.append(torch.cat([p.grad.flatten() for p in unet.parameters()]))
    mismatch = ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item()
    updates = medians(
        {
            "every sample": lambda: update(unet, condition, result, advantages, shared=False),
            "shared first step": lambda: update(unet, condition, result, advantages, shared=True),
        },
        args.repeats,
        args.device,
    )

    report = {
        "command": " ".join(["python", "benchmarks/dyn_vpp.py", *sys.argv[1:]]),
        "setting": {
            "contexts": args.contexts,
            "group": args.group,
            "frames": FRAMES,
            "latent": SIZE,
            "sampler steps": STEPS,
            "repeats": args.repeats,
            "device": args.device,
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
        "rollout": {
            "seconds per clip": {k: v / (args.contexts * args.group) for k, v in rollouts.items()},
            "times faster": rollouts["one by one"] / rollouts["batched"],
            "wanted": 2.0,
            "largest difference of the latents": difference,
        },
        "update": {
            "seconds": updates,
            "times faster": updates["every sample"] / updates["shared first step"],
            "wanted": 4.0,
            "relative difference of the gradients": mismatch,
        },
        "memory": {
            "contexts": many,
            "bytes in one pass": memory[many],
            "bytes in passes of 4": memory[4],
            "share": memory[4] / memory[many],
            "wanted at most": 0.6,
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
