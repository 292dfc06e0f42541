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
    encoder = ImageEncoder(features=5, crop=24)
    image = torch.randint(0, 256, (3, 2, 32, 30, 3), dtype=torch.uint8)
    centre = encoder(image)
    assert centre.shape == (3, 2, 5)
    torch.testing.assert_close(encoder(image[..., 4:28, 3:27, :]), centre, atol=1e-4, rtol=1e-4)
    corner = torch.tensor([[0.0, 0.0], [0.999, 0.999], [0.999, 0.0]])[:, None].expand(-1, 2, -1)
    expected = torch.stack([image[0, :, :24, :24], image[1, :, 8:, 6:], image[2, :, 8:, :24]])
    torch.testing.assert_close(encoder(image, corner), encoder(expected), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="smaller than image_crop"):
        encoder(image[..., :20, :, :])
