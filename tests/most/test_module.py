import json

import pytest
import soundfile
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.compile import Compile
from callbacks.expert_load import ExpertLoad
from callbacks.predictions import PredictionWriter
from callbacks.speech_samples import SpeechSamples
from datamodules.speech import Augmentation, MadeSpeech, SpeechText, read_audio
from lightning_modules import MoST
from lightning_modules.most.module import Frames
from lightning_modules.most.moe import moe_blocks
from lightning_modules.most.prompts import Example
from lightning_modules.most.units import Units
from tests.most.toys import CONFIGS
from tests.most.toys import config as toy

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RECIPE = MadeSpeech(utterances=48, voices=["en-us+f1", "en-us+m3"], unseen_utterances=16, unseen_voices=["en-us+m7"])


def model(**options) -> MoST:
    language_model = toy("deepseek_v2")
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        language_model.pop(key)
    defaults = {
        "language_model": language_model,
        "tokenizer": WORDS,
        "tasks": {"asr": 0.5, "tts": 0.3, "text": 0.1, "interleaved": 0.1},
        "num_units": 8,
        "unit_frames": 300,
        "vocoder_width": 16,
        "vocoder_crop": 3,
        "max_length": 120,
        "max_response": 30,
        "warmup_steps": 2,
        "check_shuffled": True,
    }
    return MoST(**(defaults | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("speech")


def data(folder, **options) -> SpeechText:
    return SpeechText(made=RECIPE, data_dir=str(folder), batch_size=8, **options)


def trainer(path, **options) -> Trainer:
    defaults = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 1}
    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=path,
        **(defaults | options),
    )


@pytest.fixture(scope="module")
def fitted(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    seed_everything(0)
    checkpoint = ModelCheckpoint(path / "checkpoints", save_last=True)
    run = trainer(path, callbacks=[checkpoint, ExpertLoad(1), SpeechSamples(["one two", "three"])])
    module = model()
    run.fit(module, data(folder))
    return module, run, path


def test_fit_logs_every_score_and_leaves_pictures_and_two_recordings(fitted):
    module, run, path = fitted
    logged = run.callback_metrics
    for name in ("val/wer", "val/cer", "val/loss", "val/text_loss", "val/wer_shuffled", "val/expert_load_max"):
        assert torch.isfinite(logged[name]), name
    for name in ("train/loss", "train/token_loss", "train/balance", "train/vocoder"):
        assert torch.isfinite(logged[name]), name
    assert run.global_step == 6
    for file in ("plots/expert_load.png", "plots/sample_0.png", "plots/sample_1.png", "samples/0.wav", "samples/1.wav"):
        assert (path / file).stat().st_size > 40, file
    assert soundfile.info(path / "samples/0.wav").samplerate == 16_000
    assert module.vocoder.unit_hash == module.units.hash


def test_checkpoint_is_enough_to_load_and_to_transcribe(fitted, folder):
    module, _, path = fitted
    loaded = MoST.load_from_checkpoint(path / "checkpoints" / "last.ckpt").eval()
    speech = data(folder)
    speech.setup()
    batch = next(iter(speech.test_dataloader()))
    module.eval()
    assert loaded(batch.audio, batch.length) == module(batch.audio, batch.length)
    assert all(torch.equal(a, b) for a, b in zip(loaded.speak(["one"]), module.speak(["one"]), strict=True))
    content = torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)
    json.dumps(content["hyper_parameters"]["architecture"])


def test_save_pretrained_round_trip_and_init_from(fitted, tmp_path):
    module, _, path = fitted
    module.save_pretrained(tmp_path)
    loaded = MoST.from_pretrained(tmp_path)
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.vocoder.unit_hash == module.units.hash
    assert len(loaded.speak(["one"])[0]) > 0
    for source in (tmp_path, path / "checkpoints" / "last.ckpt"):
        started = model(init_from=str(source))
        started.configure_model()
        weights = [m.network.projector.weight for m in (started, module)]
        assert torch.equal(*weights)
    resumed = model(init_from=str(tmp_path / "gone"))  # the checkpoint brings all weights
    resumed.trainer = Trainer(accelerator="cpu", logger=False)
    resumed.trainer.ckpt_path = "last.ckpt"
    resumed.configure_model()
    with pytest.raises(FileNotFoundError, match="gone is no folder and cannot be fetched"):
        model(init_from=str(tmp_path / "gone")).configure_model()
    (tmp_path / "config.json").write_text(json.dumps({"format": 99, "class": "MoST"}))
    with pytest.raises(ValueError, match="format 99"):
        MoST.from_pretrained(tmp_path)


