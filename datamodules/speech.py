"""Speech with its text: a corpus made on the spot, a JSONL manifest, or a folder of audio with metadata."""

import io
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.checks import check_least, check_ranges, check_seeds, read_csv, read_text
from datamodules.espeak import speak_in_new_process
from datamodules.order import Draw, GlobalBatches, Loader, counter_uniform, describe, ranks

AUDIO_ENDINGS = (".wav", ".flac", ".ogg", ".mp3", ".opus")
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
VOICES = [f"en-us+{v}" for v in ("f1", "f2", "f3", "f4", "m1", "m2", "m3", "m4", "m5", "m6")]
UNSEEN_VOICES = ["en-us+f5", "en-us+m7", "en-us+m8", "en-gb-x-rp"]


class Utterances(NamedTuple):
    """A batch of b utterances.

    Augmentation changes `audio`, which is what is listened to. What is to be spoken, unit tokens and waveforms alike,
    is learned from `clean_audio`.

    Attributes:
        audio: float32 `[b, s]`, mono samples in [-1, 1] at the data module's `sample_rate`, zeros at the
            right.
        length: int64 `[b]`, samples of each; 0 where there is only text.
        clean_audio: float32 `[b, s3]`, the same utterances without augmentation (at another speed they are longer or
            shorter); None where nothing is augmented, `audio` being clean.
        clean_length: int64 `[b]`, samples of each, or None.
        text: b transcripts, or what is to be spoken.
        answer: b answers to spoken questions, empty where there is none.
        answer_audio: float32 `[b, s2]`, the spoken answers.
        answer_length: int64 `[b]`, samples of each, 0 where there is none.
        speaker: b names, empty where unknown.
        unseen: bool `[b]`, whether the speaker is held out of training.
        number: float32 `[b]`, uniform in [0, 1), fixed by seed, epoch and item: for choices made per item.
        index: int64 `[b]`, position in the split.
        name: b names of files.
    """

    audio: Tensor
    length: Tensor
    clean_audio: Tensor | None
    clean_length: Tensor | None
    text: list[str]
    answer: list[str]
    answer_audio: Tensor
    answer_length: Tensor
    speaker: list[str]
    unseen: Tensor
    number: Tensor
    index: Tensor  # type: ignore[assignment] # instead of tuple's method
    name: list[str]


@dataclass(frozen=True)
class Row:
    """One line of a manifest.

    Attributes:
        audio: file, relative to the manifest; empty for text alone.
        text: transcript.
        start: where the utterance begins in the file, in seconds.
        duration: its length in seconds; None: to the end of the file.
        speaker: name of the speaker, for splits.
        lang: language code; kept, not used here.
        split: `train`, `val` or `test`; empty: by a hash of the text.
        answer: answer to a spoken question.
        answer_audio: file of the spoken answer.
        sample_rate: rate of the file in Hz, if it is to be checked.
        takes: rows whose audio, one after the other, is that of this one (see `Joining`); never in a file.
    """

    audio: str = ""
    text: str = ""
    start: float = 0.0
    duration: float | None = None
    speaker: str = ""
    lang: str = ""
    split: str = ""
    answer: str = ""
    answer_audio: str = ""
    sample_rate: int | None = None
    takes: tuple["Row", ...] = ()


# ------------------------------------------------------------------------------------------------- reading


SPLITS = {"train": "train", "val": "val", "validation": "val", "valid": "val", "dev": "val", "test": "test"}


def read_manifest(path: Path) -> list[Row]:
    """Rows of a JSONL manifest; audio files are relative to its folder. Unknown keys are left aside.

    Raises:
        ValueError: naming the file if it is no text, and every line that is not a JSON object with `audio` or `text`,
            or has a value of another type than `Row`'s.
    """
    return _rows(path, _json_lines(path))


def read_folder(path: Path) -> list[Row]:
    """Rows of a folder of audio in the layout of the Hugging Face `datasets` library (AudioFolder).

    `metadata.csv` or `metadata.jsonl`, at the top or in `train/`, `validation/` and `test/`, has `file_name`
    and `transcription` (or `text`), and may have any column of a manifest.

    Raises:
        FileNotFoundError: if there is no metadata file.
        ValueError: as for a manifest.
    """
    rows = []
    for folder, split in [(path, ""), *((path / name, s) for name, s in SPLITS.items())]:
        for name, lines in (("metadata.jsonl", _json_lines), ("metadata.csv", _csv_rows)):
            if (folder / name).is_file():
                rows += _rows(folder / name, lines(folder / name), split)
                break
    if not rows:
        raise FileNotFoundError(f"{path} has no metadata.csv or metadata.jsonl with file_name and transcription")
    return rows


