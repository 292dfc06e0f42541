import errno
import json
import resource
import time
import zlib
from dataclasses import asdict

import numpy as np
import pytest
import soundfile
import torch
from lightning.pytorch import Trainer

from datamodules.espeak import speak, speak_in_new_process
from datamodules.speech import (
    Augmentation,
    Joining,
    LengthBuckets,
    MadeSpeech,
    Row,
    SpeechText,
    check_files,
    make_speech,
    read_audio,
    read_folder,
    read_manifest,
)

RECIPE = MadeSpeech(utterances=60, voices=["en-us+f1", "en-us+m3"], unseen_utterances=12, unseen_voices=["en-us+m7"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    make_speech(RECIPE, folder, 16_000)
    return folder


def tone(path, seconds=1.0, rate=16_000, channels=1):
    wave = 0.3 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    soundfile.write(path, np.stack([wave] * channels, 1), rate)
    return str(path)


def data(corpus, **options) -> SpeechText:
    module = SpeechText(made=RECIPE, data_dir=str(corpus), batch_size=8, **options)
    module.prepare_data()
    module.setup()
    return module


def test_made_speech_is_made_once_and_is_the_same_for_the_same_recipe(corpus, tmp_path):
    first = make_speech(RECIPE, corpus, 16_000)
    stamp = first.stat().st_mtime_ns
    assert make_speech(RECIPE, corpus, 16_000).stat().st_mtime_ns == stamp
    again = make_speech(RECIPE, tmp_path, 16_000)
    assert again.read_text() == first.read_text()
    assert [p.name for p in first.parent.parent.iterdir()] == [first.parent.name], "no temporary folder is left"
    rows = read_manifest(first)
    assert len(rows) == 72
    assert {len(row.text.split()) for row in rows} == {1, 2, 3, 4}
    for row in rows[:3]:
        audio = read_audio(row.audio, 16_000, row.start, row.duration)
        assert len(audio) == round(row.duration * 16_000), "the audio is as long as the manifest says"
        assert np.abs(audio).max() > 0.05


def test_every_voice_sounds_the_same_at_another_time_of_day():
    voices = [f"en-us+{kind}{i}" for kind, count in (("f", 5), ("m", 8)) for i in range(1, count + 1)]
    requests = [("one two", voice, 160, 50) for voice in voices]
    _, first = speak_in_new_process(requests)
    time.sleep(1.1)  # espeak-ng's own seed is the second
    _, second = speak_in_new_process(requests)
    for voice, a, b in zip(voices, first, second, strict=True):
        assert np.array_equal(a, b), voice


def test_no_sentence_and_no_held_out_speaker_is_in_two_splits(corpus):
    module = data(corpus)
    rows = {name: module.split(name).rows for name in ("train", "val", "test")}
    texts = {name: {row.text for row in part} for name, part in rows.items()}
    assert not texts["train"] & (texts["val"] | texts["test"])
    assert not texts["val"] & texts["test"]
    assert "en-us+m7" not in {row.speaker for row in rows["train"]}
    assert "en-us+m7" in {row.speaker for row in rows["val"] + rows["test"]}
    share = [zlib.crc32(t.encode()) / 2**32 for t in texts["train"] if " " in t]
    assert min(share) >= 0.2
    assert all(" " in text for text in texts["val"] | texts["test"]), "a single word would outweigh all sentences"


def test_batches_are_documented_shapes(corpus):
    batch = next(iter(data(corpus).train_dataloader()))
    assert batch.audio.shape == (8, int(batch.length.max()))
    assert batch.audio.dtype == torch.float32
    for row, n in zip(batch.audio, batch.length, strict=True):
        assert (row[n:] == 0).all()
    assert ((batch.number >= 0) & (batch.number < 1)).all()
    assert batch.answer_audio.shape == (8, 0)
    assert not batch.unseen.any()


def test_order_and_augmentation_depend_on_seed_and_epoch_only(corpus):
    def epoch(number, **options):
        loader = data(corpus, augmentation=Augmentation(), **options).train_dataloader()
        loader.sampler.set_epoch(number)
        return list(loader)

    plain, workers, later = epoch(0), epoch(0, num_workers=2), epoch(1)
    for a, b in zip(plain, workers, strict=True):
        assert a.text == b.text
        assert torch.equal(a.audio, b.audio)
    assert [b.text for b in plain] != [b.text for b in later]
    whole = epoch(0)[0]
    ranks = [
        LengthBuckets(np.arange(48.0), 2, batch_size=8, shuffle=True, drop_last=True, seed=0, rank=r, world_size=2)
        for r in (0, 1)
    ]
    one = LengthBuckets(np.arange(48.0), 2, batch_size=8, shuffle=True, drop_last=True, seed=0)
    for a, b, both in zip(*ranks, one, strict=True):
        assert sorted([*a.items, *b.items]) == sorted(both.items)
    assert whole.audio.shape == plain[0].audio.shape


def test_buckets_hold_similar_lengths_and_resume_in_the_middle():
    seconds = np.random.default_rng(0).random(200)

    def batches(window):
        return LengthBuckets(seconds, window, batch_size=10, shuffle=True, drop_last=True, seed=1)

    spread = {w: np.mean([np.ptp(seconds[b.items]) for b in batches(w)]) for w in (1, 20)}
    assert spread[20] < 0.1 < spread[1]
    items = [b.items.tolist() for b in batches(20)]
    assert sorted(i for batch in items for i in batch) == list(range(200))
    resumed = batches(20)
    resumed.start = 7
    assert [b.items.tolist() for b in resumed] == items[7:]


def test_shares_of_an_epoch_are_as_wanted_and_each_repetition_is_its_own():
    seconds = np.random.default_rng(0).random(90)
    weights = np.repeat([0.5 * 90 / 60, 0.5 * 90 / 30], [60, 30])  # half of an epoch from each of two sources

    def epoch(number):
        order = LengthBuckets(seconds, 3, weights, batch_size=9, shuffle=True, drop_last=True, seed=3)
        order.set_epoch(number)
        return np.concatenate([draw.items for draw in order])

    for number in range(20):
        items = epoch(number)
        counts = np.bincount(items % 90, minlength=90)
        assert len(items) == len(set(items)) == 90, "repetitions have numbers of their own"
        assert set(counts[:60]) <= {0, 1} and set(counts[60:]) <= {1, 2}
        assert abs(counts[:60].sum() - 45) <= 1
    assert np.array_equal(epoch(4), epoch(4))
    assert not np.array_equal(np.sort(epoch(4)), np.sort(epoch(5)))
    seen = np.bincount(np.concatenate([epoch(number) % 90 for number in range(20)]), minlength=90)
    assert (seen > 0).all(), "what is left out changes from epoch to epoch"


def test_shares_of_sources(takes, corpus, tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(7)))
    options = {"more": [str(tmp_path / "text.jsonl")], "batch_size": 4}
    module = SpeechText(str(takes / "m.jsonl"), shares=[0.25, 0.75], augmentation=Augmentation(), **options)
    module.setup()
    batches = list(module.train_dataloader())
    lines = [name == "" for batch in batches for name in batch.name]
    assert np.mean(lines) == pytest.approx(0.75, abs=0.03)
    numbers = {}
    for batch in batches:
        for index, number in zip(batch.index.tolist(), batch.number.tolist(), strict=True):
            numbers.setdefault(index, []).append(number)
    repeated = max(numbers.values(), key=len)
    assert len(repeated) > 5 and len(set(repeated)) == len(repeated), "a repeated row chooses anew"
    with pytest.raises(ValueError, match="one number >= 0 for source and each of more"):
        SpeechText(str(takes / "m.jsonl"), shares=[1.0], **options)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "b", "speaker": "b"}))
    with pytest.raises(ValueError, match=r"shares has 0.75 for .*text.jsonl, which has no training rows"):
        SpeechText(str(takes / "m.jsonl"), shares=[0.25, 0.75], unseen_speakers=["b"], **options).setup()


