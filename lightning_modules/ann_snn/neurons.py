"""The integrate-and-fire neuron, with all time steps in one autograd function.

Equations (charge, fire, soft reset), membrane `v` and current `x / theta` in units of the threshold:

    h(t) = v(t-1) + x(t) / theta        s(t) = 1[h(t) >= 1]        v(t) = h(t) - s(t)        out(t) = theta s(t)

Gradient: backpropagation through all steps, membrane and reset attached, with the sigmoid surrogate
`ds/dh = alpha sg(alpha (h-1)) (1 - sg(alpha (h-1)))`, alpha = 4. With `w = ds/dh` the chain rule reads

    dL/dx(t) = dL/dx(t+1) + w(t) (dL/dout(t) - dL/dx(t+1)),

a linear interpolation in which theta cancels.
"""

from typing import Any

import torch
from spikingjelly.activation_based import functional, neuron, surrogate
from torch import nn
from torch.autograd.function import once_differentiable

SURROGATE_ALPHA = 4.0  # slope of spikingjelly's default sigmoid surrogate, used by the official code


class _Fire(torch.autograd.Function):
    """All steps: `x [t b ...]`, `v [b ...]`, `theta [] or [c 1 1]` -> spikes `[t b ...]`, `v`, sum of spikes `[b ...]`.

    The sum over time is formed here because its gradient then needs no pass over memory of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, v: torch.Tensor, theta: torch.Tensor, keep_total: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        v = torch.empty_like(x[0]).copy_(v)  # in the layout of one step of x, which may be channels last
        h, out = (x.new_empty_strided(x.shape, (v.numel(), *v.stride())) for _ in range(2))
        total = torch.zeros_like(v) if keep_total else None
        scale = theta.reciprocal()
        for x_t, h_t, out_t in zip(x, h, out, strict=True):
            torch.addcmul(v, x_t, scale, out=h_t)
            torch.ge(h_t, 1.0, out=out_t)
            torch.sub(h_t, out_t, out=v)
            out_t.mul_(theta)
            if total is not None:
                total.add_(out_t)
        ctx.save_for_backward(h, theta)
        ctx.set_materialize_grads(False)
        return out, v, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_v: torch.Tensor | None, grad_total: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        h, theta = ctx.saved_tensors
        alpha = torch.full((), SURROGATE_ALPHA, dtype=h.dtype, device=h.device)
        grad_x = torch.add(-alpha, h, alpha=SURROGATE_ALPHA).sigmoid_()
        torch.ops.aten.sigmoid_backward.grad_input(alpha.expand_as(h), grad_x, grad_input=grad_x)  # now w = ds/dh
        zero = torch.zeros_like(h[0])
        later = zero if grad_v is None else grad_v / theta
        both = torch.empty_like(zero)
        for t in reversed(range(len(h))):
            grad_t = zero if grad_out is None else grad_out[t]
            if grad_total is not None:
                grad_t = torch.add(grad_t, grad_total, out=both)
            later = torch.lerp(later, grad_t, grad_x[t], out=grad_x[t])
        return grad_x, later * theta if ctx.needs_input_grad[1] else None, None, None


class IFNode(neuron.IFNode):
    """Integrate-and-fire neuron with its threshold inside: current in ANN units in, `theta`-valued spikes out.

    The equations are those of this module's docstring; they equal spikingjelly's `x / theta -> IFNode(v_threshold=1,
    v_reset=None) -> * theta`. In multi-step mode ("m") all steps run in one autograd function; in single-step mode
    ("s") spikingjelly's own step is used. The membrane `v` (units of the threshold) stays after a call, so that a
    long simulation can run in pieces; `spikingjelly.activation_based.functional.reset_net` sets it back to the start.
    States and spikes are float32 (float64 for float64 input), also under autocast.

    Args:
        threshold: `[]` or `[C]`, theta > 0 in ANN units.
        v0: Membrane at the start, in units of the threshold, in [0, 1): 0 as in the paper, 0.5 removes the floor
            bias (Bu et al. 2022, "Optimized Potential Initialization").
        channels: Number of channels C; needed with `train_v0` only.
        train_threshold: Make theta a parameter, `theta = softplus(p)`.
        train_v0: Make v0 a parameter, one per channel.

    Attributes:
        keep_total: In mode "m", keep the sum of the output over time in `total` `[B, C, ...]`.

    Shapes: `[B, C, ...]` in mode "s", `[T, B, C, ...]` in mode "m"; the output has the shape of the input.
    """

    def __init__(
        self,
        threshold: torch.Tensor | float = 1.0,
        v0: float = 0.0,
        channels: int | None = None,
        train_threshold: bool = False,
        train_v0: bool = False,
        step_mode: str = "s",
    ):
        super().__init__(
            v_threshold=1.0,
            v_reset=None,
            surrogate_function=surrogate.Sigmoid(alpha=SURROGATE_ALPHA),
            step_mode=step_mode,
        )
        theta = _at_least_float32(torch.as_tensor(threshold).detach().clone())
        if train_threshold:
            theta = theta.reshape(-1)  # FSDP2 shards no scalars
            self.raw_threshold = nn.Parameter(theta + torch.log(-torch.expm1(-theta)))  # inverse of softplus
        else:
            self.register_buffer("fixed_threshold", theta)
        self.train_threshold = train_threshold
        if train_v0:
            if channels is None:
                raise ValueError("IFNode: train_v0 keeps one v0 per channel; give the number of channels")
            self.v0 = nn.Parameter(torch.full((channels,), float(v0)))
        else:
            self.register_buffer("v0", torch.tensor(float(v0)))
        self.keep_total = False
        self.total: torch.Tensor | None = None

    @property
    def threshold(self) -> torch.Tensor:
        """Theta `[]` (`[1]` where it is trained) or `[C]`, in ANN units, with its gradient where it is trained."""
        return nn.functional.softplus(self.raw_threshold) if self.train_threshold else self.fixed_threshold

    def extra_repr(self) -> str:
        """Shown when the network is printed."""
        return f"threshold={tuple(self.threshold.shape)}, v0={tuple(self.v0.shape)}, step_mode={self.step_mode}"

    def _start(self, x: torch.Tensor) -> torch.Tensor:
        """Membrane `[b c ...]` before the next step of `x [b c ...]`."""
        if not isinstance(self.v, torch.Tensor):
            return _per_channel(self.v0, x).to(x.dtype).expand_as(x)
        if self.v.shape != x.shape:
            raise ValueError(
                f"IFNode: the membrane is {tuple(self.v.shape)} but the input {tuple(x.shape)}; "
                "call functional.reset_net(network) between batches"
            )
        return self.v.to(x)

    def single_step_forward(self, x: torch.Tensor) -> torch.Tensor:
        """One step `[B, C, ...]`, by spikingjelly's functions."""
        x = _at_least_float32(x)
        theta = _per_channel(self.threshold, x).to(x.dtype)
        spike, self.v = functional.if_step(
            x * theta.reciprocal(), self._start(x), 1.0, None, self.surrogate_function, False
        )
        return spike * theta

    def multi_step_forward(self, x: torch.Tensor) -> torch.Tensor:
        """All steps `[T, B, C, ...]`, fused."""
        x = _at_least_float32(x)
        theta = _per_channel(self.threshold, x[0]).to(x.dtype)
        if theta.requires_grad:  # the scaling stays outside, where autograd sees it
            one = torch.ones_like(theta)
            out, self.v, total = _Fire.apply(x * theta.reciprocal(), self._start(x[0]), one, self.keep_total)
            self.total = None if total is None else total * theta
            return out * theta
        out, self.v, self.total = _Fire.apply(x, self._start(x[0]), theta, self.keep_total)
        return out

    def level(self, out: torch.Tensor) -> torch.Tensor:
        """Theta in a form that broadcasts against the output `[T, B, C, ...]`; an output is 0 or this."""
        return _per_channel(self.threshold.detach(), out[0]).to(out.dtype)

    def reset(self) -> None:
        """Membrane back to the start; drops `total`."""
        super().reset()
        self.total = None


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _per_channel(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`[]` or `[c]` as something that broadcasts against `x [b c ...]`."""
    return value.view(-1, *[1] * (x.dim() - 2)) if value.dim() else value
