"""Numbers out of repeated measurements."""

from __future__ import annotations

from statistics import median

import torch

from tilewise.comm import Exchange, Mesh
from tilewise.layout import Axis, Layout


def spread(times: list[float]) -> float:
    """Return the middle half of the times, relative to their median."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / median(ordered)


def slowest(mesh: Mesh, numbers: list[float]) -> list[float]:
    """Return the largest of each number over all ranks."""
    mine = torch.tensor([numbers], dtype=torch.float64)
    split = Layout((mesh.size, len(numbers)), [Axis(mesh.size, 0)])
    whole = Layout.replicated((mesh.size, len(numbers)), ranks=mesh.size)
    everyone = Exchange(mesh, split, whole, layer="bench").start(mine).finish()
    return [float(value) for value in everyone.max(0).values]
