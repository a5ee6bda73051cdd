"""The questions one can ask of a problem: the best assignment, prices, the frontier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise.errors import PlanError
from tilewise.planner.solve.descend import Descent
from tilewise.planner.solve.known import know
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.memory import InfeasibleError, holders, least_memory
from tilewise.planner.solve.problem import Floats, Ints, Problem
from tilewise.planner.solve.relax import Relaxation
from tilewise.planner.solve.restrict import restrict
from tilewise.planner.solve.solver import ENTRIES, Solution, Solver
from tilewise.planner.solve.weights import Weights

MORE_ENTRIES = 1 << 18
"""How many moves of one tensor to know where all candidates of all variables are bounded."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The best time with each candidate of a variable; a lower bound where it is not `exact`.

    A candidate that no assignment within the cap has is priced infinite.
    """

    seconds: Floats
    exact: np.ndarray


def solve(
    problem: Problem,
    cap: int | None = None,
    *,
    time_limit: float = 60.0,
    hints: Sequence[Sequence[int]] = (),
) -> Solution:
    """Return the fastest assignment that needs at most `cap` bytes, or the best found in time.

    Args:
        problem: what to solve.
        cap: the most memory; None is no limit.
        time_limit: seconds after which to return the best so far with its gap.
        hints: assignments to start from.

    Raises:
        InfeasibleError: no assignment fits, or none was found.
        PlanError: no assignment keeps all ties.
    """
    return _solved(problem, cap, time_limit, hints)[0]


def price(
    problem: Problem, variable: int, cap: int | None = None, *, time_limit: float = 30.0
) -> Prices:
    """Return the best time for each candidate of a variable when all the others re-optimise.

    Bounds come first, for all candidates; then, from the lowest bound up and as long as there is
    time, each candidate's problem is solved.
    """
    deadline = time.monotonic() + time_limit
    problem = know(problem)
    whole, weights = _solved(problem, cap, time_limit / 2, ())
    seconds = _bounds(problem, cap, weights, 4.0 * whole.seconds)[variable]
    exact = np.zeros(len(seconds), bool)
    for k in np.argsort(seconds, kind="stable").tolist():
        left = deadline - time.monotonic()
        if left <= 0:
            break
        fixed = restrict(problem, {variable: np.array([k])})
        hint = list(whole.choice)
        hint[variable] = 0
        try:
            found = solve(fixed, cap, time_limit=left, hints=[hint])
        except InfeasibleError as error:
            if error.least.bound > error.cap:
                seconds[k], exact[k] = np.inf, True
        except PlanError:
            seconds[k], exact[k] = np.inf, True
        else:
            exact[k] = found.optimal
            seconds[k] = found.seconds if found.optimal else max(seconds[k], found.bound)
    return Prices(seconds, exact)


@dataclass(frozen=True, slots=True)
class Range:
    """Between which times the price of each candidate of a variable lies.

    Args:
        low: no assignment with the candidate that fits is faster.
        high: the time if only this variable is changed; infinite where that is not allowed or
            does not fit.
        peak_bytes: the memory if only this variable is changed.
    """

    low: Floats
    high: Floats
    peak_bytes: Ints


def ranges(
    problem: Problem, choice: Sequence[int], cap: int | None = None, *, time_limit: float = 5.0
) -> list[Range]:
    """Return between which times the candidates' prices lie, for all variables at once.

    `price` is exact, but solves a problem for each candidate; this takes one sweep for all.
    """
    problem = know(problem)
    whole, weights = _solved(problem, cap, time_limit, (choice,))
    bounds = _bounds(problem, cap, weights, 4.0 * whole.seconds, entries=MORE_ENTRIES)
    found = []
    for bound, (seconds, peak) in zip(bounds, Descent(problem, cap).alone(choice), strict=True):
        if cap is not None:
            seconds = np.where(peak > cap, np.inf, seconds)
        low = np.minimum(np.maximum(bound, whole.bound), seconds)
        found.append(Range(low, seconds, peak.astype(np.int64)))
    return found


def frontier(problem: Problem, points: int, *, time_limit: float = 60.0) -> list[Solution]:
    """Return fastest assignments for caps from the least memory up, each faster than the last.

    The caps are spaced evenly between the least memory and that of the fastest assignment.
    """
    share = time_limit / (points + 1)
    fastest = solve(problem, time_limit=share)
    least = least_memory(problem, share)
    if least is None:
        return [fastest]
    caps = np.linspace(least.peak_bytes, fastest.peak_bytes, points).astype(np.int64)[:-1]
    found: list[Solution] = []
    hints: list[Sequence[int]] = [least.choice]
    for cap in caps.tolist():
        solution = solve(problem, cap, time_limit=share, hints=hints)
        hints.append(solution.choice)
        if solution.seconds < min((s.seconds for s in found), default=np.inf):
            found.append(solution)
    if fastest.seconds < min((s.seconds for s in found), default=np.inf):
        found.append(fastest)
    return found


def _solved(
    problem: Problem, cap: int | None, time_limit: float, hints: Sequence[Sequence[int]]
) -> tuple[Solution, Weights]:
    """Solve; return also the weights that gave the best bound."""
    solver = Solver(problem, cap, time.monotonic() + time_limit)
    problem = solver.problem
    solver.start(hints)
    least = None
    if cap is not None and solver.best is None:
        least = least_memory(problem, time_limit / 4, enough=cap)
        if least is not None:
            if least.bound > cap:
                raise InfeasibleError(cap, least, holders(problem, least.choice))
            solver.descend(least.choice)
    solver.solve()
    solution = solver.solution()
    if solution is not None:
        return solution, solver.weights
    if cap is None or least is None:
        names = ", ".join(problem.variables[v].name for tie in problem.ties for v in tie.variables)
        raise PlanError(
            f"plan: no choice of candidates found that agrees for tied layers ({names})"
        )
    raise InfeasibleError(cap, least, holders(problem, least.choice))


def _bounds(
    problem: Problem, cap: int | None, weights: Weights, penalty: float, entries: int = ENTRIES
) -> list[Floats]:
    """Bound the time with each candidate of each variable from below."""
    live = Live(problem, entries)
    relaxation = Relaxation(live, weights, penalty)
    for _ in range(4):
        relaxation.sweep()
    _, bounds, _ = relaxation.marginals(range(len(live.links)))
    if cap is None:
        return bounds
    floor = max(int(v.burst.min()) for v in problem.variables)
    return [np.maximum(bound + weights.byte * (floor - cap), 0.0) for bound in bounds]
