"""The ranks that a command works with: local ones that it starts, or those of a launcher."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilewise.cli.exits import exit_code
from tilewise.cli.naming import InputError
from tilewise.comm import Mesh
from tilewise.comm.ending import end_together
from tilewise.comm.failure import Failure
from tilewise.comm.launch import engine, join, launched
from tilewise.comm.pool import Pool, exhausted
from tilewise.errors import CommError
from tilewise.train.supervise import explained, supervise

TICK_S = 5.0


class Crew:
    """Ranks to run functions on, as a context.

    Under torchrun, mpiexec or srun every rank runs the command; all get the same results, and the
    first one speaks. Otherwise `ranks` local processes are started.

    Args:
        timeout: seconds to wait for a rank that does not answer the others.
        limit: seconds that a call of `run` may take; the timeout by default.
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str = "gloo",
        timeout: float = 600.0,
        limit: float | None = None,
    ) -> None:
        self.backend, self.timeout = backend, timeout
        self.limit = timeout if limit is None else limit
        self.pool: Pool | None = None
        self.mesh: Mesh | None = None
        try:
            engine(backend)
        except CommError as error:
            raise InputError(f"--backend: {error}") from error
        if launched():
            join(backend, timeout=timeout)
            torch.set_num_threads(1)
            self.mesh = Mesh()
            if self.mesh.rank:
                sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        self.size = ranks if self.mesh is None else self.mesh.size

    def __enter__(self) -> Crew:
        return self

    def start(self) -> Pool:
        """Start local ranks."""
        return Pool(self.size, backend=self.backend, timeout=self.timeout)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.pool is not None:
            self.pool.close()
        elif self.mesh is not None and error is None:
            dist.destroy_process_group()

    def run(
        self, function: Callable[..., Any], *arguments: Any, title: str = "", total: int = 0
    ) -> list[Any]:
        """Call `function(mesh, *arguments)` on all ranks; returns what each of them returned.

        With a title, a bar shows how many times a generator function has yielded so far, and the
        text it yielded last, each text at least for a moment.
        """
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        console = Console(stderr=True, quiet=not title)
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            bar = progress.add_task(title, total=total or None)

            def show(said: Any) -> None:
                named = isinstance(said, str)
                text = f"{title}, {said}" if named else title
                progress.update(bar, advance=1, description=text, refresh=named)

            return self._run(function, arguments, show)

    @property
    def first(self) -> bool:
        """Whether this process speaks for all: the command's own, or the launcher's first rank."""
        return self.mesh is None or self.mesh.rank == 0

    @property
    def attempt(self) -> int:
        """How often torchrun has started these ranks again."""
        return 0 if self.mesh is None else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def meet(self, what: str, *, error: str | None = None) -> None:
        """Wait for the other ranks of a launcher, if there are any; raise an error on all."""
        if self.mesh is not None:
            self.mesh.agree(what, error=error)
        elif error is not None:
            raise InputError(f"{what}: {error}")

    def first_alone(self, what: str, work: Callable[[Callable[[], None]], Any]) -> None:
        """Let the first process work for all, and raise on all of them where it fails.

        The others wait for as long as `work` calls what it is given now and then.
        """
        if self.mesh is None:
            work(lambda: None)
            return
        mesh, problem = self.mesh, None
        if self.first:
            told = time.monotonic()

            def tick() -> None:
                nonlocal told
                if time.monotonic() - told > min(TICK_S, self.timeout / 4):
                    mesh.total([0.0], layer=what)
                    told = time.monotonic()

            try:
                work(tick)
            except Exception as error:
                problem = str(error) or repr(error)
            mesh.total([1.0], layer=what)
        else:
            while not mesh.total([0.0], layer=what)[0]:
                pass
        mesh.agree(what, error=problem)

    def follow(
        self,
        function: Callable[..., Any],
        arguments: Callable[[int], tuple[Any, ...]],
        *,
        report: Callable[[Any], Any],
        say: Callable[[str], Any],
        folder: Path,
        max_restarts: int = 0,
    ) -> list[Any]:
        """Call `function(mesh, *arguments(attempt))` on all ranks, however long it takes.

        What a generator function yields on the first rank goes to `report` as it comes. Local ranks
        that fail are started again; those of a launcher end together, and one of them speaks.
        """
        if self.mesh is None:
            return supervise(
                self.start, function, arguments,
                report=report, say=say, folder=folder, max_restarts=max_restarts,
            )  # fmt: skip
        try:
            return self._run(function, arguments(self.attempt), report)
        except BaseException as error:
            self._end(error, self.mesh.rank, folder)
            raise

    def _end(self, error: BaseException, rank: int, folder: Path) -> None:
        """Say what went wrong on the ranks of a launcher, once, and leave them at once.

        An orderly end would wait for those that cannot answer.
        """

        def say(failures: Sequence[Failure]) -> None:
            print(f"tilewise: {explained(failures, folder)}", file=sys.__stderr__, flush=True)

        end_together(Failure.of(rank, error), self.size, say)
        os._exit(exit_code(error))

    def _run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        progress: Callable[[Any], Any],
    ) -> list[Any]:
        if self.mesh is None:
            if self.pool is None:
                self.pool = self.start()
            everyone = tuple(range(self.size))
            return self.pool.run(everyone, function, arguments, self.limit, progress)
        result: Any = function(self.mesh, *arguments)
        if inspect.isgenerator(result):
            result = exhausted(result, progress)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, result)
        return found
