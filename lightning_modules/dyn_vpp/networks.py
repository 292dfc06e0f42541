"""The networks of Dyn-VPP: video U-Net and autoencoder from diffusers, first-step features, video former, action head.

Axes: n videos (or b contexts), f frames, c h w one frame's latent, l d text tokens, p image positions, t steps of
an action chunk.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
from torch import Tensor, nn

SVD_UNET = {
    "sample_size": 96,
    "in_channels": 8,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal",) * 3 + ("DownBlockSpatioTemporal",),
    "up_block_types": ("UpBlockSpatioTemporal",) + ("CrossAttnUpBlockSpatioTemporal",) * 3,
    "block_out_channels": (320, 640, 1280, 1280),
    "num_attention_heads": (5, 10, 20, 20),
    "layers_per_block": 2,
    "transformer_layers_per_block": 1,
    "cross_attention_dim": 1024,
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 768,
    "num_frames": 25,
}
"""Stable Video Diffusion image-to-video (arXiv 2311.15127): 1,524,623,082 parameters."""

SMALL_UNET = {
    "sample_size": 8,
    "in_channels": 8,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    "block_out_channels": (32, 64),  # multiples of 32: the group norms have 32 groups
    "num_attention_heads": (2, 4),
    "layers_per_block": 1,
    "transformer_layers_per_block": 1,
    "cross_attention_dim": 32,
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 96,
    "num_frames": 8,
}
"""Two levels, 1,308,432 parameters: trains on a CPU."""

SVD_AUTOENCODER = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 768,
    "scaling_factor": 0.18215,
}
"""The autoencoder of Stable Video Diffusion: 97,742,847 parameters, 8 times smaller pictures."""

SMALL_AUTOENCODER = {
    "block_out_channels": (32, 64, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "layers_per_block": 1,
    "latent_channels": 4,
    "sample_size": 64,
    "scaling_factor": 1.0,  # to be set to 1 / std of its latents once it is trained
}
"""1,017,944 parameters, 4 times smaller pictures."""


def _on_one_device(module: nn.Module) -> nn.Module:
    """Diffusers builds its mixing weights on the CPU even inside `with torch.device("meta")`: move them along."""
    return module.to(next(module.parameters()).device)


def video_unet(config: dict[str, Any]) -> UNetSpatioTemporalConditionModel:
    """Build the video U-Net (on the meta device inside `with torch.device("meta")`).

    Args:
        config: Arguments of diffusers' class, such as `SVD_UNET` or `SMALL_UNET`.

    Raises:
        ValueError: If the parts of the configuration do not fit together.
    """
    if config["in_channels"] != 2 * config["out_channels"]:
        raise ValueError(
            f"the U-Net sees the noisy and the first frame's latent: in_channels must be 2 * out_channels, "
            f"got {config['in_channels']} and {config['out_channels']}"
        )
    if config["projection_class_embeddings_input_dim"] != 3 * config["addition_time_embed_dim"]:
        raise ValueError(
            "projection_class_embeddings_input_dim must be 3 * addition_time_embed_dim (fps, motion, noise), "
            f"got {config['projection_class_embeddings_input_dim']} and {config['addition_time_embed_dim']}"
        )
    return _on_one_device(UNetSpatioTemporalConditionModel(**config))


def video_autoencoder(config: dict[str, Any]) -> AutoencoderKLTemporalDecoder:
    """Build the autoencoder from arguments of diffusers' class, such as `SVD_AUTOENCODER` or `SMALL_AUTOENCODER`."""
    network: Any = _on_one_device(AutoencoderKLTemporalDecoder(**config))
    if network.config.layers_per_block == 1:  # diffusers' decoder then builds an attention that it never calls
        network.decoder.mid_block.attentions.requires_grad_(False)
    return network


def check_side(video: Tensor, multiple: int) -> None:
    """Refuse pictures `[... h w]` whose sides are no multiples of what the networks halve them by, or that are none.

    Raises:
        ValueError: Naming the size.
    """
    for side in video.shape[-2:]:
        if not side:
            raise ValueError("the clips are latents computed beforehand: an autoencoder needs the videos themselves")
        if side % multiple:
            raise ValueError(f"pictures of {side} pixels do not fit: data.size must be a multiple of {multiple}")


