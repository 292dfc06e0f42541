"""The policy of Video Prediction Policy (arXiv 2412.14803): a frozen video model's first-step features, an action head.

    folder/video/          the video model, see `video_model`
    folder/config.json     format version, class, sizes
    folder/model.safetensors   video former, action head and the normalisation of actions

Needs no Lightning. Axes: b contexts, f frames, p image positions, t steps of a chunk, a numbers of an action.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lightning_modules.hub import fetch, fill, instantiate, read_config, read_state, write_folder

from .networks import (
    ActionDecoder,
    ActionEncoder,
    VideoFormer,
    action_loss,
    action_sigmas,
    first_step_features,
    sample_actions,
)
from .sampler import context_noise
from .video_model import FILES, ClipText, VideoModel

FORMAT = 1
FEATURES, ACTIONS = 3, 4  # what noise is for, as in `diffusion`


@dataclass
class ActionConfig:
    """Sizes of the policy; the defaults are VPP's.

    Attributes:
        action_dim: Numbers a of an action.
        horizon: Steps t of a chunk.
        action_steps: Steps that are executed before the next plan.
        sigma: Noise level of the first denoising step, where features are taken: the sampler's largest.
        blocks: Up-blocks of the U-Net whose output is read.
        queries: Tokens of each frame.
        width: Of the tokens.
        former_layers: Layers of the video former.
        layers: Blocks of the action head's encoder, and of its decoder.
        heads: Attention heads.
        steps: Noise levels of the action sampler.
        dropout: In training: of attention weights, of residual branches, of the MLP.

    Raises:
        ValueError: If more steps are executed than planned, or a dropout is no share.
    """

    action_dim: int = 7
    horizon: int = 10
    action_steps: int = 10
    sigma: float = 700.0
    blocks: tuple[int, ...] = (0, 1)
    queries: int = 14
    width: int = 384
    former_layers: int = 6
    layers: int = 4
    heads: int = 8
    steps: int = 10
    dropout: tuple[float, float, float] = (0.3, 0.1, 0.05)

    def __post_init__(self) -> None:
        if len(self.dropout) != 3 or not all(0 <= share < 1 for share in self.dropout):
            raise ValueError(f"dropout {list(self.dropout)} must be three numbers from 0 to below 1")
        if not 1 <= self.action_steps <= self.horizon:
            raise ValueError(f"action_steps {self.action_steps} must be from 1 to the horizon {self.horizon}")


class ActionModel(nn.Module):
    """Picture and instruction to a chunk of actions.

    The video model is frozen; the goal vector is the mean of the instruction's tokens, or CLIP's text vector where the
    video model reads text by CLIP. Actions are brought to mean 0 and standard deviation 0.5, the action head's, by
    `fit`.

    Args:
        video: Whose features are read.
        config: Sizes.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, video: VideoModel, config: ActionConfig) -> None:
        super().__init__()
        self.config = config
        self.video = video.requires_grad_(False).eval()
        ups = list(reversed(video.unet.config.block_out_channels))
        self.former = VideoFormer(
            features=sum(ups[i] for i in config.blocks),
            frames=video.frames,
            queries=config.queries,
            width=config.width,
            layers=config.former_layers,
            heads=config.heads,
            head_width=config.width // config.heads,
        )
        sizes = (config.width, config.layers, config.heads, config.dropout)
        self.encoder = ActionEncoder(video.text.goal_width, *sizes)
        self.decoder = ActionDecoder(config.action_dim, config.horizon, *sizes)
        self.register_buffer("mean", torch.full((config.action_dim,), torch.nan))
        self.register_buffer("std", torch.full((config.action_dim,), torch.nan))

    def train(self, mode: bool = True) -> "ActionModel":
        """The video model always stays in evaluation mode."""
        super().train(mode)
        self.video.eval()
        return self

    @property
    def fitted(self) -> bool:
        """Whether mean and deviation of the actions are known."""
        return bool(self.mean.isfinite().all())

    @torch.no_grad()
    def fit(self, actions: Tensor) -> None:
        """Take mean and standard deviation from actions `[n a]`; numbers that hardly vary keep their scale."""
        std = actions.std(0, correction=0)
        self.mean.copy_(actions.mean(0))
        self.std.copy_(torch.where(std < 1e-4, 0.5, std))

    @torch.no_grad()
    def features(
        self, image: Tensor, tokens: Tensor, start: Tensor, caption: Sequence[str] = ()
    ) -> tuple[Tensor, Tensor]:
        """What the video model sees coming.

        Args:
            image: `[b 3 h w]` in [-1, 1].
            tokens: Words, `[b l]`.
            start: Standard normal noise, `[b f c h' w']`.
            caption: b instructions, for a video model that reads them by CLIP.

        Returns:
            First-step features `[b f p d]` and the goal `[b d']`.
        """
        condition = self.video.condition(self.video.encode(image[:, None]), tokens, caption)
        seen = first_step_features(self.video.unet, start, self.config.sigma, condition, self.config.blocks)
        return seen, self.video.text.goal(tokens, caption)

    def context(self, features: Tensor, goal: Tensor) -> Tensor:
        """What the action head reads, `[b 1+k width]`."""
        return self.encoder(self.former(features), goal)

    def loss(self, features: Tensor, goal: Tensor, actions: Tensor, uniform: Tensor, noise: Tensor) -> Tensor:
        """Training loss, see `networks.action_loss`.

        Args:
            features: `[b f p d]`.
            goal: `[b d']`.
            actions: Expert chunks `[b t a]` in their own units.
            uniform: `[b]` in [0, 1], for the noise levels.
            noise: Standard normal, `[b t a]`.
        """
        normed = self.decoder.sigma_data * (actions - self.mean) / self.std
        return action_loss(self.decoder, normed, self.context(features, goal), action_sigmas(uniform), noise)

    def plan(self, features: Tensor, goal: Tensor, noise: Tensor) -> Tensor:
        """Chunks `[b t a]` in their own units, not clipped, from standard normal noise of that shape."""
        normed = sample_actions(self.decoder, noise, self.context(features, goal), self.config.steps)
        return self.mean + self.std * normed / self.decoder.sigma_data

    def start_shape(self, side: int) -> tuple[int, int, int, int]:
        """Shape `(f, c, h', w')` of the noise that features of pictures of `side` pixels are taken at."""
        small = side // 2 ** (len(self.video.autoencoder.config.block_out_channels) - 1)
        return self.video.frames, self.video.unet.config.out_channels, small, small

    def forward(
        self, pictures: Tensor, tokens: Tensor, noise: Tensor, seed: int = 0, caption: Sequence[str] = ()
    ) -> Tensor:
        """Act; the features are taken at one noise, always the same.

        Args:
            pictures: uint8 `[b h w 3]`.
            tokens: `[b l]`.
            noise: Standard normal, `[b t a]`.
            seed: Of that one noise.
            caption: See `features`.

        Returns:
            `[b t a]` in their own units, not clipped.
        """
        image = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
        start = context_noise([0], self.start_shape(image.shape[-1]), seed, FEATURES).to(image)
        return self.plan(*self.features(image, tokens, start.expand(len(image), -1, -1, -1, -1), caption), noise)

    # ------------------------------------------------------------------------------------------------ files

    def save(self, folder: str | Path) -> None:
        """Write the folder; see the top of this file."""
        from .policy import VideoPolicy

        self.video.save(Path(folder) / "video")
        head = {k: v for k, v in self.state_dict().items() if not k.startswith("video.")}
        write_folder(folder, VideoPolicy, FORMAT, asdict(self.config), head)

    @classmethod
    def load(cls, source: str | Path) -> "ActionModel":
        """Read a folder, or a repository of the Hugging Face hub.

        Raises:
            FileNotFoundError: If there is no such folder and it cannot be downloaded.
            ValueError: If the files are of another class or a newer version.
        """
        folder, config = read_config(
            fetch(source, ("*.json", "model.safetensors", *(f"video/{x}" for x in FILES))), "VideoPolicy", FORMAT
        )
        lists = {name: tuple(value) for name, value in config.items() if isinstance(value, list)}
        sizes = instantiate(ActionConfig, config | lists, folder)
        model = cls(VideoModel.load(folder / "video"), sizes)
        fill(model, read_state(folder) | {f"video.{k}": v for k, v in model.video.state_dict().items()}, folder)
        return model.eval()


