"""Local processes that form one world and run functions, as ranks of meshes up to its size.

A function is sent by its file and name, so it may live in a test module.

    this process                            rank
    (members, function, arguments)   ──▶    runs it
                                     ◀──    (None, what it yields) …
                                     ◀──    (True, what it returns) or (False, Failure)

A rank whose pipe to this process breaks while it runs something ends at once, so that nothing is
left behind when this process is killed.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewise.comm.failure import DIED, Failure, is_stopped
from tilewise.errors import CommError

# Imported once, for all processes; what traces models would be imported by each of them else.
PRELOAD = ["tilewise", "torch.distributed", "torch._dynamo", "torch.export._trace"]
GRACE_S = 5.0  # how long the others have to answer once a rank has failed
TICK_S = 1.0


class RanksError(AssertionError):
    """A function failed on some rank; carries that rank's traceback, and what happened on each."""

    def __init__(self, text: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(text)
        self.failures = tuple(failures)


class Pool:
    """Local processes that form one torch.distributed world and wait for work.

    `timeout` is how long a rank waits for another one's message, in seconds. The backend `mpi` is
    tilewise's own over mpi4py; its ranks are started by mpiexec.
    """

    def __init__(self, size: int, *, backend: str = "gloo", timeout: float = 60.0) -> None:
        self.size = size
        self.folder = tempfile.mkdtemp(prefix="tilewise-ranks-")
        self.timeout = timeout
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.pids: list[int] = []
        self.closed = False
        if backend == "mpi":
            self._start_by_mpiexec()
        else:
            self._fork(backend)

    def _fork(self, backend: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            join = (backend, self.folder, rank, self.size, self.timeout)
            process = context.Process(target=_serve, args=(theirs, join), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
            self.pids.append(process.pid or 0)

    def _start_by_mpiexec(self) -> None:
        address = str(Path(self.folder) / "socket")
        code = f"from tilewise.comm.pool import serve_mpi; serve_mpi({address!r}, {self.timeout})"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(0.5)
            command = [_mpiexec(), "-n", str(self.size), sys.executable, "-c", code]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            # Where a rank dies, it prints a page about it, which the caller says in one line.
            launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            self.processes.append(_Launched(launcher))
            found: dict[int, tuple[Connection, int]] = {}
            while len(found) < self.size:
                if launcher.poll() is not None:
                    raise RanksError(f"{command[0]} ended with code {launcher.returncode}")
                with suppress(TimeoutError):
                    pipe = Connection(listener.accept()[0].detach())
                    rank, pid = pipe.recv()
                    found[rank] = (pipe, pid)
        self.pipes, self.pids = map(list, zip(*(found[rank] for rank in range(self.size))))

    def run(
        self,
        members: tuple[int, ...],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        progress: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Call `function(mesh, *args)` on some ranks and return what each returned.

        What a generator function yields on the first of them is handed to `progress` as it comes.
        """
        name = (sys.modules[function.__module__].__file__, function.__qualname__)
        for rank in members:
            with suppress(OSError):  # of a dead rank; its pipe tells below
                self.pipes[rank].send((members, function.__module__, name, args))
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        waiting = list(members)
        stops = _Stops(self.pids)
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline and stops.longest_s < self.timeout:
            pipes = [self.pipes[rank] for rank in waiting]
            ready = wait(pipes, min(max(deadline - time.monotonic(), 0), TICK_S))
            for rank in [rank for rank in waiting if self.pipes[rank] in ready]:
                try:
                    ok, value = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    ok, value = False, self._death(rank)
                if ok is None:
                    if progress is not None and rank == members[0]:
                        progress(value)
                    continue
                waiting.remove(rank)
                if ok:
                    results[rank] = value
                else:
                    failures.append(value)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            stops.look(waiting)
        if not waiting and not failures:
            return [results[rank] for rank in members]
        failed = sorted(failure.rank for failure in failures)
        first = None if not failures else min(failures, key=lambda one: one.rank)
        failures += [Failure.silence(rank, self.pids[rank]) for rank in waiting]
        if waiting:
            self.close(now=True)
        detail = "no rank raised" if first is None else _detail(first)
        raise RanksError(
            f"on ranks {members}: failed {failed}, without answer {waiting}; "
            f"rank {None if first is None else first.rank}:\n{detail}",
            failures,
        )

    def _death(self, rank: int) -> Failure:
        code = None
        if len(self.processes) == self.size:
            self.processes[rank].join(TICK_S)
            code = self.processes[rank].exitcode
        return Failure.death(rank, self.pids[rank], code)

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self, *, now: bool = False) -> None:
        """End the processes; `now` without waiting for what they do."""
        if self.closed:
            return
        self.closed = True
        if now:
            self.signal(signal.SIGKILL)
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Stops:
    """How long processes have been stopped by a signal, as far as this one ran to see it."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids, self.longest_s = pids, 0.0
        self.seconds: dict[int, float] = {}
        self.looked = time.monotonic()

    def look(self, ranks: Sequence[int]) -> None:
        """Look at some ranks, if it is time to."""
        since = time.monotonic() - self.looked
        if since < TICK_S:
            return
        self.looked += since
        self.seconds = {
            rank: self.seconds.get(rank, 0.0) + min(since, 2 * TICK_S)
            for rank in ranks
            if is_stopped(self.pids[rank])
        }
        self.longest_s = max(self.seconds.values(), default=0.0)


def _detail(failure: Failure) -> str:
    if failure.kind == DIED:
        return failure.text
    return f"{failure.kind}: {failure.text}" if not failure.trace else failure.trace


class _Launched:
    """A launcher that takes its ranks with it when it ends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def kill(self) -> None:
        """Give the ranks, which were told to end, a moment to do so."""
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.terminate()

    def join(self) -> None:
        self.process.wait()


def _mpiexec() -> str:
    """Return the launcher that came with the MPI wheel, or else the system's."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise CommError(
            "backend mpi: there is no mpiexec; pip install 'tilewise[mpi]' brings one, or load "
            "your system's MPI"
        )
    return found


def serve_mpi(address: str, timeout: float) -> None:
    """Be one rank of a pool that mpiexec started."""
    import tilewise.comm.mpi

    tilewise.comm.mpi.tell_torch()  # a single rank, too
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    pipe = Connection(connection.detach())
    pipe.send((int(os.environ["RANK"]), os.getpid()))
    _serve(pipe, (tilewise.comm.mpi.NAME, None, None, None, timeout))


def _serve(pipe: Connection, world: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from tilewise.comm import Mesh
    from tilewise.comm.launch import join, meet

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this rank ends it
    gc.freeze()  # looking through all that was imported takes 0.2 s, and copies its pages
    watch = _Watch(pipe)
    torch.set_num_threads(1)
    backend, folder, rank, size, timeout = world
    if folder is None:
        join("mpi", timeout=timeout)
    else:
        store = dist.FileStore(str(Path(folder) / "store"), size)  # type: ignore[attr-defined]
        meet(backend, store, rank, size, timeout=timeout)
    watch.busy = False
    meshes: dict[tuple[int, ...], Mesh] = {}
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            members, module, (file, name), args = pipe.recv()
        except (EOFError, OSError):
            return
        watch.busy = True
        try:
            if members not in meshes:
                meshes[members] = Mesh(members)
            function: Any = _load(modules, module, file)
            for part in name.split("."):
                function = getattr(function, part)
            result: Any = function(meshes[members], *args)
            if inspect.isgenerator(result):
                result = exhausted(result, lambda value: pipe.send((None, value)))
            answer: tuple[bool, Any] = (True, result)
        except BaseException as error:
            answer = (False, Failure.of(dist.get_rank(), error))
        watch.busy = False
        try:
            pipe.send(answer)
        except OSError:
            return
        except Exception as error:  # a result that cannot be sent
            pipe.send((False, Failure.of(dist.get_rank(), error)))


class _Watch:
    """A thread that ends this process if its pipe breaks while it is busy."""

    def __init__(self, pipe: Connection) -> None:
        self.busy = True
        self.poll = select.poll()
        self.poll.register(pipe.fileno(), 0)
        threading.Thread(target=self._run, name="tilewise-watch", daemon=True).start()

    def _run(self) -> None:
        self.poll.poll()
        if self.busy:
            os._exit(1)


def exhausted(steps: Generator[Any, Any, Any], report: Callable[[Any], Any]) -> Any:
    """Report what a generator yields, and return what it returns."""
    while True:
        try:
            report(next(steps))
        except StopIteration as end:
            return end.value


def _load(modules: dict[str, ModuleType], module: str, file: str) -> ModuleType:
    if module in sys.modules and module != "__main__":
        return sys.modules[module]
    if module.startswith("tilewise."):
        return importlib.import_module(module)
    if file not in modules:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        modules[file] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[file]
        spec.loader.exec_module(modules[file])
    return modules[file]
