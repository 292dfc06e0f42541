"""From a ReLU network to a spiking network, and its simulation over time.

`prepare` brings a user's network into a form that can be converted, `convert` calibrates thresholds and replaces every
ReLU by an `IFNode` (through spikingjelly's `Converter` and `RateCodingRecipe`), `rebuild` makes the same structure
without data, `simulate` runs it for T steps on a constant image (direct coding).
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import base, functional
from spikingjelly.activation_based.ann2snn import Converter, RateCodingRecipe
from spikingjelly.activation_based.ann2snn.modules import VoltageHook
from torch import fx, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from lightning_modules.ann_snn import recompute
from lightning_modules.ann_snn.neurons import IFNode

# ---------------------------------------------------------------------------------------------------------------
# Preparing the source network
# ---------------------------------------------------------------------------------------------------------------

_RELU_CALLS: dict[object, type[nn.Module]] = {F.relu: nn.ReLU, torch.relu: nn.ReLU, torch.relu_: nn.ReLU}
_RELU_CALLS |= {"relu": nn.ReLU, "relu_": nn.ReLU, F.relu6: nn.ReLU6}
_POOL_CALLS = {F.avg_pool2d: nn.AvgPool2d, F.max_pool2d: nn.MaxPool2d, F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

_LINEAR = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
_POOLS: tuple[type[nn.Module], ...]
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_POOLS += (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVERTIBLE = (*_LINEAR, *_POOLS, *_BATCHNORMS, nn.ReLU, nn.Identity, nn.Flatten, nn.Upsample)

# Functions that keep their meaning with a leading time axis; spikingjelly makes the others of this list time-aware.
_FUNCTIONS = {"add", "iadd", "sub", "neg", "mul", "eq", "floordiv", "getitem", "getattr", "cat", "flatten", "mean"}
_FUNCTIONS |= {"reshape", "transpose", "unsqueeze", "_assert", "dropout"}
_METHODS = {
    "size",
    "dim",
    "view",
    "reshape",
    "expand",
    "mean",
    "flatten",
    "transpose",
    "unsqueeze",
    "unflatten",
    "permute",
}

_WHY: dict[type[nn.Module], str] = {
    nn.LayerNorm: "normalises with statistics of the input; rate coding needs an affine layer",
    nn.GroupNorm: "normalises with statistics of the input; rate coding needs an affine layer",
    nn.MultiheadAttention: "attention is not a rate of spikes",
    nn.Softmax: "a softmax is not a rate of spikes",
}


def prepare(ann: nn.Module) -> fx.GraphModule:
    """A copy of a ReLU network in a form that can be converted, with the same outputs in evaluation mode.

    Adapters: functional ReLUs and poolings become modules; every call of a ReLU gets a module of its own; ReLU6 becomes
    a ReLU whose output is capped, so that its threshold is at most 6; timm's `BatchNormAct2d` becomes BatchNorm + ReLU;
    dropout goes; BatchNorm behind a Linear layer is folded into it; a 2d BatchNorm that has no convolution of its own
    in front becomes a 1x1 depthwise convolution. The copy is in evaluation mode and serves as teacher as well: its
    ReLU names are what `SpikingNetwork.monitored` refers to.

    Args:
        ann: Any `nn.Module` with one tensor in and one out.

    Returns:
        The copy, as a `torch.fx.GraphModule`; `ann` is left as it is.

    Raises:
        ValueError: naming every module or function that has no rate-coded form, each with its reason.
    """
    ann = copy.deepcopy(ann).eval()
    for name, module in list(ann.named_modules()):
        if name and isinstance(module, nn.BatchNorm2d) and hasattr(module, "act"):  # timm's BatchNormAct2d
            ann.set_submodule(name, nn.Sequential(_plain_batchnorm(module), module.get_submodule("act")))
    problems = _unknown_leaves(ann)
    try:
        network = fx.symbolic_trace(ann)
    except Exception as error:
        if problems:
            raise _refusal(problems) from error
        raise ValueError(
            f"{type(ann).__name__} cannot be converted: its forward cannot be traced by torch.fx ({error}); "
            "write it without branches on tensor values"
        ) from error
    _modules_from_calls(network)
    _remove_dropout(network)
    _own_relu_per_call(network)
    problems += _fold_batchnorm(network)
    problems += _unknown_operations(network)
    if problems:
        raise _refusal(list(dict.fromkeys(problems)))
    network.graph.eliminate_dead_code()
    network.delete_all_unused_submodules()
    network.recompile()
    return network.eval()


def _plain_batchnorm(module: nn.BatchNorm2d) -> nn.BatchNorm2d:
    plain = nn.BatchNorm2d(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    plain.load_state_dict(module.state_dict(), strict=False)  # strict=False: the activation may hold state
    return plain.eval()


def _refusal(problems: list[str]) -> ValueError:
    listed = "".join(f"\n  {p}" for p in problems)
    return ValueError(f"the network cannot be converted; replace these parts (ReLU networks convert):{listed}")


def _reason(module: object) -> str:
    known = next((why for kind, why in _WHY.items() if isinstance(module, kind)), None)
    return known or "no rate-coded form is known; ReLU, ReLU6, convolutions, Linear, BatchNorm and poolings have one"


def _unknown_leaves(ann: nn.Module) -> list[str]:
    """Modules of torch.nn that cannot be converted; found before tracing, which might already fail on them."""
    problems = []
    for name, module in ann.named_modules():
        leaf = module.__module__.startswith("torch.nn") and not list(module.children())
        known = (*_CONVERTIBLE, *_DROPOUTS, nn.ReLU6, nn.Sequential, nn.ModuleList, nn.ModuleDict)
        if (leaf and not isinstance(module, known)) or isinstance(module, tuple(_WHY)):
            problems.append(f"{name or 'the network itself'}: {type(module).__name__}, {_reason(module)}")
        if isinstance(module, nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d) and module.return_indices:
            problems.append(f"{name}: {type(module).__name__} with return_indices=True")
        if isinstance(module, _BATCHNORMS) and module.running_mean is None:
            problems.append(f"{name}: {type(module).__name__} without running statistics, which cannot be folded")
    return problems


def _unknown_operations(network: fx.GraphModule) -> list[str]:
    """Functions and methods in the traced graph that lose their meaning with a leading time axis."""
    problems = []
    spiking = _behind_relus(network)
    for node in network.graph.nodes:
        place = f"in {_parent(node) or 'the network itself'}"
        if node.op == "call_module" and type(network.get_submodule(node.target)) not in _CONVERTIBLE:
            module = network.get_submodule(node.target)
            problems.append(f"{node.target}: {type(module).__name__}, {_reason(module)}")
        elif node.target in _POOL_CALLS:
            problems.append(f"{place}: {node.target.__name__} with a window made from sizes; give a number")
        elif node.op == "call_function" and node.target.__name__ not in _FUNCTIONS:
            problems.append(f"{place}: function {node.target.__name__}, no rate-coded form is known")
        elif node.op == "call_function" and node.target.__name__ == "mul" and spiking.issuperset(node.args):
            problems.append(f"{place}: product of two activations, whose rate is not the product of their rates")
        elif node.op == "call_method" and node.target not in _METHODS:
            problems.append(f"{place}: tensor method {node.target}, no rate-coded form is known")
    if not any(isinstance(m, nn.ReLU) for m in network.modules()):
        problems.append("the network itself: it has no ReLU, so there is nothing that could spike")
    if len([n for n in network.graph.nodes if n.op == "placeholder" and not n.args]) != 1:
        problems.append("the network itself: it has more than one input")
    return problems


def _behind_relus(network: fx.GraphModule) -> set[fx.Node]:
    """Nodes that will change from step to step; sizes do not."""
    found: set[fx.Node] = set()
    for node in network.graph.nodes:
        relu = node.op == "call_module" and isinstance(network.get_submodule(node.target), nn.ReLU)
        size = node.target in ("size", "dim", getattr)
        if relu or (found.intersection(node.all_input_nodes) and not size):
            found.add(node)
    return found


def _parent(node: fx.Node) -> str:
    """Name of the module in whose forward the node was recorded ("" for the network itself)."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    if node.op == "call_module":
        return str(node.target).rpartition(".")[0]
    return stack[-1] if stack else ""


