"""The three stages at toy size."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
from diffusers.models import modeling_utils
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file

import cli
from callbacks.video_grid import VideoGrid
from configs import find
from datamodules.videos import ExpertVideos, read_captions, read_video
from lightning_modules import DynVPP, LatentVideoAutoencoder, VideoDiffusion
from lightning_modules.distributed import log_means
from lightning_modules.dyn_vpp.diffusion import read_model
from lightning_modules.dyn_vpp.networks import (
    SMALL_AUTOENCODER,
    SMALL_UNET,
    SVD_AUTOENCODER,
    SVD_UNET,
    video_autoencoder,
    video_unet,
)
from lightning_modules.dyn_vpp.rewards import latent_reward
from lightning_modules.dyn_vpp.video_model import VideoModel, located
from tests.dyn_vpp.toys import AUTOENCODER, DATA, UNET, write_folder
from tests.helpers import refusal, weights
from tests.helpers import run as run_command

SAMPLER = {"steps": 3, "sigma_min": 0.05, "sigma_max": 5.0}
TEXT = {"vocabulary": 64, "tokens": 4}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    write_folder(folder / "own")
    return folder


def data(home, **options) -> ExpertVideos:
    return ExpertVideos(str(home / "own"), data_dir=str(home / "data"), **{**DATA, "batch_size": 2, **options})


def trainer(folder, **options) -> Trainer:
    defaults = {"max_steps": 2, "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return Trainer(default_root_dir=folder, accelerator="cpu", **{**defaults, **quiet, **options})


@pytest.fixture(scope="module")
def autoencoder(home):
    module = LatentVideoAutoencoder(AUTOENCODER)
    run = trainer(home / "autoencoder", val_check_interval=2, check_val_every_n_epoch=None)
    run.fit(module, data(home))
    run.save_checkpoint(home / "autoencoder.ckpt")
    return home / "autoencoder.ckpt"


@pytest.fixture(scope="module")
def base(home, autoencoder):
    module = VideoDiffusion(UNET, str(autoencoder), eval_group=2, **SAMPLER, **TEXT)
    run = trainer(home / "base")
    run.fit(module, data(home))
    run.save_checkpoint(home / "base.ckpt")
    return home / "base.ckpt"


def post(base, **options) -> DynVPP:
    options = {"group": 4, "eval_group": 2, **SAMPLER, **options}
    return DynVPP(str(base), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), **options)


def stand_in(network: str) -> torch.nn.Module:
    """Mean squares for LPIPS, whose weights are not here."""
    module = torch.nn.Module()
    module.forward = lambda first, second: (first - second).square().mean((1, 2, 3))
    return module


# ---------------------------------------------------------------------------------------------- stage 1


def test_the_scaling_factor_makes_unit_variance(home, autoencoder):
    module = LatentVideoAutoencoder.load_from_checkpoint(autoencoder)
    loaded = data(home)
    loaded.prepare_data()
    loaded.setup()
    batch = next(iter(loaded.val_dataloader()))
    with torch.no_grad():
        assert module(batch.video).std(correction=0).item() == pytest.approx(1, rel=1e-3)
    folder = home / "saved"
    module.save_pretrained(folder)
    again = LatentVideoAutoencoder.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(batch.video), module(batch.video))
    assert AutoencoderKLTemporalDecoder.from_pretrained(folder / "vae").config.scaling_factor != 1


def test_autoencoder_tests_and_predicts(home, autoencoder):
    run = trainer(home / "test_autoencoder")
    module = LatentVideoAutoencoder.load_from_checkpoint(autoencoder)
    (metrics,) = run.test(module, data(home), verbose=False)
    assert set(metrics) == {"test/loss", "test/l1", "test/psnr", "test/ssim"}
    (rows,) = run.predict(module, data(home))
    assert rows["psnr"].shape == (len(rows["index"]), 4)


# ---------------------------------------------------------------------------------------------- stage 2


def test_base_validates_tests_and_predicts(home, base, monkeypatch):
    run = trainer(home / "test_base")
    monkeypatch.setattr(f"{VideoDiffusion.__module__}.PerceptualDistance", stand_in)
    module = VideoDiffusion.load_from_checkpoint(base, perceptual="alex", object_colour=[0.9, 0.3, 0.1])
    (metrics,) = run.test(module, data(home), verbose=False)
    names = {k.removeprefix("test/") for k in metrics}
    assert {"loss", "reward", "reward_ode", "copy_reward", "diversity", "sharpness", "psnr", "flow_error"} <= names
    assert all(math.isfinite(v) for k, v in metrics.items() if k != "test/centroid_error")  # the object may be missing
    # the mean square stands in for LPIPS here, of pictures in [-1, 1], four times that in [0, 1]; the mean of minus its
    # logarithm is above that of the mean (Jensen)
    assert metrics["test/psnr"] >= -10 * math.log10(metrics["test/lpips"] / 4) - 1e-3
    per_frame = [metrics[f"test/cosine_frame_{k}"] - metrics[f"test/l1_frame_{k}"] for k in (1, 2, 3)]
    assert metrics["test/reward"] == pytest.approx(sum(per_frame) / 3, abs=1e-5)
    (rows,) = run.predict(module, data(home))
    assert rows["reward"].shape == rows["copy_reward"].shape == (len(rows["index"]), 4)
    assert torch.allclose(rows["copy_reward"][:, 0], torch.ones(len(rows["index"])))


def test_the_autoencoder_is_not_trained(autoencoder, base):
    first = {k.removeprefix("autoencoder."): v for k, v in weights(autoencoder).items()}
    kept = {k.removeprefix("model.autoencoder."): v for k, v in weights(base).items() if "autoencoder" in k}
    assert first.keys() == kept.keys()
    assert all(torch.equal(v, kept[k]) for k, v in first.items())


def test_folder_is_diffusers_own_and_predicts_the_same(home, base):
    module = VideoDiffusion.load_from_checkpoint(base).eval()
    module.save_pretrained(home / "folder")
    again = VideoDiffusion.from_pretrained(home / "folder")  # with the sampler that it was saved with
    image, tokens = torch.rand(2, 3, 16, 16) * 2 - 1, torch.tensor([[3, 4, 0, 0], [5, 0, 0, 0]])
    video = module(image, tokens)
    assert video.shape == (2, 4, 3, 16, 16) and video.min() >= 0 and video.max() <= 1
    assert torch.equal(again(image, tokens), video)
    assert not torch.equal(module(image, tokens.flip(0)), video)  # text matters
    assert VideoDiffusion.from_pretrained(home / "folder", steps=2).sigmas[0] == module.sigmas[0]
    unet = UNetSpatioTemporalConditionModel.from_pretrained(home / "folder" / "unet")
    assert all(torch.equal(a, b) for a, b in zip(unet.parameters(), module.model.unet.parameters(), strict=True))
    assert not list((home / "folder").rglob("*.bin"))
    config = home / "folder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "format": 99}))
    with pytest.raises(ValueError, match="upgrade fulgurite"):
        VideoDiffusion.from_pretrained(home / "folder")


def test_half_precision_files_are_read_as_float32(home, base, monkeypatch):
    module = VideoDiffusion.load_from_checkpoint(base)
    warnings: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning", warnings.append)
    module.save_pretrained(home / "half", torch.bfloat16)
    again = VideoDiffusion.from_pretrained(home / "half", **SAMPLER).state_dict()
    whole = module.state_dict()
    assert all(v.dtype == torch.float32 and torch.equal(v, whole[k].bfloat16().float()) for k, v in again.items())
    assert not warnings, "diffusers' `to` warns that no modules should stay in float32"
    files = sum(p.stat().st_size for p in (home / "half").rglob("*.safetensors"))
    assert files < 0.6 * sum(4 * v.numel() for v in whole.values())


def test_a_published_folder_takes_the_options_that_it_does_not_bring(tmp_path):
    """As Stable Video Diffusion's: 25 frames, nothing about text, frame rate and guidance."""
    torch.manual_seed(0)
    unet = video_unet({**SMALL_UNET, **UNET, "num_frames": 25})
    unet.save_pretrained(tmp_path / "unet")
    video_autoencoder({**SMALL_AUTOENCODER, **AUTOENCODER}).save_pretrained(tmp_path / "vae")
    told = {"unet": {"num_frames": 4}, "fps": 4.0, "guidance": 7.5, **TEXT}
    module = DynVPP(str(tmp_path), **SAMPLER, **told)
    module.configure_model()
    assert module.model.frames == 4
    assert (module.model.config["fps"], module.model.config["guidance"]) == (4, 7.5)
    assert torch.equal(module.model.unet.conv_in.weight, unet.conv_in.weight)
    module.save_pretrained(tmp_path / "ours")
    for options, expected in (({}, (4, 7.5)), ({"fps": 5.0, "guidance": 1.0}, (5, 1))):  # a folder of ours brings them
        again = VideoDiffusion.from_pretrained(tmp_path / "ours", **SAMPLER, **options)
        assert (again.model.frames, again.model.config["fps"], again.model.config["guidance"]) == (4, *expected)


