"""Several sums of held bytes under one limit, against enumeration of all assignments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from random_problems import all_costs, random_problem

from drawing import THOROUGH
from tilewise.planner.solve import (
    Descent,
    InfeasibleError,
    Problem,
    eliminate,
    evaluate,
    known,
    least_memory,
    price,
    solve,
)
from tilewise.planner.solve import search as search_module
from tilewise.planner.solve import solver as solver_module
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.planes import highest
from tilewise.planner.solve.problem import Ints, Moves, Transfer
from tilewise.planner.solve.restrict import mean
from tilewise.planner.solve.solver import Solver
from tilewise.planner.solve.weights import Weights

SEEDS = range(25 if THOROUGH else 12)


def tight_caps(problem: Problem, count: int = 4) -> list[int]:
    """Return caps from the least that any assignment needs up."""
    peaks = np.unique([cost.peak_bytes for cost in all_costs(problem).values()])
    return peaks[np.unique(np.linspace(0, len(peaks) - 1, count).astype(int))].tolist()


@pytest.mark.parametrize(("sums", "much"), [(2, False), (5, False), (3, True)])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_that_keeps_all_sums(
    seed: int, sums: int, much: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it takes minima alone, few candidates and a narrow search to begin with."""
    if much:
        monkeypatch.setattr(solver_module, "HEAVY", -1)
        monkeypatch.setattr(solver_module, "FEW", 2)
        monkeypatch.setattr(solver_module, "NARROWEST", 2)
        monkeypatch.setattr(search_module, "MOST", 3)
        monkeypatch.setattr(eliminate, "CHUNK_OF_ALL", 7)
    problem = random_problem(seed, sums=sums)
    costs = all_costs(problem)
    for cap in tight_caps(problem):
        best = min(cost.seconds for cost in costs.values() if cost.peak_bytes <= cap)
        found = solve(problem, cap)
        assert found.optimal
        assert found.seconds == pytest.approx(best, rel=1e-8)
        assert found.peak_bytes == costs[found.choice].peak_bytes <= cap
    least = min(cost.peak_bytes for cost in costs.values())
    with pytest.raises(InfeasibleError) as caught:
        solve(problem, least - 1)
    assert caught.value.least.bound <= least <= caught.value.least.peak_bytes


def first_two_sums(problem: Problem) -> Problem:
    variables = tuple(replace(v, held=v.held[:, :2]) for v in problem.variables)
    transfers = tuple(replace(t, counts=t.counts[:2]) for t in problem.transfers)
    return Problem(variables, transfers, problem.ties)


def judge(
    fits: Collection[tuple[int, ...]], other: bool | None, choice: tuple[int, ...]
) -> bool | None:
    return True if choice in fits else other


