"""MoST against arrays made by the authors' published functions and by independent float64 calculations."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from lightning_modules.most.balance import balance_loss, segment_load, segment_values
from lightning_modules.most.language_model import load_language_model
from lightning_modules.most.moe import (
    FAMILIES,
    ModalityAwareMoE,
    ModalityRouter,
    make_modality_aware,
    modality_of,
    moe_blocks,
    route,
)
from tests.parity.cases import check, files

CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    with np.load(path, allow_pickle=False) as arrays:
        tensors = {k: torch.from_numpy(arrays[k]) for k in arrays.files if k != "config_json"}
        return tensors, json.loads(str(arrays["config_json"]))


def close(actual, expected, atol, rtol):
    torch.testing.assert_close(actual.to(expected.dtype), expected, atol=atol, rtol=rtol, equal_nan=True)


def groups_of(a: dict[str, torch.Tensor], num_experts: int) -> torch.Tensor:
    groups = torch.full((num_experts,), 3)
    groups[a["text_experts"]] = 0
    groups[a["audio_experts"]] = 1
    return groups


def dense(routing) -> torch.Tensor:
    return torch.zeros_like(routing.scores).scatter(1, routing.indices, routing.weights)


def sorted_picks(routing) -> torch.Tensor:
    picks = routing.indices.sort(-1).values
    return torch.where(routing.allowed.any(-1, keepdim=True), picks, -1)


def route_case(a, c, dtype):
    hidden = a["hidden"].to(dtype).clone().requires_grad_()
    weight = a["gate_weight"].to(dtype).clone().requires_grad_()
    modality = a["modality"]
    allowed = modality.reshape(-1)[:, None] == groups_of(a, c["E"])
    routing = route(
        hidden.reshape(-1, c["H"]) @ weight.T,
        allowed,
        c["K"],
        renormalise=c["norm_topk_prob"],
        scale=c["routed_scaling_factor"],
    )
    return hidden, weight, routing


def balance(routing, a, form, padding_counts, alpha):
    valid = torch.ones_like(a["padding"]) if padding_counts else ~a["padding"]
    return alpha * balance_loss(routing, a["modality"], valid, form)


def check_references(a, c, atol, rtol):
    _, _, routing = route_case(a, c, torch.float64)
    assert torch.equal(routing.allowed, a["ref_allowed"])
    assert torch.equal(sorted_picks(routing), a["ref_topk_idx_sorted"])
    close(dense(routing), a["ref_dense_weights"], 1e-9, 1e-7)
    valid = ~a["padding"].reshape(-1)
    close(routing.load[valid].sum(0), a["ref_load"], 0, 0)
    close(balance(routing, a, "sequence", True, c["alpha"]), a["ref_aux_seq"], atol, rtol)
    close(balance(routing, a, "flat", True, c["alpha"]), a["ref_aux_flat"], atol, rtol)
    close(balance(routing, a, "sequence", False, c["alpha"]), a["ref_aux_seq_nopad"], atol, rtol)
    close(balance(routing, a, "modality", False, c["alpha"]), a["ref_group_loss"], atol, rtol)
    load = segment_load(routing, a["modality"], ~a["padding"], "modality")
    values = torch.where(load.tokens > 0, segment_values(load, c["K"]), torch.nan)
    close(values, a["ref_group_values"], atol / c["alpha"], rtol)


def gate(path: Path) -> None:
    a, c = read(path)
    hidden, weight, routing = route_case(a, c, torch.float32)
    close(torch.softmax(routing.logits, -1), a["scores"], **CLOSE)
    close(routing.scores, a["masked_scores"], **CLOSE)
    assert torch.equal(sorted_picks(routing), a["topk_idx_sorted"])
    close(dense(routing), a["dense_weights"], **CLOSE)
    close(routing.weights.sum(-1), a["weight_sum"], **CLOSE)
    close(dense(routing), a["ref_dense_weights"].float(), **CLOSE)
    form = "sequence" if c["seq_aux"] else "flat"
    losses = {f: balance(routing, a, f, True, c["alpha"]) for f in ("sequence", "flat")}
    no_group = (a["modality"] == 2).any()  # the official picks of such tokens are arbitrary, and it counts them
    if not no_group:
        close(losses["sequence"], a["aux_seq"], 1e-8, 1e-5)
        close(losses["flat"], a["aux_flat"], 1e-8, 1e-5)
    wanted = torch.autograd.grad((dense(routing) * a["cotangent"]).sum(), (hidden, weight), retain_graph=True)
    close(wanted[0], a["grad_hidden_weights"], 1e-6, 1e-4)
    close(wanted[1], a["grad_gate_weights"], 1e-6, 1e-4)
    if not no_group:
        wanted = torch.autograd.grad(losses[form], (hidden, weight))
        close(wanted[0], a["grad_hidden_aux"], 1e-6, 1e-4)
        close(wanted[1], a["grad_gate_aux"], 1e-6, 1e-4)
    check_references(a, c, 1e-8, 1e-5)


def underflow(path: Path) -> None:
    a, c = read(path)
    _, _, routing = route_case(a, c, torch.float32)
    reachable = a["ref_allowed"].any(-1)
    assert a["ref_allowed"].gather(1, routing.indices)[reachable].all()
    exact = a["row_exact"]
    assert torch.equal(sorted_picks(routing)[exact], a["ref_topk_idx_sorted"][exact])
    close(dense(routing), a["ref_dense_weights"].float(), 1e-6, 0)
    check_references(a, c, 1e-7, 1e-4)


def marks(path: Path) -> None:
    a, c = read(path)
    assert torch.equal(modality_of(a["input_ids"], c["audio_first"], c["audio_last"]), a["marks"])


def block(path: Path) -> None:
    a, c = read(path)
    config = DeepseekV2Config(
        hidden_size=c["H"],
        moe_intermediate_size=c["I"],
        n_routed_experts=c["E"],
        num_experts_per_tok=c["K"],
        n_shared_experts=c["n_shared_experts"],
        hidden_act=c["hidden_act"],
        num_attention_heads=1,
    )
    for implementation, dtype in (
        ("eager", torch.float32),
        ("grouped_mm", torch.float32),
        ("eager", torch.float64),
    ):
        config._experts_implementation = implementation
        native = DeepseekV2Moe(config).to(dtype)
        weights = {k.removeprefix("fused/"): v.to(dtype) for k, v in a.items() if k.startswith("fused/")}
        native.load_state_dict(weights)
        for name, expected in weights.items():  # the same weights, one matrix per expert
            if name.startswith("experts."):
                pairs = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
                single = [torch.cat([a[f"official/experts.{e}.{p}.weight"] for p in pairs]) for e in range(c["E"])]
                assert torch.equal(torch.stack(single).to(dtype), expected)

        def build(groups, shared, native=native):
            router = ModalityRouter(
                native.gate.weight,
                groups,
                c["K"],
                renormalise=c["norm_topk_prob"],
                scale=c["routed_scaling_factor"],
            )
            parts = {"shared_experts": native.shared_experts} if shared else {}
            return ModalityAwareMoE(native.experts, router, parts, FAMILIES["deepseek_v2"])

        groups = groups_of(a, c["E"]).tolist()
        most = build(groups, True)
        hidden = a["hidden"].to(dtype).clone().requires_grad_()
        if dtype == torch.float64:  # the router works in float32, so the float64 values are reached without it
            allowed = a["modality"].reshape(-1)[:, None] == groups_of(a, c["E"])
            routing = route(
                hidden.reshape(-1, c["H"]) @ native.gate.weight.T, allowed, c["K"],
                scale=c["routed_scaling_factor"], renormalise=c["norm_topk_prob"],
            )  # fmt: skip
            y = native.experts(hidden.reshape(-1, c["H"]), routing.indices, routing.weights).view_as(hidden)
            close(y + native.shared_experts(hidden), a["ref_y"], 1e-10, 1e-10)
            close(dense(routing), a["ref_dense_weights"], 1e-10, 1e-10)
            assert torch.equal(sorted_picks(routing), a["ref_topk_idx_sorted"])
            continue
        y = most(hidden, a["modality"])
        for expected in (a["y"], a["y_train"], a["ref_y"].float()):
            close(y, expected, 2e-6, 1e-5)
        close(native.shared_experts(hidden), a["y_shared"], 2e-6, 1e-5)
        close(build(groups, False)(hidden, a["modality"]), a["y_routed"], 2e-6, 1e-5)
        close(build(None, True)(hidden, a["modality"]), a["y_vanilla"], 2e-6, 1e-5)
        everything = torch.ones_like(a["modality"], dtype=torch.bool)
        form = "sequence" if c["seq_aux"] else "flat"
        aux = c["alpha"] * balance_loss(most.routing, a["modality"], everything, form)
        no_group = bool((a["modality"] == 2).any())  # as in `gate`
        if not no_group:
            close(aux, a["aux"], 1e-8, 1e-5)
        ((y * a["cotangent"]).sum() + aux).backward()
        shared = native.shared_experts
        for parameter, name in (
            (hidden, "grad_hidden"),
            (native.gate.weight, "grad_gate"),
            (native.experts.gate_up_proj, "grad_gate_up"),
            (native.experts.down_proj, "grad_down"),
            (shared.gate_proj.weight, "grad_shared_gate_proj"),
            (shared.up_proj.weight, "grad_shared_up_proj"),
            (shared.down_proj.weight, "grad_shared_down_proj"),
        ):
            if not (no_group and name in ("grad_hidden", "grad_gate")):
                close(parameter.grad, a[name], 1e-5, 1e-4)


def deepseek(path: Path, tmp_path: Path) -> None:
    a, c = read(path / "logits.npz")
    fused = load_file(path / "model_fused.safetensors")
    for layout in ("fused", "per_expert"):
        folder = tmp_path / layout
        folder.mkdir()
        shutil.copyfile(path / "config.json", folder / "config.json")
        shutil.copyfile(path / f"model_{layout}.safetensors", folder / "model.safetensors")
        options = {"attn_implementation": c["attention"], "experts_implementation": c["experts"]}
        base = load_language_model(folder, **options).eval()
        state = base.state_dict()
        assert set(state) == set(fused)
        for name, tensor in fused.items():
            assert torch.equal(state[name], tensor), name
        with torch.no_grad():
            expected = base(a["input_ids"]).logits
            everything = make_modality_aware(load_language_model(folder, **options), partition=None).eval()
            out = everything(a["input_ids"], labels=a["input_ids"], output_hidden_states=True)
            assert set(everything.state_dict()) == set(fused)
            assert torch.equal(out.logits, expected)
            close(out.logits, a["logits_all_allowed"], 2e-5, 1e-4)
            close(out.loss, a["loss_all_allowed"], 2e-5, 1e-4)
            close(torch.stack(out.hidden_states), a["hidden_states"], 2e-5, 1e-4)
            groups = groups_of(
                a | {k: torch.tensor(c[k]) for k in ("text_experts", "audio_experts")},
                base.config.num_experts,
            )
            masked = make_modality_aware(base, partition=groups.tolist()).eval()
            for ids, name in ((a["input_ids"], "alltext"), (a["input_ids_mixed"], "mixed")):
                modality = modality_of(ids, c["audio_first_id"], base.config.vocab_size - 1)
                close(masked(ids, modality_ids=modality).logits, a[f"logits_masked_{name}"], 2e-5, 1e-4)
                picks = torch.stack([b.routing.indices.sort(-1).values for b in moe_blocks(masked)])
                assert torch.equal(picks, a[f"picks_masked_{name}"])


@pytest.mark.parametrize("path", files("most"))
def test_parity(path: Path, tmp_path: Path) -> None:
    check(
        path,
        {
            "gate_underflow*": underflow,
            "gate_*": gate,
            "modality_marks*": marks,
            "block_*": block,
            "deepseek_*": lambda folder: deepseek(folder, tmp_path),
        },
    )
