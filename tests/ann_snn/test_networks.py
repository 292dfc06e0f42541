import pytest
import torch
from torch import nn

from lightning_modules.ann_snn.networks import BasicBlock, CifarResNet, PadShortcut, SmallResNet


@pytest.mark.parametrize(
    ("depth", "parameters", "relus"),
    [(20, 269_722, 19), (56, 853_018, 55), (18, 11_173_962, 17), (34, 21_282_122, 33)],
)
def test_published_sizes(depth, parameters, relus):
    network = CifarResNet(depth)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert sum(isinstance(m, nn.ReLU) for m in network.modules()) == relus
    assert network(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_names_of_the_published_resnet20():
    names = set(CifarResNet(20).state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer3.2.bn2.bias", "linear.bias"} <= names
    assert not any("shortcut" in name for name in names)  # option A has no parameters
    assert len(names) == 19 * 6 + 2  # 19 convolutions with batch normalisation, one linear layer


def test_pad_shortcut_keeps_values_and_fills_with_zeros():
    x = torch.randn(2, 4, 5, 5)
    out = PadShortcut(4, 9, 2)(x)
    assert out.shape == (2, 9, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, :2].any() and not out[:, 6:].any()


def test_block_adds_its_shortcut_before_the_relu():
    block = BasicBlock(3, 3).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(block(x), x.relu())


def test_small_resnet_shapes_and_errors():
    network = SmallResNet((4, 8), (1, 2), classes=3, in_channels=2)
    assert network(torch.randn(5, 2, 8, 8)).shape == (5, 3)
    with pytest.raises(ValueError, match="one per block"):
        SmallResNet((4, 8), (1,))
    with pytest.raises(ValueError, match="6n"):
        CifarResNet(19)
