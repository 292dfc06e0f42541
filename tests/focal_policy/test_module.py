import csv

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from callbacks import EMA, PredictionWriter
from datamodules import RobotDemonstrations
from datamodules.recordings import Keys
from lightning_modules import FocalPolicy
from lightning_modules.focal_policy.rollout import RolloutPolicy
from tests.focal_policy.toys import data, policy


def trainer(folder, **changes) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=folder, **quiet | {"max_steps": 3, "num_sanity_val_steps": 0} | changes)


def test_sizes_come_from_the_data_and_live_in_the_checkpoint(tmp_path):
    module, fit = policy(), trainer(tmp_path)
    fit.fit(module, data(tmp_path))
    sizes = [module.hparams[k] for k in ("action_dim", "state_dim", "point_channels", "image_crop")]
    assert sizes == [2, 4, 0, 0]
    fit.save_checkpoint(tmp_path / "a.ckpt")
    again = FocalPolicy.load_from_checkpoint(tmp_path / "a.ckpt").eval()
    observation, noise = {"state": torch.randn(3, 2, 4)}, torch.randn(3, 12, 2)
    torch.testing.assert_close(again(observation, noise), module.eval()(observation, noise))
    # Fine-tuning takes weights and normaliser, and nothing else.
    tuned = policy(init_from=str(tmp_path / "a.ckpt"))
    trainer(tmp_path, max_steps=0).fit(tuned, data(tmp_path, seed=5))
    torch.testing.assert_close(tuned.eval()(observation, noise), module(observation, noise))


def test_pretrained_folder_round_trip(tmp_path):
    module = policy()
    trainer(tmp_path).fit(module, data(tmp_path))
    module.save_pretrained(tmp_path / "policy")
    again = FocalPolicy.from_pretrained(tmp_path / "policy")
    observation, noise = {"state": torch.randn(3, 2, 4)}, torch.randn(3, 12, 2)
    torch.testing.assert_close(again(observation, noise), module.eval()(observation, noise))
    robot = RolloutPolicy.from_pretrained(tmp_path / "policy", seed=2)
    state = np.ones(4, np.float32)
    np.testing.assert_array_equal(robot.act({"state": state}), module.policy(seed=2).act({"state": state}))
    tuned = policy(init_from=str(tmp_path / "policy"))
    trainer(tmp_path).fit(tuned, data(tmp_path))


def test_averaged_weights_are_found_in_a_checkpoint(tmp_path):
    module, ema = policy(), EMA(0.9)
    fit = trainer(tmp_path, callbacks=[ema])
    fit.fit(module, data(tmp_path))
    fit.save_checkpoint(tmp_path / "a.ckpt")
    loaded = FocalPolicy.load_from_checkpoint(tmp_path / "a.ckpt").load_averages(tmp_path / "a.ckpt")
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(value.detach(), ema.average[name])
    plain = trainer(tmp_path)
    plain.fit(policy(), data(tmp_path))
    plain.save_checkpoint(tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="no averaged weights"):
        loaded.load_averages(tmp_path / "b.ckpt")


def test_loss_is_the_two_terms_and_randomness_belongs_to_the_item(tmp_path):
    module, d = policy(freq_weight=0.3, freq_mode="dct_softmax"), data(tmp_path)
    trainer(tmp_path, max_steps=1).fit(module, d)
    batch = next(iter(d.val_dataloader()))
    terms = module.objective(batch, 0)
    loss, parts = module._loss(terms)
    torch.testing.assert_close(loss, parts["time"] + 0.3 * parts["freq"])
    noise, draws, corner = module.draws(torch.tensor([3, 9, 4]), 1)
    alone, one, _ = module.draws(torch.tensor([9]), 1)
    torch.testing.assert_close(noise[1:2], alone)
    torch.testing.assert_close(torch.stack(draws)[:, 1:2], torch.stack(one))
    assert not torch.equal(module.draws(torch.tensor([9]), 2)[0], alone)
    assert noise.shape == (3, 12, 2) and corner.shape == (3, 2)


def test_draws_have_the_right_distribution():
    module = policy(action_dim=2, state_dim=4, point_channels=0, image_crop=0)
    noise, (u_tau, n_a, n_b, u_mix), _ = module.draws(torch.arange(4000), 0)
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.01
    for normal in (n_a, n_b):
        assert abs(normal.mean()) < 0.08 and abs(normal.std() - 1) < 0.06
    for uniform in (u_tau, u_mix):
        assert abs(uniform.mean() - 0.5) < 0.025 and uniform.min() >= 0 and uniform.max() < 1
    draws = torch.stack([u_tau, n_a, n_b, u_mix, noise[:, 0, 0]])
    assert (torch.corrcoef(draws) - torch.eye(5)).abs().max() < 0.08


