"""FedHPro against arrays made with the published functions and with independent float64 calculations."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules.partitions import dirichlet_balanced, long_tail, long_tail_counts
from lightning_modules.fedhpro.averaging import weighted_average
from lightning_modules.fedhpro.losses import (
    class_means,
    class_similarity,
    client_margin,
    hpal_loss,
    hpcl_loss,
)
from lightning_modules.fedhpro.matching import (
    class_gradients,
    head_gradients,
    match_hyper_prototypes,
    matching_slope,
)
from lightning_modules.fedhpro.network import ResNet10
from tests.parity.cases import check, files


class Case:
    """Arrays as tensors, floating ones in the dtype asked for."""

    def __init__(self, path: Path):
        with np.load(path, allow_pickle=False) as arrays:
            self.arrays = {k: arrays[k] for k in arrays.files}
        self.config = json.loads(str(self.arrays.pop("config_json")))

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    def get(self, key: str, dtype=torch.float64) -> torch.Tensor:
        tensor = torch.from_numpy(np.array(self.arrays[key]))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor


def close(actual, expected, atol, rtol):
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)


def check_class_gradients(path):
    case = Case(path)
    num_classes = case.config["C"]
    network = ResNet10(num_classes, in_channels=case.get("images").shape[1], width=case.config["width"])
    state = {k.removeprefix("model/"): case.get(k, torch.float32) for k in case.arrays if k.startswith("model/")}
    network.load_state_dict(state)
    with torch.no_grad():
        z, logits = network.eval()(case.get("images", torch.float32))
    close(z, case.get("features"), 1e-5, 1e-4)
    close(logits, case.get("logits"), 1e-5, 1e-4)
    for dtype, atol, rtol in ((torch.float64, 1e-7, 1e-5), (torch.float32, 1e-6, 1e-4)):
        inputs = [case.get(k, dtype) for k in ("features", "labels", "classifier_weight", "classifier_bias")]
        paper, counts = class_gradients(*inputs)
        code, _ = class_gradients(*inputs, divide_again=True)
        close(paper, case.get("g_paper"), atol, rtol)
        close(code, case.get("g_code"), atol, rtol)
        assert counts.tolist() == case.get("class_counts").tolist()
        assert (counts > 0).tolist() == case.get("mask").tolist()
        for_weight, for_bias = head_gradients(*inputs)
        close(for_weight, case.get("grad_W_per_class"), atol, rtol)
        close(for_bias, case.get("grad_b_per_class"), atol, rtol)


def check_matching_loss(path):
    case = Case(path)
    classes = case.get("class_id").reshape(1)
    for dtype in (torch.float64, torch.float32):
        s, w, b, g = (case.get(k, dtype) for k in ("S", "W", "b", "g_real"))
        for kind, name in (("coord", "coord"), ("mse", "mse"), ("cos_eps", "cos"), ("cos", "cos_paper")):
            own = torch.eye(len(w), dtype=dtype)[classes]
            loss, slope = matching_slope((s @ w.T + b)[None], own, w, g[None], kind)
            gradient = slope @ w
            if dtype == torch.float64:
                close(loss[0], case.get(f"ref_loss_{name}"), 1e-9, 1e-7)
                close(gradient[0], case.get(f"ref_grad_S_{name}"), 1e-9, 1e-7)
            elif f"loss_{name}" in case:
                close(loss[0], case.get(f"loss_{name}"), 1e-5, 1e-5)
                expected = case.get(f"grad_S_{name}")
                close(gradient[0], expected, 1e-6 + 1e-3 * expected.abs().max().item(), 0)
    labels = classes.expand(len(s))
    inner, _ = class_gradients(case.get("S"), labels, case.get("W"), case.get("b"))
    close(inner[classes[0]] / len(s), case.get("ref_g_hp_mean"), 1e-9, 1e-7)


def check_hyper_prototypes(path):
    case = Case(path)
    mask = case.get("client_mask")
    present = mask.any(0)
    holders = mask.sum(0).clamp(min=1)[:, None]
    for dtype in (torch.float64, torch.float32):
        start, w, b, sent = (case.get(k, dtype) for k in ("S0", "W", "b", "client_gradients"))
        targets = (sent * mask[:, :, None]).sum(0) / holders
        for kind, name in (("coord", "coord"), ("mse", "mse"), ("cos_eps", "cos"), ("cos", "cos_paper")):
            end, trace = match_hyper_prototypes(
                start, w, b, targets, present, case.config["steps"], case.config["lr"], kind
            )
            assert torch.equal(end[~present], start[~present])
            if dtype == torch.float64:
                close(end, case.get(f"ref_S30_{name}"), 1e-8, 1e-7)
                close(trace[:-1], case.get(f"ref_loss_trace_{name}"), 1e-8, 1e-7)
            elif f"S30_{name}" in case:
                close(end, case.get(f"S30_{name}"), 5e-3 if kind == "coord" else 1e-5, 0)
                close(trace[:-1], case.get(f"loss_trace_{name}"), 0, 1e-3 if kind == "coord" else 1e-4)


def check_client_losses(path):
    case = Case(path)
    labels, tau = case.get("labels"), case.config["tau"]

    def value_and_gradient(loss, z):
        value = loss(z)
        return value.detach(), torch.autograd.grad(value, z)[0]

    def codes(s, kind):  # name of the released value, loss
        margin = case.get("margin_inner", s.dtype)
        return {
            "hpcl_code_margin0": lambda z: hpcl_loss(z, labels, s, 0.0, tau, "code"),
            "hpcl_code_margin": lambda z: hpcl_loss(z, labels, s, margin, tau, "code"),
            "hpal_code": lambda z: hpal_loss(z, labels, s, normalize=True),
        }[kind]

    z32, s32 = case.get("features", torch.float32).requires_grad_(), case.get("S", torch.float32)
    for kind in ("hpcl_code_margin0", "hpcl_code_margin", "hpal_code"):
        value, gradient = value_and_gradient(codes(s32, kind), z32)
        close(value, case.get(kind), 0, 1e-5)
        close(gradient, case.get(f"{kind}_grad"), 1e-6, 1e-4)
    for kind, margin in (("margin0", 0.0), ("margin", case.get("margin_inner", torch.float32))):
        each = hpcl_loss(z32, labels, s32, margin, tau, "code", reduction="none").detach()
        close(each, case.get(f"hpcl_code_per_sample_{kind}"), 1e-6, 1e-5)

    z, s = case.get("features").requires_grad_(), case.get("S")
    close(class_similarity(z, s).detach(), case.get("ref_similarity"), 1e-12, 1e-9)
    for m, margin in enumerate(case.get("margin_dk")):
        each = hpcl_loss(z, labels, s, margin, tau, reduction="none").detach()
        close(each, case.get("ref_hpcl_paper_per_sample")[m], 1e-14, 1e-9)
        value, gradient = value_and_gradient(lambda z, d=margin: hpcl_loss(z, labels, s, d, tau), z)
        close(value, case.get("ref_hpcl_paper")[m], 1e-14, 1e-9)
        close(gradient, case.get("ref_hpcl_paper_grad")[m], 1e-12, 1e-9)
    value, gradient = value_and_gradient(lambda z: hpal_loss(z, labels, s), z)
    close(value, case.get("ref_hpal_paper"), 0, 1e-9)
    close(gradient, case.get("ref_hpal_paper_grad"), 1e-14, 1e-9)
    close(codes(s, "hpcl_code_margin")(z).detach(), case.get("ref_hpcl_code_margin"), 0, 1e-9)
    close(codes(s, "hpal_code")(z).detach(), case.get("ref_hpal_code"), 0, 1e-9)


def check_client_margin(path):
    case = Case(path)
    for dtype, rtol in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        inputs = case.get("features", dtype), case.get("labels"), case.config["C"]
        close(client_margin(*inputs), case.get("ref_margin_paper"), 0, rtol)
        close(client_margin(*inputs, normalize=True), case.get("ref_margin_paper_normalized"), 0, rtol)
        close(client_margin(*inputs, kind="inner"), case.get("ref_margin_code"), 0, rtol)
    close(client_margin(*inputs, kind="inner"), case.get("margin_code"), 0, 1e-5)
    means, counts = class_means(case.get("features"), case.get("labels"), case.config["C"])
    assert counts.nonzero().squeeze(1).tolist() == case.get("present").tolist()
    close(means[counts > 0], case.get("prototypes"), 1e-12, 1e-10)


def check_weighted_average(path):
    case = Case(path)
    sizes = case.get("num_samples").tolist()
    names = [k.removeprefix("clients/") for k in case.arrays if k.startswith("clients/")]
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        states = [{k: case.get(f"clients/{k}", dtype)[i] for k in names} for i in range(len(sizes))]
        average = weighted_average(states, sizes)
        assert list(average) == names
        for name in names:
            if average[name].is_floating_point():
                close(average[name], case.get(f"expected/{name}"), atol, atol)
            else:
                assert average[name] == case.get(f"expected/{name}")


def check_partition(path):
    case = Case(path)
    labels, config = case.arrays["labels"], case.config
    kept = long_tail(labels, config["rho"], config["global_numpy_seed"])
    assert np.bincount(labels[kept]).tolist() == case.arrays["class_counts"].tolist()
    assert np.array_equal(kept, case.arrays["longtail_indices"])
    parts = dirichlet_balanced(labels, config["clients"], config["alpha"], config["seed"], kept)
    assert np.array_equal(np.cumsum([0] + [len(p) for p in parts]), case.arrays["client_offsets"])
    assert np.array_equal(np.concatenate(parts), case.arrays["client_indices"])
    table = np.stack([np.bincount(labels[p], minlength=config["C"]) for p in parts])
    assert np.array_equal(table, case.arrays["client_counts"])


def check_longtail_counts(path):
    for name, expected in Case(path).arrays.items():
        size, classes, rho = (int(part.strip("NCrho")) for part in name.split("_")[1:])
        assert long_tail_counts(size / classes, classes, rho) == expected.tolist(), name


CHECKS = {
    "class_gradients*.npz": check_class_gradients,
    "matching_loss*.npz": check_matching_loss,
    "hyper_prototypes*.npz": check_hyper_prototypes,
    "client_losses*.npz": check_client_losses,
    "client_margin*.npz": check_client_margin,
    "weighted_average*.npz": check_weighted_average,
    "partition*.npz": check_partition,
    "longtail_counts*.npz": check_longtail_counts,
}


@pytest.mark.parametrize("path", files("fedhpro"))
def test_parity(path):
    check(path, CHECKS)
