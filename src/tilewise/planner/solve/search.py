"""The exact phase: all assignments that may beat the best one, one variable after another.

A partial assignment chooses a candidate for the first variables. It is dropped when

- its lower bound, known costs plus the least that the rest can add (see eliminate.py), is not below
  the best assignment's time, for any of the weights given; or
- another one that looks the same to the variables that are left costs no more in any way.

Variables are chosen in the reverse of the order in which they were eliminated.

If the number of partial assignments grows above a width, those with the highest bounds are set
aside, and the lowest of their bounds limits what is proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise.planner.solve.eliminate import Bucket, in_time
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.problem import Floats, Ints
from tilewise.planner.solve.terms import Terms

TOLERANCE = 1e-9
"""An assignment that is better by less than this part is not looked for."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best complete assignments found (live candidates), and a bound of all that are left."""

    choices: Ints
    bound: float


@dataclass(slots=True)
class _Partial:
    """Partial assignments, one a row.

    Args:
        parents: the row of each among the partial assignments that were kept a variable earlier.
        chosen: the variables' candidates, for those that the variables left still look at.
        wanted: by table, the distinct target labels wanted so far, falling, and -1 for none.
        sums: forward, backward, sync, and bytes held in each sum.
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


CHUNK = 1 << 22
"""The most bounds to compute at once."""
BESIDE = 33
"""With so many others a partial assignment is compared at most."""
MOST = 1 << 62
"""The largest number that tells rows apart."""


class Search:
    """Enumeration with bounds over the live candidates of a problem."""

    def __init__(self, live: Live, terms: Sequence[Terms], cap: int | None) -> None:
        """Take the live problem and its costs under some weights, all with the same order."""
        self.live, self.terms, self.cap = live, terms, cap
        self.order = tuple(reversed(terms[0].order.variables))
        self._turn = {v: k for k, v in enumerate(self.order)}
        problem = live.problem
        self._own = [
            np.column_stack((v.forward, v.backward, v.sync, v.held.astype(float)))[c]
            for v, c in zip(problem.variables, live.candidates)
        ]
        self._burst = [v.burst[c] for v, c in zip(problem.variables, live.candidates)]
        self._floor = max(int(burst.min()) for burst in self._burst)
        least = np.array([own[:, 3:].min(0) for own in self._own])[list(self.order)]
        self._rest = np.cumsum(least[::-1], 0)[::-1] - least
        self._links: list[list[int]] = [[] for _ in live.tables]
        self._touching: list[list[int]] = [[] for _ in problem.variables]
        for k, link in enumerate(live.links):
            self._links[link.table].append(k)
            for v in (link.first, link.second):
                if link.table not in self._touching[v]:
                    self._touching[v].append(link.table)
        self._last = [
            max(self._turn[v] for k in links for v in (live.links[k].first, live.links[k].second))
            for links in self._links
        ]

    def run(self, best: float, width: int, deadline: float) -> Found:
        """Look for assignments below `best` seconds.

        After the deadline nothing is found, but the bounds of partial assignments say something.

        Raises:
            TimeoutError: the deadline was over before there were any.
        """
        nothing = np.zeros((0, len(self._own)), np.int64)
        buckets = [terms.eliminate(deadline) for terms in self.terms]
        start = [e.least + self._constant(t) for e, t in zip(buckets, self.terms)]
        partial = _Partial(
            np.zeros(1, np.int64),
            {},
            {},
            np.zeros((1, self._own[0].shape[1])),
            np.zeros(1, np.int64),
            np.array([start]),
        )
        self._aside, self._deadline = np.inf, deadline
        trail: list[tuple[Ints, Ints]] = []
        for turn, v in enumerate(self.order):
            seen = self._seen(turn + 1)
            try:
                partial = self._extend(partial, v, [e.buckets[v] for e in buckets], best, 8 * width)
                partial = partial.take(self._undominated(partial, turn, seen))
            except TimeoutError:
                return Found(nothing, min([self._aside, *partial.bounds.max(1).tolist()]))
            partial = partial.take(self._lowest(partial.bounds.max(1), width))
            if not len(partial):
                return Found(nothing, self._aside)
            trail.append((partial.parents, partial.chosen[v]))
            partial.chosen = {w: partial.chosen[w] for w in seen}
            partial.wanted = {k: w for k, w in partial.wanted.items() if self._last[k] > turn}
        rows = np.argsort(partial.sums[:, 0] + partial.sums[:, 1:3].max(1), kind="stable")[:8]
        choices = np.zeros((len(rows), len(trail)), np.int64)
        for v, (parents, chosen) in reversed(list(zip(self.order, trail))):
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

    def _constant(self, terms: Terms) -> float:
        if self.cap is None:
            return 0.0
        return sum(terms.weights.byte) * (self._floor - self.cap)

    def _extend(
        self, partial: _Partial, v: int, buckets: list[list[Bucket]], best: float, width: int
    ) -> _Partial:
        """Add variable v in all ways that stay below the best."""
        in_time(self._deadline)
        limit = best * (1.0 - TOLERANCE)
        rows, places, first = self._below(partial, v, buckets[0], limit, width)
        longer = partial.take(rows)
        longer.parents = rows
        longer.chosen[v] = places
        longer.sums += self._own[v][places]
        longer.burst = np.maximum(longer.burst, self._burst[v][places])
        longer.bounds[:, 0] = first
        for k, some in enumerate(buckets[1:], 1):
            for bucket in some:
                longer.bounds[:, k] += bucket.at(longer.chosen)
        for table in self._touching[v]:
            self._charge(table, v, longer)
        forward, backward, sync = longer.sums[:, :3].T
        in_time(self._deadline)
        ok = (longer.bounds < limit).all(1) & (forward + np.maximum(backward, sync) < limit)
        if self.cap is not None:
            held = longer.sums[:, 3:] + self._rest[self._turn[v]]
            ok &= held.max(1) + np.maximum(longer.burst, self._floor) <= self.cap
        return longer.take(ok)

    def _below(
        self, partial: _Partial, v: int, buckets: list[Bucket], limit: float, width: int
    ) -> tuple[Ints, Ints, Floats]:
        """Return rows and candidates of v whose first bound is below a limit, with the bound.

        Those with the lowest ones, if there are more than `width`.
        """
        step = max(CHUNK // len(self._burst[v]), 1)
        found: list[tuple[Ints, Ints, Floats]] = []
        for begin in range(0, len(partial), step):
            in_time(self._deadline)
            some = slice(begin, begin + step)
            chosen = {w: places[some] for w, places in partial.chosen.items()}
            raised = partial.bounds[some, :1] + sum(bucket.rows(chosen) for bucket in buckets)
            rows, places = np.nonzero(raised < limit)
            found.append((rows + begin, places, raised[rows, places]))
            if sum(len(bounds) for *_, bounds in found) > 2 * width:
                found = [self._few(found, width)]
        return self._few(found, width)

    def _few(
        self, found: Sequence[tuple[Ints, Ints, Floats]], width: int
    ) -> tuple[Ints, Ints, Floats]:
        rows, places, bounds = (np.concatenate(column) for column in zip(*found))
        few = self._lowest(bounds, width)
        return rows[few], places[few], bounds[few]

    def _charge(self, table: int, v: int, partial: _Partial) -> None:
        """Add, in place, what moving one tensor costs more now that v is chosen.

        The bound has charged each consumer its share of its move. What is known to be due for a
        target label is the shares of *all* consumers that are chosen, as soon as one wants it.
        """
        links = [self.live.links[k] for k in self._links[table]]
        source, now = links[0].first, self._turn[v]
        if self._turn[source] > now:
            return
        before = [link for link in links if self._turn[link.second] < now]
        moves, counts = self.live.tables[table].moves, self.live.tables[table].counts
        s = links[0].first_labels[partial.chosen[source]]
        old = [] if source == v else before
        new = before if source == v else [link for link in links if link.second == v]
        paid = sum((link.share for link in old), np.zeros(len(links[0].share)))
        wanted = partial.wanted.get(table, np.full((len(s), 0), -1))
        for link in new:
            t = link.second_labels[partial.chosen[link.second]]
            others = (wanted >= 0) & (wanted != t[:, None])
            fresh = (wanted != t[:, None]).all(1)
            for kind, column in ((0, moves.forward), (1, moves.backward)):
                partial.sums[:, kind] += np.where(fresh, column[s, t], 0)
            partial.sums[:, 3:] += np.where(fresh, moves.held[s, t], 0)[:, None] * counts
            in_time(self._deadline)
            for k, terms in enumerate(self.terms):
                if table in terms.exact:
                    continue  # the buckets charge it once already
                weight = terms.weighted(table)
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
        columns = [classes[partial.chosen[v]] for v, classes in seen.items()]
        for table, wanted in partial.wanted.items():
            columns += list(wanted.T + 1) if self._last[table] > done else []
        group = _alike(columns, count)
        forward, backward, sync = partial.sums[:, :3].T
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
        held = partial.sums[:, 3:]
        order = np.lexsort((held.max(1), slow, group))
        burst = np.maximum(partial.burst, self._floor)
        # in this order no row of a group is slower than a later one
        columns = [column[order] for column in (group, fast, *held.T, burst)]
        keep = np.ones(count, bool)
        for step in range(1, min(count, BESIDE)):
            in_time(self._deadline)
            group, *values = columns
            worse = group[step:] == group[:-step]
            if not worse.any():
                break
            for column in values:
                worse &= column[:-step] <= column[step:]
            keep[step:] &= ~worse
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
            if self._turn[first.first] >= done or table in self.terms[0].exact:
                members += [
                    (self.live.links[k].second, self.live.links[k].second_labels) for k in links
                ]
            for v, labels in members:
                if self._turn[v] < done:
                    known = columns.get(v)
                    joined = labels if known is None else known * (int(labels.max()) + 1) + labels
                    columns[v] = np.unique(joined, return_inverse=True)[1]
        return columns


def _alike(columns: Sequence[Ints], count: int) -> Ints:
    """Return the same number, from 0 on, for rows that are the same in all columns."""
    group, most = np.zeros(count, np.int64), 1
    for column in columns:
        values = int(column.max()) + 1
        if most * values > MOST:
            group = np.unique(group, return_inverse=True)[1]
            most = count
        group, most = group * values + column, most * values
    return np.asarray(np.unique(group, return_inverse=True)[1])
