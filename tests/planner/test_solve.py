"""The solver against enumeration of all assignments."""

from __future__ import annotations

import time
from dataclasses import astuple, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from networks import unet3d
from random_problems import all_costs, random_problem, table_cost

from tilewise.planner.solve import (
    Consumer,
    InfeasibleError,
    LeastMemory,
    Moves,
    Problem,
    Transfer,
    Variable,
    descend,
    eliminate,
    evaluate,
    least_memory,
    price,
    prices,
    solve,
    solver,
)
from tilewise.planner.solve.pricing import Pricing
from tilewise.planner.solve.problem import Ints
from tilewise.planner.solve.solver import Solver
from tilewise.planner.solve.together import costs_of

SEEDS = range(30)
SYNC = [0.0, 0.5, 1.0, 4.0]


def best_seconds(problem: Problem, cap: int | None = None) -> float:
    costs = all_costs(problem).values()
    return min((c.seconds for c in costs if cap is None or c.peak_bytes <= cap), default=np.inf)


def some_caps(problem: Problem) -> list[int]:
    """Return the least memory there is, and two caps that exclude many assignments."""
    peaks = sorted({c.peak_bytes for c in all_costs(problem).values()})
    return [peaks[0], peaks[len(peaks) // 4], peaks[len(peaks) // 2]]


@pytest.mark.parametrize("sync", SYNC)
@pytest.mark.parametrize("topological", [True, False])
def test_equals_enumeration(sync: float, topological: bool) -> None:
    for seed in SEEDS:
        problem = random_problem(seed, sync, topological)
        found = solve(problem)
        best = best_seconds(problem)
        assert found.optimal, seed
        assert found.seconds == pytest.approx(best, rel=1e-8), seed
        assert found.bound <= best * (1 + 1e-12), seed
        assert evaluate(problem, found.choice).seconds == found.seconds, seed


@pytest.mark.parametrize("sync", [0.5, 4.0])
def test_equals_enumeration_under_a_cap(sync: float) -> None:
    for seed in SEEDS:
        problem = random_problem(1000 + seed, sync)
        for cap in some_caps(problem):
            found = solve(problem, cap)
            best = best_seconds(problem, cap)
            assert found.peak_bytes <= cap, seed
            assert found.optimal, seed
            assert found.seconds == pytest.approx(best, rel=1e-8), seed
            assert found.bound <= best * (1 + 1e-12), seed


def test_bound_holds_without_time_to_solve() -> None:
    for seed in SEEDS:
        problem = random_problem(2000 + seed, topological=False)
        found = solve(problem, time_limit=0.0)
        best = best_seconds(problem)
        assert found.bound <= best * (1 + 1e-12) <= found.seconds * (1 + 1e-11), seed
        if found.bound > 0:
            gap = (found.seconds - found.bound) / found.bound
            assert found.gap == pytest.approx(gap), seed


def test_the_objective_is_what_the_problem_says() -> None:
    """Of each assignment; what is tied apart is refused."""
    for seed in SEEDS:
        problem = random_problem(9000 + seed, sums=1 + seed % 3)
        costs = all_costs(problem)
        for choice in product(*map(range, problem.choices)):
            if choice in costs:
                found = evaluate(problem, choice)
                assert astuple(found) == astuple(costs[choice]), seed
                assert found.seconds == costs[choice].seconds, seed
                assert found.peak_bytes == costs[choice].peak_bytes, seed
            else:
                with pytest.raises(ValueError, match="are tied"):
                    evaluate(problem, choice)


def dearer_layer(
    problem: Problem, choice: tuple[int, ...], part: str, delta: float, which: int
) -> Problem:
    """Make what a layer chose dearer by δ."""
    v = which % len(choice)
    column = getattr(problem.variables[v], part).copy()
    column[choice[v]] += delta
    variables = list(problem.variables)
    variables[v] = replace(variables[v], **{part: column})
    return replace(problem, variables=tuple(variables))


def dearer_move(
    problem: Problem, choice: tuple[int, ...], part: str, delta: float, which: int
) -> Problem:
    """Make the first move of a tensor, as it was chosen, dearer by δ."""
    place = which % len(problem.transfers)
    transfer = problem.transfers[place]
    first = transfer.consumers[0]
    source, target = transfer.leaves[choice[transfer.source]], first.wants[choice[first.variable]]

    def cost(sources: Ints, targets: Ints) -> Moves:
        moves = transfer.cost(sources, targets)
        here = (sources[:, None] == source) & (targets[None, :] == target)
        return replace(moves, **{part: getattr(moves, part) + delta * here})

    transfers = list(problem.transfers)
    transfers[place] = replace(transfer, cost=cost)
    return replace(problem, transfers=tuple(transfers))


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("part", ["forward", "backward", "sync"])
def test_a_changed_cost_changes_the_answer(part: str, capped: bool) -> None:
    """Making what was chosen dearer by δ costs δ at most, or the way around it."""
    for seed in SEEDS:
        problem = random_problem(3000 + seed, SYNC[seed % len(SYNC)])
        cap = some_caps(problem)[1 + seed % 2] if capped else None
        before = solve(problem, cap)
        moves = part != "sync" and len(problem.transfers) > 0
        for change, delta in product((dearer_layer, dearer_move)[: 1 + moves], (0.5, 30.0)):
            dearer = change(problem, before.choice, part, delta, seed)
            after = solve(dearer, cap)
            assert after.seconds == pytest.approx(best_seconds(dearer, cap), rel=1e-8), seed
            assert -1e-9 <= after.seconds - before.seconds <= delta + 1e-9, seed
            assert cap is None or after.peak_bytes <= cap, seed


@pytest.mark.parametrize("capped", [False, True])
def test_a_dearer_choice_costs_as_much_or_the_way_around(capped: bool) -> None:
    """Where nothing hides, it is exactly the less of both."""
    for seed in SEEDS:
        problem = random_problem(3000 + seed, 0.0)
        cap = some_caps(problem)[1 + seed % 2] if capped else None
        costs = all_costs(problem).items()
        fits = {x: c.seconds for x, c in costs if cap is None or c.peak_bytes <= cap}
        before = solve(problem, cap)
        for delta in (0.5, 30.0):
            dearer = dearer_layer(problem, before.choice, "forward", delta, seed)
            v = seed % len(before.choice)
            others = [seconds for x, seconds in fits.items() if x[v] != before.choice[v]]
            after = solve(dearer, cap)
            expected = min([before.seconds + delta, *others])
            assert after.seconds == pytest.approx(expected, rel=1e-8), seed


def test_a_tensor_wanted_twice_is_moved_once() -> None:
    source = Variable.of("a", [0.0])
    same = Variable.of("b", [5.0, 0.0])
    wants = np.array([0, 1])
    consumers = (Consumer(1, wants), Consumer(2, wants), Consumer(3, wants))
    moves = table_cost(np.array([[[0, 12]], [[0, 0]], [[0, 0]]]))
    problem = Problem(
        (source, same, same, same), (Transfer("t", 0, np.array([0]), consumers, moves),)
    )
    found = solve(problem)
    assert found.choice == (0, 1, 1, 1)
    assert found.seconds == 12.0
    cheaper = Variable.of("c", [1.0, 0.0])
    assert solve(replace(problem, variables=(source, same, same, cheaper))).choice == (0, 0, 0, 0)


def test_gradient_sums_hide_behind_backward() -> None:
    problem = Problem(
        (
            Variable.of("a", [1.0, 1.0], [4.0, 6.0], [9.0, 1.0]),
            Variable.of("b", [1.0], [3.0], [2.0]),
        )
    )
    found = solve(problem)
    assert found.choice == (1, 0)
    assert found.seconds == 2.0 + 9.0


def test_infeasible_says_what_is_needed_and_by_whom() -> None:
    problem = Problem(
        (
            Variable.of("small", [1.0, 2.0], held=[30, 10], burst=[5, 5]),
            Variable.of("large", [1.0, 2.0], held=[300, 100], burst=[0, 50]),
        )
    )
    with pytest.raises(InfeasibleError, match="large") as caught:
        solve(problem, 100)
    assert caught.value.least.exact
    assert caught.value.least.peak_bytes == 160
    assert caught.value.holders == (("large", 100), ("small", 10))
    assert solve(problem, 160).choice == (1, 1)


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (0, "seems too small: the smallest plan found needs NEEDED; most"),
        (50 << 20, "seems too small: the smallest plan found needs NEEDED; 50 MiB or more are"),
        ((100 << 20) + 1, "is too small: the smallest plan found needs NEEDED; more than 100 MiB"),
        (200 << 20, "is too small: the smallest plan found needs NEEDED; 200 MiB or more are"),
        (300 << 20, "is too small: the smallest plan needs NEEDED; most"),
    ],
)
def test_infeasible_says_no_more_than_is_proven(bound: int, said: str) -> None:
    error = InfeasibleError(100 << 20, LeastMemory((0,), 300 << 20, bound), [("a", 200 << 20)])
    assert said.replace("NEEDED", "300 MiB (314,572,800 bytes)") in str(error)
    assert "memory (=100 MiB)" in str(error)
    assert "most is held by a (200 MiB)" in str(error)


