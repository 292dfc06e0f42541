"""Speed of MoST's parts, as ratios taken in one run with one thread.

    python benchmarks/most.py

* the modality-aware block against transformers' own DeepSeek-V2 block with the same weights, forward and backward
* against a loop over experts, the way of the official code in training (re-created: every expert is a module of its
  own with three matrices and computes the tokens under its mask in turn, as in DeepSeek-V2's published model file)
* the bare matrix products of the block, forward and backward: no implementation is faster, so the loop's time over
  theirs is the most that the second ratio can be
* generation with a cache of keys and values against generation without
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2MLP, DeepseekV2Moe

sys.path.insert(0, str(Path(__file__).parents[1]))
from lightning_modules.most.moe import FAMILIES, ModalityAwareMoE, ModalityRouter, expert_groups, make_modality_aware
from lightning_modules.most.network import Constraint, SpeechTextModel
from lightning_modules.most.prompts import Example, PromptBuilder, add_speech_tokens, word_tokenizer

RESULT = Path(__file__).parent / "results" / "most" / "speed.json"
SIZES = {"tokens": 1024, "hidden": 256, "width": 352, "experts": 16, "top_k": 4, "new_tokens": 200}


class ExpertLoop(nn.Module):
    """Routed experts one after the other."""

    def __init__(self, block: ModalityAwareMoE, config: DeepseekV2Config) -> None:
        super().__init__()
        self.gate, self.shared_experts = block.gate, block.shared_experts
        make = DeepseekV2MLP
        self.experts = nn.ModuleList(
            make(config, intermediate_size=config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        with torch.no_grad():
            for e, expert in enumerate(self.experts):
                gate, up = block.experts.gate_up_proj[e].chunk(2)
                expert.gate_proj.weight.copy_(gate)
                expert.up_proj.weight.copy_(up)
                expert.down_proj.weight.copy_(block.experts.down_proj[e])

    def forward(self, hidden: Tensor, modality: Tensor) -> Tensor:
        """The same function as the modality-aware block."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        routing = self.gate(flat, modality.reshape(-1))
        copies = flat.repeat_interleave(routing.indices.shape[1], 0)
        picks = routing.indices.reshape(-1)
        out = torch.empty_like(copies)
        for e, expert in enumerate(self.experts):
            out[picks == e] = expert(copies[picks == e])
        mixed = (out.view(*routing.weights.shape, -1) * routing.weights[..., None]).sum(1)
        return mixed.view_as(hidden) + self.shared_experts(hidden)


