"""The fastest plan whose peak keeps a limit of memory, and the least peak of any plan.

The solver limits one sum over layers and moves, but the peak is the largest of many: one for each
moment of a step. So a weighted mean of some moments is limited (see moment.py). It is never above
the peak, so what is proven of the plans that keep it holds for all whose peak does. It begins with
the moment that is the fullest in the fastest plan of all. Where the best plan under that limit
does not fit, because other moments have become fuller, weights are taken under which the plans so
far are as far above the limit as can be.

In the meantime such plans are made to fit by changing single layers (see mend.py). The best plan
that fits is returned; it is proven best where it is as fast as the bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from tilewise.planner.formulate import Formulation
from tilewise.planner.mend import Mending
from tilewise.planner.moment import Sums
from tilewise.planner.solve import (
    InfeasibleError,
    LeastMemory,
    Prices,
    Problem,
    Solution,
    evaluate,
    least_memory,
    solve,
)
from tilewise.planner.solve.search import TOLERANCE
from tilewise.planner.timeline import Moment, Moments, moments, peak_bytes

ROUNDS = 12
"""How many means to minimise for the least peak at most."""
IDLE = 4
"""How many means to limit in vain before the bound is left as it is."""
SAYING = 1.0
"""How many seconds there are at least to find out what the smallest plan needs, if none fits."""

TURNS = 2000
"""How many turns to play for the weights of moments."""
LIGHT = 0.003
"""Which weights are dropped."""

Choice = tuple[int, ...]


@dataclass(frozen=True)
class Limited:
    """The plan that was found, and the limited problem that gave its bound.

    Its cap is of the mean of moments with some weights; without them nothing is limited.
    """

    solution: Solution
    problem: Problem
    cap: int | None = None
    weights: Mapping[Moment, float] | None = None

    def judged(
        self, found: Formulation, variable: int, prices: Prices, which: Iterable[int]
    ) -> Prices:
        """Return prices of plans whose peak fits, where prices are of plans that keep the mean.

        Those are lower bounds, and exact only where no plan keeps even the mean. What the step
        would be if nothing else changed is found for the candidates in `which`.
        """
        if self.cap is None:
            return prices
        solution, chosen = self.solution, self.solution.choice[variable]
        seconds, exact = prices.seconds.copy(), np.isinf(prices.seconds)
        alone, held = np.full(len(seconds), inf), prices.alone_bytes.copy()
        for index in which:
            if np.isfinite(prices.alone[index]):
                choice = (*solution.choice[:variable], index, *solution.choice[variable + 1 :])
                held[index] = peak_bytes(found, choice)
                if held[index] <= self.cap:
                    alone[index] = prices.alone[index]
        seconds[chosen] = solution.seconds if solution.optimal else solution.bound
        exact[chosen] = solution.optimal
        return Prices(seconds, np.where(exact, seconds, alone), exact, alone, held)


class Within:
    """The search for plans whose peak keeps a limit; `free` is the solution without one."""

    def __init__(self, found: Formulation, limit: int, free: Solution, deadline: float) -> None:
        self.found, self.limit, self.free, self.deadline = found, limit, free, deadline
        self.sums = Sums(found)
        self._mending = Mending(self.sums, limit)
        self.best: tuple[float, Choice] | None = None
        self._least: LeastMemory | None = None
        self._limited = Limited(free, found.problem)

    def run(self, hints: Sequence[Choice]) -> Limited:
        """Return the best plan found, with what is proven of it.

        Raises:
            InfeasibleError: no plan fits, or none was found.
        """
        began = time.monotonic()
        for choice in hints:
            self._offer(choice)
        needed = 0
        try:
            self._raise_bound()
        except InfeasibleError as error:
            needed = min(error.least.bound, self.limit + 1)
        if self.best is None:
            least = self._least_peak(max(self._left, SAYING), hints)
            if self.best is None:
                raise self._infeasible(replace(least, bound=max(least.bound, needed)))
        seconds, choice = self.best
        bound = min(self._limited.solution.bound, seconds)
        optimal = self._closed
        solution = replace(
            self._limited.solution,
            choice=choice,
            seconds=seconds,
            peak_bytes=peak_bytes(self.found, choice),
            bound=bound,
            optimal=optimal,
            gap=0.0 if optimal else seconds / bound - 1.0 if bound else inf,
            solve_seconds=self.free.solve_seconds + time.monotonic() - began,
        )
        return replace(self._limited, solution=solution)

    @property
    def _closed(self) -> bool:
        """Whether no plan that fits is faster than the best one."""
        bound = self._limited.solution.bound
        return self.best is not None and self.best[0] * (1.0 - 2.0 * TOLERANCE) <= bound

    @property
    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _offer(self, choice: Choice) -> Moments:
        """Take a plan if it fits and is the best so far; return its moments."""
        held = moments(self.found, choice)
        seconds = evaluate(self.found.problem, choice).seconds
        if held.peak_bytes <= self.limit and (self.best is None or seconds < self.best[0]):
            self.best = seconds, choice
        return held

    def _raise_bound(self) -> None:
        """Limit means of ever more moments until bound and best plan meet or time is up."""
        seen = [moments(self.found, self.free.choice)]
        idle = 0
        while idle < IDLE:
            before = self._limited.solution.bound, self.best
            weights = weigh(seen, self.limit)
            problem = self.sums.problem(weights, self.limit)
            if self._limited.cap is None:  # what is proven without a limit holds with one
                self._limited = Limited(self.free, problem, self.limit, weights)
            solution = solve(problem, self.limit, time_limit=self._left / 2, hints=self._hints())
            held = self._offer(solution.choice)
            if held.peak_bytes <= self.limit and not solution.optimal and self._left > 0:
                solution = solve(problem, self.limit, time_limit=self._left, hints=self._hints())
                held = self._offer(solution.choice)
            if solution.bound > self._limited.solution.bound:
                self._limited = Limited(solution, problem, self.limit, weights)
            if held.peak_bytes > self.limit and not self._closed:
                self._fit(solution.choice)
            if held.peak_bytes <= self.limit or self._closed or self._left <= 0:
                return
            seen.append(held)
            idle = idle + 1 if before == (self._limited.solution.bound, self.best) else 0

    def _fit(self, choice: Choice) -> None:
        """Look for a plan that fits near one that does not; where there is none, for any."""
        self._mend(choice)
        if self.best is None and self._least is None and self._left > 0:
            self._least = self._least_peak(self._left / 3)

    def _mend(self, choice: Choice) -> None:
        # half of what is left is for the bound
        deadline = time.monotonic() + max(self._left, 0.0) / 2
        mended = self._mending(choice, deadline)
        if mended is not None:
            self._offer(mended)
            self._offer(self._mending.improve(mended, deadline))

    def _least_peak(self, seconds: float, known: Sequence[Choice] = ()) -> LeastMemory:
        """Return the plan with the least peak, and take it, mended, if it fits."""
        deadline = time.monotonic() + seconds
        start = [self.free.choice, self._limited.solution.choice, *known]
        if self._least is not None:
            start.append(self._least.choice)
        least = least_peak(self.found, deadline, start, enough=self.limit)
        self._offer(least.choice)
        self._mend(least.choice)
        return least

    def _hints(self) -> list[Choice]:
        return [self.free.choice] if self.best is None else [self.best[1], self.free.choice]

    def _infeasible(self, least: LeastMemory) -> InfeasibleError:
        """Return the error that says what the smallest plan needs, and who holds it."""
        fullest = moments(self.found, least.choice).fullest
        return InfeasibleError(
            self.limit,
            least,
            self.sums.holders(least.choice, fullest),
            recompute=any(self.found.choices.stretches),
        )


def least_peak(
    found: Formulation, deadline: float, start: Sequence[Choice], *, enough: int = 0
) -> LeastMemory:
    """Return the plan with the least peak that was found, and a bound of any plan's peak.

    Minimises means of moments, weighted against the plans on the way; `start` are the first ones.
    A peak as small as is `enough` ends it.
    """
    sums = Sums(found)
    seen = [moments(found, choice) for choice in start]
    best = min(
        (LeastMemory(choice, held.peak_bytes, 0) for choice, held in zip(start, seen, strict=True)),
        key=lambda one: one.peak_bytes,
    )
    for _ in range(ROUNDS):
        left = deadline - time.monotonic()
        if best.peak_bytes <= max(best.bound, enough) or left <= 0:
            break
        # only candidates of plans that are better than this one do not burst
        smaller = best.peak_bytes - 1
        least = least_memory(sums.problem(weigh(seen, smaller), smaller), left / 3)
        assert least is not None, "a formulation's ties always leave a choice"
        seen.append(moments(found, least.choice))
        best = replace(best, bound=max(best.bound, min(least.bound, best.peak_bytes)))
        if seen[-1].peak_bytes < best.peak_bytes:
            best = replace(best, choice=least.choice, peak_bytes=seen[-1].peak_bytes)
    return best


def weigh(seen: Sequence[Moments], limit: int) -> dict[Moment, float]:
    """Return weights of moments whose mean is as far above a limit as can be for all plans seen.

    Only moments that are the fullest of one of them have weights; where the last two plans are the
    same, no mean tells them apart, and the last one's fullest moment has it all. It is a game: the
    weights against the plan that is the least above. Each turn raises the weights of moments that
    are full in the plan that is the least above the mean now; their average over all turns is close
    to the best.
    """
    if len(seen) > 1 and (seen[-1].every == seen[-2].every).all():
        return {seen[-1].fullest: 1.0}
    places = np.unique([int(held.every.argmax()) for held in seen])
    over = np.array([held.every[places] for held in seen]) - limit
    over /= max(float(np.abs(over).max()), 1.0)
    scores, total = np.zeros(len(places)), np.zeros(len(places))
    rate = (8.0 * np.log(len(places)) / TURNS) ** 0.5
    for _ in range(TURNS if len(places) > 1 else 1):
        now = np.exp(rate * (scores - scores.max()))
        now /= now.sum()
        total += now
        scores += over[int((over @ now).argmin())]
    return {
        seen[0].at(int(place)): float(weight)
        for place, weight in zip(places, total / total.sum(), strict=True)
        if weight >= LIGHT
    }
