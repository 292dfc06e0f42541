import shlex
from pathlib import Path

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from callbacks.run_folder import MetricsCsv, _near


@pytest.mark.parametrize("variables", [{"SLURM_LOCALID": "1", "SLURM_PROCID": "1"}, {"LOCAL_RANK": "0", "RANK": "8"}])
def test_only_the_first_rank_of_all_nodes_makes_the_folder(tmp_path, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", int(variables.get("RANK") or variables["SLURM_PROCID"]))
    _ = MetricsCsv(str(tmp_path / "other")).experiment  # as the trainer does on every rank
    assert not (tmp_path / "other").exists()
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    _ = MetricsCsv(str(tmp_path / "first")).experiment
    assert (tmp_path / "first").is_dir()


def test_a_printed_path_is_one_word_for_the_shell(tmp_path):
    for path in (tmp_path / "my runs" / "last.ckpt", Path("/elsewhere/it's here"), tmp_path / "plain"):
        assert len(shlex.split(_near(path))) == 1
    assert _near(tmp_path / "plain") == "plain"
