import json

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import RobotDemonstrations
from datamodules.order import Draw
from datamodules.recordings import Keys, Recordings, read
from datamodules.robots import WindowSet, window_starts


def episodes(n: int = 8, d: int = 3, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(t, 5)).astype("f"), rng.normal(size=(t, d)).astype("f")) for t in range(14, 14 + n)]


def write_hdf5(path, data, **more):
    with h5py.File(path, "w") as file:
        for i, (state, action) in enumerate(data):
            file[f"data/demo_{i}/obs/state"], file[f"data/demo_{i}/actions"] = state, action
            for name, values in more.items():
                file[f"data/demo_{i}/obs/{name}"] = values[: len(action)]
    return path


def write_zarr(path, data):
    root = zarr.open_group(str(path), mode="w", zarr_format=2)
    for name, i in (("state", 0), ("action", 1)):
        root.create_array(f"data/{name}", data=np.concatenate([e[i] for e in data]))
    root.create_array("meta/episode_ends", data=np.cumsum([len(e[1]) for e in data]))
    return path


def write_lerobot(path, data):
    (path / "meta").mkdir(parents=True)
    (path / "meta" / "info.json").write_text(json.dumps({"features": {"observation.front": {"dtype": "video"}}}))
    for i, (state, action) in enumerate(data):
        folder = path / "data" / f"chunk-{i % 2:03}"
        folder.mkdir(parents=True, exist_ok=True)
        frames = np.arange(len(action))
        table = {"observation.state": list(state), "action": list(action)}
        table |= {"episode_index": np.full(len(action), i), "frame_index": frames}
        pq.write_table(pa.table(table), folder / f"episode_{i:06}.parquet")
    return path


WRITERS = {"d.hdf5": write_hdf5, "d.zarr": write_zarr, "lerobot": write_lerobot}


@pytest.mark.parametrize("name", WRITERS)
def test_all_formats_read_the_same(name, tmp_path):
    data = episodes(11)  # demo_10 must come after demo_9
    found = read(WRITERS[name](tmp_path / name, data), Keys())
    assert found.length.tolist() == [len(a) for _, a in data]
    np.testing.assert_array_equal(found.observation["state"], np.concatenate([s for s, _ in data]))
    np.testing.assert_array_equal(found.action, np.concatenate([a for _, a in data]))


def test_names_join_states_and_bring_pictures_to_one_layout(tmp_path):
    picture = np.random.default_rng(0).random((30, 3, 8, 6)).astype("f")
    cloud = np.zeros((30, 7, 3), "f")
    path = write_hdf5(tmp_path / "d.hdf5", episodes(2), cam=picture, cloud=cloud)
    found = read(path, Keys(state=["state", "state"], image="cam", point_cloud="cloud"))
    assert found.observation["state"].shape[1] == 10
    assert found.observation["point_cloud"].shape[1:] == (7, 3)
    assert found.observation["image"].dtype == np.uint8
    expected = (picture[:14].transpose(0, 2, 3, 1) * 255).round()
    np.testing.assert_array_equal(found.observation["image"][:14], expected)
    with pytest.raises(ValueError, match=r"no 'gripper' but actions, cam, cloud, state"):
        read(path, Keys(state=["gripper"]))


def test_names_are_paths_inside_a_demonstration(tmp_path):
    """`obs/` may be said or left out, groups may lie in groups, and actions may have another name or be a link."""
    data = episodes(3)
    path = write_hdf5(tmp_path / "d.hdf5", data)
    with h5py.File(path, "a") as file:
        for i, (state, action) in enumerate(data):
            demo = file[f"data/demo_{i}"]
            demo["obs/robot/eef"], demo["actions_abs"], demo["also"] = state[:, :2], action + 1, demo["actions"]
            demo["states"] = np.zeros((len(action), 70))
    plain = read(path, Keys())
    full = read(path, Keys(state=["obs/state", "obs/robot/eef"], action="actions_abs"))
    np.testing.assert_array_equal(full.observation["state"][:, :5], plain.observation["state"])
    np.testing.assert_array_equal(full.observation["state"][:, 5:], plain.observation["state"][:, :2])
    np.testing.assert_array_equal(full.action, np.concatenate([a for _, a in data]) + 1)
    for keys in (Keys(state=["state"]), Keys(state="obs/state"), Keys(action="also")):
        np.testing.assert_array_equal(read(path, keys).observation["state"], plain.observation["state"])
        np.testing.assert_array_equal(read(path, keys).action, plain.action)
    with pytest.raises(ValueError, match=r"demo_0 has no 'robot' but actions, actions_abs, also, robot/eef, state, st"):
        read(path, Keys(state=["robot"]))


