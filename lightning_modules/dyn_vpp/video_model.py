"""A video model: autoencoder, text and U-Net together, and its folder in diffusers' format.

    folder/unet/  folder/vae/      as diffusers writes and reads them (config.json, safetensors)
    folder/text/                   the token table (model.safetensors), where there is one
    folder/config.json             format version, class, text settings, the sampler where it is known

A published folder of Stable Video Diffusion has `unet/` and `vae/` too, and is read with the text settings that the
caller gives.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_modules.dyn_vpp.lora import merge
from lightning_modules.dyn_vpp.networks import (
    Condition,
    check_fit,
    check_side,
    decode,
    encode,
    guidance_scales,
    predict_clean,
    video_autoencoder,
    video_unet,
)
from lightning_modules.hub import fetch, fill, instantiate, new_folder, read_config, read_tensors, write_card

FORMAT = 1  # of save
FILES = ("config.json", "unet/*.json", "unet/*.safetensors", "vae/*.json", "vae/*.safetensors", "text/*.safetensors")
SHIPPED = Path(__file__).parent / "weights"


def located(source: str | Path) -> Path:
    """Where weights are: `source` itself, or the folder that comes with the package if it is the name of one.

    `metaworld` is the autoencoder and the base of `configs/dyn_vpp`; a folder of your own with that name is
    `./metaworld`.
    """
    names = [folder.name for folder in SHIPPED.iterdir()] if SHIPPED.is_dir() else []
    return SHIPPED / source if str(source) in names else Path(source)


class TokenTable(nn.Module):
    """Learned vectors for the words of an instruction.

    Args:
        vocabulary: Numbers of words; 0 is "no word" and stays a vector of zeros.
        width: Of a vector, the U-Net's `cross_attention_dim`.
        length: Words at most.
    """

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.places = nn.Parameter(torch.zeros(length, width))

    def forward(self, tokens: Tensor, caption: Sequence[str]) -> Tensor:
        """Numbers of words `[b l]` -> `[b l d]`; `caption` is not looked at."""
        return (self.words(tokens) + self.places) * (tokens > 0)[..., None]

    @property
    def goal_width(self) -> int:
        """Numbers of `goal`."""
        return self.words.embedding_dim

    def goal(self, tokens: Tensor, caption: Sequence[str]) -> Tensor:
        """One vector for an instruction, the mean of its words: `[b l]` -> `[b d]`."""
        return self(tokens, caption).sum(1) / (tokens > 0).sum(1, keepdim=True).clamp(min=1)


class ClipText(nn.Module):
    """CLIP's text tower, frozen; its 20 tokens are repeated along the channels (512 -> 1024), as VPP does.

    Args:
        name: Folder or hub id of a `CLIPTextModelWithProjection`, such as `openai/clip-vit-base-patch32`.
        length: Tokens, padded.
    """

    def __init__(self, name: str, length: int) -> None:
        super().__init__()
        from transformers import CLIPTextModelWithProjection, CLIPTokenizer

        try:
            self.tower = CLIPTextModelWithProjection.from_pretrained(name, use_safetensors=True).requires_grad_(False)
            self.tokenizer = CLIPTokenizer.from_pretrained(name)
        except OSError as error:
            raise FileNotFoundError(f"text encoder {name} cannot be loaded: {str(error).splitlines()[0]}") from None
        self.length = length

    @torch.no_grad()
    def forward(self, tokens: Tensor, caption: Sequence[str]) -> Tensor:
        """Instructions -> `[b l d]`; `tokens` is not looked at, except for its device."""
        hidden = self._read(tokens, caption).last_hidden_state
        return torch.cat([hidden, hidden], dim=-1)

    def _read(self, tokens: Tensor, caption: Sequence[str]) -> Any:
        if len(caption) != len(tokens):
            raise ValueError(
                f"CLIP reads the instructions themselves: {len(tokens)} captions are needed, not {len(caption)}"
            )
        padded = self.tokenizer(
            list(caption), padding="max_length", max_length=self.length, truncation=True, return_tensors="pt"
        )
        return self.tower(**padded.to(tokens.device))

    @property
    def goal_width(self) -> int:
        """Numbers of `goal`."""
        return self.tower.config.projection_dim

    @torch.no_grad()
    def goal(self, tokens: Tensor, caption: Sequence[str]) -> Tensor:
        """One vector for an instruction, CLIP's projected text, as in VPP: b captions -> `[b d]`."""
        return self._read(tokens, caption).text_embeds


