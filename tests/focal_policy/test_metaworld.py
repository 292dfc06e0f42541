import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from callbacks import Rollouts
from datamodules import metaworld
from datamodules.metaworld import Episode, Observation, Rays, Simulators, collect, demonstrate, farthest_points
from lightning_modules.focal_policy import PolicyConfig
from tests.focal_policy.test_module import trainer

STATE = Observation(state="robot")


def test_farthest_points_by_brute_force():
    rng = np.random.default_rng(0)
    clouds = [rng.normal(size=(n, 3)) for n in (40, 25, 12, 3)]
    picked = farthest_points(clouds, 12)
    assert picked.shape == (4, 12, 3) and picked.dtype == np.float32
    for cloud, found in zip(clouds, picked, strict=True):
        expected = [cloud[0]]
        for _ in range(min(12, len(cloud)) - 1):
            distance = np.linalg.norm(cloud[:, None] - np.array(expected)[None], axis=2).min(1)
            expected.append(cloud[distance.argmax()])
        expected += [cloud[0]] * (12 - len(expected))
        np.testing.assert_allclose(found, np.array(expected), atol=1e-6)


SCENE = """
<mujoco>
  <worldbody>
    <camera name="eye" pos="0 0 3" fovy="60"/>
    <geom type="plane" size="5 5 1" rgba="0 0 1 1"/>
    <geom type="sphere" size="0.5" pos="0 0 1" rgba="1 0 0 1"/>
    <geom type="box" size="5 5 0.1" pos="0 0 2" rgba="1 1 1 0"/>
    <geom type="box" size="5 5 0.1" pos="0 0 2" group="3"/>
    <site name="goal" type="sphere" size="0.2" pos="0.8 0 1" rgba="0 1 0 1"/>
  </worldbody>
</mujoco>
"""