def test_latents_are_those_of_the_encoder_and_kept(home, base):
    module = VideoDiffusion.load_from_checkpoint(base)
    loaded = data(home)
    loaded.prepare_data()
    loaded.setup()
    batch = next(iter(loaded.train_dataloader()))
    first = module.latents(batch)
    assert torch.allclose(first, module.model.encode(batch.video), atol=1e-5)
    assert torch.equal(module.latents(batch._replace(video=torch.zeros_like(batch.video))), first)


def test_latents_computed_beforehand_are_the_videos_own(home, base, tmp_path):
    """Post-training and test see what they would see from the videos; another autoencoder's are refused."""
    videos, latents = home / "own", tmp_path / "latents"
    latents.mkdir()
    model = read_model(base)
    for file, _ in read_captions(videos):
        frames = torch.from_numpy(read_video(videos / file, 16)).permute(0, 3, 1, 2)
        model.write_latents(frames / 127.5 - 1, (latents / file).with_suffix(".safetensors"), rows=5)
    table = (videos / "captions.csv").read_text().replace(".gif", ".safetensors")
    (latents / "captions.csv").write_text(table)
    figures = []
    for source in (videos, latents):
        module = post(base, anchor_weight=0.1, pixel_weight=0.1)
        run = trainer(tmp_path, max_steps=1, limit_val_batches=0)
        own = ExpertVideos(str(source), data_dir=str(tmp_path / "data"), **{**DATA, "batch_size": 2})
        logged: dict = {}
        module.log_dict = lambda values, logged=logged, **_: logged.update(values)
        run.fit(module, own)
        del module.log_dict
        pictures = [VideoGrid(2)] if source == latents else []
        (metrics,) = trainer(tmp_path, callbacks=pictures).test(module, own, verbose=False)
        figures.append({k: float(v) for k, v in (logged | metrics).items()})
    assert (tmp_path / "plots" / "videos_test.png").is_file()
    pixels = {"test/psnr", "test/ssim", "test/flow_error", "train/reward", "train/loss", "train/gradient_norm"}
    for name in figures[0].keys() - pixels:  # the others compare with decoded pictures
        assert figures[1][name] == pytest.approx(figures[0][name], rel=1e-3, abs=1e-4), name
    with pytest.raises(ValueError, match="the clips are latents computed beforehand"):
        trainer(tmp_path).fit(LatentVideoAutoencoder(AUTOENCODER), own)
    with pytest.raises(ValueError, match="latents of 3 channels, and the model's have 4"):
        model.check_latents(torch.zeros(1, 4, 3, 8, 8))
    with pytest.raises(ValueError, match="latents of 7 numbers a side do not fit"):
        model.check_latents(torch.zeros(1, 4, 4, 8, 7))


