"""Find out who started this process, and join the other ranks.

torchrun, mpiexec and srun each tell a process its rank in variables of their own.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tilewise.errors import CommError

START = timedelta(minutes=5)
BACKENDS = ("gloo", "mpi", "nccl")
MPI_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def launched() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    if "RANK" in os.environ or any(name in os.environ for name in MPI_RANKS):
        return True
    return int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


def join(backend: str = "gloo", *, timeout: float | None = None) -> None:
    """Join the world of ranks that the launcher started; does nothing in a world already joined.

    `backend` is torch.distributed's, or `mpi` for tilewise's own over mpi4py.
    """
    if dist.is_initialized():
        return
    name = engine(backend)
    if backend == "mpi" and "TORCHELASTIC_RUN_ID" in os.environ:
        raise CommError("backend mpi: torchrun starts no MPI ranks; use mpiexec or srun, or gloo")
    if "RANK" not in os.environ:
        if any(variable in os.environ for variable in MPI_RANKS):
            from tilewise.comm.mpi import tell_torch

            tell_torch()
        elif launched():
            _tell_from_slurm()
    store, rank, size = next(rendezvous("env://", timeout=START))
    meet(name, store, rank, size, timeout=timeout)


def meet(name: str, store: Any, rank: int, size: int, *, timeout: float | None) -> None:
    """Wait until all ranks have started, which is no silence, and form a world with them."""
    store.set(f"tilewise/started/{rank}", "1")
    try:
        store.wait([f"tilewise/started/{other}" for other in range(size)], START)
    except RuntimeError as error:
        missing = [r for r in range(size) if not store.check([f"tilewise/started/{r}"])]
        raise CommError(
            f"rank {rank}: of {size} ranks, {missing} have not started in {START}"
        ) from error
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=limit)


def engine(backend: str) -> str:
    """Return torch.distributed's name of a backend, registered and ready."""
    if backend not in BACKENDS:
        raise CommError(f"backend {backend!r} must be one of {', '.join(BACKENDS)}")
    if backend == "nccl" and not dist.is_nccl_available():
        raise CommError("backend nccl: this torch is built without it; use gloo or mpi")
    if backend != "mpi":
        return backend
    try:
        from tilewise.comm.mpi import NAME
    except ImportError as error:
        raise CommError(
            f"backend mpi: mpi4py cannot be loaded ({error}); pip install 'tilewise[mpi]'"
        ) from error
    return NAME


def _tell_from_slurm() -> None:
    """Set torch.distributed's variables from those of srun."""
    environment = os.environ
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment.setdefault("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    environment.setdefault("MASTER_ADDR", first_node(nodes) or "127.0.0.1")
    job = int(environment.get("SLURM_JOB_ID", "0"))
    environment.setdefault("MASTER_PORT", str(20000 + job % 20000))


def first_node(nodes: str) -> str:
    """Return the first name in a SLURM node list such as `lassen[12-15,20],other3`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    return "" if found is None else found[1] + (found[2] or "")
