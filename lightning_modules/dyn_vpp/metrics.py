"""How good, sharp and diverse predicted videos are.

Pictures are `[... 3 h w]` in [0, 1], latents `[... c h w]`; results keep the leading axes. Frame 0 of a
prediction is the given one: report it apart. A prediction that copies frame 0 (`target[:, :1].expand_as(target)`)
is the baseline to beat.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure


def psnr(prediction: Tensor, target: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each picture in dB, `[... 3 h w] -> [...]`; infinite for equal pictures."""
    ours, theirs = (x.flatten(0, -4).float() for x in (prediction, target))
    values = peak_signal_noise_ratio(ours, theirs, data_range=1.0, reduction="none", dim=(1, 2, 3))
    return values.unflatten(0, prediction.shape[:-3])


def ssim(prediction: Tensor, target: Tensor) -> Tensor:
    """Structural similarity of each picture (Gaussian window of 11 pixels), `[... 3 h w] -> [...]`, at most 1."""
    ours, theirs = (x.flatten(0, -4).float() for x in (prediction, target))
    values = structural_similarity_index_measure(ours, theirs, data_range=1.0, reduction="none")
    return values.unflatten(0, prediction.shape[:-3])  # type: ignore[union-attr]


class PerceptualDistance(nn.Module):
    """LPIPS (arXiv 1801.03924) of pairs of pictures, at least 0.

    Args:
        network: "alex", "vgg" or "squeeze"; torchvision reads or downloads its ImageNet weights.
        rows: Most pairs in one pass.

    Raises:
        FileNotFoundError: If the weights are neither there nor to be had.
    """

    def __init__(self, network: Literal["alex", "vgg", "squeeze"], rows: int = 64) -> None:
        super().__init__()
        from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

        try:
            self.network = LearnedPerceptualImagePatchSimilarity(net_type=network).net.eval()
        except OSError as error:
            raise FileNotFoundError(
                f"LPIPS needs torchvision's {network} weights, which cannot be loaded: {error}"
            ) from None
        self.rows = rows

    @torch.no_grad()
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Distances of two batches of pictures in [-1, 1], `[n 3 h w]` twice -> `[n]`."""
        self.network.to(first.device)  # it is no part of the module that Lightning moves
        pairs = zip(first.split(self.rows), second.split(self.rows), strict=True)
        return torch.cat([self.network(a, b).flatten() for a, b in pairs])


def lucas_kanade(
    first: Tensor, second: Tensor, levels: int = 3, iterations: int = 5, window: int = 9, damping: float = 1e-4
) -> Tensor:
    """Optical flow by iterated least squares in windows, coarse to fine (Lucas and Kanade, IJCAI 1981).

    Args:
        first: Pictures, `[n c h w]` in [0, 1].
        second: The pictures after them.
        levels: Halvings of the picture, plus one; motions up to about 3 * 2^(levels - 1) pixels are found.
        iterations: Warps per level.
        window: Odd width of the windows in pixels.
        damping: Added to the diagonal (squared intensity per pixel): keeps the flow at 0 where there is no texture.

    Returns:
        `[n 2 h w]`, in pixels to the right and down: what is at p in `first` is at p + flow(p) in `second`.
    """
    pyramid = [(first.mean(1, keepdim=True).float(), second.mean(1, keepdim=True).float())]
    for _ in range(levels - 1):
        pyramid.append((F.avg_pool2d(pyramid[-1][0], 2), F.avg_pool2d(pyramid[-1][1], 2)))

    def smooth(x: Tensor, width: int = window) -> Tensor:
        return F.avg_pool2d(x, width, stride=1, padding=width // 2, count_include_pad=False)

    flow = torch.zeros_like(pyramid[-1][0]).expand(-1, 2, -1, -1)
    for before, after in reversed(pyramid):
        h, w = before.shape[-2:]
        stretch = torch.tensor([w / flow.shape[-1], h / flow.shape[-2]], device=flow.device).view(1, 2, 1, 1)
        flow = F.interpolate(flow, (h, w), mode="bilinear", align_corners=False) * stretch
        rows, columns = torch.meshgrid(
            torch.arange(h, device=flow.device), torch.arange(w, device=flow.device), indexing="ij"
        )
        here = torch.stack([columns, rows]).float()
        extent = torch.tensor([w, h], device=flow.device).view(1, 2, 1, 1)
        padded = F.pad(before, (1, 1, 1, 1), mode="replicate")
        gx = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2
        gy = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2
        xx, xy, yy = smooth(gx * gx) + damping, smooth(gx * gy), smooth(gy * gy) + damping
        determinant = xx * yy - xy * xy
        for _ in range(iterations):
            grid = ((2 * (here + flow) + 1) / extent - 1).permute(0, 2, 3, 1)  # pixel centres to [-1, 1]
            moved = F.grid_sample(after, grid, padding_mode="border", align_corners=False)
            bx, by = smooth(gx * (before - moved)), smooth(gy * (before - moved))
            update = torch.cat([yy * bx - xy * by, xx * by - xy * bx], dim=1) / determinant
            flow = flow + update.clamp(-1, 1)  # linearisation holds for about a pixel
            flow = smooth(flow, 5)  # else the iteration amplifies waves for which the window's spectrum is negative
    return flow


def flow_error(prediction: Tensor, target: Tensor, flow: Callable[[Tensor, Tensor], Tensor] = lucas_kanade) -> Tensor:
    """Mean distance between the flow of the prediction and that of the expert's video, in pixels.

    Args:
        prediction: `[n f 3 h w]` in [0, 1].
        target: Same shape.
        flow: Optical flow of picture pairs, `([m 3 h w], [m 3 h w]) -> [m 2 h w]`; torchvision's RAFT fits where its
            weights exist.

    Returns:
        End-point error of each pair of successive frames, `[n f-1]`.
    """
    n, f = prediction.shape[:2]
    ours, theirs = (flow(x[:, :-1].flatten(0, 1), x[:, 1:].flatten(0, 1)) for x in (prediction, target))
    return torch.linalg.vector_norm(ours - theirs, dim=1).mean((-2, -1)).view(n, f - 1)


def high_frequency_energy(x: Tensor, cutoff: float = 0.5) -> Tensor:
    """Mean square of what is left of each frame above a spatial frequency: falls when a prediction is blurred.

    Args:
        x: Latents or pictures, `[... c h w]`.
        cutoff: Radius in the frequency plane, as a share of the Nyquist frequency.

    Returns:
        `[...]`, in squared units of `x`.
    """
    h, w = x.shape[-2:]
    radius = torch.hypot(torch.fft.fftfreq(h)[:, None], torch.fft.fftfreq(w)[None]) / 0.5
    power = torch.fft.fft2(x.float(), norm="ortho").abs().square()
    return (power * (radius > cutoff).to(power)).mean((-3, -2, -1))


def sharpness(x: Tensor, expert: Tensor) -> Tensor:
    """High-frequency energy of predicted frames over that of the expert's, the given frame left out.

    Args:
        x: Samples `[b g f c h w]`.
        expert: `[b f c h w]`.

    Returns:
        `[b]`: below 1 where the prediction is blurred.
    """
    ours = high_frequency_energy(x)[..., 1:].mean((1, 2))
    return ours / high_frequency_energy(expert)[..., 1:].mean(1).clamp(min=1e-12)


def group_diversity(latents: Tensor) -> Tensor:
    """Mean absolute difference between two samples of a group, `[b g f c h w] -> [b f]`, g >= 2."""
    g = latents.shape[1]
    turns = [(latents - latents.roll(k, 1)).abs().mean((1, 3, 4, 5)) for k in range(1, g // 2 + 1)]
    if g % 2 == 0:
        turns[-1] = turns[-1] / 2  # half a turn meets every pair twice
    return torch.stack(turns).sum(0) * 2 / (g - 1)


def colour_centroid(frames: Tensor, colour: Sequence[float], tolerance: float = 0.15, area: float = 1.0) -> Tensor:
    """Centre of what has a given hue: where an object is, when the picture gives every object its own colour.

    A pixel counts by `exp(-(sin(angle to the colour) / tolerance)^2)`, whatever its brightness (shading), unless it is
    nearly black.

    Args:
        frames: `[... 3 h w]` in [0, 1].
        colour: The object's red, green, blue.
        tolerance: Width in hue; 0.15 is about 9 degrees.
        area: Fewest pixels that count as the object being in the picture.

    Returns:
        `[... 2]` in pixels (right, down), the centre of the first pixel being (0, 0); NaN where there is no object.
    """
    frames = frames.float()
    h, w = frames.shape[-2:]
    direction = F.normalize(torch.tensor(colour, dtype=torch.float32, device=frames.device), dim=0)
    along = torch.einsum("...chw,c->...hw", frames, direction)
    brightness = torch.linalg.vector_norm(frames, dim=-3)
    sine = (1 - (along / brightness.clamp(min=1e-6)).clamp(max=1).square()).sqrt()
    weight = torch.exp(-(sine / tolerance).square()) * (brightness > 0.1)
    mass = weight.sum((-2, -1))
    right = (weight.sum(-2) * torch.arange(w, device=frames.device)).sum(-1)
    down = (weight.sum(-1) * torch.arange(h, device=frames.device)).sum(-1)
    centre = torch.stack([right, down], dim=-1) / mass[..., None]
    return torch.where(mass[..., None] >= area, centre, torch.nan)


def centroid_error(prediction: Tensor, position: Tensor, colour: Sequence[float], tolerance: float = 0.15) -> Tensor:
    """Distance between an object in predicted frames and where it really is, in pixels.

    Args:
        prediction: `[... 3 h w]` in [0, 1].
        position: True pixel position (right, down), `[... 2]`, from the simulator or from `colour_centroid` of the
            expert's frames.
        colour: The object's colour.
        tolerance: See `colour_centroid`.

    Returns:
        `[...]`; NaN where the object is missing in either (average with `nanmean` and report the share).
    """
    return torch.linalg.vector_norm(colour_centroid(prediction, colour, tolerance) - position, dim=-1)
