import pytest
import torch
from torch import nn

from lightning_modules.ann_snn.conversion import convert
from lightning_modules.ann_snn.energy import AC_NJ, MAC_NJ, measure_energy


def test_counts_by_hand():
    """conv (static) -> neuron -> conv (binary input) -> neuron -> average pool -> linear (graded input)."""
    ann = nn.Sequential(
        *(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, 3, 1, bias=False), nn.ReLU()),
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 4)),
    ).eval()
    with torch.no_grad():
        ann[0].weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))  # the second channel never fires
        ann[2].weight.fill_(0.5)
    x = torch.tensor([[[[1.0, 1.0], [0.5, 0.25]]]])
    student = convert(ann, [x], percentile=100)
    energy = measure_energy(student, x, 4)
    stem, middle, head = energy.layers.values()
    assert (stem.macs, stem.operations, stem.accumulates) == (8, 8, False)  # once, whatever T is
    # rates 1, 1, 1/2, 1/4 of channel 0: 4 + 4 + 2 + 1 spikes of 32 neuron-steps, each to 3 outputs
    assert energy.firing_rates["spiking_0"] == pytest.approx(11 / 32)
    assert (middle.macs, middle.accumulates) == (24, True)
    assert middle.operations == pytest.approx(11 * 3)
    assert head.macs == 12 and not head.accumulates  # averages of spikes have several levels
    assert energy.ann == pytest.approx(MAC_NJ * (8 + 24 + 12))
    assert energy.snn == pytest.approx(MAC_NJ * (8 + head.operations) + AC_NJ * 33)
