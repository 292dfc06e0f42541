"""Which experts text and audio tokens go to, and what giving away half of the experts costs the text."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.checks import require
from callbacks.figures import log_figure, log_table, new_figure
from datamodules.checks import check_least
from lightning_modules.most.module import MoST
from lightning_modules.most.moe import moe_blocks


class ExpertLoad(Callback):
    """Watches `MoST`: draws the load of every expert, and logs the text loss before the first step.

    After each validation a heat map `plots/expert_load.png` (share of the picks of text and of audio tokens, layer by
    expert) and `val/expert_load_max` (the largest share of one expert, times the number of experts its tokens choose
    among: 1 is even); after a test `plots/test_expert_load.png` and `test/expert_load_max`. The shares of the last
    validation and of the test are also tables, `val_expert_load.csv` and `test_expert_load.csv`. Before training
    `start/text_loss_all_experts` and `start/text_loss` (nats per token of validation texts, with every expert allowed
    to text as in the base model, and with the text group alone).

    Args:
        batches: validation batches used for the text loss before training, at least 1.
    """

    def __init__(self, batches: int = 4) -> None:
        check_least(1, batches=batches)
        self.batches = batches
        self._rows: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another method.

        Raises:
            ValueError: if it is not MoST, or there is no data module to take texts from.
        """
        require(self, isinstance(pl_module, MoST), "the method MoST", pl_module)
        data = trainer.datamodule
        require(self, stage != "fit" or data is not None, "a data module such as SpeechText", data)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the text loss of the base model, and inside the text group."""
        if trainer.global_step or trainer.fast_dev_run:
            return
        assert isinstance(pl_module, MoST)
        sums = torch.zeros(2, 2, device=pl_module.device)  # with all experts, with the text group; nats, tokens
        pl_module.eval()
        for _, batch in zip(range(self.batches), trainer.datamodule.val_dataloader(), strict=False):
            for i, everything in enumerate((True, False)):
                loss = pl_module.text_loss(batch.text, all_experts=everything)
                sums[i] += torch.stack([loss.sum(), loss.new_tensor(float(len(loss)))])
        pl_module.train()
        sums = trainer.strategy.reduce(sums, reduce_op="sum")
        for name, (nats, tokens) in zip(("text_loss_all_experts", "text_loss"), sums, strict=True):
            pl_module.log(f"start/{name}", nats / tokens, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the heat map of this validation."""
        self._draw(trainer, pl_module, "val")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the shares of the last validation."""
        log_table(trainer, "val_expert_load", self._rows)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the heat map of the test, and write its shares."""
        self._draw(trainer, pl_module, "test")
        log_table(trainer, "test_expert_load", self._rows)

    def _draw(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        assert isinstance(pl_module, MoST) and pl_module.network is not None
        load = trainer.strategy.reduce(pl_module.expert_load.to(pl_module.device), reduce_op="sum").cpu()
        if trainer.sanity_checking or load.sum() == 0:
            return
        share = load / load.sum(-1, keepdim=True).clamp(min=1)  # layers 2 experts
        groups = moe_blocks(pl_module.network)[0].gate.groups
        # experts that each modality may pick, [2]; not those that it did pick, or a collapse would look even
        sizes = torch.tensor([share.shape[-1]] * 2) if groups is None else torch.bincount(groups.cpu(), minlength=2)
        pl_module.log(f"{stage}/expert_load_max", float((share.amax(-1).amax(0) * sizes).max()))
        log_figure(trainer, "expert_load" if stage == "val" else "test_expert_load", heat_map(share))
        self._rows = [
            {"layer": i, "modality": modality, "expert": k, "share": x}
            for i, layer in enumerate(share.tolist())
            for modality, experts in zip(("text", "audio"), layer, strict=True)
            for k, x in enumerate(experts)
        ]


def heat_map(share: Tensor) -> Figure:
    """A figure of shares [layers, 2, experts]: text above, audio below."""
    figure = new_figure(7, 1.5 + 0.5 * len(share))
    top = float(share.max())
    axes = figure.subplots(2, 1, sharex=True, squeeze=False)[:, 0]
    for axis, picks, name in zip(axes, share.unbind(1), ("text", "audio"), strict=True):
        image = axis.imshow(picks, vmin=0, vmax=top, aspect="auto", cmap="viridis")
        axis.set_ylabel(f"{name}\nlayer")
        axis.set_yticks(range(len(share)))
    axes[-1].set_xlabel("expert")
    figure.colorbar(image, ax=list(axes), label="share of the picks")
    return figure
