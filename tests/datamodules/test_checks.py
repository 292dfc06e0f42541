"""Numbers and files that no data module can use are named, in one line, before anything is made."""

import sys
import time

import numpy as np
import pytest

from datamodules import (
    ExpertVideos,
    FederatedImages,
    GraphPrior,
    ImageClassification,
    NodeClassification,
    RobotDemonstrations,
    SpeechText,
)
from datamodules.checks import check_least, check_ranges, read_csv, read_npz, read_text
from datamodules.metaworld import Observation
from datamodules.progress import progress
from datamodules.speech import Augmentation, Joining, MadeSpeech

EVERY = [
    ImageClassification,
    FederatedImages,
    NodeClassification,
    GraphPrior,
    SpeechText,
    RobotDemonstrations,
    ExpertVideos,
]
NUMBERS = [
    *((data, {"seed": seed}, f"seed {seed} is outside") for data in EVERY for seed in (-1, 2**32)),
    *(
        (data, {"batch_size": 0}, "batch_size 0 must be")
        for data in EVERY
        if data.__name__ not in ("FederatedImages", "NodeClassification")
    ),
    (ImageClassification, {"train_size": -5}, "train_size -5"),
    (ImageClassification, {"std": [0.0]}, r"std \[0.0\] must be finite and above 0"),
    (ImageClassification, {"std": [float("nan")]}, "std"),
    (ImageClassification, {"mean": [float("inf")]}, "mean"),
    (ImageClassification, {"mean": []}, r"mean \[\] needs one number for each of the 1 channels"),
    (ImageClassification, {"std": [1.0, 1.0]}, "1 channels"),
    (ImageClassification, {"source": "cifar10", "mean": [0.5]}, "3 channels"),
    (ImageClassification, {"channels": 2}, "channels is 2"),
    (ImageClassification, {"image_size": 0}, "image_size 0"),
    (ImageClassification, {"num_workers": -1}, "num_workers -1"),
    (FederatedImages, {"clients": -3}, "clients -3"),
    (FederatedImages, {"images_per_client": -1}, "images_per_client -1"),
    (FederatedImages, {"alpha": -0.5}, "alpha is -0.5"),
    (FederatedImages, {"participation": -0.5}, "participation -0.5"),
    (FederatedImages, {"std": [-1.0]}, "above 0"),
    (FederatedImages, {"class_names": ["cat", "cat"]}, "none twice"),
    (FederatedImages, {"partition": "domain"}, "cannot deal 1 sources"),
    (NodeClassification, {"components": 0}, "components 0"),
    (NodeClassification, {"structure": -2}, "structure -2"),
    (NodeClassification, {"split_index": -1}, "split_index -1"),
    (NodeClassification, {"labels_per_class": 0}, "labels_per_class 0"),
    (NodeClassification, {"steps_per_epoch": 0}, "steps_per_epoch 0"),
    (GraphPrior, {"graphs_per_epoch": 0}, "graphs_per_epoch 0"),
    (GraphPrior, {"validation_graphs": 0}, "validation_graphs 0"),
    (SpeechText, {"made": MadeSpeech(words=(4, 1))}, r"made.words \[4, 1\]: the lower number comes first"),
    (SpeechText, {"made": MadeSpeech(words=(0, 1))}, "made.words .* must begin at 1"),
    (SpeechText, {"made": MadeSpeech(vocabulary=[])}, "made.vocabulary is empty"),
    (SpeechText, {"made": MadeSpeech(unseen_voices=[])}, "made.unseen_voices is empty"),
    (SpeechText, {"made": MadeSpeech(utterances=0)}, "made.utterances 0"),
    (SpeechText, {"join": Joining(words=(5, 1))}, r"join.words \[5, 1\]"),
    (SpeechText, {"join": Joining(val=0)}, "join.val 0"),
    (SpeechText, {"augmentation": Augmentation(noise=(40, 10))}, r"augmentation.noise \[40, 10\]"),
    (SpeechText, {"augmentation": Augmentation(speed=1)}, "augmentation.speed 1"),
    (SpeechText, {"sample_rate": 0}, "sample_rate 0"),
    (SpeechText, {"bucket_batches": 0}, "bucket_batches 0"),
    (RobotDemonstrations, {"episodes": 0}, "episodes 0"),
    (RobotDemonstrations, {"tail": -1}, "tail -1"),
    (RobotDemonstrations, {"horizon": 2, "history": 3}, "horizon 2 is less than the history"),
    (RobotDemonstrations, {"max_train_episodes": 0}, "max_train_episodes 0"),
    (RobotDemonstrations, {"processes": 0}, "processes 0"),
    (ExpertVideos, {"size": 0}, "size 0"),
    (ExpertVideos, {"vocabulary": 1}, "vocabulary 1 must be at least 2"),
    (ExpertVideos, {"eval_every": 0}, "eval_every 0"),
    (ExpertVideos, {"eval_batch_size": 0}, "eval_batch_size 0"),
    (ExpertVideos, {"val_fraction": float("nan")}, "val_fraction nan"),
    (Observation, {"points": -1}, "points -1"),
    (Observation, {"state": "none"}, "nothing is observed"),
    (Observation, {"crop": ((0, 0, 1), (1, 1, 1))}, "crop goes from 1 to 1 along z"),
]


@pytest.mark.parametrize(("data", "options", "message"), NUMBERS)
def test_numbers_out_of_range_are_refused_at_construction(data, options, message):
    with pytest.raises(ValueError, match=message):
        data(**options)


def test_what_is_left_open_passes():
    check_least(1, a=None, b=1, c=2.5)
    check_ranges(1, a=(1, 1), b=(2, 7))
    with pytest.raises(ValueError, match="c nan"):
        check_least(1, c=float("nan"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,é\n".encode("latin-1"), r"not text in UTF-8 \(byte 6\): save it as UTF-8"),
        (b"a,b\n1\n", "line 2: 1 cells, the header has 2"),
        (b"a,a\n1,2\n", "the column 'a' more than once"),
        (b"", "has no rows"),
        (b"a,b\n\n", "has no rows"),
        (b'a,b\n"' + b"x" * 200_000 + b'",1\n', "line 2: field larger"),
    ],
)
def test_a_table_that_cannot_be_read(content, message, tmp_path):
    (tmp_path / "mine.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_csv(tmp_path / "mine.csv")
    assert "mine.csv" in str(error.value)


def test_tables_as_spreadsheets_write_them(tmp_path):
    (tmp_path / "t.csv").write_bytes('a,b\r\n1,"x\ny"\r\n\r\n2,é\r\n'.encode("utf-8-sig"))
    assert read_csv(tmp_path / "t.csv") == (["a", "b"], [["1", "x\ny"], ["2", "é"]])
    assert read_text(tmp_path / "t.csv").startswith("a,b")


def test_half_an_archive(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(1000))
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"a\.npz cannot be read as \.npz"):
        read_npz(tmp_path / "a.npz")


def test_a_bar_says_what_is_done_after_a_second_and_on_the_first_rank_alone(capsys, monkeypatch):
    from lightning.pytorch.utilities import rank_zero_only

    with progress("quick", 3) as bar:
        bar.update(3)
    assert capsys.readouterr().err == "", "what takes no time shows nothing"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("slow work", 3) as bar:
        time.sleep(1.1)
        bar.update(3)
    text = capsys.readouterr()
    assert "slow work: 100%" in text.err
    assert text.out == ""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert progress("slow work", 3).disable
