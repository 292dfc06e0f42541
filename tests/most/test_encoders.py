import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Wav2Vec2FeatureExtractor

from lightning_modules.most.encoders import FrozenEncoder, LogMel, build_encoder

HUBERT = {
    "model_type": "hubert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "conv_dim": [8] * 7, "num_feat_extract_layers": 7,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
WHISPER = {
    "model_type": "whisper", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_source_positions": 100,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "vocab_size": 32, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1,
}  # fmt: skip


def test_log_mel_of_a_tone_has_its_peak_where_the_tone_is():
    """440 Hz on the slaney scale (linear below 1 kHz, 200/3 Hz per mel, 45.245 mels at 8 kHz): band 80 * 6.6 /
    45.2."""
    encoder = LogMel()
    tone = torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)[None]
    frames, count = encoder(tone, torch.tensor([16_000]))
    assert frames.shape == (1, 25, 320)
    assert count.tolist() == [25]
    from lightning_modules.most.encoders import log_mel

    logs = log_mel(tone, 100, 160, encoder.hann, encoder.filters)
    assert (logs[0, 10:90].argmax(-1) == round(80 * 6.6 / 45.245) - 1).all()


def test_padding_in_a_batch_changes_nothing():
    encoder = LogMel()
    audio = torch.randn(3, 9000) * 0.1
    lengths = torch.tensor([9000, 4321, 640])
    for row, n in zip(audio, lengths, strict=True):
        row[n:] = 0
    frames, count = encoder(audio, lengths)
    for row, samples, n, c in zip(frames, audio, lengths, count, strict=True):
        alone, own = encoder(samples[None, :n], n[None])
        assert own == c
        torch.testing.assert_close(row[:c], alone[0], atol=1e-5, rtol=1e-5)
        assert (row[c:] == 0).all()


@pytest.mark.parametrize(
    ("encoder", "lengths"),
    [
        (LogMel(), [500, 639, 640, 641, 5000, 16_000]),
        (
            FrozenEncoder(HUBERT, window_seconds=1.0),
            [100, 399, 400, 719, 720, 1040, 5000, 16_000, 16_001, 17_000, 40_123],
        ),
        (FrozenEncoder(HUBERT, stack=1, layer=1), [400, 3210]),
        (FrozenEncoder(WHISPER), [1, 320, 321, 641, 31_999, 32_000, 40_000]),
    ],
    ids=["log_mel", "hubert", "hubert-layer", "whisper"],
)
def test_frame_count_is_what_the_encoder_gives(encoder, lengths):
    for n in lengths:
        audio = torch.randn(1, n)
        frames, count = encoder(audio, torch.tensor([n]))
        assert frames.shape == (1, int(encoder.frame_count(torch.tensor([n]))), encoder.feature_size)
        assert count.item() == frames.shape[1]
        if count.item():
            assert (frames[0, -1] != 0).any(), f"the last frame of {n} samples was never written"


def test_long_audio_is_encoded_window_by_window():
    encoder = FrozenEncoder(HUBERT, stack=1, window_seconds=1.0)
    audio = torch.randn(1, 40_000)
    frames, _ = encoder(audio, torch.tensor([40_000]))
    parts = [
        encoder(audio[:, a:b], torch.tensor([b - a]))[0] for a, b in ((0, 16_000), (16_000, 32_000), (32_000, 40_000))
    ]
    torch.testing.assert_close(frames, torch.cat(parts, 1))


def test_a_batch_without_sound_has_no_frames():
    for encoder in (LogMel(), FrozenEncoder(HUBERT)):
        frames, count = encoder(torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64))
        assert frames.shape == (3, 0, encoder.feature_size)
        assert count.tolist() == [0, 0, 0]


def test_encoder_of_a_folder_is_whole_and_in_float32(tmp_path):
    encoder = FrozenEncoder(HUBERT)
    encoder.model.to(torch.bfloat16).save_pretrained(tmp_path)
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    loaded = FrozenEncoder(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    weights = load_file(tmp_path / "model.safetensors")
    dropped = "encoder.layers.1.attention.k_proj.weight"
    save_file({k: v for k, v in weights.items() if k != dropped}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"1 weights of the encoder are missing, e.g. {dropped}"):
        FrozenEncoder(tmp_path)


def test_frozen_encoder_stays_frozen_and_is_rebuilt_from_its_description():
    encoder = FrozenEncoder(HUBERT).train()
    assert not any(module.training for module in encoder.modules())
    assert not any(p.requires_grad for p in encoder.parameters())
    again = build_encoder(encoder.description)
    again.load_state_dict(encoder.state_dict())
    audio, n = torch.randn(1, 3000), torch.tensor([3000])
    torch.testing.assert_close(again(audio, n)[0], encoder(audio, n)[0])


def test_whisper_features_are_those_of_transformers():
    from transformers import WhisperFeatureExtractor, WhisperModel

    encoder = FrozenEncoder(WHISPER)
    audio = torch.randn(20_000) * 0.1
    extractor = WhisperFeatureExtractor(chunk_length=2)
    features = extractor(audio.numpy(), sampling_rate=16_000, return_tensors="pt").input_features
    assert isinstance(encoder.model, type(WhisperModel(encoder.model.config).encoder))
    expected = encoder.model(features).last_hidden_state[0, :62].reshape(31, 32)
    frames, _ = encoder(audio[None], torch.tensor([20_000]))
    torch.testing.assert_close(frames[0, :31], expected, atol=1e-4, rtol=1e-4)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="no speech encoder that is known"):
        FrozenEncoder({"model_type": "bert", "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1})
