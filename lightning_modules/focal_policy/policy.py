"""The policy: normaliser, encoder and velocity network in one module, and an object that a robot loop can call.

Axes: b batch, t observation steps, l window steps, d action dimensions.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .encoders import ObservationEncoder
from .network import ConditionalUnet1d
from .normalizer import Normalizer

FORMAT_VERSION = 1
TIME_SCALE = 99.0
"""Flow time in [0, 1] is multiplied by this before its embedding, as released."""


@dataclass
class PolicyConfig:
    """Sizes of a policy; the defaults are the paper's Meta-World network.

    Attributes:
        action_dim: Dimensions of an action.
        state_dim: Size of the state; 0 for none.
        point_channels: Numbers per point, 3 or 6; 0 for no point cloud.
        image_crop: Side of the image crop in pixels; 0 for no image.
        horizon: Steps of the predicted window, chunks times steps a chunk.
        action_steps: Steps of a window that are executed before the next observation.
        history: Observation steps.
        widths: Channels of the U-Net's levels.
        time_features: Size of the time embedding.
        kernel_size: Width of the U-Net's kernels.
        groups: Groups of its normalisations.
        point_features: Output of the point encoder.
        state_features: Hidden and output size of the state encoder.
        image_features: Output of the image encoder.
        inference_steps: Network calls per window.
        eps: Flow time at which inference starts.

    Raises:
        ValueError: If the executed slice does not fit into the window.
    """

    action_dim: int = 4
    state_dim: int = 9
    point_channels: int = 3
    image_crop: int = 0
    horizon: int = 12
    action_steps: int = 4
    history: int = 2
    widths: tuple[int, ...] = (512, 1024, 2048)
    time_features: int = 128
    kernel_size: int = 5
    groups: int = 8
    point_features: int = 64
    state_features: int = 64
    image_features: int = 64
    inference_steps: int = 1
    eps: float = 0.01

    def __post_init__(self):
        needed = self.history - 1 + self.action_steps
        if needed > self.horizon:
            raise ValueError(
                f"the executed slice ends at step {needed} (history {self.history} - 1 + action_steps "
                f"{self.action_steps}) but the window has {self.horizon} steps: raise horizon or lower action_steps"
            )
        multiple = 2 ** (len(self.widths) - 1)
        if self.horizon % multiple:
            raise ValueError(
                f"horizon {self.horizon} is not divisible by {multiple}, the stride of a U-Net with "
                f"{len(self.widths)} widths: use {-(-self.horizon // multiple) * multiple}"
            )

    @property
    def executed(self) -> slice:
        """The steps of a window that are executed: the one of the newest observation and those after it."""
        return slice(self.history - 1, self.history - 1 + self.action_steps)


class PolicyNetwork(nn.Module):
    """Maps observations and noise to a window of actions in their own units.

    The parts are named as in the released checkpoints: `obs_encoder`, `model`; the normaliser's buffers are ours.

    Args:
        config: The sizes.
    """

    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.config = c = config
        sizes = {"action": c.action_dim}
        if c.state_dim:
            sizes["state"] = c.state_dim
        if c.point_channels:
            sizes["point_cloud"] = c.point_channels
        self.normalizer = Normalizer(sizes)
        self.obs_encoder = ObservationEncoder(
            c.history,
            c.state_dim,
            c.point_channels,
            c.image_crop,
            c.point_features,
            c.state_features,
            c.image_features,
        )
        self.model = ConditionalUnet1d(
            c.action_dim, self.obs_encoder.features, c.widths, c.time_features, c.kernel_size, c.groups
        )

    def condition(self, observation: Mapping[str, Tensor], corner: Tensor | None = None) -> Tensor:
        """Condition `(b, features)` of raw observations `(b, t, ...)`; only the first `history` steps are read."""
        steps = slice(0, self.config.history)
        normalised = {
            name: self.normalizer(name, x[:, steps]) if name in self.normalizer.sizes else x[:, steps]
            for name, x in observation.items()
        }
        return self.obs_encoder(normalised, corner)

    def velocity(self, x: Tensor, s: Tensor, condition: Tensor) -> Tensor:
        """Velocity of normalised windows `(b, l, d)` at flow times `(b,)` in [0, 1]."""
        return self.model(x, TIME_SCALE * s, condition)

    def forward(self, observation: Mapping[str, Tensor], noise: Tensor, steps: int | None = None) -> Tensor:
        r"""Generate windows: $z \leftarrow z + v(z, s_i) / K$, $s_i = (i/K)(1-\epsilon) + \epsilon$, $i = 0..K-1$.

        With one step this is one call at flow time $\epsilon$ and a step of size 1, as released.

        Args:
            observation: Raw observations `(b, t, ...)`: `state` and `point_cloud` floats, `image` uint8.
            noise: Standard normal `(b, l, d)`.
            steps: Network calls; None takes `inference_steps`.

        Returns:
            `(b, l, d)` actions in their own units, not clipped; `config.executed` says which to execute.
        """
        condition = self.condition(observation)
        steps = self.config.inference_steps if steps is None else steps
        eps = self.config.eps
        z = noise
        for i in range(steps):
            s = torch.full_like(z[:, 0, 0], i / steps * (1 - eps) + eps)
            z = z + self.velocity(z, s, condition) / steps
        return self.normalizer.inverse("action", z)


class RolloutPolicy:
    """A trained policy for a control loop: keeps the observation history, plans, hands out one action a call.

    ```python
    policy = RolloutPolicy.from_pretrained("runs/.../policy")
    policy.reset()
    action = policy.act({"state": state})   # every control step
    ```

    Args:
        network: With its normaliser fitted.
        seed: Of the noise that windows start from.
        device: Where the network runs.

    Raises:
        ValueError: If the normaliser has not been fitted.
    """

    def __init__(self, network: PolicyNetwork, seed: int = 0, device: str | torch.device = "cpu"):
        if not network.normalizer.fitted:
            raise ValueError("the policy's normaliser is not fitted: load a trained checkpoint, or fit one first")
        self.network = network.to(device).eval()
        self.config = network.config
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self) -> None:
        """Forget the history and the planned actions: a new episode begins."""
        self._history: list[dict[str, Tensor]] = []
        self._queue: list[np.ndarray] = []
        self.window: np.ndarray | None = None
        """The last planned window `(l, d)`, or `(b, l, d)` for a batch."""

    def act(self, observation: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
        """The action of this control step; a new window is planned every `action_steps` calls.

        Args:
            observation: `state` `(state_dim,)`, `point_cloud` `(n, channels)` floats, `image` `(h, w, 3)` uint8, as
                the policy needs. All may have the same leading batch axis, for several robots in step.

        Returns:
            Action `(d,)`, or `(b, d)` for a batch, in its own units, float32, not clipped.

        Raises:
            ValueError: If a kind of observation is missing or has another size.
        """
        frame, batched = self._frame(observation)
        self._history = [*(self._history or [frame] * self.config.history), frame][-self.config.history :]
        if not self._queue:
            stacked = {name: torch.stack([f[name] for f in self._history], dim=1) for name in frame}
            shape = (len(next(iter(frame.values()))), self.config.horizon, self.config.action_dim)
            noise = torch.randn(shape, generator=self._generator)
            windows = self.plan(stacked, noise).cpu().numpy()
            self.window = windows if batched else windows[0]
            executed = windows[:, self.config.executed]
            self._queue = list(executed.swapaxes(0, 1))
        action = self._queue.pop(0)
        return action if batched else action[0]

    @torch.inference_mode()
    def plan(self, observation: Mapping[str, Tensor], noise: Tensor) -> Tensor:
        """Windows `(b, l, d)` from stacked observations `(b, history, ...)` and standard normal noise `(b, l, d)`."""
        on_device = {name: x.to(self.device) for name, x in observation.items()}
        return self.network(on_device, noise.to(self.device))

    def _frame(self, observation: Mapping[str, np.ndarray | Tensor]) -> tuple[dict[str, Tensor], bool]:
        """The observation as a batch of tensors, and whether it came as one."""
        c = self.config
        wanted = {"state": (c.state_dim, 1), "point_cloud": (c.point_channels, 2), "image": (3 * bool(c.image_crop), 3)}
        frame, batched = {}, False
        for name, (size, dims) in wanted.items():
            if not size:
                continue
            if name not in observation:
                raise ValueError(f"the observation has no {name}; the policy needs it")
            x = torch.as_tensor(np.asarray(observation[name]))
            if x.shape[-1] != size:
                raise ValueError(f"{name} has {x.shape[-1]} numbers, the policy was trained on {size}")
            batched = x.ndim > dims
            x = x if batched else x[None]
            frame[name] = x if name == "image" else x.float()
        return frame, batched

    # -------------------------------------------------------------------------------------------- files

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` (weights and normaliser) into a folder."""
        save_pretrained(self.network, folder)

    @classmethod
    def from_pretrained(cls, name: str | Path, seed: int = 0, device: str | torch.device = "cpu") -> "RolloutPolicy":
        """Read what `save_pretrained` wrote, from a folder or a repository of the Hugging Face hub.

        Raises:
            FileNotFoundError: If the folder has no policy in it.
            ValueError: If the files are of another kind or a newer version.
        """
        return cls(load_pretrained(name), seed, device)


