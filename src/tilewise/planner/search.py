"""Find the fastest plan of a model on a machine, and say what it costs.

found = tw.search(graph, devices=16, machine="lassen", memory="16GiB")
found.plan, found.step_seconds, found.baselines["data"].step_seconds
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from tilewise.errors import PlanError
from tilewise.graph.captured import Graph
from tilewise.graph.lower import Planned, plan_program
from tilewise.graph.parallel import check_names
from tilewise.layout import Degrees
from tilewise.ops.draws import Draws
from tilewise.plan import Plan
from tilewise.planner.baselines import NAMES, baselines, shared_degrees
from tilewise.planner.candidates import Dropped
from tilewise.planner.cost import Setting, WholeStep
from tilewise.planner.explain import Alternative, alternatives, left_out
from tilewise.planner.formulate import formulate, formulate_plan
from tilewise.planner.formulation import Formulation
from tilewise.planner.frontier import frontier
from tilewise.planner.lighter import Lighter
from tilewise.planner.machine import Machine, load_machine
from tilewise.planner.moment import Sums
from tilewise.planner.payload import Payload
from tilewise.planner.places import decided
from tilewise.planner.rows import Row, rows, together
from tilewise.planner.sensitivity import Tried, sensitivity
from tilewise.planner.solve import Cost, Solution, evaluate, solve
from tilewise.planner.timeline import Fullest, fullest, peak_bytes
from tilewise.planner.within import Limited, Within
from tilewise.units import size

UNITS = {"": 1, "B": 1} | {
    prefix + end: base ** (power + 1)
    for base, end in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate("KMGT")
}


ROUNDING = 1e-12
"""Which part of a step is no more than rounding."""
LOOK, LONGEST_LOOK = 0.05, 2.0
"""Which part of the time, and how many seconds, to look for equally fast plans with less memory."""


@dataclass(frozen=True)
class Priced:
    """A plan with what it costs, and whether it fits in memory.

    On a frontier `optimal` is whether it is proven that none with as little memory is faster.
    """

    plan: Plan
    cost: Cost
    peak_bytes: int
    fits: bool
    optimal: bool = False

    @property
    def step_seconds(self) -> float:
        return self.cost.seconds


class Found:
    """The best plan that was found, and what else there is to know about it.

    `optimal` is whether no candidate plan that fits is faster, `gap` by how much one might be;
    `short` is whether `free`, the fastest plan of all, does not fit. Of the time that it took,
    `price_seconds` went by before the search: all candidates and moves were priced, and plans that
    people use. `solve_seconds` is the search itself; `time_limit` bounds it alone.
    """

    def __init__(
        self,
        formulation: Formulation,
        memory_bytes: int,
        time_limit: float,
        pins: Mapping[str, Degrees],
        began: float,
        hints: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self.formulation, self.memory_bytes = formulation, memory_bytes
        self.time_limit, self.pins = time_limit, pins
        base = baselines(formulation, memory_bytes)
        hints = [*hints, *(choice for choice, _ in base.values())]
        self.price_seconds = time.monotonic() - began
        self.limited = self._solve(hints)
        self.solution = self.limited.solution
        self.cost = evaluate(formulation.problem, self.solution.choice)
        self.plan = formulation.plan(self.solution.choice)
        self.baselines = {name: self._priced(*base[name]) for name in NAMES if name in base}

    def _solve(self, hints: Sequence[tuple[int, ...]]) -> Limited:
        """Find the fastest plan whose peak fits: the fastest of all, if that one does."""
        limit = self.time_limit - min(self.time_limit * LOOK, LONGEST_LOOK)
        problem, deadline = self.formulation.problem, time.monotonic() + limit
        fitting: list[tuple[int, ...]] = []

        def fits(choice: tuple[int, ...]) -> bool:
            if peak_bytes(self.formulation, choice) <= self.memory_bytes:
                fitting.append(choice)
                return True
            return False

        timed = self.formulation.timed
        free = self._lighter(solve(timed, time_limit=limit, hints=hints, worth=fits))
        self.short = not fits(free.choice)
        left = deadline - time.monotonic()
        if not (self.short or free.optimal) and left > limit / 2:
            # little time went into it, as it did not seem to fit
            free = self._lighter(solve(timed, time_limit=left, hints=[free.choice, *hints]))
            self.short = not fits(free.choice)
        self.free = free = replace(free, peak_bytes=evaluate(problem, free.choice).peak_bytes)
        if not self.short:
            return Limited(Sums(self.formulation), self.memory_bytes, free, problem)
        within = Within(self.formulation, self.memory_bytes, free, deadline)
        limited = within.run([*hints, *fitting])
        solution = self._lighter(limited.solution)
        peak = peak_bytes(self.formulation, solution.choice)
        return replace(limited, solution=replace(solution, peak_bytes=peak))

    def _lighter(self, solution: Solution) -> Solution:
        """Return a plan that is as fast and needs less memory, if a short look finds one."""
        began = time.monotonic()
        deadline = began + min(self.time_limit * LOOK, LONGEST_LOOK)
        choice = Lighter(self.formulation)(solution.choice, deadline)
        if choice == solution.choice:
            return solution
        cost = evaluate(self.formulation.problem, choice)
        took = solution.solve_seconds + time.monotonic() - began
        return replace(
            solution,
            choice=choice,
            peak_bytes=cost.peak_bytes,
            solve_seconds=took,
        )

    @property
    def step_seconds(self) -> float:
        return self.cost.seconds

    @property
    def backward_seconds(self) -> float:
        """The backward pass without any gradient sums; the cost's has those that cannot hide."""
        return self.cost.backward - self.formulation.waiting_seconds(self.solution.choice)

    @property
    def hidden_seconds(self) -> float:
        """How much of the gradient sums hides behind the backward pass."""
        hidden = self.cost.forward + self.backward_seconds + self.cost.sync - self.step_seconds
        return hidden if hidden > ROUNDING * self.step_seconds else 0.0

    @cached_property
    def optimizer_seconds(self) -> float:
        """The optimizer's update, which is part of `cost.forward`."""
        costs, owner = self.formulation.costs, self.formulation.choices.owner
        chosen = self.solution.choice
        return float(sum(cost.optimizer[chosen[owner[name]]] for name, cost in costs.items()))

    @cached_property
    def peak_bytes(self) -> int:
        """What the fullest rank holds at its fullest moment."""
        return peak_bytes(self.formulation, self.solution.choice)

    @cached_property
    def fullest(self) -> Fullest:
        """The moment at which the fullest rank holds most, and what that is of."""
        return fullest(self.formulation, self.solution.choice)

    def __repr__(self) -> str:
        proof = "proven best" if self.optimal else f"gap {self.gap:.2%}"
        ms, needs = f"{1e3 * self.step_seconds:.4g} ms a step", size(self.peak_bytes)
        return f"Found({ms}, {needs} on the fullest of {self.devices} devices, {proof})"

    @property
    def optimal(self) -> bool:
        return self.solution.optimal

    @property
    def gap(self) -> float:
        return 0.0 if self.optimal else max(self.solution.gap, 0.0)

    @property
    def solve_seconds(self) -> float:
        return self.solution.solve_seconds

    @property
    def devices(self) -> int:
        return self.formulation.setting.devices

    @property
    def machine(self) -> Machine:
        return self.formulation.setting.machine

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every layer with its degrees, its seconds by kind, and its bytes: sent, and by kind."""
        return rows(self.formulation, self.solution.choice, self.payload(self.plan))

    def planned(self, plan: Plan) -> Planned:
        """Return the training program with an operator planned for every call."""
        program = self.formulation.graph.training
        return plan_program(program, plan, ranks=self.devices, rank=0, draws=Draws(0))

    def payload(self, plan: Plan) -> Payload:
        """Return all that a plan sends in the planned dtype, counted on the planned program."""
        setting = self.formulation.setting
        return Payload(self.planned(plan), plan, node=setting.node, size=setting.size)

    def learned(self, step: WholeStep, known: Sequence[Plan]) -> Found:
        """Search again with what parts take within a whole step, beginning with known plans."""
        old, began = self.formulation, time.monotonic()
        again = any(old.choices.stretches)
        setting = replace(old.setting, step=step)
        found = formulate(old.graph, setting, pins=self.pins, recompute=again)
        hints = [found.choice(plan) for plan in known]
        return Found(found, self.memory_bytes, self.time_limit, self.pins, began, hints)

    def price(self, plan: Plan) -> Priced:
        """Price another plan of the same model for the same machine, whatever was pinned here.

        Layers that it does not name follow those before them.
        """
        found = self.formulation
        check_names(found.graph, plan)
        degrees = decided(found.graph, plan)
        again = any(found.choices.stretches)
        # here inputs lie as their first readers want them: a plan that does not name those differs
        here = degrees.keys() == set(found.names) <= plan.layers.keys() and not plan.io_channels
        here = here and all(one.has(degrees[one.layer.name]) for one in found.choices.candidates)
        if self.pins or not here or (plan.recompute and not again):
            found, choice = formulate_plan(found.graph, found.setting, plan)
        else:
            choice = found.choice(Plan(degrees, recompute=plan.recompute))
        try:
            cost = evaluate(found.problem, choice)
        except ValueError:  # layers need other blocks of a parameter that they share: it moves
            found, choice = formulate_plan(found.graph, found.setting, plan)
            cost = evaluate(found.problem, choice)
        peak = peak_bytes(found, choice)
        return Priced(found.plan(choice), cost, peak, peak <= self.memory_bytes)

    def shared_degrees(self, plan: Plan) -> Degrees | None:
        """Return the degrees that a plan gives all layers as far as they can use them, if any."""
        return shared_degrees(self.formulation, self.formulation.choice(plan))

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a step under another plan."""
        return evaluate(self.formulation.problem, self.formulation.choice(plan)).seconds

    def explain(self, layer: str, *, time_limit: float | None = None) -> list[Alternative]:
        """Return every way to split a layer with its price when all others re-optimise."""
        limit = self.time_limit if time_limit is None else time_limit
        return alternatives(self.formulation, self.limited, layer, time_limit=limit)

    def left_out(self, layer: str, ways: Sequence[Alternative] = ()) -> dict[str, list[Dropped]]:
        """Return the ways to split a layer that were left out, by reason.

        Of `ways`, which `explain` returned, also those with which no plan is as fast or fits.
        """
        return left_out(self.formulation, layer, ways, self.step_seconds)

    def frontier(self, points: int = 8) -> list[Priced]:
        """Return plans from the least memory to the fastest, each faster than the one before."""
        if points < 2:
            raise PlanError(f"plan: points (={points}) of a frontier must be at least 2")
        found = frontier(
            self.formulation, self.free, self.solution, points, time_limit=self.time_limit
        )
        problem = self.formulation.problem
        priced = (self._priced(one.choice, evaluate(problem, one.choice)) for one in found)
        pairs = zip(priced, found, strict=True)
        return undominated([replace(one, optimal=plan.optimal) for one, plan in pairs])

    def sensitivity(self) -> list[Tried]:
        """Return what the plan loses where one of the machine's rates is 10 % off."""
        return list(
            sensitivity(
                self.formulation,
                self.limited,
                pins=self.pins,
                time_limit=self.time_limit,
            )
        )

    def _priced(self, choice: tuple[int, ...], cost: Cost) -> Priced:
        peak = peak_bytes(self.formulation, choice)
        return Priced(self.formulation.plan(choice), cost, peak, peak <= self.memory_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for JSON."""
        return {
            "step_seconds": self.step_seconds,
            "forward_seconds": self.cost.forward - self.optimizer_seconds,
            "backward_seconds": self.backward_seconds,
            "optimizer_seconds": self.optimizer_seconds,
            "sync_seconds": self.cost.sync,
            "hidden_seconds": self.hidden_seconds,
            "peak_bytes": self.peak_bytes,
            "memory_bytes": self.memory_bytes,
            "device_bytes": self.machine.memory_bytes,
            "bytes_by_kind": together(self.rows),
            "fullest": asdict(self.fullest),
            "optimal": self.optimal,
            "gap": self.gap if isfinite(self.gap) else None,
            "price_seconds": self.price_seconds,
            "solve_seconds": self.solve_seconds,
            "devices": self.devices,
            "machine": self.machine.name,
            "layers": [row.as_dict() for row in self.rows],
            "baselines": {name: self._baseline(one) for name, one in self.baselines.items()},
        }

    def _baseline(self, one: Priced) -> dict[str, Any]:
        degrees = self.shared_degrees(one.plan)
        return {
            "step_seconds": one.step_seconds,
            "peak_bytes": one.peak_bytes,
            "fits": one.fits,
            "degrees": None if degrees is None else str(degrees),
        }


def undominated(points: Sequence[Priced]) -> list[Priced]:
    """Leave out plans that another one beats in time or memory without losing in the other."""
    kept: list[Priced] = []
    for one in sorted(points, key=lambda point: (point.peak_bytes, point.step_seconds)):
        if not kept or one.step_seconds < kept[-1].step_seconds:
            kept.append(one)
    return kept


def search(
    graph: Graph,
    *,
    devices: int,
    machine: str | Path | Machine,
    memory: str | int | None = None,
    optimizer: str = "adam",
    dtype: str | torch.dtype = "float32",
    pins: Mapping[str, str | Degrees] | None = None,
    recompute: bool = False,
    time_limit: float = 60.0,
) -> Found:
    """Find the fastest plan for a captured model.

    Args:
        graph: what `capture` returned; with its loss, if it was captured with one.
        devices: how many; all degrees' products divide it.
        machine: a preset's name, `local` for this one as it was measured, a machine file, or a
            Machine.
        memory: bytes a device, such as `16GiB`; by default the machine's, less what it reserves.
        optimizer: `sgd`, `momentum`, `rmsprop`, `adam` or `adamw`: how much state it keeps.
        dtype: what the model is trained in.
        pins: degrees that single layers must have, by name or pattern.
        recompute: whether layers may be computed again in backward, which takes time and spares
            memory; the plan says which are.
        time_limit: seconds of searching, when all is priced, after which the best plan so far is
            returned with its gap.
    """
    if not isinstance(graph, Graph):
        raise PlanError(
            f"plan: search takes what tw.capture(model, inputs) returns, not {type(graph).__name__}"
        )
    if not isinstance(devices, int) or devices < 1:
        raise PlanError(f"plan: devices (={devices!r}) must be a whole number, at least 1")
    if not time_limit > 0:
        raise PlanError(f"plan: time_limit (={time_limit!r}) must be more than 0 seconds")
    where = load_machine(machine, devices=devices)
    name = str(dtype).removeprefix("torch.")
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise PlanError(f"plan: dtype (={name!r}) is not a dtype of torch")
    setting = Setting(where, devices, name, kind.itemsize, optimizer)
    limit = where.memory_bytes - where.reserved_bytes if memory is None else parse_bytes(memory)
    pinned = Plan.of(graph, dict(pins or {}))
    pinned_layers = dict(pinned.layers)
    began = time.monotonic()
    found = formulate(graph, setting, pins=pinned_layers, recompute=recompute)
    return Found(found, limit, time_limit, pinned_layers, began)


def parse_bytes(text: str | int) -> int:
    """Read a size such as `16GiB`, `900MB` or a number of bytes."""
    if isinstance(text, int) and text > 0:
        return text
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", str(text).strip())
    if match is None or match[2] not in UNITS or float(match[1]) <= 0:
        raise PlanError(f"memory: {text!r} must be a size such as 16GiB, 900MB, 64KB or 4096")
    return int(float(match[1]) * UNITS[match[2]])
