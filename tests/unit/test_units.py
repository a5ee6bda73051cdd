"""Numbers for people to read."""

from __future__ import annotations

import pytest

from tilewise.units import size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1000 << 20, "1000 MiB"), (3 << 29, "1.5 GiB"),
     (5 << 40, "5 TiB")],
)  # fmt: skip
def test_size(count: int, text: str) -> None:
    assert size(count) == text
