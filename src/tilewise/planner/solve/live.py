"""The candidates that may still be part of a better assignment, and the moves between them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tilewise.host import memory_bytes
from tilewise.planner.solve.problem import Floats, Ints, MoveCost, Moves, Problem
from tilewise.planner.solve.weights import Weights

MOVE_BYTES, HELD_BYTES = 32, 8
"""To know a move: seconds forward, backward, weighted and in between; what it holds, if any."""
MOVE_S = 1e-7
"""How long it takes to price a move, about."""
MUCH = 4
"""How many times as many moves as are known may be wanted before all are computed anew."""
MEMORY, TIME = 0.5, 0.75
"""Which part of this machine's memory, and of the time that is left, moves may take."""


@dataclass(slots=True)
class Table:
    """What moves cost between the labels that live candidates have.

    Only the block `rows` × `columns` is known; outside it a move is taken to cost nothing, which
    keeps every bound a bound. `shares` has a row a consumer: the part of a move to each target
    label that it pays in bounds; the rows add up to one. `key` is that of the same moves, whatever
    candidates live.
    """

    key: tuple[int, ...]
    cost: MoveCost
    sources: Ints
    targets: Ints
    rows: Ints
    columns: Ints
    moves: Moves
    shares: Floats
    counts: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether all live labels are in the known block."""
        return len(self.rows) == len(self.sources) and len(self.columns) == len(self.targets)

    def weigh(self, weights: Weights, penalty: float) -> Floats:
        """Return the known block's costs as one number each; those of broken ties are infinite."""
        cost = weights.of_moves(self.moves, self.counts)
        return np.minimum(cost, penalty, out=cost)


@dataclass(slots=True)
class Link:
    """Two variables that share a table: a tensor's source and one of its consumers, or a tie.

    `first_labels` and `second_labels` index the table by live candidate. `share` is the part of a
    move, by target label, that this consumer pays when several want the tensor in that label.
    """

    table: int
    first: int
    second: int
    first_labels: Ints
    second_labels: Ints
    share: Floats