def check_fit(unet: UNetSpatioTemporalConditionModel, latent_channels: int, text_width: int) -> None:
    """Refuse a U-Net whose channels do not match the latents or the text.

    Args:
        unet: The network, usually from a checkpoint.
        latent_channels: Channels of one frame's latent.
        text_width: Width of a text token.

    Raises:
        ValueError: Naming the two numbers that differ.
    """
    if unet.config.out_channels != latent_channels:
        raise ValueError(
            f"the U-Net makes latents of {unet.config.out_channels} channels, "
            f"but the autoencoder's have {latent_channels}"
        )
    widths = unet.config.cross_attention_dim
    if set(widths if isinstance(widths, (tuple, list)) else [widths]) != {text_width}:
        raise ValueError(f"the U-Net reads text tokens of width {widths}, but the text encoder's have {text_width}")


def encode(autoencoder: AutoencoderKLTemporalDecoder, video: Tensor) -> Tensor:
    """Scaled latents of videos, `[n f 3 h w]` in [-1, 1] -> `[n f c h' w']` of about unit variance.

    The mode of the posterior, not a sample: the released code stores samples, whose noise is an error floor in the
    reward.
    """
    latents = autoencoder.encode(video.flatten(0, 1).to(autoencoder.dtype)).latent_dist.mode()
    return (latents * autoencoder.config.scaling_factor).unflatten(0, video.shape[:2])


def decode(autoencoder: AutoencoderKLTemporalDecoder, latents: Tensor) -> Tensor:
    """Videos from scaled latents, `[n f c h' w']` -> `[n f 3 h w]`, about in [-1, 1] (not clamped)."""
    flat = latents.flatten(0, 1).to(autoencoder.dtype) / autoencoder.config.scaling_factor
    return autoencoder.decode(flat, num_frames=latents.shape[1]).sample.unflatten(0, latents.shape[:2])


class Condition(NamedTuple):
    """What a video is generated from.

    Attributes:
        image: Latent of the first frame divided by the autoencoder's scaling factor (as Stable Video Diffusion
            expects), `[b 1 c h w]` or repeated over frames `[b f c h w]`.
        text: Text tokens, `[b l d]`; zeros mean no text.
        time_ids: Frames per second, motion bucket (127), noise on the image (0), `[b 3]` float.
    """

    image: Tensor
    text: Tensor
    time_ids: Tensor

    def rows(self, index: Tensor | slice) -> "Condition":
        """The conditions of some contexts."""
        return Condition(*(field[index] for field in self))

    def repeat(self, times: int) -> "Condition":
        """Every context's condition `times` times in succession."""
        return Condition(*(field.repeat_interleave(times, 0) for field in self))


def guidance_scales(frames: int, maximum: float) -> Tensor:
    """Guidance scale of every frame, linear from 1 at the given first frame to `maximum` at the last, `[f]`."""
    return torch.linspace(1, maximum, frames)


def predict_velocity(
    unet: UNetSpatioTemporalConditionModel,
    x: Tensor,
    sigma: Tensor | float,
    condition: Condition,
    guidance: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """The U-Net's output v, with guidance where it is asked for.

    `v = v_0 + w_f (v_text - v_0)`, v_0 with zeros for text and the same image; the network sees `x / sqrt(sigma^2 + 1)`
    beside the image latent, and `ln(sigma) / 4` as time.

    Args:
        unet: The video U-Net.
        x: Noisy latents, `[n f c h w]`; n is a multiple of the number of contexts, the videos of one context in
            succession.
        sigma: Noise level, one number or `[n]`.
        condition: Of the contexts.
        guidance: Scale w of every frame, `[f]`; `None` for no guidance.
        rows: Most videos in one pass of the network; `None` for all.

    Returns:
        `[n f c h w]` in the type of `x` (the network computes in its own).
    """
    condition = condition.repeat(len(x) // len(condition.text))
    sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).expand(len(x))
    scaled = x / (sigma.square() + 1).sqrt().view(-1, 1, 1, 1, 1)
    inputs = torch.cat([scaled, condition.image.expand(-1, x.shape[1], -1, -1, -1).to(x.dtype)], dim=2)
    text, times, ids = condition.text, sigma.log() / 4, condition.time_ids
    if guidance is not None:  # both branches in one pass
        inputs, times, ids = (torch.cat([part, part]) for part in (inputs, times, ids))
        text = torch.cat([torch.zeros_like(text), text])
    size = rows or len(inputs)
    parts = zip(*(part.split(size) for part in (inputs.to(unet.dtype), times, text.to(unet.dtype), ids)), strict=True)
    v = torch.cat([unet(*part, return_dict=False)[0] for part in parts]).to(x.dtype)
    if guidance is not None:
        without, with_text = v.chunk(2)
        v = without + guidance.to(x).view(-1, 1, 1, 1) * (with_text - without)
    return v


def clean_prediction(x: Tensor, v: Tensor, sigma: Tensor | float) -> Tensor:
    """Predicted clean latents, `x / (s^2 + 1) - s / sqrt(s^2 + 1) v` (EDM, arXiv 2206.00364, data of unit variance).

    Args:
        x: Noisy latents, `[n f c h w]`.
        v: The network's output, same shape.
        sigma: One number or `[n]`.
    """
    sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device).view(-1, 1, 1, 1, 1)
    return x / (sigma.square() + 1) - sigma / (sigma.square() + 1).sqrt() * v