class VideoModel(nn.Module):
    """U-Net, frozen autoencoder and text, for videos of a fixed number of frames.

    Args:
        unet: Arguments of diffusers' `UNetSpatioTemporalConditionModel`; `num_frames` is the length of a video.
        autoencoder: Arguments of `AutoencoderKLTemporalDecoder`, `scaling_factor` among them.
        text: `{"vocabulary": n, "length": l}` for a token table, or `{"clip": name, "length": l}`.
        fps: Frames per second that the U-Net is told.
        guidance: Largest guidance scale, at the last frame; 1 for none.

    Raises:
        ValueError: If the parts do not fit.
    """

    def __init__(
        self,
        unet: dict[str, Any],
        autoencoder: dict[str, Any],
        text: dict[str, Any],
        fps: float = 7.0,
        guidance: float = 1.0,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "unet": unet,
            "autoencoder": autoencoder,
            "text": text,
            "fps": fps,
            "guidance": guidance,
        }
        self.unet: UNetSpatioTemporalConditionModel = video_unet(unet)
        self.autoencoder: AutoencoderKLTemporalDecoder = video_autoencoder(autoencoder).requires_grad_(False).eval()
        width = unet["cross_attention_dim"]
        self.text: TokenTable | ClipText = (
            ClipText(text["clip"], text["length"])
            if "clip" in text
            else TokenTable(text["vocabulary"], width, text["length"])
        )
        check_fit(self.unet, autoencoder["latent_channels"], 1024 if "clip" in text else width)

    @property
    def frames(self) -> int:
        """Frames of a video."""
        return self.config["unet"]["num_frames"]

    def check_video(self, video: Tensor) -> None:
        """Refuse videos `[b f 3 h w]` of another length, or of a size that the networks cannot halve often enough.

        Raises:
            ValueError: Naming both lengths, or the size.
        """
        self._check_frames(video.shape[1])
        levels = [len(n.config.block_out_channels) - 1 for n in (self.autoencoder, self.unet)]
        check_side(video, 2 ** sum(levels))

    def check_latents(self, latents: Tensor) -> None:
        """Refuse latents `[b f c h w]` of another length, of other channels, or of a size that does not fit.

        Raises:
            ValueError: Naming what differs.
        """
        self._check_frames(latents.shape[1])
        channels, multiple = self.unet.config.out_channels, 2 ** (len(self.unet.config.block_out_channels) - 1)
        if latents.shape[2] != channels:
            raise ValueError(f"the clips are latents of {latents.shape[2]} channels, and the model's have {channels}")
        for side in latents.shape[-2:]:
            if side % multiple:
                raise ValueError(f"latents of {side} numbers a side do not fit: it must be a multiple of {multiple}")

    def _check_frames(self, frames: int) -> None:
        if frames != self.frames:
            raise ValueError(
                f"the clips have {frames} frames and the model {self.frames}: set data.frames to {self.frames}, "
                f"or, if the model is a published folder, model.unet.num_frames to {frames}"
            )

    def mark(self) -> str:
        """Tells latents of one autoencoder from those of another: a hash of encoder and scaling factor, 16 digits.

        It is of the weights in bfloat16, so that a copy saved in that type makes the same latents.
        """
        digest = hashlib.sha256(f"{self.autoencoder.config.scaling_factor:.3g}".encode())
        for part in (self.autoencoder.encoder, self.autoencoder.quant_conv):
            for value in part.state_dict().values():
                digest.update(value.detach().cpu().bfloat16().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    def write_latents(self, video: Tensor, path: str | Path, rows: int = 16) -> None:
        """Encode a whole video once and for all: `datamodules.ExpertVideos` takes such files instead of videos.

        ```python
        for file, caption in read_captions(folder):  # of datamodules.videos; captions.csv then names the new files
            frames = torch.from_numpy(read_video(folder / file, 256)).permute(0, 3, 1, 2)
            model.write_latents(frames / 127.5 - 1, (latents / file).with_suffix(".safetensors"))
        ```

        Args:
            video: `[t 3 h w]` in [-1, 1].
            path: Of the file, which gets the `mark` of this model.
            rows: Frames that are encoded at once.
        """
        encoded = torch.cat([self.encode(part[None])[0].cpu() for part in video.split(rows)])
        save_file({"latents": encoded.contiguous()}, path, {"autoencoder": self.mark()})

    def check_words(self, tokens: int, vocabulary: int) -> None:
        """Refuse data whose instructions have other numbers of words.

        Args:
            tokens: Words of an instruction in the data.
            vocabulary: Numbers of words there.

        Raises:
            ValueError: Naming both.
        """
        if isinstance(self.text, TokenTable):
            length, known = len(self.text.places), self.text.words.num_embeddings
            for name, theirs, ours in (("tokens", tokens, length), ("vocabulary", vocabulary, known)):
                if theirs != ours:
                    raise ValueError(f"data.{name} is {theirs} and the model's {ours}: set data.{name} to {ours}")

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Scaled latents, `[b f 3 h w]` in [-1, 1] -> `[b f c h' w']` float32."""
        return encode(self.autoencoder, video).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Videos in [0, 1], `[b f c h' w'] -> [b f 3 h w]`."""
        return (decode(self.autoencoder, latents).float() / 2 + 0.5).clamp(0, 1)

    def condition(self, first: Tensor, tokens: Tensor, caption: Sequence[str], drop: Tensor | None = None) -> Condition:
        """What videos are generated from.

        Args:
            first: Scaled latents of the first frame, `[b 1 c h w]`.
            tokens: `[b l]`.
            caption: b instructions.
            drop: bool `[b]`, whose text is zeroed.
        """
        text = self.text(tokens, caption)
        if drop is not None:
            text = text * (~drop)[:, None, None]
        ids = torch.tensor([self.config["fps"], 127.0, 0.0], device=first.device).expand(len(first), -1)
        return Condition(first / self.autoencoder.config.scaling_factor, text, ids)

    def denoiser(
        self, condition: Condition, rows: int | None = None, unet: nn.Module | None = None, guided: bool = True
    ) -> Callable[[Tensor, Tensor | float], Tensor]:
        """The denoiser of the sampler for some contexts.

        Args:
            condition: Of the contexts.
            rows: Most videos in one pass.
            unet: Another U-Net of the same kind, such as a frozen reference.
            guided: Whether to use the model's guidance.
        """
        w = self.config["guidance"]
        scales = guidance_scales(self.frames, w) if guided and w != 1 else None

        def denoise(x: Tensor, sigma: Tensor | float) -> Tensor:
            return predict_clean(unet or self.unet, x, sigma, condition, scales, rows)

        return denoise

    # ------------------------------------------------------------------------------------------------ files

    def parts(self) -> dict[str, Any]:
        """What `VideoModel(**parts)` builds the same structure from; plain values."""
        scaling = float(self.autoencoder.config.scaling_factor)
        return {**self.config, "autoencoder": {**self.config["autoencoder"], "scaling_factor": scaling}}

    def save(
        self, folder: str | Path, dtype: torch.dtype = torch.float32, sampler: dict[str, float] | None = None
    ) -> None:
        """Write the folder; see the top of this file. Adapters are merged into the weights.

        Args:
            folder: Made if need be.
            dtype: Type of the weights in the files; they are read back as float32.
            sampler: `steps`, `sigma_min` and `sigma_max` that suit the model, for `saved_sampler`.
        """
        from lightning_modules.dyn_vpp.diffusion import VideoDiffusion

        unet = video_unet(self.config["unet"])
        unet.load_state_dict(merge(self.unet.state_dict()))
        networks: list[tuple[str, Any]] = [("unet", unet), ("vae", copy.deepcopy(self.autoencoder))]
        own = {k: self.config[k] for k in ("text", "fps", "guidance")} | ({"sampler": sampler} if sampler else {})
        with new_folder(folder) as unfinished:
            for name, network in networks:
                nn.Module.to(network, dtype).save_pretrained(unfinished / name)  # diffusers' own `to` warns of nothing
            if isinstance(self.text, TokenTable):
                (unfinished / "text").mkdir()
                state = {k: v.detach().cpu().contiguous().to(dtype) for k, v in self.text.state_dict().items()}
                save_file(state, unfinished / "text" / "model.safetensors")
            described = {"format": FORMAT, "class": "VideoModel", **own}
            (unfinished / "config.json").write_text(json.dumps(described, indent=1) + "\n")
            write_card(unfinished, Path(folder), VideoDiffusion, sum(p.numel() for p in self.parameters()))

    @classmethod
    def load(
        cls, folder: str | Path, text: dict[str, Any] | None = None, unet: dict[str, Any] | None = None
    ) -> "VideoModel":
        """Read a folder: one of ours, or one with diffusers' `unet/` and `vae/`; on the meta device, its layout alone.

        Args:
            folder: Where it is, or its id on the Hugging Face hub.
            text: Settings for a published folder, which has none of ours; its token table then starts untrained.
            unet: For such a folder: what shall differ from its U-Net's arguments, such as `num_frames`, of which its
                weights are independent.

        Raises:
            FileNotFoundError: If a part is missing.
            ValueError: If it is newer than this version, or has no text settings and none are given.
        """
        folder = fetch(folder, FILES)
        if missing := [name for name in ("unet", "vae") if not (folder / name / "config.json").is_file()]:
            raise FileNotFoundError(f"{folder} has no {missing[0]}/config.json: it is no folder of a video model")
        own: dict[str, Any] = {}
        if (folder / "config.json").is_file():
            _, own = read_config(folder, "VideoModel", FORMAT)
            own.pop("sampler", None)
            unet = None
        elif text is None:
            raise ValueError(f"{folder} does not say how text is read: set text_encoder")
        else:
            own = {"text": text}
        network = from_folder(UNetSpatioTemporalConditionModel, folder / "unet")
        autoencoder = from_folder(AutoencoderKLTemporalDecoder, folder / "vae")
        parts = {"unet": plain(network.config) | (unet or {}), "autoencoder": plain(autoencoder.config), **own}
        model = instantiate(cls, parts, folder)
        if torch.get_default_device().type == "meta":
            return model
        fill(model.unet, network.state_dict(), folder / "unet")
        fill(model.autoencoder, autoencoder.state_dict(), folder / "vae")
        if (path := folder / "text" / "model.safetensors").is_file():
            fill(model.text, read_tensors(path), path)
        return model


def saved_sampler(source: str | Path) -> dict[str, float]:
    """The `steps`, `sigma_min` and `sigma_max` that a folder (or its id on the hub) was saved with; empty if none."""
    folder = fetch(source, FILES)
    if not (folder / "config.json").is_file():
        return {}
    return read_config(folder, "VideoModel", FORMAT)[1].get("sampler", {})


def from_folder(kind: type[Any], folder: Path) -> Any:
    """A network of diffusers from its folder, in float32; on the meta device, where nothing can be read, its layout."""
    if torch.get_default_device().type == "meta":
        return kind.from_config(kind.load_config(folder))
    reading = {"use_safetensors": True, "torch_dtype": torch.float32, "low_cpu_mem_usage": False}
    try:
        network, found = kind.from_pretrained(folder, output_loading_info=True, **reading)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder} cannot be read: {' '.join(str(error).split())[:300]}") from None
    if found["missing_keys"]:  # which diffusers would leave at random values
        raise ValueError(f"{folder} lacks {len(found['missing_keys'])} tensors, such as {found['missing_keys'][0]}")
    return network


def plain(config: Any) -> dict[str, Any]:
    """Arguments of a diffusers class from its `config`: no private entries, lists for tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dict(config).items() if not k.startswith("_")}
