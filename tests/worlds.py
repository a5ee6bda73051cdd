"""Worlds of two processes, with a short timeout, in which rank 1 fails."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from tilewise import Mesh
from tilewise.comm.pool import PRELOAD
from tilewise.errors import TilewiseError

TIMEOUT = timedelta(seconds=5)
READY = "ready"
Scenario = Callable[[Mesh], None]


class Failure(Exception):
    """What goes wrong on rank 1."""


def meet(scenarios: Iterable[Scenario], folder: Path) -> dict[str, str]:
    """Run each scenario in a world of its own, all at the same time; tell what rank 0 meets.

    One world after the other opens its mesh: many at once may take longer than the timeout.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes, answers = [], {}
    try:
        for scenario in scenarios:
            name = scenario.__name__
            answers[name], theirs = context.Pipe(duplex=False)
            for rank in (0, 1):
                process = context.Process(
                    target=_take_part,
                    args=(rank, str(folder / name), scenario, theirs),
                    daemon=True,
                )
                process.start()
                processes.append(process)
            theirs.close()
            assert answers[name].poll(240), f"{name}: its ranks do not find each other"
            assert answers[name].recv() == READY
        return {name: pipe.recv() if pipe.poll(240) else "" for name, pipe in answers.items()}
    finally:
        for process in processes:
            process.kill()
            process.join()


def _take_part(rank: int, path: str, scenario: Scenario, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = Mesh(timeout=TIMEOUT)
    if rank == 0:
        pipe.send(READY)
    text = "nothing raised"
    try:
        scenario(mesh)
    except (TilewiseError, Failure) as error:
        text = f"{type(error).__name__}: {error}"
    if rank == 1:
        store.wait(["done"])  # stay silent, but alive
    pipe.send(text)
    store.set("done", "1")
    os._exit(0)
