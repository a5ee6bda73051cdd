"""The exact phase: all assignments that may beat the best one, one variable after another.

A partial assignment chooses a candidate for the first variables. It is dropped when

- its lower bound, known costs plus what the messages promise of the rest, is not below the best
  assignment's time, for any of the relaxations given; or
- another one that looks the same to the variables that are left costs no more in any way.

If the number of partial assignments grows above a width, those with the highest bounds are set
aside, and the lowest of their bounds limits what is proven.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise.planner.solve.live import Live
from tilewise.planner.solve.problem import Floats, Ints
from tilewise.planner.solve.relax import Conditional, Relaxation

TOLERANCE = 1e-9
"""An assignment that is better by less than this part is not looked for."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best complete assignments found (live candidates), and a bound of what was set aside."""

    choices: Ints
    bound: float


@dataclass(slots=True)
class _Partial:
    """Partial assignments, one a row.

    Args:
        parents: the row of each among the partial assignments that were kept a variable earlier.
        chosen: the variables' candidates, for those that the variables left still look at.
        wanted: by table, the distinct target labels wanted so far, falling, and -1 for none.
        sums: forward, backward, sync and held.
        burst: the largest burst.
        bounds: a lower bound for each relaxation.
    """

    parents: Ints
    chosen: dict[int, Ints]
    wanted: dict[int, Ints]
    sums: Floats
    burst: Ints
    bounds: Floats

    def take(self, rows: Ints | np.ndarray) -> _Partial:
        return _Partial(
            self.parents[rows],
            {v: places[rows] for v, places in self.chosen.items()},
            {table: labels[rows] for table, labels in self.wanted.items()},
            self.sums[rows],
            self.burst[rows],
            self.bounds[rows],
        )

    def __len__(self) -> int:
        return len(self.burst)


def _raised(step: Conditional, partial: _Partial) -> Floats:
    """Return the first bound of each partial assignment with each candidate."""
    own, off, pairs = step
    bound = partial.bounds[:, 0].copy()
    for w, by_candidate in off:
        bound -= by_candidate[partial.chosen[w]]
    raised = bound[:, None] + own[None, :]
    for w, table in pairs:
        raised += table[partial.chosen[w]]
    return raised


def _rise(step: Conditional, chosen: dict[int, Ints], v: int) -> Floats:
    """Return by how much the candidates chosen for v raise each partial assignment's bound."""
    own, off, pairs = step
    rise = own[chosen[v]]
    for w, by_candidate in off:
        rise -= by_candidate[chosen[w]]
    for w, table in pairs:
        rise += table[chosen[w], chosen[v]]
    return rise


