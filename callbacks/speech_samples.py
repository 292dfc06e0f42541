"""Speech that a model makes, as WAV files and spectrograms in the run folder, and what it hears in recordings."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.checks import require
from callbacks.figures import log_figure, log_table, new_figure
from datamodules.checks import check_least
from lightning_modules.most.module import MoST


class SpeechSamples(Callback):
    """Watches `MoST`: speaks a few texts after training, and writes what `predict` speaks.

    After a fit `<run>/samples/<n>.wav` and `plots/sample_<n>.png` (waveform and spectrogram), both also to W&B. In
    `predict`, the `samples` of a batch become files `<run>/predictions/<index>.wav` and a column `file`; put it in
    front of `PredictionWriter`.

    After a fit and after a test, `val_transcripts.csv` and `test_transcripts.csv` (tables in W&B) set what was said in
    the first recordings of the split beside what the model hears.

    Args:
        texts: what is spoken after training; by default the first texts of the validation split.
        count: how many by default, at least 1.
        recordings: how many are transcribed, at most a batch; 0 leaves the tables out.
    """

    def __init__(self, texts: list[str] | None = None, count: int = 2, recordings: int = 8) -> None:
        check_least(1, count=count)
        check_least(0, recordings=recordings)
        self.texts, self.count, self.recordings = texts, count, recordings

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another method.

        Raises:
            ValueError: if it is not MoST, or there is no data module to take texts from.
        """
        require(self, isinstance(pl_module, MoST), "the method MoST", pl_module)
        data = trainer.datamodule
        require(self, stage == "predict" or data is not None, "a data module such as SpeechText", data)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Transcribe, speak, write and draw."""
        assert isinstance(pl_module, MoST)
        if trainer.fast_dev_run:
            return
        pl_module.eval()
        self._transcribe(trainer, pl_module, trainer.datamodule.val_dataloader(), "val")
        if pl_module.vocoder is None:
            return
        texts = self.texts or next(iter(trainer.datamodule.val_dataloader())).text[: self.count]
        speech = pl_module.speak(texts)  # on all ranks: a sharded model needs them all
        rate = pl_module.encoder.sample_rate
        folder = Path(trainer.default_root_dir) / "samples"
        for i, (text, samples) in enumerate(zip(texts, speech, strict=True)):
            log_figure(trainer, f"sample_{i}", picture(samples, rate, text))
            if trainer.is_global_zero:
                write_wav(folder / f"{i}.wav", samples, rate)
                for logger in trainer.loggers:
                    if isinstance(logger, WandbLogger):
                        logger.log_audio("samples", [str(folder / f"{i}.wav")], caption=[text])
        trainer.print(f"Spoken in {folder}: {'; '.join(texts)}")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Transcribe."""
        self._transcribe(trainer, pl_module, trainer.datamodule.test_dataloader(), "test")

    def _transcribe(self, trainer: Trainer, pl_module: LightningModule, loader: Any, stage: str) -> None:
        if self.recordings == 0:
            return
        batch = next(iter(loader))
        audio, length = (x[: self.recordings].to(pl_module.device) for x in (batch.audio, batch.length))
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            heard = pl_module(audio, length)  # on all ranks
        columns = (batch.name, batch.speaker, batch.text, heard)
        rows = zip(*(column[: len(heard)] for column in columns), length.tolist(), strict=True)
        names = ("file", "speaker", "text", "transcript")
        log_table(trainer, f"{stage}_transcripts", [dict(zip(names, row[:4], strict=True)) for row in rows if row[4]])

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the waveforms of a batch and leave their paths in its place."""
        if "samples" not in outputs:
            return
        assert isinstance(pl_module, MoST)
        folder = Path(trainer.default_root_dir) / "predictions"
        outputs["file"] = [f"{folder / f'{i:05d}.wav'}" for i in outputs["index"].tolist()]
        for path, samples in zip(outputs["file"], outputs.pop("samples"), strict=True):
            write_wav(Path(path), samples, pl_module.encoder.sample_rate)


def write_wav(path: Path, samples: Tensor, rate: int) -> None:
    """Write float samples [s] in [-1, 1] as a 16-bit WAV file."""
    from scipy.io import wavfile

    path.parent.mkdir(parents=True, exist_ok=True)
    wavfile.write(path, rate, (samples.clamp(-1, 1) * 32767).short().cpu().numpy())


def picture(samples: Tensor, rate: int, text: str) -> Figure:
    """A figure: waveform above, spectrogram in dB below."""
    figure = new_figure(7, 4)
    wave, frequencies = figure.subplots(2, 1, sharex=True)
    samples = samples.cpu()
    seconds = len(samples) / rate
    wave.plot(torch.arange(len(samples)) / rate, samples, linewidth=0.5)
    wave.set(title=text, ylabel="amplitude", xlim=(0, max(seconds, 1e-3)))
    if len(samples) >= 512:
        spectrum = torch.stft(samples, 512, 128, window=torch.hann_window(512), return_complex=True)
        decibels = 20 * spectrum.abs().clamp(min=1e-5).log10()
        frequencies.imshow(decibels, origin="lower", aspect="auto", extent=(0, seconds, 0, rate / 2000), vmin=-60)
    frequencies.set(xlabel="s", ylabel="kHz")
    return figure