@pytest.fixture(scope="module")
def scene():
    import mujoco

    model = mujoco.MjModel.from_xml_string(SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def test_rays_hit_what_is_drawn(scene):
    """A plane, a sphere and a goal seen from above; the invisible boxes are passed through."""
    rays = Rays(*scene, "eye", (0, 0, 3), 41)
    distance, geometry = rays.cast()
    points = rays.origin + distance[:, None] * rays.directions
    on_sphere, on_site, on_plane = geometry == 1, geometry == scene[0].ngeom, geometry == 0
    assert on_sphere.any() and on_site.any() and on_plane.any()
    assert (on_sphere | on_site | on_plane).all()
    np.testing.assert_allclose(np.linalg.norm(points[on_sphere] - [0, 0, 1], axis=1), 0.5, atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(points[on_site] - [0.8, 0, 1], axis=1), 0.2, atol=1e-9)
    np.testing.assert_allclose(points[on_plane][:, 2], 0, atol=1e-9)
    # The middle ray runs down the axis; the outermost pixel centre is half a pixel inside the field of view.
    np.testing.assert_allclose(points.reshape(41, 41, 3)[20, 20], [0, 0, 1.5], atol=1e-9)
    edge = 3 * np.tan(np.radians(30)) * 40 / 41
    np.testing.assert_allclose(points.reshape(41, 41, 3)[0, 0], [-edge, edge, 0], atol=1e-9)


def test_rays_for_a_box_give_the_same_cloud_with_fewer_rays(scene):
    box = ((-0.4, -0.4, 0.2), (0.4, 0.4, 2.0))
    few, all_ = Rays(*scene, "eye", (0, 0, 3), 41, box), Rays(*scene, "eye", (0, 0, 3), 41)
    assert len(few.directions) < len(all_.directions)
    points = all_.origin + all_.cast()[0][:, None] * all_.directions
    inside = ((points > box[0]) & (points < box[1])).all(1)
    np.testing.assert_allclose(few.cloud(), points[inside], atol=1e-6)
    with pytest.raises(ValueError, match="nothing is seen"):
        Rays(*scene, "eye", (0, 0, 3), 41, ((3, 3, 2.5), (4, 4, 2.9))).cloud()


def test_picture_shows_the_colours(scene):
    picture = Rays(*scene, "eye", (0, 0, 3), 41).picture()
    assert picture.shape == (41, 41, 3) and picture.dtype == np.uint8
    assert picture[20, 20].argmax() == 0 and picture[2, 2].argmax() == 2


def test_an_episode_is_a_function_of_its_seed():
    first = demonstrate("door-open-v3", STATE, 5, tail=5)
    demonstrate("door-open-v3", STATE, 6, tail=5)
    again = demonstrate("door-open-v3", STATE, 5, tail=5)
    np.testing.assert_array_equal(first.action, again.action)
    np.testing.assert_array_equal(first.observation["state"], again.observation["state"])
    assert np.abs(first.action).max() <= 1
    seeds = {metaworld.episode_seed("reach-v3", 0, i, p) for i in range(50) for p in ("train", "val", "test")}
    assert len(seeds) == 150


def test_points_show_hand_and_goal_inside_the_crop():
    spec = Observation(state="robot", points=256, rays=64)
    episode = demonstrate("reach-v3", spec, 3, max_steps=60, tail=0, min_success=1)
    cloud, state = episode.observation["point_cloud"], episode.observation["state"]
    assert cloud.shape == (len(episode.action), 256, 3) and state.shape[1] == 9
    low, high = np.array(spec.crop)
    assert ((cloud >= low) & (cloud <= high)).all()
    nearest = np.linalg.norm(cloud - state[:, None, :3], axis=2).min(1)
    assert nearest.max() < 0.08
    goal = episode.layout[3:]  # in reach-v3 the layout is object and goal
    assert np.linalg.norm(cloud[0] - goal, axis=1).min() < 0.03


def test_failed_episodes_are_drawn_again_and_hopeless_tasks_say_so(tmp_path, monkeypatch):
    seen = []

    def fake(task, spec, seed, max_steps, tail):
        seen.append(seed)
        if len(seen) % 2:
            return None
        return Episode({"state": np.full((3, 1), seed, np.float32)}, np.zeros((3, 4), np.float32), np.zeros(2))

    monkeypatch.setattr(metaworld, "demonstrate", fake)
    path = collect("reach-v3", 4, STATE, tmp_path, processes=1)
    with np.load(path) as file:
        assert file["length"].tolist() == [3] * 4 and file["action"].shape == (12, 4)
    assert len(set(seen)) == len(seen) > 4
    assert collect("reach-v3", 4, STATE, tmp_path, processes=1) == path
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing half-made is left
    assert collect("reach-v3", 5, STATE, tmp_path, processes=1) != path
    monkeypatch.setattr(metaworld, "demonstrate", lambda *args: None)
    with pytest.raises(ValueError, match="solved 0 of 20"):
        collect("reach-v3", 2, STATE, tmp_path, processes=1)


def test_unknown_names_say_so():
    with pytest.raises(ValueError, match="did you mean door-open-v3"):
        metaworld.check_tasks(["door-opne-v3"])
    with pytest.raises(ValueError, match="empty list"):
        metaworld.check_tasks([])
    with pytest.raises(ValueError, match="reach-v3 has no camera 'corner9': it has .*corner2"):
        metaworld.Simulator("reach-v3", Observation(points=8, camera="corner9"))


@pytest.mark.parametrize("task", ["door-open-v3", "stick-push-v3", "shelf-place-v3"])
def test_what_is_elsewhere_changes_no_point_of_a_cloud(task):
    simulator = metaworld.Simulator(task, Observation(state="none", points=8))
    rays = simulator._cloud_rays
    for seed in range(2):
        simulator.reset(seed)
        for step in range(40):
            simulator.step(simulator.expert())
            if step % 20 == 19:
                assert len(rays.elsewhere()) > 10
                groups = rays.model.geom_group.copy()
                distance, _ = rays.cast()
                points = rays.origin + distance[:, None] * rays.directions
                inside = ((points > rays.box[0]) & (points < rays.box[1])).all(1)
                np.testing.assert_array_equal(rays.cloud(), points[inside].astype(np.float32))
                np.testing.assert_array_equal(rays.model.geom_group, groups)


DRAWN = """
import numpy as np
from datamodules import metaworld
metaworld.require()
if reason := metaworld.missing_gl():
    raise SystemExit(f"no OpenGL: {reason}")
pictures = []
for renderer in ("rays", "gl"):
    simulator = metaworld.Simulator("door-open-v3", metaworld.Observation(state="none", image=84, renderer=renderer))
    simulator.reset(0)
    for _ in range(20):
        simulator.step(simulator.expert())
    pictures.append(simulator.observe()["image"].astype(float))
red, *others = np.moveaxis(np.stack(pictures), -1, 0)
arm = red > 2 * np.maximum(*others)
print(arm.sum((1, 2)).min(), (arm[0] & arm[1]).sum() / (arm[0] | arm[1]).sum())
"""


def test_opengl_draws_what_rays_draw():
    """Where there is an OpenGL library, which Mesa's EGL is, without a display or a GPU."""
    environment = os.environ | {"MUJOCO_GL": "egl"}
    ended = subprocess.run([sys.executable, "-c", DRAWN], capture_output=True, text=True, check=False, env=environment)
    if "no OpenGL" in ended.stderr or "MuJoCo does not start" in ended.stderr:
        pytest.skip(ended.stderr.splitlines()[-1])
    assert ended.returncode == 0, ended.stderr
    assert "Exception ignored" not in ended.stderr
    pixels, overlap = map(float, ended.stdout.split())
    assert pixels > 300
    assert overlap > 0.85


def test_without_opengl_the_ways_out_are_named(monkeypatch):
    """`renderer: gl` on a machine without the library, and `MUJOCO_GL` that names one that is not there."""
    import mujoco

    def absent(width, height):
        raise mujoco.FatalError("no valid OpenGL context")

    monkeypatch.setattr(mujoco, "GLContext", absent)
    metaworld.missing_gl.cache_clear()
    for _ in range(2):
        with pytest.raises(ValueError, match="set MUJOCO_GL to egl or osmesa .* or choose renderer: rays"):
            metaworld.Simulator("reach-v3", Observation(state="none", image=8, renderer="gl"))
    metaworld.missing_gl.cache_clear()
    unset = "import os; os.environ['MUJOCO_GL'] = 'none such'\nfrom datamodules import metaworld\nmetaworld.require()"
    ended = subprocess.run([sys.executable, "-c", unset], capture_output=True, text=True, check=False)
    assert "ValueError: MuJoCo does not start with MUJOCO_GL=none such: unset it" in ended.stderr


def test_an_episode_may_be_longer_than_the_500_steps_of_the_environment():
    simulator = metaworld.Simulator("reach-v3", STATE)
    simulator.reset(0)
    simulator.env.curr_path_length = 499
    for _ in range(3):
        simulator.step(np.zeros(4, np.float32))


def test_a_script_without_a_main_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from pathlib import Path\nfrom datamodules.metaworld import Observation, collect\n"
        f"collect('reach-v3', 2, Observation(), Path({str(tmp_path)!r}), max_steps=60, processes=2)\n"
    )
    path = {"PYTHONPATH": str(Path(metaworld.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=os.environ | path
    )
    assert ended.returncode == 1
    assert "ValueError: the processes that simulate have ended early: start a script's work" in ended.stderr
    assert not list(tmp_path.glob("*.npz"))


class Oracle:
    """Plays a policy that knows the demonstrations of some seeds, and checks what it is shown."""

    hparams: ClassVar = {"history": 2, "action_steps": 4, "horizon": 12, "action_dim": 4}
    device, executed = torch.device("cpu"), PolicyConfig().executed

    def __init__(self, demonstrations: list[Episode]):
        self.demonstrations, self.step = demonstrations, 0

    def __call__(self, observation, noise):
        windows = []
        for i, episode in enumerate(self.demonstrations):
            frames = np.clip(np.arange(self.step - 1, self.step + 11), 0, len(episode.action) - 1)
            windows.append(episode.action[frames])
            if not self.finished[i]:
                expected = episode.observation["state"][[max(self.step - 1, 0), self.step]]
                np.testing.assert_array_equal(observation["state"][i], expected)
        self.step += 4
        return torch.from_numpy(np.stack(windows))


def test_an_oracle_replays_the_demonstrations_through_the_callback(tmp_path):
    """`Rollouts` executes, of the expert's windows, exactly the expert's actions, and sees exactly its states."""
    task, seeds = "door-open-v3", [5, 6]
    demonstrations = [demonstrate(task, STATE, seed) for seed in seeds]
    oracle, simulators = Oracle(demonstrations), Simulators(task, STATE, 2, processes=1)
    step = simulators.step
    oracle.finished = np.zeros(2, bool)

    def watched(*args):
        result = step(*args)
        oracle.finished = result.solved
        return result

    simulators.step = watched
    found = Rollouts(2, picture=0).rollout(trainer(tmp_path), oracle, simulators, seeds, task)
    simulators.close()
    assert found.solved.all()
    for i, episode in enumerate(demonstrations):
        steps = found.steps[i]
        assert 0 < steps < len(episode.action)
        np.testing.assert_array_equal(found.executed[i].reshape(-1, 4)[:steps], episode.action[:steps])
        np.testing.assert_array_equal(found.layouts[i], episode.layout)


@pytest.mark.long
def test_processes_do_not_change_anything(tmp_path):
    paths = [collect("reach-v3", 3, STATE, tmp_path / str(n), tail=5, processes=n) for n in (1, 2)]
    a, b = (np.load(p) for p in paths)
    for name in a.files:
        np.testing.assert_array_equal(a[name], b[name])
    seeds, actions = [1, 2, 3], np.full((3, 4, 4), 0.5, np.float32)
    results = []
    for n in (1, 2):
        simulators = Simulators("reach-v3", STATE, 2, processes=n)
        simulators.reset(seeds)
        results.append(simulators.step(actions, picture=16, every=2))
        simulators.close()
    np.testing.assert_array_equal(results[0].hand, results[1].hand)
    np.testing.assert_array_equal(results[0].observation["state"], results[1].observation["state"])
    assert results[0].frames.shape == results[1].frames.shape == (2, 16, 16, 3)


def test_a_bar_counts_the_demonstrations_that_succeed(tmp_path, monkeypatch):
    shown = []

    class Bar:
        def __init__(self, what, total):
            shown.append((what, total))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            shown.append("closed")

        def update(self, n=1):
            shown.append(int(n))

    outcomes = iter([False, True, True])
    episode = Episode({"state": np.zeros((3, 9), "f")}, np.zeros((3, 4), "f"), np.zeros(6))
    monkeypatch.setattr(metaworld, "progress", Bar)
    monkeypatch.setattr(metaworld, "demonstrate", lambda *args: episode if next(outcomes) else None)
    collect("reach-v3", 2, STATE, tmp_path, processes=1)
    assert shown == [("demonstrations of reach-v3", 2), 0, 1, 1, "closed"]
