"""Hold a simulation against what the planner says of the same plan.

Bytes must be equal to the last one, rank by rank and layer by layer. Time and memory may differ by
a few percent: the planner prices layers one by one, the simulation runs them one after the other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from tilewise.errors import PlanError
from tilewise.graph import Graph
from tilewise.plan import Plan
from tilewise.planner.cost import Setting
from tilewise.planner.formulate import formulate_plan
from tilewise.planner.payload import Payload
from tilewise.planner.solve import Cost, evaluate
from tilewise.planner.timeline import peak_bytes


@dataclass(frozen=True)
class Difference:
    """A layer for which a rank receives other bytes than the planner says."""

    rank: int
    layer: str
    simulated_bytes: int
    planned_bytes: int


@dataclass(frozen=True)
class Agreement:
    """The planner's figures beside the simulation's.

    `planned_bytes` is what all ranks together hand over. Ratios are simulated over planned, None
    where the planner has no price, as the model has no layer to split.
    """

    planned_step_seconds: float | None
    planned_peak_bytes: int | None
    planned_bytes: int
    step_ratio: float | None
    peak_ratio: float | None
    differences: tuple[Difference, ...]

    @property
    def bytes_equal(self) -> bool:
        """Whether every simulated rank receives just what the planner says."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bytes_equal": self.bytes_equal}


def planned_cost(graph: Graph, plan: Plan, setting: Setting) -> tuple[Cost, int] | None:
    """Return the planner's cost and peak bytes of a plan, or None where it has none."""
    try:
        found, choice = formulate_plan(graph, setting, plan)
    except PlanError:
        return None
    return evaluate(found.problem, choice), peak_bytes(found, choice)


def planned_bytes(payload: Payload, rank: int) -> dict[str, int]:
    """Return what the planner says that a rank receives for each layer; gradients stand apart."""
    found: dict[str, int] = {}
    for sent in payload.sent:
        forward, back = payload.traffic(sent)
        for times, one in ((sent.times, forward), (1, back)):
            if one is not None:
                elements = int(one.received[rank] + one.summed[rank]) * times
                found[sent.layer] = found.get(sent.layer, 0) + elements * sent.itemsize
    for shared in payload.shared:
        size = (prod(shared.cover.local_shape(rank)) + 1) * shared.itemsize
        found["gradients"] = found.get("gradients", 0) + size
    outputs = len(payload.planned.program.output_values)
    if outputs > 1 and payload.ranks > 1:
        found["output"] = found.get("output", 0) + 4 * outputs
    return {layer: size for layer, size in found.items() if size}


def differences(payload: Payload, rank: int, received: dict[str, int]) -> list[Difference]:
    """List where a rank's bytes are not the planner's."""
    planned = planned_bytes(payload, rank)
    return [
        Difference(rank, layer, received.get(layer, 0), planned.get(layer, 0))
        for layer in sorted(received.keys() | planned.keys())
        if received.get(layer, 0) != planned.get(layer, 0)
    ]
