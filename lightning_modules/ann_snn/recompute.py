"""Backpropagation through time in little memory: keep spikes as booleans, recompute currents and membranes.

Plain backpropagation keeps two float32 numbers per neuron and step, the membrane and the spike that the next layer
saves. Here the network is cut behind every neuron; of each piece only the incoming spikes are kept, one byte each, and
the piece runs once more in the backward pass. The gradients are the same; the price is one more forward pass.

`torch.utils.checkpoint` would not do: the repeated run would start from the membrane that the first one left behind.
"""

from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from lightning_modules.ann_snn.neurons import IFNode


class Piece(NamedTuple):
    """A part of the network that ends in a neuron, or in the logits.

    Attributes:
        name: The value that it makes: name of the last node.
        body: Runs the part; its modules are those of the network.
        inputs: Names of the values that it takes.
        neuron: The neuron at the end; None for the logits.
        label: The neuron's name in the network.
        last_uses: Values that no later piece takes.
    """

    name: str
    body: fx.GraphModule
    inputs: list[str]
    neuron: IFNode | None
    label: str
    last_uses: list[str]


def cut(network: fx.GraphModule) -> list[Piece]:
    """The pieces of a converted network, in order of execution.

    What lies between two neurons and feeds several of them becomes part of several pieces.
    """
    modules = dict(network.named_modules())
    order = list(network.graph.nodes)
    neurons = {n for n in order if n.op == "call_module" and isinstance(modules[n.target], IFNode)}
    kept = neurons | {n for n in order if n.op == "placeholder"}
    pieces = []
    for end in order:
        if end not in neurons and end.op != "output":
            continue
        body, values, stack = fx.Graph(), {}, [end]
        part = set()
        while stack:  # back to the neurons before
            node = stack.pop()
            if node not in part:
                part.add(node)
                stack += [source for source in node.all_input_nodes if source not in kept]
        inputs = [n for n in order if n in kept and any(n in node.all_input_nodes for node in part)]
        for node in inputs:
            values[node] = body.placeholder(node.name)
        for node in order:
            if node in part:
                values[node] = body.node_copy(node, values.__getitem__)
        if end.op != "output":
            body.output(values[end])
        neuron = modules[end.target] if end in neurons else None
        names = [n.name for n in inputs]
        pieces.append(Piece(end.name, fx.GraphModule(network, body), names, neuron, str(end.target), []))
    for i, piece in enumerate(pieces):
        later = {name for other in pieces[i + 1 :] for name in other.inputs}
        piece.last_uses.extend(name for name in piece.inputs if name not in later)
    return pieces


class _Recompute(torch.autograd.Function):
    """One piece: (piece, thetas of its inputs, n, n inputs, parameters) -> spikes `[t b ...]`, their sum `[b ...]`."""

    @staticmethod
    def forward(
        ctx: Any, piece: Piece, thetas: list[torch.Tensor | None], n: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert piece.neuron is not None
        inputs, parameters = tensors[:n], tensors[n:]
        out = piece.body(*inputs)
        packed = [x if theta is None else x != 0 for x, theta in zip(inputs, thetas, strict=True)]
        ctx.save_for_backward(*packed, *parameters)
        ctx.piece, ctx.thetas = piece, thetas
        ctx.autocast = torch.is_autocast_enabled(out.device.type), torch.get_autocast_dtype(out.device.type)
        ctx.dtypes = [x.dtype for x in inputs]
        ctx.set_materialize_grads(False)
        return out, piece.neuron.total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_total: torch.Tensor | None) -> tuple[Any, ...]:
        piece, thetas, n = ctx.piece, ctx.thetas, len(ctx.thetas)
        packed, parameters = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
        inputs = [
            x.detach() if theta is None else x.to(dtype) * theta
            for x, theta, dtype in zip(packed, thetas, ctx.dtypes, strict=True)
        ]
        wanted = [*inputs, *parameters]
        needed = ctx.needs_input_grad[3:]
        for x, need in zip(inputs, needed, strict=False):
            x.requires_grad_(need)
        enabled, dtype = ctx.autocast
        piece.neuron.reset()
        with torch.enable_grad(), torch.autocast(inputs[0].device.type, dtype, enabled=enabled):
            out = piece.body(*inputs)
        pairs = [(y, g) for y, g in ((out, grad_out), (piece.neuron.total, grad_total)) if g is not None]
        piece.neuron.reset()
        leaves = [x for x, need in zip(wanted, needed, strict=True) if need]
        outputs, grads = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, leaves, grads, allow_unused=True))
        return None, None, None, *(next(found) if need else None for need in needed)


def run(pieces: list[Piece], x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run all pieces from rest.

    Args:
        pieces: From `cut`.
        x: Images `[B, C, H, W]`.

    Returns:
        Logits of each step `[T, B, K]`; neuron name -> sum over the steps `[B, ...]`, where the neuron keeps it.

    Raises:
        ValueError: if a membrane is not at rest; the repeated run could not start there.
    """
    values: dict[str, torch.Tensor] = {pieces[0].inputs[0]: x}
    thetas: dict[str, torch.Tensor | None] = {pieces[0].inputs[0]: None}
    totals = {}
    for piece in pieces:
        inputs = [values[name] for name in piece.inputs]
        if piece.neuron is None:
            values[piece.name] = piece.body(*inputs)
        else:
            if isinstance(piece.neuron.v, torch.Tensor):
                raise ValueError("memory-optimised training runs all T steps at once, from rest: leave chunk out")
            parameters = [p for p in piece.body.parameters() if p.requires_grad]
            levels = [thetas[name] for name in piece.inputs]
            out, total = _Recompute.apply(piece, levels, len(inputs), *inputs, *parameters)
            values[piece.name], totals[piece.label] = out, total
            thetas[piece.name] = piece.neuron.level(out)
        for name in piece.last_uses:
            del values[name]
    return values[pieces[-1].name], totals
