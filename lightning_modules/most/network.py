"""The speech-text model: a modality-aware language model that hears frames and emits text and unit tokens."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lightning_modules.most.moe import modality_of
from lightning_modules.most.prompts import IGNORE, TokenLayout

Expect = Literal["text", "speech", "text_then_speech"]


class SpeechTextModel(nn.Module):
    """A language model with a linear projector for frames of speech (MoST, figure 1).

    Args:
        language_model: made modality-aware; its vocabulary covers the layout's ids.
        layout: of the tokens.
        feature_size: size of an encoder frame.
    """

    def __init__(self, language_model: PreTrainedModel, layout: TokenLayout, feature_size: int) -> None:
        super().__init__()
        self.language_model = language_model
        self.projector = nn.Linear(feature_size, language_model.config.hidden_size)
        self.layout = layout

    def modality(self, input_ids: Tensor) -> Tensor:
        """0 text, 1 audio (units, markers, heard frames) for every id."""
        return modality_of(input_ids, self.layout.first_unit, self.layout.frame)

    def embed(self, input_ids: Tensor, frames: Tensor | None) -> Tensor:
        """Embeddings [b, t, h]: of the ids, and of the projected frames where a frame is heard.

        The projector always runs, so that every rank of a sharded model takes part, whatever its batch holds.

        Args:
            input_ids: int64 [b, t].
            frames: float [n, f], the frames of all sequences one after the other, or None.

        Raises:
            ValueError: if the number of frames is not that of the placeholders.
        """
        embeddings = self.language_model.get_input_embeddings()(input_ids)
        heard = input_ids == self.layout.frame
        if frames is None or len(frames) == 0:
            nothing = embeddings.new_zeros(1, self.projector.in_features)
            return embeddings + 0 * self.projector(nothing).sum().to(embeddings.dtype)
        if len(frames) != int(heard.sum()):
            raise ValueError(f"{len(frames)} frames for {int(heard.sum())} placeholders in the prompt")
        projected = self.projector(frames.to(self.projector.weight.dtype)).to(embeddings.dtype)
        return embeddings.masked_scatter(heard[..., None], projected)

    def forward(
        self,
        input_ids: Tensor,
        frames: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: DynamicCache | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits of the next token at every position.

        Args:
            input_ids: int64 [b, t].
            frames: float [n, f], see `embed`.
            attention_mask: bool [b, past + t], False on padding.
            cache: keys and values of `past` earlier tokens; extended in place.
            last: only the logits of the last position.

        Returns:
            float [b, t, v], or [b, 1, v] with `last`.
        """
        positions = None
        if attention_mask is not None:  # padding at the left does not count
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        if cache is not None and cache.get_seq_length():  # a token of the response: on no rank is anything heard
            embeddings = self.language_model.get_input_embeddings()(input_ids)
        else:
            embeddings = self.embed(input_ids, frames)
        return self.language_model(
            inputs_embeds=embeddings,
            modality_ids=self.modality(input_ids),
            attention_mask=None if attention_mask is None else attention_mask.long(),
            position_ids=positions,
            cache=cache,
            use_cache=cache is not None,
            logits_to_keep=1 if last else 0,
        ).logits

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        frames: Tensor | None,
        attention_mask: Tensor,
        expect: Expect = "text",
        max_tokens: int = 200,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        finished_everywhere: Callable[[bool], bool] = bool,
    ) -> Tensor:
        """Continue prompts, one token at a time, with a cache of keys and values.

        Decoding is constrained: no unit outside spoken output, nothing but units inside it, `end_audio` then
        EOS at its end, and after `max_tokens` tokens of spoken output it is closed. Every sampled token is
        routed by its own id.

        Args:
            input_ids: int64 [b, t], padded at the left.
            frames: float [n, f], see `embed`.
            attention_mask: bool [b, t].
            expect: what the response is.
            max_tokens: most tokens of the response, markers and EOS included.
            temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is drawn.
            generator: for drawing.
            finished_everywhere: whether to stop, from whether all responses here have ended. Ranks that share a
                sharded model agree through it: each forward pass needs all of them.

        Returns:
            int64 [b, at most max_tokens]: the responses without prompts, `layout.pad` behind their ends.
        """
        constraint = Constraint(self.layout, expect, max_tokens, len(input_ids), input_ids.device)
        cache = DynamicCache(config=self.language_model.config)
        response: list[Tensor] = []
        tokens, heard = input_ids, frames
        padded = not bool(attention_mask.all())  # without padding the language model needs no mask, and is faster
        while len(response) < max_tokens and not finished_everywhere(constraint.finished):
            logits = self(tokens, heard, attention_mask if padded else None, cache, last=True)[:, -1].float()
            logits = logits[:, : self.layout.size].masked_fill(~constraint.allowed, -torch.inf)
            if temperature > 0:
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                token = logits.argmax(-1, keepdim=True)
            constraint.advance(token[:, 0])
            response.append(token)
            tokens, heard = token, None
            if padded:
                attention_mask = F.pad(attention_mask, (0, 1), value=True)
        return torch.cat(response, 1)


