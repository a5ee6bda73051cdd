"""Batches made ahead of need, in a thread of their own.

    thread     make 0 │ agree │ make 1 │ agree │ make 2 │ agree │ …        (its own mesh)
    consumer          └─▶ take 0 … train …  └─▶ take 1 … train …

All ranks' threads agree on each batch before any rank hands it over: a rank that could not read
its part, or whose consumer left, ends the batch on all ranks, and no thread is left waiting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

import torch

from tilewise.comm import Mesh
from tilewise.data.making import Made
from tilewise.errors import CommError, DataError, MismatchError

Make = Callable[[int, bool], Made]


class Stream:
    """The batches of one epoch.

    Args:
        make: makes batch `number`; with True it only answers the messages of the others.
        numbers: the batches in order, the same on all ranks.
        accept: called with each batch that all ranks agreed on.
        mesh: ranks of their own for the thread, used by nobody else while it runs.
        prefetch: how many batches are made ahead of the one that is used; with 0, each is made
            when it is asked for.
    """

    def __init__(
        self,
        make: Make,
        numbers: Iterable[int],
        accept: Callable[[Made], None],
        mesh: Mesh,
        *,
        prefetch: int,
        name: str,
    ) -> None:
        self._make, self._numbers, self._accept = make, numbers, accept
        self._mesh, self._prefetch, self._name = mesh, prefetch, name
        self._slots = threading.Semaphore(prefetch)
        self._stopping = False
        self._ready: queue.Queue[Made | BaseException | None] = queue.Queue()
        self._over: BaseException | bool | None = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self) -> Made | None:
        """Return the next batch, None after the last; raise what ended the stream on all ranks."""
        if self._over is False:
            if not self._prefetch:
                self._slots.release()
            found = self._ready.get()
            if isinstance(found, Made):
                if self._prefetch:
                    self._slots.release()
                return found
            self._over = found
        if isinstance(self._over, BaseException):
            raise self._over
        return None

    def stop(self) -> None:
        """Ask the thread to end with the next batch; it tells the other ranks' threads."""
        self._stopping = True
        self._slots.release()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for number in self._numbers:
                self._slots.acquire()
                stopping = self._stopping
                made = self._made(number, stopping)
                if not self._agreed(made, stopping):
                    return
                self._accept(made)
                self._ready.put(made)
                del made
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _made(self, number: int, stopping: bool) -> Made:
        """Make a batch; what nobody foresaw is still told to all ranks, as far as they can hear."""
        try:
            return self._make(number, stopping)
        except CommError:
            raise
        except Exception as error:
            return Made(number, [], error=f"data: {error!r}")

    def _agreed(self, made: Made, stopping: bool) -> bool:
        """Tell the other ranks how it went; raise on all of them where it failed on one."""
        what = f"{self._name}, batch {made.number + 1}"
        flags = torch.tensor([made.error is not None, stopping], dtype=torch.int64)
        try:
            self._mesh.sum(flags, self._mesh.group(), layer=what)
        except CommError as error:
            if made.error is None:
                raise
            raise DataError(f"{what}: {made.error}") from error
        failed, stopped = flags.tolist()
        if failed:
            try:
                self._mesh.agree(what, error=made.error)
            except MismatchError as error:
                raise DataError(str(error)) from error
        if stopped:
            text = f"{what}: {stopped} of {self._mesh.size} ranks left the epoch before it"
            self._ready.put(CommError(text))
        return not stopped
