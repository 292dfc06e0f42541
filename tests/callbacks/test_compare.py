"""Several runs in one picture."""

from pathlib import Path

import pytest
import yaml

from callbacks.compare import differences, main, read_metric


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """Two runs that differ in their strategy and its arguments, and one without a config."""
    settings = [{"strategy": "FedAvg", "strategy_args": None}, {"strategy": "FPL", "strategy_args": {"tau": 0.1}}, None]
    for number, setting in enumerate(settings):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        if setting:
            config = {"model": {"init_args": {**setting, "num_classes": 10}}, "trainer": {"max_epochs": number}}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [f"{step},{step},{value},\n{step},{step},,{step / 10}\n" for step, value in enumerate((2.0, 1.0))]
        (folder / "metrics.csv").write_text("epoch,step,train/loss,val/accuracy\n" + "".join(rows))
    return [tmp_path / f"run{number}" for number in range(3)]


def test_reads_draws_and_names_what_differs(runs, tmp_path, capsys):
    assert read_metric(runs[0], "val/accuracy") == ([0, 1], [0.0, 0.1])
    assert differences(runs[:2]) == ["strategy=FedAvg", "strategy=FPL, tau=0.1"]
    assert differences([runs[0], runs[0]]) == ["run0", "run0"]
    picture = tmp_path / "both.png"
    main([*map(str, runs), "--metric", "train/loss", "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and capsys.readouterr().out.strip() == str(picture)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run0", "nowhere"], "nowhere has no metrics.csv: name the folder of a run"),
        (["run0", "--metric", "val/f1"], "has no val/f1; it has epoch, step, train/loss, val/accuracy"),
        (["run0", "--picture", "a.doc"], "'doc' is not supported"),
    ],
)
def test_refuses_in_one_line(runs, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
