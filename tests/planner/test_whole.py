"""What whole steps teach: factors are found again, and all that is priced has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from measured_here import rates_here
from tilewise import capture
from tilewise.planner.cost import WholeStep
from tilewise.planner.search import Found, search
from tilewise.planner.solve import evaluate
from tilewise.planner.whole import Parts, fit_step

STEP = WholeStep(layers=1.2, moves=2.5, sums=1.6)


def steps(count: int) -> list[Parts]:
    """Draw steps whose parts differ a lot."""
    draw = np.random.default_rng(0)
    parts = draw.uniform(0.1, 1.0, (count, 5)).tolist()
    return [Parts(*one, waiting=0.5 * one[-1]) for one in parts]


def test_factors_are_found_again() -> None:
    some = steps(40)
    found = fit_step(some, [one.seconds(STEP) for one in some])
    for name in ("layers", "moves", "sums"):
        assert getattr(found, name) == pytest.approx(getattr(STEP, name), rel=0.1)


def test_what_no_step_tells_stays_as_it_was() -> None:
    some = [
        replace(one, moves_forward=0.0, moves_backward=0.0, sums=0.0, waiting=0.0)
        for one in steps(3)
    ]
    found = fit_step(some, [1.5 * one.seconds(WholeStep()) for one in some])
    assert found.layers == pytest.approx(1.5, rel=0.02)
    assert (found.moves, found.sums) == (1.0, 1.0)


@pytest.fixture(scope="module")
def found() -> Found:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    graph = capture(net, (torch.zeros(4, 3, 12, 12),))
    machine = rates_here(2).model_copy(update={"overlap_sums": 0.5})
    return search(graph, devices=2, machine=machine, recompute=True)


def test_all_that_is_priced_has_the_factors(found: Found) -> None:
    other = found.learned(STEP, [found.plan])
    draw = np.random.default_rng(1)
    moving = 0
    for _ in range(50):
        choice = [int(draw.integers(len(v.forward))) for v in found.formulation.problem.variables]
        parts = Parts.of(found.formulation, choice)
        moving += parts.moves_forward > 0
        assert parts.seconds(WholeStep()) == pytest.approx(
            evaluate(found.formulation.problem, choice).seconds
        )
        assert parts.seconds(STEP) == pytest.approx(
            evaluate(other.formulation.problem, choice).seconds
        )
    assert moving


def test_a_fit_is_never_worse_than_none() -> None:
    draw = np.random.default_rng(2)
    for _ in range(100):
        parts = draw.uniform(0.0, 1.0, (3, 5)).tolist()
        some = [Parts(*one, waiting=one[-1] * draw.random()) for one in parts]
        seconds = [one.seconds(WholeStep()) * draw.uniform(0.5, 2.0) for one in some]
        fitted = fit_step(some, seconds)

        def off(step: WholeStep, some: Any = some, seconds: Any = seconds) -> float:
            return sum((one.seconds(step) / t - 1) ** 2 for one, t in zip(some, seconds))

        assert off(fitted) <= off(WholeStep())