class Search:
    """Enumeration with bounds over the live candidates of a problem."""

    def __init__(self, live: Live, relaxations: Sequence[Relaxation], cap: int | None) -> None:
        self.live = live
        self.relaxations = relaxations
        self.cap = cap
        problem = live.problem
        self._own = [
            np.stack((v.forward, v.backward, v.sync, v.held.astype(float)), 1)[c]
            for v, c in zip(problem.variables, live.candidates)
        ]
        self._burst = [v.burst[c] for v, c in zip(problem.variables, live.candidates)]
        self._floor = max(int(burst.min()) for burst in self._burst)
        self._links: list[list[int]] = [[] for _ in live.tables]
        self._touching: list[list[int]] = [[] for _ in problem.variables]
        for k, link in enumerate(live.links):
            self._links[link.table].append(k)
            for v in (link.first, link.second):
                if link.table not in self._touching[v]:
                    self._touching[v].append(link.table)

        self._last = [
            max(max(live.links[k].first, live.links[k].second) for k in links)
            for links in self._links
        ]

    def run(self, best: float, width: int, deadline: float) -> Found:
        """Look for assignments below `best` seconds; after the deadline, nothing is found."""
        constants = [self._constant(r) for r in self.relaxations]
        start = [r.base() + c for r, c in zip(self.relaxations, constants)]
        partial = _Partial(
            np.zeros(1, np.int64),
            {},
            {},
            np.zeros((1, 4)),
            np.zeros(1, np.int64),
            np.array([start]),
        )
        self._aside = np.inf
        trail: list[tuple[Ints, Ints]] = []
        for v in range(len(self._own)):
            if time.monotonic() > deadline:
                return Found(np.zeros((0, len(self._own)), np.int64), 0.0)
            seen = self._seen(v + 1)
            partial = self._extend(partial, v, best, 8 * width)
            partial = partial.take(self._undominated(partial, v, seen))
            partial = partial.take(self._lowest(partial.bounds.max(1), width))
            if not len(partial):
                return Found(np.zeros((0, len(self._own)), np.int64), self._aside)
            trail.append((partial.parents, partial.chosen[v]))
            partial.chosen = {w: partial.chosen[w] for w in seen}
            partial.wanted = {k: w for k, w in partial.wanted.items() if self._last[k] > v}
        rows = np.argsort(partial.sums[:, 0] + partial.sums[:, 1:3].max(1), kind="stable")[:8]
        choices = np.zeros((len(rows), len(trail)), np.int64)
        for v, (parents, chosen) in reversed(list(enumerate(trail))):
            choices[:, v] = chosen[rows]
            rows = parents[rows]
        return Found(choices, self._aside)

    def _lowest(self, bounds: Floats, count: int) -> Ints:
        """Return the `count` lowest bounds' places; remember the lowest of the others."""
        if len(bounds) <= count:
            return np.arange(len(bounds))
        ranked = np.argpartition(bounds, count)
        self._aside = min(self._aside, float(bounds[ranked[count:]].min()))
        return ranked[:count]

    def _constant(self, relaxation: Relaxation) -> float:
        if self.cap is None:
            return 0.0
        return relaxation.weights.byte * (self._floor - self.cap)

    def _extend(self, partial: _Partial, v: int, best: float, width: int) -> _Partial:
        """Add variable v in all ways that stay below the best."""
        limit = best * (1.0 - TOLERANCE)
        steps = [relaxation.conditional(v) for relaxation in self.relaxations]
        raised = _raised(steps[0], partial)
        rows, places = np.nonzero(raised < limit)
        few = self._lowest(raised[rows, places], width)
        rows, places = rows[few], places[few]
        first = raised[rows, places]
        longer = partial.take(rows)
        longer.parents = rows
        longer.chosen[v] = places
        longer.sums += self._own[v][places]
        longer.burst = np.maximum(longer.burst, self._burst[v][places])
        longer.bounds[:, 0] = first
        for k, step in enumerate(steps[1:], 1):
            longer.bounds[:, k] += _rise(step, longer.chosen, v)
        for table in self._touching[v]:
            self._charge(table, v, longer)
        forward, backward, sync, held = longer.sums.T
        ok = (longer.bounds < limit).all(1) & (forward + np.maximum(backward, sync) < limit)
        if self.cap is not None:
            ok &= held + np.maximum(longer.burst, self._floor) <= self.cap
        return longer.take(ok)

    def _charge(self, table: int, v: int, partial: _Partial) -> None:
        """Add, in place, what moving one tensor costs more now that v is chosen.

        The bound has charged each consumer its share of its move. What is known to be due for a
        target label is the shares of *all* consumers that are chosen, as soon as one wants it.
        """
        links = [self.live.links[k] for k in self._links[table]]
        source = links[0].first
        if source > v:
            return
        moves = self.live.tables[table].moves
        s = links[0].first_labels[partial.chosen[source]]
        old = [link for link in links if link.second < v and source != v]
        new = [link for link in links if link.second == v or (link.second < v and source == v)]
        paid = sum((link.share for link in old), np.zeros(len(links[0].share)))
        wanted = partial.wanted.get(table, np.full((len(s), 0), -1))
        for link in new:
            t = link.second_labels[partial.chosen[link.second]]
            others = (wanted >= 0) & (wanted != t[:, None])
            fresh = (wanted != t[:, None]).all(1)
            for kind, column in ((0, moves.forward), (1, moves.backward), (3, moves.held)):
                partial.sums[:, kind] += np.where(fresh, column[s, t], 0)
            for k, relaxation in enumerate(self.relaxations):
                weight = relaxation.weighted(table)
                due = np.where(others, link.share[wanted] * weight[s[:, None], wanted], 0.0)
                due_now = np.where(fresh, paid[t] * weight[s, t], 0.0)
                partial.bounds[:, k] += due_now + due.sum(1)
            paid = paid + link.share
            wanted = np.column_stack((wanted, np.where(fresh, t, -1)))
            wanted = -np.sort(-wanted, axis=1)
            wanted = wanted[:, (wanted >= 0).any(0)]
        if len(links) > 1:
            partial.wanted[table] = wanted

    def _undominated(self, partial: _Partial, done: int, seen: dict[int, Ints]) -> Ints:
        """Return the rows that no other row makes needless.

        Rows compete if the variables left see the same of them: `seen` has classes by candidate.
        """
        count = len(partial)
        if count < 2:
            return np.arange(count)
        group = np.zeros(count, np.int64)
        columns = [classes[partial.chosen[v]] for v, classes in seen.items()]
        for table, wanted in partial.wanted.items():
            columns += list(wanted.T + 1) if self._last[table] > done else []
        for column in columns:
            joined = group * (int(column.max()) + 1) + column
            group = np.unique(joined, return_inverse=True)[1]
        forward, backward, sync, held = partial.sums.T
        slow, fast = forward + backward, forward + sync
        if self.cap is None:
            order = np.lexsort((fast, slow, group))
            rank = np.empty(count, np.int64)
            rank[np.argsort(fast[order], kind="stable")] = np.arange(count)
            # Groups get disjoint, falling ranges, so that the running minimum starts anew in each.
            value = rank - group[order] * count
            lowest = np.minimum.accumulate(value)
            keep = np.ones(count, bool)
            keep[1:] = value[1:] < lowest[:-1]
            return order[keep]
        burst = np.maximum(partial.burst, self._floor)
        order = np.lexsort((held, slow, group))
        values = np.column_stack((slow, fast, held, burst))[order]
        ordered = group[order]
        keep = np.ones(count, bool)
        for step in range(1, min(count, 33)):
            same = ordered[step:] == ordered[:-step]
            if not same.any():
                break
            keep[step:] &= ~(same & (values[:-step] <= values[step:]).all(1))
        return order[keep]

    def _seen(self, done: int) -> dict[int, Ints]:
        """Return the first variables' classes of candidates that the others can tell apart.

        They see how a tensor was left, and, if its source is still to come, how it is wanted.
        """
        columns: dict[int, Ints] = {}
        for table, links in enumerate(self._links):
            if self._last[table] < done:
                continue
            first = self.live.links[links[0]]
            members = [(first.first, first.first_labels)]
            if first.first >= done:
                members = [
                    (self.live.links[k].second, self.live.links[k].second_labels) for k in links
                ]
            for v, labels in members:
                if v < done:
                    known = columns.get(v)
                    joined = labels if known is None else known * (int(labels.max()) + 1) + labels
                    columns[v] = np.unique(joined, return_inverse=True)[1]
        return columns
