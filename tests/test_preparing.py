"""Two processes that prepare the same data at once leave one good copy and nothing else."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule


def videos(home: Path, data_dir: Path) -> LightningDataModule:
    from datamodules import ExpertVideos
    from tests.dyn_vpp.toys import DATA, write_folder

    return ExpertVideos(str(write_folder(home / "clips", 6)), data_dir=str(data_dir), **DATA)


def speech(home: Path, data_dir: Path) -> LightningDataModule:
    from datamodules import SpeechText
    from datamodules.speech import MadeSpeech

    recipe = MadeSpeech(utterances=60, words=(1, 2), unseen_utterances=20)
    return SpeechText("made", made=recipe, data_dir=str(data_dir), batch_size=2)


def demonstrations(home: Path, data_dir: Path) -> LightningDataModule:
    from datamodules import RobotDemonstrations

    return RobotDemonstrations("metaworld", tasks=["reach-v3"], episodes=2, data_dir=str(data_dir), batch_size=2)


SLOW = pytest.param(demonstrations, marks=pytest.mark.long)


@pytest.mark.parametrize("make", [videos, speech, SLOW], ids=lambda f: f.__name__)
def test_two_processes_prepare_at_once(make, tmp_path):
    fork = multiprocessing.get_context("fork")
    alone, together = make(tmp_path, tmp_path / "alone"), make(tmp_path, tmp_path / "together")
    gate = fork.Barrier(2)

    def prepare() -> None:
        torch.set_num_threads(1)
        gate.wait()
        together.prepare_data()

    processes = [fork.Process(target=prepare) for _ in range(2)]
    for process in processes:
        process.start()
    alone.prepare_data()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]
    names = [sorted(p.relative_to(f) for f in [tmp_path / n] for p in f.rglob("*")) for n in ("alone", "together")]
    assert names[0] == names[1], "a temporary file is left"
    assert names[0]
    for data in (alone, together):
        data.setup("fit")
        assert len(next(iter(data.train_dataloader())).index) == data.batch_size
