"""Clips of videos: what is in them, how they are split, and in which order they come."""

import errno
import resource

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as safetensors
from safetensors.torch import save_file

from datamodules.videos import (
    ExpertVideos,
    clip_starts,
    import_folder,
    instruction,
    read_captions,
    read_video,
    word_ids,
)
from tests.dyn_vpp.toys import DATA, video, write_folder


def data(folder, **options) -> ExpertVideos:
    module = ExpertVideos(str(write_folder(folder / "own")), data_dir=str(folder / "data"), **{**DATA, **options})
    module.prepare_data()
    module.setup()
    return module


def test_a_clip_is_every_second_frame_of_its_video(tmp_path):
    module = data(tmp_path)
    clips = module.clips("train")
    batch = next(iter(module.train_dataloader()))
    assert batch.video.shape == (4, 4, 3, 16, 16) and batch.video.dtype == torch.float32
    assert batch.video.min() >= -1 and batch.video.max() <= 1
    assert batch.action.shape == (4, 6, 0)
    for row in range(4):
        item = int(batch.index[row]) - clips.first
        episode = clips.episode[item]
        start = clips.start[item] - episode * 12
        own = read_video(tmp_path / "own" / f"{episode}.gif", 16)[start : start + 7 : 2]
        assert torch.allclose(batch.video[row], torch.from_numpy(own).permute(0, 3, 1, 2) / 127.5 - 1, atol=1e-6)
        assert batch.caption[row] == ("move down" if episode % 2 else "move right")
        assert batch.tokens[row].tolist() == word_ids(batch.caption[row], 4, 64)


@given(st.lists(st.integers(7, 40), min_size=1, max_size=6), st.integers(1, 7), st.integers(1, 5))
def test_clips_lie_inside_their_episode_and_none_is_left_out(lengths, span, every):
    start, episode = clip_starts(np.array(lengths), span, every)
    expected = [(s, i) for i, n in enumerate(lengths) for s in range(0, n - span + 1, every)]
    assert list(zip(start.tolist(), episode.tolist(), strict=True)) == expected


def test_evaluation_clips_can_be_fewer(tmp_path):
    write_folder(tmp_path / "own")
    both = []
    for every in (None, 4):
        data = ExpertVideos(str(tmp_path / "own"), data_dir=str(tmp_path / "data"), **DATA, eval_every=every)
        data.prepare_data()
        data.setup()
        both.append({split: len(data.clips(split)) for split in ("train", "val", "test")})
    assert both[0]["train"] == both[1]["train"]
    # 12 frames, clips of 7: starts 0, 2, 4 or 0, 4
    assert (both[0]["val"], both[1]["val"], both[1]["test"]) == (3, 2, 2)


def test_splits_share_no_video_and_no_number(tmp_path):
    module = data(tmp_path)
    episodes = [set(module.clips(split).episode.tolist()) for split in ("train", "val", "test")]
    assert set.union(*episodes) == set(range(8)) and sum(map(len, episodes)) == 8
    numbers = [i for split in ("train", "val", "test") for i in range(len(module.clips(split)))]
    firsts = [module.clips(split).first for split in ("train", "val", "test")]
    assert firsts == [0, len(module.clips("train")), len(numbers) - len(module.clips("test"))]


def test_order_is_a_function_of_the_seed_and_resumes(tmp_path):
    orders = [
        [batch.index.tolist() for batch in data(tmp_path / name, seed=seed).train_dataloader()]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert orders[0] == orders[1] != orders[2]
    loader = data(tmp_path / "d", seed=1).train_dataloader()
    iterator = iter(loader)
    next(iterator)
    again = data(tmp_path / "e", seed=1).train_dataloader()
    again.load_state_dict(loader.state_dict())
    assert [b.index.tolist() for b in again] == orders[0][1:]


def test_decoded_once(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "own")
    first = import_folder(folder, 16, tmp_path / "cache")
    monkeypatch.setattr("datamodules.videos.read_video", None)
    assert import_folder(folder, 16, tmp_path / "cache") == first
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.name]


