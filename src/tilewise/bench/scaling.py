"""Strong and weak scaling of a layer or a model, forward and backward apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn

from tilewise.auto import parallelize
from tilewise.auto.tell import slowest
from tilewise.bench.layers import LayerCase, measure
from tilewise.bench.model import split_loss, timed
from tilewise.comm import Mesh
from tilewise.testing.verify import LOSSES, draw_targets

DIMS = {"n": 0, "c": 1}


@dataclass
class Point:
    """A layer or model on some ranks; seconds of the slowest rank, ratios against one rank."""

    layer: str
    degrees: str
    ranks: int
    forward_s: float
    backward_s: float
    forward_ratio: float = 1.0
    backward_ratio: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_point(mesh: Mesh, case: LayerCase, letter: str, weak: bool, rounds: int) -> Point:
    """Measure a layer split along one degree; weak scaling grows it with the ranks."""
    grown = grow(case, letter, mesh.size) if weak else case
    row = measure(mesh, grown, letter, rounds)
    return Point(case.name, row.degrees, mesh.size, row.forward_s, row.backward_s)


def model_letters(shape: tuple[int, ...], ranks: int, *, weak: bool) -> list[str]:
    """List the degrees to split a model by: sample and space; channel and filter if not weak."""
    samples = ["n"] if weak or shape[0] >= ranks else []
    return [*samples, "dhw"[5 - len(shape)], *([] if weak else ["c", "f"])]


def measure_model_point(
    mesh: Mesh, name: str, model: nn.Module, shape: tuple[int, ...], letter: str, weak: bool,
    rounds: int,
) -> Point:  # fmt: skip
    """Measure a model whose layers are all split along one degree."""
    torch.set_num_threads(1)
    dim = DIMS.get(letter, 2)
    grown = tuple(n * mesh.size if weak and i == dim else n for i, n in enumerate(shape))
    inputs = [torch.randn(grown, generator=torch.Generator().manual_seed(1))]
    plan = f"{letter}{mesh.size}" if mesh.size > 1 else "1"
    targets = draw_targets(model, inputs, "mse")
    split = parallelize(model, tuple(inputs), plan, loss=LOSSES["mse"], targets=targets, mesh=mesh)
    loss = split_loss(mesh, split, inputs, targets)
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        split.zero_grad()
        mesh.agree("bench")
        forward, found = timed(loss)
        backward, _ = timed(found.backward)
        times.append((forward, backward))
    middle = [median(each) for each in zip(*times[1:])]
    return Point(name, plan, mesh.size, *slowest(mesh, middle))


def grow(case: LayerCase, letter: str, ranks: int) -> LayerCase:
    """Return the layer with its work along one degree multiplied by the ranks."""
    if letter == "f":
        return replace(case, filters=case.filters * ranks)
    dim = DIMS[letter] if letter in DIMS else 2 + "dhw"[5 - len(case.shape) :].index(letter)
    shape = list(case.shape)
    shape[dim] *= ranks
    return replace(case, shape=tuple(shape))


def with_ratios(points: list[Point], *, weak: bool) -> list[Point]:
    """Fill in how much faster than the first point, which is on the fewest ranks."""
    base = points[0]
    found = []
    for point in points:
        work = point.ranks / base.ranks if weak else 1.0
        forward, backward = base.forward_s / point.forward_s, base.backward_s / point.backward_s
        found.append(replace(point, forward_ratio=work * forward, backward_ratio=work * backward))
    return found
