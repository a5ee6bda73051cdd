"""Run a function on local ranks.

A pool of processes is started once and serves meshes of any size up to its own; gloo carries the
messages. A function is sent by its file and name, so it may live in a test module.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import inspect
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewise.errors import TilewiseError

POOL_SIZE = 8


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

    `timeout` is how long a rank waits for another one's message, in seconds.
    """

    def __init__(self, size: int, *, backend: str = "gloo", timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "tilewise.comm"])
        self.size = size
        self.store = tempfile.mkdtemp(prefix="tilewise-ranks-")
        self.pipes: list[Any] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, self.store, theirs, backend, timeout), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

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


def _serve(
    rank: int, size: int, store: str, pipe: Connection, backend: str, timeout: float
) -> None:
    import torch
    import torch.distributed as dist

    from tilewise.comm import Mesh

    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=torch.distributed.FileStore(  # type: ignore[attr-defined]
            str(Path(store) / "store"), size
        ),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
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
                result = _exhausted(result, pipe)
            pipe.send((True, result))
        except BaseException as error:
            kind = "" if isinstance(error, TilewiseError) else "\n" + traceback.format_exc()
            try:
                pipe.send((False, f"{type(error).__name__}: {error}{kind}"))
            except OSError:
                return


def _exhausted(steps: Generator[Any, Any, Any], pipe: Connection) -> Any:
    """Report what a generator yields, and return what it returns."""
    while True:
        try:
            pipe.send((None, next(steps)))
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