def test_the_mark_is_that_of_encoder_and_scale(base, tmp_path):
    model = read_model(base)
    mark = model.mark()
    model.save(tmp_path, torch.bfloat16)
    assert read_model(tmp_path).mark() == mark
    model.unet.conv_in.weight.data.add_(1)
    assert model.mark() == mark
    model.autoencoder.encoder.conv_in.weight.data.mul_(1.1)
    changed = model.mark()
    model.autoencoder.register_to_config(scaling_factor=2.0)
    assert len({mark, changed, model.mark()}) == 3


def test_means_are_over_the_clips_of_all_ranks():
    """This rank has 2 clips, another 1; what is not a number here does not count if there are no clips."""
    logged: dict = {}

    def reduce(totals, reduce_op):
        assert reduce_op == "sum"
        return totals + torch.tensor([9.0, 1.0])

    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(reduce=reduce))
    module = SimpleNamespace(trainer=trainer, log_dict=lambda values, **options: logged.update(values, **options))
    log_means(module, {"test/a": torch.tensor(3.0)}, 2)
    assert logged["test/a"] == 5 and logged["batch_size"] == 3
    log_means(module, {"test/a": torch.tensor(float("nan"))}, 0)
    assert logged["test/a"] == 9 and logged["batch_size"] == 1


