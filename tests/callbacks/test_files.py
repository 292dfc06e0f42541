"""A file is whole, or not there; a table is a CSV file and W&B's."""

import csv
import errno
import resource
from types import SimpleNamespace

import pytest
import torch

from callbacks.figures import log_table
from callbacks.files import whole_file
from callbacks.predictions import PredictionWriter
from callbacks.video_grid import VideoGrid


def test_a_full_disk_leaves_no_half_of_the_predictions(tmp_path):
    rows = {"label": torch.arange(5000)}
    PredictionWriter._write(tmp_path / "predictions.csv", {"label": torch.arange(3)}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError) as failed:
            PredictionWriter._write(tmp_path / "predictions.csv", rows, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failed.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["predictions.csv"]
    assert (tmp_path / "predictions.csv").read_text().split() == ["label", "0", "1", "2"], "the old one stays"


def test_an_interruption_leaves_no_half_of_a_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "new" / "a.json") as unfinished:
        unfinished.write_text("{")
        raise KeyboardInterrupt
    assert not list((tmp_path / "new").iterdir())


def test_a_table_goes_to_its_file_and_to_loggers_that_show_tables(tmp_path):
    seen = {}
    loggers = [SimpleNamespace(log_table=lambda **table: seen.update(table)), SimpleNamespace()]
    run = SimpleNamespace(is_global_zero=True, fast_dev_run=0, default_root_dir=str(tmp_path), loggers=loggers)
    rows = [{"task": "reach", "success": True, "jerk": 0.5}, {"task": "a, b", "success": False, "jerk": None}]
    path = log_table(run, "episodes", rows)
    assert seen == {
        "key": "episodes",
        "columns": ["task", "success", "jerk"],
        "data": [["reach", True, 0.5], ["a, b", False, None]],
    }
    assert path == tmp_path / "episodes.csv"
    with path.open() as file:
        assert list(csv.reader(file)) == [["task", "success", "jerk"], ["reach", "True", "0.5"], ["a, b", "False", ""]]
    other_rank, rehearsal = (SimpleNamespace(**vars(run) | x) for x in ({"is_global_zero": False}, {"fast_dev_run": 1}))
    assert log_table(other_rank, "b", rows) is log_table(rehearsal, "b", rows) is log_table(run, "b", []) is None
    assert [p.name for p in tmp_path.iterdir()] == ["episodes.csv"]


def test_frames_of_predicted_videos(tmp_path):
    logged = {"test/l1_frame_0": 0.25, "test/cosine_frame_0": 1.0, "test/l1_frame_1": 0.5, "test/cosine_frame_1": 0.75}
    run = SimpleNamespace(is_global_zero=True, fast_dev_run=0, default_root_dir=str(tmp_path), loggers=[])
    run.callback_metrics = {name: torch.tensor(value) for name, value in logged.items()}
    VideoGrid().on_test_end(run, None)
    lines = (tmp_path / "test_frames.csv").read_text().split()
    assert lines == ["frame,l1,cosine,reward", "0,0.25,1.0,0.75", "1,0.5,0.75,0.25"]
