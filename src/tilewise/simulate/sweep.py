"""Simulate a model on more and more devices, each time with the best plan.

strong   the same input on more devices
weak     a batch that grows with the devices
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.errors import PlanError
from tilewise.graph import Graph, capture
from tilewise.plan import Plan
from tilewise.planner.machine import Machine
from tilewise.planner.search import search
from tilewise.simulate.simulation import Simulation, simulate


@dataclass(frozen=True)
class Point:
    """One number of devices, and what a step takes there with the best plan."""

    shapes: tuple[tuple[int, ...], ...]
    simulation: Simulation

    @property
    def samples_per_second(self) -> float:
        return self.shapes[0][0] / self.simulation.step_seconds

    def as_dict(self) -> dict[str, Any]:
        found, agreement = self.simulation, self.simulation.agreement
        return {
            "devices": found.devices,
            "inputs": [list(shape) for shape in self.shapes],
            "step_seconds": found.step_seconds,
            "peak_bytes": found.peak_bytes,
            "samples_per_second": self.samples_per_second,
            "planned_step_seconds": agreement.planned_step_seconds,
            "planned_peak_bytes": agreement.planned_peak_bytes,
            "bytes_equal": agreement.bytes_equal,
            "plan": {name: str(degrees) for name, degrees in found.plan.layers.items()},
        }


@dataclass(frozen=True)
class Sweep:
    """What stays the same from point to point."""

    model: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    machine: str | Path | Machine
    dtype: torch.dtype = torch.float32
    loss: Callable[..., Any] | None = None
    optimizer: str = "adam"
    memory: str | None = None
    time_limit: float = 60.0

    def strong(self, counts: Sequence[int]) -> Iterator[Point]:
        """Simulate the same input on each number of devices."""
        graph = self.captured(self.shapes)
        for count in counts:
            yield self._point(graph, self.shapes, count)

    def weak(self, counts: Sequence[int], *, base: int) -> Iterator[Point]:
        """Simulate a batch that is the input's on `base` devices, and grows with them."""
        for count in counts:
            batch, rest = divmod(self.shapes[0][0] * count, base)
            if rest or not batch:
                raise PlanError(
                    f"simulate: {count} devices have no whole batch where {base} have "
                    f"{self.shapes[0][0]}; use a multiple or divisor"
                )
            shapes = tuple((batch, *shape[1:]) for shape in self.shapes)
            yield self._point(self.captured(shapes), shapes, count)

    def captured(self, shapes: Sequence[tuple[int, ...]]) -> Graph:
        """Capture the model for inputs of these shapes."""
        return capture(self.model, self._inputs(shapes), self.loss)

    def best(self, graph: Graph, devices: int) -> Plan:
        """Return the planner's plan for so many devices."""
        found = search(
            graph,
            devices=devices,
            machine=self.machine,
            memory=self.memory,
            optimizer=self.optimizer,
            dtype=self.dtype,
            time_limit=self.time_limit,
        )
        return found.plan

    def _inputs(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes)

    def _point(self, graph: Graph, shapes: tuple[tuple[int, ...], ...], count: int) -> Point:
        simulation = simulate(
            self.model,
            graph,
            self.best(graph, count),
            devices=count,
            machine=self.machine,
            optimizer=self.optimizer,
            dtype=self.dtype,
        )
        return Point(shapes, simulation)