def _free_name(network: nn.Module, parent: str, leaf: str) -> str:
    names = dict(network.named_modules())
    stems = (f"{parent}.{leaf}" if parent else leaf) + "_{}"
    return next(name for k in range(len(names) + 1) if (name := stems.format(k)) not in names)


def _call_module(network: fx.GraphModule, node: fx.Node, name: str, module: nn.Module) -> None:
    """Replace `node` by a call of `module`, stored as `name`, on the node's first argument."""
    network.add_submodule(name, module)
    with network.graph.inserting_before(node):
        new = network.graph.call_module(name, (node.args[0] if node.args else node.kwargs["input"],))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    network.graph.erase_node(node)


def _modules_from_calls(network: fx.GraphModule) -> None:
    for node in list(network.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target in _RELU_CALLS:
            _call_module(network, node, _free_name(network, _parent(node), "relu"), _RELU_CALLS[node.target]())
        elif node.target in _POOL_CALLS and len(node.all_input_nodes) == 1:
            options = {k: v for k, v in node.kwargs.items() if k not in ("input", "return_indices")}
            pool = _POOL_CALLS[node.target](*node.args[1:], **options)
            _call_module(network, node, _free_name(network, _parent(node), "pool"), pool)


def _remove_dropout(network: fx.GraphModule) -> None:
    for node in list(network.graph.nodes):
        module = network.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, (*_DROPOUTS, nn.Identity)) or node.target is F.dropout:
            node.replace_all_uses_with(node.args[0] if node.args else node.kwargs["input"])
            network.graph.erase_node(node)


