"""Closed-loop evaluation of a policy in the simulator that its demonstrations come from."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import move_data_to_device
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.checks import require
from callbacks.figures import log_figure, log_table, new_figure
from callbacks.progress import progress
from datamodules.checks import check_least
from lightning_modules.distributed import gather_rows


class Rollout(NamedTuple):
    """`n` episodes of one task, `c` chunks of `h` steps at most.

    Attributes:
        solved: bool `(n,)`, at any step.
        steps: int `(n,)`, control steps until the first success, or all.
        executed: float32 `(n, c, h, d)`, clipped to what the simulator takes.
        windows: float32 `(n, c, l, d)`, as predicted.
        hand: float `(n, c, h, 3)`, metres.
        layouts: float `(n, k)`, random positions of the episodes, metres.
        frames: Pictures of the first episode, uint8 `(m, size, size, 3)`.
    """

    solved: np.ndarray
    steps: np.ndarray
    executed: np.ndarray
    windows: np.ndarray
    hand: np.ndarray
    layouts: np.ndarray
    frames: np.ndarray


def episode_metrics(
    executed: np.ndarray, windows: np.ndarray, hand: np.ndarray, steps: int, history: int, control_hz: float
) -> dict[str, float]:
    r"""How smooth one episode was. With $e_i$ the executed actions, chunks of $H$ steps, windows $M^m$ of $L$.

    - `boundary_jump`: mean $|e_{mH} - e_{mH-1}|_2$; `intra_jump`: the same over the other steps
    - `overlap_disagreement`: mean $|M^m_{To-1+H+j} - M^{m+1}_{To-1+j}|$ over $j = 0..L-H-To$: how far the
      foresight of one plan is from what the next plan does
    - `jerk`: mean norm of the third difference of the hand's position, in m/s^3
    - `high_band_energy`: share of the upper half of the frequencies (DCT along time, $k \ge T/2$ of $T$ steps) in
      the energy of the executed actions without their mean ($k \ge 1$)

    Not a number where an episode is too short to tell.

    Args:
        executed: `(c, h, d)`.
        windows: `(c, l, d)`.
        hand: `(c, h, 3)` in metres.
        steps: Control steps that were taken; what comes after is left out.
        history: Observation steps $To$.
        control_hz: Control steps per second.
    """
    from scipy.fft import dct

    (_, h, d), length = executed.shape, windows.shape[1]
    e = executed.reshape(-1, d)[:steps]
    jumps = np.linalg.norm(np.diff(e, axis=0), axis=1)
    at_boundary = np.arange(1, len(e)) % h == 0
    chunks = -(-steps // h)
    ahead = windows[: chunks - 1, history - 1 + h : length]
    again = windows[1:chunks, history - 1 : length - h]
    third = np.diff(hand.reshape(-1, 3)[:steps], n=3, axis=0)
    energy = (dct(e, axis=0, norm="ortho") ** 2).sum(1)  # by frequency
    varying = energy[1:].sum()
    return {
        "boundary_jump": _mean(jumps[at_boundary]),
        "intra_jump": _mean(jumps[~at_boundary]),
        "overlap_disagreement": _mean(np.abs(ahead - again)),
        "jerk": _mean(np.linalg.norm(third, axis=1)) * control_hz**3,
        "high_band_energy": float(energy[-(-len(e) // 2) :].sum() / varying) if varying > 0 else float("nan"),
    }


def _plan(trainer: Trainer, pl_module: Any, observation: dict[str, Tensor], noise: Tensor) -> Tensor:
    """Windows, on the device and in the precision of the trainer's own validation steps."""
    inputs = trainer.precision_plugin.convert_input((observation, noise))
    with trainer.precision_plugin.val_step_context():
        return pl_module(*move_data_to_device(inputs, pl_module.device))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")


