"""Stage 1: the autoencoder whose latents the video model predicts."""

import copy
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLTemporalDecoder
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_modules.distributed import log_means, read_checkpoint, shard
from lightning_modules.hub import FILES, fetch, new_folder, write_card

from .metrics import psnr, ssim
from .networks import SMALL_AUTOENCODER, check_side, decode, encode, video_autoencoder
from .sampler import context_noise


class LatentVideoAutoencoder(LightningModule):
    """Trains diffusers' `AutoencoderKLTemporalDecoder` on clips: `L1 + kl_weight KL` to the standard normal.

    After each validation it sets its scaling factor to `1 / std` of the latents (modes) of the validation clips, so
    that what the video model sees has about unit variance.

    Batches are `datamodules.videos.Clips`: video `[b f 3 h w]` in [-1, 1] and index `[b]` are used.

    Logged: `train/loss`, `train/l1` (mean absolute error, pixels in [-1, 1]), `train/kl` (nats per latent number);
    `val/loss`, `val/l1`, `val/psnr` (dB), `val/scaling_factor`; for `test/` also `test/ssim`.

    Args:
        autoencoder: Arguments of diffusers' class; those left out are `networks.SMALL_AUTOENCODER`'s.
        kl_weight: Weight of the divergence.
        optimizer: By default AdamW with learning rate 1e-3 and no weight decay.
        lr_scheduler: Stepped once per optimiser step; none by default.
        seed: Of the noise of the posterior.
    """

    def __init__(
        self,
        autoencoder: dict[str, Any] | None = None,
        kl_weight: float = 1e-6,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Outside the CLI these are functions, which a checkpoint cannot hold.
        self.hparams.update({k: None for k in ("optimizer", "lr_scheduler") if callable(self.hparams[k])})
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.config = {**SMALL_AUTOENCODER, **(autoencoder or {})}
        self.autoencoder: AutoencoderKLTemporalDecoder | None = None
        self._moments: list[Tensor] = []

    def configure_model(self) -> None:
        """Build the network once; shard it under FSDP2 (encoder and decoder, which are what is called)."""
        if self.autoencoder is None:
            self.autoencoder = video_autoencoder(self.config)
        for part in (self.autoencoder.encoder, self.autoencoder.quant_conv, self.autoencoder.decoder):
            shard(part, (), self.device_mesh)

    def forward(self, video: Tensor) -> Tensor:
        """Scaled latents of videos, `[b f 3 h w]` in [-1, 1] -> `[b f c h' w']`."""
        assert self.autoencoder is not None, "call configure_model() first"
        return encode(self.autoencoder, video)

    def _losses(self, batch: Any, epoch: int, sample: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """L1, KL, latent modes `[(b f) c h w]` and reconstructions `[b f 3 h w]`."""
        assert self.autoencoder is not None
        check_side(batch.video, 2 ** (len(self.config["block_out_channels"]) - 1))
        posterior = self.autoencoder.encode(batch.video.flatten(0, 1)).latent_dist
        latents = posterior.mode()
        if sample:
            shape = (batch.video.shape[1], *latents.shape[1:])
            noise = context_noise(batch.index.tolist(), shape, self.hparams["seed"], epoch)
            latents = latents + posterior.std * noise.flatten(0, 1).to(latents)
        video = self.autoencoder.decode(latents, num_frames=batch.video.shape[1]).sample
        video = video.unflatten(0, batch.video.shape[:2])
        return (video - batch.video).abs().mean(), posterior.kl().mean() / latents[0].numel(), posterior.mode(), video

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One batch of clips."""
        l1, kl, _, _ = self._losses(batch, self.current_epoch, sample=True)
        loss = l1 + self.hparams["kl_weight"] * kl
        for name, value in (("loss", loss), ("l1", l1), ("kl", kl)):
            self.log(f"train/{name}", value.detach(), sync_dist=True, prog_bar=name == "loss")
        return loss

    def _evaluate(self, batch: Any, stage: str) -> Tensor:
        l1, kl, latents, video = self._losses(batch, 0, sample=False)
        ours, theirs = (video / 2 + 0.5).clamp(0, 1), batch.video / 2 + 0.5
        values = {"loss": l1 + self.hparams["kl_weight"] * kl, "l1": l1, "psnr": psnr(ours, theirs).mean()}
        if stage == "test":
            values["ssim"] = ssim(ours, theirs).mean()
        log_means(self, {f"{stage}/{k}": v for k, v in values.items()}, len(batch.index))
        return latents.double()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Reconstruct from the modes; collect the latents' moments."""
        latents = self._evaluate(batch, "val")
        self._moments.append(torch.stack([torch.ones_like(latents), latents, latents.square()]).flatten(1).sum(1))

    def on_validation_epoch_end(self) -> None:
        """Set the scaling factor."""
        assert self.autoencoder is not None
        moments, self._moments = torch.stack(self._moments).sum(0), []
        count, total, squares = self.trainer.strategy.reduce(moments, reduce_op="sum")
        std = (squares / count - (total / count).square()).clamp(min=1e-12).sqrt()
        self.autoencoder.register_to_config(scaling_factor=float(1 / std))
        self.log("val/scaling_factor", float(1 / std), rank_zero_only=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Reconstruct from the modes."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """`index` of the clip and `psnr` of each frame's reconstruction `[b f]`, dB."""
        assert self.autoencoder is not None
        video = decode(self.autoencoder, self(batch.video))
        return {"index": batch.index, "psnr": psnr((video / 2 + 0.5).clamp(0, 1), batch.video / 2 + 0.5)}

    def configure_optimizers(self) -> Any:
        """AdamW, unless another is given."""
        parameters = list(self.parameters())
        if self.optimizer is not None:
            optimizer = self.optimizer(parameters)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
        if self.lr_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.lr_scheduler(optimizer), "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the arguments of the network, the scaling factor among them."""
        assert self.autoencoder is not None
        scaling = float(self.autoencoder.config.scaling_factor)
        checkpoint["autoencoder"] = {**self.config, "scaling_factor": scaling}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if there is none yet (`load_from_checkpoint`); take the scaling factor."""
        self.config = checkpoint["autoencoder"]
        if self.autoencoder is None:
            self.autoencoder = video_autoencoder(self.config)
        self.autoencoder.register_to_config(scaling_factor=self.config["scaling_factor"])

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write diffusers' folder, `vae/config.json` and `vae/*.safetensors`, and a model card.

        Args:
            folder: Made if need be.
            dtype: Type of the weights in the file, such as `torch.bfloat16`.
        """
        assert self.autoencoder is not None, "call configure_model() first"
        with new_folder(folder) as unfinished:
            network: Any = nn.Module.to(copy.deepcopy(self.autoencoder), dtype)  # diffusers' own `to` warns of nothing
            network.save_pretrained(unfinished / "vae")
            numbers = sum(p.numel() for p in self.autoencoder.parameters())
            write_card(unfinished, Path(folder), LatentVideoAutoencoder, numbers)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "LatentVideoAutoencoder":
        """Read a folder that has diffusers' `vae/`, or its id on the hub.

        Raises:
            FileNotFoundError: If it has none.
        """
        config, state = read_autoencoder(folder)
        module = cls(config)
        module.configure_model()
        assert module.autoencoder is not None
        module.autoencoder.load_state_dict(state)
        return module.eval()


def read_autoencoder(source: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of an autoencoder.

    Args:
        source: A checkpoint of `LatentVideoAutoencoder`, a folder with diffusers' `vae/` or its id on the hub, or a
            name of `video_model.located`.

    Raises:
        FileNotFoundError: If there is neither.
        ValueError: If the checkpoint is of another class.
    """
    from .video_model import from_folder, located, plain

    path = located(source)
    if path.suffix not in FILES and not (path / ".metadata").is_file():
        path = fetch(path, ("vae/*.json", "vae/*.safetensors"))
        if not (path / "vae" / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no vae/config.json: it holds no autoencoder")
        network = from_folder(AutoencoderKLTemporalDecoder, path / "vae")
        return plain(network.config), network.state_dict()
    checkpoint = read_checkpoint(path)
    if "autoencoder" not in checkpoint:
        raise ValueError(f"{path} is no checkpoint of LatentVideoAutoencoder")
    state = checkpoint["state_dict"]
    return checkpoint["autoencoder"], {k.removeprefix("autoencoder."): v for k, v in state.items()}