@pytest.mark.parametrize("much", ["", "HEAVY", "WORK"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_problem_does_not_know(
    seed: int, much: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two of four sums and a judge of all, bounds hold, and so does what is left.

    Where a minimum is much work, few candidates are tried first; where it is too much, a problem
    that lacks something ends before all is looked through.
    """
    if much:
        monkeypatch.setattr(solver_module, "FEW", 1)
        monkeypatch.setattr(solver_module, "HEAVY", -1)
    if much == "WORK":
        monkeypatch.setattr(solver_module, "WORK", 0)
    every = random_problem(900 + seed, sums=4)
    some = first_two_sums(every)
    costs = all_costs(every)
    for cap in tight_caps(every):
        fits = {choice: cost.seconds for choice, cost in costs.items() if cost.peak_bytes <= cap}
        for stops in (None, False):
            solver = Solver(some, cap, np.inf, judge=partial(judge, fits, stops))
            if stops is False:
                solver.start(())  # the other one might end there
            solver.solve()
            assert solver.statistics["rounds"] or solver.closed
            best = min(fits.values())
            assert solver.bound <= best * (1 + 1e-8)
            assert solver.best is None or solver.best in fits
            if solver.closed:
                assert solver.seconds == pytest.approx(best, rel=1e-8)
            for choice, seconds in fits.items():
                if seconds < solver.seconds * (1 - 1e-8):
                    assert all(k in few for k, few in zip(choice, solver.candidates))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_solver_goes_on_with_what_another_knows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer sums first: what is left, moves and messages are its, and bounds hold."""
    monkeypatch.setattr(known, "LARGEST", -1)
    every = random_problem(900 + seed, sums=4)
    asked: list[int] = []

    def counted(transfer: Transfer) -> Transfer:
        def cost(source: Ints, target: Ints) -> Moves:
            asked.append(len(source) * len(target))
            return transfer.cost(source, target)

        return replace(transfer, cost=cost)

    every = replace(every, transfers=tuple(map(counted, every.transfers)))
    some = first_two_sums(every)
    costs = all_costs(every)
    for cap in tight_caps(every):
        fits = {choice: cost.seconds for choice, cost in costs.items() if cost.peak_bytes <= cap}
        asked.clear()
        first = Solver(some, cap, np.inf, judge=partial(judge, fits, None))
        first.solve()
        best = min(fits.values())
        if first.closed:
            assert first.seconds == pytest.approx(best, rel=1e-8)
            continue
        assert asked or not every.transfers
        asked.clear()
        second = Solver(
            every, cap, np.inf, first.seconds, judge=partial(judge, fits, False), before=first
        )
        assert not asked
        second.resume(Weights(1.0, (0.0,) * 4), first.bound, ())
        second.solve()
        assert second.closed
        assert second.seconds == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_few_candidates_first_and_small_drops_later_change_no_answer(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver_module, "HEAVY", -1)
    monkeypatch.setattr(solver_module, "FEW", 1)
    monkeypatch.setattr(solver_module, "MANY", -1)
    monkeypatch.setattr(solver_module, "WORTH", 0.3)
    problem = random_problem(1300 + seed, sums=2)
    costs = all_costs(problem)
    for cap in (None, *tight_caps(problem)):
        fits = [c.seconds for c in costs.values() if cap is None or c.peak_bytes <= cap]
        found = solve(problem, cap)
        assert found.optimal
        assert found.seconds == pytest.approx(min(fits), rel=1e-8)


def test_what_is_not_worth_it_gets_little_time_and_no_more_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solver_module, "ENTRIES", 1)
    problem = random_problem(0, sums=1)
    grown = []
    monkeypatch.setattr(Live, "grow", lambda self, deadline: grown.append(deadline) or False)
    unworthy = solve(problem, time_limit=600.0, worth=lambda _: False)
    assert not grown
    answers = iter((False, True))  # little time finds one that is worth more
    solve(problem, time_limit=600.0, worth=lambda _: next(answers))
    assert grown
    best = min(cost.seconds for cost in all_costs(problem).values())
    assert unworthy.bound <= best <= unworthy.seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mean_is_never_above_the_largest_sum(seed: int) -> None:
    problem = random_problem(500 + seed, sums=3)
    weights = np.random.default_rng(seed).random(3)
    one = mean(problem, weights)
    for choice, cost in all_costs(problem).items():
        assert evaluate(one, choice).peak_bytes <= cost.peak_bytes
        assert evaluate(one, choice).seconds == cost.seconds
    least = least_memory(problem)
    assert least is not None
    assert least.bound <= min(cost.peak_bytes for cost in all_costs(problem).values())
    assert least.peak_bytes == evaluate(problem, least.choice).peak_bytes
    alone = Problem(
        tuple(replace(v, held=v.held[:, :1]) for v in problem.variables),
        tuple(replace(t, counts=t.counts[:1]) for t in problem.transfers),
        problem.ties,
    )
    first = least_memory(alone)
    assert first is not None
    assert first.peak_bytes == min(cost.peak_bytes for cost in all_costs(alone).values())


@pytest.mark.parametrize("seed", range(10))
def test_prices_under_several_sums(seed: int) -> None:
    problem = random_problem(300 + seed, sums=3)
    costs = all_costs(problem)
    cap = tight_caps(problem)[1]
    found = price(problem, 0, cap, time_limit=600.0)
    for k in range(problem.choices[0]):
        fits = [c.seconds for x, c in costs.items() if x[0] == k and c.peak_bytes <= cap]
        assert found.exact[k]
        assert found.seconds[k] == pytest.approx(min(fits, default=np.inf), rel=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_descents_lose_nothing_that_fits(seed: int) -> None:
    problem = random_problem(700 + seed, sums=3)
    costs = all_costs(problem)
    fitted = 0
    for cap in tight_caps(problem):
        descent = Descent(problem, cap)
        for start in list(costs)[:: max(len(costs) // 5, 1)]:
            found = costs[tuple(descent(start, byte=(0.0, 0.1, 0.0)))]
            before = costs[start]
            if before.peak_bytes <= cap:
                assert found.peak_bytes <= cap
                assert found.seconds <= before.seconds * (1 + 1e-9)
            fitted += found.peak_bytes <= cap
    assert fitted


@pytest.mark.parametrize("seed", SEEDS)
def test_where_the_lowest_plane_is_highest(seed: int) -> None:
    """Against all corners that planes and limits make."""
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    constants = rng.random(rows) * 10.0 ** rng.integers(-3, 3)
    slopes = np.round(rng.normal(size=(rows, columns)) * 4) * 10.0 ** rng.integers(-2, 3, columns)
    most = rng.random(columns) * 10.0 ** rng.integers(-2, 3)
    place, height, mixture = highest(constants, slopes, most)
    assert (mixture >= 0).all()
    assert mixture.sum() == pytest.approx(1.0)
    over = (mixture @ slopes).clip(0.0)
    assert mixture @ constants + over @ most == pytest.approx(height)
    assert (place >= 0).all()
    assert (place <= most).all()
    assert height == pytest.approx((constants + slopes @ place).min())
    # planes z - g.y = a, and y = 0, and y = most
    left = np.block(
        [
            [np.ones((rows, 1)), -slopes],
            [np.zeros((columns, 1)), np.eye(columns)],
            [np.zeros((columns, 1)), np.eye(columns)],
        ]
    )
    right = np.concatenate((constants, np.zeros(columns), most))
    best = -np.inf
    for some in combinations(range(len(left)), columns + 1):
        matrix = left[list(some)]
        if abs(np.linalg.det(matrix)) > 1e-9:
            corner = np.linalg.solve(matrix, right[list(some)])[1:]
            if (corner >= -1e-9 * most).all() and (corner <= most * (1 + 1e-9)).all():
                best = max(best, float((constants + slopes @ corner).min()))
    assert height == pytest.approx(best, rel=1e-6, abs=1e-9 * float(np.abs(constants).max()))
