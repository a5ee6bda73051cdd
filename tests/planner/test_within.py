"""Plans under a limit of memory, judged by their peak, against all plans of small networks."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plans import graph_of
from tilewise import Graph, capture, search
from tilewise.layout import Degrees
from tilewise.planner.baselines import baselines
from tilewise.planner.candidates import all_degrees
from tilewise.planner.cost import Setting
from tilewise.planner.formulate import formulate
from tilewise.planner.formulation import Formulation
from tilewise.planner.machine import load_machine
from tilewise.planner.moment import Sums
from tilewise.planner.solve import InfeasibleError, evaluate, solve
from tilewise.planner.solve.restrict import mean
from tilewise.planner.timeline import PHASES, Moment, Moments, moments, peak_bytes
from tilewise.planner.within import Within, least_peak


class Random(nn.Module):
    """A few layers that are chained, added or joined at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.width = int(rng.choice([4, 6]))
        self.joins = rng.integers(0, 3, 2).tolist()
        wide = [self.width, self.width * (2 if self.joins[0] == 2 else 1)]
        self.first = nn.Conv1d(3, self.width, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv1d(k, self.width, 3, padding=1) for k in wide)
        last = self.width * (2 if self.joins[1] == 2 else 1)
        self.last = nn.Linear(last * 16, int(rng.choice([6, 300])))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        older = x
        for layer, join in zip(self.layers, self.joins):
            made = layer(x)
            both = made if join == 0 else made + older if join == 1 else torch.cat((made, older), 1)
            older, x = made, both
        y: Tensor = self.last(x.flatten(1))
        return y


