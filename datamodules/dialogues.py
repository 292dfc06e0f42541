"""Spoken question-answer data from written dialogues: `python -m datamodules.dialogues DIALOGUES.jsonl FOLDER`.

Each line of the input is `{"messages": [{"role": "user" | "assistant" | "system", "content": "..."}, ...]}`, the
format of most instruction data. Every user turn with the assistant turn behind it becomes one row of a manifest that
`SpeechText` reads: `audio` and `text` of the question, `answer` and `answer_audio`. MoST's authors let a speech model
speak their dialogues; here espeak-ng does (extra `speech`), with one voice for each role. Dialogues that hold code
cannot be read aloud; they are left out and counted, as in the authors' script.
"""

import argparse
import io
import json
import os
import re
import sys
import tempfile
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np

from datamodules.checks import read_text
from datamodules.espeak import speak_in_new_process

CODE = re.compile(r"```|\bdef \w+\(|\bimport \w+|#include|</\w+>|\\begin\{|;\s*$", re.MULTILINE)


def read_dialogues(path: Path) -> tuple[list[list[tuple[str, str]]], int]:
    """Question-answer pairs of every dialogue that can be spoken, and the number of dialogues that cannot.

    Raises:
        ValueError: naming the file if it is no text, and the lines that are no dialogue.
    """
    dialogues, skipped, problems = [], 0, []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            turns = [(m["role"], " ".join(m["content"].split())) for m in json.loads(line)["messages"]]
            raw = "\n".join(m["content"] for m in json.loads(line)["messages"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"line {number}: {type(error).__name__} {error}")
            continue
        if CODE.search(raw):
            skipped += 1
            continue
        pairs = [(q, a) for (r, q), (s, a) in pairwise(turns) if (r, s) == ("user", "assistant")]
        dialogues.append([(q, a) for q, a in pairs if q and a])
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return dialogues, skipped


def speak_dialogues(
    source: Path,
    folder: Path,
    user_voice: str = "en-us+f3",
    assistant_voice: str = "en-us+m3",
    sample_rate: int = 16_000,
) -> tuple[Path, int, int]:
    """Write audio and a manifest; all turns of a dialogue are in the same split.

    Args:
        source: JSONL of dialogues.
        folder: where `manifest.jsonl` and `audio/` go.
        user_voice: espeak-ng's name of the voice of questions.
        assistant_voice: of answers.
        sample_rate: of the audio in Hz.

    Returns:
        The manifest, the number of rows in it, and the number of dialogues left out.

    Raises:
        ValueError: if no dialogue can be spoken.
        OSError: if the disk is full; nothing is left then.
    """
    import soundfile
    import soxr

    dialogues, skipped = read_dialogues(source)
    pairs = [(i, j, q, a) for i, dialogue in enumerate(dialogues) for j, (q, a) in enumerate(dialogue)]
    if not pairs:
        raise ValueError(f"{source} has no dialogue that can be spoken ({skipped} hold code)")
    requests = [(text, voice, 175, 50) for *_, q, a in pairs for text, voice in ((q, user_voice), (a, assistant_voice))]
    native, spoken = speak_in_new_process(requests, "dialogues")
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    lines = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as work:
        for n, (i, j, question, answer) in enumerate(pairs):
            row = {"text": question, "answer": answer, "speaker": user_voice, "lang": "en"}
            for key, samples in (("audio", spoken[2 * n]), ("answer_audio", spoken[2 * n + 1])):
                row[key] = f"audio/{i:06d}_{j}_{key}.flac"
                audio = soxr.resample(samples.astype(np.float32) / 2**15, native, sample_rate)
                flac = io.BytesIO()  # soundfile itself would not say that the disk is full
                soundfile.write(flac, audio, sample_rate, format="FLAC")
                (Path(work) / Path(row[key]).name).write_bytes(flac.getbuffer())
            part = zlib.crc32(dialogues[i][0][0].encode()) / 2**32
            row["split"] = "test" if part < 0.05 else "val" if part < 0.1 else "train"
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        (Path(work) / "manifest.jsonl").write_text("".join(lines), encoding="utf-8")
        for file in sorted(Path(work).iterdir()):  # the manifest last
            os.replace(file, folder / ("audio" if file.suffix == ".flac" else "") / file.name)
    return folder / "manifest.jsonl", len(lines), skipped


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Speak written dialogues into a manifest for SpeechText.")
    parser.add_argument("dialogues", type=Path, help='JSONL with {"messages": [{"role": ..., "content": ...}, ...]}')
    parser.add_argument("folder", type=Path, help="where the manifest and the audio go")
    parser.add_argument("--user-voice", default="en-us+f3")
    parser.add_argument("--assistant-voice", default="en-us+m3")
    options = parser.parse_args()
    try:
        manifest, rows, skipped = speak_dialogues(
            options.dialogues, options.folder, options.user_voice, options.assistant_voice
        )
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"dialogues: {' '.join(str(error).split())}")
    sys.stdout.write(f"{manifest}: {rows} spoken questions; {skipped} dialogues with code were left out\n")


if __name__ == "__main__":
    main()
