"""Demonstrations of robots, as windows of observations and actions: Meta-World experts, or your own recordings."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from datamodules import metaworld
from datamodules.checks import check_fractions, check_least, check_seeds
from datamodules.order import Draw, GlobalBatches, Loader, describe, ranks
from datamodules.recordings import Keys, Recordings, read


class Windows(NamedTuple):
    """A batch of windows.

    Attributes:
        observation: Of the first `history` steps; those present of `state` float32 `[b, history, d]`, `point_cloud`
            float32 `[b, history, n, c]` (metres in Meta-World) and `image` uint8 `[b, history, h, w, 3]`.
        action: float32 `[b, horizon, d]`, in the recording's own units.
        valid: bool `[b, horizon]`; False where a step lies outside its episode and repeats the nearest one (only
            with `mask_padding`, otherwise all True).
        index: int64 `[b]`, number of the window in its split.
    """

    observation: dict[str, Tensor]
    action: Tensor
    valid: Tensor
    index: Tensor  # type: ignore[assignment] # instead of tuple's method


def window_starts(length: np.ndarray, horizon: int, before: int, after: int) -> tuple[np.ndarray, np.ndarray]:
    """First frame of every window, and the episode it lies in.

    In an episode of `t` frames, windows start from `-before` to `t - horizon + after`.

    Args:
        length: int `(episodes,)`, frames of each episode.
        horizon: Frames of a window.
        before: Frames by which a window may begin too early.
        after: Frames by which it may end too late.

    Returns:
        start int64 `(windows,)` counted from the first frame of the episode, and episode int64 `(windows,)`.
    """
    counts = length - horizon + after + before + 1
    episode = np.repeat(np.arange(len(length)), counts)
    start = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) - before
    return start, episode


class WindowSet(Dataset[Windows]):
    """The windows of some episodes; `__getitems__` makes a whole batch at once.

    Args:
        recordings: All episodes.
        episodes: Numbers of those to take.
        horizon: Frames of a window.
        history: Frames whose observations are given.
        after: Frames by which a window may end after its episode.
        mask: Whether `valid` marks the frames outside the episode.
    """

    def __init__(
        self, recordings: Recordings, episodes: np.ndarray, horizon: int, history: int, after: int, mask: bool
    ) -> None:
        self.horizon, self.history, self.mask = horizon, history, mask
        self.observation = {k: torch.from_numpy(v) for k, v in recordings.observation.items()}
        self.action = torch.from_numpy(recordings.action)
        length = recordings.length[episodes]
        start, which = window_starts(length, horizon, history - 1, after)
        first = (np.cumsum(recordings.length) - recordings.length)[episodes]
        self.start = torch.from_numpy(start + first[which])
        self.first, self.last = torch.from_numpy(first[which]), torch.from_numpy((first + length - 1)[which])

    def __len__(self) -> int:
        return len(self.start)

    def __getitems__(self, draw: Draw) -> Windows:
        items = torch.from_numpy(draw.items)
        wanted = self.start[items, None] + torch.arange(self.horizon)  # b horizon
        frame = wanted.clamp(self.first[items, None], self.last[items, None])
        seen = frame[:, : self.history]
        return Windows(
            observation={k: v[seen] for k, v in self.observation.items()},
            action=self.action[frame],
            valid=(wanted == frame) if self.mask else torch.ones_like(frame, dtype=torch.bool),
            index=items,
        )


class RobotDemonstrations(LightningDataModule):
    """Windows of demonstrations, and the simulator they come from, if there is one.

    Args:
        source: "metaworld" (experts make the demonstrations on first use), or a path: a robomimic `.hdf5`, a
            diffusion-policy `.zarr`, or a LeRobot folder.
        tasks: Meta-World tasks, all learnt by one policy.
        episodes: Demonstrations of each task.
        observe: What is observed in Meta-World.
        max_steps: Meta-World: steps of a demonstration at most (`callbacks.Rollouts` has its own, for evaluation).
        tail: Meta-World: steps that a demonstration goes on after its first success; all up to `max_steps` if none.
        keys: Names in your file of `state` (a list, joined), `point_cloud`, `image` and `action`; the format's own
            names by default, which are `obs/state` and `actions` (HDF5, any path inside a demonstration), `state` and
            `action` (zarr), `observation.state` and `action` (LeRobot).
        horizon: Steps of a window; the policy's.
        history: Observed steps; the policy's.
        action_steps: Executed steps; the policy's. Windows may end `action_steps - 1` steps after the episode.
        mask_padding: Let every step of an episode be the newest observed one, and mark the steps after the end as
            not valid, so that the objective leaves them out.
        val_fraction: Part of the episodes (of each task) that validates, at least one, in (0, 1).
        test_fraction: The same for testing; Meta-World makes two test demonstrations a task instead.
        max_train_episodes: Train on so many episodes at most (of each task), drawn with `seed`.
        batch_size: Windows per batch over all ranks together.
        seed: Of layouts, splits and order.
        data_dir: Where Meta-World demonstrations are kept.
        processes: Processes that make demonstrations or simulate; all cores if none.
        num_workers: Processes that prepare batches; the windows are in memory, so 0 is fast.
        predict_source: A path in one of the formats whose every step `predict` acts on; the test episodes if none.

    Raises:
        ValueError: If a number is out of range or a task unknown.
        FileNotFoundError: If there is no such file or folder.
    """

    __str__ = describe

    def __init__(
        self,
        source: str = "metaworld",
        tasks: list[str] | None = None,
        episodes: int = 10,
        observe: metaworld.Observation = metaworld.Observation(),  # noqa: B008
        max_steps: int = metaworld.MAX_STEPS,
        tail: int | None = None,
        keys: Keys = Keys(),  # noqa: B008
        horizon: int = 12,
        history: int = 2,
        action_steps: int = 4,
        mask_padding: bool = False,
        val_fraction: float = 0.02,
        test_fraction: float = 0.1,
        max_train_episodes: int = 90,
        batch_size: int = 128,
        seed: int = 0,
        data_dir: str = "data",
        processes: int | None = None,
        num_workers: int = 0,
        predict_source: str | None = None,
    ) -> None:
        super().__init__()
        check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
        check_least(1, episodes=episodes, max_steps=max_steps, history=history, action_steps=action_steps)
        check_least(1, batch_size=batch_size, max_train_episodes=max_train_episodes, processes=processes)
        check_least(0, tail=tail, num_workers=num_workers)
        check_seeds(seed=seed)
        if horizon < history:
            raise ValueError(f"horizon {horizon} is less than the history of {history} steps, which it includes")
        if source == "metaworld":
            metaworld.require()
            tasks = ["door-open-v3", "reach-v3"] if tasks is None else tasks
            metaworld.check_tasks(tasks)
        elif not Path(source).exists():
            raise FileNotFoundError(f"demonstrations {source!r} are neither a file or folder nor 'metaworld'")
        self.source, self.tasks, self.episodes, self.observe = source, tasks or [], episodes, observe
        self.max_steps, self.tail, self.keys = max_steps, tail, keys
        self.horizon, self.history, self.action_steps = horizon, history, action_steps
        self.mask_padding = mask_padding
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.max_train_episodes, self.batch_size, self.seed = max_train_episodes, batch_size, seed
        self.data_dir, self.processes, self.num_workers = Path(data_dir), processes, num_workers
        self.predict_source = predict_source
        self._splits: dict[str, tuple[Recordings, np.ndarray]] = {}

    # ---------------------------------------------------------------------------------------------- reading

    def _collect(self, task: str, purpose: str) -> Path:
        return metaworld.collect(
            task,
            self.episodes if purpose == "train" else 2,
            self.observe,
            self.data_dir / "metaworld",
            seed=self.seed,
            purpose=purpose,
            max_steps=self.max_steps,
            tail=self.tail,
            processes=self.processes,
        )

    def prepare_data(self) -> None:
        """Let the experts make what is missing."""
        if self.source == "metaworld":
            for task in self.tasks:
                for purpose in ("train", "demonstrations for testing"):
                    self._collect(task, purpose)

    def setup(self, stage: str | None = None) -> None:
        """Read and split."""
        if self._splits:
            return
        if self.source == "metaworld":
            files = [read(self._collect(task, "train"), Keys()) for task in self.tasks]
            parts = [self._split(r, 0) for r in files]
            tests = [read(self._collect(task, "demonstrations for testing"), Keys()) for task in self.tasks]
            test = _concatenate(tests), np.arange(2 * len(tests))
        else:
            files = [read(Path(self.source), self.keys)]
            parts = [self._split(files[0], self.test_fraction)]
            test = files[0], parts[0]["test"]
        joined = _concatenate(files)
        offsets = np.cumsum([0] + [len(r.length) for r in files[:-1]])
        for name in ("train", "val"):
            self._splits[name] = joined, np.concatenate([p[name] + o for p, o in zip(parts, offsets, strict=True)])
        self._splits["test"] = test
        self._check_lengths(joined)

    def _split(self, recordings: Recordings, test_fraction: float) -> dict[str, np.ndarray]:
        """Numbers of the training, validation and test episodes."""
        n = len(recordings.length)
        n_val = max(1, round(n * self.val_fraction))
        n_test = max(1, round(n * test_fraction)) if test_fraction else 0
        if n_val + n_test >= n:
            raise ValueError(f"{n} episodes cannot be split: validation takes {n_val} and test {n_test} of them")
        order = np.random.default_rng([self.seed, 0]).permutation(n)
        val, test, train = np.split(order, [n_val, n_val + n_test])
        return {"train": np.sort(train[: self.max_train_episodes]), "val": np.sort(val), "test": np.sort(test)}

    def _check_lengths(self, recordings: Recordings) -> None:
        short = np.flatnonzero(recordings.length < self.horizon)
        if len(short):
            name, length = recordings.name[short[0]], recordings.length[short[0]]
            raise ValueError(
                f"{self.source}: {name} has {length} frames, fewer than a window of {self.horizon}"
                + (f" (and {len(short) - 1} more episodes)" if len(short) > 1 else "")
                + ": lower horizon, or leave it out"
            )

    def windows(self, name: str) -> WindowSet:
        """The windows of the `train`, `val` or `test` episodes."""
        recordings, episodes = self._splits[name]
        # With the mask, the last window is the one whose newest observation is the last of its episode.
        after = self.horizon - self.history if self.mask_padding else self.action_steps - 1
        return WindowSet(recordings, episodes, self.horizon, self.history, after, self.mask_padding)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of one frame of `action` and of each kind of observation."""
        recordings, _ = self._splits["train"]
        return {k: v.shape[1:] for k, v in {"action": recordings.action, **recordings.observation}.items()}

    def normalizer_data(self) -> dict[str, Tensor]:
        """What a normaliser is fitted to: action, state and points of all training and validation episodes.

        The released code fits it to every episode; here the test episodes are kept out.
        """
        recordings, train = self._splits["train"]
        fitted = np.isin(np.arange(len(recordings.length)), np.concatenate([train, self._splits["val"][1]]))
        frames = np.repeat(fitted, recordings.length)
        arrays = {"action": recordings.action, **recordings.observation}
        return {k: torch.from_numpy(v[frames]) for k, v in arrays.items() if k != "image"}

    # -------------------------------------------------------------------------------------------- simulator

    def simulators(self, task: str) -> metaworld.Simulators:
        """Simulators of a task that show what the demonstrations show. The caller closes them.

        Raises:
            ValueError: If the demonstrations come from no simulator.
        """
        if self.source != "metaworld":
            raise ValueError(
                f"{self.source} has no simulator: remove callbacks.Rollouts and try the exported policy on the robot"
            )
        ranks_here = self.trainer.num_devices if self.trainer is not None else 1
        processes = self.processes or max(1, (os.cpu_count() or 1) // ranks_here)
        return metaworld.Simulators(task, self.observe, self.history, processes)

    def episode_seeds(self, task: str, stage: str, count: int) -> list[int]:
        """Seeds of the layouts of evaluation episodes; those of "val", "test" and training differ."""
        return [metaworld.episode_seed(task, self.seed, i, stage) for i in range(count)]

    def layouts(self, task: str) -> np.ndarray:
        """Layouts of the demonstrations of a task, `(episodes, k)` in metres."""
        with np.load(self._collect(task, "train"), allow_pickle=False) as file:
            return file["layout"]

    # ---------------------------------------------------------------------------------------------- loaders

    def _loader(self, windows: WindowSet, *, train: bool) -> Loader:
        order = GlobalBatches(
            len(windows), self.batch_size, shuffle=train, drop_last=False, seed=self.seed, **ranks(self)
        )
        return Loader(windows, order, num_workers=self.num_workers, pin_memory=torch.cuda.is_available())

    def train_dataloader(self) -> Loader:
        """Shuffled training windows."""
        return self._loader(self.windows("train"), train=True)

    def val_dataloader(self) -> Loader:
        """Windows of the held-out episodes."""
        return self._loader(self.windows("val"), train=False)

    def test_dataloader(self) -> Loader:
        """Windows of the test episodes."""
        return self._loader(self.windows("test"), train=False)

    def predict_dataloader(self) -> Loader:
        """Every step of `predict_source`, or of the test episodes, as the newest observed one."""
        if self.predict_source is None:
            recordings, episodes = self._splits["test"]
        else:
            recordings = read(Path(self.predict_source), self.keys)
            for name, (*_, size) in self.shapes().items():
                found = recordings.observation[name].shape[-1] if name in recordings.observation else 0
                if name != "action" and found != size:
                    raise ValueError(
                        f"predict_source {self.predict_source} has {found} numbers per {name}, {self.source} has {size}"
                    )
            episodes = np.arange(len(recordings.length))
        after = self.horizon - self.history
        return self._loader(WindowSet(recordings, episodes, self.horizon, self.history, after, mask=True), train=False)


def _concatenate(recordings: Sequence[Recordings]) -> Recordings:
    return Recordings(
        {k: np.concatenate([r.observation[k] for r in recordings]) for k in recordings[0].observation},
        np.concatenate([r.action for r in recordings]),
        np.concatenate([r.length for r in recordings]),
        [name for r in recordings for name in r.name],
    )
