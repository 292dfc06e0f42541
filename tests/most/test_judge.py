import json

import pytest
import torch
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2Processor,
)

from lightning_modules.most.judge import Judge, normalise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recogniser that hears the letter A in every frame, in the layout of those on the hub."""
    path = tmp_path_factory.mktemp("judge")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "A": 5, "B": 6}
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = Wav2Vec2CTCTokenizer(path / "vocab.json")
    Wav2Vec2Processor(feature_extractor=Wav2Vec2FeatureExtractor(), tokenizer=tokenizer).save_pretrained(path)
    config = Wav2Vec2Config(
        vocab_size=7, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, pad_token_id=0,
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.copy_(torch.eye(7)[5])
    model.save_pretrained(path)
    return path


def test_judge_reads_ctc_output_in_lower_case_and_survives_silence(folder):
    judge = Judge(str(folder))
    assert judge([torch.randn(4000), torch.randn(900), torch.zeros(0), torch.randn(5)]) == ["a", "a", "", ""]


def test_texts_are_compared_without_case_and_punctuation():
    assert normalise("  Don't STOP, it\u2019s: me!\nNow ") == "don't stop it s me now"
