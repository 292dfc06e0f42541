"""Meta-World tasks: scripted experts, point clouds and pictures by casting rays (no OpenGL), many episodes in step.

Meta-World v3 (Yu et al. 2019) has 50 table-top tasks of a Sawyer arm and an expert for each. Everything random in an
episode (where object and goal are) follows from the episode's seed. The state and the point clouds are metres in
world coordinates; a control step takes 0.0125 s.

This module imports neither PyTorch nor Lightning, so that the processes that simulate start in a second.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import numpy as np

from datamodules.checks import check_least
from datamodules.progress import progress

CONTROL_HZ = 80
MAX_STEPS = 200
"""Length of an episode in the protocol of DP3, FlowPolicy and FocalPolicy."""


@dataclass(frozen=True)
class Observation:
    """What is observed at a control step. All sizes 0 or "none" where a kind is not wanted.

    Attributes:
        state: "full" for Meta-World's 39 numbers (this frame 18, last frame 18, goal 3), "robot" for 9 (hand, right
            finger, left finger, each x y z), or "none".
        points: Points of the cloud, chosen by farthest-point sampling from those inside `crop`.
        image: Side of the square picture in pixels.
        renderer: Of the picture: "rays" (geometry colour times shading, needs nothing) or "gl" (`mujoco.Renderer`,
            needs an OpenGL library; set `MUJOCO_GL` to egl or osmesa on a machine without a display).
        camera: Name of the camera in the model, which gives orientation and field of view.
        position: Where the camera is put, in metres (x, y, z).
        rays: Side of the square grid of rays that a point cloud is made of.
        crop: Box of the point cloud, in metres: (x, y, z) of the low and of the high corner. The default leaves out
            the table top and the walls.

    Raises:
        ValueError: If a size is negative, the box is empty, or nothing is observed.
    """

    state: Literal["full", "robot", "none"] = "full"
    points: int = 0
    image: int = 0
    renderer: Literal["rays", "gl"] = "rays"
    camera: str = "corner2"
    position: tuple[float, float, float] = (0.6, 0.295, 0.8)
    rays: int = 84
    crop: tuple[tuple[float, float, float], tuple[float, float, float]] = ((-0.6, 0.2, 0.005), (0.6, 1.1, 0.7))

    def __post_init__(self) -> None:
        check_least(0, points=self.points, image=self.image)
        check_least(1, rays=self.rays)
        for axis, low, high in zip("xyz", *self.crop, strict=True):
            if not low < high:
                raise ValueError(f"crop goes from {low} to {high} along {axis}: the low corner comes first")
        if self.state == "none" and not self.points and not self.image:
            raise ValueError('nothing is observed: state is "none", points and image are 0')


class Episode(NamedTuple):
    """One demonstration of `t` control steps.

    Attributes:
        observation: `state` float32 `(t, 39 or 9)`, `point_cloud` float32 `(t, points, 3)`, `image` uint8
            `(t, h, w, 3)`, as wanted; entry i is seen before action i.
        action: float32 `(t, 4)` in [-1, 1]: hand displacement x y z in centimetres, gripper effort.
        layout: float64 `(k,)`, the random positions of the episode, in metres.
    """

    observation: dict[str, np.ndarray]
    action: np.ndarray
    layout: np.ndarray


def require() -> None:
    """Check that the simulator is installed.

    Raises:
        ImportError: With the command that installs it.
        ValueError: If `MUJOCO_GL` names an OpenGL library that is not there, without which MuJoCo does not start.
    """
    try:
        import metaworld  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Meta-World needs the robots extra ({error.name} is missing): pip install 'fulgurite[robots]'"
        ) from None
    except Exception as error:  # MuJoCo and the OpenGL libraries raise many kinds
        raise ValueError(
            f"MuJoCo does not start with MUJOCO_GL={os.environ.get('MUJOCO_GL', '')}: unset it, or install the OpenGL "
            f"library that it names ({error})"
        ) from None


@lru_cache(maxsize=1)
def missing_gl() -> str:
    """Why MuJoCo cannot draw here, nothing if it can. Asked once: a second failure would end the process."""
    import mujoco

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GLFW warns of what is raised
            context = mujoco.GLContext(8, 8)
            context.make_current()
            empty = mujoco.MjModel.from_xml_string("<mujoco/>")
            mujoco.MjrContext(empty, mujoco.mjtFontScale.mjFONTSCALE_100).free()
            context.free()
    except Exception as error:  # each OpenGL library raises its own kind
        return str(error) or type(error).__name__
    return ""


def check_tasks(tasks: Sequence[str]) -> None:
    """Refuse names that are no Meta-World task, and none at all.

    Raises:
        ValueError: Naming the task and the nearest known one.
    """
    from difflib import get_close_matches

    from metaworld.policies import ENV_POLICY_MAP

    if not tasks:
        raise ValueError("tasks is an empty list: name Meta-World tasks, or leave it out")
    for task in tasks:
        if task not in ENV_POLICY_MAP:
            near = get_close_matches(task, ENV_POLICY_MAP, n=1)
            hint = f"did you mean {near[0]}?" if near else "names look like door-open-v3"
            raise ValueError(f"Meta-World has no task {task!r}: {hint}")


# ------------------------------------------------------------------------------------------------- seeing


def farthest_points(clouds: Sequence[np.ndarray], k: int) -> np.ndarray:
    """Farthest-point sampling of several clouds at once, each from its first point on.

    Every pick is the point farthest from all picks so far. A cloud with fewer than `k` points repeats its first.

    Args:
        clouds: Arrays `(n_i, 3)`, `n_i >= 1`, of any sizes.
        k: Points to pick from each.

    Returns:
        float32 `(len(clouds), k, 3)`.
    """
    n = max(len(c) for c in clouds)
    padded = np.stack([np.concatenate([c, np.broadcast_to(c[:1], (n - len(c), 3))]) for c in clouds])
    planes = np.ascontiguousarray(padded.transpose(2, 0, 1), dtype=np.float32)  # 3 f n
    f = np.arange(len(clouds))
    picks = np.zeros((len(clouds), k), dtype=np.int64)
    nearest = np.full((len(clouds), n), np.inf, dtype=np.float32)  # squared distance to the picks so far
    distance, square = np.empty_like(nearest), np.empty_like(nearest)
    for i in range(1, k):
        last = planes[:, f, picks[:, i - 1], None]  # 3 f 1
        distance[:] = 0
        for plane, at in zip(planes, last, strict=True):
            np.subtract(plane, at, out=square)
            np.multiply(square, square, out=square)
            np.add(distance, square, out=distance)
        np.minimum(nearest, distance, out=nearest)
        picks[:, i] = nearest.argmax(1)
    return planes[:, f[:, None], picks].transpose(1, 2, 0).copy()


class Rays:
    """A grid of rays through the pixels of a pinhole camera, cast into a MuJoCo scene.

    They meet what MuJoCo would draw: geometries, and the spheres of sites, which mark goals.

    Args:
        model: `mujoco.MjModel`.
        data: `mujoco.MjData` after a forward pass: the camera's orientation is read here, once.
        camera: Name of the camera.
        position: Where it stands, metres (x, y, z).
        size: Rays along each side.
        box: Low and high corner; only rays that meet this box are cast. None casts all.
    """

    VISIBLE = np.array([1, 1, 1, 0, 0, 0], dtype=np.uint8)  # the geometry groups that MuJoCo draws by default

    def __init__(self, model: Any, data: Any, camera: str, position: Sequence[float], size: int, box: Any = None):
        self.model, self.data, self.size = model, data, size
        self.origin = np.asarray(position, dtype=np.float64)
        rotation = data.cam(camera).xmat.reshape(3, 3)
        slope = (np.arange(size) + 0.5 - size / 2) / (size / 2) * np.tan(np.radians(model.cam(camera).fovy[0]) / 2)
        right, down = np.meshgrid(slope, slope)
        self.forward = -rotation[:, 2]
        self.directions = np.stack([right, -down, -np.ones_like(right)], axis=-1).reshape(-1, 3) @ rotation.T
        self.box = None if box is None else np.asarray(box, dtype=np.float64)
        if self.box is not None:
            with np.errstate(divide="ignore"):
                bounds = (self.box - self.origin)[:, None] / self.directions  # 2 rays 3
            enter, leave = bounds.min(0).max(1), bounds.max(0).min(1)
            meets = leave > np.maximum(enter, 0)
            self.directions = self.directions[meets]
            self.enter, self.leave = enter[meets] - 1e-9, leave[meets] + 1e-9  # in lengths of the direction
        self._flat = np.ascontiguousarray(self.directions).ravel()
        self._square = (self.directions**2).sum(1)
        drawn = (model.site_group <= 2) & (model.site_rgba[:, 3] > 0) & (model.site_type == 2)  # 2: sphere
        self.sites = np.flatnonzero(drawn)
        self.colours = np.concatenate([geometry_colours(model), model.site_rgba[:, :3]])

    def cast(self) -> tuple[np.ndarray, np.ndarray]:
        """Cast all rays.

        Returns:
            How far each goes `(rays,)`, in lengths of its direction (not a number where nothing is hit), and the number
            of the geometry `(rays,)`, -1 there; sites count on from the number of geometries.
        """
        import mujoco

        rays = len(self.directions)
        geometry, distance = np.empty(rays, dtype=np.int32), np.empty(rays)
        mujoco.mj_multiRay(
            self.model, self.data, self.origin, self._flat, self.VISIBLE, 1, -1, geometry, distance, rays, 1e3
        )
        distance[geometry < 0] = np.inf
        # nearer root of |origin + x direction - centre| = radius
        towards = self.data.site_xpos[self.sites] - self.origin  # s 3
        along = towards @ self.directions.T  # s rays
        root = along**2 - self._square * ((towards**2).sum(1) - self.model.site_size[self.sites, 0] ** 2)[:, None]
        for i, site in enumerate(self.sites):
            meets = np.flatnonzero(root[i] >= 0)
            x = (along[i, meets] - np.sqrt(root[i, meets])) / self._square[meets]
            first = (x > 0) & (x < distance[meets])
            distance[meets[first]], geometry[meets[first]] = x[first], self.model.ngeom + site
        distance[geometry < 0] = np.nan
        return distance, geometry

    def elsewhere(self) -> np.ndarray:
        """Numbers of the geometries that neither reach into the box nor come between it and the camera.

        Their bounding boxes are apart from the one around box and camera; its corners are on one side of a plane.
        """
        assert self.box is not None  # given wherever a cloud is wanted
        model, data = self.model, self.data
        low, high = np.minimum(self.box[0], self.origin), np.maximum(self.box[1], self.origin)
        turned = data.geom_xmat.reshape(-1, 3, 3)
        middle = data.geom_xpos + np.einsum("gij,gj->gi", turned, model.geom_aabb[:, :3])
        half = np.einsum("gij,gj->gi", np.abs(turned), model.geom_aabb[:, 3:])
        apart = ((middle - half > high) | (middle + half < low)).any(1)
        for plane in np.flatnonzero(model.geom_type == 0):
            corners = np.stack(np.meshgrid(*zip(low, high, strict=True)), axis=-1).reshape(8, 3)
            height = (corners - data.geom_xpos[plane]) @ turned[plane, :, 2]
            apart[plane] = height.min() > 0 or height.max() < 0
        return np.flatnonzero(apart)

    def cloud(self) -> np.ndarray:
        """The points hit inside the box, float32 `(n, 3)` in metres.

        Raises:
            ValueError: If there is none.
        """
        group = self.model.geom_group.copy()
        self.model.geom_group[self.elsewhere()] = len(self.VISIBLE) - 1  # unseen: the same points, sooner
        try:
            distance, _ = self.cast()
        finally:
            self.model.geom_group[:] = group
        assert self.box is not None
        near = (distance > self.enter) & (distance < self.leave)  # most rays end before or behind the box
        points = self.origin + distance[near, None] * self.directions[near]
        inside = points[((points > self.box[0]) & (points < self.box[1])).all(1)]
        if not len(inside):
            raise ValueError(f"nothing is seen inside the crop {self.box.tolist()}: widen it or move the camera")
        return inside.astype(np.float32)

    def picture(self) -> np.ndarray:
        """A picture, uint8 `(size, size, 3)`: colour of the geometry, lit from the camera.

        Normals are differences of neighbouring hit points, so edges show as thin dark lines.
        """
        distance, geometry = self.cast()
        points = (self.origin + distance[:, None] * self.directions).reshape(self.size, self.size, 3)
        down, right = np.gradient(points, axis=0), np.gradient(points, axis=1)
        normal = np.cross(right, down)
        length = np.linalg.norm(normal, axis=-1)
        light = np.abs(normal @ self.forward) / np.where(length > 0, length, 1)
        colour = self.colours[geometry].reshape(self.size, self.size, 3)
        shaded = colour * (0.35 + 0.65 * np.nan_to_num(light)[..., None])
        return (255 * np.where(geometry.reshape(self.size, self.size, 1) < 0, 0.6, shaded)).astype(np.uint8)


def geometry_colours(model: Any) -> np.ndarray:
    """Colour of each geometry in [0, 1], `(ngeom, 3)`.

    MuJoCo's rule: its own, unless that is the default and it has a material. A texture counts as its mean.
    """
    colours = model.geom_rgba[:, :3].copy()
    default = (model.geom_rgba == [0.5, 0.5, 0.5, 1]).all(1)
    for geometry in np.flatnonzero(default & (model.geom_matid >= 0)):
        material = model.geom_matid[geometry]
        colours[geometry] = model.mat_rgba[material, :3]
        textures = model.mat_texid[material][model.mat_texid[material] >= 0]
        if len(textures):
            texture = textures[0]
            start, channels = model.tex_adr[texture], model.tex_nchannel[texture]
            pixels = model.tex_height[texture] * model.tex_width[texture]
            texels = model.tex_data[start : start + pixels * channels].reshape(pixels, channels)
            colours[geometry] *= texels[:, :3].mean(0) / 255
    return colours


# ---------------------------------------------------------------------------------------------- simulating


class Simulator:
    """One Meta-World task with the wanted observations.

    Args:
        task: Name, for example "door-open-v3".
        spec: What `observe` returns.

    Raises:
        ValueError: If the camera is unknown, or pictures are to be drawn and there is no OpenGL.
    """

    def __init__(self, task: str, spec: Observation):
        import mujoco
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE as ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP

        self.spec = spec
        self.env = ENVIRONMENTS[f"{task}-goal-observable"](seed=0)
        self.env._freeze_rand_vec, self.env.seeded_rand_vec = False, True
        self.env.max_path_length = sys.maxsize  # whoever steps it counts; it would raise an error after 500
        self._expert = ENV_POLICY_MAP[task]()
        model, data = self.env.model, self.env.data
        cameras = [model.camera(i).name for i in range(model.ncam)]
        if spec.camera not in cameras:
            raise ValueError(f"{task} has no camera {spec.camera!r}: it has {', '.join(cameras)}")
        model.cam(spec.camera).pos[:] = spec.position
        mujoco.mj_forward(model, data)
        if spec.points:
            self._cloud_rays = Rays(model, data, spec.camera, spec.position, spec.rays, spec.crop)
        self._picture_rays: dict[int, Rays] = {}
        self._gl = None
        if spec.image and spec.renderer == "gl":
            if reason := missing_gl():
                raise ValueError(
                    'renderer "gl" finds no OpenGL: set MUJOCO_GL to egl or osmesa where that library is installed, or '
                    f"choose renderer: rays, which needs none ({reason})"
                )
            model.vis.quality.offsamples = 0
            model.vis.global_.offwidth = model.vis.global_.offheight = spec.image
            self._gl = mujoco.Renderer(model, spec.image, spec.image)
            weakref.finalize(self, self._gl.close)  # before the interpreter ends: then OpenGL is gone already

    def reset(self, seed: int) -> None:
        """Start the episode of this seed (0 to 2^32 - 1)."""
        self.env.seed(seed)
        self._obs, _ = self.env.reset()

    @property
    def layout(self) -> np.ndarray:
        """The random positions of this episode, metres."""
        return self.env._last_rand_vec.copy()

    @property
    def hand(self) -> np.ndarray:
        """Position of the hand, metres (x, y, z)."""
        return self.env.get_endeff_pos().copy()

    def observe(self) -> dict[str, np.ndarray]:
        """This step's observation; `point_cloud` still has every point inside the crop (see `stack`)."""
        seen = {}
        if self.spec.state == "full":
            seen["state"] = self._obs.astype(np.float32)
        elif self.spec.state == "robot":
            fingers = [self.env._get_site_pos(name) for name in ("rightEndEffector", "leftEndEffector")]
            seen["state"] = np.concatenate([self.hand, *fingers]).astype(np.float32)
        if self.spec.points:
            self._mark_goal()
            seen["point_cloud"] = self._cloud_rays.cloud()
        if self.spec.image:
            seen["image"] = self.picture()
        return seen

    def _mark_goal(self) -> None:
        """Put the goal's site where the goal is: Meta-World's own forward pass has moved it back."""
        for name, position in self.env._target_site_config:
            self.env._set_pos_site(name, position)

    def picture(self, size: int | None = None) -> np.ndarray:
        """What the camera sees, uint8 `(size, size, 3)`; by rays where `size` is given."""
        import mujoco

        self._mark_goal()
        if size is None and self._gl is not None:
            self._gl.update_scene(self.env.data, self.spec.camera)
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._gl.scene.flags[flag] = 0
            picture = self._gl.render()
        else:
            size = size or self.spec.image
            if size not in self._picture_rays:
                env, spec = self.env, self.spec
                self._picture_rays[size] = Rays(env.model, env.data, spec.camera, spec.position, size)
            picture = self._picture_rays[size].picture()
        # Meta-World mounts this camera upside down.
        return picture[::-1, ::-1].copy() if self.spec.camera == "corner2" else picture

    def step(self, action: np.ndarray) -> bool:
        """One control step; returns whether the task is solved now. Actions are clipped to [-1, 1]."""
        self._obs, _, _, _, info = self.env.step(np.clip(action, -1, 1).astype(np.float32))
        return bool(info["success"])

    def expert(self) -> np.ndarray:
        """The expert's action, clipped to [-1, 1] (most experts command more than the arm obeys), float32 `(4,)`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that its actions will be clipped
            return np.clip(self._expert.get_action(self._obs), -1, 1).astype(np.float32)


def stack(observations: Sequence[dict[str, np.ndarray]], points: int) -> dict[str, np.ndarray]:
    """Join observations along a new first axis, and sample their point clouds, all at once."""
    joined = {}
    for name in observations[0]:
        values = [o[name] for o in observations]
        joined[name] = farthest_points(values, points) if name == "point_cloud" else np.stack(values)
    return joined


# ------------------------------------------------------------------------------------------ demonstrations


def demonstrate(
    task: str, spec: Observation, seed: int, max_steps: int = MAX_STEPS, tail: int | None = None, min_success: int = 5
) -> Episode | None:
    """Let the expert do one episode.

    Args:
        task: Name of the task.
        spec: What is recorded.
        seed: Of the layout.
        max_steps: Steps at most.
        tail: Steps kept after the first success; None keeps all `max_steps`. (What follows is mostly idling, which
            teaches a policy to stand still.)
        min_success: Steps that must be successful, by default 5 as in DP3.

    Returns:
        The episode, or None if the expert failed.
    """
    simulator = _simulator(task, spec)
    simulator.reset(seed)
    layout = simulator.layout
    observations: list[dict[str, np.ndarray]] = []
    actions: list[np.ndarray] = []
    solved: list[bool] = []
    while len(actions) < max_steps:
        observations.append(simulator.observe())
        actions.append(simulator.expert())
        solved.append(simulator.step(actions[-1]))
        if tail is not None and sum(solved) >= min_success and len(solved) > solved.index(True) + tail:
            break
    if sum(solved) < min_success:
        return None
    return Episode(stack(observations, spec.points), np.stack(actions), layout)


@lru_cache(maxsize=4)
def _simulator(task: str, spec: Observation) -> Simulator:
    return Simulator(task, spec)


def episode_seed(task: str, seed: int, number: int, purpose: str) -> int:
    """Seed of an episode: the same purpose, seed and number give the same layout; other purposes, others."""
    digest = hashlib.sha256(f"{task}/{seed}/{number}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def collect(
    task: str,
    episodes: int,
    spec: Observation,
    folder: Path,
    *,
    seed: int = 0,
    purpose: str = "train",
    max_steps: int = MAX_STEPS,
    tail: int | None = None,
    processes: int | None = None,
) -> Path:
    """Make `episodes` successful demonstrations of a task, or find those made before.

    Episodes in which the expert fails are drawn again. Which episodes result depends on the arguments only, not on
    the number of processes. The file is complete or not there: it is written beside its place and moved.
    Demonstrations made with another version of the simulator stay in use (delete the file to make them anew); those
    that made it are in its `versions`.

    Args:
        task: Name of the task.
        episodes: How many.
        spec: What is recorded.
        folder: Where the file is kept; its name holds a hash of all arguments.
        seed: Of the layouts.
        purpose: Other purposes have other layouts, see `episode_seed`.
        max_steps: See `demonstrate`.
        tail: See `demonstrate`.
        processes: How many work at once; None takes all cores, 1 works in this process.

    Returns:
        An `.npz` with the arrays of all episodes one after the other, `length` of each episode, and `layout`.

    Raises:
        ValueError: If the expert hardly ever succeeds, or the processes cannot be started.
    """
    settings = {"episodes": episodes, "seed": seed, "purpose": purpose, "max_steps": max_steps, "tail": tail}
    settings |= {"observation": asdict(spec), "format": 1}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    target = folder / f"{task}-{digest}.npz"
    if target.is_file():
        return target
    processes = min(processes or os.cpu_count() or 1, episodes)
    done: list[Episode] = []
    attempts = 0
    what = f"demonstrations of {task}" if purpose == "train" else f"{purpose}, {task}"
    with progress(what, episodes) as bar, _broken(), _executor(processes, spawn=processes > 1) as executor:

        def count(job: "Future[Episode | None]") -> None:
            bar.update(job.exception() is None and job.result() is not None)

        while len(done) < episodes:
            if attempts >= 10 * episodes:
                raise ValueError(
                    f"the expert of {task} solved {len(done)} of {attempts} episodes within {max_steps} steps: "
                    "raise max_steps or leave the task out"
                )
            missing = episodes - len(done)
            seeds = [episode_seed(task, seed, attempts + i, purpose) for i in range(missing)]
            attempts += missing
            jobs = []
            for s in seeds:
                jobs.append(executor.submit(demonstrate, task, spec, s, max_steps, tail))
                jobs[-1].add_done_callback(count)
            done += [episode for job in jobs if (episode := job.result()) is not None]
    arrays: dict[str, Any] = {
        name: np.concatenate([e.observation[name] for e in done]) for name in done[0].observation
    } | {
        "action": np.concatenate([e.action for e in done]),
        "length": np.array([len(e.action) for e in done]),
        "layout": np.stack([e.layout for e in done]),
        "versions": np.array([f"{name} {version(name)}" for name in ("metaworld", "mujoco")]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{task}-", dir=folder))
    try:
        np.savez(work / "all.npz", **arrays)
        os.replace(work / "all.npz", target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


class _Here(Executor):
    """Runs jobs at once in this process, for `processes=1` (debuggers, notebooks, tests)."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future: Any = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def _broken() -> Iterator[None]:
    """Say what to do where the processes of an executor end before their work."""
    try:
        yield
    except BrokenExecutor:
        raise ValueError(
            "the processes that simulate have ended early: start a script's work below `if __name__ == '__main__':`, "
            "or set processes to 1; if it is so already, memory may be short"
        ) from None


