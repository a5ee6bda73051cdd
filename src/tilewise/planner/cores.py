"""Ranges of rows on all cores at once: numpy lets go of Python's lock while it computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from tilewise.host import cores

LEAST = 1 << 18
"""How many numbers there are at least for more than one core to be worth while."""


def on_cores(work: Callable[[slice], None], rows: int, size: int, step: int = 1) -> None:
    """Do some work for all rows, of which there are several ranges if they have many numbers.

    Args:
        work: takes a range of rows; ranges may run at the same time.
        rows: how many there are.
        size: how many numbers they are together.
        step: ranges begin at multiples of so many rows.
    """
    several = min(cores(), -(-rows // step)) if size >= LEAST else 1
    if several < 2:
        work(slice(0, rows))
        return
    length = -(-rows // (several * step)) * step
    first, *others = (slice(k, min(k + length, rows)) for k in range(0, rows, length))
    running = [_threads().submit(work, some) for some in others]
    work(first)
    for one in running:
        one.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(cores() - 1, 1), thread_name_prefix="tilewise-planner")
