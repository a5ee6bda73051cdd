"""Networks of many layers equal one device under every kind of plan, with no fallback."""

from __future__ import annotations

import pytest

from model_cases import DEEP, DRAWN, equals_one_device, equals_under_random_plans


@pytest.mark.parametrize("name", DEEP)
def test_model_equals_one_device(name: str) -> None:
    equals_one_device(name)


@pytest.mark.parametrize("name", [name for name in DRAWN if name in DEEP])
def test_random_plans_equal_one_device(name: str) -> None:
    equals_under_random_plans(name)