def _json_lines(path: Path) -> list[tuple[str, Any]]:
    """Place and content of every line that is not empty; what is wrong with it where it is not JSON."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                found.append((f"line {number}", json.loads(line)))
            except ValueError as error:
                found.append((f"line {number}", error))
    return found


def _csv_rows(path: Path) -> list[tuple[str, Any]]:
    """The same of a CSV file, with numbers for `Row`'s numbers and without empty cells."""
    header, cells = read_csv(path)
    found = []
    for number, row in enumerate(cells, 1):
        values: dict[str, Any] = {key: value for key, value in zip(header, row, strict=True) if value}
        for key in values.keys() & {"start", "duration", "sample_rate"}:
            with suppress(ValueError):
                values[key] = int(values[key]) if key == "sample_rate" else float(values[key])
        found.append((f"row {number}", values))
    return found


def _rows(path: Path, lines: list[tuple[str, Any]], split: str | None = None) -> list[Row]:
    """Rows of a manifest, or with `split` (perhaps empty) of metadata."""
    rows, problems = [], []
    for place, values in lines:
        try:
            rows.append(_row(values, path.parent, split))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"{path}: {'; '.join(problems[:20])}{more}")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _row(values: Any, folder: Path, split: str | None) -> Row:
    if isinstance(values, ValueError):
        raise values
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    if split is not None:
        if not values.get("file_name"):
            raise ValueError(f"no file_name but {', '.join(values) or 'nothing'}")
        text = values.get("transcription")
        values = {**values, "audio": values["file_name"], "text": values.get("text") if text is None else text}
    known = set(Row.__dataclass_fields__) - {"takes"}
    own = {key: value for key, value in values.items() if key in known and value is not None}
    if type(own.get("speaker")) is int:  # 5 and "5" are one speaker, who may be held out
        own["speaker"] = str(own["speaker"])
    for key, value in own.items():
        if key in ("start", "duration", "sample_rate"):
            kinds, what = (int, "whole number") if key == "sample_rate" else ((int, float), "number")
            fits = isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < float("inf")
            if not fits or (value == 0 and key != "start"):
                raise ValueError(
                    f"{key} is {json.dumps(value)}, needed is a {what} {'>=' if key == 'start' else '>'} 0"
                )
        elif not isinstance(value, str):
            raise ValueError(f"{key} is {json.dumps(value)}, needed is a string")
    if own.get("split"):
        if own["split"] not in SPLITS:
            raise ValueError(f"split is {own['split']!r}, needed is one of {', '.join(SPLITS)}, or none")
        own["split"] = SPLITS[own["split"]]
    elif split:
        own["split"] = split
    if not (own.get("audio") or own.get("text")):
        raise ValueError("neither audio nor text")
    own |= {key: str(folder / own[key]) for key in ("audio", "answer_audio") if own.get(key)}
    return Row(**own)


def check_files(rows: list[Row]) -> list[float]:
    """Duration of every row in seconds (0 for text alone), after a look at each file's header.

    Raises:
        ValueError: naming every file that is missing, empty, not audio, at another rate than declared, or
            shorter than `start + duration`.
    """
    import soundfile

    headers: dict[str, tuple[int, int] | str] = {}
    seconds, problems = [], {}
    for row in rows:
        for path in filter(None, (row.audio, row.answer_audio)):
            if path not in headers:
                try:
                    info = soundfile.info(path)
                    headers[path] = (info.frames, info.samplerate) if info.frames else "it has no samples"
                except (soundfile.LibsndfileError, OSError) as error:
                    there = Path(path).is_file()
                    headers[path] = str(error).split(": ")[-1] if there else "there is no such file"
            if isinstance(headers[path], str):
                problems[path] = headers[path]
        header = headers.get(row.audio, (0, 1))
        if isinstance(header, str):
            continue
        frames, rate = header
        if row.audio and row.sample_rate and row.sample_rate != rate:
            problems[row.audio] = f"declared at {row.sample_rate} Hz, it has {rate} Hz"
        end = frames / rate if row.duration is None else row.start + row.duration
        if end > frames / rate + 1e-3 or (row.audio and end <= row.start):
            problems[row.audio] = f"{row.start} to {end:g} s is not inside its {frames / rate:.3f} s"
        seconds.append(end - row.start)
    if problems:
        listed = "; ".join(f"{path}: {reason}" for path, reason in problems.items())
        raise ValueError(f"{len(problems)} audio files cannot be used: {listed}")
    return seconds


