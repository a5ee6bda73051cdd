"""Better assignments by changing one variable at a time, on the true objective."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from tilewise.planner.solve.problem import Floats, Ints, Problem


class Descent:
    """Coordinate descent; it looks up the labels once for all its runs."""

    def __init__(self, problem: Problem, cap: int | None) -> None:
        self.problem = problem
        self.cap = cap
        self._own = [
            np.stack((v.forward, v.backward, v.sync, v.held.astype(float)))
            for v in problem.variables
        ]
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
        self._tied: list[list[tuple[Ints, int, Ints]]] = [[] for _ in problem.variables]
        for tie in problem.ties:
            members = list(zip(tie.variables, tie.labels))
            for v, mine in members:
                self._tied[v] += [(mine, w, theirs) for w, theirs in members if w != v]

    def __call__(
        self, start: Sequence[int], sweeps: int = 4, *, deadline: float = inf
    ) -> list[int]:
        """Return an assignment that is no worse than `start`, which keeps all ties.

        Less memory above the cap counts before less time. After the deadline it is the best so far.
        """
        choice = list(start)
        bursts = np.array([v.burst[k] for v, k in zip(self.problem.variables, choice)])
        totals = self._totals(choice)
        for _ in range(sweeps):
            changed = False
            for v, variable in enumerate(self.problem.variables):
                if len(variable) == 1:
                    continue
                if time.monotonic() > deadline:
                    return choice
                prices = self._prices(choice, v)
                bursts[v] = 0
                sums = totals[:, None] + prices - prices[:, [choice[v]]]
                peak = sums[3] + np.maximum(variable.burst, bursts.max())
                best = self._pick(sums, peak, self._allowed(choice, v), choice[v])
                if best != choice[v]:
                    changed = True
                    choice[v] = best
                    totals = sums[:, best]
                bursts[v] = variable.burst[best]
            if not changed:
                break
        return choice

    def alone(self, choice: Sequence[int]) -> Iterator[tuple[Floats, Floats]]:
        """Yield time and memory with each candidate of each variable if nothing else is changed.

        The time of a candidate that breaks a tie is infinite.
        """
        totals = self._totals(choice)
        bursts = np.array([v.burst[k] for v, k in zip(self.problem.variables, choice)])
        for v, variable in enumerate(self.problem.variables):
            prices = self._prices(choice, v)
            sums = totals[:, None] + prices - prices[:, [choice[v]]]
            seconds = sums[0] + np.maximum(sums[1], sums[2])
            others = np.delete(bursts, v).max(initial=0)
            peak = sums[3] + np.maximum(variable.burst, others)
            yield np.where(self._allowed(choice, v), seconds, np.inf), peak

    def _pick(self, sums: Floats, peak: Floats, allowed: np.ndarray, now: int) -> int:
        """Return the best candidate, which is `now` unless another is clearly better."""
        seconds = sums[0] + np.maximum(sums[1], sums[2])
        over = np.zeros(len(peak)) if self.cap is None else np.maximum(peak - self.cap, 0.0)
        over[~allowed] = np.inf
        least = over.min()
        if least < over[now]:
            return int(np.where(over == least, seconds, np.inf).argmin())
        best = int(np.where(over == least, seconds, np.inf).argmin())
        return best if seconds[best] < seconds[now] * (1 - 1e-12) else now

    def _allowed(self, choice: Sequence[int], v: int) -> np.ndarray:
        allowed = np.ones(len(self.problem.variables[v]), bool)
        for mine, w, theirs in self._tied[v]:
            allowed &= mine == theirs[choice[w]]
        return allowed

    def _totals(self, choice: Sequence[int]) -> Floats:
        """Return forward, backward, sync and held of an assignment."""
        totals: Floats = sum((own[:, k] for own, k in zip(self._own, choice)), np.zeros(4))
        for transfer in self.problem.transfers:
            wanted = {int(c.wants[choice[c.variable]]) for c in transfer.consumers}
            moves = transfer.cost(
                transfer.leaves[[choice[transfer.source]]], np.array(sorted(wanted))
            )
            totals[0] += moves.forward.sum()
            totals[1] += moves.backward.sum()
            totals[3] += moves.held.sum()
        return totals

    def _prices(self, choice: Sequence[int], v: int) -> Floats:
        """Return what each candidate of a variable adds, all others given."""
        prices = self._own[v].copy()
        for k in self._made[v]:
            transfer = self.problem.transfers[k]
            labels, inverse = self._leaves[k]
            wanted = {int(c.wants[choice[c.variable]]) for c in transfer.consumers}
            moves = transfer.cost(labels, np.array(sorted(wanted)))
            prices[0] += moves.forward.sum(1)[inverse]
            prices[1] += moves.backward.sum(1)[inverse]
            prices[3] += moves.held.sum(1)[inverse]
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
                prices[3] += moves.held[0][inverse] * new
        return prices
