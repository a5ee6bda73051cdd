"""End together under a launcher: ranks tell each other what went wrong, and one of them says it.

A rank that only printed its own error and left would be one of K voices, and most of them would say
that somebody else did not answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from tilewise.comm.failure import SILENT, Failure

GRACE_S = 5.0
PAUSE_S = 0.1


def end_together(
    mine: Failure, size: int, say: Callable[[Sequence[Failure]], Any], *, grace_s: float = GRACE_S
) -> None:
    """Tell the other ranks of what failed here; one rank calls `say` with what failed on each.

    Returns after it was said, or after some seconds: ranks that died or hang are not waited for.
    """
    store = distributed_c10d._get_default_store()
    spoken = "tilewise/spoken"
    try:
        store.set_timeout(timedelta(seconds=grace_s))
        store.set(_key(mine.rank), json.dumps(asdict(mine)))
        _until(lambda: _has(store, *map(_key, range(size))) or _has(store, spoken), grace_s)
        if not _has(store, spoken) and store.add("tilewise/speaker", 1) == 1:
            say([_of(store, rank) for rank in range(size)])
            store.set(spoken, "1")
        else:
            _until(lambda: _has(store, spoken), grace_s)
        if mine.rank == 0:
            time.sleep(5 * PAUSE_S)  # it may be the one that keeps what the others look at
    except Exception:  # who kept the ranks' words is gone
        say([mine])


def _key(rank: int) -> str:
    return f"tilewise/failed/{rank}"


def _has(store: Any, *keys: str) -> bool:
    return bool(store.check(list(keys)))


def _of(store: Any, rank: int) -> Failure:
    if _has(store, _key(rank)):
        return Failure(**json.loads(store.get(_key(rank))))
    return Failure(rank, SILENT, "it gave no answer: it died, is stopped, or hangs")


def _until(done: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
