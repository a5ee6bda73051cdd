"""What went wrong on ranks, and which of it came first: the rest follows from that."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.errors import CommError, MismatchError, TilewiseError

DIED, STOPPED, SILENT = "died", "stopped", "silent"
FOLLOWS = (CommError.__name__, MismatchError.__name__)
NO_MEMORY = re.compile(r"can.t allocate memory: you tried to allocate (\d+) bytes")


@dataclass(frozen=True, slots=True)
class Failure:
    """What happened on one rank.

    `kind` is the error's class, or what became of the process: died, stopped, silent. What was not
    raised on purpose has a traceback.
    """

    rank: int
    kind: str
    text: str
    trace: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describe an error that was raised on a rank."""
        trace = "" if isinstance(error, TilewiseError) else traceback.format_exc()
        found = NO_MEMORY.search(str(error))
        if found is not None:
            text = f"out of memory, with {int(found[1]) / 2**20:.0f} MiB more to allocate"
        elif isinstance(error, MemoryError):
            text = "out of memory"
        elif isinstance(error, TilewiseError):
            return cls(rank, type(error).__name__, str(error))
        else:
            frames = traceback.extract_tb(error.__traceback__)
            where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
            lines = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {lines[0]}{where}"
        return cls(rank, type(error).__name__, text, trace)

    @classmethod
    def death(cls, rank: int, pid: int | None, code: int | None) -> Failure:
        """Describe a process that ended before it answered; a negative code is a signal."""
        who = "the process" if pid is None else f"process {pid}"
        if code is None:
            return cls(rank, DIED, f"{who} ended")
        if code >= 0:
            return cls(rank, DIED, f"{who} ended with exit code {code}")
        name = signal.Signals(-code).name
        hint = ", as the system does where memory runs out" if -code == signal.SIGKILL else ""
        return cls(rank, DIED, f"{who} was killed by {name}{hint}")

    @classmethod
    def silence(cls, rank: int, pid: int | None) -> Failure:
        """Describe a process that is there but does not answer."""
        who = "the process" if pid is None else f"process {pid}"
        if is_stopped(pid):
            return cls(rank, STOPPED, f"{who} is stopped (SIGSTOP) and gave no answer")
        return cls(rank, SILENT, f"{who} gave no answer")

    @property
    def on_purpose(self) -> bool:
        """Whether it is an error with a message for people."""
        return not self.trace and self.kind not in (DIED, STOPPED, SILENT)

    @property
    def weight(self) -> int:
        """How much it explains: a death or an error of its own more than what follows from them."""
        states = {DIED: 4, STOPPED: 2, SILENT: 1}
        return states.get(self.kind, 0 if self.kind in FOLLOWS else 3)


def cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others: the first of the weightiest."""
    return max(failures, key=lambda failure: failure.weight)


def in_a_line(failures: Sequence[Failure]) -> str:
    """Return one line that says what went wrong, and where."""
    first = cause(failures)
    if all(one.text == first.text for one in failures) and first.on_purpose:
        return first.text
    return f"rank {first.rank}: {first.text}"


def is_stopped(pid: int | None) -> bool:
    """Whether a process was stopped by a signal; False where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