# ---------------------------------------------------------------------------------------------- stage 3


def test_post_training_moves_the_unet_alone(home, base):
    module = post(base, anchor_weight=0.5, inner_epochs=2)
    logged = {}
    run = trainer(home / "post", callbacks=[VideoGrid(2)], max_steps=4, val_check_interval=2)
    module.log_dict = lambda values, **_: logged.update(values)  # what is watched, at the last step
    run.fit(module, data(home))
    assert run.global_step == 4  # two rollouts
    assert (home / "post" / "plots" / "videos_val.png").stat().st_size > 1000
    before, after = weights(base), module.state_dict()
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved and all(k.startswith("model.unet.") for k in moved)
    run.save_checkpoint(home / "post.ckpt")
    assert read_model(home / "post.ckpt").frames == 4
    assert logged.keys() >= {f"train/{k}" for k in ("reward", "copy_reward", "ratio", "anchor", "gradient_norm")}


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ratio_is_one_before_the_update_and_micro_batches_change_nothing(home, base, shared):
    moves, watched = [], []
    for size in (None, 1):
        module = post(base, micro_batch=size, shared_noise=shared, rescale=True, anchor_weight=0.1)
        logged: dict = {}
        run = trainer(home / f"micro_{shared}_{size}", max_steps=1, limit_val_batches=0)
        module.log_dict = lambda values, logged=logged, **_: logged.update(values)
        module.log = lambda name, value, logged=logged, **_: logged.update({name: value})
        run.fit(module, data(home))
        assert logged["train/ratio"].item() == pytest.approx(1, abs=1e-6)
        assert logged["train/ratio_error"].item() < 1e-5
        before = weights(base)
        moves.append(torch.cat([(v.double() - before[k].double()).flatten() for k, v in module.state_dict().items()]))
        watched.append(logged)
    for name in ("anchor", "gradient_norm"):
        assert watched[0][f"train/{name}"].item() == pytest.approx(watched[1][f"train/{name}"].item(), rel=1e-3), name
    assert moves[0].norm() > 1e-3
    assert (moves[0] - moves[1]).norm() < 0.01 * moves[0].norm()


def test_the_reward_may_have_decoded_frames(home, base, monkeypatch):
    """Each part lowers the reward by its weight times what it measures."""
    monkeypatch.setattr(f"{DynVPP.__module__}.PerceptualDistance", stand_in)
    rewards = []
    weights = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (2.0, 3.0)]
    for i, part in enumerate({"pixel_weight": a, "perceptual_weight": b} for a, b in weights):
        module = post(base, perceptual="alex", **part)
        module.log_dict = lambda values, **_: rewards.append(values["train/reward"].item())
        trainer(home / f"pixels_{i}", max_steps=1, limit_val_batches=0).fit(module, data(home))
    losses = [rewards[0] - r for r in rewards[1:]]
    assert min(losses) > 1e-3
    assert losses[2] == pytest.approx(2 * losses[0] + 3 * losses[1], rel=1e-4)
    assert losses[1] <= 2 * losses[0]  # squares of differences up to 2 against the differences