class Skipped(nn.Module):
    """A tensor with two readers, a window, and a layer with most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Conv1d(8, 8, 3, padding=1)
        self.last = nn.Linear(8 * 120, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y: Tensor = self.last((x + self.second(x)).flatten(1))
        return y


@cache
def skipped() -> Graph:
    torch.manual_seed(0)
    return capture(Skipped(), (torch.zeros(4, 3, 120),), F.cross_entropy)


@cache
def every_plan(recompute: bool) -> list[tuple[float, int]]:
    """Return seconds and peak of all plans."""
    setting = Setting(load_machine("p100x4"), 2, "float32", 4, "adam")
    found = formulate(skipped(), setting, recompute=recompute)
    choices = product(*(range(k) for k in found.problem.choices))
    return [(evaluate(found.problem, c).seconds, peak_bytes(found, c)) for c in choices]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_limited_plan_is_as_good_as_it_says(recompute: bool) -> None:
    plans = every_plan(recompute)
    peaks = sorted({peak for _, peak in plans})
    fastest = min(plans)[1]
    proven = 0
    limits = [*np.linspace(peaks[0], fastest, 6).astype(int).tolist(), peaks[1], fastest - 1]
    for limit in limits:
        best = min(seconds for seconds, peak in plans if peak <= limit)
        found = search(
            skipped(), devices=2, machine="p100x4", memory=limit, recompute=recompute, time_limit=10
        )
        assert found.peak_bytes <= limit
        assert found.step_seconds >= best * (1 - 1e-9)
        assert found.step_seconds <= best * (1 + found.gap) * (1 + 1e-8)
        assert found.step_seconds == pytest.approx(best, rel=1e-8) or not found.optimal
        proven += found.optimal
    assert proven > len(limits) / 2


@pytest.mark.parametrize("seed", [2, 5, 11])
def test_random_networks_at_every_limit(seed: int) -> None:
    """The optimum by the peak where it says so, and a bound that holds where it does not."""
    graph = capture(Random(seed), (torch.zeros(4, 3, 16),), F.cross_entropy)
    setting = Setting(load_machine("p100x4"), 2, "float32", 4, "adam")
    found = formulate(graph, setting)
    choices = list(product(*(range(k) for k in found.problem.choices)))
    seconds = np.array([evaluate(found.problem, c).seconds for c in choices])
    peaks = np.array([peak_bytes(found, c) for c in choices])
    free = solve(found.problem)
    limits = np.unique(peaks[peaks < peak_bytes(found, free.choice)])
    some = limits[np.unique(np.linspace(0, len(limits) - 1, 8).astype(int))].tolist()
    proven, together = 0, set()
    for limit in some:
        best = seconds[peaks <= limit].min()
        limited = Within(found, limit, free, np.inf).run([])
        solution = limited.solution
        assert solution.peak_bytes == peak_bytes(found, solution.choice) <= limit
        assert solution.seconds == pytest.approx(evaluate(found.problem, solution.choice).seconds)
        assert solution.bound <= best * (1 + 1e-8)
        assert solution.seconds == pytest.approx(best, rel=1e-8) or not solution.optimal
        proven += solution.optimal
        together.add(len(limited.moments))
    assert proven >= 0.8 * len(some)
    assert len(together) > 1 or seed != 2
    with pytest.raises(InfeasibleError) as caught:
        Within(found, int(limits[0]) - 1, free, np.inf).run([])
    assert caught.value.least.bound <= limits[0] <= caught.value.least.peak_bytes


@pytest.mark.parametrize("recompute", [False, True])
def test_what_no_plan_keeps(recompute: bool) -> None:
    least = min(peak for _, peak in every_plan(recompute))
    with pytest.raises(InfeasibleError, match="too small") as caught:
        search(
            skipped(), devices=2, machine="p100x4", memory=least - 1, recompute=recompute,
            time_limit=10,
        )  # fmt: skip
    known = caught.value.least
    assert known.bound <= least <= known.peak_bytes
    assert known.peak_bytes <= 1.05 * least
    assert ("--recompute" in str(caught.value)) != recompute
    names = [name for name, _ in caught.value.holders]
    assert set(names) == {"first", "second", "last", "#add"}
    held = [size for _, size in caught.value.holders]
    assert held == sorted(held, reverse=True)
    assert 0.5 * known.peak_bytes < sum(held) <= known.peak_bytes


def some_choices(found: Formulation, count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    sizes = found.problem.choices
    return [tuple(int(rng.integers(k)) for k in sizes) for _ in range(count)]


@pytest.mark.parametrize("name", ["joined", "unet"])
@pytest.mark.parametrize("buckets", [False, True])
def test_bytes_at_a_moment_are_a_sum(
    name: str, buckets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved copies, tensors that pass, and stretches that are computed again among them.

    Only the copy of a bucket of gradients is not, which may be there in place of a burst.
    """
    if not buckets:
        monkeypatch.setattr("tilewise.planner.timeline._buckets", np.zeros_like)
    setting = Setting(load_machine("lassen"), 4, "float32", 4, "adam")
    found = formulate(graph_of(name), setting, recompute=True)
    sums = Sums(found)
    for choice in some_choices(found, 4):
        held = moments(found, choice)
        for call in range(len(held.names)):
            for phase in PHASES:
                moment = Moment(phase, call)
                own = evaluate(sums.problem([moment], 1 << 60), choice).peak_bytes
                assert own <= held.bytes_at(moment)
                if phase != "backward" or not buckets:
                    assert own == pytest.approx(held.bytes_at(moment), rel=1e-3, abs=64)
        assert max(least[k] for least, k in zip(sums.least, choice)) <= held.peak_bytes + 1
        pair = {Moment("forward", 2): 3.0, Moment("backward", 1): 1.0}
        both = sums.problem(list(pair), 1 << 60)
        own = mean(both, list(pair.values()))
        held_bytes = evaluate(own, choice).peak_bytes
        assert held_bytes <= sum(w * held.bytes_at(m) for m, w in pair.items()) / 4


def test_the_least_peak_is_bounded() -> None:
    setting = Setting(load_machine("lassen"), 4, "float32", 4, "adam")
    found = formulate(graph_of("joined"), setting)
    least = least_peak(found, np.inf, [found.nearest(Degrees(n=4))])
    assert least.peak_bytes == peak_bytes(found, least.choice)
    assert least.bound <= least.peak_bytes
    assert least.bound > 0.8 * least.peak_bytes
    for choice in some_choices(found, 50):
        assert peak_bytes(found, choice) >= least.bound


