"""Low-rank adapters: they start at nothing, are all that trains, and disappear on saving."""

import pytest
import torch
from torch import nn

from lightning_modules.dyn_vpp.lora import LowRank, add_low_rank, merge
from lightning_modules.dyn_vpp.networks import SMALL_UNET, video_unet
from tests.dyn_vpp.toys import UNET


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.to_q, self.other = nn.Conv2d(3, 5, 3), nn.Linear(4, 6), nn.Linear(2, 2)


def filled(network):
    """An adapted network whose adapters change something."""
    add_low_rank(network, rank=2, scale=0.5)
    for module in network.modules():
        if isinstance(module, LowRank):
            nn.init.normal_(module.up)
    return network


def test_the_change_has_the_rank_and_the_closed_form():
    toy = Toy()
    before = {k: v.clone() for k, v in toy.state_dict().items()}
    add_low_rank(toy, rank=2, scale=0.5)
    assert torch.equal(toy.to_q.weight, before["to_q.weight"])  # starts at nothing
    filled_layers = [m for m in toy.modules() if isinstance(m, LowRank)]
    assert len(filled_layers) == 2
    for layer in filled_layers:
        nn.init.normal_(layer.up)
    for name in ("conv_in", "to_q"):
        layer = getattr(toy, name)
        change = (layer.weight - before[f"{name}.weight"]).detach().flatten(1)
        adapter = layer.parametrizations.weight[0]
        torch.testing.assert_close(change, 0.5 * adapter.up @ adapter.down, rtol=1e-4, atol=1e-5)
        assert torch.linalg.matrix_rank(change, tol=1e-4) == 2
    assert [n for n, p in toy.named_parameters() if p.requires_grad] == [
        f"{name}.parametrizations.weight.0.{part}" for name in ("conv_in", "to_q") for part in ("down", "up")
    ]


def test_merged_equals_adapted():
    torch.manual_seed(0)
    unet = filled(video_unet({**SMALL_UNET, **UNET})).eval()
    x, t, text, ids = torch.randn(1, 4, 8, 4, 4), torch.zeros(1), torch.randn(1, 4, 16), torch.ones(1, 3)
    with torch.no_grad():
        adapted = unet(x, t, text, ids, return_dict=False)[0]
        plain = video_unet({**SMALL_UNET, **UNET}).eval()
        start = plain(x, t, text, ids, return_dict=False)[0]
        state = merge(unet.state_dict())
        assert state.keys() == plain.state_dict().keys()
        plain.load_state_dict(state)
        torch.testing.assert_close(plain(x, t, text, ids, return_dict=False)[0], adapted, rtol=1e-4, atol=1e-5)
        assert (start - adapted).abs().max() > 1e-2


def test_refusals():
    with pytest.raises(ValueError, match="lora_rank 0 must be at least 1"):
        add_low_rank(Toy(), 0)
    with pytest.raises(ValueError, match="no layer of the network can get an adapter"):
        add_low_rank(nn.Linear(2, 2), 4)