def test_test_scores(fitted, folder):
    module, _, path = fitted
    module.judge = lambda speech: ["one"] * len(speech)
    (scores,) = trainer(path).test(module, data(folder), verbose=False)
    module.judge = None
    for name in (
        "wer",
        "cer",
        "text_perplexity",
        "unit_error",
        "tts_stopped",
        "unit_likelihood_accuracy",
        "tts_wer_own_judge",
        "tts_wer",
    ):
        assert f"test/{name}" in scores
    assert 0 <= scores["test/unit_likelihood_accuracy"] <= 1
    assert scores["test/text_perplexity"] == pytest.approx(torch.tensor(scores["test/text_loss"]).exp().item())


def test_predict_writes_transcripts_and_recordings(fitted, folder, tmp_path):
    module, _, path = fitted
    callbacks = [SpeechSamples(), PredictionWriter()]
    trainer(tmp_path, callbacks=callbacks).predict(module, data(folder, predict_source=str(path / "samples")))
    rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert rows[0] == "name,text"
    assert [row.split(",")[0].split("/")[-1] for row in rows[1:]] == ["0.wav", "1.wav"]
    (tmp_path / "lines.txt").write_text("one\ntwo three\n")
    trainer(tmp_path, callbacks=callbacks).predict(module, data(folder, predict_source=str(tmp_path / "lines.txt")))
    rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert rows[0] == "text,file"
    assert all(soundfile.info(row.split(",")[1]).samplerate == 16_000 for row in rows[1:])


def test_resume_in_the_middle_of_an_epoch_is_bit_for_bit(folder, tmp_path):
    def fit(path, steps, resume=None):
        seed_everything(0)
        checkpoint = ModelCheckpoint(path, save_last=True, every_n_train_steps=1)
        run = trainer(
            path, max_epochs=-1, max_steps=steps, callbacks=[checkpoint], limit_val_batches=0, limit_train_batches=1.0
        )
        module = model(
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3),
            warmup_steps=10**6,
            vocoder_adversarial=0.02,
            discriminator_width=4,
        )
        run.fit(module, data(folder), ckpt_path=resume)
        assert torch.isfinite(run.callback_metrics["train/discriminators"])
        return module

    whole = fit(tmp_path / "a", 5)
    fit(tmp_path / "b", 2)
    resumed = fit(tmp_path / "b", 5, tmp_path / "b" / "last.ckpt")
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("task", ["asr", "tts", "interleaved"])
def test_what_is_heard_is_augmented_and_what_is_spoken_is_clean(folder, monkeypatch, task):
    module = model(tasks={task: 1.0})
    module.configure_model()
    module.units.centroids.normal_()
    speech = data(folder, augmentation=Augmentation(speed=0.2, noise=(5.0, 5.0), shift=640))
    speech.prepare_data()
    speech.setup()
    batch = next(iter(speech.train_dataloader()))
    rows = [speech.split("train").rows[i] for i in batch.index]
    given = {}
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    for name in ("prompts", "_losses", "_vocoder_loss"):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, own=own, name=name: given.update({name: args}) or own(*args))
    module.training_step(batch, 0)

    (examples,), (_, packed), (audio, clean, _) = given["prompts"], given["_losses"], given["_vocoder_loss"]
    heard, count = module.encode(batch.audio, batch.length)
    wanted = torch.cat([frames[:n] for frames, n in zip(heard, count, strict=True)])
    assert torch.equal(packed, wanted if task == "asr" else wanted[:0])
    for i, row in enumerate(rows):
        file = torch.from_numpy(read_audio(row.audio, 16_000, row.start, row.duration))
        n = len(file)
        assert batch.clean_length[i] == n != batch.length[i]
        assert torch.equal(audio[i, :n], file) and not audio[i, n:].any(), "what the vocoder learns to make"
        (frames,), (own,) = module.encode(file[None], torch.tensor([n]))
        torch.testing.assert_close(clean.frames[i, :own], frames, atol=1e-4, rtol=1e-4)
        assert examples[i].units.tolist() == module.units(clean.frames[i, :own]).tolist()
        shared = min(own, count[i])
        assert not torch.allclose(heard[i, :shared], frames[:shared], atol=0.1)


