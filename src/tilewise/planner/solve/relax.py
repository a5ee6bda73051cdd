"""Lower bounds by message passing (sequential tree-reweighted), and marginals on a tree.

A shared tensor's charge is split among its consumers, which never overcharges. Messages move cost
between the two ends of a link and its table without changing any assignment's total:

    total(x) = Σ_v reduced_v(x_v) + Σ_links [table − message to first − message to second]

Going backward through the variables, each leaves the part `1 / max(links before, links after)` of
its reduced cost to every link before it, and the message to that link's other end is the largest
that keeps link plus part from going below zero. So what remains is a bound:

    bound = Σ_v (1 − part_v · links before v) · min reduced_v

and any set of links may be dropped together with its parts. Dropping all but a spanning tree and
solving that tree exactly bounds the total for every candidate of every variable. On chains and
trees this is exact after one sweep; elsewhere sweeps raise the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tilewise.planner.solve.live import Link, Live, Table
from tilewise.planner.solve.problem import Floats
from tilewise.planner.solve.weights import Weights

CHUNK = 1 << 15
"""How many moves to look at together: as many as stay in the cache."""


class Relaxation:
    """The weighted sum of a live problem's costs, bounded from below."""

    def __init__(
        self, live: Live, weights: Weights, penalty: float, before: Relaxation | None = None
    ) -> None:
        """Start without messages, or with those of `before`, whose live candidates were these.

        Args:
            live: the candidates and moves.
            weights: what the parts of the objective count.
            penalty: seconds that a broken tie costs here; best far above the best time.
            before: the relaxation of a problem with the same variables and other sums.
        """
        self.live = live
        self.penalty = penalty
        self._sources = [table.sources for table in live.tables]
        self._targets = [table.targets for table in live.tables]
        known = {} if before is None else dict(before._by_link())
        self._to_first, self._to_second = [], []
        for link in live.links:
            table = live.tables[link.table]
            nothing = np.zeros(len(table.sources)), np.zeros(len(table.targets))
            to_first, to_second = known.get((table.key, link.second), nothing)
            self._to_first.append(to_first)
            self._to_second.append(to_second)
        self.reweigh(weights)

    def _by_link(self) -> Iterator[tuple[tuple[tuple[int, ...], int], tuple[Floats, Floats]]]:
        """Yield the messages of each link, with what tells links apart."""
        for k, link in enumerate(self.live.links):
            yield (self.live.tables[link.table].key, link.second), self.messages(k)

    def reweigh(self, weights: Weights) -> None:
        """Take new weights, and what became of the live candidates; messages stay useful."""
        live = self.live
        self.weights = weights
        variables = live.problem.variables
        self.costs = [weights.of_variable(v)[c] for v, c in zip(variables, live.candidates)]
        self._tables = [self.weigh(table, weights) for table in live.tables]
        for k, link in enumerate(live.links):
            table = live.tables[link.table]
            old = np.searchsorted(self._sources[link.table], table.sources)
            self._to_first[k] = self._to_first[k][old]
            old = np.searchsorted(self._targets[link.table], table.targets)
            self._to_second[k] = self._to_second[k][old]
        self._sources = [table.sources for table in live.tables]
        self._targets = [table.targets for table in live.tables]
        count = len(variables)
        self._before: list[list[int]] = [[] for _ in range(count)]
        self._after: list[list[int]] = [[] for _ in range(count)]
        for k, link in enumerate(live.links):
            self._after[min(link.first, link.second)].append(k)
            self._before[max(link.first, link.second)].append(k)
        self._parts = [1.0 / max(len(b), len(a), 1) for b, a in zip(self._before, self._after)]

    def sweep(self) -> float:
        """Pass messages forward and backward once; return the bound."""
        count = len(self.costs)
        for v in range(count):
            part = self._parts[v] * self.reduced(v)
            for k in self._after[v]:
                self._send(k, v, part)
        bound = 0.0
        for v in reversed(range(count)):
            reduced = self.reduced(v)
            part = self._parts[v] * reduced
            for k in self._before[v]:
                self._send(k, v, part)
            bound += self._floor(v, reduced)
        return bound

    def reduced(self, v: int) -> Floats:
        """Return each candidate's cost with all the messages to its variable."""
        total = self.costs[v].copy()
        for k in (*self._before[v], *self._after[v]):
            link = self.live.links[k]
            if link.first == v:
                total += self._to_first[k][link.first_labels]
            else:
                total += self._to_second[k][link.second_labels]
        return total

    def messages(self, link: int) -> tuple[Floats, Floats]:
        """Return what a link has given to its first and to its second variable, by label."""
        return self._to_first[link], self._to_second[link]

    def weigh(self, table: Table, weights: Weights) -> Floats:
        """Return a table's moves as one number each, under other weights."""
        return table.weigh(weights, self.penalty)

    def _floor(self, v: int, reduced: Floats) -> float:
        return (1.0 - self._parts[v] * len(self._before[v])) * float(reduced.min())

    def marginals(self, order: Iterable[int]) -> tuple[float, list[Floats], list[int]]:
        """Bound every candidate by solving a spanning tree exactly; right after a sweep only.

        Args:
            order: the links in the order in which they may enter the tree.

        Returns:
            The bound, each candidate's bound, and the best live candidates on the tree.
        """
        tree, visit = self._spanning(order)
        spare = [
            1.0 - self._parts[v] * sum(k not in tree for k in self._before[v])
            for v in range(len(self.costs))
        ]
        below = [spare[v] * self.reduced(v) for v in range(len(self.costs))]
        up: dict[int, Floats] = {}
        for v, k in reversed(visit):
            if k is not None:
                link = self.live.links[k]
                up[v] = self._across(k, v, below[v])
                self._spread(below, link, v, up[v])
        total = sum(float(below[v].min()) for v, k in visit if k is None)
        best = [0] * len(self.costs)
        for v, k in visit:
            if k is None:
                best[v] = int(below[v].argmin())
                rest = total - float(below[v].min())
                below[v] = below[v] + rest
                continue
            link = self.live.links[k]
            parent = link.first + link.second - v
            mine = link.first_labels if link.first == v else link.second_labels
            theirs = link.second_labels if link.first == v else link.first_labels
            conditional = below[v] + self._from_label(k, v, int(theirs[best[parent]]))[mine]
            best[v] = int(conditional.argmin())
            without = below[parent] - up[v][theirs]
            below[v] = below[v] + self._across(k, parent, without)[mine]
        return total, below, best

    def decode(self) -> list[int]:
        """Choose live candidates one by one, each given those before it and messages from after."""
        chosen: list[int] = []
        for v in range(len(self.costs)):
            total = self.costs[v].copy()
            for k in self._after[v]:
                link = self.live.links[k]
                if link.first == v:
                    total += self._to_first[k][link.first_labels]
                else:
                    total += self._to_second[k][link.second_labels]
            for k in self._before[v]:
                link = self.live.links[k]
                if link.first == v:
                    total += self._column(k, int(link.second_labels[chosen[link.second]]))[
                        link.first_labels
                    ]
                else:
                    total += self._row(k, int(link.first_labels[chosen[link.first]]))[
                        link.second_labels
                    ]
            chosen.append(int(total.argmin()))
        return chosen

    def _send(self, k: int, v: int, part: Floats) -> None:
        link = self.live.links[k]
        table = self.live.tables[link.table]
        if link.first == v:
            offer = _lowest(part, link.first_labels, len(table.sources)) - self._to_first[k]
            self._to_second[k] = self._cheapest(k, offer, forth=True)
        else:
            offer = _lowest(part, link.second_labels, len(table.targets)) - self._to_second[k]
            self._to_first[k] = self._cheapest(k, offer, forth=False)

    def _across(self, k: int, v: int, cost: Floats) -> Floats:
        """Return, by label of the other end, the least of `cost` at v plus the reduced table."""
        link = self.live.links[k]
        table = self.live.tables[link.table]
        if link.first == v:
            offer = _lowest(cost, link.first_labels, len(table.sources)) - self._to_first[k]
            return np.asarray(self._cheapest(k, offer, forth=True) - self._to_second[k])
        offer = _lowest(cost, link.second_labels, len(table.targets)) - self._to_second[k]
        return np.asarray(self._cheapest(k, offer, forth=False) - self._to_first[k])

    def _from_label(self, k: int, v: int, label: int) -> Floats:
        """Return the reduced table by v's labels, with the other end's label given."""
        if self.live.links[k].first == v:
            mine, theirs = self._to_first[k], self._to_second[k]
            return np.asarray(self._column(k, label) - mine - theirs[label])
        mine, theirs = self._to_second[k], self._to_first[k]
        return np.asarray(self._row(k, label) - mine - theirs[label])

    def _spread(self, below: list[Floats], link: Link, v: int, message: Floats) -> None:
        parent = link.first + link.second - v
        labels = link.first_labels if link.first == parent else link.second_labels
        below[parent] = below[parent] + message[labels]

    def _cheapest(self, k: int, offer: Floats, *, forth: bool) -> Floats:
        """Return the least of offer + table by label of the other end; unknown moves cost nothing.

        Offers come from the sources and go `forth` to the targets, or the other way.
        """
        link = self.live.links[k]
        table, weighted = self.live.tables[link.table], self._tables[link.table]
        share = link.share[table.columns]
        if forth:
            here, there, count = table.rows, table.columns, len(table.targets)
            known = _least_down(weighted, share, offer[here])
        else:
            here, there, count = table.columns, table.rows, len(table.sources)
            known = _least_across(weighted, share, offer[here])
        if table.whole:
            return known
        rest = offer.copy()
        rest[here] = np.inf
        result = np.full(count, offer.min())
        result[there] = np.minimum(known, rest.min())
        return result

    def _row(self, k: int, label: int) -> Floats:
        link = self.live.links[k]
        table = self.live.tables[link.table]
        result = np.zeros(len(table.targets))
        where = np.flatnonzero(table.rows == label)
        if len(where):
            row = self._tables[link.table][where[0]]
            result[table.columns] = row * link.share[table.columns]
        return result

    def _column(self, k: int, label: int) -> Floats:
        link = self.live.links[k]
        table = self.live.tables[link.table]
        result = np.zeros(len(table.sources))
        where = np.flatnonzero(table.columns == label)
        if len(where):
            result[table.rows] = self._tables[link.table][:, where[0]] * link.share[label]
        return result

    def _spanning(self, order: Iterable[int]) -> tuple[set[int], list[tuple[int, int | None]]]:
        """Return a spanning forest's links, and its variables from the roots with their links."""
        count = len(self.costs)
        root = list(range(count))

        def find(v: int) -> int:
            while root[v] != v:
                root[v] = root[root[v]]
                v = root[v]
            return v

        tree: set[int] = set()
        near: list[list[int]] = [[] for _ in range(count)]
        for k in order:
            link = self.live.links[k]
            a, b = find(link.first), find(link.second)
            if a != b:
                root[a] = b
                tree.add(k)
                near[link.first].append(k)
                near[link.second].append(k)
        visit: list[tuple[int, int | None]] = []
        seen = [False] * count
        for start in range(count):
            if seen[start]:
                continue
            seen[start] = True
            queue: list[tuple[int, int | None]] = [(start, None)]
            for v, _ in queue:
                for k in near[v]:
                    link = self.live.links[k]
                    other = link.first + link.second - v
                    if not seen[other]:
                        seen[other] = True
                        queue.append((other, k))
            visit += queue
        return tree, visit


