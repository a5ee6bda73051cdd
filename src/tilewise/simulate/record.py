"""What a rank does in a step, as it goes by: arithmetic, messages, sums, memory.

Everything is noted under the layer that it belongs to and its phase: `forward`, `backward`, or
`again` where forward is computed a second time in backward. Backward knows its layer from the
numbers that autograd gives its nodes: they were made while that layer ran forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call with arithmetic; `gradients` is how many results it computes at once."""

    name: str
    flops: int
    gradients: int = 1


@dataclass(frozen=True, slots=True)
class Message:
    """One message to or from a peer. Messages of one tag are under way together."""

    kind: str
    tag: int
    peer: int
    bytes: int
    sent: bool


@dataclass(frozen=True, slots=True)
class Sum:
    """One all-reduce: over which ranks, and how much this rank brings."""

    kind: str
    ranks: tuple[int, ...]
    bytes: int


@dataclass
class Segment:
    """What was done for one layer in one phase, in order, and the memory meanwhile."""

    layer: str
    phase: str
    events: list[Kernel | Message | Sum] = field(default_factory=list)
    calls: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0

    @property
    def flops(self) -> int:
        return sum(event.flops for event in self.events if isinstance(event, Kernel))


class Recorder(TorchDispatchMode):
    """Note all that happens inside, by layer and phase, and the bytes of live tensors.

    `held` are tensors that are there all the time, `always_bytes` what stands beside them. What a
    library allocates inside of one operator is not seen.
    """

    def __init__(self, held: list[Tensor], *, always_bytes: int = 0) -> None:
        super().__init__()
        self.segments: dict[tuple[str, str], Segment] = {}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = always_bytes
        self._inside: str | None = None
        self._starts: list[int] = []
        self._layers: list[str] = []
        self._note(_storages(held))

    @contextmanager
    def step(self, layer: str) -> Iterator[None]:
        """Run one step of the program, a layer's."""
        self._starts.append(_sequence())
        self._layers.append(layer)
        self._inside = layer
        self.here()
        try:
            yield
        finally:
            self._inside = None

    def here(self, layer: str | None = None) -> Segment:
        """Return the segment of what runs now; `layer` where the caller knows it."""
        node = torch._C._current_autograd_node()
        found: str | None
        if node is None:
            phase, found = "forward", self._inside
        elif self._inside is not None:
            phase, found = "again", self._inside
        else:
            number = node._sequence_nr()
            index = bisect_right(self._starts, number) - 1
            known = index >= 0 and number <= _sequence()
            phase, found = "backward", self._layers[index] if known else None
        key = (layer or found or "", phase)
        if key not in self.segments:
            self.segments[key] = Segment(*key, peak_bytes=self.now, end_bytes=self.now)
        return self.segments[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return 0  # nobody knows it; a check finds nothing wrong
        if func.is_view:
            return func(*args, **kwargs)
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **kwargs)
        segment = self.here()
        segment.calls += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
            backward = func._overloadpacket is aten.convolution_backward
            several = sum(map(bool, args[10][:2])) if backward else 1
            segment.events.append(Kernel(str(func._overloadpacket), flops, max(several, 1)))
        fresh = [storage for storage in _storages(out) if storage._cdata not in given]
        if fresh:
            self._forget()
            self._note(fresh)
        segment.peak_bytes = max(segment.peak_bytes, self.now)
        segment.end_bytes = self.now
        return out

    def _note(self, storages: list[UntypedStorage]) -> None:
        for storage in storages:
            if storage._cdata not in self.live:
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _forget(self) -> None:
        """Let go of what is no longer alive."""
        expired = UntypedStorage._expired
        for key in [key for key, (storage, _) in self.live.items() if expired(storage.cdata)]:
            self.now -= self.live.pop(key)[1]


def _sequence() -> int:
    """Return the number that autograd gives the next node."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _storages(tree: Any) -> list[UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
