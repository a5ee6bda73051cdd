"""One run in a folder at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import IO

from tilewise.errors import InputError, TrainingError

NAME = ".lock"


class RunLock:
    """A lock on the folder of a run, as a context.

    The system gives it up when the process ends, however that happens: nothing stays behind that
    somebody would have to delete. The file only says who has it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.file: IO[str] | None = None

    def __enter__(self) -> RunLock:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.folder / NAME, "a+", encoding="utf-8")
        except OSError as error:
            raise TrainingError(f"{self.folder}: a run cannot write there ({error})") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise InputError(
                f"{self.folder} is in use by {holder}; wait for that run to end, or say --out for "
                "another folder"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self.file = file
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
