"""Run the plan that the planner finds beside others, and compare with what was predicted.

All plans are measured in turn in every round, and compared within each, so that their ratios hold
on a noisy machine.

Predictions are those of the last search, which has learned from steps of some of the plans; mixes
are never among those. They are for the speed that the machine had then. How much slower it has
become since shows in the plans that ran then and run again now: the drift, which predictions are
multiplied by.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewise.auto import auto_plan
from tilewise.auto.finals import Kept, evened, room, step_seconds, uniform_plans
from tilewise.auto.tell import told
from tilewise.comm import Mesh
from tilewise.graph import capture
from tilewise.layout import Degrees
from tilewise.plan import Plan
from tilewise.plan.given import AUTO
from tilewise.planner.candidates import all_degrees
from tilewise.planner.search import Found
from tilewise.testing.verify import LOSSES, draw_targets

LEAST = 10
MIX = "mix "
SEARCHED = "searched"
MIXES = 4
TRIES = 200
CHANGES = 0.15


@dataclass
class PlanRow:
    """A plan: seconds of a step as predicted, at the machine's speed now, and as measured.

    A plan that goes by several names has them all, as in `auto = n2`.
    """

    plan: str
    predicted_s: float
    measured_s: float
    layers: dict[str, str]

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.measured_s

    @property
    def degrees(self) -> str:
        """How many layers have which degrees; empty where a name of the plan says it."""
        names = self.plan.split(" = ")
        if any(name not in (AUTO, SEARCHED) and not name.startswith(MIX) for name in names):
            return ""
        return Plan({name: Degrees.parse(text) for name, text in self.layers.items()}).told()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error}


@dataclass
class PlanRows:
    """All plans of a model, the auto plan first."""

    rows: list[PlanRow]
    layers: dict[str, str]
    drift: float

    @property
    def regret(self) -> float:
        """How many times the fastest plan's time the auto plan takes."""
        return self.rows[0].measured_s / min(row.measured_s for row in self.rows)

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predicted and measured times."""
        return spearman(
            [row.predicted_s for row in self.rows], [row.measured_s for row in self.rows]
        )

    @property
    def median_error(self) -> float:
        return median(row.error for row in self.rows)

    @property
    def mixes_error(self) -> float:
        """The median error of plans that nothing was learned from."""
        return median(row.error for row in self.rows if row.plan.startswith(MIX))

    @property
    def error_without_drift(self) -> float:
        """The median error of predictions that do not know of the drift."""
        return median(
            abs(row.predicted_s / self.drift - row.measured_s) / row.measured_s for row in self.rows
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": [row.as_dict() for row in self.rows],
            "regret": self.regret,
            "rank_correlation": self.rank_correlation,
            "median_error": self.median_error,
            "mixes_error": self.mixes_error,
            "drift": self.drift,
            "error_without_drift": self.error_without_drift,
            "layers": self.layers,
        }


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the correlation of the ranks of two lists; equal numbers share their ranks."""

    def ranks(numbers: Sequence[float]) -> Any:
        found = np.asarray(numbers, np.float64)
        return (found[:, None] > found).sum(1) + 0.5 * (found[:, None] == found).sum(1)

    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def measure_plans(
    mesh: Mesh, model: nn.Module, inputs: Sequence[Tensor], rounds: int
) -> Generator[str, None, PlanRows]:
    """Find the plan of a model, and measure it beside others; yields what is going on."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    targets = draw_targets(model, inputs, "mse")
    graph = capture(model, tuple(inputs), LOSSES["mse"], targets=targets)
    chosen, found, ran = yield from auto_plan(graph, mesh, optimizer="momentum", model=model)

    def listed() -> str:
        assert found is not None
        plans = _plans(chosen, found)
        return json.dumps([plans, room(found, [Plan.from_json(text) for _, text, _ in plans])])

    plans, spare = json.loads(told(mesh, listed))
    times: list[list[float]] = [[] for _ in plans]
    kept = Kept.within(spare, model, graph, len(plans))
    for number in range(1, rounds + 1):
        for (name, text, _), seconds in zip(plans, times, strict=True):
            yield f"round {number} of {rounds}: {name}"
            plan = Plan.from_json(text)
            seconds.append(step_seconds(mesh, model, graph, plan, device, "momentum", kept))
    kept.only(())
    measured = evened(times)
    drift = drift_of(
        [(ran[text], now) for (_, text, _), now in zip(plans, measured, strict=True) if text in ran]
    )
    rows = [
        PlanRow(name, drift * predicted, now, _layers(Plan.from_json(text)))
        for (name, text, predicted), now in zip(plans, measured, strict=True)
    ]
    return PlanRows(rows, _layers(chosen), drift)


def _layers(plan: Plan) -> dict[str, str]:
    return {name: str(degrees) for name, degrees in plan.layers.items()}


def drift_of(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how many times what it took then things take now, by pairs of seconds."""
    return median([now / then for then, now in pairs if isfinite(now)] or [1.0])


def _plans(chosen: Plan, found: Found) -> list[tuple[str, str, float]]:
    """List the auto plan, what the search found, all uniform plans and some mixes, with times."""
    names: dict[str, str] = {}
    for name, plan in {AUTO: chosen, SEARCHED: found.plan, **uniform_plans(found)}.items():
        text = plan.to_json()
        names[text] = f"{names[text]} = {name}" if text in names else name
    draw = random.Random(0)
    mixes = 0
    for _ in range(TRIES):
        if mixes >= MIXES and len(names) > LEAST:
            break
        text = _mix(found, draw).to_json()
        if text not in names:
            mixes += 1
            names[text] = f"{MIX}{mixes}"
    return [
        (name, text, found.price(Plan.from_json(text)).step_seconds) for text, name in names.items()
    ]


def _mix(found: Found, draw: random.Random) -> Plan:
    """Draw a plan whose degrees change now and then from one layer to the next."""
    every = all_degrees(found.devices)
    full = [Degrees(*map(int, row)) for row in every[every.prod(1) == found.devices]]
    nearest = {str(degrees): found.formulation.nearest(degrees) for degrees in full}
    now = draw.choice(full)
    choice = []
    for variable in range(len(found.formulation.names)):
        if draw.random() < CHANGES:
            now = draw.choice(full)
        choice.append(nearest[str(now)][variable])
    return found.formulation.plan(tuple(choice))
