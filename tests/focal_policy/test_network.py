import pytest
import torch

from lightning_modules.focal_policy.encoders import ImageEncoder, ObservationEncoder, PointEncoder
from lightning_modules.focal_policy.network import ConditionalUnet1d


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_sizes_of_the_published_networks():
    with torch.device("meta"):
        assert count(ConditionalUnet1d(4, 256)) / 1e6 == pytest.approx(255.07, abs=0.005)
        assert count(ConditionalUnet1d(26, 256)) / 1e6 == pytest.approx(255.15, abs=0.005)
        assert count(ObservationEncoder(2, 9, 3)) == 63_872
        assert count(ObservationEncoder(2, 24, 3)) == 64_832


@pytest.mark.parametrize(("widths", "length"), [((16, 24, 32), 12), ((16, 16, 16), 4), ((8, 16), 6), ((8,), 5)])
def test_velocity_has_the_shape_of_the_window(widths, length):
    net = ConditionalUnet1d(3, 7, widths, time_features=8)
    assert net(torch.randn(2, length, 3), torch.rand(2), torch.randn(2, 7)).shape == (2, length, 3)


@pytest.mark.parametrize("length", [6, 10])
def test_a_window_that_does_not_divide_says_so(length):
    net = ConditionalUnet1d(3, 7, (8, 16, 16), time_features=8)
    with pytest.raises(ValueError, match="multiple of 4"):
        net(torch.randn(2, length, 3), torch.rand(2), torch.randn(2, 7))


def test_impossible_networks_say_so():
    with pytest.raises(ValueError, match="multiples of groups"):
        ConditionalUnet1d(3, 7, (10, 16))
    with pytest.raises(ValueError, match="odd"):
        ConditionalUnet1d(3, 7, (8, 16), kernel_size=4)
    with pytest.raises(ValueError, match="even"):
        ConditionalUnet1d(3, 7, (8, 16), time_features=7)
    with pytest.raises(ValueError, match="one or more multiples"):
        ConditionalUnet1d(3, 7, ())
    with pytest.raises(ValueError, match="observes nothing"):
        ObservationEncoder(2, 0, 0)


def test_points_may_come_in_any_order_and_more_than_once():
    encoder = PointEncoder()
    points = torch.randn(2, 32, 3)
    expected = encoder(points)
    torch.testing.assert_close(encoder(points[:, torch.randperm(32)]), expected)
    torch.testing.assert_close(encoder(torch.cat([points, points[:, :5]], dim=1)), expected)


@pytest.mark.parametrize("channels", [3, 6])
def test_critical_points_alone_give_output_and_gradients(channels):
    torch.manual_seed(0)
    encoder = PointEncoder(channels)
    points = torch.randn(3, 2, 200, channels)
    points[0, 0, 150:] = points[0, 0, 0]  # a padded cloud
    assert encoder._critical(points).shape[2] < 180
    cotangent = torch.randn(3, 2, 64)
    found = torch.autograd.grad((encoder(points) * cotangent).sum(), list(encoder.parameters()))
    plain = encoder.final_projection(encoder.mlp(points).amax(dim=-2))
    expected = torch.autograd.grad((plain * cotangent).sum(), list(encoder.parameters()))
    torch.testing.assert_close(encoder(points), plain)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_condition_reads_history_only_and_keeps_the_order_of_the_parts():
    encoder = ObservationEncoder(2, state_dim=3, point_channels=3, state_features=8, point_features=4)
    observation = {"state": torch.randn(2, 5, 3), "point_cloud": torch.randn(2, 5, 16, 3)}
    condition = encoder(observation)
    assert condition.shape == (2, encoder.features) == (2, 24)
    changed = {k: torch.cat([v[:, :2], v[:, 2:] + 1], dim=1) for k, v in observation.items()}
    torch.testing.assert_close(encoder(changed), condition)
    expected = encoder.extractor(observation["point_cloud"][:, 1])
    torch.testing.assert_close(condition[:, 12:16], expected)


def test_image_crop_follows_the_corner():
    torch.manual_seed(0)
    encoder = ImageEncoder(features=5, crop=64)
    image = torch.randint(0, 256, (3, 2, 72, 70, 3), dtype=torch.uint8)
    centre = encoder(image)
    assert centre.shape == (3, 2, 5)
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(encoder(image[..., 4:68, 3:67, :]), centre, **close)
    corner = torch.tensor([[0.0, 0.0], [0.999, 0.999], [0.999, 0.0]])[:, None].expand(-1, 2, -1)
    expected = torch.stack([image[0, :, :64, :64], image[1, :, 8:, 6:], image[2, :, 8:, :64]])
    found = encoder(image, corner)
    torch.testing.assert_close(found, encoder(expected), **close)
    assert (found - centre).abs().max() > 1e-3  # another crop is another feature
    with pytest.raises(ValueError, match=r"60x70 pixels are smaller than the crop of 64: lower model\.image_crop"):
        encoder(image[..., :60, :, :])


def test_the_image_encoder_sees():
    """Other images, other conditions, and every weight learns; what ResNet-18 would see as one point is refused."""
    torch.manual_seed(0)
    encoder = ObservationEncoder(1, state_dim=0, point_channels=0, image_crop=64)
    image = torch.zeros(2, 1, 64, 64, 3, dtype=torch.uint8)
    image[0, :, :20, :20], image[1, :, 40:, 40:] = 255, 255
    condition = encoder({"image": image})
    assert (condition[0] - condition[1]).abs().max() > 1e-2
    condition.square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in encoder.image_encoder.backbone.parameters())
    for crop in (1, 32):
        with pytest.raises(ValueError, match=f"image_crop {crop} must be at least 33"):
            ImageEncoder(crop=crop)
