"""Small random problems and their solution by enumeration."""

from __future__ import annotations

from itertools import product

import numpy as np

from tilewise.planner.solve import (
    Consumer,
    Cost,
    Moves,
    Problem,
    Tie,
    Transfer,
    Variable,
    evaluate,
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


def all_costs(problem: Problem) -> dict[tuple[int, ...], Cost]:
    """Return the cost of every assignment that keeps the ties."""
    costs = {}
    for choice in product(*(range(k) for k in problem.choices)):
        try:
            costs[choice] = evaluate(problem, choice)
        except ValueError:
            continue
    return costs
