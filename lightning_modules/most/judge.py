"""A recogniser that is not the model under test and transcribes its speech, as MoST's evaluation does."""

import re

import torch
from torch import Tensor
from transformers import AutoModelForCTC, AutoProcessor


def normalise(text: str) -> str:
    """Lower case, without punctuation but for apostrophes, single spaces."""
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())


class Judge:
    """A frozen CTC recogniser of transformers; no part of the model that uses it, nor of its checkpoints.

    Args:
        source: hub id or folder; MoST uses HuBERT large fine-tuned on LibriSpeech (`facebook/hubert-large-ls960-ft`).
        device: where it runs.
    """

    def __init__(self, source: str, device: torch.device | str = "cpu") -> None:
        self.model = AutoModelForCTC.from_pretrained(source).eval().to(device)
        self.processor = AutoProcessor.from_pretrained(source)

    @torch.no_grad()
    def __call__(self, speech: list[Tensor]) -> list[str]:
        """Transcribe waveforms float [s] at 16 kHz, one by one; what is shorter than a frame has no text."""
        texts = []
        for samples in speech:
            if self.model._get_feat_extract_output_lengths(torch.tensor(len(samples))) < 1:
                texts.append("")
                continue
            inputs = self.processor(samples.float().cpu().numpy(), sampling_rate=16_000, return_tensors="pt")
            logits = self.model(inputs.input_values.to(self.model.device)).logits
            texts += self.processor.batch_decode(logits.argmax(-1))
        return [normalise(text) for text in texts]
