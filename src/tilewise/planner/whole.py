"""Learn from whole steps: how much longer parts of a step take within it than by themselves.

Layers are measured one by one, with their operands fresh in the caches and all ranks starting at
once. In a step ranks wait for each other at every message, and share cores and memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from tilewise.planner.cost import WholeStep
from tilewise.planner.formulation import Formulation
from tilewise.planner.solve import evaluate

Floats = NDArray[np.float64]

PRIOR = 0.02  # how much a factor's distance from one weighs beside the steps' errors
MOST = 4.0  # what a factor may be at most, or one over it at least
TURNS = 20


@dataclass(frozen=True)
class Parts:
    """The seconds of a step by what takes them; `waiting` are those sums that cannot hide."""

    layers_forward: float
    layers_backward: float
    moves_forward: float
    moves_backward: float
    sums: float
    waiting: float

    @classmethod
    def of(cls, found: Formulation, choice: Sequence[int]) -> Parts:
        """Take a predicted step apart."""
        cost = evaluate(found.problem, choice)
        waiting = found.waiting_seconds(choice)
        chosen = list(zip(found.problem.variables, choice))
        forward = sum(float(variable.forward[k]) for variable, k in chosen)
        backward = sum(float(variable.backward[k]) for variable, k in chosen)
        return cls(
            forward,
            backward - waiting,
            cost.forward - forward,
            cost.backward - backward,
            cost.sync,
            waiting,
        )

    def seconds(self, step: WholeStep) -> float:
        """Return the seconds of the step with these factors: the planner's objective."""
        forward = step.layers * self.layers_forward + step.moves * self.moves_forward
        backward = step.layers * self.layers_backward + step.moves * self.moves_backward
        return forward + max(backward + step.sums * self.waiting, step.sums * self.sums)


def fit_step(steps: Sequence[Parts], seconds: Sequence[float]) -> WholeStep:
    """Return factors near one with which predicted steps take the measured seconds."""
    measured = np.array(seconds, np.float64)

    def errors(logs: Floats) -> Floats:
        step = _step(logs)
        return np.array([one.seconds(step) for one in steps]) / measured - 1.0

    logs, best, least = np.zeros(3), np.zeros(3), inf
    for _ in range(TURNS):
        off = errors(logs)
        distance = float(off @ off + PRIOR * logs @ logs)
        if distance < least:  # a turn may go too far, where sums begin to hide
            best, least = logs, distance
        slopes = np.stack([(errors(logs + h) - off) / 1e-4 for h in 1e-4 * np.eye(3)], 1)
        both = slopes.T @ slopes + PRIOR * np.eye(3)
        logs = logs - np.linalg.solve(both, slopes.T @ off + PRIOR * logs)
        logs = logs.clip(-log(MOST), log(MOST))
    return _step(best)


def _step(logs: Floats) -> WholeStep:
    layers, moves, sums = np.exp(logs).tolist()
    return WholeStep(layers=layers, moves=moves, sums=sums)
