"""Being asked to stop: SIGTERM, as schedulers send it some time before they kill."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from tilewise.comm import Mesh

STOPPED_CODE = 75
"""The exit code of a run that was asked to stop and saved itself: EX_TEMPFAIL, try again."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Notes signals instead of dying of them, as a context on every rank.

    A rank that ignores SIGINT, because whoever started it sees to that, goes on to ignore it. After
    an error signals are noted on and on: a launcher sends them to ranks that are about to say what
    went wrong.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def agreed(self) -> bool:
        """Whether any rank was asked to stop, the same on all ranks; all must ask alike.

        Communication: one sum of one number.
        """
        flag = torch.tensor([int(self.asked)], dtype=torch.int64)
        self.mesh.sum(flag, self.mesh.group(), layer="preemption")
        return bool(flag.item())