@pytest.mark.long
def test_a_step_towards_the_reward_raises_it(home, base):
    """With many small steps on the same clips and the same noise, the mean reward of the group rises."""
    module = post(base, group=16, scale="none", rescale=True)
    module.optimizer = lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-12)
    rewards = []
    module.log_dict = lambda values, **_: rewards.append(values.get("train/reward"))
    run = trainer(home / "rise", max_steps=30, limit_train_batches=1, max_epochs=-1, limit_val_batches=0)
    run.fit(module, data(home))
    values = [r.item() for r in rewards if r is not None]
    assert len(values) == 30
    assert sum(values[-5:]) > sum(values[:5]) + 5 * 0.005


def test_the_gain_is_over_the_base_on_equal_noise(home, base):
    """With a learning rate of 0 nothing is gained, whatever the noise; the base is validated before the first step."""
    module = post(base)
    module.optimizer = lambda p: torch.optim.SGD(p, lr=0.0)
    run = trainer(home / "gain", max_steps=1, val_check_interval=1, check_val_every_n_epoch=None)
    run.fit(module, data(home))
    assert run.callback_metrics["val/reward_gain"] == 0
    assert module._base_metrics["val/reward"] == pytest.approx(run.callback_metrics["val/reward"].item())


@pytest.mark.long
def test_the_gradients_cosine_is_measured_and_changes_nothing(home, base):
    module = post(base, cosine_every=1, skip_frames=1, scale="none")
    plain = post(base, skip_frames=1, scale="none")
    found = []
    measure = module.gradient_cosine
    module.gradient_cosine = lambda batch: found.append(measure(batch)) or found[-1]
    for name, model in (("cosine", module), ("plain", plain)):
        trainer(home / name, max_steps=1, limit_val_batches=0).fit(model, data(home))
    assert len(found) == 1 and -1 < found[0] < 1
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in module.state_dict().items())


def test_adapters_alone_are_trained_and_merged_on_saving(home, base):
    module = post(base, lora_rank=2, pixel_weight=0.5)
    module.optimizer = lambda p: torch.optim.SGD(p, lr=1.0)
    run = trainer(home / "lora", limit_val_batches=0)
    run.fit(module, data(home))
    run.save_checkpoint(home / "lora.ckpt")
    before, state = weights(base), module.state_dict()
    assert all(
        torch.equal(v, state.get(k, state.get(f"{k[:-7]}.parametrizations.weight.original"))) for k, v in before.items()
    )
    again = DynVPP.load_from_checkpoint(home / "lora.ckpt")  # with adapters
    merged = read_model(home / "lora.ckpt")  # without
    module.save_pretrained(home / "lora")
    saved = VideoDiffusion.from_pretrained(home / "lora", **SAMPLER)
    assert merged.state_dict().keys() == {k.removeprefix("model.") for k in before}
    image, tokens = torch.rand(1, 3, 16, 16) * 2 - 1, torch.tensor([[3, 4, 0, 0]])
    video = module.eval()(image, tokens)
    assert torch.equal(again.eval()(image, tokens), video)
    torch.testing.assert_close(saved(image, tokens), video, rtol=1e-3, atol=1e-3)
    assert any(not torch.equal(v, before[f"model.{k}"]) for k, v in merged.state_dict().items())


