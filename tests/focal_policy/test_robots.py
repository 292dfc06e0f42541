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
    (tmp_path / "broken.hdf5").write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot be read as HDF5"):
        read(tmp_path / "broken.hdf5", Keys())
    (tmp_path / "some.csv").write_text("1,2")
    with pytest.raises(ValueError, match="no known format"):
        read(tmp_path / "some.csv", Keys())
    with pytest.raises(FileNotFoundError, match="do not exist"):
        read(tmp_path / "nothing.zarr", Keys())


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
    assert data.normalizer_data()["state"].shape[1] == 5


def test_predict_acts_on_every_step(tmp_path):
    data = data_module(tmp_path)
    steps = sum(data._splits["test"][0].length[data._splits["test"][1]])
    assert sum(len(b.index) for b in data.predict_dataloader()) == steps
    other = write_hdf5(tmp_path / "mine.hdf5", episodes(2, seed=5))
    assert sum(len(b.index) for b in data_module(tmp_path, predict_source=str(other)).predict_dataloader()) == 29


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


def test_without_the_extra_the_command_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(ImportError, match=r"pip install 'fulgurite\[robots\]'"):
        RobotDemonstrations()
