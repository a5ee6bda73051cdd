"""The shipped networks at small sizes, held against one device.

All networks under all plans take half an hour on two cores. So each network runs under one or two
of the plans, and most under one drawn at random, such that all plans get their turn, and those of
four and eight ranks on networks with few layers; TILEWISE_THOROUGH=1 runs them all.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

from drawing import THOROUGH
from fixed_ways import EXACT, fixed_ways
from tilewise import Degrees, Graph, Mesh, Plan, capture, models
from tilewise.ops.conv_local import Way, Ways
from tilewise.testing import ranks
from tilewise.testing.verify import LOSSES, Result, draw_targets, verify

SMALL = {"width": 0.0625, "num_classes": 5}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "alexnet": (SMALL, (2, 3, 70, 65)),
    "vgg16": (SMALL, (2, 3, 40, 36)),
    "inception_v3": (SMALL, (4, 3, 80, 91)),
    "resnet50": (SMALL, (4, 3, 33, 35)),
    "wrn50": (SMALL | {"k": 3}, (4, 3, 33, 35)),
    "densenet121": (SMALL | {"width": 0.125}, (4, 3, 40, 33)),
    "mesh1k": ({"width": 0.03125}, (2, 18, 64, 64)),
    "mesh2k": ({"width": 0.03125}, (2, 18, 64, 128)),
    "cosmoflow": ({"size": 16, "width": 0.125, "batch_norm": True}, (2, 4, 16, 16, 16)),
    "cosmoflow_mlperf": ({"size": 32, "width": 0.125}, (2, 4, 32, 32, 32)),
    "unet3d": ({"width": 0.0625}, (2, 1, 16, 16, 24)),
}
PLANS = ("n2", "h2", "c2", "f2", "n2 h2", "c2 f2", "h2 w2", "h2 f2", "n2 h2 c2")
TURNS: dict[str, tuple[str, ...]] = {
    "alexnet": ("n2", "n2 h2 c2"),
    "vgg16": ("h2 w2", "c2 f2"),
    "inception_v3": ("h2",),
    "resnet50": ("f2",),
    "wrn50": ("c2",),
    "densenet121": ("c2",),
    "mesh1k": ("n2 h2",),
    "mesh2k": ("h2 f2",),
    "cosmoflow": ("n2", "h2 w2"),
    "cosmoflow_mlperf": ("h2", "c2 f2"),
    "unet3d": ("c2", "n2 h2 c2"),
}
DEEP = ("inception_v3", "resnet50", "wrn50", "densenet121")
LIKE_OTHERS = ("wrn50", "mesh1k")  # resnet50 and mesh2k have all of their kinds of layers
DRAWN = tuple(name for name in CASES if THOROUGH or name not in LIKE_OTHERS)


def build(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    arguments, shape = CASES[name]
    torch.manual_seed(0)
    model = models.get(name)(**arguments).double()
    return model, torch.randn(shape, dtype=torch.float64)


@cache
def captured(name: str) -> Graph:
    model, x = build(name)
    return capture(model, x, LOSSES["mse"], targets=draw_targets(model, [x], "mse"))


def check(mesh: Mesh, name: str, graph: Graph, plan: str | Plan, steps: int) -> Result:
    model, x = build(name)
    return verify(mesh, model, [x], plan, steps=steps, graph=graph)


def check_any_ways(mesh: Mesh, name: str, graph: Graph, plan: Plan, seed: int) -> Result:
    """Let every convolution do its local work in ways drawn at random, formats mixed."""
    draw = random.Random(seed)

    def some() -> Ways:
        forward, data, weight = (
            Way(draw.random() < 0.5, draw.random() < 0.5, draw.choice(EXACT)) for _ in range(3)
        )
        return Ways(forward, data, weight, draw.random() < 0.5)

    with fixed_ways(some, innermost_s=draw.choice([0.5, 1.0])):
        return check(mesh, name, graph, plan, 1)


def in_space(plan: str, ndim: int) -> str:
    """Spell a plan for the first dims of space: h w of images, d h of volumes."""
    return plan if ndim == 4 else plan.translate(str.maketrans("hw", "dh"))


def random_plan(graph: Graph, world: int, seed: int) -> Plan:
    """Draw degrees for each layer by itself; what shares a parameter shares c and f."""
    draw = random.Random(seed)
    layers: dict[str, Degrees] = {}
    channels: dict[str, Degrees] = {}
    for layer in graph.layers:
        if not layer.extents or draw.random() < 0.3:
            continue
        letters = [letter for letter in "ncfdhw" if letter in layer.extents]
        found = dict.fromkeys(letters, 1)
        rest = world
        while rest > 1 and draw.random() < 0.9:
            found[draw.choice(letters)] *= 2
            rest //= 2
        degrees = Degrees(**found)
        for name in layer.shares:
            shared = channels.setdefault(name, degrees)
            degrees = degrees.with_(c=shared.c, f=shared.f)
        if world % degrees.product == 0:
            layers[layer.name] = degrees
    return Plan(layers)


def equals_one_device(name: str) -> None:
    """Run a network under the plans whose turn it is."""
    graph = captured(name)
    for plan in PLANS if THOROUGH else TURNS[name]:
        plan = in_space(plan, len(CASES[name][1]))
        result = ranks(Degrees.parse(plan).product, check, name, graph, plan, 1)[0]
        assert result.ok, (plan, result)
        assert not result.fallbacks


def equals_under_random_plans(name: str) -> None:
    """Run a network under plans drawn at random."""
    graph = captured(name)
    for world, seed in ((2, 0), (4, 1)) if THOROUGH else ((2, 0),):
        plan = random_plan(graph, world, seed)
        assert len({str(degrees) for degrees in plan.layers.values()}) > 2
        result = ranks(world, check_any_ways, name, graph, plan, seed)[0]
        assert result.ok, (plan, result)
        assert not result.fallbacks
