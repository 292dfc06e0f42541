"""Speed of FedHPro, as ratios in one run on one thread, and its memory.

    python benchmarks/fedhpro.py [--repeats 7] [--parts memory together speed]

1. Memory: the peak of this process after a round of the released ResNet-10 with 10 clients, with 100 clients that
   share the same images, and with 100 clients of MOON, which keeps their models.
2. Local training of many small clients of equal size: together (`clients_together`) against one after the other.
3. Matching of hyper-prototypes: the closed form against a double backward, once vectorised over classes and once class
   by class as the released driver does it.
4. A round: tensors and batched augmentation against the released driver's way of working, re-created from its
   description: every client's images are decoded one by one and joined each round for the class gradients, a new
   `DataLoader` over PIL images is made for every client and epoch, and one random crop is drawn per batch. Networks,
   clients, batches, epochs and losses are the same; the losses of the re-creation are vectorised (favourable to it).

Prints medians of alternating repeats and writes `benchmarks/results/fedhpro/<part>.json`; `speed` is 3 and 4.
"""

import argparse
import copy
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from datamodules import FederatedImages
from datamodules.federated import Client
from lightning_modules import FedHPro
from lightning_modules.fedhpro.averaging import flatten, unflatten, weighted_average
from lightning_modules.fedhpro.clients import LocalTraining, train_client, train_together
from lightning_modules.fedhpro.losses import hpal_loss, hpcl_loss
from lightning_modules.fedhpro.matching import match_hyper_prototypes
from lightning_modules.fedhpro.network import ResNet10, SmallCNN
from lightning_modules.fedhpro.strategies import HyperPrototypes, head_of

RESULTS = Path(__file__).parent / "results" / "fedhpro"


def alternate(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each way, after one warm-up, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if turn:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def double_backward(s: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, steps: int, by_class: bool) -> Tensor:
    """30 steps with autograd's second derivative."""
    num_classes, per_class, _ = s.shape
    s = s.clone().requires_grad_()
    optimizer = torch.optim.SGD([s], lr=0.1)
    groups = [[c] for c in range(num_classes)] if by_class else [list(range(num_classes))]
    for _ in range(steps):
        total = torch.zeros(())
        for group in groups:
            rows = s[group]
            labels = torch.tensor(group).repeat_interleave(per_class)
            # the mean over the rows of each class, summed over classes
            inner = F.cross_entropy(rows.flatten(0, 1) @ weight.T + bias, labels, reduction="sum") / per_class
            (gradient,) = torch.autograd.grad(inner, rows, create_graph=True)
            total = total + (1 - F.cosine_similarity(gradient.mean(1), targets[group], dim=1)).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return s.detach()


def matching(num_classes: int, repeats: int) -> dict[str, float]:
    """Part 3 for one number of classes."""
    g = torch.Generator().manual_seed(0)
    s, targets = torch.randn(num_classes, 5, 256, generator=g), torch.randn(num_classes, 256, generator=g)
    weight, bias = torch.randn(num_classes, 256, generator=g) / 16, torch.zeros(num_classes)
    everyone = torch.ones(num_classes, dtype=torch.bool)
    ways = {
        "closed form": lambda: match_hyper_prototypes(s, weight, bias, targets, everyone)[0],
        "double backward, vectorised": lambda: double_backward(s, weight, bias, targets, 30, by_class=False),
        "double backward, class by class": lambda: double_backward(s, weight, bias, targets, 30, by_class=True),
    }
    ends = [way() for way in ways.values()]
    assert all(torch.allclose(ends[0], end, atol=1e-5) for end in ends)
    return alternate(ways, repeats)


class PilImages(Dataset):
    """A client's images as torchvision serves them: a PIL image each, then a transform to a tensor."""

    def __init__(self, client: Client) -> None:
        arrays = client.table.pixels[client.rows].permute(0, 2, 3, 1).numpy()
        self.arrays, self.labels = arrays.squeeze(-1) if arrays.shape[-1] == 1 else arrays, client.labels
        mean, std = client.table.mean.flatten().tolist(), client.table.std.flatten().tolist()
        self.transform = v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(np.asarray(self.arrays[i]))), int(self.labels[i])


def driver_round(
    network: torch.nn.Module, clients: list[Client], plan: LocalTraining, strategy: HyperPrototypes
) -> Tensor:
    """A round as the released driver works, but with a true average."""
    anchors, crop = strategy.hyper_prototypes, v2.RandomCrop(clients[0].table.pixels.shape[-1], padding=1)
    head, states, sizes, sent = head_of(network), [], [], []
    for client in clients:
        local = copy.deepcopy(network)
        images = PilImages(client)
        whole = torch.stack([images[i][0] for i in range(len(images))])
        gradients = torch.zeros_like(head[0])
        for c in client.labels.unique().tolist():
            with torch.no_grad():
                z = local.eval()(crop(whole[client.labels == c][:100]))[0]
            z.requires_grad_()
            loss = F.cross_entropy(local.classifier(z), torch.full((len(z),), c))
            gradients[c] = torch.autograd.grad(loss, z)[0].sum(0)
        sent.append(gradients)
        local.train()
        optimizer = plan.optimizer(local.parameters())
        for _ in range(plan.epochs):
            for batch, labels in DataLoader(images, plan.batch_size, shuffle=True):
                z, logits = local(crop(batch))
                loss = F.cross_entropy(logits, labels) + hpcl_loss(z, labels, anchors) + hpal_loss(z, labels, anchors)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        states.append(copy.deepcopy(local.state_dict()))
        sizes.append(len(images))
    weighted_average(states, sizes)
    return double_backward(anchors, *head, torch.stack(sent).mean(0), 30, by_class=True)


