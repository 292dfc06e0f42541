import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lightning_modules.most.prompts import (
    IGNORE,
    TASKS,
    Example,
    PromptBuilder,
    add_speech_tokens,
    choose_task,
    word_tokenizer,
)

TOKENIZER = word_tokenizer(["zero", "one", "two"])
LAYOUT = add_speech_tokens(TOKENIZER, 5)
BUILD = PromptBuilder(TOKENIZER, LAYOUT, 60)


def example(task: str) -> Example:
    frames = 3 if task in ("asr", "qa_text", "qa_speech") else 0
    return Example(task, "one two", frames=frames, units=torch.tensor([4, 0]), answer="zero")


def test_speech_tokens_are_one_id_each_in_one_range():
    names = [f"[Hu{i}]" for i in range(5)] + ["<｜begin▁of▁audio｜>", "<｜end▁of▁audio｜>", "<｜audio▁frame｜>"]
    ids = [TOKENIZER.encode(name, add_special_tokens=False) for name in names]
    assert ids == [[LAYOUT.first_unit + i] for i in range(8)]
    assert (LAYOUT.begin_audio, LAYOUT.end_audio, LAYOUT.frame) == tuple(LAYOUT.first_unit + i for i in (5, 6, 7))
    assert LAYOUT.size == len(TOKENIZER)


def test_a_tokenizer_with_speech_tokens_already_in_it_gives_the_same_layout():
    again = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str()),
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>",
    )  # fmt: skip
    assert add_speech_tokens(again, 5) == LAYOUT


def test_tokenizer_without_begin_of_sequence_is_refused():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="begin-of-sequence"):
        add_speech_tokens(bare, 2)


def test_special_string_split_by_the_tokenizer_is_named():
    class Splits(PreTrainedTokenizerFast):
        def encode(self, text, **kwargs):
            return [0, 1] if "begin" in text else super().encode(text, **kwargs)

    tokenizer = Splits(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), bos_token="a", eos_token="b"
    )
    with pytest.raises(ValueError, match="begin▁of▁audio｜> into 2 ids"):
        add_speech_tokens(tokenizer, 2)


def test_speech_recognition_prompt_is_the_published_format():
    prompt, response = BUILD.parts(example("asr"), True)
    assert TOKENIZER.decode(prompt) == (
        "<s> Transcribe the following speech into text. " + "<｜audio▁frame｜> " * 3 + "</s> Output: <s>"
    )
    assert TOKENIZER.decode(response) == "one two </s>"


def test_written_and_spoken_questions_have_the_same_format():
    written, answer = BUILD.parts(example("instruct"), True)
    spoken, again = BUILD.parts(example("qa_text"), True)
    assert TOKENIZER.decode(written) == "<s> User: one two Assistant:"
    assert TOKENIZER.decode(spoken) == "<s> User: " + "<｜audio▁frame｜> " * 3 + "Assistant:"
    assert TOKENIZER.decode(answer) == TOKENIZER.decode(again) == "zero </s>"


def test_control_strings_in_a_text_are_never_control_tokens():
    """Of a sub-word tokenizer they are text; a vocabulary of whole words has no other way to write them."""
    for text in ("one </s> two", "<s>", "one [Hu3]", "<｜begin▁of▁audio｜>"):
        with pytest.raises(ValueError, match="control token|does not know"):
            BUILD.tokens(text)
    letters = word_tokenizer(list("<>/s[Hu3] "))
    layout = add_speech_tokens(letters, 5)
    build = PromptBuilder(letters, layout, 60)
    for text in ("</s>", "[Hu3]", "<s> [Hu3]"):
        ids = build.tokens(text)
        assert len(ids) == len(text), "one per character"
        assert letters.decode(ids) == text
    assert layout.first_unit + 3 in letters.encode("[Hu3]"), "what would have happened"


def test_another_number_of_units_than_the_tokenizer_has_is_named():
    again = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str()), bos_token="<s>", eos_token="</s>"
    )
    with pytest.raises(ValueError, match="has 5 unit tokens and num_units is 3: set num_units to 5"):
        add_speech_tokens(again, 3)


@pytest.mark.parametrize("task", TASKS)
def test_inference_prompts_are_the_beginning_of_training_sequences(task):
    trained = BUILD([example(task)])
    if task in ("text", "interleaved"):
        return
    asked = BUILD([example(task)], respond=False).input_ids[0]
    assert torch.equal(trained.input_ids[0, : len(asked)], asked)
    assert (trained.labels[0, : len(asked)] == IGNORE).all()
    assert (trained.labels[0, len(asked) :] != IGNORE).all()


@pytest.mark.parametrize("task", TASKS)
def test_labels_cover_the_response_with_its_stop_token_and_nothing_else(task):
    batch = BUILD([example(task), Example("asr", "zero zero zero zero", frames=9)])
    labels, ids, mask = batch.labels[0], batch.input_ids[0], batch.attention_mask[0]
    assert batch.input_ids.shape == batch.labels.shape == batch.attention_mask.shape
    assert (labels[~mask] == IGNORE).all(), "padding is never a label"
    kept = labels[labels != IGNORE]
    assert kept[-1] == LAYOUT.eos
    assert torch.equal(kept, ids[labels != IGNORE])
    assert not (kept == LAYOUT.frame).any(), "no loss on heard frames"
    spoken = {"tts", "qa_speech", "interleaved"}
    assert (LAYOUT.begin_audio in kept.tolist()) == (LAYOUT.end_audio in kept.tolist()) == (task in spoken)
    assert mask.sum() == len(ids) - (~mask).sum()


def test_padding_is_at_the_left_for_generation():
    batch = BUILD([Example("tts", "one"), Example("tts", "one two zero")], respond=False)
    assert batch.attention_mask[0].tolist() == [False, False] + [True] * (batch.attention_mask.shape[1] - 2)
    assert batch.attention_mask[1].all()


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match=r"a\.wav: \d+ tokens do not fit into the context of 60"):
        BUILD([Example("asr", "one", frames=70, name="a.wav")])
    with pytest.raises(ValueError, match="does not know every word of 'eleven'"):
        BUILD([Example("asr", "eleven", frames=1)])


def test_character_tokenizer_round_trip():
    tokenizer = word_tokenizer(list("abcdefghijklmnopqrstuvwxyz "))
    add_speech_tokens(tokenizer, 2)
    ids = tokenizer.encode("two words", add_special_tokens=False)
    assert len(ids) == 9
    assert tokenizer.decode(ids) == "two words"
    assert PromptBuilder(tokenizer, LAYOUT, 500).tokens("Transcribe the following speech into text.\n\n")


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 5), st.floats(0.01, 5))
def test_tasks_are_drawn_by_weight_among_the_possible(number, a, b):
    weights = {"asr": a, "tts": b, "text": 3.0}
    task = choose_task(weights, ["asr", "tts"], number)
    assert task == ("asr" if number * (a + b) < a else "tts")


def test_impossible_tasks_are_refused():
    with pytest.raises(ValueError, match="allows text, none of which"):
        choose_task({"asr": 1.0}, ["text"], 0.5)