def _own_relu_per_call(network: fx.GraphModule) -> None:
    seen = set()
    for node in list(network.graph.nodes):
        module = network.get_submodule(node.target) if node.op == "call_module" else None
        if not isinstance(module, nn.ReLU | nn.ReLU6):
            continue
        relu = nn.ReLU()
        if isinstance(module, nn.ReLU6) or _cap_at_6 in module._forward_hooks.values():
            relu.register_forward_hook(_cap_at_6)  # the converter wants the exact type nn.ReLU
        if node.target in seen:
            _call_module(network, node, _free_name(network, *_split(node.target)), relu)
        else:
            seen.add(node.target)
            network.set_submodule(node.target, relu)


def _cap_at_6(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.clamp(max=6.0)


def _split(name: str) -> tuple[str, str]:
    parent, _, leaf = name.rpartition(".")
    return parent, leaf


def _fold_batchnorm(network: fx.GraphModule) -> list[str]:
    """Linear + BatchNorm1d becomes one Linear; a 2d BatchNorm without its own convolution a depthwise one.

    Convolution + BatchNorm is left to spikingjelly's recipe. Returns what cannot be folded.
    """
    problems = []
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    for node in list(network.graph.nodes):
        norm = network.get_submodule(node.target) if node.op == "call_module" else None
        if not isinstance(norm, _BATCHNORMS) or norm.running_mean is None:  # without: known from before tracing
            continue
        before = node.args[0]
        producer = network.get_submodule(before.target) if before.op == "call_module" else None
        own = len(before.users) == 1
        if isinstance(producer, nn.Linear) and own:
            network.set_submodule(before.target, fuse_linear_bn_eval(producer, norm))
            node.replace_all_uses_with(before)
            network.graph.erase_node(node)
        elif isinstance(norm, nn.BatchNorm2d) and not (isinstance(producer, convolutions) and own):
            assert norm.running_var is not None
            affine = nn.Conv2d(norm.num_features, norm.num_features, 1, groups=norm.num_features)
            scale = (norm.weight if norm.affine else 1) * (norm.running_var + norm.eps).rsqrt()
            shift = (norm.bias if norm.affine else 0) - norm.running_mean * scale
            assert affine.bias is not None
            affine.weight.data.copy_(scale.view(-1, 1, 1, 1))
            affine.bias.data.copy_(shift)
            network.set_submodule(node.target, affine.to(norm.running_var))
        elif not isinstance(producer, convolutions):
            problems.append(f"{node.target}: {type(norm).__name__}, no convolution or Linear in front to fold it into")
    return problems


# ---------------------------------------------------------------------------------------------------------------
# Conversion
# ---------------------------------------------------------------------------------------------------------------


class Monitored(NamedTuple):
    """One place where teacher and student are compared.

    Attributes:
        teacher: Name of the ReLU in the prepared network, see `prepare`.
        student: Name of the neuron in `SpikingNetwork.network` that replaced it.
    """

    teacher: str
    student: str


class OverTime(nn.Module, base.StepModule):
    """Repeat a tensor that is the same at every step: `[B, ...] -> [T, B, ...]`, a view without a copy.

    `time_steps` (T) is set by `SpikingNetwork.forward`. In single-step mode the input passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step_mode = "m"
        self.time_steps = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat, see the class."""
        return x.expand(self.time_steps, *x.shape) if self.step_mode == "m" and isinstance(x, torch.Tensor) else x


class SpikingNetwork(nn.Module):
    """A converted network.

    Everything in front of the first neurons sees the same image at every step; those layers run once, without a time
    axis ("s" mode), and `OverTime` repeats their result where it enters a layer behind a neuron ("m" mode).

    Attributes:
        network: The converted graph, a `torch.fx.GraphModule`; neurons are called `<block>.spiking_<k>`.
        monitored: Block name -> `Monitored`, the pairs that CKA compares: the outputs of residual blocks (a ReLU
            behind a sum), or every ReLU where there is none.
        memory_optimised: In training, recompute currents and membranes in the backward pass (see `recompute`).
    """

    def __init__(self, network: fx.GraphModule, monitored: dict[str, Monitored]):
        super().__init__()
        self.network = network
        self.monitored = monitored
        self.memory_optimised = False
        self._pieces: list[recompute.Piece] = []
        for pair in monitored.values():
            self._neuron(pair).keep_total = True

    def _neuron(self, pair: Monitored) -> IFNode:
        neuron = self.network.get_submodule(pair.student)
        assert isinstance(neuron, IFNode)
        return neuron

    def neurons(self) -> dict[str, IFNode]:
        """All neurons by name, from input to output."""
        calls = [node.target for node in self.network.graph.nodes if node.op == "call_module"]
        modules = {name: self.network.get_submodule(name) for name in calls}
        return {name: module for name, module in modules.items() if isinstance(module, IFNode)}

    def reset(self) -> None:
        """Set every membrane back to its start."""
        functional.reset_net(self.network)

    def forward(self, x: torch.Tensor, time_steps: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run T steps from the present membranes.

        Args:
            x: Images `[B, C, H, W]`.
            time_steps: T.

        Returns:
            Logits of each step `[T, B, K]`, and block name -> sum over the steps of the block's output `[B, ...]`.
        """
        for module in self.network.modules():
            if isinstance(module, OverTime):
                module.time_steps = time_steps
        x = _channels_last(x, self.network)
        if self.memory_optimised and torch.is_grad_enabled():
            self._pieces = self._pieces or recompute.cut(self.network)
            logits, totals = recompute.run(self._pieces, x)
            return logits, {k: totals[pair.student] for k, pair in self.monitored.items()}
        logits = self.network(x)
        kept: dict[str, Any] = {k: self._neuron(pair).total for k, pair in self.monitored.items()}
        return logits, kept


class _Quantile(VoltageHook):
    """Layer-wise observer: quantile q of all values of a batch, running mean over batches (0.9 old + 0.1 new).

    spikingjelly's own is limited to 2^24 values (`torch.quantile`), 20 images at 64x112x112.
    """

    scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = float(self.mode.removesuffix("%")) / 100 * (x.numel() - 1)
        top = x.detach().flatten().topk(x.numel() - int(rank)).values  # the last is the order statistic floor(rank)
        value = torch.lerp(top[-1], top[max(len(top) - 2, 0)], rank - int(rank))
        self.scale = value if self.num_batches_tracked == 0 else torch.lerp(self.scale, value, self.momentum)
        self.num_batches_tracked += 1
        return x


class _Recipe(RateCodingRecipe):
    """spikingjelly's recipe, with a floor for dead layers and our neuron in the place of scaler, neuron, scaler."""

    def __init__(
        self, batches: Iterable[torch.Tensor], channel_wise: bool, percentile: float, neuron: dict[str, Any], warn: bool
    ) -> None:
        super().__init__(batches, mode=f"{percentile}%", channel_wise=channel_wise)
        self.neuron = neuron
        self.warn = warn
        self.channels: dict[str, int] = {}

    def insert_observers(self, converter: Converter, network: fx.GraphModule) -> fx.GraphModule:
        network = super().insert_observers(converter, network)
        for name, module in list(network.named_modules()):
            if isinstance(module, VoltageHook):
                network.set_submodule(name, _Quantile(mode=self.mode, momentum=self.momentum))
        return network.to(converter.device)

    def calibrate(self, converter: Converter, network: fx.GraphModule) -> fx.GraphModule:
        observers = {n: m for n, m in network.named_modules() if "voltage_hook_" in n.rpartition(".")[2]}

        def remember_channels(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self.channels[names[module]] = output.shape[1]

        names = {module: _neuron_name(name) for name, module in observers.items()}
        handles = [module.register_forward_hook(remember_channels) for module in observers.values()]
        seen = 0
        for batch in self.dataloader:
            network(batch.to(converter.device))
            seen += 1
        for handle in handles:
            handle.remove()
        if not seen:
            raise ValueError("convert: no calibration batch was given; pass some training images")
        for module in observers.values():
            live = module.scale[module.scale > self.eps]
            if self.warn and not len(live):
                warnings.warn(
                    f"{names[module]} never fired on the calibration images; its threshold is set to 1", stacklevel=2
                )
            # a dead channel gets the mean threshold of the living: it can then recover in training
            floor = live.mean() if len(live) else torch.ones_like(module.scale).mean()
            module.scale = torch.where(module.scale > self.eps, module.scale, floor)
        return network

    def finalize(self, converter: Converter, network: fx.GraphModule) -> fx.GraphModule:
        for scaler in [n for n in network.graph.nodes if n.op == "call_module" and n.target.endswith(".scaler0")]:
            prefix = scaler.target.removesuffix(".scaler0")
            neuron, scaler1 = (next(iter(users)) for users in (scaler.users, next(iter(scaler.users)).users))
            last: Any = network.get_submodule(f"{prefix}.scaler1")
            name = _neuron_name(prefix)
            network.delete_submodule(prefix)
            network.add_submodule(name, IFNode(last.scale, channels=self.channels[name], **self.neuron))
            with network.graph.inserting_before(scaler):
                new = network.graph.call_module(name, scaler.args)
            scaler1.replace_all_uses_with(new)
            for old in (scaler1, neuron, scaler):
                network.graph.erase_node(old)
        network.recompile()
        return network.to(converter.device)


def _neuron_name(name: str) -> str:
    parent, leaf = _split(name)
    leaf = leaf.removeprefix("channel_").replace("voltage_hook_", "spiking_")
    return f"{parent}.{leaf}" if parent else leaf


def convert(
    ann: nn.Module,
    batches: Iterable[torch.Tensor],
    mode: str = "layer",
    percentile: float = 99.9,
    half_threshold: bool = False,
    train_fused_bias: bool = True,
    train_threshold: bool = False,
    train_v0: bool = False,
    warn: bool = True,
) -> SpikingNetwork:
    """Convert a ReLU network into a spiking one.

    BatchNorm is folded into convolutions, a threshold theta is calibrated for each ReLU as a running mean (0.9 old +
    0.1 new, the first batch sets it) of a percentile of each batch's activations, and the ReLU is replaced by an
    `IFNode` with that threshold. Weights are not rescaled.

    Args:
        ann: The source, plain or already through `prepare`. It is not changed.
        batches: Calibration images, each `[B, C, H, W]` float32; the same on every rank.
        mode: "layer" (one theta per ReLU, the paper's code) or "channel" (one per channel).
        percentile: In (0, 100]; 99.9 is the paper's code, 100 the maximum.
        half_threshold: Start the membranes at theta / 2, which removes the floor bias (Bu et al. 2022).
        train_fused_bias: Biases that only exist since BatchNorm was folded are trained; the official code leaves
            them frozen by accident.
        train_threshold: Train every theta, `theta = softplus(p)`.
        train_v0: Train the initial membrane, one value per channel.
        warn: Warn about layers that never fire.

    Returns:
        The spiking network, in evaluation mode, on the device of `ann`.

    Raises:
        ValueError: if the network cannot be converted (see `prepare`), an option is unknown, or `batches` is empty.
    """
    if mode not in ("layer", "channel"):
        raise ValueError(f'convert: mode is "layer" or "channel", not {mode!r}')
    if not 0 < percentile <= 100:
        raise ValueError(f"convert: percentile is in (0, 100], not {percentile}")
    prepared = prepare(ann)
    neuron = {"v0": 0.5 * half_threshold, "train_threshold": train_threshold, "train_v0": train_v0}
    recipe = _Recipe(batches, mode == "channel", percentile, neuron, warn)
    network = Converter(recipe).convert(prepared)
    biases = {name for name, module in prepared.named_modules() if getattr(module, "bias", None) is not None}
    network.requires_grad_(True)
    for name, module in network.named_modules():
        if isinstance(module, _LINEAR) and module.bias is not None and name not in biases:
            module.bias.requires_grad_(train_fused_bias)
    monitored = _monitored(prepared)
    _run_constant_part_once(network)
    return SpikingNetwork(network.eval(), monitored)


def rebuild(ann: nn.Module, input_shape: Sequence[int], **settings: object) -> SpikingNetwork:
    """The structure that `convert(ann, ..., **settings)` makes, without data, ready for `load_state_dict`.

    Args:
        ann: The source network; its weights do not matter.
        input_shape: `(C, H, W)` of one image.
        **settings: As given to `convert`.
    """
    parameter = next(ann.parameters())
    noise = torch.zeros(1, *input_shape, device=parameter.device, dtype=parameter.dtype)
    return convert(ann, [noise], warn=False, **settings)  # type: ignore[arg-type]


def _monitored(prepared: fx.GraphModule) -> dict[str, Monitored]:
    """Pairs of ReLU (prepared network) and neuron (converted network): behind a sum if there is one, else all."""
    relus: list[tuple[fx.Node, Monitored]] = []
    counts: dict[str, int] = {}
    for node in prepared.graph.nodes:
        if node.op == "call_module" and isinstance(prepared.get_submodule(node.target), nn.ReLU):
            parent = node.target.rpartition(".")[0]
            k = counts[parent] = counts.get(parent, -1) + 1  # the converter counts ReLUs per parent in graph order
            relus.append((node, Monitored(node.target, f"{parent}.spiking_{k}" if parent else f"spiking_{k}")))

    def behind_sum(node: fx.Node) -> bool:
        source: Any = node.args[0]
        return (
            source.op == "call_function"
            and source.target.__name__ in ("add", "iadd")
            and len(source.all_input_nodes) == 2
        )

    chosen = [pair for pair in relus if behind_sum(pair[0])]
    if chosen:
        parents = [pair.teacher.rpartition(".")[0] for _, pair in chosen]
        return {p if p and parents.count(p) == 1 else m.teacher: m for p, (_, m) in zip(parents, chosen, strict=True)}
    return {pair.teacher: pair for _, pair in relus}


def _run_constant_part_once(network: fx.GraphModule) -> None:
    """Set "m" mode on everything behind a neuron, "s" on the rest, and repeat the tensors that cross over."""

    def module_of(node: fx.Node) -> nn.Module | None:
        return network.get_submodule(str(node.target)) if node.op == "call_module" else None

    temporal: set[fx.Node] = set()
    while True:
        shared = {node.target for node in temporal if node.op == "call_module"}
        found = {
            node
            for node in network.graph.nodes
            if isinstance(module_of(node), IFNode)
            or temporal.intersection(node.all_input_nodes)
            or (node.op == "call_module" and node.target in shared)  # one module, one mode
        }
        if found == temporal:
            break
        temporal = found
    from_image: set[fx.Node] = set()  # learned constants have no batch axis: they broadcast as they are
    for node in network.graph.nodes:
        if node.op == "placeholder" or from_image.intersection(node.all_input_nodes):
            from_image.add(node)
    repeated: dict[fx.Node, fx.Node] = {}
    for node in list(network.graph.nodes):
        module = module_of(node)
        if isinstance(module, base.StepModule):
            module.step_mode = "m" if node in temporal else "s"
        for source in node.all_input_nodes if node in temporal else ():
            if source in temporal or source not in from_image:
                continue
            if source not in repeated:
                name = f"over_time_{len(repeated)}"
                network.add_submodule(name, OverTime())
                with network.graph.inserting_after(source):
                    repeated[source] = network.graph.call_module(name, (source,))
            node.replace_input_with(source, repeated[source])
    network.graph.lint()
    network.recompile()


# ---------------------------------------------------------------------------------------------------------------
# Simulation
# ---------------------------------------------------------------------------------------------------------------


class SimulationOutput(NamedTuple):
    """What `simulate` returns.

    Attributes:
        logits: Time-mean logits after T steps `[B, K]`.
        prefix_logits: Time-mean logits after 1, ..., T steps `[T, B, K]`.
        features: Block name -> the rate `mean_t theta s(t)` `[B, ...]`, in the units of the ANN's activations, or the
            time mean of what `reduce` made of each step's output.
    """

    logits: torch.Tensor
    prefix_logits: torch.Tensor
    features: dict[str, torch.Tensor]


def _channels_last(x: torch.Tensor, network: nn.Module) -> torch.Tensor:
    """The same image with its channels innermost, which all later layers keep: faster convolutions on CPUs.

    A network with a strided 1x1 convolution of few channels gets `x` as it is: on processors with AVX2 but not AVX-512
    oneDNN's backward pass writes past its buffer there if there are fewer than 8 (oneDNN's issue 6035).
    """
    if x.dim() != 4 or x.device.type != "cpu":
        return x
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    strided = [c for c in convolutions if c.kernel_size == (1, 1) and c.stride != (1, 1)]
    if any(c.in_channels // c.groups < 16 for c in strided):  # AVX-512's block; AVX2's is 8
        return x
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def gram(spikes: torch.Tensor) -> torch.Tensor:
    """Sum over time of the per-step Gram matrices `[T, B, ...] -> [B, B]`; for `losses.hsic`."""
    x = spikes.transpose(0, 1).flatten(1)  # b (t d): one product sums over steps and features
    return x @ x.T


@contextmanager
def capture(network: nn.Module, names: dict[str, str], keep: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `keep(label, output)` for the named modules inside the context; the hooks are always removed.

    Args:
        network: Root of the names.
        names: Label -> module name.
        keep: Receives every output.
    """
    handles = []
    try:
        for label, name in names.items():
            hook = lambda module, args, output, label=label: keep(label, output)  # noqa: E731
            handles.append(network.get_submodule(name).register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def simulate(
    student: SpikingNetwork,
    x: torch.Tensor,
    time_steps: int,
    chunk: int | None = None,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> SimulationOutput:
    """Run the spiking network from rest for T steps on constant images (direct coding).

    The membranes are reset before and after, so that neither stale state nor a graph stays behind.

    Args:
        student: The converted network.
        x: Images `[B, C, H, W]`.
        time_steps: T >= 1.
        chunk: Run at most this many steps at once, which bounds the memory; None runs all.
        reduce: Some other sum over time to keep of each block's output, `[t, B, ...] -> Tensor`, for example `gram`;
            None keeps the rate.

    Raises:
        ValueError: if `time_steps` or `chunk` is below 1.
    """
    if time_steps < 1 or (chunk is not None and chunk < 1):
        raise ValueError(f"simulate: time_steps ({time_steps}) and chunk ({chunk}) must be at least 1")
    chunk = chunk or time_steps
    logits: list[torch.Tensor] = []
    sums: list[dict[str, torch.Tensor]] = []
    names = {label: pair.student for label, pair in student.monitored.items()} if reduce else {}
    student.reset()
    try:
        for start in range(0, time_steps, chunk):
            kept: dict[str, torch.Tensor] = {}

            def keep(label: str, out: torch.Tensor, kept: dict[str, torch.Tensor] = kept) -> None:
                assert reduce is not None  # without it no output is captured
                kept[label] = reduce(out)

            with capture(student.network, names, keep):
                part, totals = student(x, min(chunk, time_steps - start))
            logits.append(part)
            sums.append(kept if reduce else totals)
    finally:
        student.reset()
    steps = torch.cat(logits)
    steps = steps.to(torch.promote_types(steps.dtype, torch.float32))  # bfloat16 of autocast is too coarse to sum
    count = torch.arange(1, time_steps + 1, device=x.device, dtype=steps.dtype)
    prefix = steps.cumsum(0) / count[:, None, None]  # t b k
    # out of place: autograd may have saved the parts
    features: dict[str, Any] = {label: sum(part[label] for part in sums) / time_steps for label in student.monitored}
    return SimulationOutput(prefix[-1], prefix, features)


def teacher_features(
    teacher: nn.Module, x: torch.Tensor, monitored: dict[str, Monitored]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and monitored activations of the teacher.

    Args:
        teacher: The prepared source network, `prepare(ann)`.
        x: Images `[B, C, H, W]`.
        monitored: `SpikingNetwork.monitored`.

    Returns:
        Logits `[B, K]` and block name -> activation `[B, ...]`, with the keys of `simulate`'s features.
    """
    found: dict[str, torch.Tensor] = {}
    with capture(teacher, {label: pair.teacher for label, pair in monitored.items()}, found.__setitem__):
        logits = teacher(_channels_last(x, teacher))
    return logits, found
