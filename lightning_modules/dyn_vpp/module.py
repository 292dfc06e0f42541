"""Stage 3: Dyn-VPP, post-training of a video diffusion model with a reward on its predicted latents.

"Dyn-VPP", public preprint "VAMPO", arXiv 2603.19370. Symbols: b contexts (first frame and instruction), g samples of
each (the group), f frames. What computes lies in `sampler`, `rewards` and `objective`; the card (README.md) maps
equations to functions and lists where this differs from the released code.
"""

import copy
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from datamodules.checks import check_above, check_least
from lightning_modules.distributed import gather_batch, log_means

from .diffusion import ROLLOUT, TRAINING, VideoDiffusion
from .lora import add_low_rank
from .metrics import PerceptualDistance, group_diversity, sharpness
from .objective import (
    Advantages,
    MicroBatch,
    PolicyLoss,
    check_keep,
    group_advantages,
    micro_batches,
    pathwise_loss,
    policy_loss,
)
from .rewards import latent_reward, pixel_reward
from .sampler import Step, context_noise, hybrid_schedule, predict, rollout
from .video_model import VideoModel


class DynVPP(VideoDiffusion):
    """Post-trains a video diffusion model so that the futures it samples come near the expert's.

    One training step: for each of b clips, g videos are sampled from one shared start, with noise added at the first
    step only; each frame is scored by `-L1 + cosine` to the expert's latents; the scores are compared within the
    group; and the U-Net's first step is updated by a clipped policy gradient, plus `anchor_weight` times the supervised
    loss on the same clips. Sampling builds no graph. The U-Net is trained, text and autoencoder are frozen, and the
    networks stay in evaluation mode. Every rank does the same number of backward passes.

    Batches, validation, test and prediction are those of `VideoDiffusion`, and so are the names logged, so that base
    and post-trained model can be compared. The base is validated before the first step, later validations also log
    `val/reward_gain`, the mean over clips of the reward minus the base's on the same noise (not after a resume).
    Logged in training: `train/reward` (mean over samples and frames) and
    `train/copy_reward`; `train/loss` (policy, with divergence and drift) and `train/anchor`; `train/ratio` and
    `train/ratio_error` (largest |r - 1|, 0 before the first update of a rollout); `train/clip_low`, `train/clip_high`
    and `train/zero_std` (shares in [0, 1]); `train/nonfinite` (rewards masked); `train/approx_kl`, `train/kl` (nats),
    `train/drift`; `train/diversity`, `train/sharpness` (see `VideoDiffusion`); `train/gradient_norm` before clipping.
    Those of the update are means over the optimiser steps of a rollout.

    Args:
        init_from: The base: a folder or a checkpoint, see `VideoDiffusion`.
        group: Samples of a context.
        stochastic: Steps of the sampler that add noise and are trained; the paper's is the first.
        step_share: Share of these steps that an update trains, drawn anew for each rollout; 0.6 in DanceGRPO.
        step_kind: See `sampler.hybrid_schedule`.
        eta: Amount of noise, in (0, 1].
        shared_noise: Whether a group starts from one initial noise.
        advantages: Of each frame, or of the whole clip (mean over frames).
        baseline: See `objective.group_advantages`; "batch" is over all ranks, here and in the next.
        scale: What the differences are divided by.
        advantage_bound: Largest absolute advantage.
        keep: Samples of a group that train, the better and the worse half of them; all if none.
        clip: Half-width of the range in which the ratio still earns.
        reduction: Of the log-ratio over a frame's latent.
        skip_frames: Leading frames without a policy term; 1 leaves out the given one.
        rescale: Undo the factor that makes the policy term's gradient tiny at large sigma.
        kl_weight: Weight of the divergence from the base.
        drift_weight: Weight of the mean squared change of the predicted clean latents against the base.
        anchor_weight: Weight of the supervised loss; 0 in the paper. With `rescale` the policy term's gradient is
            std / (c h w) times that of the mean reward: weights of that order balance the two, see the card.
        l1_weight: Of the reward.
        cosine_weight: Of the reward.
        difference_weight: Of the reward for the change from frame to frame; 0 in the paper.
        pixel_weight: Of minus the mean absolute error of decoded frames (pixels in [-1, 1]); 0 in the paper. It needs
            `group` decoded videos a clip.
        perceptual_weight: Of minus the LPIPS (by the network `perceptual`) of decoded frames; 0 in the paper. The
            released code's pixel reward, which its paper does not use, is this and the last at 1.
        inner_epochs: Optimiser steps per rollout.
        micro_batch: Most contexts (samples, where they do not share their start) in one backward pass; all if none.
        max_grad_norm: Gradients are clipped to this norm; none to leave them.
        cosine_every: Log `train/gradient_cosine` every so many rollouts, see `gradient_cosine`; 0 for never. On one
            device only.
        lora_rank: Train low-rank adapters of this rank (16 in the released code's options) instead of the whole U-Net;
            see `lora`. `save_pretrained` and `init_from` merge them.
        lora_scale: Factor of the adapters' change.
        base: Arguments of `VideoDiffusion`, such as the sampler's. The default optimiser is the paper's, AdamW with
            learning rate 1e-6.

    Raises:
        ValueError: If there is no base, the group has one sample, or a stochastic step ends at sigma 0.
    """

    learning_rate = 1e-6

    def __init__(
        self,
        init_from: str | None = None,
        group: int = 8,
        stochastic: list[int] = [0],  # noqa: B006
        step_share: float = 1.0,
        step_kind: Literal["ancestral", "drift"] = "ancestral",
        eta: float = 1.0,
        shared_noise: bool = True,
        advantages: Literal["frame", "clip"] = "frame",
        baseline: Literal["group", "batch"] = "group",
        scale: Literal["group", "batch", "none"] = "group",
        advantage_bound: float = 2.0,
        keep: int | None = None,
        clip: float = 0.2,
        reduction: Literal["mean", "sum"] = "mean",
        skip_frames: int = 0,
        rescale: bool = False,
        kl_weight: float = 0.0,
        drift_weight: float = 0.0,
        anchor_weight: float = 0.0,
        l1_weight: float = 1.0,
        cosine_weight: float = 1.0,
        difference_weight: float = 0.0,
        pixel_weight: float = 0.0,
        perceptual_weight: float = 0.0,
        inner_epochs: int = 1,
        micro_batch: int | None = None,
        max_grad_norm: float | None = 1.0,
        cosine_every: int = 0,
        lora_rank: int | None = None,
        lora_scale: float = 2.0,
        **base: Any,
    ) -> None:
        super().__init__(init_from=init_from, **base)
        self.automatic_optimization = False
        if group < 2:
            raise ValueError(f"group {group} has nothing to compare with: use at least 2 samples per context")
        check_keep(keep, group)
        if not stochastic:
            raise ValueError("stochastic names no step: without noise there is nothing to choose from")
        if not 0 < step_share <= 1:
            raise ValueError(f"step_share {step_share} is outside (0, 1]")
        check_least(1, inner_epochs=inner_epochs, micro_batch=micro_batch, lora_rank=lora_rank)
        check_above(0, clip=clip, advantage_bound=advantage_bound, max_grad_norm=max_grad_norm)
        check_least(0, kl_weight=kl_weight, drift_weight=drift_weight, anchor_weight=anchor_weight)
        check_least(0, l1_weight=l1_weight, cosine_weight=cosine_weight, difference_weight=difference_weight)
        check_least(0, pixel_weight=pixel_weight, perceptual_weight=perceptual_weight)
        check_least(0, skip_frames=skip_frames, cosine_every=cosine_every)
        if perceptual_weight and not self.hparams["perceptual"]:
            raise ValueError("perceptual_weight needs a network: set perceptual to alex, vgg or squeeze")
        self.schedule = hybrid_schedule(self.sigmas, stochastic, step_kind, eta)
        self._reference: list[nn.Module] = []  # in a list, so that it is neither trained nor saved
        self._base_rewards: dict[int, Tensor] = {}  # of validation clips
        self._base_metrics: dict[str, float] = {}

    def _start(self) -> VideoModel:
        if not self.hparams["init_from"]:
            raise ValueError(
                "DynVPP post-trains a base: name its checkpoint or folder with --model.init_from "
                "(dyn_vpp/metaworld_base makes one)"
            )
        return super()._start()

    def setup(self, stage: str) -> None:
        """See the base class; LPIPS where the reward has it."""
        super().setup(stage)
        if stage == "fit" and self.hparams["perceptual_weight"]:
            self._perceptual = [PerceptualDistance(self.hparams["perceptual"])]

    def configure_model(self) -> None:
        """Build the model once, and keep a copy of its U-Net where the base is the reference."""
        h = self.hparams
        if self.model is None and self._trainer is not None and (h["kl_weight"] or h["drift_weight"]):
            self._reference = [copy.deepcopy(self._start().unet).requires_grad_(False).eval()]
        super().configure_model()
        self.train(self.training)

    def _choose_trained(self, model: VideoModel) -> None:
        """The U-Net alone, or its adapters."""
        model.requires_grad_(False)
        if self.hparams["lora_rank"] is None:
            model.unet.requires_grad_(True)
        else:
            add_low_rank(model.unet, self.hparams["lora_rank"], self.hparams["lora_scale"])

    def train(self, mode: bool = True) -> "DynVPP":
        """The networks stay in evaluation mode: the update must see what the rollout saw."""
        super().train(mode)
        if self.model is not None:
            self.model.eval()
        return self

    # --------------------------------------------------------------------------------------- before and after

    def on_train_start(self) -> None:
        """Validate the base, so that every curve begins with it; a resumed run has done that."""
        if self.trainer.global_step > 0:
            return
        self.trainer.validating = True
        self.trainer.fit_loop.epoch_loop.val_loop.run()
        self.trainer.training = True
        self._base_metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Loss and samples; keep the base's rewards, and compare with them later."""
        rewards = self._evaluate(batch, "val")
        numbers = batch.index.tolist()
        if self.trainer.global_step == 0:
            self._base_rewards.update(zip(numbers, rewards, strict=True))
        elif self._base_rewards:
            gains = rewards - torch.stack([self._base_rewards[n] for n in numbers])
            log_means(self, {"val/reward_gain": gains.mean()}, len(numbers), prog_bar=True)

    def on_train_end(self) -> None:
        """Say what the training changed."""
        before, now = self._base_metrics, self.trainer.callback_metrics
        if "val/reward" in before and "val/reward_gain" in now:
            rank_zero_info(
                f"Reward of predicted frames on validation clips: {before['val/reward']:.4f} before, "
                f"{now['val/reward']:.4f} after {self.trainer.global_step} steps; with the ODE sampler "
                f"{before['val/reward_ode']:.4f} and {now['val/reward_ode']:.4f}; repeating the first frame "
                f"{now['val/copy_reward']:.4f}"
            )

    # ------------------------------------------------------------------------------------------- training

    def _noise(self, index: Tensor, latents: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Start `[b 1 f c h w]` (or `[b g ...]`) and one `[b g f c h w]` for each stochastic step."""
        h = self.hparams
        g, starts = h["group"], 1 if h["shared_noise"] else h["group"]
        shape = (starts + g * sum(step.std > 0 for step in self.schedule), *latents.shape[1:])
        draws = context_noise(index.tolist(), shape, h["seed"], ROLLOUT, self.current_epoch).to(latents)
        return draws[:, :starts], list(draws[:, starts:].split(g, dim=1))

    def _trained_steps(self, steps: list[Step]) -> list[Step]:
        """The stochastic steps that train; a choice among them is a function of (seed, rollout), alike on all ranks."""
        h = self.hparams
        count = max(1, round(h["step_share"] * len(steps)))
        rollouts = self.trainer.global_step // h["inner_epochs"]
        chosen = np.random.default_rng([h["seed"], rollouts]).permutation(len(steps))[:count]
        return [steps[i] for i in sorted(chosen)]

    def _advantages(self, rewards: Tensor) -> Advantages:
        """Of this rank's contexts; statistics of the batch are over all ranks."""
        h = self.hparams
        if h["advantages"] == "clip":
            rewards = rewards.mean(-1, keepdim=True)
        whole = group_advantages(
            gather_batch(rewards),
            baseline=h["baseline"],
            scale=h["scale"],
            bound=h["advantage_bound"],
            keep=h["keep"],
        )
        b = len(rewards)
        return whole._replace(values=whole.values[self.global_rank * b : (self.global_rank + 1) * b])

    def _policy_loss(self, part: MicroBatch, condition: Any) -> PolicyLoss:
        assert self.model is not None
        h = self.hparams
        seen = condition.rows(part.contexts)
        reference = None
        if self._reference:
            self._reference[0].to(self.device)
            with torch.no_grad():
                base = self.model.denoiser(seen, unet=self._reference[0])
                reference = predict(base, part.step.x, part.step.transition.sigma)
        names = ("clip", "reduction", "skip_frames", "rescale", "kl_weight", "drift_weight")
        return policy_loss(
            self.model.denoiser(seen),
            part.step,
            part.advantages,
            reference=reference,
            **{name: h[name] for name in names},
        )

    def gradient_cosine(self, batch: Any, contexts: int = 8) -> float:
        """Cosine between this batch's policy gradient and the pathwise gradient of its mean latent reward.

        The pathwise gradient differentiates the reward through the sampler, on the same noise: it tells how much of the
        estimate is signal. It takes the memory and about three times the time of a rollout.

        Args:
            batch: Of clips.
            contexts: Differentiated at once.
        """
        assert self.model is not None
        h = self.hparams
        weights = {name: h[name] for name in ("l1_weight", "cosine_weight", "difference_weight")}
        latents = self.latents(batch)
        condition = self.model.condition(latents[:, :1], batch.tokens, batch.caption)
        start, noise = self._noise(batch.index, latents)
        trained = [p for p in self.model.unet.parameters() if p.requires_grad]
        sums = [torch.zeros(sum(p.numel() for p in trained), device=latents.device) for _ in range(2)]
        last = max(h["stochastic"])
        for rows in torch.arange(len(latents), device=latents.device).split(contexts):
            seen, expert = condition.rows(rows), latents[rows][:, None]
            denoise = self.model.denoiser(seen)
            result = rollout(denoise, start[rows], [n[rows] for n in noise], self.schedule)

            def reward(x: Tensor, expert: Tensor = expert) -> Tensor:
                return latent_reward(x, expert, **weights)[..., h["skip_frames"] :]

            advantages = self._advantages(latent_reward(result.latents, expert, **weights)).values
            (part,) = micro_batches(result.steps[-1:], advantages)
            losses = (
                self._policy_loss(part, seen).loss,
                pathwise_loss(denoise, result.steps[-1], self.schedule[last + 1 :], reward),
            )
            for total, loss in zip(sums, losses, strict=True):
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
                filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, trained, strict=True)]
                total += torch.cat([g.flatten() for g in filled]) * len(rows)
        return float(torch.nn.functional.cosine_similarity(sums[0], sums[1], dim=0))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Sample, score, compare, update."""
        assert self.model is not None
        h, b = self.hparams, len(batch.index)
        if h["cosine_every"] and batch_idx % h["cosine_every"] == 0:
            self.log("train/gradient_cosine", self.gradient_cosine(batch), batch_size=b)
        latents = self.latents(batch)
        condition = self.model.condition(latents[:, :1], batch.tokens, batch.caption)
        start, noise = self._noise(batch.index, latents)
        result = rollout(self.model.denoiser(condition, h["rows"]), start, noise, self.schedule)
        weights = {name: h[name] for name in ("l1_weight", "cosine_weight", "difference_weight")}
        rewards = latent_reward(result.latents, latents[:, None], **weights)
        if h["pixel_weight"] or h["perceptual_weight"]:
            decoded = torch.stack([self.model.decode(x) for x in result.latents.unbind(1)], dim=1)
            rewards = rewards + pixel_reward(
                2 * decoded - 1,
                2 * self.pictures(batch)[:, None] - 1,
                h["pixel_weight"],
                self._perceptual[0] if h["perceptual_weight"] else None,
                h["perceptual_weight"],
            )
        advantages = self._advantages(rewards)

        steps = self._trained_steps(result.steps)
        updates = [self._update(batch, latents, condition, steps, advantages) for _ in range(h["inner_epochs"])]

        watched = {
            "reward": rewards[rewards.isfinite()].mean(),
            "copy_reward": latent_reward(latents[:, :1], latents, **weights).mean(),
            "zero_std": advantages.zero_std_fraction,
            "nonfinite": advantages.nonfinite.float(),
            "diversity": group_diversity(result.latents)[..., 1:].mean(),
            "sharpness": sharpness(result.latents, latents).mean(),
        }
        watched |= {name: torch.stack([u[name] for u in updates]).mean() for name in updates[0]}
        error = watched.pop("ratio_error")
        self.log("train/ratio_error", error, batch_size=b, sync_dist=True, reduce_fx="max")
        self.log_dict({f"train/{k}": v for k, v in watched.items()}, batch_size=b, sync_dist=True)

    def _update(
        self, batch: Any, latents: Tensor, condition: Any, steps: Any, advantages: Advantages
    ) -> dict[str, Tensor]:
        """One optimiser step on a rollout; returns what is logged about it."""
        assert self.model is not None
        h, b = self.hparams, len(latents)
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        optimizer.zero_grad()
        parts = micro_batches(steps, advantages.values, h["micro_batch"])
        losses = []
        for part in parts:
            losses.append(self._policy_loss(part, condition))
            self.manual_backward(part.weight * losses[-1].loss)
        seen = {
            name: sum(part.weight * value.detach() for part, value in zip(parts, values, strict=True))
            for name, values in zip(PolicyLoss._fields, zip(*losses, strict=True), strict=True)
        }
        seen["ratio_error"] = torch.stack([loss.ratio_error for loss in losses]).max()
        if h["anchor_weight"]:
            seen["anchor"] = latents.new_zeros(())
            for rows in torch.arange(b).split(h["micro_batch"] or b):
                captions = [batch.caption[i] for i in rows]
                key, drop = (TRAINING, self.current_epoch), h["text_dropout"]
                of_rows = (latents[rows], batch.tokens[rows], captions, batch.index[rows])
                loss = self.supervised_loss(*of_rows, key, drop) * len(rows) / b
                seen["anchor"] += loss.detach()
                self.manual_backward(h["anchor_weight"] * loss)
        gradients = [p.grad for p in self.model.unet.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        seen["gradient_norm"] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if h["max_grad_norm"] is not None:
            self.clip_gradients(optimizer, gradient_clip_val=h["max_grad_norm"], gradient_clip_algorithm="norm")
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return seen
