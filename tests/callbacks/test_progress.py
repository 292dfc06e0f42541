from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from callbacks.progress import progress


@pytest.mark.parametrize(
    ("bar", "rank", "shown"),
    [
        (TQDMProgressBar(), 0, True),
        (TQDMProgressBar(), 1, False),
        (TQDMProgressBar(refresh_rate=0), 0, False),
        (RichProgressBar(refresh_rate=0), 0, False),
        (None, 0, False),
    ],
)
def test_a_bar_where_the_trainer_shows_one(bar, rank, shown, capsys):
    trainer = SimpleNamespace(progress_bar_callback=bar, is_global_zero=rank == 0)
    with progress(trainer, "test: reach, 3 episodes in the simulator", 2) as steps:
        steps.update()
    out = capsys.readouterr()
    assert out.out == ""
    assert ("test: reach, 3 episodes in the simulator" in out.err) == shown
