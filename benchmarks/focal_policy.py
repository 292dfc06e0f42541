"""Speed of FocalPolicy: training step, inference, and making point clouds, in one run.

    python benchmarks/focal_policy.py [--repeats 5]

One thread, CPU times, medians (of demonstrations the mean frame). Measures
- the training step (loss, backward pass, AdamW, EMA) at widths (64, 128, 256), batch 128, horizon 12, 512 points,
  9 states, 4 actions, and one plan at batch 1, against the released code: its figures, 1.87 CPU seconds and 14 ms,
  were taken where one 1024x1024x1024 float32 product takes 18.6 ms, and are scaled by this machine's product;
- the same step with the point encoder's plain backward pass, to show what the critical points save;
- demonstrations with 512-point clouds made by rays (84x84), per frame, against the OpenGL way re-created here (depth
  image by `mujoco.Renderer`, 84x84 and the paper's 128x128, back-projection, crop, farthest-point sampling one cloud at
  a time) where a GL library exists (`MUJOCO_GL=egl`), both with physics and expert; else against the 65 ms that were
  measured elsewhere, not scaled.

Writes `benchmarks/results/focal_policy/speed.json`. About two minutes of CPU time.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from callbacks.ema import ema_decay
from datamodules.metaworld import Observation, Simulator, demonstrate, missing_gl
from datamodules.robots import Windows
from lightning_modules.focal_policy.encoders import PointEncoder
from lightning_modules.focal_policy.module import FocalPolicy

OFFICIAL = {"matmul_ms": 18.6, "step_s": 1.87, "inference_ms": 14.0, "gl_frame_ms": 65.0}
TASKS = ("door-open-v3", "drawer-open-v3", "reach-v3", "stick-push-v3")


def median(function: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds of a call, after one that does not count."""
    function()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def policy() -> FocalPolicy:
    """The network of the measurement, with a normaliser that changes nothing."""
    torch.manual_seed(0)
    module = FocalPolicy(action_dim=4, state_dim=9, point_channels=3, image_crop=0, widths=[64, 128, 256])
    module.configure_model()
    for name, buffer in module.network.normalizer.named_buffers():
        buffer.fill_(1.0 if name.endswith("scale") else 0.0)
    return module


def training_step(module: FocalPolicy, batch: int = 128) -> Callable[[], None]:
    """A function that does one step on random windows."""
    observation = {"state": torch.randn(batch, 2, 9), "point_cloud": torch.randn(batch, 2, 512, 3)}
    valid = torch.ones(batch, 12, dtype=torch.bool)
    windows = Windows(observation, torch.randn(batch, 12, 4), valid, torch.arange(batch))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, fused=True)
    average = {name: p.detach().clone() for name, p in module.named_parameters()}

    def step() -> None:
        loss, _ = module._loss(module.objective(windows, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                average[name].lerp_(parameter, 1 - ema_decay(100, 0.9999, 0.75))

    return step


def gl_frame(simulator: Simulator) -> Callable[[], np.ndarray]:
    """One point cloud through OpenGL: depth, back-projection, crop, farthest points."""
    import mujoco

    model, data, spec = simulator.env.model, simulator.env.data, simulator.spec
    size = spec.rays
    model.vis.quality.offsamples = 0
    model.vis.global_.offwidth = model.vis.global_.offheight = size
    renderer = mujoco.Renderer(model, size, size)
    weakref.finalize(simulator, renderer.close)
    renderer.enable_depth_rendering()
    focal = 0.5 * size / np.tan(np.radians(model.cam(spec.camera).fovy[0]) / 2)
    offset = (np.arange(size) + 0.5 - size / 2) / focal
    low, high = np.array(spec.crop)

    def frame() -> np.ndarray:
        renderer.update_scene(data, spec.camera)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            renderer.scene.flags[flag] = 0
        depth = renderer.render().astype(np.float64)
        points = np.stack([offset[None] * depth, -offset[:, None] * depth, -depth], axis=-1).reshape(-1, 3)
        camera = data.cam(spec.camera)
        points = points @ camera.xmat.reshape(3, 3).T + camera.xpos
        points = points[((points > low) & (points < high)).all(1)]
        chosen = np.zeros(spec.points, dtype=int)
        nearest = np.full(len(points), np.inf)
        for i in range(1, spec.points):
            nearest = np.minimum(nearest, ((points - points[chosen[i - 1]]) ** 2).sum(1))
            chosen[i] = nearest.argmax()
        return points[chosen]

    return frame


def rays_ms(task: str, repeats: int) -> float:
    """CPU milliseconds of a frame of demonstrations of a task, clouds by rays."""
    spec = Observation(state="robot", points=512)
    demonstrate(task, spec, 0, max_steps=2, min_success=0)  # builds the simulator, which later episodes share
    frames, start = 0, time.process_time()
    for seed in range(repeats):
        frames += len(demonstrate(task, spec, seed, max_steps=100, min_success=0).action)
    return 1e3 * (time.process_time() - start) / frames


def gl_ms(task: str, repeats: int, size: int) -> float:
    """The same through OpenGL, from depth images of `size` pixels a side; 65 ms where there is no library."""
    if missing_gl():
        return OFFICIAL["gl_frame_ms"]
    simulator = Simulator(task, Observation(state="robot", points=512, rays=size))
    simulator.reset(0)
    frame = gl_frame(simulator)
    frame()
    start = time.process_time()
    for seed in range(repeats):
        simulator.reset(seed)
        for _ in range(100):
            simulator.step(simulator.expert())
            frame()
    return 1e3 * (time.process_time() - start) / (100 * repeats)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)

    a = torch.randn(1024, 1024)
    product_ms = 1e3 * median(lambda: a @ a, 20)
    scale = product_ms / OFFICIAL["matmul_ms"]
    module = policy()
    step_s = median(training_step(module), repeats)
    critical, PointEncoder._critical = PointEncoder._critical, lambda self, points: points
    plain_s = median(training_step(module), repeats)
    PointEncoder._critical = critical
    module.eval()
    observation = {"state": torch.randn(1, 2, 9), "point_cloud": torch.randn(1, 2, 512, 3)}
    with torch.inference_mode():
        inference_ms = 1e3 * median(lambda: module(observation, torch.randn(1, 12, 4)), 20 * repeats)

    rays = [rays_ms(task, repeats) for task in TASKS]
    gl = {size: [gl_ms(task, repeats, size) for task in TASKS] for size in (Observation.rays, 128)}

    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "matmul_ms": product_ms,
        "step_s": step_s,
        "step_without_critical_points_s": plain_s,
        "official_step_scaled_s": OFFICIAL["step_s"] * scale,
        "step_ratio": step_s / (OFFICIAL["step_s"] * scale),
        "inference_ms": inference_ms,
        "official_inference_scaled_ms": OFFICIAL["inference_ms"] * scale,
        "inference_ratio": inference_ms / (OFFICIAL["inference_ms"] * scale),
        "tasks": TASKS,
        "gl": missing_gl() or "measured",
        "rays_ms_per_frame": rays,
        **{f"gl_{size}_ms_per_frame": gl[size] for size in gl},
        **{f"gl_{size}_over_rays": float(np.mean(np.divide(gl[size], rays))) for size in gl},
    }
    for name, value in result.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    path = Path(__file__).parent / "results" / "focal_policy" / "speed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