def our_round(network: torch.nn.Module, clients: list[Client], plan: LocalTraining, strategy: HyperPrototypes) -> None:
    """The round loop of `FedHPro.training_step`, on one rank."""
    received, scratch = head_of(network), copy.deepcopy(network)
    total = torch.zeros_like(flatten(network.state_dict()))
    sent = {name: torch.zeros(shape) for name, shape in strategy.sends.items()}
    for client in clients:
        scratch.load_state_dict(network.state_dict())
        report = train_client(scratch, client, strategy, plan, 0)
        total += flatten(scratch.state_dict()) * len(client)
        for name, tensor in report.sent.items():
            sent[name] += tensor
    unflatten(total / sum(map(len, clients)), network.state_dict())
    strategy.server(network, received, sent, torch.Generator())


def rounds(name: str, repeats: int) -> dict[str, float]:
    """Part 4 for one setting."""
    if name == "SmallCNN, digits 8x8, 10 clients, batch 32":
        data, network = FederatedImages(augment=["crop"]), SmallCNN(10)
        batch = 32
    else:
        data = FederatedImages(augment=["crop"], image_size=32, channels=3, train_size=600)
        network, batch = ResNet10(10, width=8), 64
    data.setup()
    clients = data.round(0).clients
    strategy = HyperPrototypes(gradient_samples=100)
    strategy.build(10, network.classifier.in_features)
    plan = LocalTraining(2, batch, lambda p: torch.optim.SGD(p, lr=0.01))
    ways = {
        "ours": lambda: our_round(network, clients, plan, strategy),
        "driver": lambda: driver_round(network, clients, plan, strategy),
    }
    return alternate(ways, repeats)


def together(width: int, dim: int, images: int, repeats: int) -> dict[str, float]:
    """Part 2: 50 clients of equal size, two epochs in batches of 8."""
    data = FederatedImages(augment=["crop"], clients=50, partition="even", images_per_client=images)
    data.setup()
    clients, network = data.round(0).clients, SmallCNN(10, width=width, dim=dim)
    strategy = HyperPrototypes()
    strategy.build(10, dim)
    plan = LocalTraining(2, 8, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))

    def one_by_one() -> None:
        scratch = copy.deepcopy(network)
        for client in clients:
            scratch.load_state_dict(network.state_dict())
            train_client(scratch, client, strategy, plan, 0)

    ways = {
        "together": lambda: list(train_together(copy.deepcopy(network), clients, strategy, plan, 0)),
        "one by one": one_by_one,
    }
    return alternate(ways, repeats)


def peak_after(strategy: str, clients: int) -> float:
    """Part 1: peak memory of this process in MB, after one round of ResNet-10."""
    data = FederatedImages(clients=clients, partition="even")
    model = FedHPro(strategy, network="ResNet10", network_args={"in_channels": 1}, local_epochs=1, local_batch_size=16)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    Trainer(max_epochs=1, logger=False, accelerator="cpu", num_sanity_val_steps=0, **quiet).fit(model, data)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


def measure_memory() -> dict[str, float]:
    """Part 1; the peak of a process never falls, so the order is from small to large."""
    peaks = {}
    for strategy, clients in (("HyperPrototypes", 10), ("HyperPrototypes", 100), ("Moon", 100)):
        peaks[f"{strategy}, {clients} clients"] = peak_after(strategy, clients)
    for what, peak in peaks.items():
        print(f"peak memory, {what}: {peak:.0f} MB", flush=True)
    return peaks


def show(what: str, times: dict[str, float]) -> dict[str, float]:
    """Print seconds and ratios to the first way."""
    ours = next(iter(times))
    print(what)
    for name, seconds in times.items():
        print(f"  {name:32} {1000 * seconds:9.1f} ms CPU   {seconds / times[ours]:6.2f}x", flush=True)
    return times


def measure_together(repeats: int) -> dict[str, dict[str, float]]:
    """Part 2."""
    times = {}
    for width, dim, images in ((4, 16, 8), (16, 128, 16)):
        name = f"50 clients of {images} images 8x8, SmallCNN width {width}, 2 epochs, batch 8"
        times[name] = show(name, together(width, dim, images, repeats))
    return times


def measure_speed(repeats: int) -> dict[str, dict[str, float]]:
    """Parts 3 and 4."""
    times = {}
    for num_classes in (10, 100):
        name = f"matching, C = {num_classes}, I = 5, d = 256, 30 steps"
        times[name] = show(name, matching(num_classes, repeats))
    for setting in ("SmallCNN, digits 8x8, 10 clients, batch 32", "ResNet10 width 8, 32x32, 10 clients, batch 64"):
        times[f"round, {setting}"] = show(f"round, {setting}", rounds(setting, max(2, repeats // 2)))
    return times


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parts = ["memory", "together", "speed"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for part in [p for p in parts if p in options.parts]:  # memory first: what else ran would hide it
        result = {"command": " ".join(sys.argv), "torch": torch.__version__}
        if part == "memory":
            result["peak megabytes"] = measure_memory()
        else:
            result["seconds"] = {"together": measure_together, "speed": measure_speed}[part](options.repeats)
        (RESULTS / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
