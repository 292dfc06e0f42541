"""Which experts text and audio tokens go to, and what giving away half of the experts costs the text."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.figures import log_figure, new_figure
from lightning_modules.most.module import MoST


class ExpertLoad(Callback):
    """Watches `MoST`: draws the load of every expert, and logs the text loss before the first step.

    After each validation a heat map `expert_load.png` (share of the picks of text and of audio tokens, layer by
    expert) and `val/expert_load_max` (the largest share of one expert, times the number of experts its tokens choose
    among: 1 is even). Before training `start/text_loss_all_experts` and `start/text_loss` (nats per token of
    validation texts, with every expert allowed to text as in the base model, and with the text group alone).

    Args:
        batches: validation batches used for the text loss before training.
    """

    def __init__(self, batches: int = 4) -> None:
        self.batches = batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the text loss of the base model, and inside the text group."""
        if trainer.global_step or trainer.fast_dev_run:
            return
        assert isinstance(pl_module, MoST)
        texts: list[str] = []
        for _, batch in zip(range(self.batches), trainer.datamodule.val_dataloader(), strict=False):
            texts += batch.text
        pl_module.eval()
        losses = {"all_experts": pl_module.text_loss(texts, all_experts=True), "": pl_module.text_loss(texts)}
        pl_module.train()
        for name, loss in losses.items():
            value = trainer.strategy.reduce(loss.mean(), reduce_op="mean")
            pl_module.log(f"start/text_loss{'_' if name else ''}{name}", value, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the heat map of this validation."""
        assert isinstance(pl_module, MoST)
        load = trainer.strategy.reduce(pl_module.expert_load.to(pl_module.device), reduce_op="sum").cpu()
        if trainer.sanity_checking or load.sum() == 0:
            return
        share = load / load.sum(-1, keepdim=True).clamp(min=1)  # layers 2 experts
        used = (load > 0).any(0).sum(-1)  # experts that a modality ever picked, [2]
        pl_module.log("val/expert_load_max", float((share.amax(-1).amax(0) * used).max()))
        if not trainer.fast_dev_run:
            log_figure(trainer, "expert_load", heat_map(share))


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
