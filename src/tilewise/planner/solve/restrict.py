"""Smaller and changed problems: fewer candidates, a mean of sums, or bytes in place of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tilewise.planner.solve.problem import (
    Consumer,
    Ints,
    MoveCost,
    Moves,
    Problem,
    Tie,
    Transfer,
    Variable,
)


def restrict(problem: Problem, kept: Mapping[int, Ints]) -> Problem:
    """Return the problem with only the `kept` candidates of some variables."""

    def labels(variable: int, values: Ints) -> Ints:
        return values[kept[variable]] if variable in kept else values

    variables = [
        Variable(v.name, *(column[kept[k]] for column in _columns(v))) if k in kept else v
        for k, v in enumerate(problem.variables)
    ]
    transfers = [
        Transfer(
            t.name,
            t.source,
            labels(t.source, t.leaves),
            tuple(Consumer(c.variable, labels(c.variable, c.wants)) for c in t.consumers),
            t.cost,
            t.counts,
        )
        for t in problem.transfers
    ]
    ties = [
        Tie(tie.variables, tuple(labels(v, x) for v, x in zip(tie.variables, tie.labels)))
        for tie in problem.ties
    ]
    return Problem(tuple(variables), tuple(transfers), tuple(ties))


def fitting(candidates: Sequence[tuple[Ints, Ints]], cap: int) -> list[NDArray[np.bool_]]:
    """Mark the candidates, of which bytes held and burst are given, that may be within the cap.

    Those are within it when all others hold as little as they can.
    """
    least = np.array([held.min(0) for held, _ in candidates])
    floor = max(int(burst.min()) for _, burst in candidates)
    room = cap - least.sum(0)
    return [
        (held - low - room).max(1) + np.maximum(burst, floor) <= 0
        for (held, burst), low in zip(candidates, least, strict=True)
    ]


def picked(kept: Sequence[Ints], places: Sequence[int]) -> tuple[int, ...]:
    """Return the candidates at some places among those that were kept of each variable."""
    return tuple(int(some[place]) for some, place in zip(kept, places, strict=True))


def mean(problem: Problem, weights: Sequence[float] | None = None) -> Problem:
    """Return the problem with a mean of its sums, which is never above the largest of them.

    Without weights all count alike.
    """
    if problem.sums == 1:
        return problem
    shares = np.ones(problem.sums) if weights is None else np.asarray(weights, np.float64)
    shares = shares / shares.sum()
    variables = [
        replace(v, held=np.floor(v.held @ shares).astype(np.int64)[:, None])
        for v in problem.variables
    ]
    transfers = [
        replace(t, cost=_share(t.cost, float(shares @ np.array(t.counts))), counts=(1,))
        for t in problem.transfers
    ]
    return Problem(tuple(variables), tuple(transfers), problem.ties)


def bytes_for_seconds(problem: Problem) -> Problem:
    """Return a problem whose time is this one's held bytes, of which there is one sum."""
    variables = [
        Variable.of(v.name, v.held[:, 0].astype(float), burst=v.burst) for v in problem.variables
    ]
    transfers = [replace(t, cost=_held(t.cost, t.counts[0])) for t in problem.transfers]
    return Problem(tuple(variables), tuple(transfers), problem.ties)


def _columns(v: Variable) -> tuple[np.ndarray, ...]:
    return v.forward, v.backward, v.sync, v.held, v.burst


def _share(cost: MoveCost, share: float) -> MoveCost:
    def shared(source: Ints, target: Ints) -> Moves:
        moves = cost(source, target)
        return Moves(moves.forward, moves.backward, np.floor(share * moves.held).astype(np.int64))

    return cost if share == 1.0 else shared


def _held(cost: MoveCost, count: int) -> MoveCost:
    def held(source: Ints, target: Ints) -> Moves:
        bytes_ = count * cost(source, target).held
        return Moves(bytes_.astype(float), np.zeros(bytes_.shape), np.zeros_like(bytes_))

    return held
