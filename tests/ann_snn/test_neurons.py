import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spikingjelly.activation_based import functional, neuron, surrogate

from lightning_modules.ann_snn.neurons import IFNode


def stock(x: torch.Tensor, theta: torch.Tensor, v0: float) -> torch.Tensor:
    """The same neuron out of spikingjelly's parts, step by step."""
    node = neuron.IFNode(v_reset=None, detach_reset=False, surrogate_function=surrogate.Sigmoid())
    node.v = torch.full_like(x[0], v0)
    theta = theta.view(-1, *[1] * (x.dim() - 3)) if theta.dim() else theta
    return torch.stack([node(x_t / theta) for x_t in x]) * theta


@pytest.mark.parametrize("theta", [torch.tensor(0.7), torch.tensor([0.5, 1.0, 2.0])])
@pytest.mark.parametrize("v0", [0.0, 0.5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_fused_equals_spikingjelly_step_by_step(theta, v0, layout):
    torch.manual_seed(0)
    x = torch.randn(6, 2, 3, 4, 4, dtype=torch.float64)
    x = torch.stack([x_t.contiguous(memory_format=layout) for x_t in x]).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    node = IFNode(theta.double(), v0, step_mode="m")
    out, expected = node(x), stock(twin, theta.double(), v0)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("train_threshold", [False, True])
def test_gradients_of_state_total_threshold_and_start(train_threshold):
    """Every output and every parameter, against the same node in single-step mode, where autograd does the work."""
    torch.manual_seed(0)
    options = {"threshold": torch.tensor([0.6, 1.2]), "v0": 0.3, "channels": 2}
    options |= {"train_threshold": train_threshold, "train_v0": True}
    fused, single = IFNode(**options, step_mode="m").double(), IFNode(**options).double()
    fused.keep_total = True
    x = torch.randn(5, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    out, expected = fused(x), torch.stack([single(x_t) for x_t in twin])
    torch.testing.assert_close(fused.total, expected.sum(0))
    a, b, c = torch.randn_like(out), torch.randn_like(out[0]), torch.randn_like(out[0])
    ((out * a).sum() + (fused.v * b).sum() + (fused.total * c).sum()).backward()
    ((expected * a).sum() + (single.v * b).sum() + (expected.sum(0) * c).sum()).backward()
    torch.testing.assert_close(x.grad, twin.grad)
    for left, right in zip(fused.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_gradient_of_the_total_alone():
    node = IFNode(step_mode="m")
    node.keep_total = True
    x = torch.rand(4, 2, 3, requires_grad=True)
    node(x)
    node.total.sum().backward()
    twin = x.detach().clone().requires_grad_()
    IFNode(step_mode="m")(twin).sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


@given(a=st.integers(-64, 192), t=st.integers(1, 40), half=st.booleans(), level=st.sampled_from([0.25, 1.0, 4.0]))
@settings(max_examples=60, deadline=None)
def test_constant_input_counts_floor(a, t, half, level):
    """Constant current a (a multiple of 1/64, exact in binary): floor(a T + v0) spikes, at most one a step."""
    current, v0 = a / 64, 0.5 * half
    node = IFNode(torch.tensor(level), v0, step_mode="m")
    count = (node(torch.full((t, 1, 1), current * level)) / level).sum().item()
    assert count == min(max(int((current * t + v0) // 1), 0), t)


def test_chunks_of_time_carry_the_membrane_and_its_gradient():
    torch.manual_seed(0)
    x = torch.rand(8, 2, 3, dtype=torch.float64, requires_grad=True)
    whole, parts = IFNode(0.8, step_mode="m"), IFNode(0.8, step_mode="m")
    out, pieces = whole(x), torch.cat([parts(x[:3]), parts(x[3:])])
    assert torch.equal(out, pieces) and torch.equal(whole.v, parts.v)
    weight = torch.randn_like(out)
    grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (out, pieces)]
    torch.testing.assert_close(*grads)


def test_reset_and_stale_state():
    node = IFNode(step_mode="m", v0=0.5)
    x = torch.rand(3, 4, 2)
    first = node(x)
    assert not torch.equal(node(x), first) or node.v.abs().sum() > 0
    with pytest.raises(ValueError, match="reset_net"):
        node(torch.rand(3, 5, 2))  # another batch size with stale membranes
    functional.reset_net(node)
    assert torch.equal(node(x), first)


def test_float32_under_autocast():
    node, x = IFNode(0.9, step_mode="m"), torch.rand(4, 2, 3)
    expected = IFNode(0.9, step_mode="m")(x.bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):
        out = node(x.bfloat16())
    assert out.dtype == node.v.dtype == torch.float32
    assert torch.equal(out, expected)


def test_state_dict_holds_no_membrane_and_softplus_gives_theta_back():
    node = IFNode(torch.tensor([0.01, 1.0, 30.0]), channels=3, train_threshold=True, train_v0=True)
    node(torch.rand(2, 3))
    assert set(node.state_dict()) == {"raw_threshold", "v0"}
    torch.testing.assert_close(node.threshold.detach(), torch.tensor([0.01, 1.0, 30.0]))
    with pytest.raises(ValueError, match="number of channels"):
        IFNode(train_v0=True)
