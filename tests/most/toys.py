"""Tiny models that the tests of MoST share."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,  # large, so that routing differs between tokens
}
CONFIGS = {
    "deepseek_v2": {
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "norm_topk_prob": True,
    },
    "olmoe": {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
}


def config(family: str, **changes) -> dict:
    return {"model_type": family, **COMMON, **CONFIGS[family], **changes}


def language_model(family: str = "deepseek_v2", seed: int = 0, **changes) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config(family, **changes))).eval()