def _lowest(cost: Floats, labels: np.ndarray, count: int) -> Floats:
    """Return the lowest cost for each label; infinite where no candidate has it."""
    lowest = np.full(count, np.inf)
    np.minimum.at(lowest, labels, cost)
    return lowest


def _least_down(table: Floats, share: Floats, offer: Floats) -> Floats:
    """Return the least of each column of a table, of which a share counts, plus offers by row."""
    least = np.full(table.shape[1], np.inf)
    for some, part in _blocks(table, share):
        part += offer[some, None]
        np.minimum(least, part.min(0, initial=np.inf), out=least)
    return least


def _least_across(table: Floats, share: Floats, offer: Floats) -> Floats:
    """Return the least of each row of a table, of which a share counts, plus offers by column."""
    least = np.empty(len(table))
    for some, part in _blocks(table, share):
        part += offer
        least[some] = part.min(1, initial=np.inf)
    return least


def _blocks(table: Floats, share: Floats) -> Iterator[tuple[slice, Floats]]:
    """Yield a share of each column of a table, in copies of some rows that stay in the cache."""
    scaled = bool((share != 1.0).any())
    step = max(CHUNK // max(table.shape[1], 1), 1)
    buffer = np.empty((min(step, len(table)), table.shape[1]))
    for begin in range(0, len(table), step):
        rows = table[begin : begin + step]
        part = buffer[: len(rows)]
        if scaled:
            np.multiply(rows, share, out=part)
        else:
            part[:] = rows
        yield slice(begin, begin + len(rows)), part
