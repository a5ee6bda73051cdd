"""Numbers for people to read."""

from __future__ import annotations

import pytest

from tilewise.units import all_enough, enough, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1000 << 20, "1000 MiB"), (3 << 29, "1.5 GiB"),
     (5 << 40, "5 TiB")],
)  # fmt: skip
def test_size(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (7, "7 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (14_727_616, "14.046 MiB"),
     ((1 << 30) + 1, "1.0001 GiB")],
)  # fmt: skip
def test_enough_is_no_less_than_there_are(count: int, text: str) -> None:
    assert enough(count) == text


def test_a_column_of_bytes_has_one_unit_and_one_number_of_digits() -> None:
    peaks = [568 << 20, (568 << 20) + 1, 14_727_616_000]
    assert all_enough(peaks) == ["568.00 MiB", "568.01 MiB", "14045.35 MiB"]
    assert all_enough([0, 2000]) == ["0 B", "2000 B"]
    assert all_enough([1 << 30]) == ["1.0000 GiB"]
