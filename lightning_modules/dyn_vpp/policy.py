"""A policy on what the video model sees coming (Video Prediction Policy, arXiv 2412.14803)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from datamodules.videos import read_caption_bytes
from lightning_modules.distributed import log_means, shard

from .action_model import ACTIONS, FEATURES, ActionConfig, ActionModel, VideoRolloutPolicy
from .diffusion import VideoDiffusion, read_model
from .networks import ActionBlock, VideoFormerLayer
from .sampler import context_noise
from .video_model import VideoModel


class VideoPolicy(LightningModule):
    """Learns a chunk of actions from the first frame and the instruction of an expert's clip.

    The video model (base or post-trained) is frozen: one pass of its U-Net at the first denoising step, left on the way
    up, gives features; a video former condenses them, and a diffusion transformer denoises the actions. All randomness
    of a training sample is a function of (seed, epoch, clip).

    Batches are `datamodules.videos.Clips`: the first frame of video `[b f 3 h w]`, tokens `[b l]` (caption, where the
    video model reads text by CLIP), the first `horizon` of action `[b n a]`, index `[b]`.

    Logged: `train/loss` (mean squared error of the network's raw output, about 1 for one that knows nothing),
    `val/loss` on the same noise in every epoch, `val/action_error` (mean absolute error of a generated chunk, in the
    actions' units), and the same for `test/`. `callbacks.Rollouts` adds success in the simulator.

    Args:
        init_from: The video model: a folder or a checkpoint of `VideoDiffusion` or `DynVPP`, or "metaworld".
        other_video: For a trained policy (a checkpoint, `--ckpt_path`): another video model instead of the one that it
            was trained on, of the same sizes, named as `init_from`; so "new video model, old action head".
        action_dim: Numbers of an action; taken from the data if none.
        horizon: Planned steps.
        action_steps: Steps executed before the next plan.
        history: Observed frames; the video model takes 1.
        sigma_max: Noise level of the first denoising step: the sampler's largest.
        blocks: Up-blocks of the U-Net whose output is read.
        queries: Tokens that the video former makes of each frame.
        width: Of the tokens.
        former_layers: Layers of the video former.
        layers: Blocks of the action head's encoder, and of its decoder.
        heads: Attention heads.
        action_noise_levels: Network calls of the action head per plan.
        dropout: In training: of attention weights, of residual branches, of the MLP; VPP's. The masks are a function of
            (seed, epoch, batch, rank): a resumed run has the same ones, and so many ranks others.
        optimizer: By default AdamW, learning rate 1e-4, betas 0.9 and 0.9, weight decay 0.05, which are VPP's.
        lr_scheduler: Stepped once per optimiser step; none by default.
        seed: Of all noise.
        networks: What the video model is built from. Checkpoints keep it; leave it out.

    Raises:
        ValueError: If there is no video model, or a number is out of range.
    """

    block_types = (VideoFormerLayer, ActionBlock)

    def __init__(
        self,
        init_from: str | None = None,
        other_video: str | None = None,
        action_dim: int | None = None,
        horizon: int = 10,
        action_steps: int = 10,
        history: int = 1,
        sigma_max: float = 700.0,
        blocks: list[int] = [0, 1],  # noqa: B006
        queries: int = 14,
        width: int = 384,
        former_layers: int = 6,
        layers: int = 4,
        heads: int = 8,
        action_noise_levels: int = 10,
        dropout: list[float] = [0.3, 0.1, 0.05],  # noqa: B006
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int = 0,
        networks: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Outside the CLI these are functions, which a checkpoint cannot hold.
        self.hparams.update({k: None for k in ("optimizer", "lr_scheduler") if callable(self.hparams[k])})
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        if history != 1:
            raise ValueError(f"history {history} must be 1: the video model is given one frame")
        self._config(1)  # checks the numbers at once
        self.model: ActionModel | None = None

    # ------------------------------------------------------------------------------------------- building

    def _config(self, action_dim: int) -> ActionConfig:
        h = self.hparams
        names = ("horizon", "action_steps", "queries", "width", "former_layers", "layers", "heads")
        return ActionConfig(
            action_dim=action_dim,
            sigma=h["sigma_max"],
            blocks=tuple(h["blocks"]),
            dropout=tuple(h["dropout"]),
            steps=h["action_noise_levels"],
            **{name: h[name] for name in names},
        )

    def setup(self, stage: str) -> None:
        """Take the size of an action from the data.

        Raises:
            ValueError: If the clips come without actions or are too short for a chunk.
        """
        data, h = self.trainer.datamodule, self.hparams
        if data is None or not hasattr(data, "action_dim"):
            return
        if not data.action_dim:
            raise ValueError(f"the clips of {data.source} come without actions: a policy needs expert actions")
        if (known := (data.frames - 1) * data.stride) < h["horizon"]:
            raise ValueError(f"a clip has {known} actions, fewer than horizon {h['horizon']}: raise data.stride")
        if h["action_dim"] is None:
            h["action_dim"] = data.action_dim
        elif h["action_dim"] != data.action_dim:
            raise ValueError(
                f"model.action_dim is {h['action_dim']} and the clips have {data.action_dim}: leave it out"
            )

    def configure_model(self) -> None:
        """Build the model once; shard it under FSDP2."""
        h = self.hparams
        if self.model is None:
            if h["action_dim"] is None:
                raise ValueError("without expert clips VideoPolicy needs to be told action_dim")
            if h["networks"]:  # then a checkpoint brings the weights
                video = VideoModel(**h["networks"])
            elif h["init_from"]:
                video = read_model(h["init_from"])
            else:
                raise ValueError(
                    "VideoPolicy reads a video model: name its checkpoint or folder with --model.init_from"
                )
            h["networks"] = video.parts()
            if self._trainer and hasattr(self.trainer.datamodule, "vocabulary"):
                video.check_words(self.trainer.datamodule.tokens, self.trainer.datamodule.vocabulary)
            self.model = ActionModel(video, self._config(h["action_dim"]))
        shard(self.model.video.unet, VideoDiffusion.block_types, self.device_mesh)
        for part in (self.model.former, self.model.encoder, self.model.decoder):
            shard(part, self.block_types, self.device_mesh)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the networks if there are none yet (`load_from_checkpoint`); exchange the video model if asked to.

        Raises:
            ValueError: If the other video model has other sizes, or the checkpoint is sharded.
        """
        if self.model is None:
            self.configure_model()
        if source := self.hparams["other_video"]:
            assert self.model is not None
            if "state_dict" not in checkpoint:
                raise ValueError(
                    "other_video needs the policy in one file: `fulgurite consolidate` its checkpoint first"
                )
            own, other = self.model.video, read_model(source)
            sizes = [{k: v.shape for k, v in m.state_dict().items()} for m in (own, other)]
            if sizes[0] != sizes[1] or own.frames != other.frames:
                raise ValueError(f"other_video {source} has other sizes than the policy's own video model")
            own.config = other.config
            own.autoencoder.register_to_config(scaling_factor=other.autoencoder.config.scaling_factor)
            checkpoint["state_dict"] |= {f"model.video.{k}": v for k, v in other.state_dict().items()}
            self.hparams.update(networks=other.parts(), other_video=None)  # from now on it is the policy's own

    def on_fit_start(self) -> None:
        """Fit the normalisation of actions, unless it came with the weights."""
        assert self.model is not None
        if self.hparams["other_video"]:
            raise ValueError("other_video is for a trained policy: name its checkpoint with --ckpt_path")
        if not self.model.fitted:
            self.model.fit(self.trainer.datamodule.actions().to(self.device))

    def _require_actions(self) -> None:
        if self.model is None or not self.model.fitted:
            raise ValueError("the policy is not trained yet: name a checkpoint with --ckpt_path")

    on_validation_start = on_test_start = on_predict_start = _require_actions

    # ------------------------------------------------------------------------------------------- training

    def forward(self, observation: dict[str, Tensor], noise: Tensor) -> Tensor:
        """Plan.

        Args:
            observation: `image` uint8 `[b 1 h w 3]` and `tokens` `[b l]`; for CLIP `caption`, see
                `datamodules.videos.caption_bytes`.
            noise: Standard normal, `[b horizon a]`.

        Returns:
            `[b horizon a]` in the actions' units, not clipped.
        """
        assert self.model is not None, "call configure_model() first"
        told = read_caption_bytes(observation["caption"]) if "caption" in observation else ()
        return self.model(observation["image"][:, -1], observation["tokens"], noise, self.hparams["seed"], told)

    @property
    def executed(self) -> slice:
        """The steps of a plan that are executed before the next."""
        return slice(0, self.hparams["action_steps"])

    def _chunk(self, batch: Any) -> Tensor:
        return batch.action[:, : self.hparams["horizon"]]

    def _draws(self, batch: Any, epoch: int) -> tuple[Tensor, Tensor]:
        """Noise for a chunk `[b t a]` and uniform numbers `[b]`, a function of (seed, epoch, clip)."""
        actions = self._chunk(batch)
        shape = (actions[0].numel() + 1,)
        numbers = context_noise(batch.index.tolist(), shape, self.hparams["seed"], ACTIONS, epoch).to(actions)
        return numbers[:, 1:].view_as(actions), torch.special.ndtr(numbers[:, 0])

    def loss(self, batch: Any, epoch: int) -> Tensor:
        """Loss of a batch of clips on the noise of an epoch."""
        assert self.model is not None
        image = batch.video[:, 0]
        shape = self.model.start_shape(image.shape[-1])
        start = context_noise(batch.index.tolist(), shape, self.hparams["seed"], FEATURES, epoch).to(image)
        noise, uniform = self._draws(batch, epoch)
        seen = self.model.features(image, batch.tokens, start, batch.caption)
        return self.model.loss(*seen, self._chunk(batch), uniform, noise)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One batch of clips."""
        place = [self.hparams["seed"], self.current_epoch, batch_idx, self.global_rank]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))  # for dropout
            loss = self.loss(batch, self.current_epoch)
        self.log("train/loss", loss.detach(), batch_size=len(batch.index), sync_dist=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, unless another is given."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer is not None:
            optimizer = self.optimizer(parameters)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.9), weight_decay=0.05)
        if self.lr_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.lr_scheduler(optimizer), "interval": "step"}]

    # ------------------------------------------------------------------------------------------ evaluation

    def _plan(self, batch: Any) -> Tensor:
        return self(batch.observation, self._draws(batch, 0)[0])

    def _evaluate(self, batch: Any, stage: str) -> None:
        error = (self._plan(batch) - self._chunk(batch)).abs().mean()
        log_means(self, {f"{stage}/loss": self.loss(batch, 0), f"{stage}/action_error": error}, len(batch.index))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Loss and error of generated chunks."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Loss and error of generated chunks."""
        self._evaluate(batch, "test")

    @property
    def prediction_columns(self) -> dict[str, list[str]]:
        """Names of the columns that `predict` writes for an action."""
        h = self.hparams
        return {"action": [f"action_{i}_{j}" for i in range(h["action_steps"]) for j in range(h["action_dim"])]}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """`index` and `caption` of the clip and `action`, the steps to execute `[b action_steps*a]`."""
        steps = self._plan(batch)[:, self.executed]
        return {"index": batch.index, "caption": batch.caption, "action": steps.flatten(1)}

    # ---------------------------------------------------------------------------------------------- reuse

    def policy(
        self, tokens: list[int], seed: int = 0, device: str | torch.device = "cpu", caption: str | None = None
    ) -> VideoRolloutPolicy:
        """The policy as an object for a control loop; it shares the weights where the device is the same."""
        assert self.model is not None, "call configure_model() first"
        return VideoRolloutPolicy(self.model, tokens, seed, device, caption)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the folder that `action_model` describes."""
        assert self.model is not None, "call configure_model() first"
        self.model.save(folder)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "VideoPolicy":
        """Read what `save_pretrained` wrote, from a folder or a repository of the Hugging Face hub.

        Raises:
            FileNotFoundError: If there is no such folder and it cannot be downloaded.
            ValueError: If the files are of another class or a newer version.
        """
        model = ActionModel.load(source)
        sizes: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(model.config).items()}
        renamed = {"sigma": "sigma_max", "steps": "action_noise_levels"}
        options = {renamed.get(k, k): v for k, v in sizes.items()}
        module = cls(**options, networks=model.video.parts())
        module.model = model
        return module.eval()
