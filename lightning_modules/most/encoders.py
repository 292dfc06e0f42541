"""What turns audio into frames: log-mel frames (nothing to download), or a frozen encoder of transformers.

Every encoder maps float32 audio [b, s] at 16 kHz (`sample_rate`) and lengths [b] in samples to frames [b, l, f] and
their number [b], and tells the number beforehand (`frame_count`), because prompts are laid out before audio
is encoded.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoFeatureExtractor, AutoModel
from transformers.audio_utils import mel_filter_bank


class LogMel(nn.Module):
    """Log-mel spectrogram at 100 Hz, `stack` frames joined (4: 25 Hz), each band normalised per utterance.

    Audio is framed without look-ahead beyond 17.5 ms and padded with zeros, so padding in a batch changes
    nothing.

    Args:
        mels: number of bands.
        stack: spectrogram frames per output frame.
    """

    def __init__(self, mels: int = 80, stack: int = 4) -> None:
        super().__init__()
        self.sample_rate, self.mels, self.stack = 16_000, mels, stack
        self.hop, self.window = 160, 400
        self.feature_size = mels * stack
        self.samples_per_frame = self.hop * stack
        self.description = "log_mel"
        self.filters = mel_filters(self.window, mels)
        self.hann = torch.hann_window(self.window)

    def frame_count(self, length: Tensor) -> Tensor:
        """Frames for `length` [b] samples: one for every started `stack` hops."""
        return -(-length // (self.hop * self.stack))

    def forward(self, audio: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Frames [b, l, mels * stack] and their number [b]; zeros behind the end of an utterance."""
        count = self.frame_count(length)
        hops = int(count.max()) * self.stack
        if hops == 0:  # no sound in the whole batch
            return audio.new_zeros(len(audio), 0, self.feature_size), count
        logs = log_mel(audio, hops, self.hop, self.hann.to(audio.device), self.filters.to(audio.device))
        valid = (torch.arange(hops, device=audio.device) < -(-length // self.hop)[:, None])[..., None]  # b hops 1
        number = valid.sum(1, keepdim=True).clamp(min=1)
        mean = (logs * valid).sum(1, keepdim=True) / number
        variance = ((logs - mean).square() * valid).sum(1, keepdim=True) / number
        normed = (logs - mean) * (variance + 1e-2).rsqrt() * valid
        return normed.reshape(len(audio), -1, self.feature_size), count


def mel_filters(window: int, mels: int) -> Tensor:
    """Triangular filters for a spectrum of a `window` of samples at 16 kHz: [window / 2 + 1, mels]."""
    bank = mel_filter_bank(window // 2 + 1, mels, 0.0, 8000.0, 16_000, "slaney", "slaney")
    return torch.from_numpy(bank).float()


def log_mel(audio: Tensor, hops: int, hop: int, hann: Tensor, filters: Tensor) -> Tensor:
    """Natural logarithm of mel energies, [b, hops, mels]; window i is centred in the i-th hop."""
    left = (len(hann) - hop) // 2
    right = (hops - 1) * hop + len(hann) - left - audio.shape[-1]
    spectrum = torch.stft(F.pad(audio, (left, right)), len(hann), hop, window=hann, center=False, return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    return (power.transpose(1, 2) @ filters).clamp(min=1e-8).log()


class FrozenEncoder(nn.Module):
    """A pretrained speech encoder of transformers (HuBERT, wav2vec 2, Whisper), never trained.

    Audio longer than `window_seconds` is encoded window by window and the frames are joined: nothing is cut
    off.

    Args:
        source: hub id or folder, or a configuration as a dict with `model_type` (random weights, for tests).
        layer: hidden layer whose output is taken; -1 is the last (as in the paper).
        stack: encoder frames joined into one (2 turns 50 Hz into 25 Hz).
        window_seconds: length of a window; Whisper's is always 30.
        normalise: bring each window to mean 0 and variance 1; by default what the source's feature extractor says.

    Raises:
        ValueError: for another kind of model, or if weights are missing in the source.

    Attributes:
        description: a dict from which `build_encoder` makes the same encoder without its weights.
    """

    def __init__(
        self,
        source: str | Path | dict[str, Any],
        layer: int = -1,
        stack: int = 2,
        window_seconds: float = 30.0,
        normalise: bool | None = None,
    ) -> None:
        super().__init__()
        self.sample_rate, self.layer, self.stack = 16_000, layer, stack
        if isinstance(source, dict):
            self.model = AutoModel.from_config(AutoConfig.for_model(**source), dtype=torch.float32)
        else:
            self.model, info = AutoModel.from_pretrained(source, output_loading_info=True, dtype=torch.float32)
            missing = sorted(set(info["missing_keys"]) - {"masked_spec_embed"})  # used in its own training alone
            if missing:
                raise ValueError(f"{source}: {len(missing)} weights of the encoder are missing, e.g. {missing[0]}")
            if normalise is None:
                normalise = getattr(AutoFeatureExtractor.from_pretrained(source), "do_normalize", True)
        config = self.model.config
        self.whisper = config.model_type == "whisper"
        if not self.whisper and config.model_type not in ("hubert", "wav2vec2", "wavlm"):
            raise ValueError(
                f"{config.model_type} is no speech encoder that is known: hubert, wav2vec2, wavlm, whisper"
            )
        if self.whisper:
            self.model = self.model.encoder
            self.hann = torch.hann_window(400)
            self.filters = mel_filters(400, config.num_mel_bins)
            window_seconds = config.max_source_positions / 50
        self.normalise = normalise is not False and not self.whisper
        self.description = {
            "source": json.loads(config.to_json_string(use_diff=False)),
            "layer": layer,
            "stack": stack,
            "window_seconds": window_seconds,
            "normalise": self.normalise,
        }
        self.window = round(window_seconds * 16_000)
        self.feature_size = config.hidden_size * stack
        self.samples_per_frame = 320 * stack
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "FrozenEncoder":
        """Stays in evaluation mode: no dropout, no masking of spans."""
        return super().train(False)

    def frame_count(self, length: Tensor) -> Tensor:
        """Frames for `length` [b] samples, all windows together."""
        whole, rest = length // self.window, length % self.window
        full = self._frames(torch.full_like(length, self.window))
        frames = whole * full + torch.where(rest > 0, self._frames(rest), 0)
        return -(-frames // self.stack)

    def _frames(self, length: Tensor) -> Tensor:
        if self.whisper:
            return -(-length // 320)
        return self.model._get_feat_extract_output_lengths(length).clamp(min=0)

    @torch.no_grad()
    def forward(self, audio: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Frames [b, l, f] and their number [b].

        Utterances are encoded one at a time: the group normalisation of HuBERT base mixes padding into every
        frame.
        """
        count = self.frame_count(length)
        frames = audio.new_zeros(len(audio), int(count.max()), self.feature_size)
        for row, samples, n in zip(frames, audio, length.tolist(), strict=True):
            parts = [self._encode(window) for window in samples[:n].split(self.window)] if n else []
            if parts:
                joined = torch.cat(parts)
                joined = F.pad(joined, (0, 0, 0, -len(joined) % self.stack))
                row[: len(joined) // self.stack] = joined.reshape(-1, self.feature_size).to(row.dtype)
        return frames, count

    def _encode(self, samples: Tensor) -> Tensor:
        wanted = int(self._frames(torch.tensor(len(samples))))
        if self.whisper:
            # as WhisperFeatureExtractor: windows centred on their hop, the last one dropped, log10 cut off at 8 below
            padded = F.pad(samples, (0, self.window - len(samples)))
            spectrum = torch.stft(padded, 400, 160, window=self.hann.to(samples.device), return_complex=True)
            mel = spectrum[:, :-1].abs().square().T @ self.filters.to(samples.device)
            logs = mel.clamp(min=1e-10).log10()[None]
            logs = (logs.clamp(min=float(logs.max()) - 8) + 4) / 4
            out = self.model(logs.transpose(1, 2), output_hidden_states=True)
        elif wanted == 0:  # shorter than the encoder's receptive field
            return samples.new_zeros(0, self.model.config.hidden_size)
        else:
            if self.normalise:
                samples = (samples - samples.mean()) / (samples.var(correction=0) + 1e-7).sqrt()
            out = self.model(samples[None], output_hidden_states=True)
        hidden = out.last_hidden_state if self.layer == -1 else out.hidden_states[self.layer]
        return hidden[0, :wanted]


def build_encoder(encoder: str | dict[str, Any]) -> LogMel | FrozenEncoder:
    """`log_mel`, the hub id or folder of a `FrozenEncoder`, or its options as a dict."""
    if encoder == "log_mel":
        return LogMel()
    return FrozenEncoder(**encoder) if isinstance(encoder, dict) else FrozenEncoder(encoder)
