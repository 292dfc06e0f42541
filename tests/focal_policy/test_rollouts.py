import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule

from callbacks import Rollouts
from callbacks.rollouts import Rollout, chunk_figure, episode_metrics, summary
from datamodules.metaworld import Step
from tests.focal_policy.test_module import trainer
from tests.focal_policy.toys import data, policy
from tests.helpers import run


def test_metrics_in_closed_form():
    """Actions that rise by 1 within a chunk and by 3 at its border; plans that see the future 0.5 too high."""
    h, chunks, length, history = 4, 3, 12, 2
    values = np.array([0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15], dtype=float)
    executed = values.reshape(chunks, h, 1)
    # A window holds step k-1 first; its foresight is what the next chunk does, plus 0.5.
    future = np.concatenate([values[:1], values, values[-1] + np.arange(1, 20)])
    windows = np.stack([future[m * h : m * h + length] for m in range(chunks)])[:, :, None]
    windows[:, history - 1 + h :] += 0.5
    hand = np.zeros((chunks, h, 3))
    hand[..., 0] = np.arange(chunks * h).reshape(chunks, h) ** 3
    found = episode_metrics(executed, windows, hand, 12, history, control_hz=2.0)
    assert found["boundary_jump"] == pytest.approx(3)
    assert found["intra_jump"] == pytest.approx(1)
    # Of the 7 overlapping steps the first 4 are executed by the next plan, the last 3 are its own foresight (+0.5).
    assert found["overlap_disagreement"] == pytest.approx(0.5 * 4 / 7)
    assert found["jerk"] == pytest.approx(6 * 2**3)
    assert 0 < found["high_band_energy"] < 0.1
    short = episode_metrics(executed, windows, hand, 2, history, control_hz=2.0)
    assert short["intra_jump"] == pytest.approx(1)
    assert np.isnan(short["boundary_jump"]) and np.isnan(short["overlap_disagreement"]) and np.isnan(short["jerk"])
    still = episode_metrics(np.zeros_like(executed), windows, hand, 12, history, control_hz=2.0)
    assert still["boundary_jump"] == 0 and np.isnan(still["high_band_energy"])


@pytest.mark.parametrize("steps", [7, 8])
def test_the_high_band_is_the_upper_half_of_the_frequencies(steps):
    """Waves of one DCT frequency k lie in it from k = steps / 2 on; a mean counts nowhere."""

    def share(*frequencies: int) -> float:
        n = np.arange(8)
        waves = sum(np.cos(np.pi * (n + 0.5) * k / steps) for k in frequencies)
        executed = (waves + 3).reshape(2, 4, 1)
        return episode_metrics(executed, np.zeros((2, 12, 1)), np.zeros((2, 4, 3)), steps, 2, 80)["high_band_energy"]

    expected = [float(k >= steps / 2) for k in range(1, steps)]
    assert [share(k) for k in range(1, steps)] == pytest.approx(expected, abs=1e-12)
    assert share(2, 4) == pytest.approx(0.5)


class Box:
    """A simulator that does nothing."""

    low, high, control_hz = -1.0, 1.0, 80

    def reset(self, seeds):
        self.n = len(seeds)
        return self.step(np.zeros((self.n, 0, 2))), np.zeros((self.n, 3))

    def step(self, actions, picture=0):
        state = np.full((self.n, 2, 4), 0.3, np.float32)
        done, hand = np.zeros(self.n, bool), np.zeros((self.n, actions.shape[1], 3))
        return Step({"state": state}, done, np.full(self.n, 4), hand, np.zeros((0, 1, 1, 3), np.uint8))


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.bfloat16),
        ("bf16-true", torch.bfloat16),
        ("64-true", torch.float64),
    ],
)
def test_plans_have_the_precision_of_validation(precision, kind, tmp_path):
    """Rollouts, the latency and a validation step call the network in the same way."""
    module, kinds = policy(), []
    fit = trainer(tmp_path, precision=precision, max_steps=1)
    fit.fit(module, data(tmp_path))
    module.network.model.final_conv.register_forward_hook(lambda part, inputs, output: kinds.append(output.dtype))
    fit.validate(module, data(tmp_path), verbose=False)
    assert set(kinds) == {kind}
    kinds.clear()
    rollouts = Rollouts(2, max_steps=8, picture=0, latency_calls=1)
    found = rollouts.rollout(fit, module, Box(), [1, 2], "here")
    assert found.executed.shape == (2, 2, 4, 2) and np.isfinite(found.windows).all()
    np.testing.assert_array_equal(found.executed[:, 0], found.windows[:, 0, 1:5].clip(-1, 1))
    rollouts._latency(fit, module)
    assert len(kinds) == 2 + 11 and set(kinds) == {kind}


def test_summary_means_over_tasks_and_leaves_out_what_cannot_be_told():
    def task(solved, steps, jump):
        row = {"boundary_jump": jump, "intra_jump": [1.0, 1.0], "overlap_disagreement": [0.0, np.nan]}
        row |= {"jerk": [2.0, 4.0], "high_band_energy": [0.5, 0.5], "solved": solved, "steps": steps}
        return {k: np.array(v) for k, v in (row | {"nearest": [0.1, 0.3]}).items()}

    found = summary([task([1.0, 0.0], [40.0, 200.0], [2.0, np.nan]), task([1.0, 1.0], [50.0, 60.0], [4.0, 3.0])])
    assert found["success_rate"] == 0.75
    assert found["steps_to_success"] == 50
    assert found["discontinuity"] == pytest.approx(3)
    assert found["overlap_disagreement"] == 0 and found["jerk"] == 3
    assert found["nearest_demonstration"] == pytest.approx(0.2)