@pytest.mark.parametrize("time_limit", [1e-6, 10.0])
def test_prices_under_a_limit_hold_for_plans_that_fit(time_limit: float) -> None:
    setting = Setting(load_machine("p100x4"), 2, "float32", 4, "adam")
    every = formulate(skipped(), setting)
    plans = [
        (choice, evaluate(every.problem, choice).seconds, peak_bytes(every, choice))
        for choice in product(*(range(k) for k in every.problem.choices))
    ]
    peaks = sorted({peak for _, _, peak in plans})
    for limit in (peaks[1], peaks[len(peaks) // 2], peaks[-1]):
        found = search(skipped(), devices=2, machine="p100x4", memory=limit, time_limit=time_limit)
        fitting = [(choice, seconds) for choice, seconds, peak in plans if peak <= limit]
        here = found.solution.choice
        for variable, name in enumerate(found.formulation.names):
            some = found.formulation.choices.candidates[variable]
            for way in found.explain(name, time_limit=time_limit):
                index = some.index(way.degrees, again=way.recompute)
                best = min((s for c, s in fitting if c[variable] == index), default=np.inf)
                assert way.step_seconds <= best * (1 + 1e-8)
                assert way.step_seconds == pytest.approx(best, rel=1e-8) or not way.exact
                alone = (*here[:variable], index, *here[variable + 1 :])
                seconds = next((s for c, s in fitting if c == alone), np.inf)
                assert way.alone_seconds == pytest.approx(seconds)
                assert way.alone_peak_bytes == peak_bytes(found.formulation, alone)
                assert way.exact or limit < peaks[-1] or time_limit < 1.0


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose2d(F.relu(self.first(x)), self.first.weight, padding=1)


def test_prices_know_of_a_limit_that_the_fastest_plan_keeps() -> None:
    graph = capture(Tied(), torch.empty(4, 3, 16, 16, device="meta"))
    free = search(graph, devices=4, machine="lassen", time_limit=10)
    every = free.formulation
    plans = []
    for choice in product(*(range(k) for k in every.problem.choices)):
        with suppress(ValueError):
            plans.append((choice, evaluate(every.problem, choice).seconds))
    found = search(graph, devices=4, machine="lassen", memory=free.peak_bytes, time_limit=10)
    assert not found.short
    here, without = found.solution.choice, 0
    for variable, name in enumerate(every.names):
        some = every.choices.candidates[variable]
        for way in found.explain(name, time_limit=10):
            index = some.index(way.degrees)
            fitting = [
                (choice, seconds)
                for choice, seconds in plans
                if choice[variable] == index and peak_bytes(every, choice) <= free.peak_bytes
            ]
            best = min((seconds for _, seconds in fitting), default=np.inf)
            assert way.step_seconds <= best * (1 + 1e-8)
            assert way.step_seconds == pytest.approx(best, rel=1e-8) or not way.exact
            alone = (*here[:variable], index, *here[variable + 1 :])
            assert way.alone_seconds == pytest.approx(dict(fitting).get(alone, np.inf))
            without += not fitting
    assert without


def test_usual_plans_are_judged_by_their_peak() -> None:
    setting = Setting(load_machine("lassen"), 4, "float32", 4, "adam")
    found = formulate(graph_of("unet"), setting)
    every = all_degrees(4)
    usual = {found.nearest(Degrees(*map(int, row))) for row in every[every.prod(1) == 4]}
    prices = [(evaluate(found.problem, one).seconds, peak_bytes(found, one)) for one in usual]
    for limit in sorted(peak for _, peak in prices):
        choice, cost = baselines(found, limit)["uniform"]
        assert peak_bytes(found, choice) <= limit
        assert cost.seconds == min(seconds for seconds, peak in prices if peak <= limit)


def test_moments_above_a_limit_are_the_peaks_of_each_phase() -> None:
    held = Moments(
        ("a", "b", "c", "d"),
        np.array([5.0, 3.0, 4.0, 4.0]),
        np.array([1.0, 9.0, 2.0, 8.0]),
        np.array([2.0, 2.0, 2.0, 2.0]),
    )
    told = [(one.phase, one.call) for one in held.above(3)]
    assert told == [("backward", 1), ("backward", 3), ("forward", 0), ("forward", 3)]
    assert held.above(3)[0] == held.fullest
    assert held.above(9) == []