def read_audio(path: str, rate: int, start: float = 0.0, duration: float | None = None) -> np.ndarray:
    """Mono float32 samples at `rate` Hz of a part of a file.

    Channels are averaged; other rates are resampled with soxr.

    Raises:
        ValueError: naming a file that cannot be decoded.
    """
    import soundfile
    import soxr

    try:
        with soundfile.SoundFile(path) as file:
            file.seek(round(start * file.samplerate))
            frames = -1 if duration is None else round(duration * file.samplerate)
            audio = file.read(frames, dtype="float32", always_2d=True).mean(1)
            native = file.samplerate
    except (soundfile.LibsndfileError, OSError) as error:
        raise ValueError(f"{path} cannot be decoded: {error}") from None
    return audio if native == rate else soxr.resample(audio, native, rate).astype(np.float32)


def with_validation(rows: list[Row], fraction: float) -> list[Row]:
    """Make a part of the training rows validation rows, where a source has declared splits but no validation.

    The part is chosen by a hash of the file's name and of the place in it.
    """
    if not any(row.split for row in rows) or any(row.split == "val" for row in rows):
        return rows

    def held_out(row: Row) -> bool:
        place = f"{Path(row.audio).name} {row.start}"
        return row.split == "train" and bool(row.audio) and zlib.crc32(place.encode()) / 2**32 < fraction

    return [replace(row, split="val") if held_out(row) else row for row in rows]


@dataclass
class Joining:
    """Utterances from recordings of single words: takes of one speaker and of one split, one after the other.

    Attributes:
        words: fewest and most takes in an utterance.
        train: number of training utterances; all splits share their utterances evenly among their speakers.
        val: number of validation utterances.
        test: number of test utterances.
        seed: of the draws (with replacement).
    """

    words: tuple[int, int] = (1, 5)
    train: int = 4000
    val: int = 300
    test: int = 500
    seed: int = 0


def join_takes(rows: list[Row], count: int, joining: Joining) -> list[Row]:
    """`count` utterances from single words of one split; the recipe fixes the draws, whatever else is random."""
    rng = np.random.default_rng([joining.seed, count])
    by_speaker = [[row for row in rows if row.speaker == speaker] for speaker in sorted({r.speaker for r in rows})]
    utterances = []
    for i in range(count if rows else 0):
        own = by_speaker[i % len(by_speaker)]
        takes = [own[j] for j in rng.integers(0, len(own), rng.integers(joining.words[0], joining.words[1] + 1))]
        name = "+".join([takes[0].audio, *(Path(take.audio).name for take in takes[1:])])
        text = " ".join(take.text for take in takes)
        utterances.append(replace(takes[0], audio=name, text=text, takes=tuple(takes)))
    return utterances


# ------------------------------------------------------------------------------------------- made on the spot


@dataclass
class MadeSpeech:
    """A spoken corpus of small vocabulary, made by espeak-ng.

    Where utterances may have several words, those of one are all trained on: there are few different ones, each spoken
    so often that one of them would outweigh all sentences of a test.

    Attributes:
        vocabulary: the words, drawn uniformly.
        words: fewest and most words in an utterance.
        utterances: how many in the training voices together.
        voices: voices of the training, validation and test utterances.
        unseen_utterances: how many more in other voices, for validation and test only.
        unseen_voices: those voices.
        seed: of words, speed (150 to 200 words per minute) and pitch (35 to 65).
    """

    vocabulary: list[str] = field(default_factory=lambda: list(DIGITS))
    words: tuple[int, int] = (1, 4)
    utterances: int = 3000
    voices: list[str] = field(default_factory=lambda: list(VOICES))
    unseen_utterances: int = 600
    unseen_voices: list[str] = field(default_factory=lambda: list(UNSEEN_VOICES))
    seed: int = 0


