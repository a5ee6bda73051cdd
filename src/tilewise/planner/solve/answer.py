"""The best assignment of a problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tilewise.errors import PlanError
from tilewise.planner.solve.memory import InfeasibleError, holders, least_memory
from tilewise.planner.solve.problem import Problem
from tilewise.planner.solve.solution import Solution
from tilewise.planner.solve.solver import Solver

LITTLE = 0.125
"""Which part of the time to spend where the best assignment at first is not worth more."""


def solve(
    problem: Problem,
    cap: int | None = None,
    *,
    time_limit: float = 60.0,
    hints: Sequence[Sequence[int]] = (),
    worth: Callable[[tuple[int, ...]], bool] | None = None,
) -> Solution:
    """Return the fastest assignment that needs at most `cap` bytes, or the best found in time.

    Args:
        problem: what to solve.
        cap: the most memory; None is no limit.
        time_limit: seconds after which to return the best so far with its gap.
        hints: assignments to start from.
        worth: says of the best assignment, at first and when half of the time is over, whether to
            use the rest; if not at first, then `LITTLE` of it.

    Raises:
        InfeasibleError: no assignment fits, or none was found.
        PlanError: no assignment keeps all ties.
    """
    began = time.monotonic()
    solver = Solver(problem, cap, began + time_limit)
    problem = solver.problem
    solver.start(hints)
    if worth is not None and solver.best is not None and not worth(solver.best):
        solver.shorten(began + LITTLE * time_limit)
    elif worth is not None:
        solver.deadline = began + time_limit / 2
    least = None
    if cap is not None and solver.best is None:
        least = least_memory(problem, time_limit / 4, enough=cap)
        if least is not None:
            if least.bound > cap:
                raise InfeasibleError(cap, least, holders(problem, least.choice))
            solver.descend(least.choice)
    solver.solve()
    if worth is not None and not solver.closed and solver.best is not None and worth(solver.best):
        solver.lengthen(began + time_limit)
        solver.solve()
    solution = solver.solution()
    if solution is not None:
        return solution
    if cap is None or least is None:
        names = ", ".join(problem.variables[v].name for tie in problem.ties for v in tie.variables)
        raise PlanError(
            f"plan: no choice of candidates found that agrees for tied layers ({names})"
        )
    if solver.closed:
        least = replace(least, bound=max(least.bound, cap + 1))
    raise InfeasibleError(cap, least, holders(problem, least.choice))