def alternate(functions: dict, repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Median CPU seconds of each function over `repeats` turns, after `warm_up` turns that do not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(repeats + warm_up):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if i >= warm_up:
                times[name].append(time.process_time() - start)
    return {name: median(values) for name, values in times.items()}


def matrix_products(config: DeepseekV2Config, picks: Tensor) -> Callable[[], None]:
    """All matrix products of forward and backward of one block, on inputs laid out beforehand, and nothing else.

    Args:
        config: sizes.
        picks: int64 [n, k], so that experts get as many tokens as in the block.
    """
    width, hidden = config.moe_intermediate_size, config.hidden_size
    sizes = [(int(n), width) for n in picks.flatten().bincount() if n]
    sizes.append((len(picks), width * config.n_shared_experts))
    layers = [(n, hidden, 2 * i) for n, i in sizes] + [(n, i, hidden) for n, i in sizes]
    operands = [(torch.randn(n, a), torch.randn(b, a), torch.randn(n, b)) for n, a, b in layers]

    def run() -> None:
        for x, weight, grad in operands:
            x @ weight.T, grad @ weight, grad.T @ x

    return run


def blocks(repeats: int) -> dict[str, float]:
    """Forward and backward of one block."""
    config = DeepseekV2Config(
        hidden_size=SIZES["hidden"],
        moe_intermediate_size=SIZES["width"],
        n_routed_experts=SIZES["experts"],
        num_experts_per_tok=SIZES["top_k"],
        n_shared_experts=2,
        num_attention_heads=1,
    )
    config._experts_implementation = "grouped_mm"
    native = DeepseekV2Moe(config)
    for parameter in native.parameters():
        nn.init.normal_(parameter, std=0.05)
    groups = expert_groups("contiguous", SIZES["experts"], SIZES["top_k"])
    gate = ModalityRouter(native.gate.weight, groups, SIZES["top_k"])
    ours = ModalityAwareMoE(native.experts, gate, {"shared_experts": native.shared_experts}, FAMILIES["deepseek_v2"])
    loop = ExpertLoop(ours, config)
    hidden = torch.randn(1, SIZES["tokens"], SIZES["hidden"], requires_grad=True)
    modality = (torch.arange(SIZES["tokens"]) % 2)[None]
    torch.testing.assert_close(loop(hidden, modality), ours(hidden, modality), atol=1e-5, rtol=1e-4)

    def step(function, *args) -> None:
        function(hidden, *args).square().mean().backward()

    return alternate(
        {
            "transformers_block": lambda: step(native),
            "modality_aware_block": lambda: step(ours, modality),
            "expert_loop": lambda: step(loop, modality),
            "matrix_products": matrix_products(config, ours.routing.indices),
        },
        repeats,
    )


def generation(repeats: int) -> dict[str, float]:
    """A response of 200 unit tokens to a spoken prompt by four layers of these sizes, with and without a cache."""
    tokenizer = word_tokenizer(["one"])
    layout = add_speech_tokens(tokenizer, 64)
    config = AutoConfig.for_model(
        "deepseek_v2", vocab_size=layout.size, hidden_size=SIZES["hidden"], num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, first_k_dense_replace=1, intermediate_size=1024, moe_intermediate_size=SIZES["width"],
        n_routed_experts=SIZES["experts"], num_experts_per_tok=SIZES["top_k"], kv_lora_rank=64, q_lora_rank=None,
        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, max_position_embeddings=512, initializer_range=0.1,
        pad_token_id=layout.pad,
    )  # fmt: skip
    model = make_modality_aware(AutoModelForCausalLM.from_config(config))
    network = SpeechTextModel(model, layout, 320).eval()
    never = torch.tensor([layout.end_audio])  # so that the response is as long as it may be
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, never, -1e9))
    prompt = PromptBuilder(tokenizer, layout, 512)([Example("asr", frames=25)], respond=False)
    frames = torch.randn(25, 320)
    made = {}

    # in inference mode, as in Lightning's validate, test and predict
    @torch.inference_mode()
    def cached() -> None:
        made["cached"] = network.generate(
            prompt.input_ids, frames, prompt.attention_mask, "speech", SIZES["new_tokens"]
        )

    @torch.inference_mode()
    def uncached() -> None:
        constraint, ids = Constraint(layout, "speech", SIZES["new_tokens"], 1), prompt.input_ids
        while not constraint.finished:
            logits = network(ids, frames, last=True)[:, -1].masked_fill(~constraint.allowed, -torch.inf)
            constraint.advance(logits.argmax(-1))
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        made["uncached"] = ids[:, prompt.input_ids.shape[1] :]

    times = alternate({"generate_with_cache": cached, "generate_without_cache": uncached}, repeats, warm_up=0)
    assert torch.equal(made["cached"], made["uncached"])
    assert made["cached"].shape[1] == SIZES["new_tokens"]
    return times | {"tokens_generated": made["cached"].shape[1]}


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="timed turns of each block")
    parser.add_argument("--generations", type=int, default=2, help="timed turns of each generation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times = blocks(options.repeats) | generation(options.generations)
    ratios = {
        "modality_aware_block / transformers_block": times["modality_aware_block"] / times["transformers_block"],
        "expert_loop / modality_aware_block": times["expert_loop"] / times["modality_aware_block"],
        "expert_loop / matrix_products": times["expert_loop"] / times["matrix_products"],
        "without cache / with cache": times["generate_without_cache"] / times["generate_with_cache"],
    }
    command = f"python benchmarks/most.py --repeats {options.repeats} --generations {options.generations}"
    content = {"command": command, "torch": torch.__version__, "sizes": SIZES, "cpu_seconds": times, "ratios": ratios}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
