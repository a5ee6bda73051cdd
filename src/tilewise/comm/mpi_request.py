"""What is under way over MPI: wait for it, ask for it, and let it progress meanwhile.

MPI makes no progress by itself. While anything is under way a thread polls, so that messages
travel while local work runs. Waiting spins for a moment and then yields, so that more ranks than
cores do not starve each other.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import Work

POLL_SECONDS = 0.0005
SPINS = 2000
PATIENCE = 5.0  # seconds for the thread to end: a program that fails must come to its end


class Request(Work):  # type: ignore[misc]
    """Something under way: an MPI request, and what to do with its result once it is there.

    Who holds one that nobody polls lets it progress by waiting for it or asking for it; one that is
    dropped before is polled, for MPI may still read or write its memory.
    """

    done = True

    def __init__(
        self,
        request: MPI.Request,
        timeout: float,
        keep: Any,
        then: Callable[[], None] | None = None,
        result: Any = None,
    ) -> None:
        super().__init__()
        self._request, self._timeout, self._keep, self._then = request, timeout, keep, then
        self._result = result
        self._lock = threading.Lock()
        self.done = False
        self.watched = False  # whether the poller looks at it
        self.polled = False  # whether it was complete before anybody waited for it
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None

    def test(self, *, polled: bool = False) -> bool:
        """Let MPI make progress, and say whether this is over; what went wrong, `wait` raises.

        A request that failed is gone: asked once more, MPI would call it complete.
        """
        if self.done:
            return True
        with self._lock:
            if self.done:
                return True
            try:
                if not self._request.Test():
                    return False
                if self._then is not None:
                    self._then()
            except Exception as error:
                self._error = error
            self._keep = self._then = None
            self.polled = polled
            self.done = True
            future = self._future
        if future is not None:
            self._tell(future)
        return True

    def is_completed(self) -> bool:
        return self.done if self.watched and not poller.ended else self.test()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def __del__(self) -> None:
        if not self.done and not self.watched and not sys.is_finalizing():
            poller.watch(Request(self._request, self._timeout, self._keep, self._then))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() or self._timeout
        deadline = 0.0
        spins = 0
        while not self.test():
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            deadline = deadline or now + limit
            if now > deadline:
                raise RuntimeError(f"MPI: nothing came within {limit:g} s")
            if spins < 2 * SPINS:
                os.sched_yield()
            else:  # who has waited long can wait a little longer, and leaves the core to others
                time.sleep(min(1e-6 * (spins - 2 * SPINS), 1e-3))
        self._raise()
        return True

    def _raise(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"MPI: {self._error}") from self._error

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is ready when this is; DDP asks for it while backward goes on."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        if self.done:
            self._tell(self._future)
        elif poller.ended:
            self.wait()
        elif not self.watched:
            poller.watch(self)
        return self._future

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        try:
            self._raise()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(self._result)


class Poller:
    """A thread that lets MPI make progress while something is under way."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.awake = threading.Event()
        self.pause = POLL_SECONDS
        self.thread: threading.Thread | None = None
        self.ended = False

    def watch(self, request: Request) -> Request:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="tilewise-mpi", daemon=True)
            self.thread.start()
            atexit.register(self._end)
        request.watched = True
        self.waiting.append(request)
        self.pause = POLL_SECONDS  # what is new may be short
        if not self.awake.is_set():
            self.awake.set()
        return request

    def _run(self) -> None:
        while True:
            self.awake.wait()
            if self.ended:
                return
            time.sleep(self.pause)
            self.pause = min(1.2 * self.pause, 20 * POLL_SECONDS)
            for _ in range(len(self.waiting)):
                request = self.waiting.popleft()
                if not request.test(polled=True):
                    self.waiting.append(request)
            if not self.waiting:
                self.awake.clear()
                if self.waiting or self.ended:
                    self.awake.set()

    def _end(self) -> None:
        """End the thread with the program: one that is cut off inside C++ would abort it."""
        self.ended = True
        self.awake.set()
        if self.thread is not None:
            self.thread.join(PATIENCE)


poller = Poller()
