"""Videos with instructions, as clips of a few frames: Meta-World experts made on the spot, or a folder of your own.

Instead of videos a folder may hold their latents, computed once: `read_latents`.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from datamodules import metaworld
from datamodules.checks import check_fractions, check_least, check_seeds, read_csv, read_npz
from datamodules.order import Draw, GlobalBatches, Loader, describe, ranks
from datamodules.progress import progress

CAPTIONS = "captions.csv"
_PURPOSE = {"train": "train", "val": "videos for validation", "test": "videos for testing"}


class Clips(NamedTuple):
    """A batch of clips.

    Attributes:
        video: float32 `[b f 3 h w]` in [-1, 1]; h and w are 0 where latents come instead.
        latents: float32 `[b f c h' w']`, scaled as the video model sees them; c, h' and w' are 0 where pictures come.
        tokens: int64 `[b l]`, the words of the instruction as numbers from 1 on, 0 where there is none; see `word_ids`.
        caption: b instructions, for a text encoder with a vocabulary of its own.
        action: float32 `[b (f-1)*stride d]`, the commands between the first and the last frame, in the recording's
            units; d is 0 where only pictures are known.
        index: int64 `[b]`, number of the clip, which no clip of another split has.
    """

    video: Tensor
    latents: Tensor
    tokens: Tensor
    caption: list[str]
    action: Tensor
    index: Tensor  # type: ignore[assignment] # instead of tuple's method

    @property
    def observation(self) -> dict[str, Tensor]:
        """What a policy sees at the first frame: `image` uint8 `[b 1 h w 3]`, `tokens` `[b l]`, `caption` as bytes."""
        image = ((self.video[:, :1] + 1) * 127.5).round().byte().permute(0, 1, 3, 4, 2)
        return {"image": image, "tokens": self.tokens, "caption": torch.from_numpy(caption_bytes(self.caption))}


class Episodes(NamedTuple):
    """Whole videos, one after the other.

    Attributes:
        frames: uint8 `(all frames, h, w, 3)`; h and w are 0 where there are latents instead.
        latents: float32 `(all frames, c, h', w')`; all three are 0 where there are pictures.
        action: float32 `(all frames, d)`, what is done at each frame.
        length: int `(episodes,)`.
        caption: Instruction of each episode.
        name: What each is called in messages.
    """

    frames: np.ndarray
    latents: np.ndarray
    action: np.ndarray
    length: np.ndarray
    caption: list[str]
    name: list[str]


def instruction(task: str) -> str:
    """The words of a Meta-World task: `button-press-topdown-v3` -> `button press topdown`."""
    return re.sub(r"-v\d+$", "", task).replace("-", " ")


def word_ids(caption: str, length: int, vocabulary: int) -> list[int]:
    """Numbers of the first `length` words, from 1 to `vocabulary - 1`, then zeros.

    A word's number is its CRC-32 modulo the size of the vocabulary: it depends on no training text, so models and data
    always agree on it. Two of n words share a number with a probability of about `n^2 / (2 vocabulary)`.
    """
    words = re.findall(r"\w+", caption.lower())[:length]
    ids = [zlib.crc32(word.encode()) % (vocabulary - 1) + 1 for word in words]
    return ids + [0] * (length - len(ids))


def caption_bytes(captions: Sequence[str]) -> np.ndarray:
    """Texts as an array that travels with tensors: UTF-8, `(n, longest)` uint8, filled up with zeros."""
    encoded = np.array([caption.encode() for caption in captions])
    return encoded.view(np.uint8).reshape(len(captions), -1)


def read_caption_bytes(rows: Tensor) -> list[str]:
    """The texts that `caption_bytes` took."""
    return [row.cpu().numpy().tobytes().rstrip(b"\0").decode() for row in rows]


def clip_starts(length: np.ndarray, span: int, every: int) -> tuple[np.ndarray, np.ndarray]:
    """First frame of every clip that lies inside its episode, and the episode.

    Args:
        length: int `(episodes,)`, none shorter than `span`.
        span: Frames from a clip's first to its last, both counted.
        every: Frames between two starts.

    Returns:
        start int64 `(clips,)` counted from the first frame of the episode, and episode int64 `(clips,)`.
    """
    counts = (length - span) // every + 1
    episode = np.repeat(np.arange(len(length)), counts)
    start = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * every
    return start, episode


class ClipSet(Dataset[Clips]):
    """Clips of some episodes; `__getitems__` makes a whole batch at once.

    Args:
        episodes: All of them.
        chosen: Numbers of those to take.
        frames: Frames of a clip.
        stride: Recorded frames from one of its frames to the next.
        every: Recorded frames between the starts of two clips.
        tokens: Words kept of an instruction.
        vocabulary: Size of the vocabulary.
        first: Number of the first clip.
    """

    def __init__(
        self,
        episodes: Episodes,
        chosen: np.ndarray,
        frames: int,
        stride: int,
        every: int,
        tokens: int,
        vocabulary: int,
        first: int = 0,
    ) -> None:
        self.episodes, self.stride, self.first = episodes, stride, first
        start, which = clip_starts(episodes.length[chosen], (frames - 1) * stride + 1, every)
        self.episode = chosen[which]
        self.start = start + (np.cumsum(episodes.length) - episodes.length)[self.episode]
        self.seen = np.arange(frames) * stride
        self.words = torch.tensor([word_ids(c, tokens, vocabulary) for c in episodes.caption])

    def __len__(self) -> int:
        return len(self.start)

    def __getitems__(self, draw: Draw) -> Clips:
        start, episode = self.start[draw.items], self.episode[draw.items]
        places = start[:, None] + self.seen
        pictures = torch.from_numpy(self.episodes.frames[places])  # b f h w 3
        between = start[:, None] + np.arange(self.seen[-1])
        return Clips(
            video=pictures.permute(0, 1, 4, 2, 3).float() / 127.5 - 1,
            latents=torch.from_numpy(self.episodes.latents[places]),
            tokens=self.words[episode],
            caption=[self.episodes.caption[i] for i in episode],
            action=torch.from_numpy(self.episodes.action[between]),
            index=torch.from_numpy(draw.items + self.first),
        )


class InstructedSimulators(metaworld.Simulators):
    """Simulators of a task whose observations hold the instruction too: `tokens` int64 `(n, l)`, `caption` as bytes.

    Args:
        task: Name of the task.
        spec: What is observed.
        words: The instruction, l numbers.
        processes: How many; None takes all cores.
    """

    def __init__(self, task: str, spec: metaworld.Observation, words: list[int], processes: int | None) -> None:
        super().__init__(task, spec, 1, processes)
        self.words = np.array(words)

    def _told(self, step: metaworld.Step) -> metaworld.Step:
        n = len(step.solved)
        told = {"tokens": np.tile(self.words, (n, 1)), "caption": caption_bytes([instruction(self.task)] * n)}
        return step._replace(observation=step.observation | told)

    def reset(self, seeds: Sequence[int]) -> tuple[metaworld.Step, np.ndarray]:
        """See `metaworld.Simulators.reset`."""
        step, layouts = super().reset(seeds)
        return self._told(step), layouts

    def step(self, actions: np.ndarray, picture: int = 0, every: int = 2) -> metaworld.Step:
        """See `metaworld.Simulators.step`."""
        return self._told(super().step(actions, picture, every))


# ------------------------------------------------------------------------------------------------ own folder


def read_captions(folder: Path) -> list[tuple[str, str]]:
    """Rows (file, caption) of `captions.csv`, whose columns are `file` and `caption`.

    Raises:
        FileNotFoundError: If there is no table.
        ValueError: If it is no such table; naming every row whose file is missing or that has no caption.
    """
    path = folder / CAPTIONS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CAPTIONS}: write one line per video, with columns file and caption")
    header, table = read_csv(path)
    if not {"file", "caption"} <= set(header):
        raise ValueError(f"{path} needs the columns file and caption, it has {', '.join(header)}")
    rows = [(row[header.index("file")], row[header.index("caption")]) for row in table]
    bad = [f"{name or 'a row without a file'} (does not exist)" for name, _ in rows if not (folder / name).is_file()]
    bad += [f"{name} (has no caption)" for name, caption in rows if not caption.strip()]
    if bad:
        raise ValueError(f"{path}: {', '.join(bad)}")
    return rows


def read_video(path: Path, size: int) -> np.ndarray:
    """Frames of a GIF or MP4, the square in the middle, averaged down (or up) to `size`: uint8 `(t, size, size, 3)`.

    Raises:
        ValueError: If it cannot be read.
        ImportError: If the library that reads it is missing.
    """
    try:
        import imageio.v3 as imageio
    except ImportError:
        raise ImportError("reading videos needs imageio: pip install 'fulgurite[robots]'") from None
    if path.suffix.lower() == ".mp4" and find_spec("av") is None:
        raise ImportError(f"reading {path} needs PyAV: pip install av")
    try:
        which: Any = None if path.suffix == ".gif" else ...
        frames = torch.from_numpy(np.asarray(imageio.imread(path, index=which)))
    except Exception as error:  # every plug-in raises its own kinds
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if frames.ndim == 5:
        frames = frames.squeeze(0)
    if frames.ndim == 3:
        frames = frames[..., None]
    if frames.shape[-1] < 3:  # shades of grey
        frames = frames[..., :1].expand(-1, -1, -1, 3)
    if frames.ndim != 4 or not frames.numel():
        raise ValueError(f"{path} cannot be read as a video: its shape is {list(frames.shape)}")
    side = min(frames.shape[1:3])
    top, left = ((n - side) // 2 for n in frames.shape[1:3])
    square = frames[:, top : top + side, left : left + side, :3].permute(0, 3, 1, 2).float()
    small = F.interpolate(square, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return small.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()


def read_latents(path: Path) -> tuple[np.ndarray, str]:
    """Latents of a whole video, computed beforehand: float32 `(t, c, h, w)`, and the mark of their autoencoder.

    Args:
        path: A safetensors file with the tensor `latents`, scaled as the video model sees them (the autoencoder's
            scaling factor is in). `VideoModel.write_latents` makes one, and leaves its mark in the metadata under
            `autoencoder`; the mark of a file without it is an empty string, and nothing is checked.

    Raises:
        ValueError: If it cannot be read or holds something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            mark, latents = (file.metadata() or {}).get("autoencoder", ""), file.get_tensor("latents").float()
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as latents: {error}") from None
    if latents.ndim != 4 or not latents.numel() or not latents.isfinite().all():
        raise ValueError(f"{path} holds no finite latents [t c h w]: its shape is {list(latents.shape)}")
    return latents.numpy(), mark


