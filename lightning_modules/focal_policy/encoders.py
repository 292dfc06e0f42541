"""Observation encoders of FocalPolicy: point cloud, state and image, joined into one condition vector.

The point and state branches are those of the released code (its tensor names are kept); the image branch is ours, as
the released code has none.

Axes: b batch, t observation steps, n points, c channels.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torchvision.models import resnet18


class PointEncoder(nn.Module):
    """Permutation-invariant encoder of a point cloud: an MLP per point, the maximum over points, a projection.

    Only points that reach the maximum of some channel receive a gradient (the critical points of PointNet, Qi et al.
    2017). In training on a CPU they are found without a graph and passed again, which gives the same output and the
    same gradients for less work.

    Args:
        channels: Numbers per point: 3 (x y z), or 6 with colour. With colour the MLP has one more layer.
        features: Size of the output.
        layer_norm: Whether the MLP normalises its layers.
        final_norm: "layernorm" to normalise the output, else "none".

    Shapes:
        `(..., n, channels)` -> `(..., features)`.
    """

    def __init__(self, channels: int = 3, features: int = 64, layer_norm: bool = True, final_norm: str = "layernorm"):
        super().__init__()
        layers: list[nn.Module] = []
        widths = [channels, 64, 128, 256]
        for i, o in pairwise(widths):
            layers += [nn.Linear(i, o), nn.LayerNorm(o) if layer_norm else nn.Identity(), nn.ReLU()]
        if channels > 3:
            layers.append(nn.Linear(256, 512))
            widths.append(512)
        self.mlp = nn.Sequential(*layers)
        project = nn.Linear(widths[-1], features)
        self.final_projection = nn.Sequential(project, nn.LayerNorm(features)) if final_norm == "layernorm" else project

    def forward(self, points: Tensor) -> Tensor:
        """Feature of each cloud."""
        if torch.is_grad_enabled() and points.device.type == "cpu":
            points = self._critical(points)
        return self.final_projection(self.mlp(points).amax(dim=-2))

    @torch.no_grad()
    def _critical(self, points: Tensor) -> Tensor:
        """The points of each cloud that reach a maximum, `(..., k, channels)`; where a cloud has fewer, others too."""
        reaches = torch.zeros(points.shape[:-1]).scatter_(-1, self.mlp(points).argmax(dim=-2), 1.0)
        k = int(reaches.sum(-1).max())
        return points.take_along_dim(reaches.topk(k, dim=-1).indices[..., None], dim=-2)


def check_crop(crop: int) -> None:
    """Refuse crops of which ResNet-18, which divides a side by 32, leaves one place: soft-arg-max finds nothing there.

    Raises:
        ValueError: Naming the crop.
    """
    if crop <= 32:
        raise ValueError(f"image_crop {crop} must be at least 33, better 64: ResNet-18 sees a smaller one as one point")


class ImageEncoder(nn.Module):
    """ResNet-18 with group normalisation on a crop, then spatial soft-arg-max over 32 channels, to `features` numbers.

    Args:
        features: Size of the output.
        crop: Side of the square crop in pixels, above 32: at a given corner in training, in the centre otherwise.

    Shapes:
        images `(..., h, w, 3)` uint8, with `h, w >= crop`; corner `(..., 2)` in [0, 1) -> `(..., features)`.

    Raises:
        ValueError: If the crop is too small to tell where anything is.
    """

    def __init__(self, features: int = 64, crop: int = 76):
        super().__init__()
        check_crop(crop)
        self.crop = crop
        net = resnet18(norm_layer=lambda channels: nn.GroupNorm(channels // 16, channels))
        self.backbone = nn.Sequential(*list(net.children())[:-2])
        self.keypoints = nn.Conv2d(512, 32, 1)
        self.project = nn.Linear(64, features)

    def forward(self, image: Tensor, corner: Tensor | None = None) -> Tensor:
        """Feature of each image; `corner` places the crop as a fraction of the free space (rows, columns)."""
        *lead, height, width, _ = image.shape
        if min(height, width) < self.crop:
            raise ValueError(
                f"images of {height}x{width} pixels are smaller than the crop of {self.crop}: lower model.image_crop"
            )
        image = image.reshape(-1, height, width, 3)
        free = torch.tensor([height - self.crop + 1, width - self.crop + 1], device=image.device)
        centre = ((free - 1) // 2).expand(len(image), 2)
        top_left = centre if corner is None else (corner.reshape(-1, 2) * free).long()
        span = torch.arange(self.crop, device=image.device)
        rows, columns = (top_left[:, axis, None] + span for axis in (0, 1))  # b crop
        batch = torch.arange(len(image), device=image.device)[:, None, None]
        patch = image[batch, rows[:, :, None], columns[:, None, :]]  # b crop crop 3
        x = patch.permute(0, 3, 1, 2).to(self.project.weight.dtype) / 127.5 - 1
        maps = self.keypoints(self.backbone(x))  # b c h w
        weight = maps.flatten(2).softmax(-1).view_as(maps)
        ys, xs = (torch.linspace(-1, 1, size, device=x.device, dtype=x.dtype) for size in maps.shape[2:])
        points = torch.cat([(weight.sum(3) * ys).sum(-1), (weight.sum(2) * xs).sum(-1)], dim=-1)  # b 64
        return self.project(points).reshape(*lead, -1)


class ObservationEncoder(nn.Module):
    """Condition vector of the last `history` observations: each kind encoded per step, joined, flattened over steps.

    Args:
        history: Observation steps.
        state_dim: Size of the state (proprioception); 0 for none.
        point_channels: Numbers per point, 3 or 6; 0 for no point cloud.
        image_crop: Side in pixels of the crop that the image encoder sees; 0 for no image.
        point_features: Output of the point encoder.
        state_features: Hidden and output size of the state encoder.
        image_features: Output of the image encoder.

    Shapes:
        A dict with, as configured, `point_cloud` `(b, t, n, point_channels)`, `state` `(b, t, state_dim)` (both
        normalised floats) and `image` `(b, t, h, w, 3)` uint8 -> `(b, features)`. Only the first `history` steps are
        read.

    Raises:
        ValueError: If no kind of observation is configured.
    """

    def __init__(
        self,
        history: int = 2,
        state_dim: int = 9,
        point_channels: int = 3,
        image_crop: int = 0,
        point_features: int = 64,
        state_features: int = 64,
        image_features: int = 64,
    ):
        super().__init__()
        if not (state_dim or point_channels or image_crop):
            raise ValueError("the policy observes nothing: set state_dim, point_channels or image_crop")
        self.history = history
        self.extractor = PointEncoder(point_channels, point_features) if point_channels else None
        self.image_encoder = ImageEncoder(image_features, image_crop) if image_crop else None
        self.state_mlp = None
        if state_dim:
            self.state_mlp = nn.Sequential(
                nn.Linear(state_dim, state_features), nn.ReLU(), nn.Linear(state_features, state_features)
            )
        per_step = point_features * bool(point_channels) + image_features * bool(image_crop)
        self.features = history * (per_step + state_features * bool(state_dim))

    def forward(self, observation: dict[str, Tensor], corner: Tensor | None = None) -> Tensor:
        """Condition `(b, features)`; `corner` `(b, 2)` in [0, 1) places the image crop of every step of a window."""
        parts = []
        if self.extractor is not None:
            parts.append(self.extractor(observation["point_cloud"][:, : self.history]))
        if self.image_encoder is not None:
            image = observation["image"][:, : self.history]
            corners = None if corner is None else corner[:, None].expand(-1, self.history, -1)
            parts.append(self.image_encoder(image, corners))
        if self.state_mlp is not None:
            parts.append(self.state_mlp(observation["state"][:, : self.history]))
        # Joined in one go: a flattened view as output would trouble FSDP2's hooks.
        return torch.cat([part[:, t] for t in range(self.history) for part in parts], dim=-1)
