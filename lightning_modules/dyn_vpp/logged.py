"""Means over the clips of all ranks."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor


def log_means(module: LightningModule, values: dict[str, Tensor], count: int, prog_bar: bool = False) -> None:
    """Log the mean over all clips of an evaluation, whatever their spread over batches and ranks.

    Lightning's own reduction over ranks divides by a rounded number of clips where ranks have unequal ones.

    Args:
        module: In a step that every rank takes.
        values: Means over this rank's clips, by log name.
        count: Of these clips; with 0 the values do not count, not even if they are not a number.
        prog_bar: Whether the progress bar shows them.
    """
    stacked = torch.stack([value.detach().float() for value in values.values()])
    totals = torch.cat([(stacked * count if count else torch.zeros_like(stacked)), stacked.new_tensor([float(count)])])
    if module.trainer.world_size > 1:
        totals = module.trainer.strategy.reduce(totals, reduce_op="sum")
    if clips := int(totals[-1]):
        means = dict(zip(values, totals[:-1] / clips, strict=True))
        module.log_dict(means, batch_size=clips, prog_bar=prog_bar, rank_zero_only=False)
