"""The weighted sum of a live problem's costs as terms of one, two or three variables.

A tensor with two consumers is charged exactly, by a term of three variables, where that is small.
Otherwise each consumer pays its share, which never overcharges.
"""

from __future__ import annotations

from functools import cached_property
from math import inf, prod

import numpy as np

from tilewise.planner.solve.eliminate import Elimination, Factor, Order, good_order
from tilewise.planner.solve.live import Link
from tilewise.planner.solve.problem import Floats, Ints
from tilewise.planner.solve.relax import Relaxation
from tilewise.planner.solve.weights import Weights

WORK = 1 << 27
"""The most sums of costs to look at for one exact minimum."""
FEW_SUMS, MORE = 1 << 18, 4
"""How many sums of costs are little work, and how many times the least work is little more."""
TOGETHER = 1 << 19
"""The most entries of a term of three variables."""


class Terms:
    """What the live candidates cost under some weights; all their moves must be known."""

    def __init__(
        self,
        relaxation: Relaxation,
        weights: Weights,
        order: Order | None = None,
        *,
        before: Order | None = None,
        largest: int = TOGETHER,
    ) -> None:
        """Take costs under `weights`, moved around as the relaxation's messages say.

        Terms of three variables have `largest` entries at most. An `order` is taken as it is, that
        of `before`, when more candidates were live, if none is found that is less work.
        """
        self._relaxation, self.weights, self._largest = relaxation, weights, largest
        live = relaxation.live
        variables = live.problem.variables
        self.costs = [weights.of_variable(v)[c] for v, c in zip(variables, live.candidates)]
        self._tables = [relaxation.weigh(table, weights) for table in live.tables]
        self.factors: list[Factor] = []
        self.exact: set[int] = set()
        readers: dict[int, list[int]] = {}
        for k, link in enumerate(live.links):
            readers.setdefault(link.table, []).append(k)
        for table, links in readers.items():
            self._add(table, [(k, live.links[k]) for k in links])
        self._order, self._before = order, before

    @cached_property
    def order(self) -> Order:
        """In which order to eliminate the variables."""
        if self._order is not None:
            return self._order
        sizes = [len(cost) for cost in self.costs]
        found = good_order(sizes, self.factors)
        if self._before is None:
            return found
        again = good_order(sizes, self.factors, self._before.variables)
        return min(again, found, key=lambda order: order.work)

    def in_turn(self) -> Order:
        """Return an order that ends with the first variables, if that is little more work.

        Going through a network from its beginning, few variables lie between what is behind and
        what is ahead.
        """
        sizes = [len(cost) for cost in self.costs]
        found = good_order(sizes, self.factors, reversed(range(len(sizes))))
        most = min(max(FEW_SUMS, MORE * self.order.work), WORK)
        return found if found.work <= most else self.order

    def weighted(self, table: int) -> Floats:
        """Return a table's moves as one number each."""
        return self._tables[table]

    def eliminate(self, deadline: float = inf) -> Elimination:
        """Minimise the sum, or bound its minimum where that is too much work.

        Raises:
            TimeoutError: the deadline was over first.
        """
        order = self.order
        largest = order.work if order.work <= WORK else WORK // len(self.costs)
        return Elimination(self.costs, self.factors, order.variables, largest, deadline)

    def _add(self, table: int, links: list[tuple[int, Link]]) -> None:
        """Add the moves of one tensor, and move costs to its variables by messages."""
        leaves, sources = _used(links[0][1].first_labels)
        wants = [_used(link.second_labels) for _, link in links]
        values = self._tables[table][sources]
        source = links[0][1].first
        members = (source, *(link.second for _, link in links))
        size = prod((len(sources), *(len(targets) for _, targets in wants)))
        together = len(links) == 2 and len(set(members)) == 3 and size <= self._largest
        reduced = []
        for (k, link), (places, targets) in zip(links, wants):
            to_first, to_second = self._relaxation.messages(k)
            self.costs[source] = self.costs[source] + to_first[link.first_labels]
            self.costs[link.second] = self.costs[link.second] + to_second[link.second_labels]
            part = values[:, targets]
            if not together:
                part = part * link.share[targets]
            reduced.append(part - to_first[sources][:, None] - to_second[targets])
            if together:
                continue
            if len(targets) == 1:
                self.costs[source] = self.costs[source] + reduced[-1][leaves, 0]
            elif len(sources) == 1:
                self.costs[link.second] = self.costs[link.second] + reduced[-1][0, places]
            else:
                classes = (leaves, places)
                self.factors.append(Factor((source, link.second), classes, reduced[-1]))
        if together:
            self.exact.add(table)
            first, second = (targets for _, targets in wants)
            again = np.where(first[:, None] == second, 0.0, 1.0)
            charged = reduced[0][:, :, None] + reduced[1][:, None, :]
            charged -= values[:, None, second] * (1.0 - again)
            self.factors.append(Factor(members, (leaves, *(p for p, _ in wants)), charged))


def _used(labels: Ints) -> tuple[Ints, Ints]:
    """Return the classes of candidates by label, and the labels that are used."""
    used, places = np.unique(labels, return_inverse=True)
    return places.reshape(-1), used
