"""Keep a run going on local ranks: start it, watch it, start it again, and say what went wrong."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tilewise import errors
from tilewise.comm.failure import Failure, cause, in_a_line
from tilewise.comm.pool import Pool, RanksError
from tilewise.errors import CommError, TilewiseError, TrainingError
from tilewise.train.preempt import SIGNALS

LOG = "failure.log"
FOREVER_S = 3650 * 24 * 3600.0

Say = Callable[[str], Any]


def supervise(
    start: Callable[[], Pool],
    function: Callable[..., Any],
    arguments: Callable[[int], tuple[Any, ...]],
    *,
    report: Callable[[Any], Any],
    say: Say,
    folder: Path,
    max_restarts: int = 0,
) -> list[Any]:
    """Call `function(mesh, *arguments(attempt))` on the ranks of a pool, again if they fail.

    A rank that died, hangs or raised something unforeseen ends all ranks; then they are started
    again, at most `max_restarts` times. Errors with a message for people would only come again, and
    are not tried again. What is raised in the end is one line; tracebacks are in a log beside it.

    SIGTERM, and SIGINT from the keyboard, are passed on to the ranks as SIGTERM; the second one
    ends them at once.
    """
    attempt = 0
    asked: list[int] = []
    while True:
        pool = start()
        try:
            with _signals(pool, say, asked):
                everyone = tuple(range(pool.size))
                found = pool.run(everyone, function, arguments(attempt), FOREVER_S, report)
            pool.close()
            return found
        except RanksError as error:
            failures = error.failures
            if not failures:
                raise TrainingError(f"train: {error}") from error
            if asked or attempt == max_restarts or not _may_pass(failures):
                raise explained(failures, folder) from None
            attempt += 1
            text = in_a_line(failures) + _logged(folder, failures)
            say(
                f"{text}; starting again from the last checkpoint (restart {attempt} of "
                f"{max_restarts})"
            )
        finally:
            pool.close(now=True)


def _may_pass(failures: Sequence[Failure]) -> bool:
    """Whether another attempt may fare better."""
    first = cause(failures)
    return not first.on_purpose or first.kind == CommError.__name__


def explained(failures: Sequence[Failure], folder: Path) -> TilewiseError:
    """Return one error for what went wrong on ranks, of the kind that the first of them met."""
    kind = getattr(errors, cause(failures).kind, TrainingError)
    found: TilewiseError = kind(in_a_line(failures) + _logged(folder, failures))
    return found


def _logged(folder: Path, failures: Sequence[Failure]) -> str:
    """Write tracebacks to a file, if there are any; returns where they are, in words."""
    traces = [one for one in failures if one.trace]
    if not traces:
        return ""
    path = folder / LOG
    lines = [f"-- {time.ctime()}, rank {one.rank}: {one.text}\n{one.trace}" for one in traces]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except OSError:
        return f"\n{lines[0]}"
    return f"; see {path}"


@contextmanager
def _signals(pool: Pool, say: Say, asked: list[int]) -> Iterator[None]:
    """Pass signals on to the ranks, and note them in `asked`."""

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        say(f"{signal.Signals(number).name}: stopping after this step; again to stop at once")
        pool.signal(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
