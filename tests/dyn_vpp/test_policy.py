"""The policy on first-step features: shapes, closed forms, what is trained, the control loop, the simulator."""

import json

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from callbacks import Rollouts
from datamodules import ExpertVideos
from datamodules.videos import caption_bytes, read_caption_bytes
from lightning_modules import VideoDiffusion, VideoPolicy
from lightning_modules.dyn_vpp.action_model import ActionConfig, ActionModel, VideoRolloutPolicy
from lightning_modules.dyn_vpp.networks import SMALL_AUTOENCODER, SMALL_UNET, first_step_features
from lightning_modules.dyn_vpp.video_model import VideoModel
from tests.dyn_vpp.toys import AUTOENCODER, DATA, UNET, write_folder
from tests.helpers import run

SIZES = {"action_dim": 4, "horizon": 6, "action_steps": 3, "queries": 2, "width": 16}
SIZES |= {"former_layers": 1, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def video():
    torch.manual_seed(0)
    unet, autoencoder = {**SMALL_UNET, **UNET}, {**SMALL_AUTOENCODER, **AUTOENCODER}
    return VideoModel(unet, autoencoder, {"vocabulary": 64, "length": 4})


@pytest.fixture
def model(video):
    torch.manual_seed(1)
    model = ActionModel(video, ActionConfig(**SIZES, sigma=5.0, steps=3))
    model.fit(torch.tensor([[1.0, 0.0, 3.0, 1.0], [-1.0, 4.0, 3.0, 0.0]]))
    return model


def inputs(b=2):
    torch.manual_seed(2)
    image, tokens = torch.rand(b, 3, 16, 16) * 2 - 1, torch.tensor([[3, 4, 0, 0], [5, 0, 0, 0]])[:b]
    return image, tokens, torch.randn(b, 4, 4, 8, 8)


def test_features_are_those_of_the_first_step_and_the_goal_is_the_mean_of_the_words(model):
    image, tokens, start = inputs()
    features, goal = model.features(image, tokens, start)
    assert features.shape == (2, 4, 64, 64) and not features.requires_grad
    condition = model.video.condition(model.video.encode(image[:, None]), tokens, ())
    assert torch.equal(features, first_step_features(model.video.unet, start, 5.0, condition))
    words = model.video.text.words.weight
    assert torch.allclose(goal[0], (words[3] + words[4]) / 2, atol=1e-6)
    assert torch.allclose(goal[1], words[5], atol=1e-6)


def test_actions_are_normalised_to_the_heads_deviation(model):
    assert model.mean.tolist() == [0, 2, 3, 0.5]
    assert model.std.tolist() == [1, 2, 0.5, 0.5]  # the third does not vary
    features, goal = model.features(*inputs())
    # A head whose output is 0 keeps c_skip of the noisy action: after the last step to sigma 0 that is known in full.
    torch.nn.init.zeros_(model.decoder.out.weight)
    torch.nn.init.zeros_(model.decoder.out.bias)
    noise = torch.randn(2, 6, 4)
    normed = noise * 80
    for now, then in ((80.0, (80 * 1e-3) ** 0.5), ((80 * 1e-3) ** 0.5, 1e-3), (1e-3, 0.0)):
        normed = normed * (then / now + (1 - then / now) * 0.25 / (now**2 + 0.25))
    plan = model.plan(features, goal, noise)
    torch.testing.assert_close(plan, model.mean + 2 * model.std * normed, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_head_that_says_nothing_is_known(model):
    features, goal = model.features(*inputs())
    torch.nn.init.zeros_(model.decoder.out.weight)
    torch.nn.init.zeros_(model.decoder.out.bias)
    noise, uniform, actions = torch.randn(2, 6, 4), torch.tensor([0.3, 0.8]), torch.randn(2, 6, 4)
    from lightning_modules.dyn_vpp.networks import action_sigmas

    sigma = action_sigmas(uniform)[:, None, None]
    normed = 0.5 * (actions - model.mean) / model.std
    target = (normed - 0.25 / (sigma**2 + 0.25) * (normed + sigma * noise)) * (sigma**2 + 0.25).sqrt() / (sigma * 0.5)
    expected = target.square().mean().item()
    assert model.loss(features, goal, actions, uniform, noise).item() == pytest.approx(expected, rel=1e-4)


def test_gradients_reach_the_policy_and_nothing_else(model):
    model.train()
    assert not model.video.training and not model.video.unet.training
    features, goal = model.features(*inputs())
    model.loss(features, goal, torch.randn(2, 6, 4), torch.rand(2), torch.randn(2, 6, 4)).backward()
    assert all(p.grad is None for p in model.video.parameters())
    for name, p in model.named_parameters():
        assert name.startswith("video.") or p.grad is not None, name


def test_the_policy_object_hands_out_planned_chunks(model, tmp_path):
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    policy = VideoRolloutPolicy(model, [3, 4, 0, 0], seed=1)
    actions = [policy.act({"image": image}) for _ in range(4)]
    noise = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        chunk = model(torch.tensor(image)[None], torch.tensor([[3, 4, 0, 0]]), noise, 1)[0].numpy()
    assert np.array_equal(np.stack(actions[:3]), chunk[:3])
    assert not np.array_equal(actions[3], chunk[3])  # a new plan
    policy.reset()
    both = policy.act({"image": np.stack([image, image])})
    assert both.shape == (2, 4) and both.dtype == np.float32
    with pytest.raises(ValueError, match="has no image"):
        policy.act({})
    model.save(tmp_path / "saved")
    again = VideoRolloutPolicy.from_pretrained(tmp_path / "saved", [3, 4, 0, 0], seed=1)
    assert np.array_equal(again.act({"image": image}), actions[0])
    module = VideoPolicy.from_pretrained(tmp_path / "saved")
    observation = {"image": torch.tensor(image)[None, None], "tokens": torch.tensor([[3, 4, 0, 0]])}
    with torch.no_grad():
        own = model(torch.tensor(image)[None], torch.tensor([[3, 4, 0, 0]]), noise)
        assert torch.equal(module(observation, noise), own)


def test_an_old_head_acts_on_another_video_model(model, tmp_path):
    policy = VideoPolicy(**SIZES, sigma_max=5.0, action_noise_levels=3, networks=model.video.parts())
    policy.model = model
    run = Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False)
    run.strategy.connect(policy)
    run.save_checkpoint(tmp_path / "policy.ckpt")
    other = VideoModel(**model.video.parts() | {"fps": 5.0})  # random weights of its own
    other.autoencoder.register_to_config(scaling_factor=2.0)
    other.save(tmp_path / "other")
    mixed = VideoPolicy.load_from_checkpoint(tmp_path / "policy.ckpt", other_video=str(tmp_path / "other"))
    expected = model.state_dict() | {f"video.{k}": v for k, v in other.state_dict().items()}
    assert not torch.equal(expected["video.unet.conv_in.weight"], model.video.unet.conv_in.weight)
    assert all(torch.equal(v, expected[k]) for k, v in mixed.model.state_dict().items())
    assert mixed.model.video.config["fps"] == 5 and mixed.model.video.autoencoder.config.scaling_factor == 2
    assert mixed.hparams["other_video"] is None and mixed.hparams["networks"]["fps"] == 5
    longer = VideoModel(**{**other.parts(), "unet": {**other.parts()["unet"], "num_frames": 5}})
    longer.save(tmp_path / "longer")
    with pytest.raises(ValueError, match="has other sizes than the policy's own video model"):
        VideoPolicy.load_from_checkpoint(tmp_path / "policy.ckpt", other_video=str(tmp_path / "longer"))
    with pytest.raises(ValueError, match="other_video needs the policy in one file"):
        mixed.hparams["other_video"] = "other"
        mixed.on_load_checkpoint({})
    with pytest.raises(ValueError, match="other_video is for a trained policy"):
        policy.hparams["other_video"] = "other"
        policy.on_fit_start()


def test_refusals(video, tmp_path):
    with pytest.raises(ValueError, match="the policy's actions are not fitted"):
        VideoRolloutPolicy(ActionModel(video, ActionConfig(**SIZES)), [1])
    with pytest.raises(ValueError, match="action_steps 7 must be from 1 to the horizon 6"):
        VideoPolicy(horizon=6, action_steps=7)
    with pytest.raises(ValueError, match="history 2 must be 1"):
        VideoPolicy(history=2)
    with pytest.raises(ValueError, match=r"name its checkpoint or folder with --model\.init_from"):
        VideoPolicy(action_dim=4).configure_model()


@pytest.fixture(scope="module")
def clip_video(tmp_path_factory):
    """A video model that reads text by a tiny CLIP with random weights."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(c) for c in range(97, 123)]
    pieces = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": len(pieces) - 2, "eos_token_id": len(pieces) - 1}
    sizes = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    config = CLIPTextConfig(vocab_size=len(pieces), projection_dim=24, max_position_embeddings=40, **sizes, **ends)
    CLIPTextModelWithProjection(config).save_pretrained(folder)
    unet = {**SMALL_UNET, **UNET, "cross_attention_dim": 1024}
    return VideoModel(unet, {**SMALL_AUTOENCODER, **AUTOENCODER}, {"clip": str(folder), "length": 20})


def test_clip_reads_the_instruction(clip_video, tmp_path):
    """Numbers of words are not looked at; the caption is, by the module, the control loop and what a folder holds."""
    torch.manual_seed(1)
    model = ActionModel(clip_video, ActionConfig(**SIZES, sigma=5.0, steps=3)).eval()
    model.fit(torch.tensor([[1.0, 0.0, 3.0, 1.0], [-1.0, 4.0, 3.0, 0.0]]))
    image, tokens, start = inputs()
    text = clip_video.text
    hidden = text.tower(**text.tokenizer(["door open"], padding="max_length", max_length=20, return_tensors="pt"))
    goal = model.features(image, tokens, start, ["door open", "reach"])[1]
    torch.testing.assert_close(goal[0], hidden.text_embeds[0])
    torch.testing.assert_close(text(tokens[:1], ["door open"])[0], hidden.last_hidden_state[0].repeat(1, 2))
    assert goal.shape == (2, 24) and not torch.equal(goal[0], goal[1])
    noise = torch.randn(2, 6, 4)
    pictures = ((image + 1) * 127.5).round().byte().permute(0, 2, 3, 1)
    module = VideoPolicy(**SIZES, sigma_max=5.0, action_noise_levels=3)
    module.model = model
    captions = ["door open", "öffne die tür"]
    observation = {"image": pictures[:, None], "tokens": tokens, "caption": torch.from_numpy(caption_bytes(captions))}
    assert read_caption_bytes(observation["caption"]) == captions
    with torch.no_grad():
        plan = module(observation, noise)
        assert torch.equal(plan, model(pictures, tokens, noise, 0, captions))
        assert not torch.equal(plan, model(pictures, tokens, noise, 0, ["reach", "reach"]))
    model.save(tmp_path / "saved")
    picture = {"image": pictures[0].numpy()}
    first = VideoRolloutPolicy(model, [], caption="door open").act(picture)
    again = VideoRolloutPolicy.from_pretrained(tmp_path / "saved", [], caption="door open")
    assert np.array_equal(first, again.act(picture))
    assert not np.array_equal(first, VideoRolloutPolicy(model, [], caption="reach").act(picture))
    with pytest.raises(ValueError, match="reads text by CLIP: give the instruction as caption"):
        VideoRolloutPolicy(model, [])
    with pytest.raises(ValueError, match="CLIP reads the instructions themselves: 2 captions are needed, not 0"):
        module({"image": pictures[:, None], "tokens": tokens}, noise)


def test_a_base_and_a_policy_learn_with_clip(clip_video, tmp_path):
    parts = clip_video.parts()
    run = {"max_epochs": 1, "limit_train_batches": 1, "logger": False, "accelerator": "cpu"}
    run |= {"enable_model_summary": False, "enable_progress_bar": False}
    run |= {"limit_val_batches": 1, "num_sanity_val_steps": 0, "default_root_dir": tmp_path}
    data = ExpertVideos(str(write_folder(tmp_path / "videos")), data_dir=str(tmp_path / "data"), **DATA)
    base = VideoDiffusion(parts["unet"], text_encoder=parts["text"]["clip"], tokens=20, steps=3, eval_group=2)
    trainer = Trainer(**run)
    trainer.fit(base, data)
    tower = clip_video.text.tower.state_dict()
    assert all(torch.equal(v, tower[k]) for k, v in base.model.text.tower.state_dict().items())
    trainer.save_checkpoint(tmp_path / "base.ckpt")
    data = ExpertVideos(
        "metaworld", ["reach-v3"], 1, 1, max_steps=60, data_dir=str(tmp_path / "data"), processes=1, **DATA
    )
    policy = VideoPolicy(init_from=str(tmp_path / "base.ckpt"), **{**SIZES, "action_dim": None}, sigma_max=5.0)
    trainer = Trainer(**run, callbacks=[Rollouts(1, 6, picture=0, latency_calls=1)])
    trainer.fit(policy, data)
    assert 0 <= trainer.callback_metrics["val/success_rate"] <= 1
    (metrics,) = trainer.test(policy, data, verbose=False)
    assert metrics["test/latency_ms"] > 0


@pytest.mark.long
def test_it_trains_on_clips_and_acts_in_the_simulator(video, tmp_path):
    video.save(tmp_path / "video")
    small = [
        *("--data.tasks", '["reach-v3"]', "--data.episodes", "2", "--data.test_episodes", "1", "--data.size", "16"),
        *("--data.frames", "4", "--data.processes", "1", "--data.max_steps", "100", "--data.batch_size", "4"),
        *("--data.vocabulary", "64", "--data.tokens", "4", "--trainer.max_steps", "2", "--trainer.accelerator", "cpu"),
        *("--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1", "--model.width", "16"),
        *("--model.init_from", str(tmp_path / "video"), "--model.horizon", "6", "--model.action_steps", "3"),
        *("--trainer.callbacks", "callbacks.Rollouts", "--trainer.callbacks.episodes", "2"),
        *("--trainer.callbacks.max_steps", "6", "--trainer.callbacks.picture", "16"),
        *("--trainer.callbacks.latency_calls", "2", "--trainer.callbacks+=callbacks.PredictionWriter"),
        *("--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint", "--trainer.callbacks.save_last=true"),
    ]
    folder = run(["fit", "-c", "dyn_vpp/metaworld_policy", *small], tmp_path / "runs")
    last = folder / "checkpoints" / "last.ckpt"
    again = ["-c", str(folder / "config.yaml"), "--ckpt_path", str(last)]
    run(["test", *again], tmp_path / "runs")
    metrics = json.loads((folder / "test_metrics.json").read_text())
    assert {"test/loss", "test/action_error", "test/success_rate", "test/latency_ms"} <= metrics.keys()
    run(["predict", *again], tmp_path / "runs")
    assert "action_2_3" in (folder / "predictions.csv").read_text().splitlines()[0]
    video.unet.conv_in.weight.data.mul_(2)  # a post-trained one
    video.save(tmp_path / "post")
    run(["test", *again, "--model.other_video", str(tmp_path / "post")], tmp_path / "runs")
    other = json.loads((folder / "test_metrics.json").read_text())
    assert other["test/loss"] != metrics["test/loss"] and "test/success_rate" in other
    video.unet.conv_in.weight.data.div_(2)
    module = VideoPolicy.load_from_checkpoint(last)
    assert module.hparams["action_dim"] == 4 and module.model.fitted
    frozen = module.model.video.state_dict()
    assert all(torch.equal(v, frozen[k]) for k, v in video.state_dict().items())


def test_clips_show_a_policy_what_the_simulator_does(tmp_path):
    """One episode: picture and words of a clip are those that the simulator of the same layout shows."""
    options = {"tasks": ["reach-v3"], "episodes": 1, "test_episodes": 1, "frames": 2, "size": 8, "processes": 1}
    data = ExpertVideos(**options, max_steps=120, batch_size=1, data_dir=str(tmp_path))
    data.prepare_data()
    data.setup()
    assert data.action_dim == 4 and data.actions().shape[1] == 4
    batch = next(iter(data.val_dataloader()))
    simulators = data.simulators("reach-v3")
    from datamodules import metaworld

    seed = metaworld.episode_seed("reach-v3", 0, 0, "videos for validation")
    step, layouts = simulators.reset([seed])
    simulators.close()
    assert np.array_equal(step.observation["tokens"], batch.tokens.numpy())
    assert np.array_equal(step.observation["image"][0], batch.observation["image"][0].numpy())
    assert read_caption_bytes(torch.from_numpy(step.observation["caption"])) == batch.caption == ["reach"]
    assert layouts.shape == (1, data.layouts("reach-v3").shape[1])