def check_recipe(recipe: MadeSpeech) -> None:
    """Refuse a corpus that cannot be made.

    Raises:
        ValueError: naming the setting.
    """
    check_ranges(1, **{"made.words": recipe.words})
    check_least(1, **{"made.utterances": recipe.utterances})
    check_least(0, **{"made.unseen_utterances": recipe.unseen_utterances})
    check_seeds(**{"made.seed": recipe.seed})
    for name in ("vocabulary", "voices") + ("unseen_voices",) * (recipe.unseen_utterances > 0):
        if not all(getattr(recipe, name) or [""]):
            raise ValueError(f"made.{name} is empty, or has an empty entry")


def make_speech(recipe: MadeSpeech, data_dir: Path, sample_rate: int) -> Path:
    """Make the corpus once: one WAV file per voice, and `manifest.jsonl` with the place of every utterance.

    It is written to a temporary folder and renamed, so that two processes leave one good copy.

    Returns:
        The manifest, in a folder named by a hash of the recipe.
    """
    import soundfile
    import soxr

    name = f"{zlib.crc32(json.dumps([asdict(recipe), sample_rate], sort_keys=True).encode()):08x}"
    folder = data_dir / "made_speech" / name
    if (folder / "manifest.jsonl").is_file():
        return folder / "manifest.jsonl"
    folder.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(recipe.seed)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        requests: list[tuple[str, str, int, int]] = []
        for voices, total in (
            (recipe.voices, recipe.utterances),
            (recipe.unseen_voices, recipe.unseen_utterances),
        ):
            for v, voice in enumerate(voices):
                for _ in range(v, total, len(voices)):
                    count = rng.integers(recipe.words[0], recipe.words[1] + 1)
                    text = " ".join(rng.choice(recipe.vocabulary, count))
                    requests.append((text, voice, int(rng.integers(150, 201)), int(rng.integers(35, 66))))
        native, spoken = speak_in_new_process(requests, "speech made by espeak-ng")
        rows: list[dict[str, Any]] = []
        for voice, group in groupby(zip(requests, spoken, strict=True), key=lambda pair: pair[0][1]):
            start, parts = 0, []
            for (text, *_), samples in group:
                audio = soxr.resample(samples.astype(np.float32) / 2**15, native, sample_rate)
                place = {"start": start / sample_rate, "duration": len(audio) / sample_rate}
                rows.append({"audio": f"audio/{voice}.wav", "text": text, **place, "speaker": voice, "lang": "en"})
                parts.append(audio)
                start += len(audio)
            file = Path(temporary) / "audio" / f"{voice}.wav"
            file.parent.mkdir(exist_ok=True)
            wav = io.BytesIO()  # soundfile itself would not say that the disk is full
            soundfile.write(wav, np.concatenate(parts), sample_rate, format="WAV", subtype="PCM_16")
            file.write_bytes(wav.getbuffer())
        (Path(temporary) / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            os.rename(temporary, folder)
            os.mkdir(temporary)  # for the context manager to remove
        except OSError:  # another process was faster
            if not (folder / "manifest.jsonl").is_file():
                raise
    return folder / "manifest.jsonl"


# ------------------------------------------------------------------------------------------------ batches


@dataclass
class Augmentation:
    """Changes to training audio that is listened to, fixed by seed, epoch and item; what is spoken stays clean.

    Attributes:
        speed: largest relative change of speed (and pitch), uniform in 1 ± speed.
        gain: largest change of level in dB, uniform in ± gain.
        noise: lowest and highest signal-to-noise ratio of white noise in dB, or None for no noise.
        shift: most samples of silence put in front.
    """

    speed: float = 0.1
    gain: float = 6.0
    noise: tuple[float, float] | None = (10.0, 40.0)
    shift: int = 640

    def __call__(self, audio: np.ndarray, numbers: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Change one utterance.

        Args:
            audio: float32 `[s]`.
            numbers: float `[4]`, uniform in [0, 1).
            rng: for the noise.
        """
        factor = 1 + self.speed * (2 * numbers[0] - 1)
        places = np.arange(0, len(audio) - 1, factor)
        audio = np.interp(places, np.arange(len(audio)), audio)
        audio = audio * 10 ** (self.gain * (2 * numbers[1] - 1) / 20)
        audio = np.concatenate([np.zeros(int(numbers[3] * (self.shift + 1))), audio])
        if self.noise is not None:
            ratio = self.noise[0] + numbers[2] * (self.noise[1] - self.noise[0])
            level = np.sqrt(np.mean(audio**2) + 1e-10) * 10 ** (-ratio / 20)
            audio = audio + level * rng.standard_normal(len(audio))
        return np.clip(audio, -1, 1).astype(np.float32)


def check_augmentation(augmentation: Augmentation) -> None:
    """Refuse changes that are none.

    Raises:
        ValueError: naming the setting.
    """
    if not 0 <= augmentation.speed < 1:
        raise ValueError(f"augmentation.speed {augmentation.speed} is outside [0, 1)")
    check_least(0, **{"augmentation.gain": augmentation.gain, "augmentation.shift": augmentation.shift})
    if augmentation.noise is not None:
        check_ranges(float("-inf"), **{"augmentation.noise": augmentation.noise})


class LengthBuckets(GlobalBatches):
    """Batches of utterances of similar length, in random order; a function of (seed, epoch) like its base.

    Args:
        seconds: length of every item.
        window: number of batches among which items are sorted by length.
        weights: how often every item comes in an epoch, on average, or None for once; their sum is the number of
            items. In each epoch an item of weight 2.3 comes two or three times. Its k-th repetition is handed out as
            item + k * number of items, so that choices made per item differ.
        kwargs: see `GlobalBatches`.
    """

    def __init__(self, seconds: np.ndarray, window: int, weights: np.ndarray | None = None, **kwargs: Any) -> None:
        super().__init__(len(seconds), **kwargs)
        self.seconds, self.window, self.weights = seconds, window, weights

    def __iter__(self) -> Iterator[Draw]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(self.size)
        if self.weights is not None:  # one pick in every interval of length 1 on the line of all weights
            order = order[np.argsort(self.weights[order], kind="stable")]  # so that sources get their shares exactly
            ends = self.weights[order].cumsum()
            picks = np.searchsorted(ends * (self.size / ends[-1]), rng.random() + np.arange(self.size), side="right")
            repetition = np.arange(self.size) - np.searchsorted(picks, picks)
            order = rng.permutation(order[picks] + self.size * repetition)
        order = order[: len(self) * self.batch_size]
        size = self.window * self.batch_size
        for i in range(0, len(order), size):
            part = order[i : i + size]
            order[i : i + size] = part[np.argsort(self.seconds[part % self.size], kind="stable")]
        batches = order.reshape(len(self), self.batch_size)[rng.permutation(len(self))]
        for batch in batches[self.start :]:
            yield Draw(self.epoch, batch[self.rank :: self.world_size])


class Split(Dataset[Utterances]):
    """The utterances of one split; `__getitems__` makes a whole batch."""

    def __init__(
        self,
        rows: list[Row],
        unseen: set[str],
        sample_rate: int,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.rows, self.unseen, self.sample_rate = rows, unseen, sample_rate
        self.augmentation, self.seed = augmentation, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, draw: Draw) -> Utterances:
        rows = [self.rows[i] for i in draw.items % len(self)]
        numbers = counter_uniform(self.seed, draw.epoch, draw.items, 5).numpy()
        clean, audio = [], []
        for item, row, own in zip(draw.items, rows, numbers, strict=True):
            if row.takes:
                takes = [_read_take(take.audio, self.sample_rate, take.start, take.duration) for take in row.takes]
                samples = np.concatenate(takes)
            else:
                samples = self._read(row.audio, row.start, row.duration)
            clean.append(samples)
            if self.augmentation is not None and len(samples):
                rng = np.random.default_rng([self.seed, draw.epoch, int(item)])
                samples = self.augmentation(samples, own[1:], rng)
            audio.append(samples)
        padded, length = pad(audio)
        clean_audio, clean_length = (None, None) if self.augmentation is None else pad(clean)
        answer_audio, answer_length = pad([self._read(row.answer_audio) for row in rows])
        return Utterances(
            audio=padded,
            length=length,
            clean_audio=clean_audio,
            clean_length=clean_length,
            text=[row.text for row in rows],
            answer=[row.answer for row in rows],
            answer_audio=answer_audio,
            answer_length=answer_length,
            speaker=[row.speaker for row in rows],
            unseen=torch.tensor([row.speaker in self.unseen for row in rows]),
            number=torch.from_numpy(numbers[:, 0].copy()),
            index=torch.from_numpy(draw.items % len(self)),
            name=[row.audio for row in rows],
        )

    def _read(self, path: str, start: float = 0.0, duration: float | None = None) -> np.ndarray:
        return read_audio(path, self.sample_rate, start, duration) if path else np.zeros(0, np.float32)


@lru_cache(maxsize=4096)
def _read_take(path: str, rate: int, start: float, duration: float | None) -> np.ndarray:
    """A recording of one word: short, and part of many utterances, so it is decoded once."""
    return read_audio(path, rate, start, duration)


def pad(audio: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Join utterances: float32 `[b, s]` with zeros at the right, and their lengths int64 `[b]`."""
    length = torch.tensor([len(a) for a in audio])
    padded = torch.zeros(len(audio), int(length.max()))
    for row, samples in zip(padded, audio, strict=True):
        row[: len(samples)] = torch.from_numpy(samples)
    return padded, length


class SpeechText(LightningDataModule):
    """Utterances with their transcripts.

    Rows without a `split` are split by a hash of their text: sentences of validation and test are never trained on.
    Where a source declares splits but no `val`, `val_fraction` of its training
    rows validate. Speakers of `unseen_speakers` are never trained on at all; batches tell which is which. Rows of text
    alone are only trained on.

    Args:
        source: `made` (a corpus made on the spot by espeak-ng, see `made`), a JSONL manifest (`audio`, `text`
            and, if there, `start`, `duration`, `speaker`, `lang`, `split`, `answer`, `answer_audio`,
            `sample_rate`), or a folder of audio with `metadata.csv` or `metadata.jsonl`.
        made: the recipe of the corpus made on the spot.
        more: further manifests or folders, or `made`, of which only the training rows are used.
        shares: part of the training rows of an epoch that comes from `source` and from each of `more`, in this order;
            rows are repeated or left out for it, others in every epoch. By default every row comes once.
        join: turn the single words of manifests and folders into utterances, or None to leave them as they are.
        data_dir: where made speech is kept.
        sample_rate: rate in Hz to which all audio is brought.
        batch_size: utterances per batch over all ranks together.
        val_fraction: part of the sentences that validates, in (0, 1).
        test_fraction: part of the sentences that tests, in (0, 1).
        unseen_speakers: speakers held out for validation and test; by default those of `made.unseen_voices`.
        bucket_batches: batches among which training utterances are sorted by length, so that little is padded; 1 does
            not sort (short runs learn faster from mixed batches).
        max_seconds: longest utterance; longer ones are refused by name, never cut.
        augmentation: changes to training audio, or None.
        seed: of the order and the augmentation.
        num_workers: processes that prepare batches.
        predict_source: for `predict`: a folder of audio (searched at every depth) to transcribe, or a `.txt`
            file whose lines are to be spoken; without it, the test split.

    Raises:
        ValueError: a number is out of range.
        FileNotFoundError: a source does not exist.
    """

    __str__ = describe

    def __init__(
        self,
        source: str = "made",
        made: MadeSpeech | None = None,
        more: list[str] | None = None,
        shares: list[float] | None = None,
        join: Joining | None = None,
        data_dir: str = "data",
        sample_rate: int = 16_000,
        batch_size: int = 16,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        unseen_speakers: list[str] | None = None,
        bucket_batches: int = 20,
        max_seconds: float = 30.0,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        num_workers: int = 0,
        predict_source: str | None = None,
    ) -> None:
        super().__init__()
        if not (0 < val_fraction < 1 and 0 < test_fraction < 1 and val_fraction + test_fraction < 1):
            raise ValueError(f"val_fraction {val_fraction} and test_fraction {test_fraction} leave nothing to train on")
        check_least(1, sample_rate=sample_rate, batch_size=batch_size, bucket_batches=bucket_batches)
        check_least(0, num_workers=num_workers, max_seconds=max_seconds)
        check_seeds(seed=seed)
        if made is not None:
            check_recipe(made)
        if join is not None:
            check_ranges(1, **{"join.words": join.words})
            check_least(1, **{f"join.{name}": getattr(join, name) for name in ("train", "val", "test")})
            check_seeds(**{"join.seed": join.seed})
        if augmentation is not None:
            check_augmentation(augmentation)
        self.source, self.made, self.more = source, made or MadeSpeech(), more or []
        if shares is not None and (len(shares) != 1 + len(self.more) or min(shares) < 0 or sum(shares) == 0):
            raise ValueError(f"shares {shares}: needed is one number >= 0 for source and each of more, not all 0")
        self.shares = shares
        if predict_source is None:
            self._check_sources()
        self.join = join
        self.data_dir, self.sample_rate, self.batch_size = Path(data_dir), sample_rate, batch_size
        self.val_fraction, self.test_fraction, self.max_seconds = val_fraction, test_fraction, max_seconds
        self.augmentation, self.seed, self.num_workers = augmentation, seed, num_workers
        self.bucket_batches = bucket_batches
        self.predict_source = predict_source
        made_unseen = self.made.unseen_voices if "made" in (source, *self.more) else []
        self.unseen = set(made_unseen if unseen_speakers is None else map(str, unseen_speakers))

    def _check_sources(self) -> None:
        for path in (self.source, *self.more):
            if path != "made" and not Path(path).exists():
                raise FileNotFoundError(f"speech source {path!r} is neither a manifest, nor a folder, nor 'made'")

    def prepare_data(self) -> None:
        """Make the speech if it is to be made and is not there; `predict` with a source of its own needs none."""
        if self.predict_source is not None and self.trainer is not None and self.trainer.predicting:
            return
        if "made" in (self.source, *self.more):
            make_speech(self.made, self.data_dir, self.sample_rate)

    def setup(self, stage: str | None = None) -> None:
        """Read the manifests, check every file, and split."""
        if stage == "predict" and self.predict_source is not None:
            return
        _ = self._weights

    @cached_property
    def _splits(self) -> dict[str, tuple[list[Row], np.ndarray, np.ndarray]]:
        """Rows, their lengths in seconds, and the names of their sources."""
        self._check_sources()
        rows: list[Row] = []
        origin: list[str] = []
        for name in (self.source, *self.more):
            path = make_speech(self.made, self.data_dir, self.sample_rate) if name == "made" else Path(name)
            own = read_folder(path) if path.is_dir() else read_manifest(path)
            rows += with_validation(own, self.val_fraction)
            origin += [name] * len(own)
        blank = [row.audio for row in rows if not row.text.strip() and not (row.audio and row.answer.strip())]
        if blank:
            names = ", ".join(name or "one without audio" for name in blank[:20])
            raise ValueError(f"{len(blank)} rows have neither a transcript nor an answer: {names}")
        seconds = np.array(check_files(rows))
        long = [f"{row.audio} ({s:.1f} s)" for row, s in zip(rows, seconds, strict=True) if s > self.max_seconds]
        if long:
            raise ValueError(f"longer than max_seconds {self.max_seconds:g}, cut them or raise it: {', '.join(long)}")
        where = np.array([self._split_of(row, name == "made") for row, name in zip(rows, origin, strict=True)])
        source = np.array(origin)
        splits = {}
        for name in ("train", "val", "test"):
            items = np.flatnonzero((where == name) & ((name == "train") | (source == self.source)))
            if not len(items):
                raise ValueError(f"no utterance is left for the {name} split of {self.source}")
            splits[name] = ([rows[i] for i in items], seconds[items], source[items])
            if self.join is not None:
                words = np.array([len(rows[i].text.split()) if rows[i].audio else 0 for i in items])
                single = (words == 1) & (source[items] != "made")
                splits[name] = self._joined(splits[name], single, getattr(self.join, name))
        return splits

    def _joined(
        self, split: tuple[list[Row], np.ndarray, np.ndarray], single: np.ndarray, count: int
    ) -> tuple[list[Row], np.ndarray, np.ndarray]:
        """A split in which utterances stand in place of the rows marked in `single`."""
        assert self.join is not None
        rows, seconds, source = split
        place = {rows[i]: i for i in np.flatnonzero(single)}
        utterances = join_takes(list(place), count, self.join)
        joined = [sum(seconds[place[take]] for take in row.takes) for row in utterances]
        origin = [source[place[row.takes[0]]] for row in utterances]
        kept = [rows[i] for i in np.flatnonzero(~single)]
        return kept + utterances, np.append(seconds[~single], joined), np.append(source[~single], origin)

    @cached_property
    def _weights(self) -> np.ndarray | None:
        """How often every training row comes in an epoch, on average; None for once."""
        _, _, source = self._splits["train"]
        if self.shares is None:
            return None
        weights = np.zeros(len(source))
        for name, share in zip((self.source, *self.more), self.shares, strict=True):
            own = source == name
            if share > 0 and not own.any():
                raise ValueError(f"shares has {share:g} for {name}, which has no training rows")
            weights[own] = share / sum(self.shares) * len(source) / max(own.sum(), 1)
        return weights

    def _split_of(self, row: Row, made: bool) -> str:
        """`train`, `val`, `test`, or nothing for training sentences of unseen speakers.

        Rows without audio or without a transcript cannot be scored, and are trained on.
        """
        if not (row.audio and row.text):
            return "" if row.speaker in self.unseen else "train"
        part = zlib.crc32(row.text.encode()) / 2**32
        if made and self.made.words[1] > 1 and " " not in row.text:  # see `MadeSpeech`
            part = 1.0
        by_text = "test" if part < self.test_fraction else "val"
        if row.speaker in self.unseen:
            if row.split:
                return row.split if row.split != "train" else ""
            return by_text if part < self._held_out else ""
        return row.split or (by_text if part < self._held_out else "train")

    @property
    def _held_out(self) -> float:
        return self.test_fraction + self.val_fraction

    def split(self, name: str, *, augment: bool = False) -> Split:
        """The `train`, `val` or `test` utterances; only `augment=True` changes them from epoch to epoch."""
        changes = self.augmentation if augment else None
        return Split(self._splits[name][0], self.unseen, self.sample_rate, changes, self.seed)

    def _in_order(self, split: Split) -> Loader:
        order = GlobalBatches(len(split), self.batch_size, shuffle=False, drop_last=False, **ranks(self))
        return Loader(split, order, num_workers=self.num_workers)

    def train_dataloader(self) -> Loader:
        """Shuffled, bucketed by length, augmented, whole batches only."""
        order = LengthBuckets(
            self._splits["train"][1],
            self.bucket_batches,
            self._weights,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            seed=self.seed,
            **ranks(self),
        )
        pin = torch.cuda.is_available()
        return Loader(self.split("train", augment=True), order, num_workers=self.num_workers, pin_memory=pin)

    def calibration_dataloader(self) -> Loader:
        """Training utterances in a fixed random order, not augmented, the same batches on every rank."""
        split = self.split("train")
        size = min(self.batch_size, len(split))
        return Loader(split, GlobalBatches(len(split), size, shuffle=True, drop_last=True, seed=self.seed))

    def val_dataloader(self) -> Loader:
        """Validation utterances: unseen sentences, of speakers seen and unseen in training."""
        return self._in_order(self.split("val"))

    def test_dataloader(self) -> Loader:
        """Test utterances: unseen sentences, of speakers seen and unseen in training."""
        return self._in_order(self.split("test"))

    def predict_dataloader(self) -> Loader:
        """The audio or the text of `predict_source`, or the test utterances."""
        if self.predict_source is None:
            return self.test_dataloader()
        path = Path(self.predict_source)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix.lower() in AUDIO_ENDINGS)
            rows = [Row(audio=str(p)) for p in files]
            check_files(rows)
        elif path.suffix.lower() == ".txt" and path.is_file():
            rows = [Row(text=line.strip()) for line in read_text(path).splitlines() if line.strip()]
        else:
            raise FileNotFoundError(f"predict_source {path} is neither a folder of audio nor a .txt file")
        if not rows:
            raise ValueError(f"{path} has no audio files ({', '.join(AUDIO_ENDINGS)}) and no lines of text")
        return self._in_order(Split(rows, self.unseen, self.sample_rate))
