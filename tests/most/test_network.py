import pytest
import torch

from lightning_modules.most.moe import make_modality_aware, moe_blocks
from lightning_modules.most.network import Constraint, SpeechTextModel, token_losses
from lightning_modules.most.prompts import Example, PromptBuilder, add_speech_tokens, word_tokenizer
from tests.most.toys import language_model

TOKENIZER = word_tokenizer(["zero", "one", "two"])
LAYOUT = add_speech_tokens(TOKENIZER, 6)
BUILD = PromptBuilder(TOKENIZER, LAYOUT, 100)


def network(family: str = "deepseek_v2", **options) -> SpeechTextModel:
    model = make_modality_aware(language_model(family, vocab_size=LAYOUT.size), **options)
    torch.manual_seed(1)
    return SpeechTextModel(model, LAYOUT, 10).eval()


def heard(counts: list[int]) -> torch.Tensor:
    return torch.randn(sum(counts), 10, generator=torch.Generator().manual_seed(2))


def test_projector_gets_gradient_and_frames_go_where_their_placeholders_are():
    net = network()
    batch = BUILD(
        [
            Example("asr", "one", frames=2),
            Example("tts", "two", units=torch.tensor([1])),
            Example("asr", "zero", frames=3),
        ]
    )
    frames = heard([2, 3])
    embedded = net.embed(batch.input_ids, frames)
    places = (batch.input_ids == LAYOUT.frame).nonzero()
    assert [int(p[0]) for p in places] == [0, 0, 2, 2, 2]
    for (row, column), frame in zip(places, frames, strict=True):
        torch.testing.assert_close(embedded[row, column], net.projector(frame))
    token_losses(net(batch.input_ids, frames, batch.attention_mask), batch.labels).mean().backward()
    assert net.projector.weight.grad.abs().sum() > 0
    assert net.projector.bias.grad.abs().sum() > 0


def test_projector_takes_part_without_audio():
    net = network()
    batch = BUILD([Example("text", "one two")])
    token_losses(net(batch.input_ids, None, batch.attention_mask), batch.labels).mean().backward()
    assert (net.projector.weight.grad == 0).all()


def test_frames_and_placeholders_must_agree():
    batch = BUILD([Example("asr", "one", frames=4)])
    with pytest.raises(ValueError, match="3 frames for 4 placeholders"):
        network()(batch.input_ids, heard([3]), batch.attention_mask)


def test_token_losses_against_a_loop():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 2] = labels[1, 4] = -100
    expected = [
        -logits[b, t].log_softmax(-1)[labels[b, t + 1]] for b in range(2) for t in range(4) if labels[b, t + 1] != -100
    ]
    torch.testing.assert_close(token_losses(logits, labels), torch.stack(expected))


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
@pytest.mark.parametrize("expect", ["text", "speech", "text_then_speech"])
def test_generation_with_cache_equals_generation_without(family, expect):
    """Greedy, a batch with padding at the left; without: the whole sequence again at every step, one item at a
    time."""
    net = network(family)
    examples = [Example("asr", frames=2), Example("asr", frames=7)]
    frames = heard([2, 7])
    prompt = BUILD(examples, respond=False)
    made = net.generate(prompt.input_ids, frames, prompt.attention_mask, expect, 12)
    for i, own in enumerate((frames[:2], frames[2:])):
        ids = BUILD(examples[i : i + 1], respond=False).input_ids
        constraint = Constraint(LAYOUT, expect, 12, 1)
        response = []
        while not constraint.finished:
            logits = net(ids, own)[0, -1].masked_fill(~constraint.allowed[0], -torch.inf)
            token = logits.argmax()[None]
            response.append(int(token))
            constraint.advance(token)
            ids = torch.cat([ids, token[None]], 1)
        assert made[i, : len(response)].tolist() == response
        assert (made[i, len(response) :] == LAYOUT.pad).all()


def test_each_sampled_token_is_routed_by_its_own_id():
    net = network()
    prompt = BUILD([Example("tts", "one")], respond=False)
    seen = []
    gate = moe_blocks(net)[0].gate
    gate.register_forward_hook(lambda module, args, out: seen.append(args[1].tolist()))
    made = net.generate(prompt.input_ids, None, prompt.attention_mask, "speech", 6)[0].tolist()
    fed = made[:-1]  # the last token is not fed back
    assert [m[0] for m in seen[1 : 1 + len(fed)]] == [int(LAYOUT.first_unit <= t <= LAYOUT.frame) for t in fed]


@pytest.mark.parametrize("expect", ["text", "speech", "text_then_speech"])
@pytest.mark.parametrize("seed", range(3))
def test_responses_are_well_formed_whatever_the_model_says(expect, seed):
    generator = torch.Generator().manual_seed(seed)
    for limit in (5, 6, 9, 30):
        constraint = Constraint(LAYOUT, expect, limit, 50)
        response = []
        for _ in range(limit):
            if constraint.finished:
                break
            token = torch.multinomial(constraint.allowed.float(), 1, generator=generator)[:, 0]
            constraint.advance(token)
            response.append(token)
        assert constraint.finished, "the response ends within its limit"
        for row in torch.stack(response, 1).tolist():
            end = row.index(LAYOUT.eos)
            assert all(t == LAYOUT.pad for t in row[end:])
            body = row[:end]
            if expect == "text":
                assert all(t < LAYOUT.first_unit for t in body)
                continue
            begin, close = body.index(LAYOUT.begin_audio), body.index(LAYOUT.end_audio)
            assert close == len(body) - 1 > begin + 1
            assert all(t < LAYOUT.first_unit for t in body[:begin])
            assert (begin == 0) >= (expect == "speech")
            assert all(LAYOUT.first_unit <= t < LAYOUT.begin_audio for t in body[begin + 1 : close])


def test_limits_and_expectations_are_checked():
    with pytest.raises(ValueError, match="at least 5"):
        Constraint(LAYOUT, "text", 4, 1)
    with pytest.raises(ValueError, match="unknown"):
        Constraint(LAYOUT, "music", 10, 1)


def test_sampling_with_a_generator_repeats():
    net = network()
    prompt = BUILD([Example("asr", frames=2)], respond=False)
    runs = [
        net.generate(
            prompt.input_ids, heard([2]), prompt.attention_mask, "speech", 20, 1.0, torch.Generator().manual_seed(s)
        )
        for s in (0, 0, 1)
    ]
    assert torch.equal(runs[0], runs[1])
    assert runs[0].shape != runs[2].shape or not torch.equal(runs[0], runs[2])
