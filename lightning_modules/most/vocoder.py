"""Unit vocoder: unit tokens to a waveform, with the HiFi-GAN generator of transformers (Kong et al. 2020).

It is trained on the distance of log-mel spectrograms at several resolutions.
"""

import torch
from torch import Tensor, nn
from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

from lightning_modules.most.encoders import log_mel, mel_filters
from lightning_modules.most.units import deduplicate

UPSAMPLING = {640: (8, 5, 4, 4), 320: (5, 4, 4, 4)}  # by samples per unit: 25 or 50 units a second at 16 kHz
AFTER = 12  # units; the generator hears fewer than 10 to each side


class UnitVocoder(nn.Module):
    """Units to samples at 16 kHz.

    Args:
        num_units: size of the unit set.
        unit_hash: hash of the unit set (`Units.hash`), kept with the weights.
        samples_per_unit: 640 or 320.
        width: channels in front of the first upsampling; halved at each of the four.
        embedding: size of a unit's embedding.
    """

    def __init__(
        self,
        num_units: int,
        unit_hash: str = "",
        samples_per_unit: int = 640,
        width: int = 128,
        embedding: int = 64,
    ) -> None:
        super().__init__()
        if samples_per_unit not in UPSAMPLING:
            raise ValueError(
                f"the vocoder makes {' or '.join(map(str, UPSAMPLING))} samples per unit; the encoder has one frame "
                f"per {samples_per_unit}: change its stack"
            )
        rates = UPSAMPLING[samples_per_unit]
        self.samples_per_unit = samples_per_unit
        self.hash_bytes = nn.Buffer(torch.zeros(8, dtype=torch.uint8))  # travels with the weights
        self.unit_hash = unit_hash or "0" * 16
        self.embedding = nn.Embedding(num_units, embedding)
        self.generator = SpeechT5HifiGan(
            SpeechT5HifiGanConfig(
                model_in_dim=embedding,
                sampling_rate=16_000,
                upsample_initial_channel=width,
                upsample_rates=list(rates),
                upsample_kernel_sizes=[2 * r + r % 2 for r in rates],  # kernel minus rate is even: no sample is lost
                resblock_kernel_sizes=[3, 7],
                resblock_dilation_sizes=[[1, 3], [1, 3]],
                normalize_before=False,
            )
        ).train()
        for module in self.generator.modules():  # transformers' 0.01 is meant for weight-normalised layers: no signal
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                module.reset_parameters()

    def forward(self, units: Tensor) -> Tensor:
        """Units int64 [b, l] to samples float32 [b, l * samples_per_unit] in [-1, 1]."""
        return self.generator(self.embedding(units))

    @property
    def unit_hash(self) -> str:
        """Hash of the unit set it speaks."""
        return bytes(self.hash_bytes.tolist()).hex()

    @unit_hash.setter
    def unit_hash(self, value: str) -> None:
        self.hash_bytes.copy_(torch.tensor(list(bytes.fromhex(value)), dtype=torch.uint8))

    def check(self, unit_hash: str) -> None:
        """Refuse units of another set.

        Raises:
            ValueError: if the hash is another one.
        """
        if unit_hash != self.unit_hash:
            raise ValueError(
                f"the vocoder was trained on the unit set {self.unit_hash} and cannot speak {unit_hash}: "
                "train one on these units"
            )

    @torch.no_grad()
    def speak(self, units: list[Tensor]) -> list[Tensor]:
        """Samples [s] of each sequence of units int64 [l], in one pass.

        In it every sequence goes on with its last unit, so its sound does not depend on the others.
        """
        longest = max(map(len, units))
        if longest == 0:
            return [self.embedding.weight.new_zeros(0) for _ in units]
        places = torch.arange(longest + AFTER, device=units[0].device)
        padded = torch.stack([u[places.clamp(max=len(u) - 1)] if len(u) else torch.zeros_like(places) for u in units])
        size = self.samples_per_unit
        return [samples[: len(u) * size] for samples, u in zip(self(padded), units, strict=True)]


class DurationPredictor(nn.Module):
    """Logarithm of the run length of each de-duplicated unit, from the unit and its neighbours.

    Args:
        num_units: size of the unit set.
        width: size of the embedding and of the hidden layer.
    """

    def __init__(self, num_units: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_units, width)
        self.layers = nn.Sequential(nn.Conv1d(width, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, 1, 3, padding=1))

    def forward(self, runs: Tensor) -> Tensor:
        """Units int64 [b, m], -1 after their end, to float [b, m]; padding changes nothing in front of it."""
        real = (runs >= 0).unsqueeze(1)
        first, activation, last = self.layers
        x = self.embedding(runs.clamp(min=0)).transpose(1, 2) * real
        return last(activation(first(x)) * real)[:, 0]

    @torch.no_grad()
    def lengthen(self, runs: list[Tensor]) -> list[Tensor]:
        """Repeat every unit for its predicted length, 1 to 25; sequences int64 [m] to int64 [l]."""
        padded = nn.utils.rnn.pad_sequence(runs, batch_first=True, padding_value=-1)
        if padded.shape[1] == 0:
            return runs
        lengths = self(padded).exp().round().clamp(1, 25).long()
        return [own.repeat_interleave(n[: len(own)]) for own, n in zip(runs, lengths, strict=True)]


def duration_errors(predictor: DurationPredictor, units: Tensor, count: Tensor) -> Tensor:
    """Squared errors of the logarithms of the run lengths.

    Args:
        predictor: of run lengths.
        units: int64 [b, l].
        count: int64 [b], units of each, at least 1.

    Returns:
        float [m], one for each run of equal units.
    """
    runs, lengths = zip(*(deduplicate(u[:n]) for u, n in zip(units, count.tolist(), strict=True)), strict=True)
    pad = nn.utils.rnn.pad_sequence
    target = pad(list(lengths), batch_first=True)
    error = (predictor(pad(list(runs), batch_first=True, padding_value=-1)) - target.clamp(min=1).log()).square()
    return error[target > 0]


class MelLoss(nn.Module):
    """Mean absolute difference of log-mel spectrograms at several resolutions.

    Args:
        windows: lengths of the analysis windows in samples; the hop is a quarter.
        mels: bands at each.
    """

    def __init__(self, windows: tuple[int, ...] = (256, 512, 1024), mels: int = 40) -> None:
        super().__init__()
        self.windows = windows
        for window in windows:
            self.register_buffer(f"hann_{window}", torch.hann_window(window), persistent=False)
            self.register_buffer(f"filters_{window}", mel_filters(window, mels), persistent=False)

    def forward(self, made: Tensor, real: Tensor) -> Tensor:
        """Compare samples [b, s]; the result is in natural logarithms."""
        total = made.new_zeros(())
        for window in self.windows:
            hop = window // 4
            hops = -(-made.shape[-1] // hop)
            hann, filters = getattr(self, f"hann_{window}"), getattr(self, f"filters_{window}")
            a, b = (log_mel(x, hops, hop, hann, filters).clamp(min=-11.5) for x in (made, real))
            total = total + (a - b).abs().mean()
        return total / len(self.windows)
