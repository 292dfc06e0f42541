"""Stage 2: the base, a video diffusion model with text and first frame as conditions (VPP, arXiv 2412.14803)."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers.models.resnet import SpatioTemporalResBlock
from diffusers.models.transformers.transformer_temporal import TransformerSpatioTemporalModel
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_modules.distributed import log_means, read_checkpoint, shard
from lightning_modules.hub import FILES, fill, read_state

from .autoencoder import read_autoencoder
from .lora import merge
from .metrics import (
    PerceptualDistance,
    centroid_error,
    colour_centroid,
    flow_error,
    group_diversity,
    psnr,
    sharpness,
    ssim,
)
from .networks import SMALL_AUTOENCODER, SMALL_UNET, Condition
from .objective import denoising_loss
from .rewards import cosine_reward, l1_reward, latent_reward
from .sampler import context_noise, hybrid_schedule, karras_sigmas, rollout
from .video_model import ClipText, VideoModel, located, saved_sampler

# What random numbers are for: with the seed, the epoch and the clip's number they make the key.
TRAINING, EVALUATION, ROLLOUT = range(3)


class VideoDiffusion(LightningModule):
    """Trains diffusers' `UNetSpatioTemporalConditionModel` to predict a clip from its first frame and instruction.

    The loss is EDM's with data of unit variance, `objective.denoising_loss`, with `ln sigma ~ N(p_mean, p_std^2)`.
    The autoencoder (and CLIP, if used) is frozen. All randomness of a sample is a function of (seed, epoch, clip).

    Batches are `datamodules.videos.Clips`: video `[b f 3 h w]` in [-1, 1] or latents `[b f c h w]`, tokens `[b l]`,
    caption, index `[b]`.

    Logged: `train/loss`; for `val/` and `test/`, all but `reward_given` without the given frame 0, in latents of unit
    variance:

    - `loss`, with the same noise in every epoch;
    - `reward`, mean -L1 + cosine of `eval_group` samples of the Euler-hybrid sampler; `reward_ode`, of the ODE sampler
      from the same start; `reward_given`, at frame 0; `copy_reward`, of repeating frame 0, the baseline to beat;
    - `l1` and `cosine`, of the hybrid samples;
    - `diversity`, mean absolute difference between two samples of a group;
    - `sharpness`, energy of the upper half of spatial frequencies over the expert's, per clip: falls below 1 with blur;
    - with pictures, for `test/` only: `psnr` (dB), `ssim`, `flow_error` (pixels) of the ODE sample, and `l1_frame_<k>`,
      `cosine_frame_<k>`; where asked for, `centroid_error` (pixels) and `lpips`.

    Args:
        unet: Arguments of diffusers' class; those left out are `networks.SMALL_UNET`'s. `num_frames` is the clip's.
            With `init_from` it counts for a published folder alone: what shall differ there, such as `num_frames`.
        autoencoder: A checkpoint of `LatentVideoAutoencoder`, a folder with diffusers' `vae/`, or "metaworld" for
            the one that comes with the package. If none, an untrained one (to try things out).
        text_encoder: Folder or hub id of a CLIP text model; if none, a table of words is learned.
        vocabulary: Its size; the data's.
        tokens: Words (or CLIP tokens, 20 in VPP) of an instruction; the data's for words.
        fps: Frames per second that the U-Net is told. If none, those of `init_from`, or 7.
        guidance: Guidance scale at the last frame, 1 for none; 7.5 in VPP. If none, that of `init_from`, or 1.
        steps: Steps of the sampler.
        sigma_min: Its smallest noise level.
        sigma_max: Its largest; choose it, with `steps`, for this model before any post-training.
        p_mean: Mean of ln sigma in training.
        p_std: Its standard deviation.
        text_dropout: Share of samples that are trained without text.
        gradient_checkpointing: Recompute the U-Net's blocks in the backward pass.
        rows: Most videos in one pass of the U-Net when sampling.
        cache_latents: Encode each clip once and keep its latents in memory.
        eval_group: Samples of a clip in validation and test.
        object_colour: Red, green, blue in [0, 1] of an object whose centre is compared with the expert's in the test,
            see `metrics.colour_centroid`.
        perceptual: Network of LPIPS in the test: "alex", "vgg" or "squeeze". torchvision loads its weights.
        optimizer: By default AdamW, learning rate 1e-4, no weight decay.
        lr_scheduler: Stepped once per optimiser step; none by default.
        init_from: What to start from: a folder of `save_pretrained`, a folder with diffusers' `unet/` and `vae/` such
            as Stable Video Diffusion, the id of either on the hub, a checkpoint of this class, or "metaworld" for the
            base that comes with the package. It brings its own autoencoder.
        seed: Of all noise.
        networks: What the networks are built from, see `VideoModel.parts`. Checkpoints keep it, so that
            `load_from_checkpoint` needs no other file; leave it out.

    Raises:
        ValueError: If a number is out of range or options exclude each other.
    """

    block_types = (SpatioTemporalResBlock, TransformerSpatioTemporalModel)
    learning_rate = 1e-4

    def __init__(
        self,
        unet: dict[str, Any] | None = None,
        autoencoder: str | None = None,
        text_encoder: str | None = None,
        vocabulary: int = 1024,
        tokens: int = 8,
        fps: float | None = None,
        guidance: float | None = None,
        steps: int = 20,
        sigma_min: float = 0.002,
        sigma_max: float = 700.0,
        p_mean: float = 0.7,
        p_std: float = 1.6,
        text_dropout: float = 0.05,
        gradient_checkpointing: bool = False,
        rows: int | None = None,
        cache_latents: bool = True,
        eval_group: int = 4,
        object_colour: list[float] | None = None,
        perceptual: Literal["alex", "vgg", "squeeze"] | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        init_from: str | None = None,
        seed: int = 0,
        networks: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Outside the CLI these are functions, which a checkpoint cannot hold.
        self.hparams.update({k: None for k in ("optimizer", "lr_scheduler") if callable(self.hparams[k])})
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.sigmas = karras_sigmas(steps, sigma_min, sigma_max)
        if init_from and autoencoder:
            raise ValueError("init_from brings its own autoencoder: leave autoencoder out")
        if eval_group < 2:
            raise ValueError(f"eval_group {eval_group} must be at least 2: the diversity compares samples")
        self.model: VideoModel | None = None
        self._latents: dict[int, Tensor] = {}
        self._perceptual: list[nn.Module] = []  # in a list, so that it is not saved

    # ------------------------------------------------------------------------------------------- building

    def _text(self) -> dict[str, Any]:
        h = self.hparams
        reader = {"clip": h["text_encoder"]} if h["text_encoder"] else {"vocabulary": h["vocabulary"]}
        return {**reader, "length": h["tokens"]}

    def _start(self) -> VideoModel:
        """The model that training starts from."""
        h = self.hparams
        told = {name: h[name] for name in ("fps", "guidance") if h[name] is not None}
        if h["init_from"]:
            model = read_model(h["init_from"], self._text(), h["unet"])
            model.config |= told
            return model
        config, state = read_autoencoder(h["autoencoder"]) if h["autoencoder"] else (dict(SMALL_AUTOENCODER), None)
        model = VideoModel({**SMALL_UNET, **(h["unet"] or {})}, config, self._text(), **told)
        if state is not None:
            model.autoencoder.load_state_dict(state)
        return model

    def configure_model(self) -> None:
        """Build the model once; shard what is trained under FSDP2."""
        if self.model is None:
            parts = self.hparams["networks"]  # then a checkpoint brings the weights
            self.model = VideoModel(**parts) if parts else self._start()
            self.hparams["networks"] = self.model.parts()
            self._check_words(self.model)
            self._choose_trained(self.model)
        if self.hparams["gradient_checkpointing"]:
            self.model.unet.enable_gradient_checkpointing()
        shard(self.model.unet, self.block_types, self.device_mesh)
        if not isinstance(self.model.text, ClipText):
            shard(self.model.text, (), self.device_mesh)

    def _check_words(self, model: VideoModel) -> None:
        data: Any = self.trainer.datamodule if self._trainer is not None else None
        if hasattr(data, "vocabulary"):
            model.check_words(data.tokens, data.vocabulary)

    def _choose_trained(self, model: VideoModel) -> None:
        """Called once, before sharding: the U-Net and the text are trained."""

    def setup(self, stage: str) -> None:
        """Forget the latents of other data; load LPIPS for a test."""
        self._latents = {}
        if stage == "test" and self.hparams["perceptual"]:
            self._perceptual = [PerceptualDistance(self.hparams["perceptual"])]

    def train(self, mode: bool = True) -> "VideoDiffusion":
        """The autoencoder always stays in evaluation mode."""
        super().train(mode)
        if self.model is not None:
            self.model.autoencoder.eval()
        return self

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the networks if there are none yet (`load_from_checkpoint`)."""
        if self.model is None:
            self.configure_model()

    def _check_latents(self) -> None:
        """Refuse latents of another autoencoder."""
        data: Any = self.trainer.datamodule
        made_by = getattr(data, "autoencoder", "")
        if made_by and self.model is not None and made_by != self.model.mark():
            raise ValueError(
                f"the latents of {data.source} were made by another autoencoder than the model's: make them again with "
                "VideoModel.write_latents, or name the videos themselves with --data.source"
            )

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _check_latents

    # ------------------------------------------------------------------------------------------- training

    def latents(self, batch: Any) -> Tensor:
        """Scaled expert latents of a batch, `[b f c h w]` float32: the data's; or each clip is encoded once."""
        assert self.model is not None
        if batch.latents.numel():
            self.model.check_latents(batch.latents)
            return batch.latents
        self.model.check_video(batch.video)
        if not self.hparams["cache_latents"]:
            return self.model.encode(batch.video)
        numbers = batch.index.tolist()
        if missing := [i for i, number in enumerate(numbers) if number not in self._latents]:
            encoded = self.model.encode(batch.video[missing]).cpu()
            self._latents.update(zip([numbers[i] for i in missing], encoded, strict=True))
        return torch.stack([self._latents[number] for number in numbers]).to(batch.video.device)

    def pictures(self, batch: Any) -> Tensor:
        """Expert frames of a batch, `[b f 3 h w]` in [0, 1]: the data's; or decoded, where the data are latents."""
        assert self.model is not None
        return batch.video / 2 + 0.5 if batch.video.numel() else self.model.decode(self.latents(batch))

    def supervised_loss(
        self, latents: Tensor, tokens: Tensor, caption: Sequence[str], index: Tensor, key: Sequence[int], drop: float
    ) -> Tensor:
        """Denoising loss of some clips.

        Args:
            latents: `[b f c h w]`.
            tokens: `[b l]`.
            caption: b instructions.
            index: `[b]`; noise and sigma are a function of these numbers and the key.
            key: What they are for, and the epoch.
            drop: Share of clips whose text is left out.
        """
        assert self.model is not None
        h = self.hparams
        numbers = context_noise(index.tolist(), (latents[0].numel() + 2,), h["seed"], *key).to(latents)
        noise = numbers[:, 2:].view_as(latents)
        sigma = (h["p_mean"] + h["p_std"] * numbers[:, 0]).exp()
        condition = self.model.condition(latents[:, :1], tokens, caption, torch.special.ndtr(numbers[:, 1]) < drop)
        return denoising_loss(self.model.denoiser(condition, guided=False), latents, noise, sigma)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """One batch of clips."""
        key, drop = (TRAINING, self.current_epoch), self.hparams["text_dropout"]
        loss = self.supervised_loss(self.latents(batch), batch.tokens, batch.caption, batch.index, key, drop)
        self.log("train/loss", loss.detach(), batch_size=len(batch.index), sync_dist=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, unless another is given."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer is not None:
            optimizer = self.optimizer(parameters)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=0.0)
        if self.lr_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.lr_scheduler(optimizer), "interval": "step"}]

    # ------------------------------------------------------------------------------------------ evaluation

    def sample(self, condition: Condition, start: Tensor, noise: Tensor | None = None) -> Tensor:
        """Generate latents.

        Args:
            condition: Of b contexts.
            start: Standard normal, `[b 1 f c h w]`.
            noise: Standard normal of the first step, `[b g f c h w]`; none for the ODE sampler.

        Returns:
            `[b g f c h w]`, with g = 1 for the ODE sampler.
        """
        assert self.model is not None
        denoise = self.model.denoiser(condition, self.hparams["rows"])
        places: Collection[int] = () if noise is None else (0,)
        return rollout(denoise, start, () if noise is None else [noise], hybrid_schedule(self.sigmas, places)).latents

    @torch.no_grad()
    def forward(
        self, image: Tensor, tokens: Tensor, caption: Sequence[str] = (), index: Sequence[int] | None = None
    ) -> Tensor:
        """Predict videos with the ODE sampler.

        Args:
            image: First frames, `[b 3 h w]` in [-1, 1].
            tokens: Words of the instructions, `[b l]` int64, see `datamodules.videos.word_ids`.
            caption: The instructions, needed by a CLIP text encoder only.
            index: b numbers that choose the initial noise; 0 to b - 1 if none.

        Returns:
            `[b f 3 h w]` in [0, 1].
        """
        assert self.model is not None, "call configure_model() first"
        first = self.model.encode(image[:, None])
        shape = (1, self.model.frames, *first.shape[2:])
        start = context_noise(range(len(image)) if index is None else index, shape, self.hparams["seed"], EVALUATION)
        condition = self.model.condition(first, tokens, caption)
        return self.model.decode(self.sample(condition, start.to(first))[:, 0])

    def generate(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Expert `[b f c h w]`, hybrid `[b g f c h w]` and ODE `[b f c h w]` latents, on noise that never changes."""
        assert self.model is not None
        latents = self.latents(batch)
        shape = (1 + self.hparams["eval_group"], *latents.shape[1:])
        draws = context_noise(batch.index.tolist(), shape, self.hparams["seed"], EVALUATION).to(latents)
        condition = self.model.condition(latents[:, :1], batch.tokens, batch.caption)
        hybrid = self.sample(condition, draws[:, :1], draws[:, 1:])
        return latents, hybrid, self.sample(condition, draws[:, :1])[:, 0]

    def _evaluate(self, batch: Any, stage: str) -> Tensor:
        """Log what the class lists; returns the reward of each clip, `[b]`."""
        assert self.model is not None
        latents, hybrid, ode = self.generate(batch)
        expert = latents[:, None]
        reward = latent_reward(hybrid, expert)
        l1, cosine = -l1_reward(hybrid, expert), cosine_reward(hybrid, expert)
        key = (EVALUATION, 0)
        loss = self.supervised_loss(latents, batch.tokens, batch.caption, batch.index, key, 0.0)
        values = {
            "loss": loss,
            "reward": reward[..., 1:].mean(),
            "reward_given": reward[..., 0].mean(),
            "reward_ode": latent_reward(ode, latents)[..., 1:].mean(),
            "copy_reward": latent_reward(latents[:, :1], latents)[..., 1:].mean(),
            "l1": l1[..., 1:].mean(),
            "cosine": cosine[..., 1:].mean(),
            "diversity": group_diversity(hybrid)[..., 1:].mean(),
            "sharpness": sharpness(hybrid, latents).mean(),
        }
        if stage == "test":
            ours, theirs = self.model.decode(ode), self.pictures(batch)
            values |= {
                "psnr": psnr(ours, theirs)[:, 1:].mean(),
                "ssim": ssim(ours, theirs)[:, 1:].mean(),
                "flow_error": flow_error(ours, theirs).mean(),
            }
            if colour := self.hparams["object_colour"]:
                errors = centroid_error(ours, colour_centroid(theirs, colour), colour)[:, 1:]
                seen = int((~errors.isnan()).sum())  # frames in which the object is in sight
                log_means(self, {"test/centroid_error": errors.nanmean()}, seen)
            for measure in self._perceptual:
                pair = [2 * x[:, 1:].flatten(0, 1) - 1 for x in (ours, theirs)]
                values["lpips"] = measure(*pair).mean()
            for k in range(latents.shape[1]):
                values |= {f"l1_frame_{k}": l1[..., k].mean(), f"cosine_frame_{k}": cosine[..., k].mean()}
        log_means(self, {f"{stage}/{k}": v for k, v in values.items()}, len(batch.index))
        return reward[..., 1:].mean((1, 2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Loss and samples."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Loss, samples and pictures."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """`index` and `caption` of the clip; `reward` and `copy_reward` of each frame, `[b f]` (see the class)."""
        latents, hybrid, _ = self.generate(batch)
        return {
            "index": batch.index,
            "caption": batch.caption,
            "reward": latent_reward(hybrid, latents[:, None]).mean(1),
            "copy_reward": latent_reward(latents[:, :1], latents),
        }

    # ---------------------------------------------------------------------------------------------- reuse

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the folder that `video_model` describes; its `unet/` and `vae/` are diffusers' own.

        Args:
            folder: Made if need be.
            dtype: Type of the weights in the files, such as `torch.bfloat16`.
        """
        assert self.model is not None, "call configure_model() first"
        self.model.save(folder, dtype, {name: self.hparams[name] for name in ("steps", "sigma_min", "sigma_max")})

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> "VideoDiffusion":
        """Read a folder that `save_pretrained` wrote, or its id on the hub.

        Args:
            folder: Which.
            options: Arguments of the class. Those of the sampler are the saved module's, where they are left out.

        Raises:
            FileNotFoundError: If a part is missing.
            ValueError: If it is of a newer version.
        """
        module = cls(**saved_sampler(located(folder)) | options, init_from=str(folder))
        module.configure_model()
        return module.eval()


def _parts(path: Path) -> dict[str, Any]:
    """What the model in a checkpoint is built from."""
    parts = read_checkpoint(path, ["hyper_parameters"]).get("hyper_parameters", {}).get("networks")
    if not parts:
        raise ValueError(f"{path} is no checkpoint of VideoDiffusion or DynVPP")
    return parts


def read_model(
    source: str | Path, text: dict[str, Any] | None = None, unet: dict[str, Any] | None = None
) -> VideoModel:
    """A video model with its weights.

    Args:
        source: A folder (see `video_model`) or its id on the hub, a checkpoint of `VideoDiffusion` or `DynVPP`, or a
            name of `video_model.located`.
        text: Settings for a published folder, which has none.
        unet: What shall differ there from the U-Net's arguments.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If the checkpoint is of another class, or sharded.
    """
    path = located(source)
    if path.suffix not in FILES and not (path / ".metadata").is_file():
        return VideoModel.load(path, text, unet)
    state = read_state(path)
    model = VideoModel(**_parts(path))
    fill(model, merge({k.removeprefix("model."): v for k, v in state.items()}), path)
    return model