def _executor(processes: int, spawn: bool) -> Executor:
    """Fresh processes (a forked one would inherit PyTorch's threads), or this one."""
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn")) if spawn else _Here()


# --------------------------------------------------------------------------------------- many episodes in step


class Step(NamedTuple):
    """What `n` episodes did during one chunk of `h` control steps.

    Attributes:
        observation: Last `history` observations of each episode, arrays `(n, history, ...)`.
        solved: bool `(n,)`: solved at any step so far.
        steps: int `(n,)`: control steps so far; an episode stops at its first success.
        hand: float `(n, h, 3)`: positions of the hand in metres after each step, repeated once stopped.
        frames: Pictures of the first episode, uint8 `(m, size, size, 3)`.
    """

    observation: dict[str, np.ndarray]
    solved: np.ndarray
    steps: np.ndarray
    hand: np.ndarray
    frames: np.ndarray


class _Group:
    """Some episodes of one task, in one process."""

    def __init__(self, task: str, spec: Observation, history: int):
        self.task, self.spec, self.history = task, spec, history
        self.simulators: list[Simulator] = []

    def reset(self, seeds: Sequence[int]) -> tuple[Step, list[np.ndarray]]:
        while len(self.simulators) < len(seeds):
            self.simulators.append(Simulator(self.task, self.spec))
        self.active = self.simulators[: len(seeds)]
        for simulator, seed in zip(self.active, seeds, strict=True):
            simulator.reset(seed)
        self.seen = [[s.observe()] * self.history for s in self.active]
        self.solved = np.zeros(len(seeds), dtype=bool)
        self.steps = np.zeros(len(seeds), dtype=int)
        return self._result(np.zeros((len(seeds), 0, 3)), []), [s.layout for s in self.active]

    def step(self, actions: np.ndarray, picture: int, every: int) -> Step:
        n, h = actions.shape[:2]
        hand, frames = np.zeros((n, h, 3)), []
        for i, simulator in enumerate(self.active):
            for j in range(h):
                if not self.solved[i]:
                    self.solved[i] = simulator.step(actions[i, j])
                    self.steps[i] += 1
                    # Only what the next plan will see is observed: the last steps of the chunk.
                    if j >= h - self.history and not self.solved[i]:
                        self.seen[i] = [*self.seen[i][1:], simulator.observe()]
                    if i == 0 and picture and self.steps[0] % every == 0:
                        frames.append(simulator.picture(picture))
                hand[i, j] = simulator.hand
        return self._result(hand, frames)

    def _result(self, hand: np.ndarray, frames: list[np.ndarray]) -> Step:
        flat = stack([o for seen in self.seen for o in seen], self.spec.points)
        observation = {k: v.reshape(len(self.seen), self.history, *v.shape[1:]) for k, v in flat.items()}
        return Step(observation, self.solved.copy(), self.steps.copy(), hand, np.array(frames, dtype=np.uint8))


