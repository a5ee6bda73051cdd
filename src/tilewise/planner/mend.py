"""Make a plan fit whose peak is a little above a limit, one layer after another."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from tilewise.planner.moment import Sums
from tilewise.planner.solve import Descent, evaluate
from tilewise.planner.timeline import Moment, moments

STEPS = 48
"""How many layers to change at most."""

Choice = tuple[int, ...]


class Mending:
    """Greedy changes of single layers; it knows the moments that were too full on the way."""

    def __init__(self, sums: Sums, limit: int, deadline: float) -> None:
        self.sums, self.limit, self.deadline = sums, limit, deadline
        self._full: dict[Moment, Descent] = {}

    def __call__(self, choice: Choice) -> Choice | None:
        """Return a plan near another one whose peak keeps the limit, if one is found.

        Each step changes the layer that takes the least time for a byte less above the limit, all
        moments that were too full on the way taken together.
        """
        tried = {choice}
        for _ in range(STEPS):
            held = moments(self.sums.found, choice)
            if held.peak_bytes <= self.limit:
                return choice
            if held.fullest not in self._full:
                problem = self.sums.problem({held.fullest: 1.0}, self.limit)
                self._full[held.fullest] = Descent(problem, None)
            there = {moment: held.bytes_at(moment) for moment in self._full}
            change = self._cheapest(choice, there)
            if change is None or time.monotonic() > self.deadline:
                return None
            choice = (*choice[: change[0]], change[1], *choice[change[0] + 1 :])
            if choice in tried:
                return None
            tried.add(choice)
        return None

    def _cheapest(self, choice: Choice, there: Mapping[Moment, float]) -> tuple[int, int] | None:
        """Return the variable and its new candidate, or None where nothing helps."""
        over = sum(max(now - self.limit, 0.0) for now in there.values())
        seconds = evaluate(self.sums.found.problem, choice).seconds
        gains = [np.full(len(v), over) for v in self.sums.found.problem.variables]
        slower = [np.zeros(0)] * len(gains)
        for moment in there:
            for v, (alone, held) in enumerate(self._full[moment].alone(choice)):
                gains[v] -= np.maximum(held - self.limit, 0.0)
                slower[v] = alone - seconds
        best, least = None, np.inf
        for v, (gain, slow) in enumerate(zip(gains, slower, strict=True)):
            with np.errstate(divide="ignore", invalid="ignore"):
                # where nothing is lost in time, more bytes are better
                rate = np.where(gain > 0, np.maximum(slow, 1e-9 * seconds) / gain, np.inf)
            k = int(rate.argmin())
            if rate[k] < least:
                best, least = (v, k), float(rate[k])
        return best