def test_least_memory_equals_enumeration() -> None:
    for seed in SEEDS:
        problem = random_problem(4000 + seed, topological=seed % 2 == 0)
        least = least_memory(problem)
        assert least is not None
        assert least.exact
        assert least.peak_bytes == min(c.peak_bytes for c in all_costs(problem).values()), seed
        assert evaluate(problem, least.choice).peak_bytes == least.peak_bytes


def enumerated(problem: Problem, v: int, k: int, cap: int | None) -> float:
    """Return the best time of all assignments with a candidate that fit."""
    costs = all_costs(problem).items()
    fits = [c.seconds for x, c in costs if x[v] == k and (cap is None or c.peak_bytes <= cap)]
    return min(fits, default=np.inf)


@pytest.mark.parametrize("capped", [False, True])
def test_prices_equal_enumeration(capped: bool) -> None:
    for seed in range(25):
        problem = random_problem(5000 + seed)
        cap = some_caps(problem)[2] if capped else None
        v = seed % len(problem.variables)
        found = price(problem, v, cap)
        assert found.exact.all(), seed
        for k, seconds in enumerate(found.seconds):
            assert seconds == pytest.approx(enumerated(problem, v, k, cap), rel=1e-8), seed


@pytest.mark.parametrize("capped", [False, True])
def test_prices_of_all_variables_equal_enumeration(capped: bool) -> None:
    for seed in range(10):
        problem = random_problem(8000 + seed, topological=seed % 2 == 0)
        cap = some_caps(problem)[2] if capped else None
        best = solve(problem, cap)
        costs = all_costs(problem)
        for v, one in enumerate(prices(problem, best, cap, most=3, time_limit=600.0)):
            cheapest = np.argsort(one.seconds, kind="stable")[:3]
            assert one.exact[cheapest].all(), seed
            for k, (seconds, exact) in enumerate(zip(one.seconds, one.exact, strict=True)):
                expected = enumerated(problem, v, k, cap)
                if exact:
                    assert seconds == pytest.approx(expected, rel=1e-8), seed
                assert seconds <= expected * (1 + 1e-9), seed
                alone = costs.get((*best.choice[:v], k, *best.choice[v + 1 :]))
                fits = alone is not None and (cap is None or alone.peak_bytes <= cap)
                assert one.alone[k] == (pytest.approx(alone.seconds) if fits and alone else np.inf)
            assert one.seconds[best.choice[v]] == pytest.approx(best.seconds)
            assert one.alone_bytes[best.choice[v]] == best.peak_bytes