class Live:
    """A problem whose candidates are removed as soon as they are proven useless."""

    def __init__(
        self,
        problem: Problem,
        entries: int,
        candidates: Sequence[Ints] | None = None,
        before: Live | None = None,
    ) -> None:
        """Start from some candidates or all, and know about `entries` moves of each tensor.

        With the candidates and moves of `before`, a problem with the same variables, if given.
        """
        self.problem = problem
        self.entries = entries
        self.candidates = [np.arange(k) for k in problem.choices]
        if before is not None:
            self.candidates = list(before.candidates)
        if candidates is not None:
            self.candidates = list(candidates)
        self.tables: list[Table] = [] if before is None else before.tables
        self.links: list[Link] = []
        self._connect(None)

    def keep(self, masks: Sequence[np.ndarray], scores: Sequence[Floats] | None = None) -> None:
        """Keep the candidates that `masks` mark; lower `scores` are more worth knowing."""
        self.candidates = [c[mask] for c, mask in zip(self.candidates, masks)]
        if scores is not None:
            scores = [score[mask] for score, mask in zip(scores, masks)]
        if all(len(c) for c in self.candidates):
            self._connect(scores)

    def grow(self, deadline: float) -> bool:
        """Know about more moves from the next time on: all of them, if memory and time allow.

        Returns whether there will be more.
        """
        sizes = [len(table.sources) * len(table.targets) for table in self.tables]
        holds = any(table.moves.held.strides != (0, 0) for table in self.tables)
        room = MEMORY * memory_bytes() / (MOVE_BYTES + HELD_BYTES * holds)
        most = min(room, TIME * (deadline - time.monotonic()) / MOVE_S)
        before = self.entries
        while self.entries < max(sizes) and sum(min(k, 2 * self.entries) for k in sizes) <= most:
            self.entries *= 2
        return self.entries > before

    def lean(self, places: Sequence[int], part: float) -> None:
        """Let those pay for a shared tensor's moves who move it in an assignment that is too cheap.

        Args:
            places: a live candidate for each variable.
            part: how much of the shares to change.
        """
        paying: dict[tuple[int, int], list[Link]] = {}
        for link in self.links:
            table = self.tables[link.table]
            if len(table.shares) > 1:
                s = link.first_labels[places[link.first]]
                t = int(link.second_labels[places[link.second]])
                if table.sources[s] != table.targets[t]:
                    paying.setdefault((link.table, t), []).append(link)
        for (k, t), links in paying.items():
            self.tables[k].shares[:, t] *= 1.0 - part
            for link in links:
                link.share[t] += part / len(links)

    def slowest(self) -> float:
        """Return seconds that no assignment takes, infinite where moves are not known.

        Those of broken ties do not count.
        """
        if not self.whole:
            return np.inf
        pairs = zip(self.problem.variables, self.candidates, strict=True)
        own = sum(float((v.forward + v.backward + v.sync)[c].max()) for v, c in pairs)
        moved = 0.0
        for table in self.tables:
            seconds = table.moves.forward + table.moves.backward
            moved += len(table.shares) * float(seconds[np.isfinite(seconds)].max(initial=0.0))
        return 1.001 * (own + moved) + 1e-9

    def some(self, places: Sequence[Ints]) -> list[Ints]:
        """Return the candidates at some places among those that are live."""
        return [c[some] for c, some in zip(self.candidates, places, strict=True)]

    def places(self, candidates: Sequence[Ints]) -> list[Ints]:
        """Return the places of candidates, leaving out those that are not live."""
        pairs = zip(self.candidates, candidates, strict=True)
        return [np.flatnonzero(np.isin(live, some, assume_unique=True)) for live, some in pairs]

    @property
    def sizes(self) -> list[int]:
        """The number of live candidates of each variable."""
        return [len(c) for c in self.candidates]

    @property
    def moves(self) -> int:
        """How many moves are known."""
        return sum(table.moves.forward.size for table in self.tables)

    @property
    def whole(self) -> bool:
        """Whether all moves between live candidates are known."""
        return all(table.whole for table in self.tables)

    def _connect(self, scores: Sequence[Floats] | None) -> None:
        """Build tables and links for the live candidates, with what is already known."""
        before = {table.key: table for table in self.tables}
        self.tables, self.links = [], []
        for transfer in self.problem.transfers:
            first = (transfer.source, transfer.leaves)
            seconds = [(c.variable, c.wants) for c in transfer.consumers]
            self._add(transfer.cost, first, seconds, before, scores, transfer.counts)
        for tie in self.problem.ties:
            members = list(zip(tie.variables, tie.labels))
            for first, second in pairwise(members):
                self._add(_tied, first, [second], before, scores, (0,) * self.problem.sums)

    def _add(
        self,
        cost: MoveCost,
        first: tuple[int, Ints],
        seconds: list[tuple[int, Ints]],
        known: Mapping[tuple[int, ...], Table],
        scores: Sequence[Floats] | None,
        counts: tuple[int, ...],
    ) -> None:
        some = first, *seconds
        key = (id(cost), *(v for v, _ in some), *(id(labels) for _, labels in some))
        before = known.get(key)
        leaves = first[1][self.candidates[first[0]]]
        wants = [labels[self.candidates[variable]] for variable, labels in seconds]
        sources, targets = np.unique(leaves), np.unique(np.concatenate(wants))
        rows_of = np.searchsorted(sources, leaves)
        columns_of = [np.searchsorted(targets, labels) for labels in wants]
        users = np.zeros((len(seconds), len(targets)))
        for user, places in zip(users, columns_of):
            user[places] = 1.0
        shares = _shares(users, targets, before)
        for (variable, _), places, share in zip(seconds, columns_of, shares):
            table = len(self.tables)
            self.links.append(Link(table, first[0], variable, rows_of, places, share))
        source_scores = target_scores = None
        if scores is not None:
            source_scores = _lowest(rows_of, scores[first[0]], len(sources))
            of_targets = [
                _lowest(places, scores[variable], len(targets))
                for (variable, _), places in zip(seconds, columns_of)
            ]
            target_scores = np.min(of_targets, 0)
        rows = np.arange(len(sources))
        columns = np.arange(len(targets))
        if len(sources) * len(targets) > self.entries:
            side = int(self.entries**0.5)
            rows = _best(source_scores, rows, max(side, self.entries // len(targets)))
            columns = _best(target_scores, columns, max(side, self.entries // len(sources)))
            if before is not None:
                rows = np.union1d(rows, _common(sources, before.sources[before.rows]))
                columns = np.union1d(columns, _common(targets, before.targets[before.columns]))
        moves = _moves(cost, sources[rows], targets[columns], before)
        self.tables.append(Table(key, cost, sources, targets, rows, columns, moves, shares, counts))


def _tied(first: Ints, second: Ints) -> Moves:
    """Return moves that are free where two candidates agree, and impossible elsewhere."""
    apart = first[:, None] != second[None, :]
    zero = np.zeros(apart.shape)
    return Moves(np.where(apart, np.inf, 0.0), zero, zero.astype(np.int64))


def _shares(users: Floats, targets: Ints, before: Table | None) -> Floats:
    """Share each target's moves among those that may want it, as `before` if that is known."""
    if before is None:
        return np.asarray(users / users.sum(0))
    shares = users * before.shares[:, np.searchsorted(before.targets, targets)]
    total = shares.sum(0)
    return np.where(total > 0, shares / np.where(total > 0, total, 1.0), users / users.sum(0))


def _lowest(places: Ints, scores: Floats, count: int) -> Floats:
    """Return the lowest score of the candidates at each place."""
    lowest = np.full(count, np.inf)
    np.minimum.at(lowest, places, scores)
    return lowest


def _best(scores: Floats | None, places: Ints, count: int) -> Ints:
    """Return the places with the lowest scores, in order."""
    if scores is not None:
        places = np.argsort(scores, kind="stable")
    return np.sort(places[:count])


def _common(labels: Ints, known: Ints) -> Ints:
    """Return the places of the labels that are known."""
    return np.flatnonzero(np.isin(labels, known, assume_unique=True))


def _moves(cost: MoveCost, sources: Ints, targets: Ints, before: Table | None) -> Moves:
    """Return the moves' costs; what `before` knows is not computed again if it is much."""
    if before is None or MUCH * before.moves.forward.size < len(sources) * len(targets):
        return cost(sources, targets)
    known_sources, known_targets = before.sources[before.rows], before.targets[before.columns]
    rows = np.isin(sources, known_sources, assume_unique=True)
    columns = np.isin(targets, known_targets, assume_unique=True)
    old = before.moves.at(
        np.searchsorted(known_sources, sources[rows]),
        np.searchsorted(known_targets, targets[columns]),
    )
    # known labels first, and then all in order: whole blocks are copied faster than scattered ones
    across = np.argsort(~columns, kind="stable")
    if not columns.all():
        old = old.beside(cost(sources[rows], targets[~columns]))
    if not rows.all():
        old = old.above(cost(sources[~rows], targets[across]))
    down = np.argsort(~rows, kind="stable")
    return old.at(np.argsort(down), np.argsort(across))
