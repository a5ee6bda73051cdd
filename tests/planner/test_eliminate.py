"""Elimination against enumeration of all assignments."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from random_problems import all_costs, random_problem

from tilewise.planner.solve import eliminate
from tilewise.planner.solve.eliminate import Elimination, Factor, good_order
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.problem import Floats
from tilewise.planner.solve.relax import Relaxation
from tilewise.planner.solve.terms import Terms
from tilewise.planner.solve.weights import Weights

SEEDS = range(40)
Sums = dict[tuple[int, ...], float]


def random_terms(seed: int) -> tuple[list[Floats], list[Factor]]:
    """Return costs of 1 to 6 variables, and terms of two or three of them by random classes."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, int(rng.integers(1, 7)))
    costs = [rng.normal(size=size) for size in sizes]
    factors = []
    for _ in range(int(rng.integers(0, 9))):
        count = min(int(rng.integers(2, 4)), len(sizes))
        some = tuple(rng.choice(len(sizes), count, replace=False).tolist())
        classes = [
            np.unique(rng.integers(0, 3, sizes[v]), return_inverse=True)[1].reshape(-1)
            for v in some
        ]
        shape = [int(c.max()) + 1 for c in classes]
        factors.append(Factor(some, tuple(classes), rng.normal(size=shape)))
    return costs, factors


def all_sums(costs: list[Floats], factors: list[Factor]) -> Sums:
    return {
        x: sum(float(cost[k]) for cost, k in zip(costs, x))
        + sum(
            float(f.values[tuple(c[x[v]] for v, c in zip(f.variables, f.classes))]) for f in factors
        )
        for x in product(*(range(len(cost)) for cost in costs))
    }


@pytest.mark.parametrize("at_once", [1, 7, eliminate.CHUNK_OF_ALL])
@pytest.mark.parametrize("in_turn", [True, False])
def test_least_sum_and_marginals_equal_enumeration(
    in_turn: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eliminate, "CHUNK", at_once)
    monkeypatch.setattr(eliminate, "CHUNK_OF_ALL", at_once)
    for seed in SEEDS:
        costs, factors = random_terms(seed)
        sizes = [len(cost) for cost in costs]
        order = good_order(sizes, factors, range(len(sizes)) if in_turn else None)
        assert sorted(order.variables) == list(range(len(sizes)))
        found = Elimination(costs, factors, order.variables, order.work)
        sums = all_sums(costs, factors)
        assert found.exact
        assert found.least == pytest.approx(min(sums.values()))
        assert sums[tuple(found.best())] == pytest.approx(found.least)
        for v, marginal in enumerate(found.marginals()):
            for k, least in enumerate(marginal):
                assert least == pytest.approx(min(s for x, s in sums.items() if x[v] == k)), seed


def test_the_last_variable_has_the_least_sum_with_each_candidate() -> None:
    for seed in SEEDS:
        costs, factors = random_terms(300 + seed)
        last = seed % len(costs)
        order = good_order([len(cost) for cost in costs], factors, last=last)
        assert order.variables[-1] == last
        least, places = Elimination(costs, factors, order.variables, order.work).with_last()
        sums = all_sums(costs, factors)
        for k, choice in enumerate(zip(*(some.tolist() for some in places), strict=True)):
            assert choice[last] == k
            assert least[k] == pytest.approx(min(s for x, s in sums.items() if x[last] == k)), seed
            assert sums[choice] == pytest.approx(least[k]), seed


def test_a_small_bucket_bounds_from_below() -> None:
    broken = 0
    for seed in SEEDS:
        costs, factors = random_terms(100 + seed)
        order = good_order([len(cost) for cost in costs], factors)
        found = Elimination(costs, factors, order.variables, 16)
        broken += not found.exact
        assert found.least <= min(all_sums(costs, factors).values()) + 1e-9, seed
    assert broken


@pytest.mark.parametrize("largest", [16, 1 << 20])
def test_what_candidates_add_leads_from_the_bound_to_the_sum(largest: int) -> None:
    """No step goes down, so what is left of a partial assignment never costs less than promised."""
    for seed in SEEDS:
        costs, factors = random_terms(200 + seed)
        order = good_order([len(cost) for cost in costs], factors)
        found = Elimination(costs, factors, order.variables, largest)
        sums = all_sums(costs, factors)
        chosen = {v: np.array([x[v] for x in sums]) for v in range(len(costs))}
        bounds = np.full(len(sums), found.least)
        for v in reversed(order.variables):
            rise = sum(bucket.at(chosen) for bucket in found.buckets[v])
            every = sum(bucket.rows(chosen) for bucket in found.buckets[v])
            every = np.broadcast_to(every, (len(sums), len(costs[v])))
            assert rise == pytest.approx(every[np.arange(len(sums)), chosen[v]])
            assert (np.asarray(rise) >= -1e-9).all()
            bounds += rise
        assert bounds == pytest.approx(np.array(list(sums.values()))), seed


@pytest.mark.parametrize("sweeps", [0, 2])
def test_terms_never_overcharge_a_problem(sweeps: int) -> None:
    """And are exact, messages or not, where no tensor has more than two consumers."""
    weights = Weights(0.7, (0.01,))
    exact = 0
    for seed in SEEDS:
        problem = random_problem(seed, topological=seed % 2 == 0)
        relaxation = Relaxation(Live(problem, 1 << 16), weights, 1e6)
        for _ in range(sweeps):
            relaxation.sweep()
        found = Terms(relaxation, weights).eliminate()
        least = min(
            c.forward + 0.7 * c.backward + 0.3 * c.sync + 0.01 * c.held_bytes
            for c in all_costs(problem).values()
        )
        assert found.least <= least * (1 + 1e-9), seed
        members = [[c.variable for c in t.consumers] for t in problem.transfers]
        if all(len(set(m)) == len(m) <= 2 for m in members):
            exact += 1
            assert found.least == pytest.approx(least), seed
    assert exact