def test_without_augmentation_nothing_is_encoded_twice(folder, monkeypatch):
    module = model()
    module.configure_model()
    speech = data(folder)
    speech.prepare_data()
    speech.setup()
    batch = next(iter(speech.train_dataloader()))
    assert batch.clean_audio is None and batch.clean_length is None
    calls, encoder = [], module.encoder.forward
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    monkeypatch.setattr(module.encoder, "forward", lambda *args: calls.append(args) or encoder(*args))
    module.training_step(batch, 0)
    assert len(calls) == 1


def text_and_speech(folder, path, train) -> str:
    """A manifest whose training rows are given, and four spoken rows to validate and test."""
    made = speech_manifest(folder)
    rows = [json.loads(line) for line in made.read_text().splitlines()][:4]
    spoken = [
        row | {"audio": str(made.parent / row["audio"]), "split": split}
        for row, split in zip(rows, ["val", "val", "test", "test"], strict=True)
    ]
    (path / "m.jsonl").write_text("\n".join(map(json.dumps, [*train, *spoken])))
    return str(path / "m.jsonl")


def test_steps_of_written_rows_alone(folder, tmp_path):
    """No rank's batch need hold audio: every part still takes part, and written questions are answered."""
    data(folder).prepare_data()
    train = [{"text": "one two"}, {"text": "three", "answer": "four"}] * 4
    source = text_and_speech(folder, tmp_path, train)
    module = model(tasks={"asr": 0.5, "text": 0.2, "instruct": 0.3}, vocoder_adversarial=0.02, discriminator_width=4)
    module.configure_model()
    module.units.centroids.normal_()
    module.vocoder.unit_hash = module.units.hash
    seen, build = [], module.prompts.__call__
    module.prompts = lambda examples, **options: seen.extend(examples) or build(examples, **options)
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    run.fit(module, SpeechText(source, batch_size=4))
    assert run.global_step == 2
    assert run.callback_metrics["train/vocoder"] == 0
    assert sorted({(e.task, e.text, e.answer) for e in seen}) == [
        ("instruct", "three", "four"),
        ("text", "one two", ""),
    ]

    untrained = model()
    with pytest.raises(ValueError, match="no training row has audio"):
        trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(untrained, SpeechText(source, batch_size=4))


def test_rows_of_text_are_no_silence_to_the_vocoder(folder):
    module = model()
    module.configure_model()
    module.units.centroids.normal_()
    speech = data(folder)
    speech.setup()
    batch = next(iter(speech.train_dataloader()))
    frames = module.encode(batch.audio, batch.length)
    alone, _ = module._vocoder_loss(batch.audio, frames, batch.number)
    more = [torch.cat([x, torch.zeros_like(x)]) for x in (batch.audio, *frames, batch.number)]
    torch.testing.assert_close(module._vocoder_loss(more[0], Frames(*more[1:3]), more[3])[0], alone)


def test_shuffled_audio_is_transcribed_on_every_rank(folder, monkeypatch):
    """Ranks that share a model generate together: one with a single utterance must not stay away."""
    module = model().eval()
    module.configure_model()
    speech = data(folder)
    speech.setup()
    batch = next(iter(speech.val_dataloader()))
    one = batch._replace(**{k: getattr(batch, k)[:1] for k in ("audio", "length", "text", "unseen", "name")})
    calls, transcribe = [], module._transcribe
    monkeypatch.setattr(module, "_transcribe", lambda *args: calls.append(args) or transcribe(*args))
    with torch.no_grad():
        module._evaluate(one)
        module._evaluate(batch)
    assert len(calls) == 4
    assert module.scores["wer_shuffled"].total == sum(len(text.split()) for text in batch.text), "not scored for one"


