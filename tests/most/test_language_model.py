import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_modules.most.language_model import load_language_model, upcycle
from lightning_modules.most.moe import FAMILIES, make_modality_aware, modality_of
from tests.most.toys import COMMON, config, language_model

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load_through_the_per_expert_layout(family, tmp_path):
    model = make_modality_aware(language_model(family))
    model.save_pretrained(tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    assert any(".experts.0." in name for name in on_disk), "transformers writes one matrix per expert"
    loaded = load_language_model(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_weights_are_float32_whatever_the_checkpoint_holds(tmp_path):
    """Of bfloat16 weights FSDP2 refuses the mix with the router's, and small steps are lost."""
    language_model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    loaded = load_language_model(tmp_path)
    assert {p.dtype for p in make_modality_aware(loaded).parameters()} == {torch.float32}
    again = load_language_model(loaded.config.to_dict() | {"dtype": "bfloat16"})
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert load_language_model(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_missing_weights_are_named(tmp_path):
    language_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1.mlp.experts.3." not in k}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts"):
        load_language_model(tmp_path)


def test_new_model_from_a_configuration():
    assert load_language_model(config("olmoe")).config.num_experts == 8
    with pytest.raises(ValueError, match="model_type"):
        load_language_model({"hidden_size": 8})


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_upcycled_model_computes_what_the_dense_one_does(family):
    torch.manual_seed(0)
    settings = COMMON | {"num_key_value_heads": 1, "intermediate_size": 24, "tie_word_embeddings": family == "llama"}
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    moe = upcycle(dense, num_experts=6, top_k=2).eval()
    expected = dense(IDS).logits
    torch.testing.assert_close(moe(IDS).logits, expected, atol=2e-5, rtol=1e-4)
    aware = make_modality_aware(moe, add_shared_width=16)
    out = aware(IDS, modality_ids=modality_of(IDS, 40, 63)).logits
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


def test_what_cannot_be_upcycled_is_refused():
    with pytest.raises(ValueError, match="cannot upcycle olmoe"):
        upcycle(language_model("olmoe"), 4, 2)
    settings = COMMON | {"intermediate_size": 24, "attention_bias": True}
    with pytest.raises(ValueError, match="biases"):
        upcycle(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings)), 4, 2)


def test_configuration_of_the_paper_has_its_size():
    """DeepSeek-V2-Lite (specification of the base model): 14.39 billion parameters in routed experts."""
    lite = {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "num_attention_heads": 16, "q_lora_rank": None, "vocab_size": 102400,
    }  # fmt: skip
    with torch.device("meta"):
        model = make_modality_aware(load_language_model(json.loads(json.dumps(lite))))
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert routed == 26 * 64 * 3 * 2048 * 1408
