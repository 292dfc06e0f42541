"""The policy: normaliser, encoder and velocity network in one module.

Axes: b batch, t observation steps, l window steps, d action dimensions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .encoders import ObservationEncoder, check_crop
from .network import ConditionalUnet1d, check_unet
from .normalizer import Normalizer

TIME_SCALE = 99.0
"""Flow time in [0, 1] is multiplied by this before its embedding, as released."""


@dataclass
class PolicyConfig:
    """Sizes of a policy; the defaults are the paper's Meta-World network.

    Attributes:
        action_dim: Dimensions of an action.
        state_dim: Size of the state; 0 for none.
        point_channels: Numbers per point, 3 or 6; 0 for no point cloud.
        image_crop: Side of the image crop in pixels, above 32; 0 for no image.
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
        eps: Flow time at which inference starts, in [0, 1).

    Raises:
        ValueError: If a size is out of range, or the executed slice does not fit into the window.
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

    def __post_init__(self) -> None:
        least = {"action_dim": 1, "action_steps": 1, "history": 1, "inference_steps": 1, "state_dim": 0}
        least |= {"point_channels": 0, "point_features": 1, "state_features": 1, "image_features": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} {getattr(self, name)} must be at least {low}")
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps {self.eps} is outside [0, 1): it is the flow time at which inference starts")
        if self.image_crop:
            check_crop(self.image_crop)
        check_unet(self.widths, self.time_features, self.kernel_size, self.groups)
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
    def observed(self) -> list[str]:
        """The kinds of observation that the policy needs."""
        sizes = {"state": self.state_dim, "point_cloud": self.point_channels, "image": self.image_crop}
        return [name for name, size in sizes.items() if size]

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
        dtype = next(self.model.parameters()).dtype  # float32, unless the trainer's precision is another
        return self.model(x.to(dtype), (TIME_SCALE * s).to(dtype), condition.to(dtype))

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
