"""A trained policy that a robot loop or a Gymnasium loop can call, and its files. Needs no Lightning."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_modules.hub import fill, instantiate, read_config, read_state, write_folder

from .policy import PolicyConfig, PolicyNetwork

FORMAT = 1


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
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._queue: list[np.ndarray] = []
        self.window: np.ndarray | None = None
        """The last planned window `(l, d)`, or `(b, l, d)` for a batch."""

    def act(self, observation: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
        """The action of this control step; a new window is planned every `action_steps` calls.

        Args:
            observation: `state` `(state_dim,)`, `point_cloud` `(n, channels)` floats, `image` `(h, w, 3)` uint8, as
                the policy needs. All may have the same leading batch axis, for several robots in step. They are
                copied.

        Returns:
            Action `(d,)`, or `(b, d)` for a batch, in its own units, float32, not clipped.

        Raises:
            ValueError: If a kind of observation is missing, has another shape or type than needed or than at the last
                step, or is not finite. Nothing of it is remembered.
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
        if not isinstance(observation, Mapping):
            raise ValueError(f"the observation is a {type(observation).__name__}: give a dict of arrays by name")
        arrays = {name: _array(observation, name) for name in c.observed}
        crop = (c.image_crop, math.inf)
        needed: dict[str, tuple[list[tuple[float, float]], str]] = {
            "state": ([(c.state_dim, c.state_dim)], f"({c.state_dim},) numbers"),
            "point_cloud": ([(1, math.inf), (c.point_channels,) * 2], f"(n, {c.point_channels}) numbers"),
            "image": ([crop, crop, (3, 3)], f"(h, w, 3) uint8, h and w at least {c.image_crop}"),
        }
        batch = {}
        for name, x in arrays.items():
            axes, words = needed[name]
            lead, shape = x.shape[: -len(axes)], x.shape[-len(axes) :]
            fits = len(lead) <= 1 and 0 not in lead and len(shape) == len(axes)
            fits &= all(low <= size <= high for size, (low, high) in zip(shape, axes, strict=False))
            if not fits or (x.dtype != np.uint8 if name == "image" else x.dtype.kind not in "fiub"):
                raise ValueError(
                    f"{name} has the shape {x.shape} of {x.dtype}; needed is {words}, with or without a batch axis"
                )
            if not np.isfinite(x).all():
                raise ValueError(f"{name} is not finite")
            last = self._shapes.get(name, x.shape)
            if x.shape != last:
                raise ValueError(f"{name} has the shape {x.shape}, at the last step {last}: call reset() in between")
            batch[name] = list(lead)
        if len({tuple(lead) for lead in batch.values()}) > 1:
            found = ", ".join(f"{name} has {lead}" for name, lead in batch.items())
            raise ValueError(f"the observation is not one batch: {found}")
        self._shapes = {name: x.shape for name, x in arrays.items()}
        batched = bool(batch[c.observed[0]])
        tensors = {name: torch.from_numpy(x if batched else x[None]) for name, x in arrays.items()}
        return {name: x if name == "image" else x.float() for name, x in tensors.items()}, batched

    # -------------------------------------------------------------------------------------------- files

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` (weights and normaliser) into a folder."""
        save_pretrained(self.network, folder)

    @classmethod
    def from_pretrained(cls, source: str | Path, seed: int = 0, device: str | torch.device = "cpu") -> "RolloutPolicy":
        """Read what `save_pretrained` wrote, from a folder or a repository of the Hugging Face hub.

        Raises:
            FileNotFoundError: If there is no such folder and it cannot be downloaded.
            ValueError: If the files are of another class or a newer version.
        """
        return cls(load_pretrained(source), seed, device)


def _array(observation: Mapping[str, Any], name: str) -> np.ndarray:
    """A copy of one entry: what it came from may be overwritten by the next step."""
    if name not in observation:
        raise ValueError(f"the observation has no {name}; the policy needs it")
    value = observation[name]
    try:
        return np.array(value.detach().cpu() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no array of numbers: {error}") from None


def save_pretrained(network: PolicyNetwork, folder: str | Path) -> None:
    """Write a policy as `config.json`, `model.safetensors` and a model card."""
    from lightning_modules.focal_policy.module import FocalPolicy

    write_folder(folder, FocalPolicy, FORMAT, asdict(network.config), network.state_dict())


def load_pretrained(source: str | Path) -> PolicyNetwork:
    """Read a policy from a folder, or from a repository of the Hugging Face hub.

    Raises:
        FileNotFoundError: If there is no such folder and it cannot be downloaded.
        ValueError: If the files are of another class or a newer version.
    """
    folder, config = read_config(source, "FocalPolicy", FORMAT)
    sizes = config | {"widths": tuple(config.get("widths", ()))}
    network = PolicyNetwork(instantiate(PolicyConfig, sizes, folder))
    fill(network, read_state(folder), folder)
    return network
