"""The learning rate follows from the step alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.train.recipe import ScheduleSection
from tilewise.train.schedule import rate_factor


def factors(total: int, **options: Any) -> list[float]:
    schedule = ScheduleSection(**options)
    return [rate_factor(schedule, step, total) for step in range(total)]


def test_each_kind_by_hand() -> None:
    assert factors(4) == [1.0] * 4
    assert factors(5, kind="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert factors(3, kind="cosine", end=0.5) == pytest.approx([1.0, 0.75, 0.5])
    assert factors(8, kind="step", factor=0.5) == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]
    warm = factors(6, kind="linear", warmup=2)
    assert warm == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3, 0.0])


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
    if falling and kind in ("linear", "cosine") and len(falling) > 1:
        assert falling[-1] == pytest.approx(end)
