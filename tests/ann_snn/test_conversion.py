import copy

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, neuron
from spikingjelly.activation_based.ann2snn import Converter, RateCodingRecipe
from torch import nn

from lightning_modules import AnnSnn
from lightning_modules.ann_snn.conversion import OverTime, convert, gram, prepare, rebuild, simulate, teacher_features
from lightning_modules.ann_snn.losses import closed_loop_loss
from lightning_modules.ann_snn.networks import CifarResNet, SmallResNet


def settled(network: nn.Module, *shape: int) -> nn.Module:
    """Random weights with batch statistics that fit them."""
    with torch.no_grad():
        for _ in range(10):
            network.train()(torch.rand(16, *shape))
    return network.eval()


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    return settled(SmallResNet((4, 6), (1, 2), classes=3), 1, 8, 8)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------------- simulation


def test_rates_approach_the_ann(small, images):
    teacher = prepare(small)
    student = convert(small, [images], percentile=100)
    logits, targets = teacher_features(teacher, images, student.monitored)
    torch.testing.assert_close(logits, small(images))
    with torch.no_grad():
        out = simulate(student, images, 512, chunk=64)
    torch.testing.assert_close(out.logits, logits, atol=0.02, rtol=0.02)
    assert list(out.features) == list(targets) == ["blocks.0", "blocks.1"]
    for name, rate in out.features.items():
        torch.testing.assert_close(rate, targets[name], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("options", [{}, {"mode": "channel", "percentile": 100, "half_threshold": True}])
def test_equals_stock_spikingjelly_step_by_step(small, images, options):
    """The same graph out of spikingjelly's own modules, called T times; features summed by hand."""
    student = convert(small, [images], **options)
    mode = f"{options.get('percentile', 99.9)}%"
    recipe = RateCodingRecipe(
        [images], mode, channel_wise="mode" in options, half_threshold=options.get("half_threshold", False)
    )
    stock = Converter(recipe).convert(small)
    steps, counted = [], []
    block = next(m for n, m in stock.named_modules() if n.endswith("spiking_1.scaler1") and "blocks.1" in n)
    block.register_forward_hook(lambda module, args, output: counted.append(output))
    functional.reset_net(stock)
    with torch.no_grad():
        steps = torch.stack([stock(images) for _ in range(12)])
        out = simulate(student, images, 12)
        pieces = simulate(student, images, 12, chunk=5)
    count = torch.arange(1, 13).view(-1, 1, 1)
    torch.testing.assert_close(out.prefix_logits, steps.cumsum(0) / count, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.features["blocks.1"], torch.stack(counted).mean(0))
    torch.testing.assert_close(pieces.prefix_logits, out.prefix_logits)
    torch.testing.assert_close(pieces.features, out.features)
    assert torch.equal(out.logits, out.prefix_logits[-1])


def test_single_step_mode_gives_the_same_logits(small, images):
    student = convert(small, [images])
    with torch.no_grad():
        expected = simulate(student, images, 4).logits
        functional.set_step_mode(student, "s")
        torch.testing.assert_close(torch.stack([student.network(images) for _ in range(4)]).mean(0), expected)


def test_constant_part_runs_once_per_call_and_without_time(small, images):
    student = convert(small, [images])
    shapes = []
    student.network.conv1.register_forward_hook(lambda m, args, out: shapes.append(out.shape))
    student.network.blocks.get_submodule("0").conv1.register_forward_hook(lambda m, a, out: shapes.append(out.shape))
    simulate(student, images, 3)
    assert shapes == [(6, 4, 8, 8), (3, 6, 4, 8, 8)]


class SharedInput(nn.Module):
    """The image meets spikes in a sum and in a concatenation, and one convolution is used before and after them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        y = F.relu(self.conv(x))
        y = torch.relu(self.conv(y) + x)
        return self.head(torch.cat((y, x, x.relu()), 1).mean((2, 3)))


class LearnedConstants(nn.Module):
    """A scale per channel, as it is and doubled, behind a neuron."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 1), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]).view(3, 1, 1))

    def forward(self, x):
        x = F.relu(self.conv(x)) * self.scale + self.scale * 2
        return self.head(x.mean((2, 3)))


def test_learned_constants_meet_spikes():
    torch.manual_seed(0)
    ann, x = LearnedConstants().eval(), torch.rand(5, 2, 4, 4)
    student = convert(ann, [x], percentile=100)
    with torch.no_grad():
        torch.testing.assert_close(simulate(student, x, 1024, chunk=128).logits, ann(x), atol=0.01, rtol=0.01)


def test_static_tensors_meet_spikes():
    torch.manual_seed(0)
    ann, x = SharedInput().eval(), torch.rand(5, 2, 4, 4)
    student = convert(ann, [x], percentile=100)
    assert len(student.neurons()) == 3
    assert any(isinstance(m, OverTime) for m in student.modules())
    with torch.no_grad():
        torch.testing.assert_close(simulate(student, x, 1024, chunk=128).logits, ann(x), atol=0.01, rtol=0.01)
        whole = simulate(student, x, 6).logits
        functional.set_step_mode(student, "s")
        torch.testing.assert_close(torch.stack([student.network(x) for _ in range(6)]).mean(0), whole)


def test_logits_are_summed_in_float32_under_autocast(small, images):
    student = convert(small, [images])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        prefix = simulate(student, images, 40).prefix_logits
        steps, _ = student(images, 40)
    assert prefix.dtype == torch.float32 and steps.dtype == torch.bfloat16
    torch.testing.assert_close(prefix[-1], steps.float().mean(0))


def test_gram_is_the_mean_of_the_grams_of_each_step(small, images):
    student = convert(small, [images])
    with torch.no_grad():
        grams = simulate(student, images, 5, chunk=2, reduce=gram).features["blocks.0"]
        spikes = []
        student.network.get_submodule("blocks.0.spiking_1").register_forward_hook(lambda m, a, out: spikes.append(out))
        simulate(student, images, 5)
    steps = spikes[0].flatten(2)
    torch.testing.assert_close(grams, torch.stack([s @ s.T for s in steps]).mean(0))


def test_nothing_stays_behind(small, images):
    """No hook, no membrane, no graph: not after a call, and not after an error in its middle."""
    student = convert(small, [images])
    simulate(student, images, 3)
    with pytest.raises(RuntimeError):
        simulate(student, torch.rand(2, 5, 8, 8), 3, reduce=gram)
    copy.deepcopy(student)  # fails while a graph hangs on a membrane
    for module in student.modules():
        assert not module._forward_hooks
        if isinstance(module, neuron.IFNode):
            assert module.v == 0.0 and module.total is None
    assert simulate(student, images[:2], 3).logits.shape == (2, 3)  # another batch size


def test_errors_of_simulate(small, images):
    student = convert(small, [images])
    with pytest.raises(ValueError, match="at least 1"):
        simulate(student, images, 0)


@pytest.mark.parametrize(("channels", "last"), [((4, 6), False), ((16, 24), True)])
def test_channels_are_innermost_where_the_library_can(channels, last, images):
    """oneDNN's AVX2 kernel for strided 1x1 convolutions of fewer than 8 channels corrupts memory in that layout."""
    student = convert(settled(SmallResNet(channels, (1, 2), classes=3), 1, 8, 8), [images])
    seen = []
    for layer in student.network.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
            layer.register_forward_hook(lambda _, args, out: seen.append(args[0].flatten(0, 1)))  # t b c h w
    simulate(student, images, 3)
    assert [x.is_contiguous(memory_format=torch.channels_last) for x in seen] == [last]


@pytest.mark.parametrize("options", [{}, {"train_threshold": True, "train_v0": True}])
def test_memory_optimised_training_is_exact(small, images, options):
    student, teacher = convert(small, [images], **options), prepare(small)
    labels = torch.arange(6) % 3
    grads = []
    for optimised in (False, True):
        student.memory_optimised = optimised
        student.zero_grad()
        out = simulate(student, images, 5)
        logits, targets = teacher_features(teacher, images, student.monitored)
        loss = closed_loop_loss(out.logits, logits, labels, out.features, targets, torch.tensor([0.4, 0.6])).total
        loss.backward()
        grads.append([loss.detach(), *(p.grad.clone() for p in student.parameters())])
    for plain, optimised in zip(*grads, strict=True):
        assert torch.equal(plain, optimised)
    with pytest.raises(ValueError, match="leave chunk out"):
        simulate(student, images, 4, chunk=2)


@pytest.fixture
def mesh(tmp_path):
    """A group of one process: enough for FSDP2 to hold sharded parameters."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("memory_optimised", [False, True])
def test_fsdp2_trains_every_part(images, mesh, memory_optimised):
    """Also a threshold per layer, and with recomputation: the gradients are those of the plain network."""
    module = AnnSnn(time_steps=3, train_threshold=True, train_v0=True, memory_optimised=memory_optimised)
    module.convert_with([images])
    grads = []
    for device_mesh in (None, mesh):
        module._device_mesh = device_mesh
        module.configure_model()
        module.zero_grad()
        simulate(module.student, images, 3).logits.square().sum().backward()
        grads.append({n: p.grad for n, p in module.student.named_parameters()})
    for name, plain in grads[0].items():
        assert isinstance(grads[1][name], torch.distributed.tensor.DTensor)
        torch.testing.assert_close(grads[1][name].full_tensor(), plain)


# ------------------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize(
    "options", [{}, {"mode": "channel", "half_threshold": True}, {"train_v0": True, "train_threshold": True}]
)
def test_rebuild_without_data_then_load(small, images, options):
    student = convert(small, [images], **options)
    other = rebuild(SmallResNet((4, 6), (1, 2), classes=3), (1, 8, 8), **options)
    other.load_state_dict(student.state_dict())
    assert torch.equal(simulate(other, images, 6).logits, simulate(student, images, 6).logits)
    assert other.monitored == student.monitored
    assert not set(map(id, student.parameters())) & set(map(id, small.parameters()))


def test_source_is_left_alone(small, images):
    before = copy.deepcopy(small.state_dict())
    small.train()
    convert(small, [images])
    prepare(small)
    assert small.training
    small.eval()
    for name, value in small.state_dict().items():
        assert torch.equal(value, before[name])


def test_thresholds_are_running_means_of_quantiles(small, images):
    batches = [images, images * 2]
    relu = {}
    small.relu.register_forward_hook(lambda m, a, out: relu.setdefault(len(relu), out))
    for batch in batches:
        small(batch)
    small.relu._forward_hooks.clear()
    first = [torch.quantile(a.flatten(), 0.99) for a in relu.values()]
    theta = convert(small, batches, percentile=99).neurons()["spiking_0"].threshold
    torch.testing.assert_close(theta, 0.9 * first[0] + 0.1 * first[1])
    wise = convert(small, batches, mode="channel", percentile=100).neurons()["spiking_0"].threshold
    first = [a.transpose(0, 1).flatten(1).max(1).values for a in relu.values()]
    torch.testing.assert_close(wise, 0.9 * first[0] + 0.1 * first[1])


def test_trained_parts(small, images):
    def trained(**options) -> set[str]:
        return {n for n, p in convert(small, [images], **options).named_parameters() if p.requires_grad}

    everything = trained()
    assert "network.conv1.bias" in everything and "network.linear.bias" in everything
    frozen = trained(train_fused_bias=False)
    assert "network.conv1.bias" not in frozen and {"network.linear.bias", "network.conv1.weight"} <= frozen
    assert trained(train_threshold=True, train_v0=True) - everything == {
        f"network.{name}.{kind}" for name in convert(small, [images]).neurons() for kind in ("raw_threshold", "v0")
    }


def test_dead_layer_warns_by_name_and_dead_channel_does_not():
    ann = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    with torch.no_grad():
        ann[0].weight.fill_(1), ann[0].bias.copy_(torch.tensor([0.0, -9.0, 1.0])), ann[2].bias.fill_(-99)
    x = torch.rand(4, 1, 2, 2)
    with pytest.warns(UserWarning, match="spiking_1 never fired"):
        student = convert(ann, [x], mode="channel", percentile=100)
    first, dead = (n.threshold for n in student.neurons().values())
    assert first[1] == (first[0] + first[2]) / 2  # the mean of the living
    assert torch.equal(dead, torch.ones(2))


def test_errors_of_convert(small, images):
    with pytest.raises(ValueError, match="no calibration batch"):
        convert(small, [])
    with pytest.raises(ValueError, match='"layer" or "channel"'):
        convert(small, [images], mode="block")
    with pytest.raises(ValueError, match="percentile"):
        convert(small, [images], percentile=0)


# ------------------------------------------------------------------------------------------------- preparation


class Functional(nn.Module):
    """Everything that the adapters know, in one network."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.relu, self.relu6 = nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.ReLU6()
        self.drop, self.linear, self.norm1 = (
            nn.Dropout(0.5, inplace=True),
            nn.Linear(36, 8, bias=False),
            nn.BatchNorm1d(8),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.norm(x + F.relu(self.conv2(x)))  # no convolution of its own in front
        x = F.max_pool2d(self.relu(x), 2)  # the same ReLU again
        x = self.drop(self.relu6(20 * x)).view(x.size(0), -1)
        x = F.dropout(self.norm1(self.linear(x)).relu(), 0.5, self.training)
        return self.head(x)


def test_adapters_keep_the_function():
    torch.manual_seed(0)
    ann = settled(Functional(), 1, 8, 8)
    x = torch.rand(6, 1, 8, 8)
    prepared = prepare(ann)
    torch.testing.assert_close(prepared(x), ann(x))
    assert ann.relu6(20 * ann.relu(ann.norm(ann.relu(ann.conv1(x))))).max() == 6  # the cap is in use
    again = prepare(prepared)
    assert torch.equal(again(x), prepared(x))
    student = convert(ann, [x], percentile=100)
    assert len(student.neurons()) == 5
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm | nn.Dropout) for m in student.modules())
    assert student.neurons()["spiking_3"].threshold == 6
    with torch.no_grad():
        first, second = simulate(student.train(), x, 4), simulate(student.eval(), x, 4)
    assert torch.equal(first.logits, second.logits)  # nothing random, no batch statistics


