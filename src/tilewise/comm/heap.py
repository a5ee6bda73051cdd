"""Freed memory, kept for the next tensor in place of going back to the system.

glibc maps each block of more than 32 MiB for itself and unmaps it when it is freed, so that every
step pays for its large tensors page by page again: a third of a training step of CosmoFlow on
128³. Kept in the heap they cost nothing the second time; the process may hold more than its
tensors need at once, as gaps between them do not always fit the next one. So the first few steps
may each take new memory, until there are gaps enough; `steady` waits for that before times count.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from tilewise.switches import KEEP_MEMORY, switched_on

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # of mallopt(3)
KEEP = {MMAP_MAX: 0, TRIM_THRESHOLD: -1}  # which is never
# glibc's own numbers, where it ends up by itself once large blocks were freed.
RETURN = {MMAP_MAX: 65536, MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20}

MOST_RUNS = 8
FEW_PAGES = 1024

_kept = False


def keep_freed() -> None:
    """Keep what is freed from now on, unless switched off or not on glibc."""
    global _kept
    if not _kept and switched_on(KEEP_MEMORY):
        _kept = _set(KEEP)


@contextmanager
def freed_returned() -> Iterator[None]:
    """Give freed memory back meanwhile, as a process does that nobody told to keep it."""
    global _kept
    kept = _kept
    if kept:
        _set(RETURN)
        _libc().malloc_trim(0)
        _kept = False
    try:
        yield
    finally:
        if kept:
            _kept = _set(KEEP)


def steady(run: Callable[[], object], total: Callable[[list[float]], list[float]]) -> None:
    """Run something until no rank takes more than a little new memory from the system for it.

    Once, where freed memory is not kept: then every run takes it anew. `total` adds numbers up over
    the ranks that run it together.
    """
    for _ in range(MOST_RUNS):
        before = _pages()
        run()
        if not total([float(_kept and _pages() - before > FEW_PAGES)])[0]:
            break


def _pages() -> int:
    """Return how many pages of memory the system has given to this process so far."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _set(options: dict[int, int]) -> bool:
    libc = _libc()
    return libc is not None and all(libc.mallopt(*option) for option in options.items())


def _libc() -> Any:
    try:
        known = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):  # macOS, musl
        known = None
    return ctypes.CDLL(None) if known else None
