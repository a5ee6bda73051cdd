"""One number for time and memory: the objective with its maximum and its cap relaxed.

For any `overlap` λ in [0, 1] and any `byte` μ ≥ 0 of each sum that is held,

    F + λ·B + (1 − λ)·S + Σ μ·(held + burst − cap)  ≤  F + max(B, S)    wherever the cap is kept,

so the smallest value of the left side, which is a sum over layers and moves, is a lower bound of
the time of every assignment that fits. The best weights come from cutting planes: each assignment
is a plane above the bound as a function of (λ, μ). Where they are few, the planes tell little far
from the assignments seen, so the next weights lie between the best so far and those of the planes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewise.planner.solve.evaluate import Cost
from tilewise.planner.solve.planes import highest
from tilewise.planner.solve.problem import Floats, Moves, Variable

GROWTH = 4.0
"""By how much weights of bytes may grow where they are as large as they may be."""
AROUND = (0.4, 0.6, 0.8, 0.9, 1.1, 1.25, 1.6, 2.5)
"""Times how much weights of bytes bound assignments better that need little or much memory."""
LARGEST = 1e6
"""How many times a step's seconds all bytes of the cap may count at most."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of backward counts (`overlap`), of sync (1 − overlap), and a byte of each sum.

    Without any `byte` no sum counts.
    """

    overlap: float = 1.0
    byte: tuple[float, ...] = ()

    def of_variable(self, variable: Variable) -> Floats:
        """Return each candidate's weighted cost."""
        cost = variable.forward + self.overlap * variable.backward
        if self.overlap < 1.0:
            cost = cost + (1.0 - self.overlap) * variable.sync
        return cost + variable.held @ np.array(self.byte) if any(self.byte) else cost

    def of_moves(self, moves: Moves, counts: tuple[int, ...] = (1,)) -> Floats:
        """Return each move's weighted cost; its bytes are part of sums by `counts`."""
        cost = self.overlap * moves.backward  # there may be very many: no copy is made in vain
        cost += moves.forward
        byte = sum(one * count for one, count in zip(self.byte, counts))
        if byte:
            cost += byte * moves.held
        return cost

    def toward(self, other: Weights, part: float) -> Weights:
        """Return weights between these and others."""
        count = max(len(self.byte), len(other.byte))
        mine, theirs = (np.array(w.byte or (0.0,) * count) for w in (self, other))
        return Weights(
            self.overlap + part * (other.overlap - self.overlap),
            tuple((mine + part * (theirs - mine)).tolist()),
        )

    def around(self) -> list[Weights]:
        """Return these weights and some near them, which bound unbalanced assignments better."""
        near = [self]
        if 0.0 < self.overlap < 1.0:
            near.append(Weights(0.7 * self.overlap, self.byte))
            near.append(Weights(0.7 * self.overlap + 0.3, self.byte))
        if any(self.byte):
            near += [self.times(factor) for factor in AROUND]
        return near

    def of_sums(self, count: int) -> Weights:
        """Return weights of so many sums; bytes of those that are new count nothing."""
        return Weights(self.overlap, self.byte + (0.0,) * (count - len(self.byte)))

    def times(self, factor: float) -> Weights:
        """Return weights with bytes that count so many times as much."""
        return Weights(self.overlap, tuple(factor * byte for byte in self.byte))


class Cuts:
    """What is known of the bound as a function of the weights, from assignments seen."""

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self.height = np.inf
        """No weights' bound is above this, as far as is known."""
        self._planes: dict[tuple[float, ...], None] = {}
        self._most = 0.0

    def add(self, cost: Cost, burst: int) -> None:
        """Take an assignment's cost; `burst` is the least burst that any assignment has."""
        over: list[float] = []
        if self.cap is not None:
            over = [(held + burst - self.cap) / max(self.cap, 1) for held in cost.sums]
        self._planes[(cost.forward + cost.sync, cost.backward - cost.sync, *over)] = None
        if over and max(over) > 0 and not self._most:
            self._most = cost.seconds / max(over)

    def join(self, others: Cuts) -> None:
        """Take what is known from other assignments, some of which only one problem may have.

        Then `height` is a guess.
        """
        self._planes |= others._planes
        self._most = max(self._most, others._most)

    def best(self) -> Weights:
        """Return the weights whose bound may be highest."""
        if not self._planes:
            return Weights()
        found = propose(np.array(list(self._planes)), self._most, self.cap)
        self.height, self._most = found.height, found.most
        return found.weights


@dataclass(frozen=True, slots=True)
class Proposal:
    """Weights whose bound may be as high as `height`, by planes of which a mixture is as low.

    `most` is how much all bytes of the cap may count the next time.
    """

    weights: Weights
    height: float
    mixture: Floats
    most: float


def propose(planes: Floats, most: float, cap: int | None) -> Proposal:
    """Return the best weights that assignments' planes know of."""
    limits = np.full(planes.shape[1] - 1, most)
    limits[0] = 1.0
    found, height, mixture = highest(planes[:, 0], planes[:, 1:], limits)
    largest = LARGEST * float(planes[:, :2].sum(1).max())
    if 0.0 < most < largest and (found[1:] >= 0.999 * limits[1:]).any():
        most, height = GROWTH * most, np.inf
    byte = tuple((found[1:] / max(cap or 1, 1)).tolist())
    return Proposal(Weights(float(found[0]), byte), height, mixture, most)
