"""Strong and weak scaling of one layer, forward and backward apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tilewise.bench.layers import LayerCase, measure
from tilewise.comm import Mesh

DIMS = {"n": 0, "c": 1}


@dataclass
class Point:
    """A layer on some ranks; seconds of the slowest rank, ratios against one rank."""

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
