"""Run a function on local ranks.

A pool of processes is started once and serves meshes of any size up to its own. A function is sent
by its file and name, so it may live in a test module.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewise.errors import CommError, TilewiseError

POOL_SIZE = 8
PRELOAD = ["tilewise", "torch.distributed"]  # once, for all processes


class RanksError(AssertionError):
    """A function failed on some rank; carries that rank's traceback."""


def ranks(
    count: int | Sequence[int], function: Callable[..., Any], *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Call `function(mesh, *args)` on `count` ranks and return what each returned.

    A sequence in place of the count names the pool's ranks to use, in mesh order. If a rank
    raises, the first one's error is raised here, and no rank is left waiting.
    """
    members = tuple(range(count)) if isinstance(count, int) else tuple(count)
    return _pool(max(POOL_SIZE, max(members) + 1)).run(members, function, args, timeout)


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

    def _start_by_mpiexec(self) -> None:
        address = str(Path(self.folder) / "socket")
        code = (
            f"from tilewise.testing.ranks import serve_mpi; serve_mpi({address!r}, {self.timeout})"
        )
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(0.5)
            command = [_mpiexec(), "-n", str(self.size), sys.executable, "-c", code]
            launcher = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
            self.processes.append(_Launched(launcher))
            found: dict[int, Connection] = {}
            while len(found) < self.size:
                if launcher.poll() is not None:
                    raise RanksError(f"{command[0]} ended with code {launcher.returncode}")
                with suppress(TimeoutError):
                    pipe = Connection(listener.accept()[0].detach())
                    found[pipe.recv()] = pipe
        self.pipes = [found[rank] for rank in range(self.size)]

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
            self.pipes[rank].send((members, function.__module__, name, args))
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(members):
            waiting = [self.pipes[rank] for rank in members if rank not in results]
            ready = wait(waiting, max(deadline - time.monotonic(), 0))
            for rank in [rank for rank in members if self.pipes[rank] in ready]:
                try:
                    ok, value = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    ok, value = False, "the process ended"
                if ok is not None:
                    results[rank] = (ok, value)
                elif progress is not None and rank == members[0]:
                    progress(value)
            if any(not ok for ok, _ in results.values()):
                deadline = min(deadline, time.monotonic() + 5.0)
            if not ready:
                break
        missing = [rank for rank in members if rank not in results]
        failed = {rank: text for rank, (ok, text) in results.items() if not ok}
        if missing or failed:
            if missing:
                self.close()
                _pools.pop(self.size, None)
            first = min(failed) if failed else None
            detail = failed[first] if first is not None else "no rank raised"
            raise RanksError(
                f"on ranks {members}: failed {sorted(failed)}, without answer {missing}; "
                f"rank {first}:\n{detail}"
            )
        return [results[rank][1] for rank in members]

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_pools: dict[int, Pool] = {}


def _pool(size: int) -> Pool:
    if size not in _pools:
        _pools[size] = Pool(size)
    return _pools[size]


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()


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

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    pipe = Connection(connection.detach())
    pipe.send(int(os.environ["RANK"]))
    _serve(pipe, (tilewise.comm.mpi.NAME, None, None, None, timeout))


def _serve(pipe: Connection, join: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from tilewise.comm import Mesh

    torch.set_num_threads(1)
    backend, folder, rank, size, timeout = join
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    if folder is not None:
        store = dist.FileStore(str(Path(folder) / "store"), size)  # type: ignore[attr-defined]
        options |= {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(backend, **options)
    meshes: dict[tuple[int, ...], Mesh] = {}
    modules: dict[str, ModuleType] = {}
    while True:
        try:
            members, module, (file, name), args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if members not in meshes:
                meshes[members] = Mesh(members)
            function: Any = _load(modules, module, file)
            for part in name.split("."):
                function = getattr(function, part)
            result: Any = function(meshes[members], *args)
            if inspect.isgenerator(result):
                result = exhausted(result, lambda value: pipe.send((None, value)))
            pipe.send((True, result))
        except BaseException as error:
            kind = "" if isinstance(error, TilewiseError) else "\n" + traceback.format_exc()
            try:
                pipe.send((False, f"{type(error).__name__}: {error}{kind}"))
            except OSError:
                return


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