def predict_clean(
    unet: UNetSpatioTemporalConditionModel,
    x: Tensor,
    sigma: Tensor | float,
    condition: Condition,
    guidance: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """Predicted clean latents of a conditioned U-Net: the denoiser of the sampler; see `predict_velocity`."""
    return clean_prediction(x, predict_velocity(unet, x, sigma, condition, guidance, rows), sigma)


class _Seen(Exception):
    """Leaves the U-Net's forward once the wanted block has run."""


def first_step_features(
    unet: UNetSpatioTemporalConditionModel,
    start: Tensor,
    sigma: float,
    condition: Condition,
    blocks: Sequence[int] = (0, 1),
) -> Tensor:
    """What the U-Net computes on the way up at the first denoising step: the input of the policy.

    One pass without guidance, left as soon as the last wanted block has run (under FSDP2 the root's own few parameters
    therefore stay gathered until the next whole pass). Coarser maps are enlarged (nearest) to the
    size of the last one.

    Args:
        unet: The video U-Net.
        start: Standard normal noise, `[b f c h w]`.
        sigma: The sampler's largest noise level.
        condition: Of the same b contexts.
        blocks: Indices of up-blocks, rising.

    Returns:
        `[b f p d]`: p positions of the last block's map row by row, d the blocks' channels one after the other. With
        the published U-Net and 256-pixel videos `[b 16 256 2560]`.
    """
    maps: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        maps.append(output)
        if len(maps) == len(blocks):
            raise _Seen

    hooks = [unet.up_blocks[i].register_forward_hook(keep) for i in blocks]
    try:
        predict_velocity(unet, start * math.hypot(sigma, 1), sigma, condition)
    except _Seen:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    size = maps[-1].shape[-2:]
    stacked = torch.cat([F.interpolate(m, size=size, mode="nearest") for m in maps], dim=1)  # (b f) d h w
    return stacked.flatten(2).transpose(1, 2).unflatten(0, start.shape[:2]).to(start.dtype)


class Attention(nn.Module):
    """Multi-head attention of `x [n q d]` to `context [n k d']`, without a mask.

    Args:
        width: Width d of the queries and the result.
        heads: Number of heads.
        head_width: Width of one head.
        context_width: Width d' of what is attended to; `None` for `width`.
        dropout: Of the attention weights.
    """

    def __init__(
        self, width: int, heads: int, head_width: int, context_width: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, heads * head_width, bias=False)
        self.key_value = nn.Linear(context_width or width, 2 * heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Attend, `[n q d], [n k d'] -> [n q d]`."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for part in (self.query(x), *self.key_value(context).chunk(2, -1))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


def _mlp(width: int, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))


class VideoFormerLayer(nn.Module):
    """Queries of each frame read its features, then each query looks over all frames, then an MLP; all residual."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.read = Attention(width, heads, head_width)
        self.time = Attention(width, heads, head_width)
        self.mlp = _mlp(width)

    def forward(self, queries: Tensor, features: Tensor) -> Tensor:
        """Update the queries, `[b f q d], [b f p d] -> [b f q d]`."""
        b = queries.shape[0]
        of_queries, of_features, of_time, of_mlp = self.norms
        normed = of_queries(queries)
        context = torch.cat([of_features(features), normed], dim=-2)  # keys: features and the queries themselves
        queries = queries + self.read(normed.flatten(0, 1), context.flatten(0, 1)).unflatten(0, (b, -1))
        over_time = of_time(queries).transpose(1, 2).flatten(0, 1)  # (b q) f d
        queries = queries + self.time(over_time, over_time).unflatten(0, (b, -1)).transpose(1, 2)
        return queries + self.mlp(of_mlp(queries))


class VideoFormer(nn.Module):
    """Condenses first-step features into a few tokens (Video Prediction Policy, arXiv 2412.14803).

    Args:
        features: Width of the features, 2560 with the published U-Net.
        frames: Number of frames f.
        queries: Learned queries per frame; 14 and 16 frames give the 224 tokens of the paper.
        width: Width of the tokens.
        layers: Number of layers.
        heads: Attention heads.
        head_width: Width of one head.
    """

    def __init__(
        self,
        features: int = 2560,
        frames: int = 16,
        queries: int = 14,
        width: int = 384,
        layers: int = 6,
        heads: int = 8,
        head_width: int = 64,
    ) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(features, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.time = nn.Parameter(0.02 * torch.randn(frames, 1, width))
        self.queries = nn.Parameter(0.02 * torch.randn(frames, queries, width))
        self.layers = nn.ModuleList(VideoFormerLayer(width, heads, head_width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Tensor) -> Tensor:
        """Condense, `[b f p features] -> [b (f queries) width]`; several cameras are joined along p."""
        features = self.project(features) + self.time
        queries = self.queries.expand(len(features), -1, -1, -1)
        for layer in self.layers:
            queries = layer(queries, features)
        return self.norm(queries).flatten(1, 2)


class ActionBlock(nn.Module):
    """Transformer block of the action head: self-attention, in the decoder cross-attention too, and an MLP.

    With `film` a vector scales, shifts and gates self-attention and MLP (adaptive layer norm starting at zero, as in
    diffusion transformers, arXiv 2212.09748).
    """

    def __init__(
        self, width: int, heads: int, attention: float, residual: float, mlp: float, decoder: bool = False
    ) -> None:
        super().__init__()
        self.norm_self, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = Attention(width, heads, width // heads, dropout=attention)
        self.mlp = _mlp(width, mlp)
        self.residual = nn.Dropout(residual)
        if decoder:
            self.norm_cross = nn.LayerNorm(width)
            self.cross_attention = Attention(width, heads, width // heads, dropout=attention)
            modulation = nn.Linear(width, 6 * width)
            nn.init.zeros_(modulation.weight)
            nn.init.zeros_(modulation.bias)
            self.film = nn.Sequential(nn.SiLU(), modulation)

    def forward(self, x: Tensor, context: Tensor | None = None, vector: Tensor | None = None) -> Tensor:
        """Apply the block, `[b t d]`, in the decoder with context `[b k d]` and vector `[b d]`."""
        if context is None:
            normed = self.norm_self(x)
            x = x + self.residual(self.self_attention(normed, normed))
            return x + self.mlp(self.norm_mlp(x))
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.film(vector)[:, None].chunk(6, -1)
        normed = self.norm_self(x) * (1 + scale) + shift
        x = x + gate * self.residual(self.self_attention(normed, normed))
        x = x + self.residual(self.cross_attention(self.norm_cross(x), context))
        return x + gate_mlp * self.mlp(self.norm_mlp(x) * (1 + scale_mlp) + shift_mlp)


class ActionEncoder(nn.Module):
    """Lets the goal and the tokens of the video former look at each other.

    Args:
        goal: Width of the goal vector, 512 for CLIP ViT-B/32 text.
        width: Width of the tokens.
        layers: Number of blocks.
        heads: Attention heads.
        dropout: Of attention weights, of residual branches, of the MLP.
    """

    def __init__(
        self,
        goal: int = 512,
        width: int = 384,
        layers: int = 4,
        heads: int = 8,
        dropout: tuple[float, float, float] = (0.3, 0.1, 0.05),
    ) -> None:
        super().__init__()
        self.goal = nn.Sequential(nn.Linear(goal, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.blocks = nn.ModuleList(ActionBlock(width, heads, *dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, goal: Tensor) -> Tensor:
        """Encode, `[b k width]` tokens and `[b goal]` -> `[b 1+k width]`."""
        x = torch.cat([self.goal(goal)[:, None], tokens], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class ActionDecoder(nn.Module):
    """Denoises a chunk of actions (EDM preconditioning, arXiv 2206.00364, Table 1).

    Args:
        actions: Width a of an action.
        horizon: Length t of a chunk.
        width: Width of the tokens.
        layers: Number of blocks.
        heads: Attention heads.
        dropout: Of attention weights, of residual branches, of the MLP.
        sigma_data: Standard deviation of the (normalised) actions.
    """

    def __init__(
        self,
        actions: int = 7,
        horizon: int = 10,
        width: int = 384,
        layers: int = 4,
        heads: int = 8,
        dropout: tuple[float, float, float] = (0.3, 0.1, 0.05),
        sigma_data: float = 0.5,
    ) -> None:
        super().__init__()
        self.sigma_data = sigma_data
        self.embed = nn.Linear(actions, width)
        self.position = nn.Parameter(0.02 * torch.randn(horizon, width))
        self.sigma = nn.Sequential(nn.Linear(width, 2 * width), nn.Mish(), nn.Linear(2 * width, width))
        self.blocks = nn.ModuleList(ActionBlock(width, heads, *dropout, decoder=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, actions)

    def forward(self, noisy: Tensor, sigma: Tensor, context: Tensor) -> Tensor:
        """Raw network output F, `[b t a]` noisy actions, `[b]` sigmas, `[b k width]` context -> `[b t a]`."""
        time = sigma.log() / 4
        half = self.position.shape[-1] // 2
        rates = torch.exp(-math.log(10_000) * torch.arange(half, device=time.device) / (half - 1))
        angles = (time[:, None] * rates).to(noisy.dtype)
        vector = self.sigma(torch.cat([angles.sin(), angles.cos()], dim=-1))
        x = self.embed(noisy / (sigma.square() + self.sigma_data**2).sqrt()[:, None, None]) + self.position
        for block in self.blocks:
            x = block(x, context, vector)
        return self.out(self.norm(x))


def _action_scales(sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor]:
    """c_skip and c_out, `[b 1 1]` each."""
    total = (sigma.square() + sigma_data**2)[:, None, None]
    return sigma_data**2 / total, sigma[:, None, None] * sigma_data / total.sqrt()


def action_loss(decoder: ActionDecoder, actions: Tensor, context: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    """Training loss of the action head, `mean (F - (a - c_skip a_noisy) / c_out)^2`.

    Args:
        decoder: The action head.
        actions: Expert chunks, `[b t a]`, standard deviation about `sigma_data`.
        context: From `ActionEncoder`, `[b k d]`.
        sigma: `[b]`, see `action_sigmas`.
        noise: Standard normal, `[b t a]`.

    Returns:
        Scalar; about 1 for a network that predicts nothing.
    """
    noisy = actions + sigma[:, None, None] * noise
    skip, out = _action_scales(sigma, decoder.sigma_data)
    return F.mse_loss(decoder(noisy, sigma, context), (actions - skip * noisy) / out)


def action_sigmas(
    uniform: Tensor, location: float = math.log(0.5), scale: float = 0.5, low: float = 1e-3, high: float = 80.0
) -> Tensor:
    """Training noise levels from uniform numbers in [0, 1]: log-logistic, cut to [low, high]; same shape."""
    below, above = (1 / (1 + math.exp((location - math.log(s)) / scale)) for s in (low, high))
    sigma = torch.exp(location + scale * torch.logit(below + uniform * (above - below)))
    return sigma.clamp(low, high)


def sample_actions(
    decoder: ActionDecoder, noise: Tensor, context: Tensor, steps: int = 10, low: float = 1e-3, high: float = 80.0
) -> Tensor:
    """Generate action chunks by deterministic steps on exponentially spaced noise levels, then to 0.

    Args:
        decoder: The action head.
        noise: Standard normal, `[b t a]`.
        context: From `ActionEncoder`, `[b k d]`.
        steps: Number of noise levels, at least 2.
        low: Smallest positive level.
        high: Largest level.

    Returns:
        Actions `[b t a]`, not clamped.
    """
    levels = [high * (low / high) ** (i / (steps - 1)) for i in range(steps)] + [0.0]
    x = noise * high
    for now, then in pairwise(levels):
        sigma = x.new_full((len(x),), now)
        skip, out = _action_scales(sigma, decoder.sigma_data)
        x = torch.lerp(skip * x + out * decoder(x, sigma, context), x, then / now)
    return x