class VideoRolloutPolicy:
    """A trained policy for a control loop: plans a chunk, hands out one action a call.

    ```python
    policy = VideoRolloutPolicy.from_pretrained("folder", tokens=word_ids("door open", 8, 1024))
    policy.reset()
    action = policy.act({"image": image})   # every control step
    ```

    Args:
        model: With fitted actions.
        tokens: Words of the instruction, l integers.
        seed: Of all noise.
        device: Where the networks run.
        caption: The instruction itself, which a video model that reads text by CLIP needs; `tokens` may then be [].

    Raises:
        ValueError: If the model's actions have not been fitted, or CLIP has no caption to read.
    """

    def __init__(
        self,
        model: ActionModel,
        tokens: list[int],
        seed: int = 0,
        device: str | torch.device = "cpu",
        caption: str | None = None,
    ) -> None:
        if not model.fitted:
            raise ValueError("the policy's actions are not fitted: load a trained checkpoint, or call fit first")
        self.model, self.seed, self.device = model.to(device).eval(), seed, torch.device(device)
        if caption is None and isinstance(model.video.text, ClipText):
            raise ValueError("the policy's video model reads text by CLIP: give the instruction as caption")
        self.tokens, self.caption = torch.tensor(tokens, dtype=torch.int64, device=self.device), caption or ""
        self._generator = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self) -> None:
        """Forget the planned actions: a new episode begins."""
        self._queue: list[np.ndarray] = []

    @torch.inference_mode()
    def act(self, observation: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
        """The action of this control step; a new chunk is planned every `action_steps` calls.

        Args:
            observation: `image`, uint8 `(h, w, 3)`, or `(b, h, w, 3)` for several robots in step.

        Returns:
            Action `(a,)` or `(b, a)` in its own units, float32, not clipped.

        Raises:
            ValueError: If there is no image.
        """
        if "image" not in observation:
            raise ValueError("the observation has no image; the policy needs it")
        image = torch.as_tensor(np.asarray(observation["image"])).to(self.device)
        pictures = image if image.ndim == 4 else image[None]
        if not self._queue:
            config = self.model.config
            noise = torch.randn(len(pictures), config.horizon, config.action_dim, generator=self._generator)
            tokens = self.tokens.expand(len(pictures), -1)
            told = [self.caption] * len(pictures)
            chunk = self.model(pictures, tokens, noise.to(self.device), self.seed, told).float().cpu().numpy()
            self._queue = list(chunk[:, : config.action_steps].swapaxes(0, 1))
        action = self._queue.pop(0)
        return action if image.ndim == 4 else action[0]

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        tokens: list[int],
        seed: int = 0,
        device: str | torch.device = "cpu",
        caption: str | None = None,
    ) -> "VideoRolloutPolicy":
        """Read a folder that `VideoPolicy.save_pretrained` wrote; see `ActionModel.load`."""
        return cls(ActionModel.load(source), tokens, seed, device, caption)
