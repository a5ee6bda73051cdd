"""Networks and random plans for tests of the planner."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tilewise import Graph, Plan, capture, models
from tilewise.planner.candidates import candidates
from twins import Dense, Small


def unet() -> nn.Module:
    return models.unet3d(width=0.125)


def cosmoflow() -> nn.Module:
    return models.cosmoflow(size=16, width=0.125)


def inception() -> nn.Module:
    return models.inception_v3(width=0.125)


class Joined(nn.Module):
    """Two readers of one tensor with different windows, a concat, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.wide = nn.Conv2d(8, 8, 5, padding=2, groups=2)
        self.narrow = nn.Conv2d(8, 6, 1)
        self.up = nn.ConvTranspose2d(14, 5, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = torch.cat([self.wide(x), self.narrow(x)], 1)
        out: torch.Tensor = self.up(F.avg_pool2d(x, 3, 2, 1)).sigmoid()
        return out


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "small": (Small, (4, 3, 9, 8), F.cross_entropy),
    "dense": (Dense, (4, 2, 7, 6), None),
    "joined": (Joined, (4, 3, 10, 8), F.mse_loss),
    "unet": (unet, (2, 1, 16, 16, 16), F.cross_entropy),
    "cosmoflow": (cosmoflow, (4, 4, 16, 16, 16), F.mse_loss),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name][0]()


@cache
def graph_of(name: str) -> Graph:
    _, shape, loss = NETS[name]
    return capture(build(name), (torch.zeros(shape),), loss)


def inputs_of(graph: Graph) -> list[torch.Tensor]:
    """Draw whole inputs, the target among them, as the captured training pass takes them."""
    return [
        torch.rand(value.shape, dtype=value.dtype)
        if value.dtype.is_floating_point
        else torch.randint(2, value.shape)
        for value in graph.training.inputs
    ]


def random_plan(graph: Graph, devices: int, seed: int, share: float = 0.8) -> Plan:
    """Give most layers random degrees."""
    rng = random.Random(seed)
    layers = {}
    for layer in graph.layers:
        if layer.extents and rng.random() < share:
            some = candidates(layer, devices)
            layers[layer.name] = some.degrees(rng.randrange(len(some)))
    return Plan(layers)
