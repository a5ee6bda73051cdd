"""The ranks that share one split, and the groups among them."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tilewise.comm.clock import Clock
from tilewise.comm.heap import keep_freed
from tilewise.comm.joint import Joint
from tilewise.comm.trace import Trace
from tilewise.errors import CommError, MismatchError


@dataclass(frozen=True)
class Group:
    """Some of a mesh's ranks, in mesh numbers, and the process group that joins them."""

    ranks: tuple[int, ...]
    handle: Any

    @property
    def size(self) -> int:
        return len(self.ranks)


class Bundle:
    """Messages that are started, and waited for, as one."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.works: list[Any] = []

    def add(self, message: Any) -> Bundle:
        """Put a message in; returns what to wait for."""
        self.messages.append(message)
        return self

    def start(self) -> None:
        if self.messages:
            self.works = dist.batch_isend_irecv(self.messages)

    def wait(self) -> None:
        """Wait for all of them; a receive of gloo's that is waited for again never ends."""
        works, self.works = self.works, []
        for work in works:
            work.wait()


class Mesh:
    """Ranks 0 … size−1 over process groups of their own.

    Nothing that others send, be it another mesh or the user's own messages in the world's group,
    can meet this mesh's messages.

    Args:
        ranks: the world's ranks that take part, in mesh order; all of them by default. Every rank
            named here must build the mesh, and no other rank needs to.
        timeout: how long to wait for a peer before an error; what init_process_group was given by
            default.
    """

    bundles = False
    """Whether the messages of an exchange have to start as one."""
    _bundle: Bundle | None = None
    _joint: Joint | None = None

    def __init__(
        self, ranks: Sequence[int] | None = None, *, timeout: timedelta | None = None
    ) -> None:
        keep_freed()
        self.trace = Trace()
        self.clock = Clock()
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], Group] = {}
        self._next_tag = 0
        self._side: Any = None
        if not dist.is_available() or not dist.is_initialized():
            if ranks is not None and tuple(ranks) != (0,):
                raise MismatchError(
                    f"mesh: ranks {tuple(ranks)} need torch.distributed; call "
                    "init_process_group first, or start under torchrun"
                )
            self.world_ranks: tuple[int, ...] = (0,)
            self.rank = 0
            return
        world = dist.get_world_size()
        self.world_ranks = tuple(range(world)) if ranks is None else tuple(ranks)
        if len(set(self.world_ranks)) != len(self.world_ranks) or not all(
            0 <= rank < world for rank in self.world_ranks
        ):
            raise MismatchError(
                f"mesh: ranks {self.world_ranks} must be distinct ranks of the world of {world}"
            )
        me = dist.get_rank()
        if me not in self.world_ranks:
            raise MismatchError(
                f"mesh: rank {me} builds a mesh of {self.world_ranks} that it is not part of"
            )
        self.rank = self.world_ranks.index(me)
        handle = self.group().handle
        self.bundles = dist.get_backend() == "nccl"
        if self.bundles and handle is not None:
            # messages of some ranks only must not be the first that a group sees
            dist.barrier(group=handle, device_ids=[torch.cuda.current_device()])

    @classmethod
    def alone(cls) -> Mesh:
        """Return a mesh of this process only: one device."""
        if dist.is_available() and dist.is_initialized():
            return cls((dist.get_rank(),))
        return cls()

    @property
    def size(self) -> int:
        return len(self.world_ranks)

    def group(self, ranks: Sequence[int] | None = None) -> Group:
        """Return the group of some mesh ranks, this one among them, opened once.

        All of them must ask for their common groups in the same order.
        """
        key = tuple(range(self.size)) if ranks is None else tuple(ranks)
        if key not in self._groups:
            self._groups[key] = Group(key, self._open(key) if len(key) > 1 else None)
        return self._groups[key]

    def side(self, *, timeout: timedelta | None = None) -> Any:
        """Open one more gloo group of all ranks, for a thread of its own; None for one rank.

        Each call opens another one, which lasts until the world's end. All ranks must call alike.
        """
        if self.size == 1:
            return None
        return self._open(tuple(range(self.size)), "gloo", timeout)

    def tag(self) -> int:
        """Return the next message tag. Every rank asks for tags in the same order."""
        self._next_tag += 1
        return self._next_tag

    @contextmanager
    def together(self, *, layer: str) -> Iterator[None]:
        """Start the messages of a block as one where the engine needs it.

        NCCL does: of two ranks that each ask for a receive first, neither gets to its send.
        """
        if not self.bundles:
            yield
            return
        self._bundle = bundle = Bundle()
        try:
            yield
        finally:
            self._bundle = None
        with self._named("send", layer, tuple(range(self.size))):
            bundle.start()

    @contextmanager
    def joined(self, *, layer: str) -> Iterator[None]:
        """Let the small messages of a block travel as one to each peer, when the block ends."""
        self._joint = joint = Joint(dist.isend)
        try:
            yield
        finally:
            self._joint = None
        everyone = tuple(range(self.size))
        with self.together(layer=layer), self._named("send", layer, everyone):
            joint.start(self._start)

    def send(self, buffer: torch.Tensor, peer: int, *, tag: int, layer: str) -> Any:
        """Start sending a contiguous buffer, which must stay untouched until it is waited for."""
        self.trace.add("send", layer, (peer,), buffer.numel() * buffer.element_size())
        with self._named("send", layer, (peer,)):
            return self._start(dist.isend, buffer, peer, tag)

    def receive(self, buffer: torch.Tensor, peer: int, *, tag: int, layer: str) -> Any:
        """Start receiving into a contiguous buffer."""
        with self._named("receive", layer, (peer,)):
            return self._start(dist.irecv, buffer, peer, tag)

    def _start(self, how: Any, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        part = None if self._joint is None else self._joint.add(how, buffer, peer, tag)
        if part is not None:
            return part
        to, group = self.world_ranks[peer], self.group().handle
        if self._bundle is not None:
            return self._bundle.add(dist.P2POp(how, buffer, to, group, tag))
        return how(buffer, to, group=group, tag=tag)

    def wait(
        self, work: Any, operation: str, *, peer: int, layer: str, kind: str = "redistribution"
    ) -> None:
        """Wait for a send or receive; `kind` is what the time counts as."""
        with self.clock.waiting(kind), self._named(operation, layer, (peer,)):
            work.wait()

    def sum(self, buffer: torch.Tensor, group: Group, *, layer: str, wait: bool = True) -> Any:
        """Sum a contiguous buffer in place over a group; returns the work when not waited for."""
        if group.size == 1 or not buffer.numel():
            return None
        self.trace.add("sum", layer, group.ranks, buffer.numel() * buffer.element_size())
        with self.clock.waiting("sync"), self._named("sum", layer, group.ranks):
            work = dist.all_reduce(buffer, group=group.handle, async_op=not wait)
        return work

    def finish(self, work: Any, group: Group, *, layer: str) -> None:
        """Wait for a sum that was started."""
        if work is None:
            return
        with self.clock.waiting("sync"), self._named("sum", layer, group.ranks):
            work.wait()

    def total(self, numbers: Sequence[float], *, layer: str) -> list[float]:
        """Add up numbers that the hosts know, over all ranks, without waiting for a device."""
        buffer = torch.tensor(numbers, dtype=torch.float32)
        if self.size > 1:
            group = self.group()
            self.trace.add("sum", layer, group.ranks, buffer.numel() * buffer.element_size())
            with self.clock.waiting("sync"), self._named("sum", layer, group.ranks):
                dist.all_reduce(buffer, group=self._hosts())
        return [float(number) for number in buffer]

    def agree(self, what: str, facts: object = None, *, error: str | None = None) -> None:
        """Raise the same error on all ranks unless all of them bring the same facts and no error.

        Communication: one all-reduce of two numbers when all is well.
        """
        if self.size == 1:
            if error is not None:
                raise MismatchError(f"{what}: {error}")
            return
        mine = repr(facts) if error is None else f"\0{error}"
        digest = int.from_bytes(hashlib.blake2b(mine.encode(), digest_size=7).digest(), "big")
        extremes = torch.tensor([digest, -digest, int(error is not None)], dtype=torch.int64)
        group = self.group()
        with self.clock.waiting("sync"), self._named("agree", what, group.ranks):
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._hosts())
        high, low, failed = extremes.tolist()
        if high == -low and not failed:
            return
        said: list[Any] = [None] * self.size
        with self._named("agree", what, group.ranks):
            dist.all_gather_object(said, (self.rank, error, repr(facts)), group=self._hosts())
        raise MismatchError(f"{what}: {_difference(sorted(said))}")

    def close(self) -> None:
        """Destroy the process groups that this mesh opened."""
        handles = {id(g.handle): g.handle for g in self._groups.values() if g.handle is not None}
        if self._side is not None:
            handles[id(self._side)] = self._side
        for handle in handles.values():
            dist.destroy_process_group(handle)
        self._groups.clear()
        self._side = None

    def _hosts(self) -> Any:
        """Return the group in which hosts talk to each other, without waiting for a device."""
        if self._side is None:
            only_devices = dist.get_backend() == "nccl"
            everyone = tuple(range(self.size))
            self._side = self._open(everyone, "gloo") if only_devices else self.group().handle
        return self._side

    def _open(
        self,
        ranks: tuple[int, ...],
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> Any:
        world_ranks = [self.world_ranks[rank] for rank in ranks]
        with self._named("open", "mesh", ranks), _names_by_members():
            return dist.new_group(
                world_ranks,
                timeout=timeout or self._timeout or _timeout(),
                backend=backend,
                use_local_synchronization=True,
                **_KEEP_ORDER,
            )

    @contextmanager
    def _named(self, operation: str, layer: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Turn an engine's failure into an error that says what it was about."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, (CommError, MismatchError)):
                raise
            others = [rank for rank in peers if rank != self.rank]
            names = f"rank {others[0]}" if len(others) == 1 else f"ranks {others}"
            raise CommError(
                f"{operation} of {layer}: no answer from {names} on rank {self.rank}; the peer "
                f"died, stopped, or took another path through the model ({error})"
            ) from error


# Sums must add in mesh order for replicas to be bitwise equal; older versions sort by world rank.
_KEEP_ORDER: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)


def _timeout() -> timedelta | None:
    """Return the timeout of the world's group; torch gives new groups its default instead."""
    world = distributed_c10d._get_default_group()
    if isinstance(own := getattr(world, "timeout", None), timedelta):  # tilewise's over MPI
        return own
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


_opened: Counter[tuple[int, ...]] = Counter()


@contextmanager
def _names_by_members() -> Iterator[None]:
    """Name new groups by their members and how often these have met before.

    torch puts the number of groups that the *local* process has into the name under which members
    find each other, so ranks with different histories never meet (seen with torch 2.13).
    """

    def name(ranks: list[int]) -> str:
        key = tuple(sorted(ranks))
        _opened[key] += 1
        return f"tilewise/{'_'.join(map(str, key))}/{_opened[key]}"

    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original


def _difference(said: list[tuple[int, str | None, str]]) -> str:
    errors = _who_says([(rank, error) for rank, error, _ in said if error is not None])
    if errors:
        return "; ".join(f"{who}: {error}" for error, who in errors.items())
    values = _who_says([(rank, facts) for rank, _, facts in said])
    return "ranks disagree: " + "; ".join(f"{facts} on {who}" for facts, who in values.items())


def _who_says(said: list[tuple[int, str]]) -> dict[str, str]:
    """Return for each text the ranks that say it, in words."""
    ranks: dict[str, list[int]] = {}
    for rank, text in said:
        ranks.setdefault(text, []).append(rank)
    return {
        text: f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(map(str, some))}"
        for text, some in ranks.items()
    }