def test_the_end_of_speech_is_learnt():
    """One sentence with its units: generated speech is those units and stops by itself."""
    torch.manual_seed(0)
    module = model(tasks={"tts": 1.0}, vocoder_width=0, max_response=60)
    module.configure_model()
    examples = [
        Example("tts", text, units=torch.randint(8, (n,))) for text, n in (("one two", 12), ("three", 5), ("nine", 20))
    ]
    prompt = module.prompts(examples)
    optimizer = torch.optim.AdamW(module.network.parameters(), 5e-3)
    for _ in range(100):
        loss, _ = module._losses(prompt, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    made = module.eval()._respond("tts", [e._replace(units=None) for e in examples], None)
    assert [units.tolist() for units in made.units] == [e.units.tolist() for e in examples]


def test_discriminators_take_part_without_audio():
    """Ranks whose batch is text alone still give every parameter a gradient, 0."""
    module = model(vocoder_adversarial=0.02, discriminator_width=4)
    module.configure_model()
    nothing = Frames(torch.zeros(2, 0, 320), torch.zeros(2, dtype=torch.int64))
    loss, adversarial = module._vocoder_loss(torch.zeros(2, 0), nothing, torch.zeros(2))
    (loss + sum(adversarial)).backward()
    parameters = [*module.vocoder.parameters(), *module.discriminators.parameters()]
    assert all(p.grad is not None and not p.grad.any() for p in parameters)


def test_one_batch_can_be_learnt(folder):
    """Speech recognition of one batch: the loss falls to nearly nothing, and the transcripts become right."""
    torch.manual_seed(0)
    module = model(
        tasks={"asr": 1.0}, vocoder_width=0, language_model=model().hparams.language_model | {"hidden_size": 32}
    )
    module.configure_model()
    speech = data(folder)
    speech.prepare_data()
    speech.setup()
    batch = next(iter(speech.train_dataloader()))
    optimizer = torch.optim.AdamW(module.network.parameters(), 3e-3)
    frames = module.encode(batch.audio, batch.length)
    for _ in range(80):
        examples, heard = module._examples(batch, frames, frames)
        loss, balance = module._losses(module.prompts(examples), heard)
        optimizer.zero_grad()
        (loss + 1e-3 * balance.sum()).backward()
        optimizer.step()
    assert loss < 0.1
    assert module.eval()(batch.audio, batch.length) == batch.text


@pytest.mark.parametrize("form", ["sequence", "flat", "modality"])
def test_losses_of_a_batch_do_not_depend_on_padding(folder, form):
    module = model(balance=form, vocoder_width=0).eval()
    module.configure_model()
    speech = data(folder)
    speech.setup()
    batch = next(iter(speech.train_dataloader()))
    frames = module.encode(batch.audio, batch.length)
    examples, heard = module._examples(batch, frames, frames)
    prompt = module.prompts(examples)
    more = type(prompt)(
        *(torch.nn.functional.pad(x, (0, 9), value=v) for x, v in zip(prompt, (2, -100, False), strict=True))
    )
    for a, b in zip(module._losses(prompt, heard), module._losses(more, heard), strict=True):
        torch.testing.assert_close(a, b)


def test_text_loss_of_the_base_model_uses_all_experts():
    module = model().eval()
    module.configure_model()
    texts = ["one two three", "nine"]
    inside = module.text_loss(texts)
    everything = module.text_loss(texts, all_experts=True)
    assert not torch.allclose(inside, everything)
    assert all(block.gate.groups is not None for block in moe_blocks(module))
    vanilla = model(partition=None).eval()
    vanilla.configure_model()
    vanilla.load_state_dict(module.state_dict())
    torch.testing.assert_close(vanilla.text_loss(texts), everything)


@torch.no_grad()
def test_units_are_shuffled_alike_in_any_batch(fitted, folder, monkeypatch):
    """By utterance, so that batches and ranks change no score."""
    module = MoST.load_from_checkpoint(fitted[2] / "checkpoints" / "last.ckpt").eval()
    speech = data(folder)
    speech.setup()
    batch = next(iter(speech.test_dataloader()))
    asked = []
    monkeypatch.setattr(module, "unit_likelihood", lambda units: asked.append(units) or torch.zeros(len(units)))
    turned = {name: getattr(batch, name).flip(0) for name in ("audio", "length", "index")}
    turned["text"] = batch.text[::-1]
    module._evaluate_speech(batch)
    module._evaluate_speech(batch._replace(**turned))
    (real, mixed), (_, other) = asked[:2], asked[2:]
    assert len(mixed) > 2 and any(not torch.equal(a, b) for a, b in zip(real, mixed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mixed, other[::-1], strict=True))


def test_unit_likelihood_is_the_mean_log_probability(folder):
    module = model().eval()
    module.configure_model()
    layout = module.prompts.layout
    units = [torch.tensor([1, 5, 5]), torch.tensor([7])]
    made = module.unit_likelihood(units)
    for own, value in zip(units, made, strict=True):
        ids = torch.tensor([[layout.bos, layout.begin_audio, *(own + layout.first_unit).tolist()]])
        logs = module.network(ids).log_softmax(-1)[0, 1:-1]
        torch.testing.assert_close(value, logs.gather(1, ids[0, 2:, None]).mean(), atol=1e-5, rtol=1e-5)


def test_spoken_questions(folder, tmp_path):
    """Rows with `answer` and `answer_audio` are trained on as questions, and answered in words and in speech."""
    speech = data(folder)
    speech.prepare_data()
    rows = [json.loads(line) for line in speech_manifest(folder).read_text().splitlines()][:16]
    base = speech_manifest(folder).parent
    soundfile.write(tmp_path / "answer.wav", 0.1 * torch.randn(8000).numpy(), 16_000)
    rows = [
        row | {"audio": str(base / row["audio"]), "answer": "one", "answer_audio": "answer.wav", "split": split}
        for row, split in zip(rows, ["train"] * 12 + ["val", "val", "test", "test"], strict=True)
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    module = model(tasks={"qa_text": 0.5, "qa_speech": 0.5}, deduplicate=True)
    questions = SpeechText(str(tmp_path / "m.jsonl"), batch_size=4)
    trainer(tmp_path, max_epochs=1, limit_train_batches=2).fit(module, questions)
    batch = next(iter(questions.test_dataloader()))
    texts, units = module.eval().answer(batch.audio, batch.length, spoken=True)
    assert len(texts) == len(units) == 2
    assert module.answer(batch.audio, batch.length)[1][0].numel() == 0


def speech_manifest(folder):
    return next((folder / "made_speech").glob("*/manifest.jsonl"))


def test_units_come_from_a_file_until_a_checkpoint_brings_them(fitted, tmp_path):
    trained = fitted[0].units
    trained.save(tmp_path / "units.safetensors")
    module = model(units=str(tmp_path / "units.safetensors"))
    module.configure_model()
    assert module.units.hash == module.vocoder.unit_hash == trained.hash
    module.save_pretrained(tmp_path / "saved")
    again = model(units=str(tmp_path / "units.safetensors"), init_from=str(tmp_path / "saved"))
    again.configure_model()

    other = Units(8, trained.centroids.shape[1])
    other.centroids.normal_()
    other.save(tmp_path / "units.safetensors")
    with pytest.raises(ValueError, match=f"speaks the unit set {trained.hash}, and .* is {other.hash}"):
        model(units=str(tmp_path / "units.safetensors"), init_from=str(tmp_path / "saved")).configure_model()
    (tmp_path / "units.safetensors").unlink()
    assert MoST.from_pretrained(tmp_path / "saved").units.hash == trained.hash

    Units(8, 7).save(tmp_path / "small.safetensors")
    with pytest.raises(ValueError, match="8 units of size 7; num_units is 8 and the encoder's frames have size 320"):
        model(units=str(tmp_path / "small.safetensors")).configure_model()
    with pytest.raises(ValueError, match="has 8 unit tokens and num_units is 9"):
        MoST.load_from_checkpoint(fitted[2] / "checkpoints" / "last.ckpt", num_units=9)


def test_audio_that_is_longer_than_the_context_is_named(fitted, folder, tmp_path):
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in" / "short.wav", torch.randn(4000).numpy() * 0.1, 16_000)
    for seconds, words in ((4.3, "leaves no room"), (5.0, "do not fit into the context of 120")):
        soundfile.write(tmp_path / "in" / "long.wav", torch.randn(int(seconds * 16_000)).numpy() * 0.1, 16_000)
        with pytest.raises(ValueError, match=rf"in/long\.wav: .*{words}"):
            trainer(tmp_path).predict(fitted[0], data(folder, predict_source=str(tmp_path / "in")))


def test_compiled_layers_compute_the_same(fitted, folder, tmp_path):
    scores = []
    for callbacks in ([], [Compile("eager")]):
        module = MoST.load_from_checkpoint(fitted[2] / "checkpoints" / "last.ckpt")
        run = trainer(tmp_path, callbacks=callbacks, max_epochs=1, limit_train_batches=1)
        seed_everything(0)
        run.fit(module, data(folder))
        scores.append({name: float(value) for name, value in run.callback_metrics.items()})
    layers = [layer for layer in module.modules() if isinstance(layer, MoST.block_types)]
    assert len(layers) == 2 and all(layer._compiled_call_impl is not None for layer in layers)
    assert scores[1] == pytest.approx(scores[0], rel=1e-4)


def test_weights_are_not_kept_in_bfloat16(folder, tmp_path):
    run = trainer(tmp_path, precision="bf16-true")
    with pytest.raises(ValueError, match="use bf16-mixed"):
        run.fit(model(), data(folder))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": {"sing": 1.0}}, "sing"),
        ({"tasks": {"asr": 1.0, "tts": -0.1}}, "no weight may be negative"),
        ({"tasks": {"asr": 0.0}}, "one must be above 0"),
        ({"tokenizer": None}, "tokenizer"),
        ({"max_length": 500}, "context, 256"),
        ({"partition": [0] * 7 + [1]}, "the audio group has 1 experts"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, words):
    with pytest.raises(ValueError, match=words) as error:
        model(**options).configure_model()
    assert "\n" not in str(error.value)


def test_speaking_needs_a_vocoder_of_the_same_units():
    module = model()
    module.configure_model()
    module.units.centroids.normal_()
    with pytest.raises(ValueError, match="cannot speak"):
        module.speak(["one"])
    silent = model(vocoder_width=0)
    silent.configure_model()
    with pytest.raises(ValueError, match="no vocoder"):
        silent.speak(["one"])


@pytest.mark.parametrize("family", [f for f in CONFIGS if f != "deepseek_v2"])
def test_other_families_build_and_transcribe(family):
    language_model = toy(family)
    for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        language_model.pop(key)
    module = model(language_model=language_model, partition="interleaved", vocoder_width=0).eval()
    module.configure_model()
    assert len(module(torch.randn(2, 4000), torch.tensor([4000, 2000]))) == 2


def test_a_router_that_uses_half_of_its_experts_is_no_even_one(monkeypatch):
    from types import SimpleNamespace

    module = model()
    module.configure_model()
    groups = moe_blocks(module.network)[0].gate.groups
    ours = [(groups == g).nonzero().flatten() for g in (0, 1)]
    logged = {}
    monkeypatch.setattr("callbacks.expert_load.log_figure", lambda *_: None)
    monkeypatch.setattr(MoST, "log", lambda self, name, value: logged.update({name: value}))
    trainer = SimpleNamespace(strategy=SimpleNamespace(reduce=lambda x, reduce_op: x), sanity_checking=False)
    for used, expected in ((len(ours[0]), 1.0), (len(ours[0]) // 2, 2.0)):
        module.expert_load.zero_()
        for modality, experts in enumerate(ours):
            module.expert_load[:, modality, experts[:used]] = 5
        ExpertLoad()._draw(trainer, module, "val")
        assert logged["val/expert_load_max"] == pytest.approx(expected)
