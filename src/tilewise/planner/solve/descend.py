"""Better assignments by changing one variable at a time, on the true objective."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from tilewise.planner.solve.problem import Floats, Ints, Problem

MORE = 1.5
"""How many times the weight of a byte one above the cap costs at first."""
STEEPEST = 1e6
"""How many times the step's seconds all bytes of the cap may cost at most."""


class Descent:
    """Coordinate descent; it looks up the labels once for all its runs."""

    def __init__(self, problem: Problem, cap: int | None) -> None:
        self.problem = problem
        self.cap = cap
        self._own = [
            np.vstack((v.forward, v.backward, v.sync, v.held.T.astype(float)))
            for v in problem.variables
        ]
        self._slowest = max(float(_seconds(own).max()) for own in self._own)
        self._counts = [np.array(t.counts) for t in problem.transfers]
        self._leaves = [np.unique(t.leaves, return_inverse=True) for t in problem.transfers]
        self._wants = [
            [np.unique(c.wants, return_inverse=True) for c in t.consumers]
            for t in problem.transfers
        ]
        self._made: list[list[int]] = [[] for _ in problem.variables]
        self._read: list[set[int]] = [set() for _ in problem.variables]
        for k, transfer in enumerate(problem.transfers):
            self._made[transfer.source].append(k)
            for consumer in transfer.consumers:
                self._read[consumer.variable].add(k)
        self._near = [self._neighbours(v) for v in range(len(problem.variables))]
        self._priced: list[tuple[tuple[int, ...], Floats] | None] = [None] * len(self._near)
        self._tied: list[list[tuple[Ints, int, Ints]]] = [[] for _ in problem.variables]
        for tie in problem.ties:
            members = list(zip(tie.variables, tie.labels))
            for v, mine in members:
                self._tied[v] += [(mine, w, theirs) for w, theirs in members if w != v]

    def __call__(
        self,
        start: Sequence[int],
        sweeps: int = 4,
        *,
        byte: Sequence[float] = (),
        deadline: float = inf,
    ) -> list[int]:
        """Return an assignment near `start`, which keeps all ties.

        Bytes above the cap cost time: in the first sweeps a little more than `byte` of each sum,
        then ever more. Of those that fit it returns the fastest, if there are any; after the
        deadline the best so far.
        """
        choice = list(start)
        bursts = np.array([v.burst[k] for v, k in zip(self.problem.variables, choice)])
        totals = self._totals(choice)
        rates = self._rates(totals, byte)
        over = float(self._over(totals, bursts.max()).max(initial=0.0))
        best = list(choice), over, float(_seconds(totals))
        left = sweeps
        while left > 0 and time.monotonic() <= deadline:
            left -= 1
            changed = False
            for v, variable in enumerate(self.problem.variables):
                if len(variable) == 1:
                    continue
                if time.monotonic() > deadline:
                    return best[0]
                prices = self._prices(choice, v)
                bursts[v] = 0
                sums = totals[:, None] + prices - prices[:, [choice[v]]]
                beyond = self._over(sums, np.maximum(variable.burst, bursts.max()))
                cost = _seconds(sums) + rates @ beyond
                cost[~self._allowed(choice, v)] = inf
                k = int(cost.argmin())
                if cost[k] < cost[choice[v]] * (1 - 1e-12):
                    changed = True
                    choice[v] = k
                    totals = sums[:, k]
                bursts[v] = variable.burst[choice[v]]
            over = float(self._over(totals, bursts.max()).max(initial=0.0))
            seconds = float(_seconds(totals))
            best = min(best, (list(choice), over, seconds), key=lambda one: one[1:])
            if changed:
                continue
            if not over or rates.max() >= STEEPEST * max(seconds, self._slowest):
                break
            rates, left = 4.0 * rates, max(left, 2)
        return best[0]

    def _rates(self, totals: Floats, byte: Sequence[float]) -> Floats:
        """Return the seconds that bytes above the cap cost at first, as parts of the cap."""
        if self.cap is None:
            return np.zeros(len(totals) - 3)
        least = np.full(len(totals) - 3, max(_seconds(totals), self._slowest))
        return np.maximum(least, MORE * self.cap * np.array(byte)) if len(byte) else least

    def _over(self, sums: Floats, burst: Floats) -> Floats:
        """Return what is held above the cap in each sum, as parts of the cap."""
        if self.cap is None:
            return np.zeros_like(sums[3:])
        return np.maximum(sums[3:] + burst - self.cap, 0.0) / max(self.cap, 1)

    def alone(self, choice: Sequence[int]) -> Iterator[tuple[Floats, Floats]]:
        """Yield time and memory with each candidate of each variable if nothing else is changed.

        The time of a candidate that breaks a tie is infinite.
        """
        totals = self._totals(choice)
        bursts = np.array([v.burst[k] for v, k in zip(self.problem.variables, choice)])
        for v, variable in enumerate(self.problem.variables):
            prices = self._prices(choice, v)
            sums = totals[:, None] + prices - prices[:, [choice[v]]]
            seconds = _seconds(sums)
            others = np.delete(bursts, v).max(initial=0)
            peak = sums[3:].max(0) + np.maximum(variable.burst, others)
            yield np.where(self._allowed(choice, v), seconds, np.inf), peak

    def _allowed(self, choice: Sequence[int], v: int) -> np.ndarray:
        allowed = np.ones(len(self.problem.variables[v]), bool)
        for mine, w, theirs in self._tied[v]:
            allowed &= mine == theirs[choice[w]]
        return allowed

    def _totals(self, choice: Sequence[int]) -> Floats:
        """Return forward, backward, sync and the bytes of each sum of an assignment."""
        nothing = np.zeros(3 + self.problem.sums)
        totals: Floats = sum((own[:, k] for own, k in zip(self._own, choice)), nothing)
        for transfer, counts in zip(self.problem.transfers, self._counts):
            wanted = {int(c.wants[choice[c.variable]]) for c in transfer.consumers}
            moves = transfer.cost(
                transfer.leaves[[choice[transfer.source]]], np.array(sorted(wanted))
            )
            totals[0] += moves.forward.sum()
            totals[1] += moves.backward.sum()
            totals[3:] += moves.held.sum() * counts
        return totals

    def _neighbours(self, v: int) -> list[int]:
        """Return the variables between which and this one tensors move, or which read beside it."""
        found: set[int] = set()
        for k in (*self._made[v], *self._read[v]):
            transfer = self.problem.transfers[k]
            found |= {transfer.source, *(c.variable for c in transfer.consumers)}
        return sorted(found - {v})

    def _prices(self, choice: Sequence[int], v: int) -> Floats:
        """Return what each candidate of a variable adds, all others given.

        What was found the last time is found again where nothing near the variable has changed.
        """
        near = tuple(choice[u] for u in self._near[v])
        known = self._priced[v]
        if known is None or known[0] != near:
            known = near, self._price(choice, v)
            self._priced[v] = known
        return known[1]

    def _price(self, choice: Sequence[int], v: int) -> Floats:
        prices = self._own[v].copy()
        for k in self._made[v]:
            transfer = self.problem.transfers[k]
            labels, inverse = self._leaves[k]
            wanted = {int(c.wants[choice[c.variable]]) for c in transfer.consumers}
            moves = transfer.cost(labels, np.array(sorted(wanted)))
            prices[0] += moves.forward.sum(1)[inverse]
            prices[1] += moves.backward.sum(1)[inverse]
            self._hold(prices, k, moves.held.sum(1)[inverse])
        for k in self._read[v]:
            transfer = self.problem.transfers[k]
            source = transfer.leaves[[choice[transfer.source]]]
            others = [c for c in transfer.consumers if c.variable != v]
            wanted = {int(c.wants[choice[c.variable]]) for c in others}
            mine = [i for i, c in enumerate(transfer.consumers) if c.variable == v]
            for place, i in enumerate(mine):
                labels, inverse = self._wants[k][i]
                moves = transfer.cost(source, labels)
                new = np.ones(len(inverse), bool)
                for label in wanted:
                    new &= transfer.consumers[i].wants != label
                for j in mine[:place]:
                    new &= transfer.consumers[i].wants != transfer.consumers[j].wants
                prices[0] += moves.forward[0][inverse] * new
                prices[1] += moves.backward[0][inverse] * new
                self._hold(prices, k, moves.held[0][inverse] * new)
        return prices

    def _hold(self, prices: Floats, transfer: int, held: Ints) -> None:
        """Add the bytes of moved copies to the sums that they are part of."""
        for k in np.flatnonzero(self._counts[transfer]).tolist():
            prices[3 + k] += self._counts[transfer][k] * held


def _seconds(sums: Floats) -> Floats:
    """Return the time for forward, backward and sync, in the first rows."""
    return np.asarray(sums[0] + np.maximum(sums[1], sums[2]))


def cheapest(problem: Problem) -> list[int] | None:
    """Return each variable's fastest candidate, among those that ties leave."""
    chosen: list[int] = []
    for v, variable in enumerate(problem.variables):
        cost = variable.forward + np.maximum(variable.backward, variable.sync)
        for tie in problem.ties:
            labels = dict(zip(tie.variables, tie.labels))
            if v not in labels:
                continue
            for w, theirs in labels.items():
                offered = theirs[[chosen[w]]] if w < v else theirs
                cost = np.where(np.isin(labels[v], offered), cost, np.inf)
        chosen.append(int(cost.argmin()))
        if not np.isfinite(cost[chosen[-1]]):
            return None
    return chosen
