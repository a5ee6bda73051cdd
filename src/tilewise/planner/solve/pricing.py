"""The price of each candidate: the best time with it when all other variables re-optimise.

For a single variable all candidates are priced at once, as far as time allows (see together.py).
Otherwise bounds of all candidates come first, the highest that some sweeps and trees give. Then the
cheapest candidates are settled one by one: the problem is solved with the candidate fixed. Only
what may be part of an assignment faster than some `reach` enters it, by the bounds that are known;
the reach grows until it holds the price. Every assignment on the way also bounds the price of all
that it consists of, so that one solution often settles the candidates of many variables.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewise.planner.solve.answer import solve
from tilewise.planner.solve.descend import Descent
from tilewise.planner.solve.known import know
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.memory import least_memory
from tilewise.planner.solve.problem import Floats, Ints, Problem
from tilewise.planner.solve.relax import Relaxation
from tilewise.planner.solve.restrict import restrict
from tilewise.planner.solve.search import TOLERANCE
from tilewise.planner.solve.solution import Solution
from tilewise.planner.solve.solver import Solver
from tilewise.planner.solve.together import Together, costs_of

ENTRIES = 1 << 18
"""How many moves of one tensor to know where all candidates of all variables are bounded."""
ROUNDS, FEWEST = 24, 2
"""How often to bound all candidates, and how often if there is no time."""
MOST = 0.8
"""Which part of the time to spend on all candidates of a variable at once."""
SLACK, WIDEN, FARTHEST = 0.02, 4.0, 8.0
"""How far above its bound a price is looked for first, how that grows, and where it ends."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What is known of the candidates of one variable.

    Args:
        seconds: the best time with each; a lower bound where it is not `exact`; infinite where no
            assignment with it fits.
        found: the best time that was found, the same where `exact`.
        exact: whether that is proven.
        alone: the time if only this variable is changed; infinite where that is not allowed or
            does not fit.
        alone_bytes: the memory if only this variable is changed.
        plans: assignments that take `found`, where more than this variable is changed.
        peaks: the memory of an assignment that takes `found`, where that was looked at, else 0.
    """

    seconds: Floats
    found: Floats
    exact: np.ndarray
    alone: Floats
    alone_bytes: Ints
    plans: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    peaks: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


def price(
    problem: Problem,
    variable: int,
    cap: int | None = None,
    *,
    solution: Solution | None = None,
    time_limit: float = 30.0,
) -> Prices:
    """Price all candidates of one variable; `solution` is the problem's, if there is one."""
    deadline = time.monotonic() + time_limit
    problem = know(problem)
    if solution is None:
        solution = solve(problem, cap, time_limit=time_limit / 2)
    pricing = Pricing(problem, cap, solution)
    pricing.together(variable, deadline)
    if not pricing.settled(variable):
        pricing.bound(deadline)
        pricing.settle([variable], len(problem.variables[variable]), deadline)
    return pricing.prices(variable)


def prices(
    problem: Problem,
    solution: Solution,
    cap: int | None = None,
    *,
    most: int,
    time_limit: float = 30.0,
) -> list[Prices]:
    """Price the candidates of all variables; the `most` cheapest of each exactly, time allowing."""
    deadline = time.monotonic() + time_limit
    pricing = Pricing(problem, cap, solution)
    pricing.bound(deadline)
    everyone = range(len(problem.variables))
    pricing.settle(everyone, most, deadline)
    return [pricing.prices(v) for v in everyone]


