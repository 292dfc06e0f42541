"""Language models to start from: pretrained mixtures of experts, upcycled dense models, or new ones."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_modules.most.moe import FAMILIES

UPCYCLED = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}


def load_language_model(
    source: str | Path | dict[str, Any], dtype: torch.dtype = torch.float32, **kwargs: Any
) -> PreTrainedModel:
    """Load a causal language model of transformers, or build a new one with random weights.

    Loading goes through transformers' own classes and therefore through its conversion of checkpoints:
    per-expert matrices on disk become the fused tensors in memory, and fused ones load as they are.

    Args:
        source: a hub id, a folder, or a configuration as a dict with `model_type` (a new model).
        dtype: of the weights, whatever the checkpoint's is. Training in lower precision is autocast's matter (the
            trainer's `precision`): weights that are themselves bfloat16 lose small steps.
        kwargs: passed to `from_pretrained`.

    Raises:
        ValueError: if a weight is missing, unexpected or of another shape; nothing is ever left random in
            silence.
    """
    if isinstance(source, dict):
        if source.get("model_type") not in FAMILIES:
            raise ValueError(
                f"a new language model needs model_type, one of {', '.join(FAMILIES)}; got {source.get('model_type')!r}"
            )
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**source), dtype=dtype)
    model, info = AutoModelForCausalLM.from_pretrained(
        source, output_loading_info=True, ignore_mismatched_sizes=True, dtype=dtype, **kwargs
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            names = ", ".join(sorted(map(str, info[problem]))[:3])
            raise ValueError(f"{source}: {len(info[problem])} {problem.replace('_', ' ')} in the weights, e.g. {names}")
    return model


def upcycle(dense: PreTrainedModel, num_experts: int, top_k: int) -> PreTrainedModel:
    """Turn a dense language model into a mixture of experts, each a copy of its feed-forward layer.

    The target family renormalises the weights of the picked experts, so that the new model computes exactly
    what the dense one does, whatever the (random) router picks, with or without modality groups (MoST,
    appendix on Llama 3.2; its number of experts is not given there).

    Args:
        dense: a model of type llama, mistral (both become mixtral) or qwen3 (becomes qwen3_moe), without
            biases.
        num_experts: experts per layer.
        top_k: experts per token.

    Raises:
        ValueError: for another model type, biases, or more picks than experts.
    """
    source = dense.config
    if source.model_type not in UPCYCLED:
        raise ValueError(f"cannot upcycle {source.model_type}: use one of {', '.join(UPCYCLED)}")
    if getattr(source, "attention_bias", False) or getattr(source, "mlp_bias", False):
        raise ValueError(f"cannot upcycle this {source.model_type}: its layers have biases, the target family has none")
    if top_k > num_experts:
        raise ValueError(f"top_k {top_k} is larger than the number of experts, {num_experts}")
    target = UPCYCLED[source.model_type]
    names = """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
        intermediate_size max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings
        bos_token_id
        eos_token_id pad_token_id initializer_range sliding_window"""
    settings = {name: getattr(source, name) for name in names.split() if hasattr(source, name)}
    if target == "mixtral":
        settings |= {"num_local_experts": num_experts}
    else:
        settings |= {"num_experts": num_experts, "moe_intermediate_size": source.intermediate_size}
        settings |= {"norm_topk_prob": True}
    config = AutoConfig.for_model(target, num_experts_per_tok=top_k, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dense.dtype)
    weights = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    for i, layer in enumerate(dense.model.layers):
        gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        prefix = f"model.layers.{i}.mlp"
        weights[f"{prefix}.experts.gate_up_proj"] = gate_up.expand(num_experts, -1, -1)
        weights[f"{prefix}.experts.down_proj"] = layer.mlp.down_proj.weight.expand(num_experts, -1, -1)
        weights[f"{prefix}.gate.weight"] = model.model.layers[i].mlp.gate.weight  # stays random
    model.load_state_dict(weights)
    return model
