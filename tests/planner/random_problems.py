"""Small random problems and their solution by enumeration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from tilewise.planner.solve import (
    Consumer,
    Moves,
    Problem,
    Tie,
    Transfer,
    Variable,
)
from tilewise.planner.solve.problem import Ints, MoveCost


def random_problem(
    seed: int, sync: float = 1.0, topological: bool = True, sums: int = 1
) -> Problem:
    """Return a problem of 2 to 5 variables with branches, sharing and sometimes a tie.

    `sync` scales the gradient sums, so that they hide or dominate; `sums` is how many sums of held
    bytes there are.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 6))
    sizes = rng.integers(1, 5, count)
    variables = tuple(
        Variable.of(
            f"v{k}",
            rng.integers(0, 20, size),
            rng.integers(0, 20, size),
            sync * rng.integers(0, 40, size),
            rng.integers(0, 50, (size, sums)),
            rng.integers(0, 30, size),
        )
        for k, size in enumerate(sizes)
    )
    transfers = []
    for source in range(count):
        others = (
            range(source + 1, count) if topological else [k for k in range(count) if k != source]
        )
        readers = [k for k in others if rng.random() < 0.5]
        if readers and rng.random() < 0.2:
            readers.append(readers[0])
        labels = int(rng.integers(1, 4))
        consumers = tuple(Consumer(k, rng.integers(0, labels, sizes[k])) for k in readers)
        if consumers:
            leaves = rng.integers(0, labels, sizes[source])
            cost = table_cost(rng.integers(0, 15, (3, labels, labels)))
            counts = (1,) if sums == 1 else tuple(rng.integers(0, 2, sums).tolist())
            transfers.append(Transfer(f"t{source}", source, leaves, consumers, cost, counts))
    ties = []
    if count > 2 and rng.random() < 0.4:
        tied = tuple(sorted(rng.choice(count, int(rng.integers(2, 4)), replace=False).tolist()))
        ties.append(Tie(tied, tuple(np.arange(sizes[k]) % 2 for k in tied)))
    return Problem(variables, tuple(transfers), tuple(ties))


def table_cost(tables: np.ndarray) -> MoveCost:
    """Look moves up in tables of forward, backward and held by (source label, target label)."""

    def cost(source: Ints, target: Ints) -> Moves:
        forward, backward, held = tables[:, source[:, None], target[None, :]]
        return Moves(forward.astype(float), backward.astype(float), held)

    return cost


@dataclass(frozen=True)
class Counted:
    """What an assignment costs, counted here and not by the code that is tested."""

    forward: float
    backward: float
    sync: float
    sums: tuple[int, ...]
    burst_bytes: int

    @property
    def seconds(self) -> float:
        """A sum that takes longer than backward sticks out."""
        return self.forward + (self.sync if self.sync > self.backward else self.backward)

    @property
    def held_bytes(self) -> int:
        """The largest of the sums."""
        return sorted(self.sums)[-1]

    @property
    def peak_bytes(self) -> int:
        """What is held and what comes for a moment."""
        return self.held_bytes + self.burst_bytes


def all_costs(problem: Problem) -> dict[tuple[int, ...], Counted]:
    """Return the cost of every assignment that keeps the ties."""
    every = product(*(range(k) for k in problem.choices))
    return {choice: counted(problem, choice) for choice in every if keeps_ties(problem, choice)}


def keeps_ties(problem: Problem, choice: Sequence[int]) -> bool:
    """Whether all members of each tie have chosen the same label."""
    for tie in problem.ties:
        first = tie.labels[0][choice[tie.variables[0]]]
        for member, labels in zip(tie.variables, tie.labels, strict=True):
            if labels[choice[member]] != first:
                return False
    return True


def moved(problem: Problem, choice: Sequence[int]) -> Iterator[tuple[Transfer, Moves]]:
    """Yield each move once: a tensor, to a label that one or more of its readers want."""
    for transfer in problem.transfers:
        leaves = int(transfer.leaves[choice[transfer.source]])
        done: list[int] = []
        for consumer in transfer.consumers:
            wants = int(consumer.wants[choice[consumer.variable]])
            if wants not in done:
                done.append(wants)
                yield transfer, transfer.cost(np.array([leaves]), np.array([wants]))


def counted(problem: Problem, choice: Sequence[int]) -> Counted:
    """Add up what problem.py says of a problem, number by number."""
    forward = backward = sync = 0.0
    held, burst = [0] * problem.sums, 0
    for number, candidate in enumerate(choice):
        variable = problem.variables[number]
        forward += float(variable.forward[candidate])
        backward += float(variable.backward[candidate])
        sync += float(variable.sync[candidate])
        burst = max(burst, int(variable.burst[candidate]))
        for column in range(problem.sums):
            held[column] += int(variable.held[candidate][column])
    for transfer, moves in moved(problem, choice):
        forward += float(moves.forward[0, 0])
        backward += float(moves.backward[0, 0])
        for column in range(problem.sums):
            held[column] += int(transfer.counts[column]) * int(moves.held[0, 0])
    return Counted(forward, backward, sync, tuple(held), burst)
