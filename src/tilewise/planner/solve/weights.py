"""One number for time and memory: the objective with its maximum and its cap relaxed.

For any `overlap` λ in [0, 1] and `byte` μ ≥ 0,

    F + λ·B + (1 − λ)·S + μ·(held + burst − cap)  ≤  F + max(B, S)    wherever the cap is kept,

so the smallest value of the left side, which is a sum over layers and moves, is a lower bound of
the time of every assignment that fits. The best weights come from cutting planes: each assignment
is a plane above the bound as a function of (λ, μ).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tilewise.planner.solve.evaluate import Cost
from tilewise.planner.solve.problem import Floats, Moves, Variable


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of backward counts (`overlap`), of sync (1 − overlap), and a byte (`byte`)."""

    overlap: float = 1.0
    byte: float = 0.0

    def of_variable(self, variable: Variable) -> Floats:
        """Return each candidate's weighted cost."""
        cost = variable.forward + self.overlap * variable.backward
        if self.overlap < 1.0:
            cost = cost + (1.0 - self.overlap) * variable.sync
        return cost + self.byte * variable.held if self.byte else cost

    def of_moves(self, moves: Moves) -> Floats:
        """Return each move's weighted cost."""
        cost = moves.forward + self.overlap * moves.backward
        return cost + self.byte * moves.held if self.byte else cost

    def toward(self, other: Weights, part: float) -> Weights:
        """Return weights between these and others."""
        return Weights(
            self.overlap + part * (other.overlap - self.overlap),
            self.byte + part * (other.byte - self.byte),
        )

    def around(self) -> list[Weights]:
        """Return these weights and some near them, which bound unbalanced assignments better."""
        near = [self]
        if 0.0 < self.overlap < 1.0:
            near.append(Weights(0.7 * self.overlap, self.byte))
            near.append(Weights(0.7 * self.overlap + 0.3, self.byte))
        if self.byte:
            near.append(Weights(self.overlap, 0.6 * self.byte))
            near.append(Weights(self.overlap, 1.6 * self.byte))
        return near


class Cuts:
    """What is known of the bound as a function of the weights, from assignments seen."""

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self._planes: list[tuple[float, float, float]] = []
        self._byte_limit = 0.0

    def add(self, cost: Cost, burst: int) -> None:
        """Take an assignment's cost; `burst` is the least burst that any assignment has."""
        over = 0.0 if self.cap is None else float(cost.held_bytes + burst - self.cap)
        plane = (cost.forward + cost.sync, cost.backward - cost.sync, over)
        if plane not in self._planes:
            self._planes.append(plane)
        if over > 0 and not self._byte_limit:
            self._byte_limit = cost.seconds / over

    def best(self) -> Weights:
        """Return the weights whose bound may be highest."""
        if not self._planes:
            return Weights()
        weights = self._highest()
        while weights.byte >= 0.999 * self._byte_limit > 0 and self._byte_limit < 1.0:
            self._byte_limit *= 8.0
            weights = self._highest()
        return weights

    def _highest(self) -> Weights:
        """Maximise the lowest plane, with those planes only that turn out to matter."""
        planes = np.array(self._planes)
        used = [0]
        while True:
            weights, value = self._vertex(planes[used])
            heights = planes @ (1.0, weights.overlap, weights.byte)
            lowest = int(heights.argmin())
            if lowest in used or heights[lowest] >= value * (1.0 - 1e-9):
                return weights
            used.append(lowest)

    def _vertex(self, planes: Floats) -> tuple[Weights, float]:
        """Maximise the lowest plane over 0 ≤ overlap ≤ 1 and 0 ≤ byte ≤ its limit."""
        scale = self._byte_limit
        planes = planes * (1.0, 1.0, scale)
        unit = max(float(np.abs(planes).max()), 1e-300)
        # Each row (a, b, g, s) reads s·z ≤ a + b·λ + g·μ/scale; the last four are the box.
        box = [(0, 1, 0, 0), (1, -1, 0, 0), (0, 0, 1, 0), (1 if scale else 0, 0, -1, 0)]
        rows = np.concatenate((np.column_stack((planes / unit, np.ones(len(planes)))), box))
        chosen = rows[list(combinations(range(len(rows)), 3))]
        matrix = np.stack((chosen[..., 3], -chosen[..., 1], -chosen[..., 2]), -1)
        solvable = np.abs(np.linalg.det(matrix)) > 1e-9
        points = np.linalg.solve(matrix[solvable], chosen[solvable][..., :1])[..., 0]
        slack = rows[:, 0] + points[:, 1:] @ rows[:, 1:3].T - points[:, :1] * rows[:, 3]
        points = points[(slack >= -1e-7).all(1)]
        best = points[points[:, 0].argmax()]
        overlap = min(max(float(best[1]), 0.0), 1.0)
        return Weights(overlap, max(float(best[2]), 0.0) * scale), float(best[0]) * unit