def write_pictures(path, *pictures):
    with h5py.File(path, "w") as file:
        for i, values in enumerate(pictures):
            file[f"data/demo_{i}/obs/cam"] = values
            file[f"data/demo_{i}/actions"] = np.zeros((len(values), 2))
    return path


def test_pictures_have_one_scale_in_a_whole_file(tmp_path):
    unit = np.random.default_rng(0).random((2, 14, 4, 4, 3)).astype("f")
    expected = (unit.reshape(28, 4, 4, 3) * 255).round()
    for name, scale in (("unit", 1), ("bytes", 255)):
        path = write_pictures(tmp_path / f"{name}.hdf5", *(unit * scale))
        found = read(path, Keys(image="cam")).observation["image"]
        assert found.dtype == np.uint8
        assert np.abs(found - expected).max() == 0, name
    whole = (unit[1] * 255).astype(np.uint8)
    for other, kind in ((unit[1] * 255, "float32 in .0, 255. .demo_1"), (whole, "uint8 .demo_1")):
        path = write_pictures(tmp_path / "mixed.hdf5", unit[0], other)
        with pytest.raises(ValueError, match=rf"mixes pictures of the kinds float32 in .0, 1. .demo_0. and {kind}"):
            read(path, Keys(image="cam"))
    with pytest.raises(ValueError, match=r"image of demo_1 has values from .* to 400: pictures are uint8, or floats"):
        read(write_pictures(tmp_path / "bright.hdf5", unit[0], unit[1] * 0 + 400), Keys(image="cam"))


def test_human_door_demonstrations(tmp_path):
    """The layout of the 25 human demonstrations of Adroit's door: no two of a length, actions beyond 1, rewards."""
    rng = np.random.default_rng(0)
    states, actions = [], []
    path = tmp_path / "adroit_door.hdf5"
    with h5py.File(path, "w") as file:
        for i in range(25):
            frames = 14 + i % 7
            states.append(rng.normal(size=(frames, 39)).astype("f"))
            actions.append((3 * rng.normal(size=(frames, 28))).astype("f"))
            demo = file.create_group(f"data/demo_{i}")
            demo.attrs["num_samples"] = frames
            demo["actions"], demo["obs/state"], demo["rewards"] = actions[-1], states[-1], np.zeros(frames, "f")
    found = read(path, Keys())
    assert found.name == [f"demo_{i}" for i in range(25)]
    np.testing.assert_array_equal(found.action, np.concatenate(actions))
    np.testing.assert_array_equal(found.observation["state"], np.concatenate(states))
    data = RobotDemonstrations(str(path), batch_size=8, mask_padding=True)
    data.setup()
    assert data.shapes() == {"action": (28,), "state": (39,)}
    assert [len(data._splits[name][1]) for name in ("train", "val", "test")] == [22, 1, 2]
    batch = next(iter(data.train_dataloader()))
    assert batch.action.shape == (8, 12, 28) and batch.observation["state"].shape == (8, 2, 39)


def test_bad_recordings_are_named(tmp_path):
    data = episodes()
    data[3][0][7, 2] = np.nan
    with pytest.raises(ValueError, match="state of demo_3 is not finite in frame 7"):
        read(write_hdf5(tmp_path / "nan.hdf5", data), Keys())
    data = episodes()
    data[2] = (data[2][0], data[2][1][:, :2])
    with pytest.raises(ValueError, match="actions of demo_2 have 2 dimensions, those of demo_0 3"):
        read(write_hdf5(tmp_path / "mixed.hdf5", data), Keys())
    data = episodes()
    data[1] = (data[1][0][:-1], data[1][1])
    with pytest.raises(ValueError, match="demo_1 has 14 frames of state and 15 actions"):
        read(write_hdf5(tmp_path / "ragged.hdf5", data), Keys())
    with pytest.raises(ValueError, match="stored as video"):
        read(write_lerobot(tmp_path / "lerobot", episodes()), Keys(image="observation.front"))
    path = write_hdf5(tmp_path / "absent.hdf5", episodes(3))
    with h5py.File(path, "a") as file:
        for i, action in enumerate(episodes(3)):
            file[f"data/demo_{i}/obs/cam"] = np.zeros((len(action[1]), 4, 4, 3), np.uint8)
        del file["data/demo_1/obs/state"]
    with pytest.raises(ValueError, match="demo_1 has image, but demo_0 state, image: all need the same"):
        read(path, Keys(image="cam"))
    (tmp_path / "broken.hdf5").write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot be read as HDF5"):
        read(tmp_path / "broken.hdf5", Keys())
    (tmp_path / "some.csv").write_text("1,2")
    with pytest.raises(ValueError, match="no known format"):
        read(tmp_path / "some.csv", Keys())
    with pytest.raises(FileNotFoundError, match="do not exist"):
        read(tmp_path / "nothing.zarr", Keys())


