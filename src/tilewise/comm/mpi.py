"""An MPI backend for torch.distributed, through mpi4py, for CPU nodes and HPC launchers.

Importing this module registers the backend `mpi4py`, and under an MPI launcher tells
torch.distributed who is who, so that a script needs no more than

    import tilewise.comm.mpi
    torch.distributed.init_process_group("mpi4py")

A script that an error ends on one rank ends on all of them.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tilewise.comm.mpi_request import Request, poller

NAME = "mpi4py"
# Most MPIs take and deliver messages up to this size at once, without progress on the way.
EAGER_BYTES = 32 << 10

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
# What MPI cannot add is added as something that it can.
_STAND_INS = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.uint8}
_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}


class Group(ProcessGroup):  # type: ignore[misc]
    """A process group over an MPI communicator."""

    def __init__(self, comm: MPI.Intracomm, name: str, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self.comm = comm
        self._name = name
        self._timeout = timeout.total_seconds()

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def timeout(self) -> timedelta:
        """How long to wait for a peer."""
        return timedelta(seconds=self._timeout)

    def setTimeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the communicator to MPI, which frees it at the end."""

    def abort(self) -> None:
        """Leave the communicator to MPI, which frees it at the end."""

    def _watch(
        self,
        request: MPI.Request,
        keep: Any,
        then: Callable[[], None] | None = None,
        result: Any = None,
        *,
        poll: bool = True,
    ) -> Request:
        found = Request(request, self._timeout, keep, then, result)
        return poller.watch(found) if poll else found

    # -- to one peer --------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Request:
        (tensor,) = tensors
        request = self.comm.Isend(_bytes(tensor), peer, tag)
        return self._watch(request, tensor, poll=tensor.nbytes > EAGER_BYTES)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Request:
        (tensor,) = tensors
        request = self.comm.Irecv(_bytes(tensor), peer, tag)
        return self._watch(request, tensor, poll=tensor.nbytes > EAGER_BYTES)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Request:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # -- over all of them ---------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Request:
        (tensor,) = tensors
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        buffer = _addable(tensor)
        request = self.comm.Iallreduce(MPI.IN_PLACE, _typed(buffer), _op(op))
        then = self._put_back(tensor, buffer, op)
        # who waits at once lets it progress by that, and needs no thread that wakes up for it
        poll = opts is None or opts.asyncOp
        return self._watch(request, buffer, then, tensors, poll=poll)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Request:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        work = self.allreduce([flat], opts)
        work.wait()
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))
        work._result = tensors
        return work

    def reduce(self, tensors: list[Tensor], opts: Any) -> Request:
        (tensor,) = tensors
        buffer = _addable(tensor)
        root = opts.rootRank
        here = self.comm.rank == root
        send = MPI.IN_PLACE if here else _typed(buffer)
        receive = _typed(buffer) if here else None
        request = self.comm.Ireduce(send, receive, _op(opts.reduceOp), root)
        then = self._put_back(tensor, buffer, opts.reduceOp) if here else None
        return self._watch(request, buffer, then, tensors)

    def _put_back(self, tensor: Tensor, buffer: Tensor, op: Any) -> Callable[[], None] | None:
        """Return what is left to do when a result is complete."""
        average = op == ReduceOp.AVG
        if buffer is tensor and not average:
            return None

        def then() -> None:
            if average:
                buffer.div_(self.comm.size)
            if buffer is not tensor:
                tensor.copy_(buffer)

        return then

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Request:
        (tensor,) = tensors
        buffer = tensor.contiguous()
        then = self._put_back(tensor, buffer, ReduceOp.SUM)
        return self._watch(self.comm.Ibcast(_bytes(buffer), opts.rootRank), buffer, then, tensors)

    def allgather(
        self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None
    ) -> Request:
        ((tensor,), (into,)) = tensors, outputs
        tensor = tensor.contiguous()
        whole = tensor.new_empty((len(into), *tensor.shape))
        request = self.comm.Iallgather(_bytes(tensor), _bytes(whole))

        def then() -> None:
            for target, part in zip(into, whole):
                target.copy_(part)

        return self._watch(request, (tensor, whole), then, outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Request:
        request = self.comm.Iallgather(_bytes(tensor), _bytes(output))
        return self._watch(request, (tensor, output), None, [output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None
    ) -> Request:
        works = [self.all_gather_single(out, tensor) for out, tensor in zip(outputs, tensors)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def reduce_scatter(
        self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any = None
    ) -> Request:
        ((output,), (parts,)) = outputs, tensors
        return self.reduce_scatter_single(output, torch.stack(parts), opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Request:
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        buffer, mine = _addable(tensor), _addable(output)
        request = self.comm.Ireduce_scatter_block(_typed(buffer), _typed(mine), _op(op))
        return self._watch(request, (buffer, mine), self._put_back(output, mine, op), [output])

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Request:
        tensor = tensors[0].contiguous()
        root = opts.rootRank
        here = self.comm.rank == root
        whole = tensor.new_empty((self.comm.size, *tensor.shape)) if here else None
        request = self.comm.Igather(_bytes(tensor), None if whole is None else _bytes(whole), root)

        def then() -> None:
            if whole is not None:
                for target, part in zip(outputs[0], whole):
                    target.copy_(part)

        return self._watch(request, (tensor, whole), then, outputs)

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Request:
        (output,) = outputs
        root = opts.rootRank
        whole = torch.stack(tensors[0]) if self.comm.rank == root else None
        request = self.comm.Iscatter(None if whole is None else _bytes(whole), _bytes(output), root)
        return self._watch(request, (output, whole), None, outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, out_splits: list[int], in_splits: list[int], opts: Any
    ) -> Request:
        size = self.comm.size
        row_in = tensor[:1].numel() * tensor.element_size()
        row_out = output[:1].numel() * output.element_size()
        sends = [n * row_in for n in in_splits or [tensor.shape[0] // size] * size]
        receives = [n * row_out for n in out_splits or [output.shape[0] // size] * size]
        request = self.comm.Ialltoallv(
            [_buffer(tensor), sends, _starts(sends), MPI.BYTE],
            [_buffer(output), receives, _starts(receives), MPI.BYTE],
        )
        return self._watch(request, (tensor, output), None, [output])

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Request:
        tag = 0
        works = [self.recv([t], peer, tag) for peer, t in enumerate(outputs)]
        works += [self.send([t.contiguous()], peer, tag) for peer, t in enumerate(tensors)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def barrier(self, opts: Any = None) -> Request:
        return self._watch(self.comm.Ibarrier(), None, None, [])

    # The names under which older versions of torch call them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _bytes(tensor: Tensor) -> Any:
    return [_buffer(tensor), MPI.BYTE]


def _typed(tensor: Tensor) -> Any:
    return [_buffer(tensor), _TYPES[tensor.dtype]]


def _buffer(tensor: Tensor) -> Any:
    if not tensor.is_contiguous():
        raise ValueError("MPI: a tensor to send or receive must be contiguous")
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _addable(tensor: Tensor) -> Tensor:
    """Return the tensor itself or a copy that MPI can add."""
    return tensor.to(_STAND_INS.get(tensor.dtype, tensor.dtype)).contiguous()


def _op(op: Any) -> MPI.Op:
    for known, found in _OPS.items():
        if op == known:
            return found
    raise ValueError(f"MPI: {op} is not a reduction that this backend has")


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


# -- joining the world ----------------------------------------------------------------------------


def _create(options: Any, _: Any = None) -> Group:
    """Open a group; torch.distributed calls this on its members only."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "the mpi4py backend polls in a thread: MPI must allow several to call it"
        )
    store, rank, size = options.store, options.group_rank, options.group_size
    # Opening a communicator waits for all of its members for ever, a store does not.
    store.set(f"mpi/{rank}", str(MPI.COMM_WORLD.rank))
    keys = [f"mpi/{other}" for other in range(size)]
    store.wait(keys, options.timeout)
    members = [int(store.get(key)) for key in keys]
    if len(set(members)) != size:
        raise RuntimeError(
            "the mpi4py backend needs ranks that an MPI launcher started (mpiexec, srun); "
            f"{size} ranks here are {len(set(members))} MPI processes"
        )
    comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(members))
    return Group(comm, options.group_id, options.timeout)


def tell_torch() -> None:
    """Set the variables by which torch.distributed finds its ranks, unless they are set."""
    comm = MPI.COMM_WORLD
    if "RANK" in os.environ:
        return
    near = comm.Split_type(MPI.COMM_TYPE_SHARED)
    host = "127.0.0.1" if near.size == comm.size else socket.gethostname()
    address = comm.bcast((host, _free_port()))
    os.environ |= {
        "RANK": str(comm.rank),
        "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(near.rank),
        "LOCAL_WORLD_SIZE": str(near.size),
    }
    os.environ.setdefault("MASTER_ADDR", address[0])
    os.environ.setdefault("MASTER_PORT", str(address[1]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def leave(code: int, *, patience: float = 5.0) -> None:
    """Wait a moment for the other ranks to leave with an error as well, or end them.

    MPI's own end would wait for them, and they for messages that never come.
    """
    if code == 0 or MPI.Is_finalized():
        return
    everyone = MPI.COMM_WORLD.Ibarrier()
    deadline = time.monotonic() + patience
    while not everyone.Test():
        if time.monotonic() > deadline:
            _end_all(code)
        time.sleep(0.01)


def _end_all(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(code)


def _end_all_after_error() -> None:
    """End all ranks if nobody caught an error here."""
    if getattr(sys, "last_value", None) is not None and not MPI.Is_finalized():
        _end_all(1)


if NAME.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices="cpu")
    if MPI.COMM_WORLD.size > 1:
        tell_torch()
        atexit.register(_end_all_after_error)
