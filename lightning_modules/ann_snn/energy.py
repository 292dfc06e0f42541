"""Energy of one inference, by a count of operations.

45 nm figures (Horowitz 2014, as used by the authors' code): a multiply-accumulate (MAC) costs 4.6 pJ, an accumulate
(AC) 0.9 pJ, both float32. What is left out, for ANN and SNN alike: memory traffic, bias additions, the neurons' own
updates, pooling. So the figures compare arithmetic, not chips.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_modules.ann_snn.conversion import SpikingNetwork, simulate
from lightning_modules.ann_snn.neurons import IFNode

MAC_NJ, AC_NJ = 4.6e-3, 0.9e-3
_WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


class LayerEnergy(NamedTuple):
    """One weighted layer, per image.

    Attributes:
        macs: Multiply-accumulates of one pass of the ANN's layer.
        operations: Operations of the spiking layer in all T steps: only nonzero inputs count; a layer in front of the
            first neuron runs once.
        accumulates: The inputs have one level per channel, so that theta can be folded into the weights and an AC is
            enough; otherwise (images, averaged or summed spikes) each operation is a MAC.
    """

    macs: float
    operations: float
    accumulates: bool


class Energy(NamedTuple):
    """Energies per image, and where they come from.

    Attributes:
        ann: nJ of the source network, `4.6 pJ x MACs`.
        snn: nJ of the spiking network in T steps.
        layers: Layer name -> `LayerEnergy`.
        firing_rates: Neuron layer -> spikes per neuron and step, in [0, 1].
    """

    ann: float
    snn: float
    layers: dict[str, LayerEnergy]
    firing_rates: dict[str, float]


@torch.no_grad()
def measure_energy(student: SpikingNetwork, x: torch.Tensor, time_steps: int) -> Energy:
    """Count the operations of a batch (specification: `E = 4.6 MAC_1 + 0.9 sum_l T r_(l-1) MAC_l`).

    Args:
        student: The spiking network.
        x: Images `[B, C, H, W]`.
        time_steps: T; all steps are held in memory at once.

    Returns:
        Means over the batch.
    """
    layers: dict[str, LayerEnergy] = {}
    rates: dict[str, float] = {}

    def count(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        spikes, once = inputs[0], getattr(module, "step_mode", "s") == "s"
        per_output = module.weight[0].numel()  # type: ignore[index]
        macs = output.numel() / (1 if once else time_steps) / len(x) * per_output
        if once:  # the same image at every step: computed a single time
            layers[name] = LayerEnergy(macs, macs, False)
            return
        channel = 2 if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else spikes.dim() - 1
        others = [d for d in range(spikes.dim()) if d != channel]
        level = spikes.amax(others, keepdim=True)
        single = bool(((spikes == 0) | torch.isclose(spikes, level)).all())
        operations = macs * time_steps * float((spikes != 0).float().mean())
        layers[name] = LayerEnergy(macs, operations, single)

    handles = []
    try:
        for name, module in student.network.named_modules():
            if isinstance(module, _WEIGHTED):
                handles.append(module.register_forward_hook(lambda m, i, o, name=name: count(name, m, i, o)))
            elif isinstance(module, IFNode):
                handles.append(
                    module.register_forward_hook(
                        lambda m, i, o, name=name: rates.update({name: float((o != 0).float().mean())})
                    )
                )
        simulate(student, x, time_steps)
    finally:
        for handle in handles:
            handle.remove()
    ann = MAC_NJ * sum(layer.macs for layer in layers.values())
    snn = sum((AC_NJ if layer.accumulates else MAC_NJ) * layer.operations for layer in layers.values())
    return Energy(ann, snn, layers, rates)
