"""The exact minimum of a sum of costs, by eliminating one variable after another.

The bucket of a variable holds the costs it shares with variables that are eliminated later, its
`parents`. Minimised over the variable, a bucket is a cost of the parents alone, which goes to the
bucket of the first of them. So the work is the product of the sizes in a bucket, and networks that
are chains of small loops need no more than three variables at a time.

Going back from the last bucket to the first gives the least sum with each candidate of each
variable. A bucket that would grow too large is broken into several, each of which chooses for
itself: then the sum is a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import numpy as np

from tilewise.planner.solve.problem import Floats, Ints

CHUNK = 1 << 15
"""How many entries to minimise at once: as many as stay in the cache."""
CHUNK_OF_ALL = 1 << 17
"""How many entries to look at in several ways at once."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A cost of some variables; `classes` has, for each, the place on its axis by candidate.

    Every place on an axis must be some candidate's.
    """

    variables: tuple[int, ...]
    classes: tuple[Ints, ...]
    values: Floats


@dataclass(frozen=True, slots=True)
class Order:
    """In which order to eliminate variables, and how many sums of costs that takes."""

    variables: tuple[int, ...]
    work: int
    largest: int


def good_order(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    given: Iterable[int] | None = None,
    *,
    last: int | None = None,
) -> Order:
    """Eliminate next whichever variable has the smallest bucket, or as the given order says.

    One variable may have to be the `last`.
    """
    following = None if given is None else iter(given)
    scopes = [dict(zip(f.variables, f.values.shape)) for f in factors]
    touching: list[set[int]] = [set() for _ in sizes]
    for k, scope in enumerate(scopes):
        for v in scope:
            touching[v].add(k)

    def bucket(v: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for k in touching[v]:
            for u, size in scopes[k].items():
                found[u] = min(found.get(u, 1) * size, sizes[u])
        return found | {v: sizes[v]}

    weights = {v: prod(bucket(v).values()) for v in range(len(sizes))}

    def preferred(u: int) -> tuple[bool, int]:
        return u == last, weights[u]

    order: list[int] = []
    work = largest = 0
    while weights:
        v = next(following) if following is not None else min(weights, key=preferred)
        scope = bucket(v)
        work += weights[v]
        largest = max(largest, weights.pop(v))
        order.append(v)
        del scope[v]
        gone = touching[v].copy()
        scopes.append(scope)
        for u in scope:
            touching[u] -= gone
            touching[u].add(len(scopes) - 1)
        for u in scope:
            weights[u] = prod(bucket(u).values())
    return Order(tuple(order), work, largest)


class Bucket:
    """The costs of a variable together with some of its parents, and their minimum over it."""

    def __init__(
        self, variable: int, own: Floats, factors: Sequence[Factor], deadline: float = inf
    ) -> None:
        self.variable, self.own, self.factors = variable, own, factors
        self.parents = tuple(
            dict.fromkeys(u for f in factors for u in f.variables if u != variable)
        )
        joint: dict[int, Ints] = {}
        first: dict[int, Ints] = {variable: np.arange(len(own))}
        for u in self.parents:
            joint[u], first[u] = _joint([_classes(f, u) for f in factors if u in f.variables])
        # the first parent has most classes, as blocks are made of some of its
        self.parents = tuple(sorted(self.parents, key=lambda u: -len(first[u])))
        self.classes = [joint[u] for u in self.parents]
        self._shape = tuple(len(first[u]) for u in self.parents)
        self._first = first
        self.message = self._minimum(deadline)

    @property
    def size(self) -> int:
        """The number of entries."""
        return prod(self._shape) * len(self.own)

    def factor(self) -> Factor:
        """Return the minimum as a cost of the parents."""
        return Factor(self.parents, tuple(self.classes), self.message)

    def table(self) -> Floats:
        """Return all entries, by classes of the parents and by candidate."""
        return np.asarray(sum(self._spread) + np.zeros((*self._shape, 1)))

    def rows(self, chosen: Mapping[int, Ints]) -> Floats:
        """Return what each candidate adds to the sum, for rows of candidates of the parents.

        Without parents there is one row.
        """
        found = self.own - np.atleast_1d(self.message[self._places(chosen)])[:, None]
        for values, factor in self._by_parents:
            places = tuple(
                classes[chosen[u]]
                for u, classes in zip(factor.variables, factor.classes)
                if u != self.variable
            )
            found += values[places]
        return found

    def rows_of(self, chosen: Mapping[int, Ints]) -> Floats:
        """Return costs of each candidate, for rows of candidates of the parents, as they are.

        Unlike `rows`, which is faster for very many, it needs no memory but for the result.
        """
        found = self.own[None, :]
        for factor in self.factors:
            places = (
                classes[None, :] if u == self.variable else classes[chosen[u]][:, None]
                for u, classes in zip(factor.variables, factor.classes)
            )
            found = found + factor.values[tuple(places)]
        return found

    def at(self, chosen: Mapping[int, Ints]) -> Floats:
        """Return what the chosen candidates add to the sum."""
        message = self.message[self._places(chosen)]
        found = self.own[chosen[self.variable]] - message
        for factor in self.factors:
            places = (c[chosen[u]] for u, c in zip(factor.variables, factor.classes))
            found += factor.values[tuple(places)]
        return np.asarray(found)

    def _places(self, chosen: Mapping[int, Ints]) -> tuple[Ints, ...]:
        return tuple(classes[chosen[u]] for u, classes in zip(self.parents, self.classes))

    @cached_property
    def _by_parents(self) -> list[tuple[Floats, Factor]]:
        """Each factor by the classes of its parents and by candidate."""
        found = []
        for factor in self.factors:
            axis = factor.variables.index(self.variable)
            values = np.moveaxis(factor.values, axis, -1)
            found.append((values[..., factor.classes[axis]], factor))
        return found

    @property
    def _spread(self) -> list[Floats]:
        """The costs with an axis for each parent, of size 1 where they do not depend on it."""
        found: list[Floats] = [self.own.reshape((1,) * len(self.parents) + (-1,))]
        scope = (*self.parents, self.variable)
        for factor in self.factors:
            picked = [c[self._first[u]] for u, c in zip(factor.variables, factor.classes)]
            values = factor.values[np.ix_(*picked)]
            axes = sorted(range(len(picked)), key=lambda i: scope.index(factor.variables[i]))
            shape = [len(self._first[u]) if u in factor.variables else 1 for u in scope]
            found.append(values.transpose(axes).reshape(shape))
        return found

    def least(
        self, above: Floats, factors: Sequence[Factor], deadline: float
    ) -> tuple[Floats, list[Floats]]:
        """Return the least entry of each candidate, and of each entry of some of its factors.

        What is `above` is added, by classes of the parents.
        """
        scope = (*self.parents, self.variable)
        own = np.full(len(self.own), np.inf)
        onto = [_Onto(factor, scope, self._first) for factor in factors]
        for some, table in self._blocks(CHUNK_OF_ALL, deadline):
            table = table + above[some][..., None]
            np.minimum(own, table.min(axis=tuple(range(table.ndim - 1))), out=own)
            for one in onto:
                one.take(table, some)
        return own, [one.values() for one in onto]

    def _minimum(self, deadline: float) -> Floats:
        message = np.empty(self._shape)
        for some, table in self._blocks(CHUNK, deadline):
            message[some] = table.min(axis=-1)
        return message

    def _blocks(self, entries: int, deadline: float) -> Iterator[tuple[slice | tuple[()], Floats]]:
        """Yield all entries, about so many at once, by places of the first parent.

        Without parents they come together.
        """
        spread = self._spread
        if not self.parents:
            yield (), np.asarray(sum(spread))
            return
        step = max(entries * self._shape[0] // max(self.size, 1), 1)
        for begin in range(0, self._shape[0], step):
            in_time(deadline)
            some = slice(begin, begin + step)
            first, *others = (values[some] if len(values) > 1 else values for values in spread)
            yield some, np.asarray(sum(others, first))  # some factor has each parent


class Elimination:
    """Buckets of all variables, and what follows from them.

    Args:
        costs: each variable's own cost by candidate.
        factors: the costs of several variables.
        order: all variables, the first to be eliminated first.
        largest: the most entries of a bucket.
        deadline: when to give up, by the monotonic clock.

    Raises:
        TimeoutError: time is up, here or in `marginals`.
    """

    def __init__(
        self,
        costs: Sequence[Floats],
        factors: Sequence[Factor],
        order: Sequence[int],
        largest: int,
        deadline: float = inf,
    ) -> None:
        self.order, self.deadline = tuple(order), deadline
        self.buckets: list[list[Bucket]] = [[] for _ in costs]
        self._sent: dict[int, tuple[int, Bucket]] = {}
        self.least = 0.0
        turn = {v: k for k, v in enumerate(order)}
        waiting: list[list[Factor]] = [[] for _ in costs]
        for factor in factors:
            waiting[min(factor.variables, key=turn.__getitem__)].append(factor)
        for v in order:
            in_time(deadline)
            groups = _groups(v, costs[v], waiting[v], largest)
            for group in groups:
                share = 1.0 if len(groups) == 1 else len(group) / max(len(waiting[v]), 1)
                bucket = Bucket(v, share * costs[v], group, deadline)
                self.buckets[v].append(bucket)
                if not bucket.parents:
                    self.least += float(bucket.message)
                    continue
                to = min(bucket.parents, key=turn.__getitem__)
                message = bucket.factor()
                waiting[to].append(message)
                self._sent[id(message)] = v, bucket

    @property
    def exact(self) -> bool:
        """Whether no bucket was broken."""
        return all(len(buckets) == 1 for buckets in self.buckets)

    def best(self) -> list[int]:
        """Return candidates with the least sum, if no bucket was broken."""
        chosen: dict[int, Ints] = {}
        for v in reversed(self.order):
            rows = [bucket.rows(chosen)[0] for bucket in self.buckets[v]]
            chosen[v] = np.array([np.sum(rows, axis=0).argmin()])
        return [int(chosen[v][0]) for v in range(len(self.buckets))]

    def with_last(self) -> tuple[Floats, list[Ints]]:
        """Return the least sum with each candidate of the last variable, and who has it.

        That is a list of candidates for each variable. No bucket may be broken.
        """
        last = self.order[-1]
        (bucket,) = self.buckets[last]
        table = bucket.table()
        chosen = {last: np.arange(len(table))}
        for v in reversed(self.order[:-1]):
            (one,) = self.buckets[v]
            chosen[v] = np.broadcast_to(one.rows_of(chosen).argmin(1), len(table))
        return table + (self.least - float(bucket.message)), [chosen[v] for v in range(len(chosen))]

    def marginals(self) -> list[Floats]:
        """Return the least sum with each candidate of each variable; no bucket may be broken."""
        outside: dict[int, Floats] = {}
        found: list[Floats] = [np.zeros(0)] * len(self.buckets)
        for v in reversed(self.order):
            (bucket,) = self.buckets[v]
            sent = [factor for factor in bucket.factors if id(factor) in self._sent]
            above = outside.pop(v) if bucket.parents else np.asarray(self.least - bucket.message)
            found[v], least = bucket.least(above, sent, self.deadline)
            for factor, values in zip(sent, least, strict=True):
                child, _ = self._sent[id(factor)]
                outside[child] = values - factor.values
        return found


def in_time(deadline: float) -> None:
    """Raise TimeoutError if a deadline is over."""
    if time.monotonic() > deadline:
        raise TimeoutError("solve: time is up")


class _Onto:
    """The least of a bucket's entries by the classes of one of its factors."""

    def __init__(self, factor: Factor, scope: Sequence[int], first: Mapping[int, Ints]) -> None:
        self._gone = tuple(axis for axis, u in enumerate(scope) if u not in factor.variables)
        left = [u for u in scope if u in factor.variables]
        self._turned = [left.index(u) for u in factor.variables]
        places = [_classes(factor, u)[first[u]] for u in left]
        shape = [factor.values.shape[factor.variables.index(u)] for u in left]
        self._rows = places.pop(0) if left[0] == scope[0] and len(scope) > 1 else None
        start = 0 if self._rows is None else 1
        self._groups = [
            (axis, *_grouped(at))
            for axis, at in enumerate(places, start)
            if not np.array_equal(at, np.arange(shape[axis]))
        ]
        self._values = np.full(shape, np.inf)

    def take(self, table: Floats, some: slice | tuple[()]) -> None:
        """Take a block of entries, of some places of the first of all axes."""
        values = table.min(axis=self._gone) if self._gone else table
        for axis, rank, starts in self._groups:
            values = np.minimum.reduceat(values.take(rank, axis), starts, axis)
        if self._rows is None:
            np.minimum(self._values, values, out=self._values)
        else:
            np.minimum.at(self._values, self._rows[some], values)

    def values(self) -> Floats:
        """Return what was the least, with the axes of the factor."""
        return self._values.transpose(self._turned)