def test_one_batch_is_fitted(tmp_path):
    """The composite loss falls to a tenth."""
    torch.manual_seed(0)
    module, d = policy(widths=[16, 32, 32], state_features=16, freq_weight=1e-2), data(tmp_path)
    trainer(tmp_path, max_steps=1).fit(module, d)
    batch = next(iter(d.train_dataloader()))
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3)
    values = []
    for epoch in range(150):
        loss, _ = module._loss(module.objective(batch, epoch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert np.mean(values[-20:]) < 0.1 * np.mean(values[:5])


@pytest.mark.parametrize(
    "variant",
    [
        {"objective": "consistency"},
        {"objective": "consistency", "time_sampler": "v0", "segments": 1, "stop_gradient": True},
        {"time_sampler": "cfm", "proximal_start": 1, "freq_weight": 1e-2},
        {"time_sampler": "terminal", "freq_mode": "dct_band", "band_weights": [0.1] * 12, "time_scope": "window"},
        {"inference_steps": 4, "freq_mode": "none"},
    ],
)
def test_every_variant_trains_and_tests(variant, tmp_path):
    module = policy(**variant)
    fit = trainer(tmp_path)
    fit.fit(module, data(tmp_path, mask_padding=True))
    assert all(np.isfinite(float(v)) for v in fit.callback_metrics.values())
    (metrics,) = fit.test(module, data(tmp_path), verbose=False)
    assert metrics.keys() == {"test/loss", "test/executed_error", "test/window_error"}


def test_predict_writes_one_row_a_step(tmp_path):
    module, d = policy(), data(tmp_path)
    fit = trainer(tmp_path, callbacks=[PredictionWriter()])
    fit.fit(module, d)
    fit.predict(module, d, return_predictions=False)
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(b.index) for b in d.predict_dataloader())
    assert list(rows[0]) == [f"action_{i}_{j}" for i in range(4) for j in range(2)]


def test_default_schedule_warms_up_and_ends_at_zero(tmp_path):
    rates = []

    class Watch(EMA):
        def on_train_batch_start(self, trainer, *args):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer(tmp_path, max_steps=12, callbacks=[Watch()]).fit(policy(warmup_steps=4), data(tmp_path))
    assert rates[:5] == pytest.approx([0, 0.25e-4, 0.5e-4, 0.75e-4, 1e-4])
    expected = [0.5e-4 * (1 + np.cos(np.pi * i / 8)) for i in range(8)]
    assert rates[4:] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freq_weight": -1e-4}, "freq_weight -0.0001 is outside"),
        ({"freq_weight": float("nan")}, "freq_weight nan is outside"),
        ({"velocity_weight": -1.0}, "velocity_weight -1.0 is outside"),
        ({"ratio": 1.5}, r"ratio 1.5 is outside \[0, 1\]"),
        ({"segments": 0}, "segments 0 is outside"),
        ({"warmup_steps": -1}, "warmup_steps -1 is outside"),
        ({"seed": -1}, "seed -1 is outside"),
        ({"objective": "flow"}, "objective 'flow' is none of composite, consistency"),
        ({"time_sampler": "v7"}, "time_sampler 'v7' is none of v0"),
        ({"freq_mode": "fft"}, "freq_mode 'fft' is none of dct_l2"),
        ({"freq_scope": "chunk"}, "freq_scope 'chunk' is none of proximal, window"),
        ({"freq_mode": "dct_band"}, "12 numbers of at least 0 in band_weights"),
        ({"freq_mode": "dct_band", "band_weights": [1.0] * 12, "freq_scope": "proximal"}, "4 numbers"),
        ({"action_steps": 0}, "action_steps 0 must be at least 1"),
        ({"history": 0}, "history 0 must be"),
        ({"inference_steps": 0}, "inference_steps 0 must be"),
        ({"eps": 1.0}, r"eps 1.0 is outside \[0, 1\)"),
        ({"widths": []}, r"widths \[\] must be one or more"),
        ({"image_crop": 32}, "image_crop 32 must be at least 33"),
        ({"action_dim": 0}, "action_dim 0 must be"),
    ],
)
def test_options_are_refused_before_anything_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        policy(**options)


def test_images_are_learnt_from_and_too_small_ones_name_the_option(tmp_path):
    path = tmp_path / "seen.hdf5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for i in range(4):
            file[f"data/demo_{i}/obs/eye"] = rng.integers(0, 256, (14, 70, 72, 3)).astype(np.uint8)
            file[f"data/demo_{i}/actions"] = rng.normal(size=(14, 2))
    images = {"batch_size": 3, "keys": Keys(image="eye"), "val_fraction": 0.25}
    short = {"max_steps": 1, "limit_val_batches": 0}
    module = policy(image_crop=64)
    trainer(tmp_path, **short).fit(module, RobotDemonstrations(str(path), **images))
    assert [module.hparams[k] for k in ("state_dim", "image_crop")] == [0, 64]
    with pytest.raises(ValueError, match=r"70x72 pixels are smaller than the crop of 76: lower model\.image_crop"):
        trainer(tmp_path, **short).fit(policy(), RobotDemonstrations(str(path), **images))


def test_what_does_not_fit_says_so(tmp_path):
    with pytest.raises(ValueError, match="set segments to 1"):
        policy(objective="consistency", time_sampler="v0")
    with pytest.raises(ValueError, match="not divisible"):
        policy(horizon=10)
    with pytest.raises(ValueError, match="executed slice"):
        policy(horizon=8, action_steps=8)
    with pytest.raises(ValueError, match="proximal_start"):
        policy(proximal_start=9)
    with pytest.raises(ValueError, match=r"image_crop is 76 and the demonstrations have no image: leave it out"):
        trainer(tmp_path).fit(policy(image_crop=76), data(tmp_path))
    with pytest.raises(ValueError, match="needs to be told action_dim, state_dim"):
        policy().configure_model()
    with pytest.raises(ValueError, match=r"model\.action_dim is 7 and the demonstrations have 2"):
        trainer(tmp_path).fit(policy(action_dim=7), data(tmp_path))
    with pytest.raises(ValueError, match=r"data\.horizon is 16, model\.horizon is 12"):
        trainer(tmp_path).fit(policy(), data(tmp_path, horizon=16))
    with pytest.raises(ValueError, match="no normaliser yet"):
        trainer(tmp_path).test(policy(), data(tmp_path), verbose=False)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        trainer(tmp_path).fit(policy(init_from="nothing.ckpt"), data(tmp_path))
