"""How long this rank waits for others, by what for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

KINDS = ("halo", "redistribution", "sync")


class Clock:
    """Seconds spent waiting so far: for halos, for tensors that move, and for sums."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Count the time of the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - start