STEPS = {"steps": 4, "stochastic": [0, 1, 2]}
CLIP = STEPS | {"advantages": "clip", "clip": 1e-4}
DDPO = CLIP | {"shared_noise": False, "baseline": "batch", "scale": "batch"}
FLOW_GRPO = CLIP | {"shared_noise": False, "scale": "batch", "kl_weight": 0.01}
DANCE_GRPO = CLIP | {"step_kind": "drift", "eta": 0.25, "keep": 2, "step_share": 0.6}


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        pytest.param(DDPO, 3, marks=pytest.mark.long),
        pytest.param(FLOW_GRPO, 3, marks=pytest.mark.long),
        (DANCE_GRPO, 2),
    ],
)
def test_related_algorithms_are_settings(home, base, options, passes):
    module = post(base, rescale=True, **options)
    trained: list = []
    update = module._update
    module._update = lambda *args: trained.append([s.transition for s in args[3]]) or update(*args)
    backward, count = module.manual_backward, []
    module.manual_backward = lambda loss: count.append(1) or backward(loss)
    trainer(home / "related", max_steps=1, limit_val_batches=0).fit(module, data(home))
    assert sum(count) == passes
    before = weights(base)
    assert any(not torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert all(len(steps) == passes and steps == sorted(steps, reverse=True) for steps in trained)


def test_the_choice_of_steps_is_a_function_of_seed_and_rollout(base):
    def choices(seed, rollouts=range(40)):
        module = post(base, seed=seed, inner_epochs=2, step_share=0.6, **STEPS)
        found = []
        for number in rollouts:
            module._trainer = SimpleNamespace(global_step=2 * number)  # which a checkpoint brings back
            found.append(tuple(module._trained_steps([0, 1, 2])))
        return found

    assert set(choices(0)) == {(0, 1), (0, 2), (1, 2)}
    assert choices(0)[7:] == choices(0, range(7, 40)) != choices(1, range(7, 40))
    with pytest.raises(ValueError, match=r"step_share 0\.0 is outside \(0, 1\]"):
        post(base, step_share=0.0)


def test_rewards_that_are_not_finite_are_left_out_and_counted(home, base, monkeypatch):
    seen: list = []

    def reward(prediction, target, **weights):
        rewards = latent_reward(prediction, target, **weights)
        if prediction.shape[1:2] == (4,):  # the group
            rewards[0, 1, 2], rewards[1, :, 1] = math.nan, math.inf
        seen.append(rewards)
        return rewards

    monkeypatch.setattr("lightning_modules.dyn_vpp.module.latent_reward", reward)
    module = post(base)
    logged: dict = {}
    module.log_dict = lambda values, **_: logged.update(values)
    trainer(home / "nonfinite", max_steps=1, limit_val_batches=0).fit(module, data(home))
    assert logged["train/nonfinite"] == 5
    assert logged["train/reward"] == pytest.approx(seen[0][seen[0].isfinite()].mean().item())
    assert all(v.isfinite() for v in logged.values())
    before, after = weights(base), module.state_dict()
    assert all(v.isfinite().all() for v in after.values())
    assert any(not torch.equal(before[k], v) for k, v in after.items())


def test_reference_is_neither_trained_nor_saved(home, base):
    module = post(base, drift_weight=1.0, kl_weight=0.1, inner_epochs=2)
    logged: dict = {}
    module.log_dict = lambda values, **_: logged.update(values)
    trainer(home / "reference", max_steps=2, limit_val_batches=0).fit(module, data(home))
    before = weights(base)
    assert set(module.state_dict()) == set(before)
    kept = module._reference[0].state_dict()
    assert all(torch.equal(before[f"model.unet.{k}"], v) for k, v in kept.items())
    assert logged["train/drift"] > 0  # in the second pass over the rollout


def test_resumed_equals_uninterrupted(home, base):
    options = {"stochastic": [0, 1], "step_share": 0.5}
    whole = post(base, **options)
    keep = ModelCheckpoint(home / "kept", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(home / "whole", max_steps=3, limit_val_batches=0, callbacks=[keep]).fit(whole, data(home))
    resumed = post(base, **options)
    run = trainer(home / "resumed", max_steps=3, limit_val_batches=0)
    run.fit(resumed, data(home), ckpt_path=home / "kept" / "step=2.ckpt", weights_only=True)  # inside an epoch
    assert all(torch.equal(v, resumed.state_dict()[k]) for k, v in whole.state_dict().items())


@pytest.mark.long
def test_the_command_line_runs_all_stages(home, tmp_path):
    source = ["--data.source", str(home / "own"), "--data.data_dir", str(home / "data")]
    source += [x for k, v in DATA.items() for x in (f"--data.{k}", str(v))]
    short = ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1", "--trainer.limit_val_batches", "1"]
    short += ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    small = ["--model.autoencoder", json.dumps(AUTOENCODER)]
    first = run_command(["fit", "-c", "dyn_vpp/metaworld_autoencoder", *source[:-4], *small, *short], tmp_path / "1")
    words = ["--model.vocabulary", "64", "--model.tokens", "4", "--model.unet", json.dumps(UNET)]
    latents = ["--model.autoencoder", str(first / "checkpoints" / "best.ckpt")]
    second = run_command(["fit", "-c", "dyn_vpp/metaworld_base", *source, *words, *latents, *short], tmp_path / "2")
    start = ["--model.init_from", str(second / "checkpoints" / "last.ckpt"), "--model.group", "2"]
    third = run_command(["fit", "-c", "dyn_vpp/metaworld", *source, *start, *short], tmp_path / "3")
    assert (third / "plots" / "videos_val.png").is_file()
    last = str(third / "checkpoints" / "last.ckpt")
    once = ["--trainer.limit_test_batches", "1", "--trainer.enable_progress_bar", "false"]
    cli.main(["test", "-c", str(third / "config.yaml"), "--ckpt_path", last, *once])
    assert "test/reward" in json.loads((third / "test_metrics.json").read_text())
    cli.main(
        ["predict", "-c", str(third / "config.yaml"), "--ckpt_path", last, "--trainer.enable_progress_bar", "false"]
    )
    assert "reward_3" in (third / "predictions.csv").read_text().splitlines()[0]
    for folder in (first, second):
        shutil.rmtree(folder)
    assert DynVPP.load_from_checkpoint(last).model.frames == 4  # the file is enough


# ---------------------------------------------------------------------------------------------- refusals


def test_refusals(home, base, autoencoder):
    with pytest.raises(ValueError, match=r"name its checkpoint or folder with --model\.init_from"):
        trainer(home / "no").fit(DynVPP(**SAMPLER), data(home))
    with pytest.raises(ValueError, match="group 1 has nothing to compare with"):
        post(base, group=1)
    with pytest.raises(ValueError, match="the last step ends at sigma 0"):
        post(base, stochastic=[2])
    with pytest.raises(ValueError, match="init_from brings its own autoencoder"):
        VideoDiffusion(autoencoder=str(autoencoder), init_from=str(base))
    with pytest.raises(ValueError, match="is no checkpoint of VideoDiffusion or DynVPP"):
        read_model(autoencoder)
    with pytest.raises(FileNotFoundError, match="is no folder and cannot be fetched"):
        read_model("nowhere")
    with pytest.raises(ValueError, match=r"the clips have 3 frames and the model 4: set data\.frames to 4"):
        trainer(home / "no").fit(post(base), data(home, frames=3))


def test_paper_sizes_build_without_memory():
    with torch.device("meta"):
        model = VideoModel(SVD_UNET, SVD_AUTOENCODER, {"vocabulary": 8, "length": 20}, guidance=7.5)
    assert sum(p.numel() for p in model.unet.parameters()) == 1_524_623_082


def test_the_shipped_base_is_small_and_what_the_configs_describe():
    folder = located("metaworld")
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 8e6
    assert {p.suffix for p in files} == {".json", ".safetensors"}
    model = read_model("metaworld")
    base = yaml.safe_load(find("dyn_vpp/metaworld_base").read_text())["model"]["init_args"]
    assert {k: model.config["unet"][k] for k in base["unet"]} == base["unet"]
    assert model.config["text"] == {"vocabulary": base["vocabulary"], "length": base["tokens"]}
    first = yaml.safe_load(find("dyn_vpp/metaworld_autoencoder").read_text())["model"]["init_args"]["autoencoder"]
    assert {k: model.config["autoencoder"][k] for k in first} == first
    for name in ("metaworld", "metaworld_policy"):
        config = yaml.safe_load(find(f"dyn_vpp/{name}").read_text())
        assert config["model"]["init_args"]["init_from"] == "metaworld"
        assert config["data"]["init_args"]["frames"] == model.frames
        assert config["model"]["init_args"]["sigma_max"] == base["sigma_max"]
    assert located("./metaworld") == Path("metaworld")  # a folder of your own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 0}, "micro_batch 0 must be at least 1"),
        ({"inner_epochs": 0}, "inner_epochs 0 must be at least 1"),
        ({"lora_rank": 0}, "lora_rank 0 must be at least 1"),
        ({"clip": -1.0}, r"clip -1\.0 must be above 0"),
        ({"advantage_bound": 0.0}, r"advantage_bound 0\.0 must be above 0"),
        ({"anchor_weight": -1.0}, r"anchor_weight -1\.0 must be at least 0"),
        ({"l1_weight": float("nan")}, "l1_weight nan must be at least 0"),
        ({"keep": 3}, "keep must be an even number from 2 to the group size 8, got 3"),
        ({"skip_frames": -1}, "skip_frames -1 must be at least 0"),
        ({"perceptual_weight": 1.0}, "perceptual_weight needs a network: set perceptual to alex, vgg or squeeze"),
    ],
)
def test_impossible_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DynVPP("metaworld", **options)


