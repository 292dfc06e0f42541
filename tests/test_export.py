"""Networks as `torch.export` programs: the same numbers as in eager mode, also after saving and loading."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, export, load
from torch.export import save as save_program

from lightning_modules import AnnSnn, FocalPolicy, GraphPFN


def exported(network: nn.Module, inputs: tuple, dynamic: tuple | None = None) -> nn.Module:
    """The network after a trip through a file."""
    with torch.no_grad():
        program = export(network.eval(), inputs, dynamic_shapes=dynamic, strict=False)
    save_program(program, "program.pt2")
    return load("program.pt2").module()


class Simulation(nn.Module):
    """A spiking network for a fixed T, from rest."""

    def __init__(self, module: AnnSnn, time_steps: int) -> None:
        super().__init__()
        self.student, self.time_steps = copy.deepcopy(module.student), time_steps

    def forward(self, image: Tensor) -> Tensor:
        self.student.reset()
        logits, _ = self.student(image, self.time_steps)
        return logits.mean(0)


def test_spiking_network():
    torch.manual_seed(0)
    module = AnnSnn(weights="digits", conversion="channel", percentile=99, half_threshold=True, weighting="uniform")
    module.convert_with([torch.rand(32, 1, 8, 8)])
    images = torch.rand(5, 1, 8, 8)
    program = exported(Simulation(module, 4), (images,))
    with torch.no_grad():
        for x in (images, torch.rand(5, 1, 8, 8)):
            torch.testing.assert_close(program(x), module(x, time_steps=4))


class Window(nn.Module):
    """A policy on states."""

    def __init__(self, policy: FocalPolicy) -> None:
        super().__init__()
        self.network = policy.network

    def forward(self, state: Tensor, noise: Tensor) -> Tensor:
        return self.network({"state": state}, noise)


def test_policy_of_any_batch_size():
    torch.manual_seed(0)
    policy = FocalPolicy(action_dim=2, state_dim=4, point_channels=0, image_crop=0, widths=[8, 16, 16])
    policy.configure_model()
    policy.network.normalizer.fit({"action": torch.randn(50, 2), "state": torch.randn(50, 4)})
    window, batch = Window(policy), Dim("batch", min=2)
    program = exported(window, (torch.randn(3, 2, 4), torch.randn(3, 12, 2)), ({0: batch}, {0: batch}))
    with torch.no_grad():
        for b in (3, 7):
            state, noise = torch.randn(b, 2, 4), torch.randn(b, 12, 2)
            torch.testing.assert_close(program(state, noise), window(state, noise))


class InContext(nn.Module):
    """Logits of the nodes of one graph behind its labelled ones."""

    def __init__(self, module: GraphPFN) -> None:
        super().__init__()
        self.network = module.network

    def forward(self, x: Tensor, y: Tensor, edges: Tensor) -> Tensor:
        from lightning_modules.graph_pfn.network import Question

        return self.network([Question(x, y, edges)])[0].query


def test_tiny_graph_network():
    torch.manual_seed(0)
    network = InContext(GraphPFN.from_pretrained("tiny"))
    pairs = torch.combinations(torch.arange(12))[::3].T
    edges = torch.cat([pairs, pairs.flip(0)], 1)
    x, y = torch.randn(12, 6), torch.arange(5) % 3
    program = exported(network, (x, y, edges))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(program(x, y, edges), network(x, y, edges))
            x, y = torch.randn(12, 6), torch.randint(0, 3, (5,))
    assert Path("program.pt2").stat().st_size > 400_000  # the weights are in it