class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 1), nn.GELU())
        self.norm, self.gate = nn.LayerNorm(4), nn.Sigmoid()
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.gate(self.norm(self.relu(self.stem(x)).mean((2, 3))))


def test_refusal_lists_every_module_with_its_reason():
    with pytest.raises(ValueError) as error:
        prepare(Refused())
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["stem.1", "norm", "gate"]
    assert "LayerNorm, normalises with statistics" in lines[2]
    with pytest.raises(ValueError) as error:
        prepare(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3), nn.GELU()))
    assert sorted(line.split(":")[0].strip() for line in str(error.value).splitlines()[1:]) == ["1", "3", "4"]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "no ReLU"),
        (nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)), "return_indices"),
        (nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), "fold it into"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False), nn.ReLU()), "running stat"),
    ],
)
def test_other_refusals(network, message):
    with pytest.raises(ValueError, match=message):
        prepare(network)


def test_refused_functions_and_control_flow():
    class Swish(nn.Module):
        def forward(self, x):
            return x.relu() * x.sigmoid() + torch.exp(x)

    class Window(nn.Module):
        def forward(self, x):
            return F.avg_pool2d(x.relu(), x.size(3))

    with pytest.raises(ValueError, match="avg_pool2d with a window"):
        prepare(Window())

    class Branch(nn.Module):
        def forward(self, x):
            return x.relu() if x.sum() > 0 else x

    class Gate(nn.Module):
        def forward(self, x):
            n = x.shape[2] * x.shape[3]  # products of sizes, and with the constant image, are fine
            return (x.relu() * x + (1 - x).relu() * x.relu()).mean((2, 3)) * n

    with pytest.raises(ValueError, match="product of two activations") as error:
        prepare(Gate())
    assert str(error.value).count("product of two") == 1
    with pytest.raises(ValueError, match=r"(?s)tensor method sigmoid.*function exp"):
        prepare(Swish())
    with pytest.raises(ValueError, match="cannot be traced"):
        prepare(Branch())


