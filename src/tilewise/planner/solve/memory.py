"""The least memory that any assignment needs, and who holds it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.errors import PlanError
from tilewise.planner.solve.evaluate import evaluate
from tilewise.planner.solve.known import know
from tilewise.planner.solve.problem import Problem
from tilewise.planner.solve.restrict import bytes_for_seconds, mean, restrict
from tilewise.planner.solve.solver import Solver
from tilewise.units import enough, size

NONE = 1 << 62
"""More bytes than any assignment needs."""


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """The assignment with the least memory that was found, and a bound of what any one needs."""

    choice: tuple[int, ...]
    peak_bytes: int
    bound: int

    @property
    def exact(self) -> bool:
        """Whether no assignment needs less."""
        return self.bound >= self.peak_bytes


class InfeasibleError(PlanError):
    """No assignment that fits the cap exists, or none was found in time.

    `least` has the least memory known; `holders` are (variable name, bytes held), most first.
    """

    def __init__(
        self,
        cap: int,
        least: LeastMemory,
        holders: Sequence[tuple[str, int]],
        *,
        recompute: bool = False,
    ) -> None:
        """Take what was asked for and what is known; `recompute` is whether plans may have it."""
        self.cap = cap
        self.least = least
        self.holders = tuple(holders)
        needed = f"{enough(least.peak_bytes)} ({least.peak_bytes:,} bytes)"  # what --memory must be
        why = f"{'is' if least.bound > cap else 'seems'} too small: the smallest plan "
        if least.exact:
            why += f"needs {needed}"
        else:
            why += f"found needs {needed}"
            # a proof that nothing fits says no more than that
            only = least.bound == cap + 1
            certain = f"more than {enough(cap)}" if only else f"{enough(least.bound)} or more"
            why += f"; {certain} are needed for certain" if least.bound else ""
        most = [(name, held) for name, held in self.holders[:5] if held]
        names = ", ".join(f"{name} ({size(held)})" for name, held in most)
        way_out = "more devices or a smaller batch"
        if not recompute:
            way_out = "more devices, a smaller batch or recomputation (--recompute, recompute=True)"
        super().__init__(
            f"plan: memory (={enough(cap)}) {why}; most is held by {names}; use {way_out}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what is known as plain values, for JSON."""
        return {
            "memory_bytes": self.cap,
            "least_bytes": self.least.peak_bytes,
            "least_bytes_proven": self.least.bound,
            "holders": [{"layer": name, "bytes": held} for name, held in self.holders if held],
        }


def least_memory(
    problem: Problem, time_limit: float = 30.0, *, enough: int = 0
) -> LeastMemory | None:
    """Minimise Σ held + max burst; None if no assignment keeps all ties.

    As few bytes as are `enough` end the search. Of several sums the mean is minimised, so that the
    bound holds for the largest too.

    Between two bursts no assignment needs less than the lower burst and what must be held if none
    is above the higher one. Ranges are halved, the one with the lowest bound first, until none
    promises less than the best assignment found.
    """
    deadline = time.monotonic() + time_limit
    every, problem = problem, know(mean(problem))
    swapped = bytes_for_seconds(problem)
    floor = max(int(v.burst.min()) for v in problem.variables)
    bursts = np.unique(np.concatenate([v.burst for v in problem.variables]).clip(floor))
    best: tuple[int, ...] | None = None
    peak = NONE
    # bytes held at least, and the first and last burst of a range
    ranges = [(0, 0, len(bursts) - 1)]
    unproven = peak
    while ranges:
        ranges.sort(key=lambda r: -(r[0] + int(bursts[r[1]])))
        held, low, high = ranges.pop()
        bound = held + int(bursts[low])
        high = min(high, int(np.searchsorted(bursts, peak - held)) - 1)
        if bound >= peak or low > high:
            continue
        if best is not None and (time.monotonic() > deadline or peak <= enough):
            unproven = min(unproven, bound)
            break
        half = high
        if best is not None:
            half = int(np.searchsorted(bursts, (bursts[low] + bursts[high]) / 2, "right")) - 1
        if half < high:
            ranges.append((held, half + 1, high))
        found, least = _least_held(problem, swapped, int(bursts[half]), deadline)
        least = max(held, least)
        cost = None if found is None else evaluate(problem, found)
        if cost is not None and cost.peak_bytes < peak:
            best, peak = found, cost.peak_bytes
        if cost is None or cost.held_bytes > least:
            unproven = min(unproven, least + int(bursts[low]))
            continue
        # All with its burst or more, up to the half, hold no less than it does.
        below = int(np.searchsorted(bursts, cost.burst_bytes)) - 1
        if below >= low:
            ranges.append((least, low, below))
    if best is None:
        return None
    return LeastMemory(best, evaluate(every, best).peak_bytes, min(peak, unproven))


def _least_held(
    problem: Problem, swapped: Problem, burst: int, deadline: float
) -> tuple[tuple[int, ...] | None, int]:
    """Return an assignment that holds little with bursts up to some size, and what any one holds.

    If there is none, that is NONE.
    """
    kept = {k: np.flatnonzero(v.burst <= burst) for k, v in enumerate(problem.variables)}
    solver = Solver(restrict(swapped, kept), None, deadline)
    solver.start(())
    solver.solve()
    found = solver.solution()
    if found is None:
        return None, NONE if solver.closed else 0
    choice = tuple(int(kept[k][place]) for k, place in enumerate(found.choice))
    if found.optimal:
        return choice, evaluate(problem, choice).held_bytes
    return choice, int(np.ceil(found.bound * (1 - 1e-9)))


def holders(problem: Problem, choice: Sequence[int]) -> list[tuple[str, int]]:
    """Return the variables and the bytes they hold, most first."""
    held = [(v.name, int(v.held[k].max())) for v, k in zip(problem.variables, choice)]
    return sorted(held, key=lambda pair: -pair[1])