_groups: dict[str, _Group] = {}  # in each process, those it keeps


def _start(key: str, task: str, spec: Observation, history: int) -> None:
    _groups[key] = _Group(task, spec, history)


def _call(key: str, method: str, *args: Any) -> Any:
    return getattr(_groups[key], method)(*args)


def _end(key: str) -> None:
    del _groups[key]


class Simulators:
    """Episodes of one task that advance together, spread over processes.

    Args:
        task: Name of the task.
        spec: What is observed.
        history: Observation steps that `reset` and `step` return.
        processes: How many; None takes all cores, 1 simulates in this process. Each keeps its simulators until
            `close`.
    """

    control_hz = CONTROL_HZ
    low, high = -1.0, 1.0
    """Bounds of an action."""

    def __init__(self, task: str, spec: Observation, history: int, processes: int | None = None):
        self.task = task
        self._key = uuid4().hex
        count = processes or os.cpu_count() or 1
        self._workers = [_executor(1, spawn=count > 1) for _ in range(count)]
        for worker in self._workers:
            worker.submit(_start, self._key, task, spec, history)

    def reset(self, seeds: Sequence[int]) -> tuple[Step, np.ndarray]:
        """Start an episode for each seed; returns what is seen and the layouts `(n, k)` in metres."""
        parts = np.array_split(np.asarray(seeds), min(len(self._workers), len(seeds)))
        self._bounds = np.cumsum([len(p) for p in parts])[:-1]
        with _broken():
            jobs = [w.submit(_call, self._key, "reset", p.tolist()) for w, p in zip(self._workers, parts, strict=False)]
            steps, layouts = zip(*[job.result() for job in jobs], strict=True)
        return _join(steps), np.stack([layout for part in layouts for layout in part])

    def step(self, actions: np.ndarray, picture: int = 0, every: int = 2) -> Step:
        """Execute a chunk of actions.

        Args:
            actions: `(n, h, 4)`, clipped to [-1, 1].
            picture: Side in pixels of pictures of the first episode; 0 takes none.
            every: Control steps between two pictures.
        """
        parts = np.split(actions, self._bounds)
        with _broken():
            jobs = [
                worker.submit(_call, self._key, "step", part, picture if i == 0 else 0, every)
                for i, (worker, part) in enumerate(zip(self._workers, parts, strict=False))
            ]
            return _join([job.result() for job in jobs])

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            with suppress(BrokenExecutor):
                worker.submit(_end, self._key)
            worker.shutdown()


def _join(parts: Sequence[Step]) -> Step:
    observation = {k: np.concatenate([p.observation[k] for p in parts]) for k in parts[0].observation}
    solved, steps, hand = (np.concatenate([getattr(p, name) for p in parts]) for name in ("solved", "steps", "hand"))
    return Step(observation, solved, steps, hand, parts[0].frames)
