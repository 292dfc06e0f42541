import pytest
import torch

from lightning_modules.dyn_vpp.rewards import cosine_reward, difference_reward, l1_reward, latent_reward, pixel_reward


def test_perfect_prediction_and_its_opposite():
    target = torch.randn(2, 1, 5, 4, 3, 3)
    torch.testing.assert_close(latent_reward(target, target), torch.ones(2, 1, 5))
    torch.testing.assert_close(cosine_reward(-target, target), -torch.ones(2, 1, 5))
    torch.testing.assert_close(cosine_reward(3 * target, target), torch.ones(2, 1, 5))
    assert (cosine_reward(0 * target, target) == 0).all()


def test_group_broadcasts_and_equals_a_loop():
    prediction, target = torch.randn(2, 3, 5, 4, 3, 3), torch.randn(2, 1, 5, 4, 3, 3)
    together = latent_reward(prediction, target, 0.5, 2.0, 0.25)
    assert together.shape == (2, 3, 5)
    for b in range(2):
        for g in range(3):
            for f in range(5):
                p, y = prediction[b, g], target[b, 0]
                alone = -0.5 * (p[f] - y[f]).abs().mean() + 2 * (p[f] * y[f]).sum() / (p[f].norm() * y[f].norm())
                if f:
                    alone = alone - 0.25 * ((p[f] - p[f - 1]) - (y[f] - y[f - 1])).abs().mean()
                torch.testing.assert_close(together[b, g, f], alone)


def test_difference_ignores_a_constant_offset():
    target = torch.randn(1, 6, 4, 3, 3)
    assert difference_reward(target + 5, target).abs().max() < 1e-5
    torch.testing.assert_close(l1_reward(target + 5, target), torch.full((1, 6), -5.0))
    assert difference_reward(target[:, :1].expand_as(target), target).max() < -0.1  # copying a frame is seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_float32(dtype):
    target = torch.randn(1, 2, 4, 32, 32)
    reward = latent_reward(target.to(dtype), target.to(dtype))
    assert reward.dtype == torch.float32
    torch.testing.assert_close(reward, torch.ones(1, 2))


def test_pixel_reward_takes_any_distance():
    prediction, target = torch.rand(2, 3, 4, 3, 8, 8) * 2 - 1, torch.rand(2, 1, 4, 3, 8, 8) * 2 - 1

    def distance(a, b):
        assert a.shape == b.shape == (24, 3, 8, 8)
        return (a - b).square().mean((1, 2, 3)).view(-1, 1, 1, 1)  # LPIPS returns singleton axes

    torch.testing.assert_close(
        pixel_reward(prediction, target, 0.5, distance, 2.0),
        -0.5 * (prediction - target).abs().mean((-3, -2, -1)) - 2 * (prediction - target).square().mean((-3, -2, -1)),
    )
    torch.testing.assert_close(pixel_reward(prediction, target), l1_reward(prediction, target))