def robomimic(path, groups):
    """A robomimic file of any content."""
    with h5py.File(path, "w") as file:
        for name, values in groups.items():
            file[name] = values
    return path


STATE, ACTION = episodes(1)[0]
DEMO = {"data/demo_0/obs/state": STATE, "data/demo_0/actions": ACTION}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"data/demo_0/obs/state": STATE}, "demo_0 has no 'actions' but state"),
        ({"data/demo_0/actions": ACTION}, "demo_0 has no 'state' but actions"),
        ({"data": ACTION}, "no group 'data'"),
        ({"data/demo_0": ACTION}, "data/demo_0 is no group"),
        ({}, "no group 'data'"),
        (DEMO | {"data/demo_0/actions": ACTION[:0]}, r"demo_0: actions has no frames, its shape is \[0, 3\]"),
        (DEMO | {"data/demo_0/actions": 3.0}, "demo_0: actions has no frames"),
        (DEMO | {"data/demo_0/actions": np.array([b"left"] * 14)}, r"demo_0: actions holds no numbers, it is \|S4"),
        ({"data/demo_0/obs/state/hand": STATE, "data/demo_0/actions": ACTION}, "no 'state' but actions, state/hand"),
    ],
)
def test_what_a_robomimic_file_lacks_is_named(groups, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        read(robomimic(tmp_path / "mine.hdf5", groups), Keys())
    assert "mine.hdf5" in str(error.value)


JOINED = {name: np.concatenate([e[i] for e in episodes(3)]) for i, name in enumerate(("state", "action"))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": np.array([14, 15])}, "episodes end at 14, 29: needed are rising numbers, the last 45"),
        ({"length": np.array([0, 14, 15, 16])}, "episodes end at 0, 14"),
        ({"length": np.array([-1, 14, 15, 17])}, "episodes end at -1, 13"),
        ({"action": JOINED["action"].astype(str)}, "action holds no numbers"),
        ({"state": JOINED["state"][:-3]}, "episode 2 has 13 frames of state and 16 actions"),
        ({name: values[:0] for name, values in JOINED.items()}, "state has no frames"),
    ],
)
def test_what_an_npz_file_lacks_is_named(changes, message, tmp_path):
    arrays = JOINED | {"length": np.array([14, 15, 16])} | changes
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path / "mine.npz", Keys())
    assert "mine.npz" in str(error.value)


