"""Make a plan fit whose peak is a little above a limit, or one faster that fits, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from tilewise.planner.moment import Sums
from tilewise.planner.solve import Descent, evaluate
from tilewise.planner.timeline import Moment, moments

STEPS = 48
"""How many layers to change at most until a plan fits."""
PASSES = 6
"""How often to look at all layers for changes that make a plan faster."""

Choice = tuple[int, ...]


class Mending:
    """Greedy changes of single layers; it knows the moments that were too full on the way."""

    def __init__(self, sums: Sums, limit: int) -> None:
        self.sums, self.limit = sums, limit
        self._full: dict[Moment, Descent] = {}

    def __call__(self, choice: Choice, deadline: float) -> Choice | None:
        """Return a plan near another one whose peak keeps the limit, if one is found.

        Each step changes the layer that takes the least time for a byte less above the limit, all
        moments that were too full on the way taken together.
        """
        tried = {choice}
        for _ in range(STEPS):
            held = moments(self.sums.found, choice)
            if held.peak_bytes <= self.limit:
                return choice
            self._note(held.fullest)
            there = {moment: held.bytes_at(moment) for moment in self._full}
            change = self._cheapest(choice, there, deadline)
            if change is None:
                return None
            choice = (*choice[: change[0]], change[1], *choice[change[0] + 1 :])
            if choice in tried:
                return None
            tried.add(choice)
        return None

    def improve(self, choice: Choice, deadline: float) -> Choice:
        """Return a plan that fits and is no slower, by changing single layers of one that fits."""
        found = self.sums.found
        self._note(moments(found, choice).fullest)
        seconds = evaluate(found.problem, choice).seconds
        for _ in range(PASSES):
            before, known = choice, len(self._full)
            for v, k in self._faster(choice, seconds, deadline):
                if time.monotonic() > deadline:
                    return choice
                trial = (*choice[:v], k, *choice[v + 1 :])
                with suppress(ValueError):  # layers that share a parameter would be cut differently
                    now = evaluate(found.problem, trial).seconds
                    if now >= seconds:
                        continue
                    held = moments(found, trial)
                    if held.peak_bytes <= self.limit:
                        choice, seconds = trial, now
                    else:
                        self._note(held.fullest)
            if choice == before and len(self._full) == known:
                break
        return choice

    def _note(self, moment: Moment) -> None:
        if moment not in self._full:
            problem = self.sums.problem({moment: 1.0}, self.limit)
            self._full[moment] = Descent(problem, None)

    def _faster(self, choice: Choice, seconds: float, deadline: float) -> list[tuple[int, int]]:
        """Return the best change of each variable that fits at the known moments, fastest first.

        None after the deadline.
        """
        problem = self.sums.found.problem
        fits = [np.ones(len(v), bool) for v in problem.variables]
        times = [np.zeros(0)] * len(fits)
        for descent in self._full.values():
            if time.monotonic() > deadline:
                return []
            for v, (alone, held) in enumerate(descent.alone(choice)):
                fits[v] &= held <= self.limit
                times[v] = alone
        ranked = []
        for v, (fit, alone) in enumerate(zip(fits, times, strict=True)):
            k = int(np.where(fit, alone, np.inf).argmin())
            if fit[k] and alone[k] < seconds * (1.0 - 1e-9):
                ranked.append((float(alone[k]), v, k))
        return [(v, k) for _, v, k in sorted(ranked)]

    def _cheapest(
        self, choice: Choice, there: Mapping[Moment, float], deadline: float
    ) -> tuple[int, int] | None:
        """Return the variable and its new candidate; None where nothing helps, or time is up."""
        over = sum(max(now - self.limit, 0.0) for now in there.values())
        seconds = evaluate(self.sums.found.problem, choice).seconds
        gains = [np.full(len(v), over) for v in self.sums.found.problem.variables]
        slower = [np.zeros(0)] * len(gains)
        for moment in there:
            if time.monotonic() > deadline:
                return None
            for v, (alone, held) in enumerate(self._full[moment].alone(choice)):
                gains[v] -= np.maximum(held - self.limit, 0.0)
                slower[v] = alone - seconds
        best, least = None, np.inf
        for v, (gain, slow) in enumerate(zip(gains, slower, strict=True)):
            with np.errstate(divide="ignore", invalid="ignore"):
                # where nothing is lost in time, more bytes are better
                rate = np.where(gain > 0, np.maximum(slow, 1e-9 * seconds) / gain, np.inf)
            rate[choice[v]] = np.inf
            k = int(rate.argmin())
            if rate[k] < least:
                best, least = (v, k), float(rate[k])
        return best
