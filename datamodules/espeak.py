"""espeak-ng through ctypes, from the library that the package `espeakng-loader` ships.

That package is GPL-3.0, so it is an optional extra and is imported only when something is to be spoken.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.progress import progress

_RATE, _PITCH, _UTF8, _SYNCHRONOUS = 1, 3, 1, 2  # of espeak-ng's speak_lib.h

Request = tuple[str, str, int, int]


def speak_in_new_process(requests: Sequence[Request], what: str = "speaking") -> tuple[int, list[np.ndarray]]:
    """Speak texts one after the other, in a process of their own.

    espeak-ng carries hidden state from one text to the next, so only a new process makes the same sound every time.

    Args:
        requests: text, voice (espeak-ng's name, a variant after a plus: `en-us+f3`), words per minute (80 to 450)
            and pitch (0 to 100) of each.
        what: is shown beside the progress.

    Returns:
        The rate in Hz, and int16 samples of each request.

    Raises:
        ImportError: if espeakng-loader is not installed.
        ValueError: if a voice does not exist.
    """
    context = get_context("spawn")
    done = context.Value("i", 0)
    with (
        progress(what, len(requests)) as bar,
        ProcessPoolExecutor(1, context, initializer=_count_in, initargs=(done,)) as pool,
    ):
        job = pool.submit(speak, list(requests))
        while not wait([job], timeout=0.2).done:
            bar.update(done.value - bar.n)
        spoken = job.result()
        bar.update(len(requests) - bar.n)
    return spoken


_done: Any = None  # in the process that speaks: how many requests are done, for the one that waits


def _count_in(done: Any) -> None:
    global _done
    _done = done


def speak(requests: Sequence[Request]) -> tuple[int, list[np.ndarray]]:
    """The same in this process."""
    try:
        import espeakng_loader
    except ImportError:
        raise ImportError(
            "speech made on the spot needs espeak-ng: pip install 'fulgurite[speech]', or give a manifest as source"
        ) from None
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    data = str(Path(espeakng_loader.get_data_path()).parent).encode()
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
    chunks: list[bytes] = []

    def keep(samples: Any, count: int, _events: Any) -> int:
        if samples and count > 0:
            chunks.append(ctypes.string_at(samples, 2 * count))
        return 0

    # kept in a variable: the library holds only its address
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)(keep)
    library.espeak_SetSynthCallback(callback)
    spoken = []
    for text, voice, words_per_minute, pitch in requests:
        library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # else the breath of some voices comes from the time of day
        if library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice!r}; en-us, en-us+f3 and en-us+m7 are some it has")
        library.espeak_SetParameter(_RATE, words_per_minute, 0)
        library.espeak_SetParameter(_PITCH, pitch, 0)
        chunks.clear()
        raw = text.encode()
        library.espeak_Synth(raw, len(raw) + 1, 0, 0, 0, _UTF8, None, None)
        library.espeak_Synchronize()
        spoken.append(np.frombuffer(b"".join(chunks), np.int16))
        if _done is not None:
            _done.value = len(spoken)
    return rate, spoken