def cut(path):
    """Half of a file is gone."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def test_broken_recordings_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"cut\.hdf5 cannot be read as HDF5"):
        read(cut(write_hdf5(tmp_path / "cut.hdf5", episodes())), Keys())
    path = robomimic(tmp_path / "chunk.hdf5", {"data/demo_0/obs/state": STATE})
    with h5py.File(path, "r+") as file:
        actions = file.create_dataset("data/demo_0/actions", data=ACTION, compression="gzip")
        file.flush()
        place = actions.id.get_chunk_info(0).byte_offset
    path.write_bytes(path.read_bytes()[:place] + b"\xff" * 50 + path.read_bytes()[place + 50 :])
    with pytest.raises(ValueError, match=r"chunk\.hdf5 cannot be read"):
        read(path, Keys())
    np.savez(tmp_path / "cut.npz", **JOINED, length=np.array([14, 15, 16]))
    with pytest.raises(ValueError, match=r"cut\.npz cannot be read as \.npz"):
        read(cut(tmp_path / "cut.npz"), Keys())
    (tmp_path / "broken.zarr.zip").write_bytes(b"no")
    (tmp_path / "empty.zarr").mkdir()
    for name in ("broken.zarr.zip", "empty.zarr"):
        with pytest.raises(ValueError, match=f"{name} is not laid out as diffusion-policy's"):
            read(tmp_path / name, Keys())
    path = write_zarr(tmp_path / "chunk.zarr", episodes())
    for chunk in (path / "data" / "action").glob("[0-9]*"):
        chunk.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"chunk\.zarr cannot be read"):
        read(path, Keys())


def table(change, every=True):
    """Change the table of every parquet file, or of the first."""

    def damage(path):
        for file in sorted((path / "data").rglob("*.parquet"))[: None if every else 1]:
            pq.write_table(change(pq.read_table(file)), file)

    return damage


def replaced(name, values):
    return lambda t: t.set_column(t.column_names.index(name), name, [values(t[name].to_pylist())])


def first_parquet(path):
    return path / "data" / "chunk-000" / "episode_000000.parquet"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "meta" / "info.json").write_text("{"), r"info\.json is no description"),
        (lambda p: (p / "meta" / "info.json").write_bytes(b"\xff"), r"info\.json is no description"),
        (lambda p: (p / "meta" / "info.json").write_text("[1]"), r"info\.json is no description"),
        (lambda p: cut(first_parquet(p)), r"episode_000000\.parquet cannot be read as Parquet"),
        (table(lambda t: t.slice(0, 0)), "holds no frame"),
        (table(lambda t: t.drop(["episode_index"])), r"episode_000000\.parquet has no column episode_index"),
        (table(lambda t: t.drop(["action"])), "has no 'action' but"),
        (table(lambda t: t.drop(["action"]), every=False), r"but episode_000000\.parquet has"),
        (table(replaced("action", lambda v: ["left"] * len(v))), "action holds no numbers"),
        (table(replaced("action", lambda v: [v[0][:1], *v[1:]])), "action cannot be read"),
        (table(replaced("action", lambda v: [None, *v[1:]])), "action cannot be read"),
    ],
)
def test_what_a_lerobot_folder_lacks_is_named(damage, message, tmp_path):
    path = write_lerobot(tmp_path / "mine", episodes(3))
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        read(path, Keys())
    assert str(path) in str(error.value)


def test_a_row_without_its_picture(tmp_path):
    path = write_lerobot(tmp_path / "mine", episodes(2))
    table(lambda t: t.append_column("cam", [[{"bytes": None, "path": "0.png"}] * len(t)]))(path)
    with pytest.raises(ValueError, match="mine: cam cannot be read: a row holds no picture"):
        read(path, Keys(image="cam"))


def test_windows_of_the_official_layout():
    start, episode = window_starts(np.array([200, 200]), 12, before=1, after=3)
    assert len(start) == 2 * 193
    assert start[0] == -1 and start[192] == 191
    assert episode.tolist() == [0] * 193 + [1] * 193
    action = np.arange(400, dtype=np.float32)[:, None]
    recordings = Recordings({"state": action}, action, np.array([200, 200]), ["a", "b"])
    windows = WindowSet(recordings, np.array([1]), 12, 2, after=3, mask=False)
    batch = windows.__getitems__(Draw(0, np.array([0, 192])))
    assert batch.action[0, :3, 0].tolist() == [200, 200, 201]
    assert batch.action[1, :, 0].tolist() == [*range(391, 400), 399, 399, 399]
    assert batch.observation["state"][:, :, 0].tolist() == [[200, 200], [391, 392]]
    assert batch.valid.all()


@settings(deadline=None, max_examples=30)
@given(
    length=st.lists(st.integers(6, 20), min_size=1, max_size=4),
    history=st.integers(1, 3),
    action_steps=st.integers(1, 4),
    mask=st.booleans(),
)
def test_windows_by_brute_force(length, history, action_steps, mask):
    horizon = 6
    after = horizon - history if mask else action_steps - 1
    total = sum(length)
    action = np.arange(total, dtype=np.float32)[:, None]
    recordings = Recordings({"state": action}, action, np.array(length), ["e"] * len(length))
    windows = WindowSet(recordings, np.arange(len(length)), horizon, history, after, mask)
    batch = windows.__getitems__(Draw(0, np.arange(len(windows))))
    expected, valid = [], []
    for first, t in zip(np.cumsum([0, *length[:-1]]), length, strict=True):
        for s in range(-(history - 1), t - horizon + after + 1):
            steps = np.arange(s, s + horizon)
            expected.append(first + steps.clip(0, t - 1))
            valid.append((steps >= 0) & (steps < t) | (not mask))
    np.testing.assert_array_equal(batch.action[:, :, 0], np.array(expected))
    np.testing.assert_array_equal(batch.valid, np.array(valid))
    np.testing.assert_array_equal(batch.observation["state"][:, :, 0], np.array(expected)[:, :history])
    if mask:  # every step is the newest observed one exactly once
        assert sorted(batch.observation["state"][:, -1, 0].tolist()) == list(range(total))


def data_module(tmp_path, n=20, **changes):
    path = tmp_path / "d.hdf5"
    if not path.exists():
        write_hdf5(path, episodes(n))
    data = RobotDemonstrations(str(path), **{"batch_size": 16, "val_fraction": 0.1} | changes)
    data.setup()
    return data


def test_splits_are_disjoint_and_seeded(tmp_path):
    data = data_module(tmp_path)
    parts = {name: set(data._splits[name][1].tolist()) for name in ("train", "val", "test")}
    assert [len(p) for p in parts.values()] == [16, 2, 2]
    assert len(set.union(*parts.values())) == 20
    again = data_module(tmp_path)
    assert all(set(again._splits[k][1].tolist()) == v for k, v in parts.items())
    assert set(data_module(tmp_path, seed=1)._splits["test"][1].tolist()) != parts["test"]
    assert len(data_module(tmp_path, max_train_episodes=5)._splits["train"][1]) == 5
    assert data.shapes() == {"action": (3,), "state": (5,)}


def test_the_normaliser_never_sees_a_test_episode(tmp_path):
    for limit in (90, 3):
        data = data_module(tmp_path, max_train_episodes=limit)
        recordings, _ = data._splits["train"]
        seen = np.concatenate([data._splits[name][1] for name in ("train", "val")])
        cut = np.cumsum(recordings.length)[:-1]
        for name, values in {"state": recordings.observation["state"], "action": recordings.action}.items():
            expected = np.concatenate([np.split(values, cut)[i] for i in sorted(seen)])
            np.testing.assert_array_equal(data.normalizer_data()[name], expected)


def test_predict_acts_on_every_step(tmp_path):
    data = data_module(tmp_path)
    steps = sum(data._splits["test"][0].length[data._splits["test"][1]])
    assert sum(len(b.index) for b in data.predict_dataloader()) == steps
    other = write_hdf5(tmp_path / "mine.hdf5", episodes(2, seed=5))
    assert sum(len(b.index) for b in data_module(tmp_path, predict_source=str(other)).predict_dataloader()) == 29
    wide = write_hdf5(tmp_path / "wide.hdf5", [(np.zeros((9, 7), "f"), a[:9]) for _, a in episodes(2)])
    with pytest.raises(ValueError, match=r"wide\.hdf5 has 7 numbers per state, .*d\.hdf5 has 5"):
        data_module(tmp_path, predict_source=str(wide)).predict_dataloader()


def test_impossible_settings_say_so(tmp_path):
    with pytest.raises(ValueError, match="demo_0 has 14 frames, fewer than a window of 16"):
        data_module(tmp_path, horizon=16)
    with pytest.raises(ValueError, match="has no simulator"):
        data_module(tmp_path).simulators("reach-v3")
    with pytest.raises(ValueError, match="20 episodes cannot be split"):
        data_module(tmp_path, val_fraction=0.9)
    with pytest.raises(FileNotFoundError, match="neither a file or folder nor 'metaworld'"):
        RobotDemonstrations("nothing")
    with pytest.raises(ValueError, match="did you mean"):
        RobotDemonstrations(tasks=["reach"])
    with pytest.raises(ValueError, match="outside"):
        RobotDemonstrations(val_fraction=0)
    with pytest.raises(ValueError, match="tasks is an empty list"):
        RobotDemonstrations(tasks=[])


def test_without_the_extra_the_command_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(ImportError, match=r"pip install 'fulgurite\[robots\]'"):
        RobotDemonstrations()
