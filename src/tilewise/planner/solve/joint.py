"""All costs of few live candidates as one table, to minimise weighted sums of it again and again.

A row is a candidate of a variable, or a combination of candidates of two or three variables between
which tensors move; a column is a part of the objective: seconds forward, backward and of sync, and
the bytes of each sum. With weights for the columns, variables are eliminated one after another, as
in eliminate.py. What is looked up there again for other weights and fewer candidates is known here
beforehand: which rows a variable's bucket has, and in which order axes come.

A tensor whose readers have few candidates together is charged exactly. Of others, each reader pays
its share: the sum is then a lower bound, and `costs` says what is truly due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewise.planner.solve.eliminate import Factor, good_order
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.problem import Floats, Ints

TOGETHER = 1 << 16
"""How many combinations of tensors' sources and readers there may be to charge these exactly."""

MEMBERS = 30
"""How many variables of one tensor at most: tables may have no more than 64 axes."""

Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Moves of a tensor by labels, with a column for each part; and who has which labels.

    Each of its readers has the share of every move that it pays where each pays a share.
    """

    source: int
    labels: Ints
    readers: tuple[tuple[int, Ints, Floats], ...]
    moves: Floats

    @property
    def members(self) -> list[int]:
        """The source and its readers."""
        return [self.source, *(v for v, *_ in self.readers)]

    def due(self, places: Ints) -> Floats:
        """Return what the moves of an assignment cost."""
        wanted = {int(labels[places[v]]) for v, labels, _ in self.readers}
        return np.asarray(self.moves[self.labels[places[self.source]], list(wanted)].sum(0))

    def charged(self, places: Ints) -> Floats:
        """Return what its readers pay of that where each pays a share."""
        moves = self.moves[self.labels[places[self.source]]]
        wanted = ((int(labels[places[v]]), share) for v, labels, share in self.readers)
        return np.asarray(sum(share[t] * moves[t] for t, share in wanted))


@dataclass(frozen=True, slots=True)
class _Input:
    """What enters a bucket: a term, or the message of a variable; and how to turn its axes."""

    of: int
    message: bool
    turn: tuple[int, ...]
    spread: tuple[slice | None, ...]
    gone: tuple[int, ...]
    back: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """A cost of some variables: those of its parts that are not zero."""

    scope: Scope
    parts: Ints
    values: Floats

    @classmethod
    def of(cls, scope: Scope, values: Floats) -> Term:
        """Leave out parts that are zero: most moves hold no bytes at most moments."""
        parts = np.flatnonzero(values.reshape(-1, values.shape[-1]).any(0))
        return cls(scope, parts, np.ascontiguousarray(values[..., parts]))


class Joint:
    """The costs of some candidates; their places are those among all that there were at first.

    Args:
        own: what each candidate of each variable costs, with a column for each part.
        tensors: what moves between them.
        candidates: the places of those that count.
    """

    def __init__(
        self, own: Sequence[Floats], tensors: Sequence[Tensor], candidates: Sequence[Ints]
    ) -> None:
        self.own, self.tensors, self.candidates = own, tensors, list(candidates)
        self.parts = own[0].shape[1]
        self.live = sum(map(len, candidates))
        self.undecided = sum(len(some) > 1 for some in candidates)
        self.shared: list[Tensor] = []
        terms: dict[Scope, Floats] = {(): np.zeros(self.parts)}
        for v, some in enumerate(candidates):
            _add(terms, (v,), own[v][some])
        combinations = 0
        for tensor in sorted(tensors, key=self._combinations):
            combinations += self._combinations(tensor)
            self._charge(terms, tensor, together=combinations <= TOGETHER)
        self.constant = terms.pop(())
        self.terms = [Term.of(scope, values) for scope, values in terms.items()]
        factors = [
            Factor(scope, tuple(map(np.arange, values.shape)), values[..., 0])
            for scope, values in terms.items()
            if len(scope) > 1
        ]
        order = good_order([len(some) for some in candidates], factors)
        self.order, self.work = order.variables, order.work
        self.steps = self._schedule()

    @classmethod
    def of(cls, live: Live, penalty: float) -> Joint:
        """Return the costs of all live candidates, all of whose moves must be known.

        A broken tie costs `penalty` seconds.
        """
        own = [
            np.column_stack((v.forward, v.backward, v.sync, v.held))[some].astype(float)
            for v, some in zip(live.problem.variables, live.candidates, strict=True)
        ]
        tensors: dict[int, Tensor] = {}
        for link in live.links:
            reader = link.second, link.second_labels, link.share
            if link.table in tensors:
                before = tensors[link.table]
                tensors[link.table] = replace(before, readers=(*before.readers, reader))
                continue
            table = live.tables[link.table]
            moves = np.zeros((*table.moves.forward.shape, own[0].shape[1]))
            moves[..., 0] = np.minimum(table.moves.forward, penalty)
            moves[..., 1] = table.moves.backward
            moves[..., 3:] = table.moves.held[..., None] * np.array(table.counts)
            tensors[link.table] = Tensor(link.first, link.first_labels, (reader,), moves)
        return cls(own, list(tensors.values()), [np.arange(len(values)) for values in own])

    def among(self, candidates: Sequence[Ints]) -> Joint:
        """Return the costs of some of the candidates."""
        return Joint(self.own, self.tensors, candidates)

    def unpaid(self, places: Ints, weights: Floats) -> list[tuple[float, list[int]]]:
        """Return how much shares leave unpaid of each tensor, and its variables."""
        return [
            (float((one.due(places) - one.charged(places)) @ weights), one.members)
            for one in self.shared
        ]

    def _combinations(self, tensor: Tensor) -> int:
        """Return how many combinations of several readers and their source there are."""
        if len(tensor.readers) == 1:
            return 0
        return prod(len(self.candidates[v]) for v in tensor.members)

    def _charge(self, terms: dict[Scope, Floats], tensor: Tensor, *, together: bool) -> None:
        """Add the moves of one tensor, exactly or in shares."""
        rows = tensor.moves[tensor.labels[self.candidates[tensor.source]]]
        labels = [labels[self.candidates[v]] for v, labels, _ in tensor.readers]
        wanted = [rows[:, mine] for mine in labels]
        members = tensor.members
        if together and len(set(members)) == len(members) <= MEMBERS:
            _add(terms, tuple(members), _together(wanted, labels))
            return
        self.shared.append(tensor)
        for (v, _, share), mine, values in zip(tensor.readers, labels, wanted, strict=True):
            _add(terms, (tensor.source, v), values * share[mine][:, None])

    def _schedule(self) -> list[tuple[int, Scope, list[_Input]]]:
        """Return for each variable in turn the parents of its bucket, and what enters it."""
        order = [v for v in self.order if len(self.candidates[v]) > 1]
        turn = {v: k for k, v in enumerate(order)}
        waiting: dict[int, list[tuple[int, bool, Scope]]] = {v: [] for v in order}
        for k, term in enumerate(self.terms):
            waiting[min(term.scope, key=turn.__getitem__)].append((k, False, term.scope))
        steps = []
        for v in order:
            parents = tuple(dict.fromkeys(u for *_, s in waiting[v] for u in s if u != v))
            axes = (*parents, v)
            inputs = []
            for of, message, scope in waiting[v]:
                left = [u for u in axes if u in scope]
                inputs.append(
                    _Input(
                        of,
                        message,
                        tuple(scope.index(u) for u in left),
                        tuple(slice(None) if u in scope else None for u in axes),
                        tuple(axis for axis, u in enumerate(axes) if u not in scope),
                        tuple(left.index(u) for u in scope),
                    )
                )
            steps.append((v, parents, inputs))
            if parents:
                waiting[min(parents, key=turn.__getitem__)].append((v, True, parents))
        return steps


def _add(terms: dict[Scope, Floats], scope: Scope, values: Floats) -> None:
    """Add a term whose axes are those of a scope; where there is no choice, there is no axis."""
    several = [axis for axis in range(len(scope)) if values.shape[axis] > 1]
    several.sort(key=lambda axis: scope[axis])
    alone = [axis for axis in range(len(scope)) if axis not in several]
    key = tuple(scope[axis] for axis in several)
    values = values.transpose(*alone, *several, len(scope))
    values = values.reshape(values.shape[len(alone) :])
    terms[key] = terms[key] + values if key in terms else values


def _together(wanted: Sequence[Floats], labels: Sequence[Ints]) -> Floats:
    """Return what moves of a tensor cost by what its source and each of its readers have.

    `wanted` has the moves for each reader alone. A label that several want is moved to once.
    """

    def spread(values: np.ndarray, axis: int) -> np.ndarray:
        shape = [1] * len(labels)
        shape[axis] = len(values)
        return values.reshape(shape)

    found: Floats | float = 0.0
    for axis, (moves, mine) in enumerate(zip(wanted, labels, strict=True)):
        new = np.ones((1,) * len(labels), bool)
        for other, theirs in enumerate(labels[:axis]):
            new = new & (spread(mine, axis) != spread(theirs, other))
        shape = [len(moves), *spread(mine, axis).shape, moves.shape[-1]]
        found = found + moves.reshape(shape) * new[None, ..., None]
    return np.asarray(found)


class Some:
    """Some of the candidates of joint costs, and least weighted sums among them."""

    def __init__(self, joint: Joint, kept: Sequence[Ints]) -> None:
        self.joint, self.kept = joint, list(kept)
        places = [np.searchsorted(*both) for both in zip(joint.candidates, kept, strict=True)]
        self._values = []
        for term in joint.terms:
            if len(term.scope) == 1:
                self._values.append(term.values[places[term.scope[0]]])
            elif len(term.scope) == 2:
                rows, columns = (places[v] for v in term.scope)
                self._values.append(term.values[rows[:, None], columns])
            else:
                self._values.append(term.values[np.ix_(*(places[v] for v in term.scope))])
        self._chosen = [0] * len(kept)

    @property
    def found(self) -> Ints:
        """The places of an assignment with the least sum."""
        return np.array([some[k] for some, k in zip(self.kept, self._chosen)])

    def costs(self) -> Floats:
        """Return each part of what that assignment costs."""
        found = self.joint.constant.copy()
        for term, values in zip(self.joint.terms, self._values, strict=True):
            found[term.parts] += values[tuple(self._chosen[v] for v in term.scope)]
        if not self.joint.shared:
            return found
        places = self.found
        unpaid = (tensor.due(places) - tensor.charged(places) for tensor in self.joint.shared)
        return np.asarray(sum(unpaid, found))

    def least(self, weights: Floats) -> float:
        """Return the least weighted sum."""
        pairs = zip(self.joint.terms, self._values, strict=True)
        terms = [values @ weights[term.parts] for term, values in pairs]
        self._messages: dict[int, Floats] = {}
        self._tables: dict[int, Floats] = {}
        total = float(self.joint.constant @ weights)
        for v, parents, inputs in self.joint.steps:
            table: Floats | float = 0.0
            for one in inputs:
                values = self._messages[one.of] if one.message else terms[one.of]
                table = table + values.transpose(one.turn)[one.spread]
            self._tables[v] = np.asarray(table)
            self._messages[v] = self._tables[v].min(-1)
            if not parents:
                total += float(self._messages[v])
        self._total = total
        chosen = self._chosen
        for v, parents, _ in reversed(self.joint.steps):
            chosen[v] = int(self._tables[v][tuple(chosen[u] for u in parents)].argmin())
        return total

    def marginals(self) -> list[Floats]:
        """Return the least sum with each candidate, under the weights that `least` had."""
        outside: dict[int, Floats] = {}
        found: list[Floats] = [np.full(1, self._total)] * len(self.kept)
        for v, parents, inputs in reversed(self.joint.steps):
            table = self._tables[v]
            if parents:
                table = table + outside.pop(v)[..., None]
            else:
                table = table + (self._total - float(self._messages[v]))
            found[v] = table.reshape(-1, table.shape[-1]).min(0)
            for one in inputs:
                if one.message:
                    values = table.min(axis=one.gone) if one.gone else table
                    outside[one.of] = values.transpose(one.back) - self._messages[one.of]
        return found