def _check_alike(videos: list[np.ndarray], marks: list[str], names: list[str]) -> None:
    for video, mark, name in zip(videos, marks, names, strict=True):
        if video.dtype != videos[0].dtype:
            raise ValueError(f"{names[0]} and {name}: a folder holds either videos or latents")
        if video.shape[1:] != videos[0].shape[1:]:
            raise ValueError(f"{names[0]} and {name} are latents of unlike sizes")
        if mark != marks[0]:
            raise ValueError(f"{names[0]} and {name} are latents of two autoencoders")


def import_folder(folder: Path, size: int, cache: Path) -> Path:
    """Decode every video of a folder, or read its latents, once.

    The result is complete or not there: it is written beside its place and moved.

    Args:
        folder: Holds `captions.csv` and the files that it names: videos, or latents (`.safetensors`).
        size: Side of the pictures in pixels.
        cache: Where the result is kept, under a name that changes with the files.

    Returns:
        A folder with `frames.npy` (all frames of all videos, uint8, or float32 if they are latents) and
        `episodes.json`.

    Raises:
        ValueError: Naming each file that cannot be read, or two that do not go together.
        OSError: If the disk is full.
    """
    rows = read_captions(folder)
    stats = [(folder / name).stat() for name, _ in rows]
    signature = [size, *([*row, s.st_size, s.st_mtime_ns] for row, s in zip(rows, stats, strict=True))]
    target = cache / hashlib.sha256(json.dumps(signature).encode()).hexdigest()[:12]
    if target.is_dir():
        return target
    videos, marks, bad = [], [], []
    with progress(f"videos of {folder}", len(rows)) as bar:
        for name, _ in rows:
            try:
                latent = name.endswith(".safetensors")
                video, mark = read_latents(folder / name) if latent else (read_video(folder / name, size), "")
                videos.append(video)
                marks.append(mark)
            except ValueError as error:
                bad.append(str(error))
            bar.update()
    if bad:
        raise ValueError("; ".join(bad))
    _check_alike(videos, marks, [str(folder / name) for name, _ in rows])
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".videos-", dir=cache))
    length = [len(video) for video in videos]
    about = {"length": length, "name": [name for name, _ in rows], "caption": [caption for _, caption in rows]}
    about["autoencoder"] = marks[0]
    shape = (sum(length), *videos[0].shape[1:])
    header = {"descr": videos[0].dtype.str, "fortran_order": False, "shape": shape}
    try:
        with (work / "frames.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for video in videos:  # np.save would not say that the disk is full
                file.write(video.tobytes())
        (work / "episodes.json").write_text(json.dumps(about))
        work.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


# ------------------------------------------------------------------------------------------------ data module


class ExpertVideos(LightningDataModule):
    """Clips of experts at work, with an instruction each.

    Args:
        source: "metaworld" (scripted experts, pictures by ray casting, made on first use), or a folder with
            `captions.csv` (columns `file`, `caption`) and the MP4 or GIF files that it names, or files of latents
            computed beforehand (`.safetensors`, see `read_latents`).
        tasks: Meta-World tasks.
        episodes: Meta-World: training episodes of each task.
        test_episodes: Meta-World: validation episodes, and as many test episodes, of each task.
        frames: Frames of a clip.
        stride: Recorded frames from one frame of a clip to the next; Meta-World records 80 a second.
        every: Recorded frames between the starts of two clips.
        eval_every: The same for validation and test; `every` if none.
        size: Side of the pictures in pixels; latents stay as they are.
        max_steps: Meta-World: steps of an episode at most.
        tail: Meta-World: steps that an episode goes on after its first success.
        tokens: Words kept of an instruction.
        vocabulary: Size of the vocabulary, see `word_ids`; the model's.
        val_fraction: Folder: part of the videos that validates, at least one, in (0, 1).
        test_fraction: Folder: the same for testing.
        batch_size: Clips per batch over all ranks together. Training drops the last batch where it is smaller.
        eval_batch_size: The same for validation, test and prediction; `batch_size` if none.
        seed: Of layouts, splits and order.
        data_dir: Where episodes and decoded videos are kept.
        processes: Meta-World: processes that make episodes; all cores if none.
        num_workers: Processes that prepare batches.

    Raises:
        ValueError: If a number is out of range or a task unknown.
        FileNotFoundError: If the folder does not exist.
    """

    __str__ = describe

    def __init__(
        self,
        source: str = "metaworld",
        tasks: list[str] | None = None,
        episodes: int = 20,
        test_episodes: int = 5,
        frames: int = 8,
        stride: int = 4,
        every: int = 4,
        eval_every: int | None = None,
        size: int = 64,
        max_steps: int = metaworld.MAX_STEPS,
        tail: int = 30,
        tokens: int = 8,
        vocabulary: int = 1024,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        batch_size: int = 16,
        eval_batch_size: int | None = None,
        seed: int = 0,
        data_dir: str = "data",
        processes: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        check_least(2, frames=frames, vocabulary=vocabulary)
        check_least(1, episodes=episodes, test_episodes=test_episodes, stride=stride, every=every, size=size)
        check_least(1, max_steps=max_steps, tokens=tokens, batch_size=batch_size, processes=processes)
        check_least(1, eval_every=eval_every, eval_batch_size=eval_batch_size)
        check_least(0, tail=tail, num_workers=num_workers)
        check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
        check_seeds(seed=seed)
        if source == "metaworld":
            metaworld.require()
            tasks = ["button-press-topdown-v3", "door-open-v3", "drawer-open-v3"] if tasks is None else tasks
            metaworld.check_tasks(tasks)
        elif not Path(source).is_dir():
            raise FileNotFoundError(f"videos {source!r} are neither a folder nor 'metaworld'")
        self.source, self.tasks = source, tasks or []
        self.episodes, self.test_episodes = episodes, test_episodes
        self.frames, self.stride, self.every, self.size = frames, stride, every, size
        self.eval_every = eval_every or every
        self.max_steps, self.tail, self.tokens, self.vocabulary = max_steps, tail, tokens, vocabulary
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.seed, self.data_dir = seed, Path(data_dir)
        self.processes, self.num_workers = processes, num_workers
        self.autoencoder = ""  # mark of the one that made the latents, where they come instead of pictures
        self._sets: dict[str, ClipSet] = {}

    def _collect(self, task: str, split: str) -> Path:
        return metaworld.collect(
            task,
            self.episodes if split == "train" else self.test_episodes,
            metaworld.Observation(state="none", image=self.size),
            self.data_dir / "metaworld",
            seed=self.seed,
            purpose=_PURPOSE[split],
            max_steps=self.max_steps,
            tail=self.tail,
            processes=self.processes,
        )

    def prepare_data(self) -> None:
        """Let the experts make what is missing, or decode the folder."""
        if self.source != "metaworld":
            import_folder(Path(self.source), self.size, self.data_dir / "videos")
            return
        for task in self.tasks:
            for split in _PURPOSE:
                self._collect(task, split)

    def _metaworld(self, split: str) -> Episodes:
        parts = []
        for task in self.tasks:
            parts.append(read_npz(self._collect(task, split)))
        frames, action, length = (np.concatenate([p[k] for p in parts]) for k in ("image", "action", "length"))
        of_task = [(task, i) for task, p in zip(self.tasks, parts, strict=True) for i in range(len(p["length"]))]
        captions = [instruction(task) for task, _ in of_task]
        nothing = np.zeros((len(frames), 0, 0, 0), dtype=np.float32)
        return Episodes(
            frames, nothing, action, length, captions, [f"{task}, {split} episode {i}" for task, i in of_task]
        )

    def _folder(self) -> tuple[Episodes, dict[str, np.ndarray]]:
        folder = import_folder(Path(self.source), self.size, self.data_dir / "videos")
        about = json.loads((folder / "episodes.json").read_text())
        frames = np.load(folder / "frames.npy", mmap_mode="r", allow_pickle=False)
        latents, action = (np.zeros((len(frames), *rest), dtype=np.float32) for rest in ((0, 0, 0), (0,)))
        if frames.dtype == np.float32:
            frames, latents = np.zeros((len(frames), 0, 0, 3), dtype=np.uint8), frames
            self.autoencoder = about["autoencoder"]
        episodes = Episodes(frames, latents, action, np.array(about["length"]), about["caption"], about["name"])
        n = len(episodes.length)
        n_val, n_test = (max(1, round(n * part)) for part in (self.val_fraction, self.test_fraction))
        if n_val + n_test >= n:
            raise ValueError(f"{n} videos cannot be split: validation takes {n_val} and test {n_test} of them")
        order = np.random.default_rng([self.seed, 0]).permutation(n)
        parts = zip(("val", "test", "train"), np.split(order, [n_val, n_val + n_test]), strict=True)
        return episodes, {name: np.sort(part) for name, part in parts}

    def setup(self, stage: str | None = None) -> None:
        """Read and split.

        Raises:
            ValueError: Naming the videos that are shorter than a clip.
        """
        if self._sets:
            return
        if self.source == "metaworld":
            read = {split: self._metaworld(split) for split in _PURPOSE}
            sources = {split: (e, np.arange(len(e.length))) for split, e in read.items()}
        else:
            every_video, parts = self._folder()
            sources = {split: (every_video, parts[split]) for split in _PURPOSE}
        first = 0
        for split, (episodes, chosen) in sources.items():
            _check_lengths(episodes, (self.frames - 1) * self.stride + 1)
            every = self.every if split == "train" else self.eval_every
            self._sets[split] = ClipSet(
                episodes, chosen, self.frames, self.stride, every, self.tokens, self.vocabulary, first
            )
            first += len(self._sets[split])

    def clips(self, split: str) -> ClipSet:
        """The clips of the `train`, `val` or `test` episodes."""
        return self._sets[split]

    # -------------------------------------------------------------------------------------------- for policies

    @property
    def action_dim(self) -> int:
        """Numbers of an action; 0 where only pictures are known."""
        return self._sets["train"].episodes.action.shape[1]

    def actions(self) -> Tensor:
        """All actions of the training episodes, float32 `[n a]`."""
        return torch.from_numpy(self._sets["train"].episodes.action)

    def simulators(self, task: str) -> InstructedSimulators:
        """Simulators of a task that show what the clips show, and the instruction. The caller closes them.

        Raises:
            ValueError: If the clips come from no simulator.
        """
        if self.source != "metaworld":
            raise ValueError(f"{self.source} has no simulator: remove callbacks.Rollouts")
        ranks_here = self.trainer.num_devices if self.trainer is not None else 1
        processes = self.processes or max(1, (os.cpu_count() or 1) // ranks_here)
        words = word_ids(instruction(task), self.tokens, self.vocabulary)
        spec = metaworld.Observation(state="none", image=self.size)
        return InstructedSimulators(task, spec, words, processes)

    def episode_seeds(self, task: str, stage: str, count: int) -> list[int]:
        """Seeds of the layouts of evaluation episodes; those of "val", "test" and of the clips differ."""
        return [metaworld.episode_seed(task, self.seed, i, stage) for i in range(count)]

    def layouts(self, task: str) -> np.ndarray:
        """Layouts of the training episodes of a task, `(episodes, k)` in metres."""
        with np.load(self._collect(task, "train"), allow_pickle=False) as file:
            return file["layout"]

    # ---------------------------------------------------------------------------------------------- loaders

    def _loader(self, split: str) -> Loader:
        train = split == "train"
        size = self.batch_size if train else self.eval_batch_size
        clips = self._sets[split]
        order = GlobalBatches(len(clips), size, shuffle=train, drop_last=train, seed=self.seed, **ranks(self))
        return Loader(clips, order, num_workers=self.num_workers, pin_memory=torch.cuda.is_available())

    def train_dataloader(self) -> Loader:
        """Shuffled training clips."""
        return self._loader("train")

    def val_dataloader(self) -> Loader:
        """Clips of the validation episodes."""
        return self._loader("val")

    def test_dataloader(self) -> Loader:
        """Clips of the test episodes."""
        return self._loader("test")

    predict_dataloader = test_dataloader


def _check_lengths(episodes: Episodes, span: int) -> None:
    short = [f"{episodes.name[i]} ({episodes.length[i]})" for i in np.flatnonzero(episodes.length < span)]
    if short:
        raise ValueError(f"fewer frames than the {span} that a clip spans: {', '.join(short)}; lower frames or stride")