class Pricing:
    """Between which times the price of each candidate lies: a bound, and the best time known."""

    def __init__(self, problem: Problem, cap: int | None, solution: Solution) -> None:
        self.problem, self.cap, self.solution = know(problem), cap, solution
        limit = np.inf if cap is None else cap
        self._alone, self._peaks, self._best, self._low = [], [], [], []
        self._plans: list[dict[int, tuple[int, ...]]] = [{} for _ in problem.variables]
        alone = Descent(self.problem, cap).alone(solution.choice)
        for seconds, peak in alone:
            known = np.where(peak > limit, np.inf, seconds)
            self._alone.append(known)
            self._peaks.append(peak.astype(np.int64))
            self._best.append(known.copy())
            self._low.append(np.minimum(solution.bound, known))

    def prices(self, v: int) -> Prices:
        """Return what is known of a variable's candidates by now."""
        exact = self._exact(v)
        seconds = np.where(exact, self._best[v], self._low[v])
        alone, peaks, plans = self._alone[v], self._peaks[v], self._plans[v]
        return Prices(seconds, self._best[v], exact, alone, peaks, plans)

    def settled(self, v: int) -> bool:
        """Whether the prices of all candidates of a variable are exact."""
        return bool(self._exact(v).all())

    def together(self, v: int, deadline: float) -> None:
        """Bound the price of all candidates, and find those of one variable, in most of the time.

        With bounds that are exact but for the weights, one elimination often settles all of them.
        """
        now = time.monotonic()
        weights, seconds = self.solution.weights, self.solution.seconds

        def raised(u: int, candidates: Ints, bounds: Floats) -> None:
            low, best = self._low[u], self._best[u]
            low[candidates] = np.minimum(np.maximum(low[candidates], bounds), best[candidates])

        needed = float(self._best[v].max())
        several = Together(self.problem, weights, self._constant, seconds, raised)
        choices = several.run(v, self._low, needed, now + MOST * (deadline - now))
        if choices is None:
            return
        times, peaks = costs_of(self.problem, choices)
        for choice, time_, peak in zip(choices.tolist(), times.tolist(), peaks, strict=True):
            if np.isfinite(time_) and (self.cap is None or peak <= self.cap):
                self._learn(choice, time_)

    @property
    def _constant(self) -> float:
        """What weighted sums leave out: bytes below the cap."""
        if self.cap is None:
            return 0.0
        floor = max(int(v.burst.min()) for v in self.problem.variables)
        return sum(self.solution.weights.byte) * (floor - self.cap)

    def bound(self, deadline: float) -> None:
        """Bound the price of all candidates from below, in a quarter of the time."""
        live = Live(self.problem, ENTRIES)
        relaxation = Relaxation(live, self.solution.weights, 4.0 * self.solution.seconds)
        shared = [link.share.min() < 1 for link in live.links]
        order = np.argsort(shared, kind="stable")
        random = np.random.default_rng(0)
        constant = self._constant
        now = time.monotonic()
        enough = now + (deadline - now) / 4
        for number in range(ROUNDS):
            for _ in range(2):
                relaxation.sweep()
            last = number >= FEWEST and time.monotonic() > enough
            last |= number == ROUNDS - 1
            tree = order if last or number % 2 else random.permutation(len(order))
            _, bounds, _ = relaxation.marginals(tree.tolist())
            for low, best, bound in zip(self._low, self._best, bounds, strict=True):
                np.minimum(np.maximum(low, bound + constant), best, out=low)
            if last:
                break
            live.lean(relaxation.decode(), 1.5 / (4.0 + number))
            relaxation.reweigh(relaxation.weights)

    def settle(self, variables: Iterable[int], most: int, deadline: float) -> None:
        """Make the `most` cheapest candidates exact: one of each variable, then another of each."""
        left = list(variables)
        tried: set[tuple[int, int]] = set()
        while left:
            unsettled = []
            for v in left:
                k = self._next(v, most, tried)
                if k is None:
                    continue
                now = time.monotonic()
                if now >= deadline:
                    return
                tried.add((v, k))
                self._settle(v, k, now + (deadline - now) / 8)
                unsettled.append(v)
            left = unsettled

    def _next(self, v: int, most: int, tried: set[tuple[int, int]]) -> int | None:
        cheapest = np.argsort(self._low[v], kind="stable")[:most]
        rest = cheapest[~self._exact(v)[cheapest]].tolist()
        return next((k for k in rest if (v, k) not in tried), None)

    def _exact(self, v: int) -> np.ndarray:
        low, best = self._low[v], self._best[v]
        return np.asarray((low >= best * (1.0 - 2 * TOLERANCE)) | np.isposinf(low))

    def _settle(self, v: int, k: int, deadline: float) -> None:
        low, best = self._low[v], self._best[v]
        slack = SLACK * low[k]
        while not self._exact(v)[k]:
            reach = low[k] + slack
            if best[k] <= reach * (1.0 + SLACK):
                reach = best[k]
            elif reach > FARTHEST * self.solution.seconds:
                reach = np.inf
            solver = self._solve(v, k, reach, deadline)
            low[k] = min(max(low[k], np.inf if solver is None else solver.bound), best[k])
            if solver is not None and not solver.closed:
                return
            slack *= WIDEN

    def _solve(self, v: int, k: int, reach: float, deadline: float) -> Solver | None:
        """Look for the best assignment below `reach` with a candidate; None if none can fit."""
        kept = []
        for low, chosen in zip(self._low, self.solution.choice, strict=True):
            mask = low <= reach
            mask[chosen] = True
            kept.append(np.flatnonzero(mask))
        kept[v] = np.array([k])
        fixed = restrict(self.problem, dict(enumerate(kept)))
        hints: list[Sequence[int]] = []
        if np.isinf(self._best[v][k]):
            hint = [int(np.searchsorted(*pair)) for pair in zip(kept, self.solution.choice)]
            hint[v] = 0
            hints = [hint]
        if self.cap is not None and np.isinf(reach):
            least = least_memory(fixed, (deadline - time.monotonic()) / 4)
            if least is not None and least.bound > self.cap:
                return None
            hints += [] if least is None else [least.choice]
        solver = Solver(fixed, self.cap, deadline, reach)
        if hints:
            solver.start(hints)
        solver.solve()
        if solver.best is not None:
            self._learn(
                [int(some[place]) for some, place in zip(kept, solver.best)], solver.seconds
            )
        return solver

    def _learn(self, choice: Sequence[int], seconds: float) -> None:
        plan = tuple(choice)
        for best, low, plans, k in zip(self._best, self._low, self._plans, plan, strict=True):
            if seconds < best[k]:
                best[k], plans[k] = seconds, plan
            low[k] = min(low[k], best[k])
