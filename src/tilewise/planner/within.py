"""The fastest plan whose peak keeps a limit of memory, and the least peak of any plan.

The peak is the largest of many sums, one for each moment of a step (see moment.py). The solver
limits some of them: what it proves of the plans that keep these holds for all whose peak keeps the
limit. It begins with the moments that are the fullest in the fastest plan of all and in plans near
it. Where a plan with the least weighted sum of time and bytes, or one that it takes for the best,
is above the limit at another moment, that one is limited too, and so on; what is proven and which
candidates are left stay. Only plans whose peak fits count as found. The best of them is returned;
it is proven best where it is as fast as the bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

import numpy as np

from tilewise.planner.formulation import Formulation
from tilewise.planner.moment import Sums
from tilewise.planner.solve import (
    Cost,
    Descent,
    InfeasibleError,
    LeastMemory,
    Prices,
    Problem,
    Solution,
    evaluate,
    least_memory,
)
from tilewise.planner.solve.memory import NONE
from tilewise.planner.solve.planes import highest
from tilewise.planner.solve.problem import Ints
from tilewise.planner.solve.restrict import mean, picked, restrict
from tilewise.planner.solve.search import TOLERANCE
from tilewise.planner.solve.solver import Solver
from tilewise.planner.solve.weights import Weights
from tilewise.planner.timeline import Moment, Moments, moments, peak_bytes

ROUNDS = 12
"""How many means to minimise for the least peak at most."""
NEAR, NEAR_PART = 12, 0.25
"""How many descents from the fastest plan to try at most, and in which part of the time."""
AT_ONCE = 3
"""How many moments at which a plan is above the limit to limit at once."""
LATELY = 12
"""The candidates of how many plans seen to look at where only few are."""
NEARER = 4
"""Which part of the way from the least peak found to its bound a descent tries to go."""
SAYING = 1.0
"""How many seconds there are at least to find out what the smallest plan needs, if none fits."""

Choice = tuple[int, ...]


@dataclass(frozen=True)
class Limited:
    """The plan that was found within a limit, and the problem that gave its bound.

    The problem's cap is of the sums of some moments; without it nothing is limited there, as the
    fastest plan of all fits.
    """

    sums: Sums
    limit: int
    solution: Solution
    problem: Problem
    cap: int | None = None
    moments: tuple[Moment, ...] = ()

    def judged(self, variable: int, prices: Prices, which: Iterable[int]) -> Prices:
        """Return prices of plans whose peak fits, where prices are of plans that keep some sums.

        Those are lower bounds. They stay exact where a plan that takes as long is known to fit, and
        where no plan keeps even these sums. What the step would be if nothing else changed is found
        for the candidates in `which`.
        """
        solution, chosen = self.solution, self.solution.choice[variable]
        none = self.sums.least[variable] >= self.limit + 1.01  # peaks are whole bytes
        # nothing is faster than what is proven of all plans
        seconds = np.where(none, inf, np.maximum(prices.seconds, self.solution.bound))
        alone, held = np.full(len(seconds), inf), prices.alone_bytes.copy()
        found, peaks = alone.copy(), np.zeros(len(seconds), np.int64)
        for index in which:
            choice = (*solution.choice[:variable], index, *solution.choice[variable + 1 :])
            held[index] = peak_bytes(self.sums.found, choice)
            if held[index] <= self.limit:
                alone[index] = found[index] = prices.alone[index]
                peaks[index] = held[index]
            if prices.found[index] < found[index] and index in prices.plans:
                plan = prices.plans[index]
                peak = peak_bytes(self.sums.found, plan)
                if peak <= self.limit:
                    found[index], peaks[index] = prices.found[index], peak
        exact = np.isinf(seconds) | (found * (1.0 - 2.0 * TOLERANCE) <= seconds)
        if solution.optimal:
            seconds[chosen], exact[chosen] = solution.seconds, True
        seconds = np.where(exact & np.isfinite(found), found, seconds)
        found = np.where(exact, seconds, found)
        return Prices(seconds, found, exact, alone, held, peaks=peaks)


class Within:
    """The search for plans whose peak keeps a limit; `free` is the solution without one."""

    def __init__(self, found: Formulation, limit: int, free: Solution, deadline: float) -> None:
        self.found, self.limit, self.free, self.deadline = found, limit, free, deadline
        self.sums = Sums(found)
        self.best: tuple[float, Choice] | None = None
        self.bound = free.bound
        self._seen: dict[Choice, tuple[Cost, Moments]] = {}
        self._some: list[Moment] = []
        self._fuller: dict[Moment, None] = {}
        self._few: list[Ints] = []
        self._limited = Limited(self.sums, limit, free, found.problem)

    def run(self, hints: Sequence[Choice]) -> Limited:
        """Return the best plan found, with what is proven of it.

        Raises:
            InfeasibleError: no plan fits, or none was found.
        """
        began = time.monotonic()
        for choice in hints:
            self._judge(choice)
        self._fuller.clear()
        self._descend()
        self._raise_bound()
        if self.best is None:
            least = self._least_peak(max(self._left, SAYING), hints)
            if self.best is None:
                needed = self.limit + 1 if self.bound == inf else 0
                raise self._infeasible(replace(least, bound=max(least.bound, needed)))
        seconds, choice = self.best
        bound = min(self.bound, seconds)
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
        return self.best is not None and self.best[0] * (1.0 - 2.0 * TOLERANCE) <= self.bound

    @property
    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _judge(self, choice: Choice) -> bool | None:
        """Say whether a plan fits, and take it if it is the best so far.

        None is for plans that are the fullest at a moment that is not limited yet.
        """
        if choice not in self._seen:
            cost = evaluate(self.sums.base, choice)
            self._seen[choice] = cost, moments(self.found, choice)
        cost, held = self._seen[choice]
        if held.peak_bytes <= self.limit:
            if self.best is None or cost.seconds < self.best[0]:
                self.best = cost.seconds, choice
            return True
        if held.fullest in self._some:
            return False
        others = (moment for moment in held.above(self.limit) if moment not in self._some)
        self._fuller |= dict.fromkeys((held.fullest, *islice(others, AT_ONCE)))
        return None

    def _descend(self) -> None:
        """Look for plans that fit near the fastest one of all.

        Where a descent from it keeps the limit at some moments, another one may be above; that is
        limited too, and the next begins anew. Little has to change where it does not fit by little.
        """
        deadline = time.monotonic() + NEAR_PART * self._left
        choice, full = self.free.choice, dict[Moment, None]()
        for _ in range(NEAR):
            if self._judge(choice) or time.monotonic() > deadline:
                break
            fullest = self._seen[choice][1].fullest
            if fullest in full:
                break
            full |= dict.fromkeys((fullest, *self._seen[choice][1].above(self.limit)[:AT_ONCE]))
            descent = Descent(self.sums.problem(list(full), self.limit), self.limit)
            choice = tuple(descent(self.free.choice, deadline=deadline))

    def _raise_bound(self) -> None:
        """Limit ever more moments until bound and best plan meet or time is up."""
        weights = self.free.weights
        solver: Solver | None = None
        some: list[Moment] = []
        # the first ones in any case: what is said of a limit must know of them
        while (
            len(self._all_limited()) > len(some)
            and self.bound < inf
            and not (some and self._closed)
        ):
            some = self._all_limited()
            weights = weights.of_sums(len(some))
            problem = self.sums.problem(some, self.limit)
            self._take(problem, some, weights)
            if self._left <= 0 or self._closed:
                break
            before, seconds = solver, inf if self.best is None else self.best[0]
            solver = Solver(
                problem,
                self.limit,
                self.deadline,
                seconds,
                judge=self._judge,
                before=before,
                among=self._among,
            )
            proposed = None if before is None else before.proposed
            solver.resume(weights, self.bound, self._costs(), proposed)
            if before is None:
                solver.descend(self.free.choice)
            solver.solve()
            self.bound = max(self.bound, solver.bound)
            weights = solver.weights
            self._take(problem, some, weights)

    def _all_limited(self) -> list[Moment]:
        """Limit the moments at which plans were met above the limit too; return all of them."""
        self._some += self._fuller
        self._fuller.clear()
        return list(self._some)

    def _among(
        self, outer: Solver, few: list[Ints], seconds: float
    ) -> tuple[Weights, Choice | None]:
        """Search among few candidates of each variable, and limit the moments that matter there.

        That takes little time, and tells most of those that matter among all, and good weights.
        Candidates of plans seen lately, and those that were left the last time, are looked at too.
        """
        deadline = time.monotonic() + seconds
        seen = np.array(list(self._seen)[-LATELY:])
        few = [np.union1d(some, seen[:, v]) for v, some in enumerate(few)]
        few = [np.union1d(*both) for both in zip(few, self._few or few, strict=True)]
        before, solver = self.best, outer
        while True:
            some = self._all_limited()
            problem = restrict(self.sums.problem(some, self.limit), dict(enumerate(few)))
            best = inf if self.best is None else self.best[0]
            inner = Solver(
                problem,
                self.limit,
                deadline,
                best,
                judge=lambda places: self._judge(picked(few, places)),
                widest=0,
            )
            inner.follow(solver, self._costs())
            inner.solve()
            solver = inner
            if not self._fuller or time.monotonic() > deadline:
                break
        left = zip(few, solver.candidates, strict=True)
        self._few = [candidates[places] for candidates, places in left]
        better = None if self.best == before or self.best is None else self.best[1]
        return solver.weights.of_sums(len(self._all_limited())), better

    def _take(self, problem: Problem, some: Sequence[Moment], weights: Weights) -> None:
        solution = replace(self.free, weights=weights)
        self._limited = Limited(self.sums, self.limit, solution, problem, self.limit, tuple(some))

    def _costs(self) -> Iterator[Cost]:
        """Yield what the plans seen cost, with the bytes of the moments that are limited."""
        for cost, held in self._seen.values():
            yield replace(cost, sums=tuple(int(held.bytes_at(moment)) for moment in self._some))

    def _least_peak(self, seconds: float, known: Sequence[Choice]) -> LeastMemory:
        """Return the plan with the least peak, and take it if it fits."""
        deadline = time.monotonic() + seconds
        start = [self.free.choice, *known]
        least = least_peak(self.found, deadline, start, enough=self.limit)
        if self.limit >= least.bound:
            least = self._lower(least, deadline)
        self._judge(least.choice)
        return least

    def _lower(self, least: LeastMemory, deadline: float) -> LeastMemory:
        """Look for a plan that fits by changing one layer at a time, judged by the peak itself.

        The sums leave out the copy of a bucket of small gradients, which may be what is too much.
        """
        changed = True
        while changed and least.peak_bytes > self.limit:
            changed = False
            for v, variable in enumerate(self.found.problem.variables):
                for k in range(len(variable)):
                    if time.monotonic() > deadline:
                        return least
                    choice = (*least.choice[:v], k, *least.choice[v + 1 :])
                    with suppress(ValueError):  # layers that share a parameter are cut alike
                        evaluate(self.found.problem, choice)
                        peak = peak_bytes(self.found, choice)
                        if peak < least.peak_bytes:
                            least = replace(least, choice=choice, peak_bytes=peak)
                            changed = True
        return least

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
    Weights lie between those of the highest bound so far and those that the plans suggest. From
    each plan a descent looks for one that is less full at all these moments. A peak as small as is
    `enough` ends it.
    """
    sums = Sums(found)
    seen: list[Moments] = []
    best = LeastMemory((), NONE, 0)
    centre: dict[Moment, float] = {}

    def take(choice: Choice) -> None:
        nonlocal best
        seen.append(moments(found, choice))
        if seen[-1].peak_bytes < best.peak_bytes:
            best = replace(best, choice=choice, peak_bytes=seen[-1].peak_bytes)

    for choice in start:
        take(choice)
    for _ in range(ROUNDS):
        left = deadline - time.monotonic()
        if best.peak_bytes <= max(best.bound, enough) or left <= 0:
            break
        weights = weigh(seen)
        if centre:
            every = dict.fromkeys((*centre, *weights))
            weights = {m: centre.get(m, 0.0) + weights.get(m, 0.0) for m in every}
        # only candidates of plans that are better than the best one do not burst
        problem = sums.problem(list(weights), best.peak_bytes - 1)
        least = least_memory(mean(problem, list(weights.values())), left / 3)
        assert least is not None, "a formulation's ties always leave a choice"
        if least.bound > best.bound or not centre:
            total = sum(weights.values())
            centre = {moment: weight / total for moment, weight in weights.items()}
        best = replace(best, bound=max(best.bound, min(least.bound, best.peak_bytes)))
        take(least.choice)
        near = [best.choice, least.choice]
        while near and time.monotonic() < deadline:
            before, target = best.peak_bytes, best.peak_bytes
            target -= (best.peak_bytes - best.bound) // NEARER
            full = dict.fromkeys(held.fullest for held in seen)
            descent = Descent(sums.problem(list(full), target), target)
            take(tuple(descent(near.pop(), deadline=deadline)))
            if best.peak_bytes < before:
                near.append(best.choice)
    return best


def weigh(seen: Sequence[Moments]) -> dict[Moment, float]:
    """Return weights of moments whose mean is as large as can be for the plan where it is least.

    Only moments that are the fullest of a plan seen have weights.
    """
    places = np.unique([int(held.every.argmax()) for held in seen])
    held = np.array([one.every[places] for one in seen])
    # weights that add up to more than one cost more than they bring
    most = float(held.max())
    constants = np.repeat((0.0, most), len(held))
    found, *_ = highest(constants, np.concatenate((held, held - most)), np.ones(len(places)))
    return {
        seen[0].at(int(place)): float(weight)
        for place, weight in zip(places, found, strict=True)
        if weight > 0
    }
