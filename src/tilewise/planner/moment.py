"""The memory of a step at chosen moments as sums over layers and moves, which can be limited.

What is held at one moment (see timeline.py) is a sum of what each layer has there under its own
candidate, and of the copies that moves have left by then. The peak is the largest of all moments:
where some of them must stay within a limit, no plan whose peak keeps the limit is lost. Nor is any
where candidates are dropped that are above the limit at a moment of their own, with all others as
small there as they can be. Left out, as it is no sum: the copy of a bucket of small gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from tilewise.planner.cost import Floats, NodeCost
from tilewise.planner.formulation import Formulation
from tilewise.planner.moves import MoveCosts
from tilewise.planner.solve import Moves, Problem, Transfer
from tilewise.planner.solve.known import know, known
from tilewise.planner.solve.problem import Ints
from tilewise.planner.timeline import PHASES, Moment


class Sums:
    """A formulation's problem with the bytes of chosen moments in place of all that is held."""

    def __init__(self, found: Formulation) -> None:
        self.found = found
        self._names = found.called
        self._owners = [found.choices.owner[name] for name in self._names]
        place = {name: index for index, name in enumerate(self._names)}
        self._passed: dict[tuple[int, str], Transfer] = {}
        self._kept: dict[int, Transfer] = {}
        self._readers = [
            np.array([place[reader.node.name] for reader in readers])
            for readers in found.readers.values()
        ]

    def problem(self, some: Sequence[Moment], limit: int) -> Problem:
        """Return the problem whose sums of held bytes are those of some moments.

        Candidates that no plan within the limit has burst above it, all others do not burst. Peaks
        are whole bytes: one that is less than a byte above the limit keeps it.
        """
        problem = self.base
        columns = [self.own(moment) for moment in some]
        variables = [
            replace(
                v,
                held=np.floor(np.stack([own[k] for own in columns], 1)).astype(np.int64),
                burst=np.where(least >= limit + 1.01, limit + 1, 0).astype(np.int64),
            )
            for k, (v, least) in enumerate(zip(problem.variables, self.least, strict=True))
        ]
        transfers: list[Transfer] = []
        moves = self.found.moves.values()
        for transfer, readers, cost in zip(problem.transfers, self._readers, moves, strict=True):
            transfers += self._copies(transfer, readers, some, cost)
            transfers += self._passing(transfer, readers, some, cost)
        return replace(problem, variables=tuple(variables), transfers=tuple(transfers))

    @cached_property
    def base(self) -> Problem:
        """The formulation's problem, with moves looked up where that is little."""
        return know(self.found.problem)

    def _copies(
        self, transfer: Transfer, readers: Ints, some: Sequence[Moment], moves: MoveCosts
    ) -> Iterator[Transfer]:
        """Yield a tensor's moves, and with them or apart the copies that are there at moments.

        At a moment there are the copies that readers up to then keep. Where these are some of all
        that move, a further transfer that takes no time has their bytes.
        """
        by_readers: dict[tuple[int, ...], list[int]] = {}
        holding = np.array([(holds != moves.nothing).any() for holds in moves.holds])
        for k, moment in enumerate(some):
            there = holding & (readers <= moment.call)
            if there.any() and moment.phase != "optimizer":
                by_readers.setdefault(tuple(np.flatnonzero(there).tolist()), []).append(k)
        alike = all(np.array_equal(*both) for both in zip(moves.wants, moves.holds, strict=True))
        every = by_readers.pop(tuple(range(len(readers))), []) if alike else []
        yield replace(transfer, counts=_counts(every, some))
        for few, at in by_readers.items():
            kept = self._all_copies(transfer, moves)
            consumers = tuple(kept.consumers[k] for k in few)
            yield replace(kept, consumers=consumers, counts=_counts(at, some))

    def _all_copies(self, transfer: Transfer, moves: MoveCosts) -> Transfer:
        """Return a transfer that takes no time, with the copies that all readers keep."""
        if id(moves) not in self._kept:
            consumers = tuple(
                replace(consumer, wants=holds)
                for consumer, holds in zip(transfer.consumers, moves.holds, strict=True)
            )
            cost = partial(_only_kept, moves)
            self._kept[id(moves)] = known(replace(transfer, consumers=consumers, cost=cost))
        return self._kept[id(moves)]

    def _passing(
        self, transfer: Transfer, readers: Ints, some: Sequence[Moment], moves: MoveCosts
    ) -> Iterator[Transfer]:
        """Yield transfers that take no time, with what passes while a tensor moves to a reader."""
        for consumer, reader in zip(transfer.consumers, readers.tolist(), strict=True):
            for backward, phase in enumerate(PHASES[:2]):
                counts = tuple(int(moment == Moment(phase, reader)) for moment in some)
                if any(counts):
                    key = id(consumer), phase
                    if key not in self._passed:
                        cost = partial(_only_passing, moves, bool(backward))
                        one = replace(transfer, consumers=(consumer,), cost=cost)
                        self._passed[key] = known(one)
                    yield replace(self._passed[key], counts=counts)

    @cached_property
    def least(self) -> list[Floats]:
        """What the peak of any plan with a candidate is at least, by that one's own moments."""
        least = [np.zeros(len(v)) for v in self.found.problem.variables]
        for phase in PHASES:
            held = self.own(Moment(phase, -1))  # before the first call; then from call to call
            floors = np.array([own.min() for own in held])
            for call, (name, owner) in enumerate(zip(self._names, self._owners, strict=True)):
                cost, run = self.found.costs[name], self._run(call)
                for span in self.found.spans if phase == "backward" else ():
                    if call in (span.first + 1, span.last):
                        held[span.owner] += span.bytes if call < span.last else -span.bytes
                        floors[span.owner] = held[span.owner].min()
                without = held[owner] - _at(cost, phase, call, -1)
                now = without + _at(cost, phase, call, call, run)
                for index in run if phase == "backward" else ():
                    if index != call:
                        beside = self.found.costs[self._names[index]]
                        now += _backward(beside, index, call, run)
                        now -= _backward(beside, index, call)
                others = floors.sum() - floors[owner]
                np.maximum(least[owner], now + others, out=least[owner])
                held[owner] = without + _at(cost, phase, call, call + 1)
                floors[owner] = held[owner].min()
        return least

    def own(self, moment: Moment) -> list[Floats]:
        """Return what each variable's candidates hold at a moment, moved copies left out."""
        held = [np.zeros(len(v)) for v in self.found.problem.variables]
        run = self._run(moment.call)
        for index, (name, owner) in enumerate(zip(self._names, self._owners, strict=True)):
            cost = self.found.costs[name]
            held[owner] += cost.block_bytes + self.found.setting.states * cost.trained_bytes
            held[owner] += cost.given_bytes
            held[owner] += _at(cost, moment.phase, index, moment.call, run)
        for span in self.found.spans if moment.phase == "backward" else ():
            if span.first < moment.call < span.last:
                held[span.owner] += span.bytes
        return held

    def holders(self, choice: Sequence[int], moment: Moment) -> list[tuple[str, int]]:
        """Return the layers and the bytes they hold at a moment, most first."""
        own = [int(held[k]) for held, k in zip(self.own(moment), choice, strict=True)]
        return sorted(zip(self.found.names, own, strict=True), key=lambda pair: -pair[1])

    def _run(self, call: int) -> range:
        """Return the neighbours of a call that are computed again with it, if it is."""
        if call < 0:
            return range(0)
        first = last = call
        owner = self._owners[call]
        stretch = self.found.choices.stretches[owner]

        def together(index: int) -> bool:
            return self._owners[index] == owner and self._names[index] in stretch

        while first > 0 and together(first - 1):
            first -= 1
        while last + 1 < len(self._names) and together(last + 1):
            last += 1
        return range(first, last + 1)