@pytest.mark.parametrize("depth", [18, 20])
def test_cifar_networks_convert(depth):
    torch.manual_seed(0)
    ann = settled(CifarResNet(depth, width=4), 3, 16, 16)
    x = torch.rand(4, 3, 16, 16)
    student = convert(ann, [x], percentile=100)
    blocks = {18: 8, 20: 9}[depth]
    assert len(student.neurons()) == 2 * blocks + 1 and len(student.monitored) == blocks
    logits, targets = teacher_features(prepare(ann), x, student.monitored)
    torch.testing.assert_close(logits, ann(x))
    with torch.no_grad():
        out = simulate(student, x, 256, chunk=32)
    error = [(out.features[k] - f).norm() / f.norm() for k, f in targets.items()]
    assert error[0] < 0.05 and max(error) < 0.5


@pytest.mark.parametrize(
    ("name", "neurons", "blocks"), [("resnet18", 17, 8), ("vgg11_bn", 10, 10), ("mobilenet_v2", 35, 35)]
)
def test_torchvision_networks_convert(name, neurons, blocks):
    import torchvision

    torch.manual_seed(0)
    ann = getattr(torchvision.models, name)(num_classes=4).eval()
    x = torch.rand(2, 3, 32, 32)
    student = convert(ann, [x], warn=False)
    assert len(student.neurons()) == neurons and len(student.monitored) == blocks
    torch.testing.assert_close(prepare(ann)(x), ann(x))
    assert simulate(student, x, 2).logits.shape == (2, 4)


@pytest.mark.parametrize(("name", "neurons"), [("resnet18", 17), ("mobilenetv2_100", 35), ("resnetv2_50", 49)])
def test_timm_networks_convert(name, neurons):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    ann = timm.create_model(name, pretrained=False, num_classes=4).eval()
    x = torch.rand(2, 3, 32, 32)
    student = convert(ann, [x], warn=False)
    assert len(student.neurons()) == neurons
    torch.testing.assert_close(prepare(ann)(x), ann(x))
    assert simulate(student, x, 2).logits.shape == (2, 4)
