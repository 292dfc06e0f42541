import io
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from callbacks.progress import progress

WHAT = "test: reach, 3 episodes in the simulator"


@pytest.mark.parametrize(
    ("bar", "rank", "shown"),
    [
        (TQDMProgressBar(), 0, True),
        (TQDMProgressBar(), 1, False),
        (TQDMProgressBar(refresh_rate=0), 0, False),
        (None, 0, False),
    ],
)
def test_a_bar_where_the_trainer_shows_one(bar, rank, shown, capsys):
    trainer = SimpleNamespace(progress_bar_callback=bar, is_global_zero=rank == 0)
    with progress(trainer, WHAT, 2) as steps:
        steps.update()
    out = capsys.readouterr()
    assert out.out == ""
    assert (WHAT in out.err) == shown


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_in_the_display_of_rich(terminal, capsys):
    """Which would swallow another bar in a terminal, and shows nothing in a log until it ends."""
    pytest.importorskip("rich")
    from rich.console import Console
    from rich.progress import Progress

    bar, screen = RichProgressBar(), io.StringIO()
    bar.progress = Progress(console=Console(file=screen, force_terminal=terminal, width=100))
    trainer = SimpleNamespace(progress_bar_callback=bar, is_global_zero=True)
    with bar.progress:
        with progress(trainer, WHAT, 4) as steps:
            steps.update()
            steps.set_description("val: push")
        assert not bar.progress.tasks, "the line goes when the work is done"
    assert all((text in screen.getvalue()) == terminal for text in (WHAT, "25%", "val: push"))
    assert (WHAT in capsys.readouterr().err) != terminal
    with progress(trainer, WHAT, 4):  # Rich's display has ended
        pass
    assert WHAT in capsys.readouterr().err