def test_the_plot_has_a_panel_a_dimension():
    shape = (2, 3, 4, 4)
    windows, hand = np.zeros((2, 3, 12, 4)), np.zeros((2, 3, 4, 3))
    rollout = Rollout(
        np.zeros(2, bool), np.array([12, 3]), np.zeros(shape), windows, hand, np.zeros((2, 3)), np.zeros(0)
    )
    assert len(chunk_figure(rollout, 2, "task").axes) == 4


class Solved(Box):
    """Two steps a chunk; an episode is solved at the end of as many chunks as its seed says."""

    def reset(self, seeds):
        self.seeds, self.chunk = np.array(seeds), -1
        return super().reset(seeds)

    def step(self, actions, picture=0):
        self.chunk += 1
        taken = 2 * np.minimum(self.seeds, self.chunk)
        return super().step(actions)._replace(solved=self.seeds <= self.chunk, steps=taken)

    def close(self): ...


class Policy(LightningModule):
    executed = slice(0, 2)

    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"history": 1, "horizon": 6, "action_steps": 2, "action_dim": 2})

    def forward(self, observation, noise):
        return noise


@pytest.mark.parametrize("shown", [True, False])
def test_each_episode_is_a_row_and_a_bar_shows_the_work(shown, tmp_path, capsys):
    seeds = {"reach": [3, 1, 2], "push": [9, 8, 7]}
    run = trainer(tmp_path, enable_progress_bar=shown)
    run.datamodule = SimpleNamespace(
        tasks=list(seeds),
        simulators=lambda task: Solved(),
        layouts=lambda task: np.ones((1, 3)),
        episode_seeds=lambda task, stage, count: seeds[task][:count],
    )
    callback = Rollouts(episodes=3, max_steps=6, picture=0, latency_calls=0)
    callback.log = lambda *args, **options: None
    capsys.readouterr()
    callback.on_test_epoch_end(run, Policy())
    with (tmp_path / "test_episodes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["task"], r["seed"], r["success"], r["steps"]) for r in rows] == [
        *[("reach", "1", "True", "2"), ("reach", "2", "True", "4"), ("reach", "3", "True", "6")],
        *[("push", "7", "False", "6"), ("push", "8", "False", "6"), ("push", "9", "False", "6")],
    ]
    assert all(float(r["nearest"]) == pytest.approx(3**0.5) for r in rows)
    assert rows[0]["boundary_jump"] == "" and float(rows[2]["boundary_jump"]) > 0, "a single chunk has no border"
    bars = capsys.readouterr().err
    for task in seeds:
        assert (f"test: {task}, 3 episodes in the simulator" in bars) == shown


def test_data_without_a_simulator_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"has no simulator: remove callbacks\.Rollouts"):
        trainer(tmp_path, callbacks=[Rollouts()]).fit(policy(), data(tmp_path))


SMALL = [
    *("-c", "focal_policy/metaworld", "--data.tasks", '["reach-v3"]', "--data.episodes", "3", "--data.processes", "1"),
    *("--model.widths", "[8, 16, 16]", "--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "1"),
    *("--trainer.limit_train_batches", "2", "--data.max_steps", "100", "--trainer.accelerator", "cpu"),
]


@pytest.mark.long
def test_fit_and_test_evaluate_in_the_simulator(tmp_path):
    import torch

    callbacks = ["--trainer.callbacks", "callbacks.Rollouts", "--trainer.callbacks.episodes", "2"]
    callbacks += ["--trainer.callbacks.max_steps", "20", "--trainer.callbacks.picture", "16"]
    callbacks += [
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        "--trainer.callbacks.save_last=true",
    ]
    folder = run(["fit", *SMALL, *callbacks], tmp_path / "runs")
    assert {p.name for p in (folder / "plots").iterdir()} == {"val_reach-v3_chunks.png", "val_reach-v3_rollout.gif"}
    checkpoint = folder / "checkpoints" / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["hyper_parameters"]["state_dim"] == 39
    run(["test", "-c", str(folder / "config.yaml"), "--ckpt_path", str(checkpoint)], tmp_path / "runs")
    metrics = json.loads((folder / "test_metrics.json").read_text())
    names = ("success_rate", "success_rate_reach-v3", "discontinuity", "overlap_disagreement", "jerk", "latency_ms")
    assert {f"test/{name}" for name in names} <= metrics.keys()
    assert metrics["test/latency_ms"] > 0 and metrics["test/nearest_demonstration"] > 0
    for stage in ("val", "test"):
        with (folder / f"{stage}_episodes.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["task"] for row in rows] == ["reach-v3"] * 2 and len({row["seed"] for row in rows}) == 2
    assert np.mean([row["success"] == "True" for row in rows]) == metrics["test/success_rate"]