def test_costs_of_many_assignments_are_those_of_each() -> None:
    for seed in range(25):
        problem = random_problem(7000 + seed)
        every = np.array(list(product(*map(range, problem.choices))))
        costs = all_costs(problem)
        for choice, seconds, peak in zip(every.tolist(), *costs_of(problem, every), strict=True):
            cost = costs.get(tuple(choice))
            assert seconds == (np.inf if cost is None else pytest.approx(cost.seconds)), seed
            assert cost is None or peak == cost.peak_bytes, seed


@pytest.mark.parametrize("capped", [False, True])
def test_bounds_within_a_reach_hold(capped: bool) -> None:
    """Candidates that leave, and those that stay, are never bounded above their price."""
    settled = 0
    for seed in range(25):
        problem = random_problem(7500 + seed)
        cap = some_caps(problem)[2] if capped else None
        pricing = Pricing(problem, cap, solve(problem, cap))
        v = seed % len(problem.variables)
        pricing.together(v, time.monotonic() + 30.0)
        settled += pricing.settled(v)
        for u in range(len(problem.variables)):
            for k, seconds in enumerate(pricing.prices(u).seconds):
                assert seconds <= enumerated(problem, u, k, cap) * (1 + 1e-9), seed
    assert capped or settled > 5


def test_prices_without_time_are_bounds() -> None:
    for seed in range(25):
        problem = random_problem(6000 + seed)
        exact = price(problem, 0)
        rough = price(problem, 0, time_limit=0.0)
        assert (rough.seconds <= exact.seconds * (1 + 1e-8)).all(), seed
        proven = rough.seconds[rough.exact]
        assert proven == pytest.approx(exact.seconds[rough.exact], rel=1e-8), seed