class Rollouts(Callback):
    """Runs the policy in the simulator of `trainer.datamodule` after every validation epoch and in the test.

    Episodes of a task advance together over all cores, each until its first success. Their layouts are a function of
    the data module's seed, those of validation, test and training differ; the noise is a function of the episode and
    the chunk. So neither ranks nor processes change the outcome. Under FSDP all ranks keep in step. Plans
    are made in the trainer's precision, as in a validation step.

    Logged for `val/` and `test/`: `success_rate` (mean over tasks, a fraction), `success_rate_<task>`,
    `steps_to_success` (control steps, of the solved ones), `discontinuity` (jump at chunk borders over jump inside
    chunks, 1 is seamless), `overlap_disagreement` (action units), `jerk` (m/s^3, of the hand), `high_band_energy` (a
    fraction), `nearest_demonstration` (m, median distance of an episode's layout to the nearest demonstrated one),
    and in the test `latency_ms` (median of one plan for one robot). Written to `<run>/plots`: a GIF of one episode
    of each task, and a plot of its executed against its predicted actions. After a fit `<run>/val_episodes.csv` has a
    row for each episode of the last validation, after a test `test_episodes.csv`: task, seed of the layout, success,
    steps, the measures above; both are tables in W&B.

    Args:
        episodes: Of each task, at least 1.
        max_steps: Control steps of an episode, at least 1.
        picture: Side of the GIF in pixels; 0 for none.
        latency_calls: Plans that are timed in the test, after 10 that are not; 0 for none.
    """

    log: Callable[..., None]  # given by Lightning

    def __init__(self, episodes: int = 20, max_steps: int = 200, picture: int = 128, latency_calls: int = 100) -> None:
        check_least(1, episodes=episodes, max_steps=max_steps)
        check_least(0, picture=picture, latency_calls=latency_calls)
        self.episodes, self.max_steps, self.picture, self.latency_calls = episodes, max_steps, picture, latency_calls
        self._simulators: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []  # of the last evaluation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what is no policy, data without a simulator, and ranks without an episode.

        Raises:
            ValueError: If the module plans no chunks of actions, there is no simulator, or there are fewer episodes
                than ranks.
        """
        settings = {"history", "horizon", "action_steps", "action_dim"}
        plans = settings <= pl_module.hparams.keys() and "executed" in dir(pl_module)
        require(self, plans, "a policy such as FocalPolicy or VideoPolicy", pl_module)
        data = trainer.datamodule
        require(self, hasattr(data, "simulators"), "a data module with a simulator, such as RobotDemonstrations", data)
        if data.source != "metaworld":
            data.simulators("")  # says why not
        if self.episodes < trainer.world_size:
            raise ValueError(f"{self.episodes} episodes cannot be spread over {trainer.world_size} ranks")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the simulator processes."""
        for simulators in self._simulators.values():
            simulators.close()
        self._simulators = {}

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate on the validation layouts."""
        if not trainer.sanity_checking:
            self._evaluate(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate on the test layouts, and time the policy."""
        self._evaluate(trainer, pl_module, "test")
        log_table(trainer, "test_episodes", self._rows)
        if self.latency_calls:
            self.log("test/latency_ms", self._latency(trainer, pl_module))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the episodes of the last validation."""
        log_table(trainer, "val_episodes", self._rows)

    # ------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = trainer.datamodule
        per_task = []
        self._rows = []
        for task in data.tasks:
            if task not in self._simulators:
                self._simulators[task] = data.simulators(task)
            simulators = self._simulators[task]
            seeds = data.episode_seeds(task, stage, self.episodes)[trainer.global_rank :: trainer.world_size]
            rollout = self.rollout(trainer, pl_module, simulators, seeds, f"{stage}: {task}")
            demonstrated = data.layouts(task)
            rows: dict[str, list[float]] = {"seed": list(seeds)}
            for i in range(len(seeds)):
                row = episode_metrics(
                    rollout.executed[i],
                    rollout.windows[i],
                    rollout.hand[i],
                    int(rollout.steps[i]),
                    pl_module.hparams["history"],
                    simulators.control_hz,
                )
                row["solved"] = float(rollout.solved[i])
                row["steps"] = float(rollout.steps[i])
                row["nearest"] = float(np.linalg.norm(demonstrated - rollout.layouts[i], axis=1).min())
                for name, value in row.items():
                    rows.setdefault(name, []).append(value)
            columns = {name: np.array(values) for name, values in gather_rows(rows).items()}
            per_task.append(columns)
            self._rows += _episodes(task, columns)
            self.log(f"{stage}/success_rate_{task}", float(columns["solved"].mean()))
            if trainer.is_global_zero:
                name = f"{stage}_{task}"
                log_figure(trainer, f"{name}_chunks", chunk_figure(rollout, pl_module.hparams["history"], task))
                if len(rollout.frames):
                    self._log_gif(trainer, f"{name}_rollout", rollout.frames)
        for name, value in summary(per_task).items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "success_rate")

    @torch.inference_mode()
    def rollout(self, trainer: Trainer, pl_module: Any, simulators: Any, seeds: list[int], what: str) -> Rollout:
        """Run an episode for each seed, in step; `what` is shown beside the bar."""
        h = pl_module.hparams
        taken: Any = pl_module.executed  # of a window
        step, layouts = simulators.reset(seeds)
        executed, windows, hand, frames = [], [], [], []
        chunks = -(-self.max_steps // h["action_steps"])
        with progress(trainer, f"{what}, {len(seeds)} episodes in the simulator", chunks) as bar:
            for chunk in range(chunks):
                shape = (h["horizon"], h["action_dim"])
                noise = np.stack([np.random.default_rng([s, chunk]).standard_normal(shape, np.float32) for s in seeds])
                observation = {name: torch.from_numpy(x) for name, x in step.observation.items()}
                window = _plan(trainer, pl_module, observation, torch.from_numpy(noise)).float().cpu().numpy()
                actions = window[:, taken].clip(simulators.low, simulators.high)
                step = simulators.step(actions, self.picture if trainer.is_global_zero else 0)
                executed.append(actions)
                windows.append(window)
                hand.append(step.hand)
                frames += list(step.frames)
                bar.update()
                if trainer.strategy.reduce_boolean_decision(bool(step.solved.all()), all=True):
                    break
        actions, predicted, hands = (np.stack(x, axis=1) for x in (executed, windows, hand))
        pictures = np.array(frames, dtype=np.uint8)
        return Rollout(step.solved, step.steps, actions, predicted, hands, layouts, pictures)

    @torch.inference_mode()
    def _latency(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """Median milliseconds of one plan for one robot, everything on the device already."""
        h = pl_module.hparams
        batch = next(iter(trainer.datamodule.test_dataloader()))
        observation = {k: v[:1].to(pl_module.device) for k, v in batch.observation.items()}
        noise = torch.randn(1, h["horizon"], h["action_dim"], device=pl_module.device)
        times = []
        for _ in range(10 + self.latency_calls):
            start = time.perf_counter()
            _plan(trainer, pl_module, observation, noise)
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return 1e3 * float(np.median(times[10:]))

    @staticmethod
    def _log_gif(trainer: Trainer, name: str, frames: np.ndarray) -> None:
        import imageio

        path = Path(trainer.default_root_dir) / "plots" / f"{name}.gif"
        path.parent.mkdir(parents=True, exist_ok=True)
        imageio.mimsave(path, list(frames), duration=50, loop=0)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                logger.experiment.log({name: wandb.Video(str(path))})


def _episodes(task: str, columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """A row for each episode of a task, by seed; `None` where it was too short to tell."""
    others = [name for name in columns if name not in ("seed", "solved", "steps")]
    rows = []
    for i in np.argsort(columns["seed"]):
        row = {"task": task, "seed": int(columns["seed"][i]), "success": bool(columns["solved"][i])}
        row |= {"steps": int(columns["steps"][i])}
        rows.append(row | {name: None if np.isnan(x := columns[name][i]) else float(x) for name in others})
    return rows


def summary(per_task: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Means over tasks of what the episodes of each task say; episodes too short to tell are left out."""
    names = ("boundary_jump", "intra_jump", "overlap_disagreement", "jerk", "high_band_energy")
    mean: dict[str, float] = {}
    for name in names:
        values = np.concatenate([columns[name] for columns in per_task])
        mean[name] = _mean(values[~np.isnan(values)])
    solved = [columns["solved"].mean() for columns in per_task]
    steps = np.concatenate([columns["steps"][columns["solved"] > 0] for columns in per_task])
    return {
        "success_rate": float(np.mean(solved)),
        "steps_to_success": _mean(steps),
        "discontinuity": mean.pop("boundary_jump") / max(mean.pop("intra_jump"), 1e-9),
        **mean,
        "nearest_demonstration": float(np.median(np.concatenate([columns["nearest"] for columns in per_task]))),
    }


def chunk_figure(rollout: Rollout, history: int, title: str) -> Figure:
    """Executed actions of the first episode, and each predicted window from its first executed step on."""
    _, c, h, d = rollout.executed.shape
    steps = int(rollout.steps[0])
    executed = rollout.executed[0].reshape(c * h, d)[:steps]
    figure = new_figure(8, 1.6 * d)
    axes = figure.subplots(d, 1, sharex=True, squeeze=False)[:, 0]
    for j, axis in enumerate(axes):
        for m in range(-(-steps // h)):
            window = rollout.windows[0, m, history - 1 :, j]
            axis.plot(m * h + np.arange(len(window)), window, color="tab:orange", alpha=0.5, linewidth=0.8)
        axis.plot(executed[:, j], color="tab:blue", linewidth=1.4)
        axis.set_ylabel(f"action {j}")
    axes[0].set_title(f"{title}: executed (blue) and predicted windows (orange)")
    axes[-1].set_xlabel("control step")
    return figure
