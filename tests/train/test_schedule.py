"""The learning rate follows from the step alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from tilewise.train.recipe import ScheduleSection
from tilewise.train.schedule import rate_factor


def factors(total: int, **options: Any) -> list[float]:
    schedule = ScheduleSection(**options)
    return [rate_factor(schedule, step, total) for step in range(total)]


def test_each_kind_by_hand() -> None:
    assert factors(4) == [1.0] * 4
    assert factors(4, kind="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert factors(2, kind="cosine", end=0.5) == pytest.approx([1.0, 0.75])
    assert factors(8, kind="step", factor=0.5) == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]
    warm = factors(6, kind="linear", warmup=2)
    assert warm == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def torchs(kind: str, total: int, end: float) -> list[float]:
    """Return the factors of torch's own schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule: Any = (
        LinearLR(optimizer, 1.0, end, total)
        if kind == "linear"
        else CosineAnnealingLR(optimizer, total, end)
    )
    found = []
    for _ in range(total):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("total", "end"), [(1, 0.0), (2, 0.0), (7, 0.0), (10, 0.25)])
def test_falling_rates_are_those_of_torch(kind: str, total: int, end: float) -> None:
    assert factors(total, kind=kind, end=end) == pytest.approx(torchs(kind, total, end))


@given(
    st.integers(1, 60),
    st.sampled_from(["constant", "linear", "cosine", "step"]),
    st.integers(0, 70),
    st.floats(0, 1),
)
def test_rates_rise_then_never_rise_again(total: int, kind: str, warmup: int, end: float) -> None:
    found = factors(total, kind=kind, warmup=warmup, end=end)
    assert all(0 <= factor <= 1 for factor in found)
    rising, falling = found[:warmup], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if falling and kind in ("linear", "cosine"):
        assert falling[0] == 1
        assert falling[-1] > min(end, 0.999)
