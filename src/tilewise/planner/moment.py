"""The memory of a step at chosen moments as one sum over layers and moves, which can be limited.

What is held at one moment (see timeline.py) is a sum of what each layer has there under its own
candidate, and of the copies that moves have left by then. The peak is the largest of all moments,
so no weighted mean of some moments is above it: where a mean must stay within a limit, no plan
whose peak keeps the limit is lost. Nor is any where candidates are dropped that are above the limit
at a moment of their own, with all others as small there as they can be. Left out, as it is no sum:
the copy of a bucket of small gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from tilewise.planner.cost import Floats, NodeCost
from tilewise.planner.formulate import Formulation
from tilewise.planner.moves import MoveCosts
from tilewise.planner.solve import Moves, Problem, Transfer
from tilewise.planner.solve.problem import Ints, MoveCost
from tilewise.planner.timeline import PHASES, Moment


class Sums:
    """A formulation's problem with the bytes of chosen moments in place of all that is held."""

    def __init__(self, found: Formulation) -> None:
        self.found = found
        self._names = found.called
        self._owners = [found.choices.owner[name] for name in self._names]
        place = {name: index for index, name in enumerate(self._names)}
        self._readers = [
            np.array([place[reader.node.name] for reader in readers])
            for readers in found.readers.values()
        ]

    def problem(self, weights: Mapping[Moment, float], limit: int) -> Problem:
        """Return the problem whose held bytes are the weighted mean of moments.

        Candidates that no plan within the limit has burst above it, all others do not burst. Peaks
        are whole bytes: one that is less than a byte above the limit keeps it.
        """
        total = sum(weights.values())
        shares = {moment: weight / total for moment, weight in weights.items()}
        problem = self.found.problem
        held = [np.zeros(len(v)) for v in problem.variables]
        for moment, share in shares.items():
            for sums, own in zip(held, self.own(moment), strict=True):
                sums += share * own
        variables = [
            replace(
                v,
                held=np.floor(own).astype(np.int64),
                burst=np.where(least >= limit + 1.01, limit + 1, 0).astype(np.int64),
            )
            for v, own, least in zip(problem.variables, held, self.least, strict=True)
        ]
        transfers: list[Transfer] = []
        moves = self.found.moves.values()
        for transfer, readers, cost in zip(problem.transfers, self._readers, moves, strict=True):
            transfers += _split(transfer, readers, shares) if cost.keeps_copies else [transfer]
            transfers += _passing(transfer, readers, shares, cost)
        return replace(problem, variables=tuple(variables), transfers=tuple(transfers))

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
            held[owner] += (self.found.setting.blocks - 1) * cost.block_bytes
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
    """Return what a call holds at a moment, but for parameters and states."""
    if phase == "forward":
        return _forward(cost, index, now)
    if phase == "backward":
        return _backward(cost, index, now, run)
    return cost.block_bytes + (index == now) * cost.copy_bytes


def _forward(cost: NodeCost, index: int, now: int) -> Floats:
    if index > now:
        return np.zeros_like(cost.again)
    if index < now:
        return cost.held_bytes
    return cost.held_bytes + cost.inner_bytes + cost.workspace_bytes


def _backward(cost: NodeCost, index: int, now: int, run: range = range(0)) -> Floats:
    """Return what a call holds in the backward of another: gradients from there on, and its kept.

    With the call that is computed again, what its `run` of neighbours saves is there again.
    """
    inner = cost.saved_bytes + cost.later_bytes
    if index == now:
        return cost.given_bytes + cost.saved_bytes + cost.burst_bytes + cost.block_bytes
    if index > now:
        given = cost.again * cost.given_bytes if index in run else 0.0
        return cost.block_bytes + given
    return np.where(cost.again * (index in run) > 0, cost.given_bytes + inner, cost.held_bytes)


def _split(transfer: Transfer, readers: Ints, shares: Mapping[Moment, float]) -> Iterator[Transfer]:
    """Yield a tensor's moves with the bytes of copies that moments share.

    At a moment there are the copies that readers up to then have wanted. Where these are some of
    all, a further transfer that takes no time has their bytes.
    """
    by_readers: dict[tuple[int, ...], float] = {}
    for moment, share in shares.items():
        there = readers <= moment.call if moment.phase != "optimizer" else readers < 0
        some = tuple(np.flatnonzero(there).tolist())
        by_readers[some] = by_readers.get(some, 0.0) + share
    by_readers.pop((), None)
    everyone = by_readers.pop(tuple(range(len(readers))), 0.0)
    scaled = transfer.cost if everyone == 1.0 else partial(_share_held, transfer.cost, everyone)
    yield replace(transfer, cost=scaled)
    for some, share in by_readers.items():
        consumers = tuple(transfer.consumers[k] for k in some)
        copies = partial(_only_held, transfer.cost, share)
        yield replace(transfer, consumers=consumers, cost=copies)


def _passing(
    transfer: Transfer, readers: Ints, shares: Mapping[Moment, float], moves: MoveCosts
) -> Iterator[Transfer]:
    """Yield transfers that take no time, with what passes while a tensor is moved to a reader."""
    for moment, share in shares.items():
        if moment.phase == "optimizer":
            continue
        cost = partial(_only_passing, moves, moment.phase == "backward", share)
        for consumer, reader in zip(transfer.consumers, readers.tolist(), strict=True):
            if reader == moment.call:
                yield replace(transfer, consumers=(consumer,), cost=cost)


def _only_passing(
    moves: MoveCosts, backward: bool, share: float, source: Ints, target: Ints
) -> Moves:
    held = np.floor(share * moves.passing(source, target)[backward]).astype(np.int64)
    return Moves(np.zeros(held.shape), np.zeros(held.shape), held)


def _share_held(cost: MoveCost, share: float, source: Ints, target: Ints) -> Moves:
    found = cost(source, target)
    return Moves(found.forward, found.backward, np.floor(share * found.held).astype(np.int64))


def _only_held(cost: MoveCost, share: float, source: Ints, target: Ints) -> Moves:
    held = _share_held(cost, share, source, target).held
    return Moves(np.zeros(held.shape), np.zeros(held.shape), held)