def test_clips_that_do_not_fit_the_networks_are_refused():
    model = VideoModel.load(located("metaworld"))  # 64x64 is what it was trained on: 16 halves down to one latent
    model.check_video(torch.zeros(1, 4, 3, 32, 32))
    with pytest.raises(ValueError, match=r"pictures of 24 pixels do not fit: data\.size must be a multiple of 16"):
        model.check_video(torch.zeros(1, 4, 3, 32, 24))
    with pytest.raises(ValueError, match="the clips have 5 frames and the model 4"):
        model.check_video(torch.zeros(1, 5, 3, 32, 32))
    words = model.config["text"]
    model.check_words(words["length"], words["vocabulary"])
    with pytest.raises(ValueError, match=rf"data\.tokens is 3 and the model's {words['length']}"):
        model.check_words(3, words["vocabulary"])
    with pytest.raises(ValueError, match=r"data\.vocabulary is 7 and the model's"):
        model.check_words(words["length"], 7)


@pytest.mark.parametrize("layers", [1, 2])
def test_every_trained_weight_of_the_autoencoder_gets_a_gradient(layers):
    module = LatentVideoAutoencoder({**AUTOENCODER, "layers_per_block": layers})
    module.configure_model()
    l1, kl, _, _ = module._losses(SimpleNamespace(video=torch.rand(1, 2, 3, 16, 16), index=torch.tensor([0])), 0, True)
    (l1 + kl).backward()
    idle = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert not idle, "DDP refuses trained weights that a loss does not use"