def test_many_candidates_need_few_moves_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds over all candidates hold though most moves are never computed."""
    problem = unet3d(4, 2)
    whole = solve(problem)
    assert whole.optimal
    monkeypatch.setattr("tilewise.planner.solve.known.LARGEST", 0)
    monkeypatch.setattr("tilewise.planner.solve.solver.ENTRIES", 64)
    part = solve(problem)
    assert part.optimal
    assert part.seconds == pytest.approx(whole.seconds, rel=1e-8)


class Ticking:
    """A clock that goes on by one whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_no_part_of_the_solver_works_on_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {True: 0, False: 0}
    for limit in range(1, 60):
        problem = random_problem(limit % 10)
        clock = Ticking()
        for module in (descend, eliminate, solver):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
        one = Solver(problem, None, clock.now + limit)
        one.start(())
        one.solve()
        over = clock.now - limit
        if one.best is None:
            continue  # no start keeps the ties
        assert one.bound <= best_seconds(problem) * (1 + 1e-9) <= one.seconds * (1 + 2e-9)
        assert one.closed or over <= 2
        ended[one.closed] += 1
    assert min(ended.values()) > 5


def test_nothing_that_takes_no_time_hangs() -> None:
    """Bytes above the cap cost time even where all else costs none."""
    only = Problem((Variable.of("only", [0.0], held=[5]),))
    with pytest.raises(InfeasibleError, match="is too small: the smallest plan needs 5 B"):
        solve(only, 4, time_limit=5.0)
    either = Problem((Variable.of("either", [0.0, 1.0], held=[7, 5]),))
    assert descend.Descent(either, 5)([0]) == [1]
    assert solve(either, 5, time_limit=5.0).choice == (1,)


def test_a_tensor_may_have_very_many_readers() -> None:
    """More than an array may have axes."""
    count = 70
    variables = [
        Variable.of(f"v{k}", [1.0] if k else [1.0, 2.0], held=[0] * (1 if k else 2))
        for k in range(count + 1)
    ]
    consumers = tuple(Consumer(k, np.zeros(1, np.int64)) for k in range(1, count + 1))
    moves = table_cost(np.array([[[6], [1]], [[0], [0]], [[0], [0]]]))
    tensor = Transfer("x", 0, np.arange(2), consumers, moves)
    for cap in (None, 1 << 20):
        found = solve(Problem(tuple(variables), (tensor,)), cap, time_limit=20.0)
        assert (found.choice[0], found.optimal) == (1, True)
