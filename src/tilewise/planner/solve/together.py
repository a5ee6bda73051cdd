"""Prices of all candidates of one variable at once.

An assignment that is faster than some `reach` consists of candidates whose bounds are below it.
Within a reach the others leave, messages bound those that stay ever higher, and so on. What is left
is eliminated, the variable last: that gives the least weighted sum with each of its candidates, and
assignments that have it. Where such an assignment takes no longer than its sum, the price is exact.

The largest reach that is of use comes first, then shorter ones until there is time to eliminate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf, prod

import numpy as np

from tilewise.planner.solve.eliminate import Elimination, Factor, good_order
from tilewise.planner.solve.live import Link, Live
from tilewise.planner.solve.problem import Floats, Ints, Problem
from tilewise.planner.solve.relax import Relaxation
from tilewise.planner.solve.terms import Terms
from tilewise.planner.solve.weights import Weights

REACHES = (2.0, 1.3, 1.1, 1.03, 1.02, 1.01)
"""Times to look at, as multiples of the best one."""
ENTRIES = 1 << 17
"""How many moves of one tensor to know at first."""
ROUNDS = 3
"""How often to bound all candidates within one reach, and again when all moves are known."""
SUMS_A_SECOND = 5e8
"""How many sums of costs are looked at in a second, about."""
LARGEST = 1 << 31
"""The most sums of one variable's bucket."""
TERM, TERMS = 1 << 25, 1 << 27
"""The most entries of a term of three variables, and of all of them."""
PART = 0.7
"""Which part of the time that is left an elimination may take."""

Raise = Callable[[int, Ints, Floats], None]


