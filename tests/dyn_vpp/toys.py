"""Small videos: a bright square that moves to the right or down, as its caption says."""

import csv
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

UNET = {
    "sample_size": 4,
    "block_out_channels": [32, 32],
    "num_attention_heads": [2, 2],
    "cross_attention_dim": 16,
    "num_frames": 4,
}
AUTOENCODER = {
    "block_out_channels": [32, 32],
    "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D"],
    "sample_size": 16,
}
DATA = {"frames": 4, "stride": 2, "every": 2, "size": 16, "batch_size": 4, "tokens": 4, "vocabulary": 64}


def video(number: int, length: int = 12, size: int = 20) -> np.ndarray:
    frames = np.full((length, size, size, 3), 40, dtype=np.uint8)
    for t in range(length):
        place = (number + t) % (size - 6)
        y, x = (place, 4) if number % 2 else (4, place)
        frames[t, y : y + 6, x : x + 6] = (230, 60 + 10 * number, 30)
    return frames


def write_folder(folder: Path, videos: int = 8, length: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "captions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "caption"])
        for i in range(videos):
            imageio.imwrite(folder / f"{i}.gif", video(i, length), loop=0)
            table.writerow([f"{i}.gif", f"move {'down' if i % 2 else 'right'}"])
    return folder
