"""Dyn-VPP against arrays of the official functions and of an independent float64 calculation."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lightning_modules.dyn_vpp.networks import (
    Condition,
    clean_prediction,
    first_step_features,
    guidance_scales,
    predict_clean,
    predict_velocity,
    video_unet,
)
from lightning_modules.dyn_vpp.objective import clipped_objective, group_advantages
from lightning_modules.dyn_vpp.rewards import cosine_reward, difference_reward, l1_reward, latent_reward
from lightning_modules.dyn_vpp.sampler import (
    Step,
    gaussian_kl,
    hybrid_schedule,
    karras_sigmas,
    log_probability,
    log_ratio,
    move,
    rollout,
    start_scale,
)
from tests.parity.cases import check, files


def _load(path):
    arrays = np.load(path, allow_pickle=False)
    config = json.loads(str(arrays["config_json"]))
    return {k: torch.from_numpy(np.asarray(arrays[k])) for k in arrays.files if k != "config_json"}, config


def _close(actual, expected, atol, rtol=0.0):
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=atol, rtol=rtol)


def sigmas(path):
    a, config = _load(path)
    for steps, low, high in config["cases"]:
        (case,) = {k.split("/")[0] for k in a if k.startswith(f"N{steps}_min{low}_max{high}/")}
        levels = karras_sigmas(steps, low, high, config["rho"])
        ours = torch.tensor(levels, dtype=torch.float64)
        _close(ours, a[f"{case}/ref_sigmas"], 0, 1e-10)
        _close(ours.float(), a[f"{case}/sigmas"], 1e-6, 2e-5)
        _close((ours[:-1].log() / 4).float(), a[f"{case}/timesteps"], 1e-6, 2e-5)
        assert start_scale(levels[0]) == pytest.approx(a[f"{case}/init_noise_sigma"].item(), rel=2e-5)
        schedule = hybrid_schedule(levels, range(steps - 1))
        _close(torch.tensor([t.std for t in schedule]).double(), a[f"{case}/ref_sigma_up"].float(), 1e-7, 1e-6)
        for name, index in (("ref_sigma_up", 2), ("ref_sigma_down", 1)):
            values = torch.tensor([t[index] for t in schedule], dtype=torch.float64)
            _close(values, a[f"{case}/{name}"], 1e-300, 1e-10)
        # clean = c_skip x + c_out v, and the network sees c_in x: read the three factors off the functions
        one = torch.ones(steps, 1, 1, 1, 1, dtype=torch.float64)
        seen = []

        class Spy(torch.nn.Module):
            dtype = torch.float64

            def forward(self, sample, *rest, return_dict, seen=seen):
                seen.append(sample)
                return (torch.zeros_like(sample[:, :, :1]),)

        context = Condition(0 * one, torch.zeros(steps, 1, 1), torch.zeros(steps, 3))
        predict_velocity(Spy(), one, ours[:-1], context)
        _close(seen[0][:, 0, 0, 0, 0], a[f"{case}/c_in"], 0, 1e-10)
        _close(clean_prediction(one, 0 * one, ours[:-1]).flatten(), a[f"{case}/c_skip"], 0, 1e-10)
        _close(clean_prediction(0 * one, one, ours[:-1]).flatten(), a[f"{case}/c_out"], 0, 1e-10)


def steps(path):
    a, config = _load(path)
    levels = a["sigmas"].double().tolist()
    n = config["N"]
    ode, ancestral = hybrid_schedule(levels, ()), hybrid_schedule(levels, range(n - 1), eta=config["eta"])
    drift = hybrid_schedule(levels, range(n - 1), "drift", 0.1)
    for dtype, reference in ((torch.float32, ""), (torch.float64, "ref_")):
        x, v = a["x"].to(dtype), a["v"].to(dtype)
        for i, sigma in enumerate(levels[:-1]):
            exact = dtype == torch.float64
            bounds = (1e-10, 1e-10) if exact else (5e-6 * math.hypot(sigma, 1), 1e-5)
            clean = clean_prediction(x[i], v[i], sigma)
            _close(clean, a[f"{reference}x0"][i], *bounds)
            _close(move(x[i], clean, ode[i]), a[f"{reference}ode_next"][i], *bounds)
            mean, std = move(x[i], clean, ancestral[i]), ancestral[i].std
            _close(mean, a["ref_mean"][i], *bounds)
            assert std == pytest.approx(a["ref_sigma_up"][i].item(), rel=1e-10, abs=1e-300)
            assert i == n - 1 or ancestral[i].target == pytest.approx(a["ref_sigma_down"][i].item(), rel=1e-10)
            if i == n - 1:
                continue
            sample = a["ea_next"][i].to(dtype)
            official = (5e-6 * math.hypot(sigma, 1), 1e-5)
            _close(mean.float(), a["ea_mean_diffusers"][i].float(), *official)
            _close((mean + std * a["eps"][i].to(dtype)).float(), a["ea_next"][i], *official)
            assert std == pytest.approx(a["ea_sigma_up"][i].item(), rel=1e-5)
            logp = log_probability(sample, mean, std)
            _close(logp.float(), a["logp"][i], 5e-5)
            if exact:
                _close(logp, a["ref_logp"][i], 1e-9)
                _close(log_probability(mean + std * a["eps"][i].double(), mean, std), a["ref_logp_from_eps"][i], 1e-9)
            other = log_probability(a["ode_next"][i].to(dtype), move(x[i], clean, drift[i]), drift[i].std)
            _close(other.float(), a["alt_logp_eta0p1"][i], 5e-5, 1e-5)
    with pytest.raises(ValueError, match="stochastic"):
        hybrid_schedule(levels, [n - 1])


def ratio(path):
    a, config = _load(path)
    i = config["step_index"]
    schedule = hybrid_schedule(a["sigmas"].double().tolist(), [i])
    transition = schedule[i]
    for dtype in (torch.float64, torch.float32):
        x, new, old, eps = (a[k].to(dtype) for k in ("x", "v_new", "v_old", "eps"))
        new.requires_grad_()
        clean, before = clean_prediction(x, new, transition.sigma), clean_prediction(x, old, transition.sigma)
        step = Step(transition, *(t[:, None] for t in (x, before, eps)))
        ours = log_ratio(step, clean[:, None])[:, 0]
        if dtype == torch.float32:
            assert (ours - a["ref_logratio"]).abs().max() < 1e-3 * a["ref_logratio"].abs().max()
            continue
        _close(ours, a["ref_logratio"], 1e-12)
        _close(ours.exp(), a["ref_ratio"], 1e-12)
        _close(log_ratio(step, clean[:, None], "sum")[:, 0], a["ref_logratio_sum"], 1e-9, 1e-9)
        (ours * a["cotangent"]).sum().backward()
        _close(new.grad, a["ref_grad_v"], 1e-12, 1e-8)
        mean_old, mean_new = move(x, before, transition), move(x, clean, transition)
        _close(mean_old, a["ref_mean_old"], 1e-10, 1e-10)
        _close(mean_new, a["ref_mean_new"], 1e-10, 1e-10)
        _close(mean_old + transition.std * eps, a["ref_x_next"], 1e-10, 1e-10)
        _close(log_probability(a["ref_x_next"], mean_old, transition.std), a["ref_logp_old"], 1e-9)
        _close(log_probability(a["ref_x_next"], mean_new, transition.std), a["ref_logp_new"], 1e-9)
        _close(gaussian_kl(clean, before, transition), a["ref_kl"], 1e-12, 1e-8)
        _close((clean - before).square().mean((-3, -2, -1)), a["ref_x0_distance"], 1e-12, 1e-8)


def reward(path):
    a, config = _load(path)
    weights = config["w_l1"], config["w_cos"]
    _close(latent_reward(a["pred"], a["target"], *weights), a["reward"], 1e-6)
    prediction, target = a["pred"].double(), a["target"].double()
    _close(latent_reward(prediction, target, *weights), a["ref_reward"], 1e-12)
    _close(l1_reward(prediction, target), a["ref_l1"], 1e-12)
    _close(cosine_reward(prediction, target), a["ref_cos"], 1e-12)
    _close(difference_reward(prediction, target), a["ref_delta"], 1e-12)


def advantages(path):
    a, config = _load(path)
    b, g = config["B"], config["G"]
    options = {"zero_std": config["zero_std_threshold"], "eps": config["eps"]}
    rewards = a["rewards"].unflatten(0, (b, g))
    ours = group_advantages(rewards.double(), bound=config["adv_clip"], **options)
    _close(ours.values.flatten(0, 1), a["ref_advantages"], 1e-9)
    _close(ours.zero_std_fraction, a["ref_zero_std_fraction"], 1e-12)
    assert ours.nonfinite == 0
    by_generation = a["rewards_generation_major"].double().unflatten(0, (g, b)).transpose(0, 1)
    swapped = group_advantages(by_generation, bound=config["adv_clip"], **options).values
    _close(swapped.transpose(0, 1).flatten(0, 1), a["ref_advantages_generation_major"], 1e-9)
    free = group_advantages(rewards.double(), bound=math.inf, zero_std=0.0, eps=config["eps"])
    _close(free.values.flatten(0, 1), a["ref_advantages_eps"], 1e-9)
    single = group_advantages(rewards.float(), bound=config["adv_clip"], **options).values
    std = a["ref_group_std"][:, None].expand(-1, g, -1)
    for part in (std > 1e-3, std < options["zero_std"]):
        atol = 1e-4 if (std[part] > 1e-3).any() else 0
        _close(single[part], a["ref_advantages"].unflatten(0, (b, g))[part], atol)


def objective(path):
    a, config = _load(path)
    assert torch.allclose(a["log_ratio"], a["logp_new"] - a["logp_old"], atol=1e-12)
    logp = a["logp_new"].clone().requires_grad_()
    elements = clipped_objective(logp - a["logp_old"], a["advantages"], config["eps"])
    elements.mean().backward()
    _close(elements.detach(), a["ref_loss_elements"], 1e-12)
    _close(elements.detach().mean(), a["ref_loss"], 1e-12)
    _close(elements.detach().mean() + config["beta"] * a["kl"].mean(), a["ref_loss_with_kl"], 1e-12)
    _close(logp.grad, a["ref_grad_logp"], 1e-12)
    single = clipped_objective(a["log_ratio"].float(), a["advantages"].float(), config["eps"])
    _close(single.mean(), a["ref_loss"], 1e-6, 1e-5)
    r = a["log_ratio"].exp()
    _close(((r - 1).abs() > config["eps"]).double().mean(), a["ref_clip_fraction"], 1e-12)
    _close(0.5 * a["log_ratio"].square().mean(), a["ref_approx_kl"], 1e-12)


def unet(path):
    a, config = _load(path / "features.npz")
    network = video_unet(json.loads((path / "config.json").read_text())).eval()
    network.load_state_dict(load_file(path / "unet.safetensors"))
    condition = Condition(a["image_latent"], a["text"], a["added_time_ids"])
    x, levels, frames = a["noise"], a["sigmas"].double().tolist(), a["noise"].shape[1]
    schedule = hybrid_schedule(levels)
    guidance = guidance_scales(frames, config["guidance_max"])
    _close(guidance, a["guidance"], 1e-6)
    wide = config["sigma_max"] / 20
    start = x / start_scale(levels[0])
    with torch.no_grad():
        _close(predict_velocity(network, x, levels[0], condition), a["v"], 2e-5, 1e-4)
        _close(predict_velocity(network, x, levels[0], condition, rows=1), a["v"], 2e-5, 1e-4)
        unconditional = condition._replace(text=torch.zeros_like(condition.text))
        _close(predict_velocity(network, x, levels[0], unconditional), a["v_uncond"], 2e-5, 1e-4)
        _close(predict_velocity(network, x, levels[0], condition, guidance), a["v_guided"], 2e-5, 1e-4)

        tokens = first_step_features(network, start, levels[0], condition)
        _close(tokens, a["tokens"], 2e-5, 1e-4)
        for block in (0, 1):
            alone = first_step_features(network, start, levels[0], condition, [block])
            _close(alone, a[f"up_block{block}"].flatten(2).transpose(1, 2).unflatten(0, x.shape[:2]), 2e-5, 1e-4)

        for name, scales in (("", None), ("_guided", guidance)):

            def denoise(x, sigma, scales=scales):
                return predict_clean(network, x, sigma, condition, scales)

            result = rollout(denoise, start[:, None], a["eps"][None, :, None], schedule)
            mean = move(result.steps[0].x, result.steps[0].clean, schedule[0])
            _close(mean[:, 0], a[f"mean0{name}"], 1e-4 * wide)
            state, states = x, [x]
            for transition in schedule:
                state = move(state, denoise(state, transition.sigma), transition)
                state = state + transition.std * a["eps"]
                states.append(state)
            _close(torch.stack(states), a[f"trajectory{name}"], 1e-3 * wide)
            _close(result.latents[:, 0], a[f"trajectory{name}"][-1], 1e-3 * wide)
            if not name:
                _close(log_probability(states[1], mean[:, 0], schedule[0].std), a["logp0"], 1e-4)

        network.double()
        _close(predict_velocity(network, x.double(), levels[0], condition), a["v_float64"], 1e-9, 1e-7)


CHECKS = {
    "sigmas*.npz": sigmas,
    "steps_*.npz": steps,
    "log_ratio*.npz": ratio,
    "latent_reward*.npz": reward,
    "group_advantages*.npz": advantages,
    "objective*.npz": objective,
    "unet_*": unet,
}


@pytest.mark.parametrize("path", files("dyn_vpp"))
def test_parity(path):
    check(path, CHECKS)
