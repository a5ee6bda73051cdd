"""Run a function on local ranks, by pools of processes that are started once."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewise.comm.pool import Pool, RanksError
from tilewise.errors import CommError

__all__ = ["RanksError", "ranks"]

POOL_SIZE = 8
# Of every group that gloo has open, a thread wakes up a hundred times a second.
MOST_THREADS = 100


def ranks(
    count: int | Sequence[int], function: Callable[..., Any], *args: Any, timeout: float = 300.0
) -> list[Any]:
    """Call `function(mesh, *args)` on `count` ranks and return what each returned.

    A sequence in place of the count names the pool's ranks to use, in mesh order. If a rank
    raises, the first one's error is raised here, and no rank is left waiting.
    """
    members = tuple(range(count)) if isinstance(count, int) else tuple(count)
    pool = _pool(max(POOL_SIZE, max(members) + 1))
    try:
        return pool.run(members, function, args, timeout)
    except RanksError as error:
        if any(failure.kind == CommError.__name__ for failure in error.failures):
            pool.close(now=True)  # its groups are broken, and whoever came next would fail
        raise


_pools: dict[int, Pool] = {}


def _pool(size: int) -> Pool:
    if size in _pools and _threads(_pools[size]) > MOST_THREADS:
        _pools[size].close()
    if size not in _pools or _pools[size].closed:
        _pools[size] = Pool(size)
    return _pools[size]


def _threads(pool: Pool) -> int:
    """Return how many threads a pool's first rank has, where the system tells."""
    threads = Path(f"/proc/{pool.pids[0]}/task")
    return len(list(threads.iterdir())) if threads.is_dir() else 0


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()