def _at(cost: NodeCost, phase: str, index: int, now: int, run: range = range(0)) -> Floats:
    """Return what a call holds at a moment, but for parameters, states and inputs."""
    if phase == "forward":
        return _forward(cost, index, now)
    if phase == "backward":
        return _backward(cost, index, now, run)
    return cost.gradient_bytes + (index == now) * cost.copy_bytes


def _forward(cost: NodeCost, index: int, now: int) -> Floats:
    if index > now:
        return np.zeros_like(cost.again)
    kept = cost.held_bytes - cost.given_bytes
    return kept if index < now else kept + cost.inner_bytes + cost.workspace_bytes


def _backward(cost: NodeCost, index: int, now: int, run: range = range(0)) -> Floats:
    """Return what a call holds in the backward of another: gradients from there on, and its kept.

    With the call that is computed again, what its `run` of neighbours saves is there again.
    """
    if index == now:
        return cost.saved_bytes + cost.burst_bytes + cost.gradient_bytes
    if index > now:
        return cost.gradient_bytes
    inner = cost.saved_bytes + cost.later_bytes
    kept = cost.held_bytes - cost.given_bytes
    return np.where(cost.again * (index in run) > 0, inner, kept)


def _counts(at: Sequence[int], some: Sequence[Moment]) -> tuple[int, ...]:
    return tuple(int(k in at) for k in range(len(some)))


def _only_passing(moves: MoveCosts, backward: bool, source: Ints, target: Ints) -> Moves:
    held = np.floor(moves.passing(source, target)[backward]).astype(np.int64)
    return Moves(np.zeros(held.shape), np.zeros(held.shape), held)


def _only_kept(moves: MoveCosts, source: Ints, target: Ints) -> Moves:
    held = moves.copies_kept(source, target)
    return Moves(np.zeros(held.shape), np.zeros(held.shape), held)
