import pytest
import torch

from lightning_modules.focal_policy.sampler import flow_times


def draws(n: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.rand(n, generator=g), *torch.randn(2, n, generator=g), torch.rand(n, generator=g)]


def test_v0_is_anchored_near_the_end():
    tau, r = flow_times(*draws(100_000))
    assert tau.min() >= 0.01 and tau.max() <= 1
    assert 0.970 < r.median() < 0.981
    assert 0.76 < (r > 0.9).float().mean() < 0.80
    assert 0.085 < (r < tau).float().mean() < 0.11


def test_the_other_samplers():
    d = draws(1000)
    tau, r = flow_times(*d, sampler="cfm", delta=0.02)
    torch.testing.assert_close(r, (tau + 0.02).clamp(max=1))
    assert flow_times(*d, sampler="terminal")[1].eq(1).all()
    torch.testing.assert_close(flow_times(*d, sampler="logit_normal")[1], torch.sigmoid(4 + 1.6 * d[2]))
    # The mixture between: v1 never passes the draw a, v0 with ratio 0 is the larger of the two.
    assert (flow_times(*d, sampler="v1")[1] <= torch.sigmoid(0.6 + 1.6 * d[1])).all()
    assert (flow_times(*d, ratio=0.0)[1] >= flow_times(*d, ratio=1.0)[1]).all()


def test_unknown_sampler_says_so():
    with pytest.raises(ValueError, match="v7"):
        flow_times(*draws(2), sampler="v7")