def _grouped(places: Ints) -> tuple[Ints, Ints]:
    """Return an order by place, and where each place begins."""
    rank = np.argsort(places, kind="stable")
    return rank, np.flatnonzero(np.diff(places[rank], prepend=-1))


def _groups(v: int, own: Floats, factors: Sequence[Factor], largest: int) -> list[list[Factor]]:
    """Put the factors of a bucket together as far as the number of entries allows."""
    groups: list[list[Factor]] = []
    scopes: list[dict[int, int]] = []
    for factor in sorted(factors, key=lambda f: -f.values.size):
        sizes = {u: n for u, n in zip(factor.variables, factor.values.shape) if u != v}
        for group, scope in zip(groups, scopes):
            joined = {
                u: min(scope.get(u, 1) * sizes.get(u, 1), len(_classes_any(group, factor, u)))
                for u in (*scope, *sizes)
            }
            if prod(joined.values()) * len(own) <= largest:
                group.append(factor)
                scope.update(joined)
                break
        else:
            groups.append([factor])
            scopes.append(sizes)
    return groups or [[]]


def _classes(factor: Factor, u: int) -> Ints:
    return factor.classes[factor.variables.index(u)]


def _classes_any(group: Sequence[Factor], factor: Factor, u: int) -> Ints:
    """Return some array with an entry for each candidate of a variable."""
    return next(_classes(f, u) for f in (factor, *group) if u in f.variables)


def _joint(columns: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return classes that tell apart what any of the columns does, and a candidate of each."""
    joint = columns[0]
    for column in columns[1:]:
        if column is not joint:
            code = joint * (int(column.max()) + 1) + column
            joint = np.unique(code, return_inverse=True)[1].reshape(-1)
    first = np.empty(int(joint.max()) + 1, np.int64)
    first[joint[::-1]] = np.arange(len(joint))[::-1]
    return joint, first