def save_pretrained(network: PolicyNetwork, folder: str | Path) -> None:
    """Write a policy as `config.json` and `model.safetensors`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"kind": "focal_policy", "format_version": FORMAT_VERSION, **asdict(network.config)}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = {name: x.detach().cpu().contiguous() for name, x in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors")


def load_pretrained(name: str | Path) -> PolicyNetwork:
    """Read a policy from a folder, or from a repository of the Hugging Face hub.

    Raises:
        FileNotFoundError: If the folder has no policy in it.
        ValueError: If the files are of another kind or a newer version.
    """
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or len(folder.parts) != 2:
            raise FileNotFoundError(f"{folder} is no folder with a policy, and no hub id of the form owner/name")
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(name), allow_patterns=["config.json", "model.safetensors"]))
    for file in ("config.json", "model.safetensors"):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file} does not exist: save_pretrained writes it")
    config = json.loads((folder / "config.json").read_text())
    if config.pop("kind", None) != "focal_policy":
        raise ValueError(f"{folder / 'config.json'} does not describe a FocalPolicy")
    if (version := config.pop("format_version")) > FORMAT_VERSION:
        raise ValueError(f"{folder} has format version {version}, this release reads up to {FORMAT_VERSION}")
    network = PolicyNetwork(PolicyConfig(**config | {"widths": tuple(config["widths"])}))
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network