def test_prediction_needs_no_training_data(tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.speech.make_speech", None)  # espeak-ng is not there
    (tmp_path / "lines.TXT").write_text("one\n")
    for source in ("made", "moved/away.jsonl"):
        module = SpeechText(source, predict_source=str(tmp_path / "lines.TXT"))
        module.trainer = Trainer(accelerator="cpu", logger=False)
        module.trainer.predicting = True
        module.prepare_data()
        module.setup("predict")
        assert next(iter(module.predict_dataloader())).text == ["one"]
        with pytest.raises((FileNotFoundError, TypeError)):
            module.setup("fit")


def test_rows_that_teach_nothing_are_refused(tmp_path):
    tone(tmp_path / "a.wav")
    rows = [
        {"audio": "a.wav", "text": text, "answer": answer} for text, answer in (("one", ""), (" ", "yes"), ("", ""))
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": "  "}])))
    with pytest.raises(ValueError, match=r"2 rows have neither .*a\.wav, one without audio$"):
        SpeechText(str(tmp_path / "m.jsonl")).setup()


def test_it_says_what_it_has(corpus):
    module = SpeechText(made=RECIPE, data_dir=str(corpus))
    module.setup()
    batches = [(name, len(getattr(module, f"{name}_dataloader")())) for name in ("train", "val", "test")]
    assert str(module) == "SpeechText, batches: " + ", ".join(f"{count} {name}" for name, count in batches)


def test_speakers_that_are_numbers_are_held_out_too(tmp_path):
    tone(tmp_path / "a.wav")
    rows = [{"audio": "a.wav", "text": f"t{i}", "speaker": i % 2, "split": "train"} for i in range(20)]
    rows += [rows[0] | {"split": "val"}, rows[0] | {"split": "test"}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for unseen in (["1"], [1]):
        module = SpeechText(str(tmp_path / "m.jsonl"), unseen_speakers=unseen)
        assert {row.speaker for row in module.split("train").rows} == {"0"}


@pytest.mark.parametrize("name", ["val", "valid", "dev", "validation"])
def test_other_names_of_the_validation_split(tmp_path, name):
    (tmp_path / "m.jsonl").write_text(json.dumps({"text": "a", "split": name}))
    assert read_manifest(tmp_path / "m.jsonl")[0].split == "val"


def test_augmentation_keeps_what_it_is_told_to():
    audio = np.sin(np.arange(8000) / 10).astype(np.float32) * 0.3
    rng = np.random.default_rng(0)
    nothing = Augmentation(speed=0, gain=0, noise=None, shift=0)(audio, np.array([0.1, 0.9, 0.5, 0.7]), rng)
    np.testing.assert_allclose(nothing, audio[:-1], atol=1e-6)
    noisy = Augmentation(speed=0, gain=0, noise=(20, 20), shift=0)(audio, np.zeros(4), rng) - audio[:-1]
    assert 10 * np.log10(np.mean(audio**2) / np.mean(noisy**2)) == pytest.approx(20, abs=0.3)
    shifted = Augmentation(speed=0, gain=0, noise=None, shift=640)(audio, np.array([0, 0.5, 0, 0.5]), rng)
    assert (shifted[:320] == 0).all()


def test_manifest_with_start_duration_stereo_and_another_rate(tmp_path):
    tone(tmp_path / "a.wav", 2.0, rate=8_000, channels=2)
    rows = [
        {"audio": "a.wav", "text": "one", "start": 0.5, "duration": 1.25, "split": s, "mood": "x"}
        for s in ("train", "val", "test")
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    module = SpeechText(str(tmp_path / "m.jsonl"), batch_size=1)
    module.setup()
    batch = next(iter(module.test_dataloader()))
    assert batch.length.item() == 20_000
    spectrum = torch.fft.rfft(batch.audio[0]).abs()
    assert spectrum.argmax().item() * 16_000 / 20_000 == pytest.approx(440, abs=1)


def test_folder_with_metadata(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / split).mkdir()
        tone(tmp_path / split / "a.wav", 0.5)
        (tmp_path / split / "metadata.csv").write_text("file_name,transcription\na.wav,one two\n")
    module = SpeechText(str(tmp_path), batch_size=1)
    module.setup()
    assert next(iter(module.val_dataloader())).text == ["one two"]
    with pytest.raises(FileNotFoundError, match="metadata"):
        SpeechText(str(tmp_path / "train" / ".."), more=[str(tmp_path / "train")]).setup() or SpeechText(
            str(_empty(tmp_path))
        ).setup()


def _empty(tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_every_bad_file_is_named_in_one_line(tmp_path):
    (tmp_path / "noise.wav").write_bytes(b"this is no audio")
    (tmp_path / "empty.wav").write_bytes(b"")
    soundfile.write(tmp_path / "silent.wav", np.zeros(0), 16_000)
    good = tone(tmp_path / "good.wav")
    rows = [
        Row(str(tmp_path / "noise.wav")),
        Row(str(tmp_path / "empty.wav")),
        Row(str(tmp_path / "silent.wav")),
        Row(str(tmp_path / "absent.wav")),
        Row(good, sample_rate=8_000),
    ]
    with pytest.raises(ValueError, match="5 audio files cannot be used") as error:
        check_files(rows)
    message = str(error.value)
    assert "\n" not in message
    for name in ("noise.wav", "empty.wav", "silent.wav: it has no samples", "absent.wav: there is no such file"):
        assert name in message
    assert "good.wav: declared at 8000 Hz, it has 16000 Hz" in message
    with pytest.raises(ValueError, match=r"good\.wav: 0\.5 to 2\.5 s is not inside its 1\.000 s"):
        check_files([Row(good, start=0.5, duration=2.0)])
    assert check_files([Row(good, start=0.25, duration=0.5), Row(text="words")]) == [0.5, 0.0]


def test_long_audio_is_refused_not_cut(tmp_path):
    tone(tmp_path / "a.wav", 3.0)
    rows = [{"audio": "a.wav", "text": "one", "split": s} for s in ("train", "val", "test")]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"longer than max_seconds 2.*a\.wav \(3\.0 s\)"):
        SpeechText(str(tmp_path / "m.jsonl"), max_seconds=2).setup()


def test_bad_manifest_lines_are_numbered(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"text": "a"}\nnot json\n{"speaker": "x"}\n[1]\n')
    with pytest.raises(ValueError, match="line 2: .*; line 3: neither audio nor text; line 4: "):
        read_manifest(tmp_path / "m.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 7}', "line 1: text is 7, needed is a string"),
        ('{"audio": "a.wav", "start": "0.5"}', 'line 1: start is "0.5", needed is a number >= 0'),
        ('{"audio": "a.wav", "start": true}', "start is true"),
        ('{"audio": "a.wav", "start": -1}', "start is -1"),
        ('{"audio": "a.wav", "duration": 0}', "duration is 0, needed is a number > 0"),
        ('{"audio": "a.wav", "duration": NaN}', "duration is NaN"),
        ('{"audio": "a.wav", "sample_rate": 8000.5}', "needed is a whole number > 0"),
        ('{"text": "a", "speaker": ["b"]}', "speaker is"),
        ('{"text": "a", "split": "trian"}', "split is 'trian', needed is one of train, val"),
        ('["a.wav", "one"]', "line 1: it is no JSON object"),
        ('"one"', "line 1: it is no JSON object"),
        ('{"text": null}', "neither audio nor text"),
        ("{", "line 1: "),
        ("", "has no rows"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
    ],
)
def test_a_manifest_line_that_cannot_be_used(line, message, tmp_path):
    """The same in a manifest and in metadata, which also needs the name of the file."""
    for name, read in (("m.jsonl", read_manifest), ("metadata.jsonl", lambda path: read_folder(path.parent))):
        raw = line if isinstance(line, bytes) else line.replace('"audio"', '"audio"').encode()
        if name == "metadata.jsonl":
            raw = raw.replace(b'"audio": "a.wav"', b'"file_name": "a.wav"').replace(
                b'{"text"', b'{"file_name": "", "text"'
            )
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(ValueError) as error:
            read(tmp_path / name)
        assert name in str(error.value)
        if name == "m.jsonl":
            assert message in str(error.value)


def test_metadata_may_have_any_column_of_a_manifest(tmp_path):
    text = "file_name,text,start,duration,sample_rate,split,answer\na.wav,one,0.5,1,8000,validation,two\n"
    (tmp_path / "metadata.csv").write_text(text)
    row = Row(str(tmp_path / "a.wav"), "one", 0.5, 1.0, split="val", answer="two", sample_rate=8000)
    assert read_folder(tmp_path) == [row]
    for changed, message in (
        (text.replace("file_name", "name"), "row 1: no file_name but name, text"),
        (text.replace("0.5", "early"), 'row 1: start is "early"'),
        (text.replace(",two", ""), "line 2: 6 cells, the header has 7"),
    ):
        (tmp_path / "metadata.csv").write_text(changed)
        with pytest.raises(ValueError, match=message) as error:
            read_folder(tmp_path)
        assert "metadata.csv" in str(error.value)


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"text": "a\u2028b"}\n', encoding="utf-8")
    assert [row.text for row in read_manifest(tmp_path / "m.jsonl")] == ["a\u2028b"]


def test_speech_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError) as error:
            make_speech(MadeSpeech(utterances=6, unseen_utterances=2, unseen_voices=["en-us+m7"]), tmp_path, 16_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG
    assert not list((tmp_path / "made_speech").iterdir())


def test_what_to_predict(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    tone(folder / "b.wav", 0.5)
    tone(folder / "a.flac", 0.25)
    (tmp_path / "lines.txt").write_text("one\n\ntwo three\n")
    module = SpeechText(predict_source=str(folder))
    module.setup("predict")
    assert [p.split("/")[-1] for p in next(iter(module.predict_dataloader())).name] == ["a.flac", "b.wav"]
    module = SpeechText(predict_source=str(tmp_path / "lines.txt"))
    batch = next(iter(module.predict_dataloader()))
    assert batch.text == ["one", "two three"]
    assert batch.audio.shape == (2, 0)
    with pytest.raises(FileNotFoundError, match="neither a folder"):
        SpeechText(predict_source=str(tmp_path / "nothing")).predict_dataloader()
    with pytest.raises(ValueError, match="no audio files"):
        SpeechText(predict_source=str(_empty(tmp_path))).predict_dataloader()


def test_options_are_checked():
    with pytest.raises(FileNotFoundError, match="'nowhere' is neither"):
        SpeechText("nowhere")
    with pytest.raises(ValueError, match="leave nothing"):
        SpeechText(val_fraction=0.5, test_fraction=0.5)
    with pytest.raises(ValueError, match="no voice 'xx-klingon'"):
        speak([("one", "xx-klingon", 175, 50)])
    assert asdict(MadeSpeech())["vocabulary"][0] == "zero"


@pytest.fixture(scope="module")
def takes(tmp_path_factory):
    """Takes of single words: every file has its own length, so that audio tells which takes it is made of."""
    folder, lines = tmp_path_factory.mktemp("takes"), []
    for i in range(120):
        name, speaker = f"{i}.wav", "abc"[i % 3]
        tone(folder / name, (800 + i) / 8000, rate=8_000)
        split = "test" if i % 5 == 0 else "train"
        lines.append({"audio": name, "text": ["one", "two"][i % 2], "speaker": speaker, "split": split})
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_takes_are_joined_inside_their_split_and_speaker(takes):
    joining = Joining(words=(1, 3), train=60, val=12, test=30)
    module = SpeechText(str(takes / "m.jsonl"), join=joining, unseen_speakers=["c"], batch_size=6, val_fraction=0.2)
    module.setup()
    used = {}
    for name in ("train", "val", "test"):
        rows = module.split(name).rows
        assert len(rows) == getattr(joining, name)
        assert {len(row.takes) for row in rows} <= {1, 2, 3}
        used[name] = {take.audio for row in rows for take in row.takes}
        for row in rows:
            assert {take.speaker for take in row.takes} == {row.speaker}
            assert row.text == " ".join(take.text for take in row.takes)
    assert not used["train"] & (used["val"] | used["test"])
    assert not used["val"] & used["test"]
    assert {int(path.split("/")[-1][:-4]) % 5 for path in used["test"]} == {0}, "the official test takes, no others"
    assert {row.speaker for row in module.split("train").rows} == {"a", "b"}
    assert {row.speaker for row in module.split("test").rows} == {"a", "b", "c"}
    batch = next(iter(module.test_dataloader()))
    assert batch.unseen.tolist() == [speaker == "c" for speaker in batch.speaker]
    for row, samples, length in zip(module.split("test").rows, batch.audio, batch.length, strict=False):
        pieces = [read_audio(take.audio, 16_000) for take in row.takes]
        np.testing.assert_array_equal(samples[:length], np.concatenate(pieces))


def test_joined_utterances_are_the_same_for_every_seed_and_epoch(takes):
    options = {"join": Joining(train=40, val=8, test=8), "batch_size": 4}
    a, b = (SpeechText(str(takes / "m.jsonl"), seed=seed, **options) for seed in (0, 1))
    for name in ("train", "val", "test"):
        assert a.split(name).rows == b.split(name).rows
    loader = a.train_dataloader()
    loader.sampler.set_epoch(3)
    assert {row.text for row in a.split("train").rows} >= {text for batch in loader for text in batch.text}


def test_further_sources_are_only_trained_on(takes, corpus):
    options = {"made": RECIPE, "data_dir": str(corpus), "more": ["made"], "join": Joining(train=10, val=4, test=4)}
    module = SpeechText(str(takes / "m.jsonl"), batch_size=4, **options)
    assert {row.speaker for row in module.split("val").rows + module.split("test").rows} <= {"a", "b", "c"}
    rows = module.split("train").rows
    made = [row for row in rows if row.speaker.startswith("en-us")]
    assert made
    assert not any(row.takes for row in made), "only recordings are joined"
    assert "en-us+m7" not in {row.speaker for row in made}
    assert len(rows) == len(made) + 10