def other_channels(folder):
    video_unet({**SMALL_UNET, **UNET}).save_pretrained(folder / "svd" / "unet")
    video_autoencoder({**SMALL_AUTOENCODER, **AUTOENCODER, "latent_channels": 3}).save_pretrained(
        folder / "svd" / "vae"
    )
    return ["--model.init_from", str(folder / "svd")]


def other_latents(folder):
    latents = {"latents": torch.zeros(12, 4, 8, 8)}
    rows = []
    for i in range(8):
        save_file(latents, folder / f"{i}.safetensors", {"autoencoder": "another"})
        rows.append(f"{i}.safetensors,move right\n")
    (folder / "captions.csv").write_text("file,caption\n" + "".join(rows))
    return ["--data.source", str(folder)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data.tokens", "3"], "data.tokens is 3 and the model's 8: set data.tokens to 8"),
        (["--model.stochastic", "[0, 1]"], "steps [1] cannot be stochastic: allowed are 0 to 0, because the last step"),
        (["--model.group", "1"], "group 1 has nothing to compare with: use at least 2 samples per context"),
        (["--data.frames", "3"], "the clips have 3 frames and the model 4: set data.frames to 4"),
        (["--data.frames", "9"], "fewer frames than the 17 that a clip spans: 0.gif (12)"),
        (other_channels, "the U-Net makes latents of 4 channels, but the autoencoder's have 3"),
        (other_latents, "were made by another autoencoder than the model's: make them again with VideoModel.write"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_command_in_one_line(args, message, home, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ["--data.source", str(home / "own"), "--data.stride", "2", "--data.size", "32", "--data.batch_size", "2"]
    quick = ["--trainer.callbacks", "[]", "--trainer.limit_val_batches", "0", "--trainer.accelerator", "cpu"]
    more = args if isinstance(args, list) else args(tmp_path)
    assert message in refusal(["fit", "-c", "dyn_vpp/metaworld", *own, *quick, *more], capsys)
