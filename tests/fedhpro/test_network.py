"""Networks: sizes and the contract."""

import pytest
import torch
from torch import nn

from lightning_modules.fedhpro.network import ResNet10, SmallCNN, build_network


@pytest.mark.parametrize(("classes", "parameters"), [(10, 1_228_970), (100, 1_252_100), (200, 1_277_800)])
def test_resnet10_has_the_released_size(classes, parameters):
    network = ResNet10(classes)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert network.classifier.in_features == 256


@pytest.mark.parametrize(
    ("network", "shape"), [(ResNet10(5, 3, 4, "gn"), (3, 32, 32)), (SmallCNN(5), (1, 8, 8)), (SmallCNN(5), (1, 28, 28))]
)
def test_features_and_logits(network, shape):
    z, logits = network(torch.randn(2, *shape))
    assert logits.shape == (2, 5) and (z >= 0).all()
    torch.testing.assert_close(network.classifier(z), logits)


def test_groupnorm_leaves_no_batchnorm():
    assert not any(isinstance(m, nn.BatchNorm2d) for m in ResNet10(3, width=4, norm="gn").modules())


class NoHead(nn.Module):
    def __init__(self, num_classes):
        super().__init__()


def test_wrong_networks_say_so():
    with pytest.raises(ValueError, match="ResNet10, SmallCNN"):
        build_network("ResNet11", 10)
    with pytest.raises(ValueError, match=r"no class 'torch.nn.Nothing'"):
        build_network("torch.nn.Nothing", 10)
    with pytest.raises(ValueError, match="classifier"):
        build_network("tests.fedhpro.test_network.NoHead", 10)
    with pytest.raises(ValueError, match=r"network SmallCNN .*unexpected keyword argument 'inchannels'"):
        build_network("SmallCNN", 10, {"inchannels": 1})
    with pytest.raises(ValueError, match=r"network SmallCNN with network_args \{'width': -4\}"):
        build_network("SmallCNN", 10, {"width": -4})
    with pytest.raises(ValueError, match="'gn'"):
        ResNet10(10, norm="ln")
