"""The objective of one assignment, in a few plain lines: the reference for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise.planner.solve.problem import Problem


@dataclass(frozen=True, slots=True)
class Cost:
    """What an assignment costs in time and memory; `sums` are the bytes held in each sum."""

    forward: float
    backward: float
    sync: float
    sums: tuple[int, ...]
    burst_bytes: int

    @property
    def seconds(self) -> float:
        """The time of a step; the gradient sums hide behind the backward pass."""
        return self.forward + max(self.backward, self.sync)

    @property
    def held_bytes(self) -> int:
        """The largest sum."""
        return max(self.sums)

    @property
    def peak_bytes(self) -> int:
        """The memory of the fullest rank."""
        return self.held_bytes + self.burst_bytes


def evaluate(problem: Problem, choice: Sequence[int]) -> Cost:
    """Return the cost of choosing candidate `choice[i]` for each variable i.

    Raises:
        ValueError: the choice breaks a tie.
    """
    if len(choice) != len(problem.variables):
        raise ValueError(f"evaluate: {len(choice)} choices for {len(problem.variables)} variables")
    forward = backward = sync = 0.0
    held, burst = np.zeros(problem.sums, np.int64), 0
    for variable, k in zip(problem.variables, choice):
        forward += float(variable.forward[k])
        backward += float(variable.backward[k])
        sync += float(variable.sync[k])
        held += variable.held[k]
        burst = max(burst, int(variable.burst[k]))
    for transfer in problem.transfers:
        leaves = transfer.leaves[[choice[transfer.source]]]
        wanted = {int(c.wants[choice[c.variable]]) for c in transfer.consumers}
        moves = transfer.cost(leaves, np.array(sorted(wanted), np.int64))
        forward += float(moves.forward.sum())
        backward += float(moves.backward.sum())
        held += np.array(transfer.counts) * moves.held.sum()
    for tie in problem.ties:
        labels = {int(labels[choice[v]]) for v, labels in zip(tie.variables, tie.labels)}
        if len(labels) > 1:
            names = ", ".join(problem.variables[v].name for v in tie.variables)
            raise ValueError(f"evaluate: {names} are tied, but the choice gives labels {labels}")
    return Cost(forward, backward, sync, tuple(held.tolist()), burst)
