"""FocalPolicy against arrays made with the released code."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from callbacks.ema import EMA, ema_decay
from lightning_modules.focal_policy.encoders import ObservationEncoder, PointEncoder
from lightning_modules.focal_policy.losses import (
    dct,
    endpoint,
    foresight_composite_objective,
    frequency_term,
    interpolate,
)
from lightning_modules.focal_policy.network import ConditionalUnet1d
from lightning_modules.focal_policy.normalizer import fit_affine
from lightning_modules.focal_policy.policy import TIME_SCALE, PolicyConfig, PolicyNetwork
from lightning_modules.focal_policy.sampler import flow_times
from tests.parity.cases import check, files


def read(path: Path) -> tuple[dict, dict[str, Tensor]]:
    with np.load(path, allow_pickle=False) as file:
        arrays = {k: torch.from_numpy(np.array(file[k])) for k in file.files if k != "config_json"}
        return json.loads(str(file["config_json"])), arrays


def part(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def close(found: Tensor, expected: Tensor, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found.detach().to(expected.dtype), expected, atol=atol, rtol=rtol)


def check_unet(path: Path) -> None:
    config, a = read(path)
    net = ConditionalUnet1d(
        config["input_dim"],
        config["global_cond_dim"],
        config["down_dims"],
        config["diffusion_step_embed_dim"],
        config["kernel_size"],
        config["n_groups"],
    )
    net.load_state_dict(part(a, "w/"))
    kept: dict[str, Tensor] = {}
    probes = {"down0_res0": net.down_modules[0][0], "mid_out": net.mid_modules[-1]}
    for name, module in probes.items():
        module.register_forward_hook(lambda m, i, o, name=name: kept.__setitem__(name, o))
    sample, condition = a["in/sample"].requires_grad_(), a["in/global_cond"].requires_grad_()
    velocity = net(sample, a["in/timestep"], condition)
    gradients = torch.autograd.grad((velocity * a["in/cotangent"]).sum(), (sample, condition))
    close(velocity, a["out/velocity"])
    close(net.diffusion_step_encoder(a["in/timestep"]), a["out/time_embed"])
    close(gradients[0], a["out/grad_sample"])
    close(gradients[1], a["out/grad_global_cond"])
    for name, value in kept.items():
        if f"out/{name}" in a:
            close(value, a[f"out/{name}"])


def check_encoder(path: Path) -> None:
    config, a = read(path)
    points = a["in/point_cloud"]
    channels = points.shape[-1] if config["use_pc_color"] else 3
    encoder = ObservationEncoder(1, config["state_dim"], channels, point_features=config["out_channels"])
    encoder.extractor = PointEncoder(channels, config["out_channels"], config["use_layernorm"], config["final_norm"])
    encoder.load_state_dict(part(a, "w/"))
    points = points[..., :channels]
    close(encoder.extractor(points), a["out/point_feature"])
    close(encoder({"point_cloud": points[:, None], "state": a["in/agent_pos"][:, None]}), a["out/features"])


def policy(config: dict, a: dict[str, Tensor]) -> PolicyNetwork:
    channels = a["w/obs_encoder.extractor.mlp.0.weight"].shape[1]
    network = PolicyNetwork(
        PolicyConfig(
            action_dim=config["action_dim"],
            state_dim=config["state_dim"],
            point_channels=channels,
            horizon=config["horizon"],
            action_steps=config["n_action_steps"],
            history=config["n_obs_steps"],
            widths=tuple(config["down_dims"]),
            time_features=config["diffusion_step_embed_dim"],
            kernel_size=config.get("kernel_size", 5),
            groups=config.get("n_groups", 8),
            point_features=config["encoder_output_dim"],
            eps=config.get("eps", 0.01),
        )
    )
    weights = part(a, "w/")
    names = {"action": "action", "state": "agent_pos", "point_cloud": "point_cloud"}
    for ours, theirs in names.items():
        for what in ("scale", "offset"):
            weights[f"normalizer.{ours}_{what}"] = weights[f"normalizer.params_dict.{theirs}.{what}"]
    network.load_state_dict({k: v for k, v in weights.items() if "params_dict" not in k})
    return network


def observation(network: PolicyNetwork, a: dict[str, Tensor]) -> dict[str, Tensor]:
    channels = network.config.point_channels
    return {"point_cloud": a["in/point_cloud"][..., :channels], "state": a["in/agent_pos"]}


def check_loss(path: Path) -> None:
    config, a = read(path)
    network = policy(config, a)
    actions = network.normalizer("action", a["in/action"])
    close(actions, a["out/action_normalized"])
    condition = network.condition(observation(network, a))
    close(condition, a["out/global_cond"])
    tau, r, noise = a["in/tau"], a["in/r"], a["in/noise"]
    for name, s in (("tau", tau), ("r", r)):
        x = interpolate(actions, noise, s)
        close(x, a[f"out/x_{name}"])
        close(TIME_SCALE * s, a[f"out/time_arg_{name}"])
        found, v = endpoint(lambda x, s: network.velocity(x, s, condition), x, s)
        close(v, a[f"out/v_{name}"])
        close(found, a[f"out/F_{name}"])
    close(dct(a["out/F_tau"]), a["out/dct_pred"])
    close(dct(actions), a["out/dct_target"])
    softmax = frequency_term(a["out/F_tau"], actions, "dct_softmax").mean()
    close(softmax, a["out/adaptive_freq_loss"], 1e-6, 1e-5)

    terms = foresight_composite_objective(
        lambda x, s: network.velocity(x, s, condition), actions, noise, tau, r, action_steps=config["n_action_steps"]
    )
    loss = terms["time"].mean() + config["freq_weight"] * terms["freq"].mean()
    close(terms["time"].mean(), a["out/L_time"], 0, 1e-5)
    close(terms["freq"].mean(), a["out/L_freq"], 0, 1e-5)
    close(loss, a["out/L_total"], 0, 1e-5)
    loss.backward()
    gradients = {name: p.grad for name, p in network.named_parameters()}
    for name, expected in part(a, "out/grad/").items():
        close(gradients[name], expected, 1e-3 * float(expected.abs().max()), 0)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    close(norm, a["out/grad_norm_all"], 0, 1e-3)


def check_inference(path: Path) -> None:
    config, a = read(path)
    network = policy(config, a)
    with torch.no_grad():
        window = network(observation(network, a), a["in/noise"])
    close(window, a["out/action_pred"])
    close(window[:, network.config.executed], a["out/action"])


def check_times(path: Path) -> None:
    config, a = read(path)
    options = {
        "sampler": config["tr_sampler"],
        "mean_t": config["P_mean_t"],
        "std_t": config["P_std_t"],
        "mean_r": config["P_mean_r"],
        "std_r": config["P_std_r"],
        "ratio": config["ratio"],
        "eps": config["eps"],
    }
    tau, r = flow_times(*(a[f"in/{name}"] for name in ("u_tau", "n_a", "n_b", "u_mix")), **options)
    close(tau, a["out/tau"], 1e-6, 0)
    close(r, a["out/r"], 1e-6, 0)

    n = 400_000
    g = torch.Generator().manual_seed(0)
    draws = [torch.rand(n, generator=g), *torch.randn(2, n, generator=g), torch.rand(n, generator=g)]
    tau, r = (x.double() for x in flow_times(*draws, **options))
    levels = a["stat/quantile_levels"]
    tolerance = 5 * (0.25 / n + 0.25 / config["n_stat_draws"]) ** 0.5
    # A quantile is compared by the share of draws below it, which has a known standard error whatever the density.
    for name, values in (("r", r), ("tau", tau)):
        share = (values[:, None] <= a[f"stat/{name}_quantiles"]).double().mean(0)
        close(share, levels, tolerance, 0)
    above = (r[:, None] > torch.tensor([0.5, 0.7, 0.9, 0.95, 0.99])).double().mean(0)
    close(above, a["stat/prob_r_gt"], tolerance, 0)
    close((r < tau).double().mean(), a["stat/prob_r_lt_tau"], tolerance, 0)
    close(torch.stack([r.mean(), r.std()]), a["stat/r_mean_std"], tolerance, 0)
    close(torch.stack([(1 - r).mean(), (1 - r).square().mean()]), a["stat/mean_1mr"], tolerance, 0)
    close(torch.corrcoef(torch.stack([tau, r]))[0, 1], a["stat/corr_tau_r"], 2 * tolerance, 0)


def check_ema(path: Path) -> None:
    config, a = read(path)
    # The released code counts from 0 and waits one update more: its update n is our step n + 1.
    start = config["update_after_step"] + 2
    largest, power, gamma = config["max_value"], config["power"], config["inv_gamma"]

    def decay(n: int) -> float:
        value = ema_decay(n + 1, largest, power, gamma, start)
        return max(value, config["min_value"]) if n + 1 > start else value

    assert [decay(n) for n in range(config["steps"])] == pytest.approx(a["out/decay"].tolist(), abs=1e-12)
    indices = a["in/step_index"].tolist()
    assert [decay(n) for n in indices] == pytest.approx(a["out/decay_at_index"].tolist(), abs=1e-12)
    if config["min_value"] > 0:
        return  # the callback has no smallest decay

    callback, trainer = EMA(largest, power, gamma, start), SimpleNamespace(global_step=0)
    module = torch.nn.Module()
    module.norm = torch.nn.BatchNorm1d(a["in/batchnorm_weight"].shape[1])
    module.weight = torch.nn.Parameter(a["in/trainable"][0].clone())
    module.frozen = torch.nn.Parameter(a["in/frozen"][0].clone(), requires_grad=False)
    weights = {"trainable": module.weight, "frozen": module.frozen, "batchnorm_weight": module.norm.weight}
    callback.on_train_start(trainer, module)
    for n in range(config["steps"]):
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(a[f"in/{name}"][n])
        trainer.global_step = n + 1
        callback.on_train_batch_end(trainer, module, None, None, n)
        callback.on_validation_start(trainer, module)  # evaluation sees the averages, and the others as they are
        for name, weight in weights.items():
            close(weight, a[f"out/{name}_avg"][n], 1e-6, 0)
        callback.on_validation_end(trainer, module)
        for name, weight in weights.items():
            close(weight, a[f"in/{name}"][n], 0, 0)


def check_normalizer(path: Path) -> None:
    config, a = read(path)
    columns = int(np.prod(config["shape"][-config["last_n_dims"] :])) if config["last_n_dims"] else 1
    scale, offset = fit_affine(
        a["in/fit_data"].reshape(-1, columns),
        config["mode"],
        config["fit_offset"],
        config["output_min"],
        config["output_max"],
        config["range_eps"],
    )
    close(scale, a["out/scale"], 1e-5, 1e-5)
    close(offset, a["out/offset"], 1e-5, 1e-5)
    x, y = a["in/x"].reshape(-1, columns), a["out/normalized"].reshape(-1, columns)
    close(x * scale + offset, y, 1e-5, 1e-5)
    close((y - offset) / scale, a["out/unnormalized"].reshape(-1, columns), 1e-5, 1e-3)
    fitted = a["out/fit_data_normalized"].reshape(-1, columns)
    close(a["in/fit_data"].reshape(-1, columns) * scale + offset, fitted, 1e-5, 1e-5)


CHECKS = {
    "ema_*": check_ema,
    "encoder_*": check_encoder,
    "inference_*": check_inference,
    "loss_*": check_loss,
    "normalizer_*": check_normalizer,
    "time_sampler_*": check_times,
    "unet_*": check_unet,
}


@pytest.mark.parametrize("path", files("focal_policy"))
def test_case(path: Path) -> None:
    check(path, CHECKS)
