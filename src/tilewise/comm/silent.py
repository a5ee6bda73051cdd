"""One rank of a world that is not there: it computes its share, and nobody answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilewise.comm.clock import Clock
from tilewise.comm.mesh import Group, Mesh
from tilewise.comm.trace import Trace
from tilewise.errors import MismatchError


class Done:
    """A message that has arrived, for all that anyone can tell."""

    def wait(self) -> None:
        """Return at once."""


class SilentMesh(Mesh):
    """Rank `rank` of `size`, alone, behind the interface of a mesh.

    It opens no process group and sends nothing; what it would receive is zero.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.trace = Trace()
        self.world_ranks = tuple(range(size))
        self.rank = rank
        self.clock = Clock()
        self._next_tag = 0
        self._groups = {}
        self._side = None

    def group(self, ranks: Sequence[int] | None = None) -> Group:
        """Return the group of some ranks, which nothing joins."""
        return Group(self.world_ranks if ranks is None else tuple(ranks), None)

    def send(self, buffer: Tensor, peer: int, *, tag: int, layer: str) -> Any:
        """Send nothing."""
        return Done()

    def receive(self, buffer: Tensor, peer: int, *, tag: int, layer: str) -> Any:
        """Receive zeros."""
        buffer.zero_()
        return Done()

    def wait(
        self, work: Any, operation: str, *, peer: int, layer: str, kind: str = "redistribution"
    ) -> None:
        """Go on at once."""

    def sum(self, buffer: Tensor, group: Group, *, layer: str, wait: bool = True) -> Any:
        """Leave the buffer as it is."""
        return None if group.size == 1 or not buffer.numel() else Done()

    def finish(self, work: Any, group: Group, *, layer: str) -> None:
        """Go on at once."""

    def total(self, numbers: Sequence[float], *, layer: str) -> list[float]:
        """Return what it comes to where all others bring what this rank does."""
        return [float(number) * self.size for number in numbers]

    def agree(self, what: str, facts: object = None, *, error: str | None = None) -> None:
        """Raise this rank's own error; the others agree."""
        if error is not None:
            raise MismatchError(f"{what}: {error}")

    def close(self) -> None:
        """Do nothing: nothing was opened."""
