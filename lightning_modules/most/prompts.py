r"""One builder of token sequences for all tasks, used in training and in inference alike.

    ASR and TTS   BOS instruction "\\n\\n" input EOS "\\n\\nOutput: " BOS | output EOS
    spoken QA     BOS "User: " speech "\\n\\nAssistant: " | answer EOS
    instruct      BOS "User: " text "\\n\\nAssistant: " | answer EOS
    text          BOS | text EOS
    interleaved   BOS | speech units, then their text EOS, or the other way round

The loss is on what is right of the bar (MoST's data format; the second BOS is given, not predicted). Speech
that is heard takes one placeholder id per frame, so that ids, labels, positions and modality stay aligned
with what the model sees; speech that is spoken is `begin_audio`, unit tokens, `end_audio`.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TASKS = ("asr", "tts", "text", "qa_text", "qa_speech", "instruct", "interleaved")
TRANSCRIBE = "Transcribe the following speech into text."
SPEAK = "Convert the following text into speech."
IGNORE = -100


@dataclass(frozen=True)
class TokenLayout:
    """Where the speech tokens are in the vocabulary: units, begin_audio, end_audio, frame, in this order.

    Attributes:
        first_unit: id of unit 0; the audio range begins here.
        num_units: number of units.
        bos: begin of sequence.
        eos: end of sequence.
        pad: padding; may be equal to `eos`.
        size: length of the vocabulary.
    """

    first_unit: int
    num_units: int
    bos: int
    eos: int
    pad: int
    size: int

    @property
    def begin_audio(self) -> int:
        """Opens spoken output."""
        return self.first_unit + self.num_units

    @property
    def end_audio(self) -> int:
        """Closes spoken output."""
        return self.begin_audio + 1

    @property
    def frame(self) -> int:
        """Placeholder of one frame of heard speech; the audio range ends here."""
        return self.begin_audio + 2


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word; or per character, when all entries are single characters.

    Args:
        words: the vocabulary; the words of the instructions are added.
    """
    characters = all(len(word) == 1 for word in words)
    prompts = f"{TRANSCRIBE} {SPEAK} Output: User: Assistant:"
    more = [*prompts, "\n"] if characters else prompts.split()
    pieces = list(dict.fromkeys(["<unk>", "<s>", "</s>", *words, *more]))
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated") if characters else pre_tokenizers.WhitespaceSplit()
    )
    if characters:
        tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def add_speech_tokens(tokenizer: PreTrainedTokenizerBase, num_units: int) -> TokenLayout:
    """Add unit and marker tokens to a tokenizer, in place, and say where they are.

    Raises:
        ValueError: if a special string does not encode to exactly one id, if the ids are not consecutive, if the
            tokenizer has another number of units already, or has no begin or end of sequence.
    """
    there = sum(bool(re.fullmatch(r"\[Hu\d+\]", token)) for token in tokenizer.get_added_vocab())
    if there not in (0, num_units):
        raise ValueError(
            f"the tokenizer has {there} unit tokens and num_units is {num_units}: set num_units to {there}"
        )
    names = [f"[Hu{i}]" for i in range(num_units)]
    names += ["<｜begin▁of▁audio｜>", "<｜end▁of▁audio｜>", "<｜audio▁frame｜>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    ids = []
    for name in names:
        own = tokenizer.encode(name, add_special_tokens=False)
        if len(own) != 1:
            raise ValueError(f"the tokenizer splits the special string {name} into {len(own)} ids; it must be one")
        ids += own
    if ids != list(range(ids[0], ids[0] + len(ids))):
        raise ValueError("the tokenizer gave the speech tokens ids that are not consecutive: use one without them")
    if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no begin-of-sequence or no end-of-sequence token")
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return TokenLayout(ids[0], num_units, tokenizer.bos_token_id, tokenizer.eos_token_id, pad, len(tokenizer))


def choose_task(weights: dict[str, float], possible: Sequence[str], number: float) -> str:
    """The task of one utterance: drawn by weight among those it has data for.

    Args:
        weights: weight of each task, not negative.
        possible: tasks for which the utterance has what it takes.
        number: uniform in [0, 1).

    Raises:
        ValueError: if no task with a positive weight is possible.
    """
    shares = {task: weight for task, weight in weights.items() if weight > 0 and task in possible}
    if not shares:
        raise ValueError(f"an utterance allows {', '.join(possible) or 'no task'}, none of which has a weight in tasks")
    bounds = list(accumulate(shares.values()))
    return list(shares)[bisect_right(bounds[:-1], number * bounds[-1])]


class Example(NamedTuple):
    """What one utterance brings to a prompt.

    Attributes:
        task: one of `TASKS`.
        text: transcript, or the text to speak, or plain text.
        frames: number of frames of heard speech.
        units: int64 [n], units of the utterance (tts, interleaved) or of the spoken answer (qa_speech).
        answer: answer to a spoken or written question.
        text_first: for interleaved: text, then speech.
        name: for messages.
    """

    task: str
    text: str = ""
    frames: int = 0
    units: Tensor | None = None
    answer: str = ""
    text_first: bool = False
    name: str = ""


class Prompt(NamedTuple):
    """A batch of token sequences, all int64 [b, t] but the mask.

    Attributes:
        input_ids: with `layout.frame` where a frame of speech is heard.
        labels: -100 on prompts and padding. Not shifted.
        attention_mask: bool [b, t], False on padding.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor


class PromptBuilder:
    """Builds prompts and, for training, the responses behind them.

    Args:
        tokenizer: with the speech tokens added.
        layout: as `add_speech_tokens` returned it.
        max_length: longest sequence in tokens; longer ones are refused.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, layout: TokenLayout, max_length: int) -> None:
        self.tokenizer, self.layout, self.max_length = tokenizer, layout, max_length
        self.control = set(tokenizer.all_special_ids)

    def tokens(self, text: str) -> list[int]:
        """Ids of a text; names of control tokens in it, such as `</s>` or `[Hu3]`, are text like any other.

        Raises:
            ValueError: if the tokenizer does not know a part of it, or only as a control token.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in ids:
            raise ValueError(f"the tokenizer does not know every word of {text!r}")
        if not self.control.isdisjoint(ids):
            raise ValueError(f"a word of {text!r} is a control token of the tokenizer")
        return ids

    def _spoken(self, units: Tensor | None) -> list[int]:
        assert units is not None  # of an example that is spoken
        return [self.layout.begin_audio, *(units + self.layout.first_unit).tolist(), self.layout.end_audio]

    def parts(self, example: Example, respond: bool) -> tuple[list[int], list[int]]:
        """Ids of the prompt and of the response (empty without `respond`)."""
        layout, task = self.layout, example.task
        heard = [layout.frame] * example.frames
        response: list[int] = []
        if task == "asr":
            prompt = self._instruct(TRANSCRIBE, heard)
            response = self.tokens(example.text) if respond else []
        elif task == "tts":
            prompt = self._instruct(SPEAK, self.tokens(example.text))
            response = self._spoken(example.units) if respond else []
        elif task in ("qa_text", "qa_speech", "instruct"):
            asked = self.tokens(example.text) if task == "instruct" else heard
            prompt = [layout.bos, *self.tokens("User: "), *asked, *self.tokens("\n\nAssistant: ")]
            response = self.tokens(example.answer) if respond else []
            if respond and task == "qa_speech":
                response += self._spoken(example.units)
        elif task == "text":
            prompt, response = [layout.bos], self.tokens(example.text)
        elif task == "interleaved":
            spoken, written = self._spoken(example.units), self.tokens(example.text)
            prompt, response = [layout.bos], written + spoken if example.text_first else spoken + written
        else:
            raise ValueError(f"task {task!r} is unknown: use {', '.join(TASKS)}")
        return prompt, [*response, layout.eos] if respond else []

    def _instruct(self, instruction: str, given: list[int]) -> list[int]:
        layout = self.layout
        head = [layout.bos, *self.tokens(f"{instruction}\n\n"), *given, layout.eos]
        return [*head, *self.tokens("\n\nOutput: "), layout.bos]

    def __call__(self, examples: Sequence[Example], respond: bool = True) -> Prompt:
        """Build a batch: padded at the right with responses, at the left without (for generation).

        Raises:
            ValueError: naming an example that is longer than the context.
        """
        sequences, labels = [], []
        for example in examples:
            prompt, response = self.parts(example, respond)
            if len(prompt) + len(response) > self.max_length:
                raise ValueError(
                    f"{example.name or repr(example.text)}: {len(prompt) + len(response)} tokens do not fit into the "
                    f"context of {self.max_length}"
                )
            sequences.append(torch.tensor(prompt + response))
            labels.append(torch.tensor([IGNORE] * len(prompt) + response))
        side = "right" if respond else "left"
        pad = torch.nn.utils.rnn.pad_sequence
        lengths = torch.tensor([len(s) for s in sequences])[:, None]
        places = torch.arange(int(lengths.max()))
        mask = places < lengths if respond else places >= lengths.max() - lengths
        return Prompt(
            pad(sequences, batch_first=True, padding_value=self.layout.pad, padding_side=side),
            pad(labels, batch_first=True, padding_value=IGNORE, padding_side=side),
            mask,
        )
