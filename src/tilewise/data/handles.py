"""Open files: few at a time, opened when first needed, in each process for itself."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from tilewise.errors import DataError

T = TypeVar("T")


class Handles(Generic[T]):
    """The most recently used files, at most `limit` of them.

    A file whose length changes after it was first opened is an error: its samples are no longer
    those that an earlier epoch saw. Handles do not follow into a forked or pickled copy.
    """

    def __init__(
        self,
        open_file: Callable[[Path], T],
        close_file: Callable[[T], Any],
        *,
        kind: str,
        limit: int = 16,
    ) -> None:
        self._open_file, self._close_file = open_file, close_file
        self.kind, self.limit = kind, limit
        self._sizes: dict[Path, int] = {}
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._files: OrderedDict[Path, T] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        left = ("_pid", "_lock", "_files")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        return len(self._files)

    @contextmanager
    def use(self, path: Path) -> Iterator[T]:
        """Lend the open file; it cannot be closed by another thread meanwhile."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._check_size(path)
            if path in self._files:
                self._files.move_to_end(path)
            else:
                while len(self._files) >= max(self.limit, 1):
                    self._close_file(self._files.popitem(last=False)[1])
                self._files[path] = self._opened(path)
            yield self._files[path]

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Close all files again if the block, which looks at them for the first time, fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all files; they are opened again when needed."""
        with self._lock:
            while self._files:
                self._close_file(self._files.popitem()[1])

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self.close()

    def _check_size(self, path: Path) -> None:
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise DataError(f"data: {path}: {_reason(error)}") from error
        before = self._sizes.setdefault(path, size)
        if size != before:
            raise DataError(
                f"data: {path}: {size} bytes found, expected {before} as when it was first opened; "
                "the file changed during the run"
            )

    def _opened(self, path: Path) -> T:
        try:
            return self._open_file(path)
        except DataError:
            raise
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise DataError(f"data: {path}: {_reason(error)}") from error
        except Exception as error:
            raise DataError(
                f"data: {path}: not a whole {self.kind} file, expected one; it may be truncated: "
                f"{error or type(error).__name__}"
            ) from error


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file, expected one"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    return f"cannot be opened: {error.strerror or error}"
