"""The least memory that any assignment needs, and who holds it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise.errors import PlanError
from tilewise.planner.solve.evaluate import evaluate
from tilewise.planner.solve.known import know
from tilewise.planner.solve.problem import Problem
from tilewise.planner.solve.restrict import bytes_for_seconds, restrict
from tilewise.planner.solve.solver import Solver


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

    def __init__(self, cap: int, least: LeastMemory, holders: Sequence[tuple[str, int]]) -> None:
        self.cap = cap
        self.least = least
        self.holders = tuple(holders)
        needs = f"at least {least.bound:,} bytes"
        if least.exact:
            needs = f"{least.peak_bytes:,} bytes"
        elif least.bound <= cap:
            needs = f"{least.peak_bytes:,} bytes as found, {least.bound:,} or more for certain"
        names = ", ".join(f"{name} ({held:,})" for name, held in self.holders[:5])
        super().__init__(
            f"plan: memory (={cap:,} bytes) is too small: the smallest plan needs {needs}; most "
            f"is held by {names}; use more devices, a smaller batch or recomputation"
        )


def least_memory(problem: Problem, time_limit: float = 30.0) -> LeastMemory | None:
    """Minimise Σ held + max burst; None if no assignment keeps all ties.

    The sum is minimised among candidates below some burst, which is lowered from solution to
    solution until the bound of the sum plus the least burst there is shows that no more is won.
    """
    deadline = time.monotonic() + time_limit
    problem = know(problem)
    swapped = bytes_for_seconds(problem)
    floor = max(int(v.burst.min()) for v in problem.variables)
    best: LeastMemory | None = None
    below = max(int(v.burst.max()) for v in problem.variables) + 1
    unexplored = 0
    while below > floor:
        kept = {k: np.flatnonzero(v.burst < below) for k, v in enumerate(problem.variables)}
        solver = Solver(restrict(swapped, kept), None, deadline)
        solver.start(())
        solver.solve()
        found = solver.solution()
        if found is None:
            below = floor if solver.closed else below
            break
        choice = tuple(int(kept[k][place]) for k, place in enumerate(found.choice))
        cost = evaluate(problem, choice)
        bound = int(np.ceil(found.bound * (1 - 1e-9)))
        if found.optimal:
            bound = cost.held_bytes
        unexplored = bound + floor
        if best is None or cost.peak_bytes < best.peak_bytes:
            best = LeastMemory(choice, cost.peak_bytes, 0)
        if unexplored >= best.peak_bytes:
            return LeastMemory(best.choice, best.peak_bytes, best.peak_bytes)
        if not found.optimal:
            break
        # All with this burst or more hold no less than this one did.
        below = min(cost.burst_bytes, best.peak_bytes - bound)
    if best is None:
        return None
    proven = best.peak_bytes if below <= floor else min(unexplored, best.peak_bytes)
    return LeastMemory(best.choice, best.peak_bytes, proven)


def holders(problem: Problem, choice: Sequence[int]) -> list[tuple[str, int]]:
    """Return the variables and the bytes they hold, most first."""
    held = [(v.name, int(v.held[k])) for v, k in zip(problem.variables, choice)]
    return sorted(held, key=lambda pair: -pair[1])