def write_latents(folder, number=0, shape=(12, 4, 8, 8), mark="a", **kind):
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(**kind)
    save_file({"latents": latents}, folder / f"{number}.safetensors", {"autoencoder": mark} if mark else None)
    return latents.float()


def write_table(folder, names):
    (folder / "captions.csv").write_text("file,caption\n" + "".join(f"{name},move\n" for name in names))


@pytest.mark.parametrize("mark", ["a", ""])
def test_latents_may_come_instead_of_videos(tmp_path, mark):
    folder = tmp_path / "own"
    folder.mkdir()
    own = [write_latents(folder, i, mark=mark, dtype=torch.float16) for i in range(6)]
    write_table(folder, [f"{i}.safetensors" for i in range(6)])
    module = ExpertVideos(str(folder), data_dir=str(tmp_path / "data"), **DATA)
    module.prepare_data()
    module.setup()
    assert module.autoencoder == mark
    batch = next(iter(module.train_dataloader()))
    assert batch.video.shape == (4, 4, 3, 0, 0)
    clips = module.clips("train")
    for row in range(4):
        item = int(batch.index[row]) - clips.first
        episode = int(clips.episode[item])
        start = clips.start[item] - episode * 12
        assert torch.equal(batch.latents[row], own[episode][start : start + 7 : 2])


def test_latents_that_cannot_be_used_are_named(tmp_path):
    write_latents(tmp_path, 0)
    others = [
        ({"shape": (3, 8, 8)}, r"1\.safetensors holds no finite latents \[t c h w\]: its shape is \[3, 8, 8\]"),
        ({"shape": (3, 4, 4, 4)}, r"0\.safetensors and .*1\.safetensors are latents of unlike sizes"),
        ({"mark": "b"}, r"0\.safetensors and .*1\.safetensors are latents of two autoencoders"),
    ]
    for options, message in others:
        write_latents(tmp_path, 1, **options)
        write_table(tmp_path, ["0.safetensors", "1.safetensors"])
        with pytest.raises(ValueError, match=message):
            import_folder(tmp_path, 16, tmp_path / "cache")
    for name, content in (("1.safetensors", b"nothing"), ("2.safetensors", safetensors({"other": torch.ones(1)}))):
        (tmp_path / name).write_bytes(content)
        write_table(tmp_path, ["0.safetensors", name])
        with pytest.raises(ValueError, match=f"{name} cannot be read as latents"):
            import_folder(tmp_path, 16, tmp_path / "cache")
    write_folder(tmp_path, videos=1)
    write_table(tmp_path, ["0.safetensors", "0.gif"])
    with pytest.raises(ValueError, match="a folder holds either videos or latents"):
        import_folder(tmp_path, 16, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_mp4_is_read(tmp_path):
    pytest.importorskip("av")
    imageio.imwrite(tmp_path / "a.mp4", video(0, size=32), fps=10, codec="mpeg4", plugin="pyav")
    frames = read_video(tmp_path / "a.mp4", 32)
    assert frames.shape == (12, 32, 32, 3)
    assert np.abs(frames.astype(int) - video(0, size=32)).mean() < 10
    (tmp_path / "b.mp4").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"b\.mp4 cannot be read"):
        read_video(tmp_path / "b.mp4", 32)


def test_without_its_library_mp4_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.videos.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"reading .*a\.mp4 needs PyAV: pip install av"):
        read_video(tmp_path / "a.mp4", 16)


