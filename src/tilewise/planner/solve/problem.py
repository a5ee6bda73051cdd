"""A planning problem as numbers: what each choice costs and what moving a tensor costs.

    T      = Σ forward + Σ moves' forward + max(Σ backward + Σ moves' backward, Σ sync)
    memory = max over sums of (Σ held + Σ moves' held) + max burst

A variable is a layer, its candidates are the ways to split it. A transfer is a tensor that others
read. How a candidate leaves or wants a tensor is a *label*, a whole number that stands for a
layout; candidates by far outnumber labels, so what a move costs is known by labels.

There may be several sums of what is held, each at another moment; all are to stay below a cap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ONE_BY_ONE = 64
"""How many places of a table to look up one by one at most."""


@dataclass(frozen=True, slots=True)
class Variable:
    """What each candidate of a layer costs; all arrays have one entry or row a candidate.

    Args:
        name: for messages.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        sync: seconds of the gradient sum, which hides behind the backward pass of all layers.
        held: bytes on the fullest rank, a column for each sum; they add over layers.
        burst: bytes only while the layer runs; the largest one counts.
    """

    name: str
    forward: Floats
    backward: Floats
    sync: Floats
    held: Ints
    burst: Ints

    @classmethod
    def of(
        cls,
        name: str,
        forward: ArrayLike,
        backward: ArrayLike | None = None,
        sync: ArrayLike | None = None,
        held: ArrayLike | None = None,
        burst: ArrayLike | None = None,
    ) -> Variable:
        """Make a variable from anything array-like; what is not given is zero."""
        first = np.asarray(forward, np.float64)

        def seconds(values: ArrayLike | None) -> Floats:
            return np.zeros(len(first)) if values is None else np.asarray(values, np.float64)

        def sizes(values: ArrayLike | None) -> Ints:
            return (
                np.zeros(len(first), np.int64) if values is None else np.asarray(values, np.int64)
            )

        sums = sizes(held)
        sums = sums[:, None] if sums.ndim == 1 else sums
        return cls(name, first, seconds(backward), seconds(sync), sums, sizes(burst))

    def __len__(self) -> int:
        return len(self.forward)


@dataclass(frozen=True, slots=True)
class Consumer:
    """A variable that reads a tensor, and the label each of its candidates wants it in."""

    variable: int
    wants: Ints


@dataclass(frozen=True, slots=True)
class Moves:
    """What moves cost: tables by (source label, target label).

    Tables may be shared with others, and must not be written to.
    """

    forward: Floats
    backward: Floats
    held: Ints

    @classmethod
    def holding_nothing(cls, forward: Floats, backward: Floats) -> Moves:
        """Return moves that keep no bytes, and need no memory to say so."""
        return cls(forward, backward, np.broadcast_to(np.int64(0), forward.shape))

    def at(self, rows: Ints, columns: Ints) -> Moves:
        """Return some rows and columns."""

        def some(table: Any) -> Any:
            if len(rows) * len(columns) <= ONE_BY_ONE:
                return table[rows[:, None], columns]
            return at_places(at_places(table, rows, 0), columns, 1)

        forward, backward = some(self.forward), some(self.backward)
        if self.hold_nothing:
            return Moves.holding_nothing(forward, backward)
        return Moves(forward, backward, some(self.held))

    @property
    def hold_nothing(self) -> bool:
        """Whether no move keeps any bytes, and that is known without looking at each."""
        return self.held.strides == (0, 0) and not self.held[:1, :1].any()

    def beside(self, other: Moves) -> Moves:
        """Return two blocks of the same rows as one."""
        return self._of(lambda mine, theirs: np.concatenate((mine, theirs), 1), other)

    def above(self, other: Moves) -> Moves:
        """Return two blocks of the same columns as one."""
        return self._of(lambda mine, theirs: np.concatenate((mine, theirs)), other)

    def _of(self, function: Callable[..., Any], *others: Moves) -> Moves:
        several = (self, *others)
        forward = function(*(one.forward for one in several))
        backward = function(*(one.backward for one in several))
        if all(one.hold_nothing for one in several):
            return Moves.holding_nothing(forward, backward)
        return Moves(forward, backward, function(*(one.held for one in several)))


def at_places(table: Any, places: Ints, axis: int) -> Any:
    """Return some places along an axis; the table itself where that is all of them."""
    if len(places) == table.shape[axis] and (places[:-1] < places[1:]).all():
        return table
    return table.take(places, axis)


MoveCost = Callable[[Ints, Ints], Moves]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor with consumers, each of which may want it in another layout.

    The tensor is moved once to each distinct label that the chosen candidates want.

    Args:
        name: for messages.
        source: the variable that makes the tensor.
        leaves: the label in which each of the source's candidates leaves it.
        consumers: who reads it. Equal labels of different consumers mean the same layout.
        cost: takes source labels (a) and target labels (b), returns tables of shape (a, b); no
            entry may be negative. It is called for few labels at a time, and several times.
        counts: how often what moved copies hold is part of each sum.
    """

    name: str
    source: int
    leaves: Ints
    consumers: tuple[Consumer, ...]
    cost: MoveCost
    counts: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Tie:
    """Variables whose chosen candidates must have equal labels (a shared parameter's splits)."""

    variables: tuple[int, ...]
    labels: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Variables, the tensors between them and the ties among them."""

    variables: tuple[Variable, ...]
    transfers: tuple[Transfer, ...] = ()
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        if not self.variables:
            raise ValueError("problem: there are no variables")
        for variable in self.variables:
            _check_variable(variable, self.sums)
        for transfer in self.transfers:
            if len(transfer.counts) != self.sums:
                raise ValueError(
                    f"problem: transfer {transfer.name} has {len(transfer.counts)} counts for "
                    f"{self.sums} sums"
                )
            if not transfer.consumers:
                raise ValueError(f"problem: transfer {transfer.name} has no consumers")
            self._check_labels(transfer.name, transfer.source, transfer.leaves)
            for consumer in transfer.consumers:
                self._check_labels(transfer.name, consumer.variable, consumer.wants)
                if consumer.variable == transfer.source:
                    raise ValueError(
                        f"problem: transfer {transfer.name} has "
                        f"{self.variables[transfer.source].name} as its source and as a consumer"
                    )
        for tie in self.ties:
            for member, labels in zip(tie.variables, tie.labels, strict=True):
                self._check_labels("a tie", member, labels)

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of candidates of each variable."""
        return tuple(len(variable) for variable in self.variables)

    @property
    def sums(self) -> int:
        """How many sums of held bytes there are."""
        return int(self.variables[0].held.shape[1])

    def _check_labels(self, where: str, variable: int, labels: Sequence[int] | Ints) -> None:
        expected = len(self.variables[variable])
        if len(labels) != expected:
            raise ValueError(
                f"problem: {where} has {len(labels)} labels for "
                f"{self.variables[variable].name}, which has {expected} candidates"
            )


def _check_variable(variable: Variable, sums: int) -> None:
    columns = {
        "forward": variable.forward,
        "backward": variable.backward,
        "sync": variable.sync,
        "held": variable.held,
        "burst": variable.burst,
    }
    if not len(variable):
        raise ValueError(f"problem: {variable.name} has no candidates")
    for name, values in columns.items():
        expected = (len(variable), sums) if name == "held" else (len(variable),)
        if values.shape != expected:
            raise ValueError(
                f"problem: {variable.name} has {name} of shape {values.shape}, expected {expected}"
            )
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"problem: {variable.name} has {name} that is negative or not finite")