class Constraint:
    """What may come next in b responses; a small automaton with one row of allowed tokens per state.

    Args:
        layout: of the tokens.
        expect: "text"; "speech" (begin_audio, at least one unit, end_audio); "text_then_speech".
        max_tokens: the response is closed in time to end within so many tokens.
        batch: b.
        device: of the masks.
    """

    TEXT, TEXT_THEN_SPEECH, OPEN, FIRST, UNITS, CLOSE, STOP, DONE = range(8)

    def __init__(
        self, layout: TokenLayout, expect: Expect, max_tokens: int, batch: int, device: torch.device | str = "cpu"
    ) -> None:
        if expect not in ("text", "speech", "text_then_speech"):
            raise ValueError(f"expect {expect!r} is unknown: use text, speech or text_then_speech")
        if max_tokens < 5:
            raise ValueError(f"max_tokens {max_tokens} leaves no room for a response: use at least 5")
        self.layout, self.remaining = layout, max_tokens
        start = {"text": self.TEXT, "speech": self.OPEN, "text_then_speech": self.TEXT_THEN_SPEECH}[expect]
        self.state = torch.full((batch,), start, device=device)
        rows = torch.zeros(8, layout.size, dtype=torch.bool, device=device)
        rows[self.TEXT] = True
        rows[self.TEXT, layout.first_unit : layout.frame + 1] = False
        rows[self.TEXT, [layout.bos, layout.pad]] = False
        rows[self.TEXT_THEN_SPEECH] = rows[self.TEXT]
        rows[self.TEXT, layout.eos] = True
        rows[self.TEXT_THEN_SPEECH, layout.eos] = False
        rows[self.TEXT_THEN_SPEECH, layout.begin_audio] = True
        rows[self.OPEN, layout.begin_audio] = True
        rows[self.FIRST, layout.first_unit : layout.begin_audio] = True
        rows[self.UNITS] = rows[self.FIRST]
        rows[self.UNITS, layout.end_audio] = True
        rows[self.CLOSE, layout.end_audio] = True
        rows[self.STOP, layout.eos] = True
        rows[self.DONE, layout.pad] = True
        self.rows = rows

    @property
    def allowed(self) -> Tensor:
        """Bool [b, v]: tokens that may come next."""
        return self.rows[self.state]

    @property
    def finished(self) -> bool:
        """Whether all responses have ended."""
        return bool((self.state == self.DONE).all())

    def advance(self, token: Tensor) -> None:
        """Take int64 [b] tokens that were allowed."""
        self.remaining -= 1
        state, layout = self.state, self.layout
        text = (state == self.TEXT) | (state == self.TEXT_THEN_SPEECH)
        after = state.clone()
        after[(token == layout.eos) & (text | (state == self.STOP))] = self.DONE
        after[token == layout.begin_audio] = self.FIRST
        after[state == self.FIRST] = self.UNITS
        after[token == layout.end_audio] = self.STOP
        # end_audio and EOS still have to fit; before speech begins, so do begin_audio and a unit
        if self.remaining <= 2:
            after[after == self.UNITS] = self.CLOSE
        if self.remaining <= 4:
            after[after == self.TEXT_THEN_SPEECH] = self.OPEN
        if self.remaining <= 1:
            after[after == self.TEXT] = self.STOP
        self.state = after


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every labelled token, [m]: position t predicts the label at t + 1."""
    labels = labels[:, 1:]
    keep = labels != IGNORE
    return F.cross_entropy(logits[:, :-1][keep].float(), labels[keep], reduction="none")