class Together:
    """All candidates of a problem, bounded under some weights within ever shorter reaches.

    Args:
        problem: whose candidates.
        weights: of the parts of the objective.
        constant: what weighted sums leave out.
        best: the best time.
        raised: is told of a variable's candidates and what their prices are at least.
    """

    def __init__(
        self, problem: Problem, weights: Weights, constant: float, best: float, raised: Raise
    ) -> None:
        self.problem, self.weights, self.constant = problem, weights, constant
        self.best, self._raised = best, raised
        self._random = np.random.default_rng(0)

    def run(
        self, variable: int, low: Sequence[Floats], needed: float, deadline: float
    ) -> Ints | None:
        """Bound all candidates, and return a good assignment with each of some of a variable's.

        Args:
            variable: which one.
            low: what is known of all candidates.
            needed: the largest reach that is of use.
            deadline: when to end, by the monotonic clock.
        """
        most = min(needed * (1.0 + 1e-6), REACHES[0] * self.best)
        shorter = [k * self.best for k in REACHES if k * self.best < most]
        within = [np.flatnonzero(one < most) for one in low]
        if not all(map(len, within)):
            return None
        self._live = Live(self.problem, ENTRIES, within)
        self._relaxation = Relaxation(self._live, self.weights, 4.0 * self.best)
        for reach in (most, *shorter):
            if not self._rounds(reach, deadline):
                return None
            if self._work(variable) > self._affordable(deadline):
                continue
            if not self._live.whole:
                self._live.grow(deadline)
                self._keep([np.ones(k, bool) for k in self._live.sizes])
                if not self._live.whole:
                    continue
                if not self._rounds(reach, deadline):
                    return None
            found = self._eliminate(variable, reach, deadline)
            if found is not None:
                return found
        return None

    def _rounds(self, reach: float, deadline: float) -> bool:
        """Drop candidates that are not within reach; say if there is time for more."""
        live, relaxation = self._live, self._relaxation
        for number in range(ROUNDS):
            if time.monotonic() > deadline:
                return False
            for _ in range(2):
                relaxation.sweep()
            shared = np.array([link.share.min() < 1 for link in live.links], bool)
            order = self._random.permutation(len(shared))
            if number % 2 == 0:
                order = np.argsort(shared, kind="stable")
            _, bounds, _ = relaxation.marginals(order.tolist())
            bounds = [bound + self.constant for bound in bounds]
            for v, bound in enumerate(bounds):
                self._raised(v, live.candidates[v], np.minimum(bound, reach))
            live.lean(relaxation.decode(), 1.5 / (4.0 + number))
            masks = [bound < reach for bound in bounds]
            if not all(mask.any() for mask in masks):
                return False
            self._keep(masks, bounds)
        return True

    def _keep(self, masks: Sequence[np.ndarray], scores: Sequence[Floats] | None = None) -> None:
        self._live.keep(masks, scores)
        self._relaxation.reweigh(self.weights)

    def _affordable(self, deadline: float) -> float:
        return PART * (deadline - time.monotonic()) * SUMS_A_SECOND

    def _work(self, variable: int) -> float:
        """Return how many sums an elimination looks at, about; infinite if there are too many.

        Tensors with two consumers are to be charged exactly, or hardly any price is exact.
        """
        factors, entries = [], 0
        for links in self._readers():
            first = links[0].first
            sizes = [len(np.unique(link.second_labels)) for link in links]
            sources = len(np.unique(links[0].first_labels))
            scopes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
                ((first, link.second), (sources, size)) for link, size in zip(links, sizes)
            ]
            if len(links) == 2 and len({first, *(link.second for link in links)}) == 3:
                scopes = [((first, *(link.second for link in links)), (sources, *sizes))]
                entries += prod(scopes[0][1])
                if prod(scopes[0][1]) > TERM:
                    return inf
            factors += [Factor(some, (), np.broadcast_to(0.0, shape)) for some, shape in scopes]
        order = good_order(self._live.sizes, factors, last=variable)
        return order.work if order.largest <= LARGEST and entries <= TERMS else inf

    def _readers(self) -> list[list[Link]]:
        """Return the links of each tensor."""
        found: dict[int, list[Link]] = {}
        for link in self._live.links:
            found.setdefault(link.table, []).append(link)
        return list(found.values())

    def _eliminate(self, variable: int, reach: float, deadline: float) -> Ints | None:
        """Bound the variable's candidates by the least sums; return assignments that have them."""
        terms = Terms(self._relaxation, self.weights, largest=TERM)
        order = good_order(self._live.sizes, terms.factors, last=variable)
        if order.largest > LARGEST or order.work > self._affordable(deadline):
            return None
        try:
            found = Elimination(terms.costs, terms.factors, order.variables, order.work, deadline)
        except TimeoutError:
            return None
        candidates = self._live.candidates
        least, places = found.with_last()
        self._raised(variable, candidates[variable], np.minimum(least + self.constant, reach))
        return np.stack([some[k] for some, k in zip(candidates, places, strict=True)], 1)


def costs_of(problem: Problem, choices: Ints) -> tuple[Floats, Floats]:
    """Return seconds and bytes of many assignments, as `evaluate`; infinite for broken ties."""
    sums = np.zeros((len(choices), 3 + problem.sums))
    burst = np.zeros(len(choices))
    for v, k in zip(problem.variables, choices.T, strict=True):
        sums += np.column_stack((v.forward, v.backward, v.sync, v.held))[k]
        burst = np.maximum(burst, v.burst[k])
    for transfer in problem.transfers:
        sources, rows = np.unique(transfer.leaves[choices[:, transfer.source]], return_inverse=True)
        wanted = [c.wants[choices[:, c.variable]] for c in transfer.consumers]
        targets = np.unique(np.concatenate(wanted))
        moves = transfer.cost(sources, targets)
        for place, labels in enumerate(wanted):
            new = np.all([labels != other for other in wanted[:place]] or [True], axis=0)
            at = rows.reshape(-1), np.searchsorted(targets, labels)
            sums[:, 0] += new * moves.forward[at]
            sums[:, 1] += new * moves.backward[at]
            sums[:, 3:] += (new * moves.held[at])[:, None] * np.array(transfer.counts)
    seconds = sums[:, 0] + sums[:, 1:3].max(1)
    for tie in problem.ties:
        labels = np.stack([one[choices[:, v]] for v, one in zip(tie.variables, tie.labels)])
        seconds = np.where((labels == labels[0]).all(0), seconds, np.inf)
    return seconds, sums[:, 3:].max(1) + burst
