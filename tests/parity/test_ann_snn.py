"""Closed-loop ANN-to-SNN: arrays of the official functions and of an independent float64 calculation."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from spikingjelly.activation_based import functional

from lightning_modules.ann_snn.conversion import (
    SpikingNetwork,
    convert,
    gram,
    prepare,
    simulate,
    teacher_features,
)
from lightning_modules.ann_snn.losses import (
    batch_mean_cka,
    closed_loop_loss,
    hsic,
    layer_weights,
    linear_cka,
)
from lightning_modules.ann_snn.networks import SmallResNet
from lightning_modules.ann_snn.neurons import IFNode
from tests.parity.cases import check, files


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    with np.load(path, allow_pickle=False) as arrays:
        config = json.loads(arrays["config_json"].item()) if "config_json" in arrays else {}
        return {k: torch.from_numpy(arrays[k]) for k in arrays.files if k != "config_json"}, config


def below(a: dict, prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in a.items() if k.startswith(prefix)}


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 0.0, rtol: float = 0.0) -> None:
    known = expected.isfinite()  # the official formula has no gradient at a silent layer; ours is finite
    assert actual.shape == expected.shape and actual.isfinite().all()
    actual, expected = (z.detach().double()[known].numpy() for z in (actual, expected))
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=rtol)


def check_cka(path: Path) -> None:
    arrays, _ = load(path)
    for case in {k.partition("/")[0] for k in arrays}:
        a = below(arrays, f"{case}/")
        x, y = (a[k].clone().requires_grad_(k == "X") for k in ("X", "Y"))
        x64, y64 = (z.detach().double().requires_grad_() for z in (x, y))
        close(linear_cka(x, y), a["biased"], atol=1e-5)
        exact = linear_cka(x64, y64)
        close(exact, a["ref_biased"], atol=1e-10)
        close(torch.autograd.grad(exact, x64)[0], a["grad_X_exact"], atol=1e-10)
        close(torch.autograd.grad(linear_cka(x, y), x)[0], a["grad_X_exact"], atol=1e-6, rtol=1e-4)
        half = linear_cka(x, y, cka_grad="numerator_half")
        close(half, a["biased"], atol=1e-5)
        close(torch.autograd.grad(half, x)[0], a["grad_X_numerator_half"], atol=1e-6, rtol=1e-4)
        if len(x) < 4:
            with pytest.raises(ValueError, match="at least 4"):
                linear_cka(x, y, unbiased=True)
            continue
        close(linear_cka(x, y, unbiased=True), a["ref_unbiased"], atol=1e-3)
        close(linear_cka(x64, y64, unbiased=True), a["ref_unbiased"], atol=1e-8)
        kx, ky = x64 @ x64.T, y64 @ y64.T
        terms, single = hsic(kx, ky), hsic((x @ x.T).double(), (y @ y.T).double())
        for i, (name, left, right) in enumerate([("xy", kx, ky), ("xx", kx, kx), ("yy", ky, ky)]):
            scale = largest_hsic_term(left, right)
            close(terms[i], a[f"ref_hsic_{name}"], rtol=1e-9, atol=1e-13 * scale)
            close(single[i], a[f"hsic_{name}"], atol=1e-5 * scale)


def largest_hsic_term(k: torch.Tensor, q: torch.Tensor) -> float:
    n = len(k)
    k, q = (z.detach() - torch.diag(z.detach().diagonal()) for z in (k, q))
    terms = [(k * q).sum(), k.sum() * q.sum() / ((n - 1) * (n - 2)), 2 / (n - 2) * (k @ q).sum()]
    return max(abs(t.item()) for t in terms) / (n * (n - 3))


def check_layer_weights(path: Path) -> None:
    arrays, _ = load(path)
    for key, cka in below(arrays, "cka_").items():
        close(layer_weights(cka, clamp=False), arrays[f"weights_{key}"], atol=1e-12)
        close(layer_weights(cka), arrays[f"ref_weights_clamped_{key}"], atol=1e-12)


def check_combined_loss(path: Path) -> None:
    a, config = load(path)
    options = {k: config[k] for k in ("alpha", "beta", "tau")}

    def run(dtype: torch.dtype, cka_grad: str = "exact"):
        logits = a["snn_logits"].to(dtype).requires_grad_()
        student = {k: v.to(dtype).requires_grad_() for k, v in below(a, "snn_features/").items()}
        teacher = {k: v.to(dtype) for k, v in below(a, "ann_features/").items()}
        loss = closed_loop_loss(
            logits, a["ann_logits"].to(dtype), a["labels"], student, teacher, a["weights"], cka_grad=cka_grad, **options
        )
        leaves = {"logits": logits, **student}
        grads = torch.autograd.grad(loss.total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return loss, dict(zip(leaves, grads, strict=True))

    single, grads = run(torch.float32)
    double, grads64 = run(torch.float64)
    for name in ("total", "task", "global_kl", "local"):
        close(getattr(single, name), a[name], rtol=1e-5, atol=1e-9)
        close(getattr(double, name), a[f"ref_{name}"], rtol=1e-9, atol=1e-12)
    _, official = run(torch.float32, "numerator_half")
    for leaf in grads:
        exact = a["grad_logits_exact"] if leaf == "logits" else a[f"grad_features_exact/{leaf}"]
        close(grads[leaf], exact, atol=1e-7, rtol=1e-4)
        close(grads64[leaf], exact, atol=1e-10)
        close(official[leaf], exact if leaf == "logits" else a[f"grad_features_official/{leaf}"], atol=1e-7, rtol=1e-4)


def check_if(path: Path) -> None:
    a, config = load(path)
    current = a["current"]  # t n
    for start, v0 in zip(("v0_0", "v0_half"), config["start"], strict=True):
        node = IFNode(v0=v0, step_mode="m")
        spikes = node(current[:, None])[:, 0]
        sure = a[f"{start}/ref_min_distance"] >= 1e-6
        if "ref_closed_form" in dict(below(a, f"{start}/")):
            sure = torch.ones_like(sure)  # dyadic inputs: no rounding anywhere
            close(spikes.sum(0), a[f"{start}/ref_closed_form"])
        close(spikes[:, sure], a[f"{start}/spikes"][:, sure])
        close(spikes.sum(0)[sure], a[f"{start}/counts"][sure])
        close(spikes.sum(0)[sure], a[f"{start}/ref_counts"][sure])
        close(node.v[0, sure], a[f"{start}/v"][-1, sure], atol=1e-5)
        one = IFNode(v0=v0)  # every membrane on the way, step by step
        for t, x in enumerate(current):
            one(x[None])
            close(one.v[0, sure], a[f"{start}/v"][t, sure], atol=1e-5)


def source(a: dict, config: dict) -> SmallResNet:
    sizes = {k: config[k] for k in ("channels", "strides", "classes", "in_channels")}
    ann = SmallResNet(**sizes)
    ann.load_state_dict(below(a, "state/"))
    return ann.eval()


def converted(a: dict, config: dict, half_threshold: bool = False) -> tuple[SmallResNet, SpikingNetwork]:
    ann = source(a, config)
    assert config["momentum"] == 0.1
    percentile = 100.0 if config["mode"].lower() == "max" else float(config["mode"].removesuffix("%"))
    return ann, convert(ann, a["calibration"], percentile=percentile, half_threshold=half_threshold)


@torch.no_grad()
def check_conversion(path: Path) -> None:
    a, config = load(path)
    ann, student = converted(a, config)
    x = a["images"]
    neurons = student.neurons()
    thetas = torch.stack([n.threshold for n in neurons.values()])
    close(thetas, a["thetas"], rtol=1e-5)
    close(thetas, a["ref_thetas"], rtol=1e-5)
    close(student.network.conv1.weight, a["folded/conv1.weight"], atol=1e-6, rtol=1e-5)
    close(student.network.conv1.bias, a["folded/conv1.bias"], atol=1e-6, rtol=1e-5)
    logits, features = teacher_features(prepare(ann), x, student.monitored)
    close(logits, a["ann_logits"], atol=1e-5, rtol=1e-4)
    assert list(features) == list(below(a, "ann_features/"))
    for name, value in below(a, "ann_features/").items():
        close(features[name], value, atol=1e-5, rtol=1e-4)
    prefix = simulate(student, x, int(a["T"].max()), chunk=5).prefix_logits
    for i, time_steps in enumerate(a["T"].tolist()):
        for name in ("snn_logits", "ref_snn_logits"):
            close(prefix[time_steps - 1], a[name][i], atol=2e-5, rtol=1e-4)
    counted = next(k for k in a if k.startswith("ref_spike_counts_T"))
    time_steps = int(counted.rpartition("T")[2])
    counts = {}
    hooks = [
        n.register_forward_hook(lambda m, _, out, k=k: counts.__setitem__(k, (out > 0).flatten(2).sum((0, 2))))
        for k, n in neurons.items()
    ]
    rates = simulate(student, x, time_steps).features
    for hook in hooks:
        hook.remove()
    close(torch.stack(list(counts.values())), a[counted])
    for name, value in below(a, f"ref_rate_features_T{time_steps}/").items():
        close(rates[name], value, atol=1e-5, rtol=1e-5)
    _, half = converted(a, config, half_threshold=True)
    prefix = simulate(half, x, int(a["T"].max())).prefix_logits
    for i, time_steps in enumerate(a["T"].tolist()):
        close(prefix[time_steps - 1], a["ref_snn_logits_v0half"][i], atol=2e-5, rtol=1e-4)


def network_of(path: Path) -> tuple[dict, dict]:
    stem = path.name.removesuffix(".npz")
    for ending in ("_layer_weights", "_closed_loop_grad"):
        stem = stem.removesuffix(ending)
    return load(path.with_name(f"{stem}_conversion.npz"))


@torch.no_grad()
def check_network_weights(path: Path) -> None:
    a, config = load(path)
    base, base_config = network_of(path)
    ann, student = converted(base, base_config)
    teacher = prepare(ann)
    for dtype in (torch.float32, torch.float64):
        student = student.to(dtype)
        terms, biased, matrix = [], [], []
        for x in base["calibration"][: config["batches"]]:
            grams = simulate(student, x.to(dtype), config["T"], reduce=gram).features
            rates = simulate(student, x.to(dtype), config["T"]).features
            _, features = teacher_features(teacher, x, student.monitored)  # float32 in the references as well
            flat = {k: v.flatten(1).to(dtype) for k, v in features.items()}
            terms.append(torch.stack([hsic(grams[k], f @ f.T) for k, f in flat.items()]))
            matrix.append(torch.stack([hsic(grams[k], f @ f.T) for f in flat.values() for k in flat]))
            biased.append(torch.stack([linear_cka(rates[k], flat[k]) for k in flat]))
        cka = torch.stack([batch_mean_cka(layer) for layer in zip(*terms, strict=True)])
        biased = torch.stack(biased)
        if dtype == torch.float32:
            every = torch.stack([batch_mean_cka(pair) for pair in zip(*matrix, strict=True)])
            close(every.view(len(cka), len(cka)), a["cka_matrix"], atol=1e-4)  # [teacher layer, student layer]
            close(cka, a["cka_initial"], atol=1e-4)
            close(layer_weights(cka, clamp=False), a["weights"], rtol=1e-3)
        else:
            close(cka, a["ref_cka_unbiased"], atol=1e-8)
            close(layer_weights(cka, clamp=False), a["ref_weights"], rtol=1e-7)
            close(biased, a["ref_cka_biased_rate"], atol=1e-8)
            close(layer_weights(biased.mean(0)), a["ref_weights_biased"], rtol=1e-7)


def check_closed_loop_grad(path: Path) -> None:
    a, config = load(path)
    base, base_config = network_of(path)
    _, student = converted(base, base_config)
    teacher = below(base, "ann_features/")
    options = {k: config[k] for k in ("alpha", "beta", "tau")}
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.float64, 1e-6)):
        for mode in ("fused", "step by step"):
            student = student.to(dtype)
            student.zero_grad()
            out = simulate_by_steps(student, base["images"].to(dtype), config["T"]) if mode != "fused" else None
            out = out or simulate(student, base["images"].to(dtype), config["T"])
            loss = closed_loop_loss(
                out.logits,
                base["ann_logits"].to(dtype),
                base["labels"],
                out.features,
                {k: v.to(dtype) for k, v in teacher.items()},
                a["weights"],
                **options,
            )
            close(loss.total, a["total"], rtol=1e-5)
            close(loss.total, a["official_total"], rtol=1e-5)
            close(out.logits, a["snn_logits"], atol=2e-5, rtol=1e-4)
            loss.total.backward()
            grads = {k.removeprefix("network."): p.grad for k, p in student.named_parameters()}
            assert grads.keys() == below(a, "grad/").keys()
            for name, expected in below(a, "grad/").items():
                scale = expected.abs().max().item()
                close(grads[name], expected, atol=tolerance * scale)


def simulate_by_steps(student: SpikingNetwork, x: torch.Tensor, time_steps: int):
    """The same simulation as a loop over spikingjelly's single steps."""
    from lightning_modules.ann_snn.conversion import SimulationOutput

    modes = {m: m.step_mode for m in student.network.modules() if hasattr(m, "step_mode")}
    functional.set_step_mode(student.network, "s")
    features: dict[str, torch.Tensor] = {}
    hooks = [
        student.network.get_submodule(pair.student).register_forward_hook(
            lambda m, _, out, k=k: features.__setitem__(k, features.get(k, 0) + out / time_steps)
        )
        for k, pair in student.monitored.items()
    ]
    student.reset()
    logits = torch.stack([student.network(x) for _ in range(time_steps)])
    student.reset()
    for hook in hooks:
        hook.remove()
    for module, mode in modes.items():
        module.step_mode = mode
    return SimulationOutput(logits.mean(0), logits, features)


CHECKS = {
    "cka*.npz": check_cka,
    "layer_weights*.npz": check_layer_weights,
    "combined_loss*.npz": check_combined_loss,
    "if_*.npz": check_if,
    "*_conversion.npz": check_conversion,
    "*_layer_weights.npz": check_network_weights,
    "*_closed_loop_grad.npz": check_closed_loop_grad,
}


@pytest.mark.parametrize("case", files("ann_snn"))
def test_parity(case: Path) -> None:
    check(case, CHECKS)
