"""Joint costs, and branch and bound on them, against enumeration."""

from __future__ import annotations

import time
from dataclasses import astuple
from itertools import product

import numpy as np
import pytest
from random_problems import Counted, all_costs, random_problem, table_cost

from tilewise.planner.solve import Consumer, Problem, Transfer, Variable, evaluate, joint
from tilewise.planner.solve.branch import Branches, Part
from tilewise.planner.solve.joint import Joint, Some
from tilewise.planner.solve.known import know
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.problem import Ints
from tilewise.planner.solve.weights import Weights

SEEDS = range(60)
PENALTY = 1e6
"""Seconds of a broken tie."""


def some_live(problem: Problem, seed: int) -> Live:
    """Return a problem of which about a third of all candidates are gone."""
    rng = np.random.default_rng(seed)
    kept = [
        np.flatnonzero((rng.random(size) < 0.7) | (np.arange(size) == rng.integers(size)))
        for size in problem.choices
    ]
    return Live(problem, 1 << 16, kept)


def among(problem: Problem, candidates: list[Ints]) -> dict[tuple[int, ...], Counted]:
    sets = [set(some.tolist()) for some in candidates]
    return {
        choice: cost
        for choice, cost in all_costs(problem).items()
        if all(k in some for k, some in zip(choice, sets, strict=True))
    }


@pytest.mark.parametrize("together", [0, 1 << 16], ids=["in shares", "exact"])
@pytest.mark.parametrize("seed", SEEDS)
def test_least_sums_bound_all_assignments(
    seed: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint, "TOGETHER", together)
    problem = know(random_problem(seed, topological=seed % 2 == 0, sums=1 + seed % 3))
    live = some_live(problem, seed)
    costs = Joint.of(live, PENALTY)
    rng = np.random.default_rng(seed)
    overlap, *byte = rng.random(1 + problem.sums)
    weights = np.array([1.0, overlap, 1.0 - overlap, *byte])
    some = Some(costs, costs.candidates)
    least, margins = some.least(weights), some.marginals()
    for low in margins:
        assert low.min() == pytest.approx(least)
    sums = {
        choice: np.array([cost.forward, cost.backward, cost.sync, *cost.sums])
        for choice, cost in among(problem, live.candidates).items()
    }
    for choice, cost in sums.items():
        for v, k in enumerate(choice):
            place = int(np.flatnonzero(live.candidates[v] == k)[0])
            assert margins[v][place] <= cost @ weights + 1e-9
    if sums and not costs.shared:
        assert least == pytest.approx(min(cost @ weights for cost in sums.values()))
    found = tuple(int(c[k]) for c, k in zip(live.candidates, some.found, strict=True))
    if found in sums:
        assert some.costs() == pytest.approx(sums[found])
        unpaid = sum(one for one, _ in costs.unpaid(some.found, weights))
        assert least + unpaid == pytest.approx(sums[found] @ weights)
    smaller = [c[: max(len(c) // 2, 1)] for c in costs.candidates]
    again = Some(costs.among(smaller), smaller).least(weights)
    assert again >= Some(costs, smaller).least(weights) - 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_of_all_parts_is_the_best(seed: int) -> None:
    problem = know(
        random_problem(seed, [0.0, 0.5, 1.0, 4.0][seed % 4], seed % 2 == 0, sums=1 + seed % 3)
    )
    live = some_live(problem, seed)
    known = among(problem, live.candidates)
    peaks = sorted({cost.peak_bytes for cost in known.values()})
    caps = [None, *({peaks[0] - 1, peaks[0], peaks[len(peaks) // 3]} if peaks else {10})]
    for cap in caps:
        fitting = [c.seconds for c in known.values() if cap is None or c.peak_bytes <= cap]
        met = [np.inf]

        def take(choice: list[int], cap: int | None = cap, met: list[float] = met) -> None:
            cost = known.get(tuple(choice))
            if cost is not None and (cap is None or cost.peak_bytes <= cap):
                assert astuple(cost) == astuple(evaluate(problem, choice))
                met.append(cost.seconds)

        branches = Branches(
            live,
            costs := Joint.of(live, PENALTY),
            cap,
            max(int(v.burst[c].min()) for v, c in zip(problem.variables, live.candidates)),
            take=take,
            seconds=lambda met=met: min(met),
            ended=lambda: False,
        )
        weights = Weights().of_sums(0 if cap is None else problem.sums)
        branches.add(Part(0.0, weights, costs.candidates, costs))
        branches.run(time.monotonic() + 60)
        assert min(met) == pytest.approx(min(fitting, default=np.inf), rel=1e-8), (seed, cap)
        assert branches.bound >= min(met) * (1 - 1e-8)


def test_parts_that_are_left_hold_the_best() -> None:
    """Where looking ends early, no assignment is lost and none is below the bound."""
    for seed in range(30):
        problem = know(random_problem(seed, sums=2))
        known = all_costs(problem)
        if not known:
            continue
        cap = sorted(cost.peak_bytes for cost in known.values())[len(known) // 3]
        live = Live(problem, 1 << 16)
        costs = Joint.of(live, PENALTY)
        looks = iter(range(seed % 5 + 1))
        branches = Branches(
            live,
            costs,
            cap,
            0,
            take=lambda choice: None,
            seconds=lambda: np.inf,
            ended=lambda looks=looks: next(looks, None) is None,
        )
        branches.add(Part(0.0, Weights().of_sums(2), costs.candidates, costs))
        branches.run(time.monotonic() + 60)
        left = [set(product(*(c.tolist() for c in part.candidates))) for part in branches.parts]
        for choice, cost in known.items():
            if cost.peak_bytes <= cap:
                assert branches.bound <= cost.seconds * (1 + 1e-9)
                alone = all(len(c) == 1 for part in branches.parts for c in part.candidates)
                assert alone or any(choice in part for part in left)


def test_three_readers_of_one_tensor_pay_once() -> None:
    """Two of three readers want the same layout, which is moved to once."""
    variables = tuple(Variable.of(f"v{k}", [0.0, 0.0]) for k in range(4))
    cost = table_cost(np.array([[[0, 7], [7, 0]], [[0, 2], [2, 0]], [[0, 5], [5, 0]]]))
    labels = np.array([0, 1])
    consumers = tuple(Consumer(k, labels) for k in (1, 2, 3))
    problem = know(Problem(variables, (Transfer("t", 0, labels, consumers, cost),)))
    costs = Joint.of(Live(problem, 1 << 16), PENALTY)
    assert not costs.shared
    for choice in product((0, 1), repeat=4):
        some = Some(costs, [np.array([k]) for k in choice])
        some.least(np.array([1.0, 1.0, 0.0, 0.0]))
        moved = any(k != choice[0] for k in choice[1:])
        assert some.costs().tolist() == [7.0 * moved, 2.0 * moved, 0.0, 5.0 * moved]