def test_bad_files_are_named(tmp_path):
    folder = write_folder(tmp_path / "own")
    (folder / "1.gif").write_bytes(b"nothing")
    (folder / "2.gif").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"1\.gif cannot be read.*2\.gif cannot be read"):
        import_folder(folder, 16, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    (folder / "2.gif").unlink()
    with pytest.raises(ValueError, match=r"2\.gif \(does not exist\)"):
        import_folder(folder, 16, tmp_path / "cache")
    (folder / "captions.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"captions\.csv"):
        import_folder(folder, 16, tmp_path / "cache")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("file,caption\n0.gif,gauche à droite\n".encode("latin-1"), "not text in UTF-8"),
        (b"video,words\n0.gif,left\n", "needs the columns file and caption, it has video, words"),
        (b"file,caption\n0.gif\n", "line 2: 1 cells"),
        (b"file,caption\n", "has no rows"),
        (b"file,caption\n0.gif, \n", r"0\.gif \(has no caption\)"),
        (b"file,caption\n,left\n", "a row without a file"),
    ],
)
def test_captions_that_cannot_be_used(table, message, tmp_path):
    (tmp_path / "0.gif").touch()
    (tmp_path / "captions.csv").write_bytes(table)
    with pytest.raises(ValueError, match=message) as error:
        read_captions(tmp_path)
    assert "captions.csv" in str(error.value)


def test_videos_that_do_not_fit_on_the_disk_leave_nothing(tmp_path):
    folder = write_folder(tmp_path / "own")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError) as error:
            import_folder(folder, 64, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG, "so that it can be told from other troubles"
    assert not list((tmp_path / "cache").iterdir())


def test_frames_are_stored_as_numpy_stores_them(tmp_path):
    folder = write_folder(tmp_path / "own", videos=2)
    stored = import_folder(folder, 16, tmp_path / "cache")
    expected = np.concatenate([read_video(folder / f"{i}.gif", 16) for i in range(2)])
    for mode in (None, "r"):
        np.testing.assert_array_equal(np.load(stored / "frames.npy", mmap_mode=mode), expected)


def test_shades_of_grey(tmp_path):
    imageio.imwrite(tmp_path / "grey.gif", video(0)[..., 0], loop=0)
    frames = read_video(tmp_path / "grey.gif", 20)
    assert frames.shape == (12, 20, 20, 3)
    assert np.ptp(frames.astype(int), axis=-1).max() <= 1


def test_videos_shorter_than_a_clip_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"span.*0\.gif \(12\).*lower frames or stride"):
        data(tmp_path, stride=4)


def test_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a folder"):
        ExpertVideos("nowhere")
    with pytest.raises(ValueError, match="frames 1 must be at least 2"):
        ExpertVideos(str(tmp_path), frames=1)
    with pytest.raises(ValueError, match="2 videos cannot be split"):
        write_folder(tmp_path / "own", videos=2)
        ExpertVideos(str(tmp_path / "own"), **DATA).setup()


def test_words():
    assert instruction("button-press-topdown-v3") == "button press topdown"
    assert word_ids("Move  down!", 3, 64) == [*word_ids("move down", 2, 64), 0]
    assert 0 not in word_ids("a b c d e f g h", 8, 2)


def test_metaworld_experts(tmp_path):
    pytest.importorskip("metaworld")
    module = ExpertVideos(
        tasks=["button-press-topdown-v3"], episodes=1, test_episodes=1, size=16, data_dir=str(tmp_path), processes=1,
        batch_size=2, max_steps=120, every=16,
    )  # fmt: skip
    module.prepare_data()
    module.setup()
    batch = next(iter(module.train_dataloader()))
    assert batch.video.shape == (2, 8, 3, 16, 16)
    assert batch.action.shape == (2, 28, 4) and batch.action.abs().max() <= 1
    assert batch.caption == ["button press topdown"] * 2
    assert (batch.video[:, 1:] - batch.video[:, :-1]).abs().max() > 0.1  # something moves
    layouts = [np.load(module._collect(module.tasks[0], split))["layout"] for split in ("train", "val", "test")]
    assert len(np.unique(np.concatenate(layouts), axis=0)) == 3
