"""What a user can get wrong at the command line is answered in one line."""

import pytest

from tests.focal_policy.test_robots import episodes, write_hdf5
from tests.focal_policy.toys import recording
from tests.helpers import refusal, run

QUIET = ("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.horizon", "10"], "horizon 10 is not divisible by 4"),
        (["--model.action_steps", "12"], "the executed slice ends at step 13"),
        (["--data.source", "nothing.hdf5"], "nothing.hdf5"),
        (["--data.horizon", "16"], "data.horizon is 16, model.horizon is 12"),
        (["--model.image_crop", "76"], "model.image_crop is 76 and the demonstrations have no image"),
        (["--model.freq_mode", "dct_band"], "12 numbers of at least 0 in band_weights"),
    ],
)
def test_refused(options, message, tmp_path, capsys):
    source = ["--data.source", str(recording(tmp_path))]
    assert message in refusal(["fit", "-c", "focal_policy/recordings", *source, *options, *QUIET], capsys)


def test_bad_recordings_and_missing_simulators_are_refused(tmp_path, capsys):
    data = episodes()
    data[3][0][7, 2] = float("nan")
    bad = ["--data.source", str(write_hdf5(tmp_path / "nan.hdf5", data))]
    line = refusal(["fit", "-c", "focal_policy/recordings", *bad, *QUIET], capsys)
    assert "state of demo_3 is not finite in frame 7" in line
    source = ["--data.source", str(recording(tmp_path))]
    line = refusal(["fit", "-c", "focal_policy/metaworld", *source, *QUIET], capsys)
    assert "has no simulator: remove callbacks.Rollouts" in line
    line = refusal(["fit", "-c", "focal_policy/metaworld", "--data.tasks", '["door-opne-v3"]', *QUIET], capsys)
    assert "did you mean door-open-v3" in line


def test_recordings_are_fitted_tested_and_predicted(tmp_path):
    source = ["--data.source", str(recording(tmp_path)), "--model.widths", "[8, 16, 16]"]
    smoke = ["-c", "trainer/smoke", *QUIET, "--trainer.accelerator", "cpu"]
    folder = run(["fit", "-c", "focal_policy/recordings", *source, *smoke], tmp_path / "runs")
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    again = ["-c", str(folder / "config.yaml"), "--ckpt_path", str(folder / "checkpoints" / "last.ckpt")]
    run(["test", *again], tmp_path / "runs")
    run(["predict", *again], tmp_path / "runs")
    assert (folder / "test_metrics.json").is_file() and (folder / "predictions.csv").is_file()
