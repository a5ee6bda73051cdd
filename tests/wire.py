"""Listen to what is really handed to torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

WATCHED = [
    *("isend", "irecv", "send", "recv", "batch_isend_irecv", "broadcast", "reduce"),
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "gather", "scatter", "barrier"),
]


class Packet(NamedTuple):
    """One call of torch.distributed: its name, the peer (a world rank) and the payload."""

    operation: str
    peer: int | None
    elements: int
    bytes: int


@contextmanager
def wire() -> Iterator[list[Packet]]:
    """List the calls within the block, in their order."""
    heard: list[Packet] = []

    def listening(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            peer = args[0] if name in ("isend", "irecv") else None
            size = tensor.numel() if hasattr(tensor, "numel") else 0
            width = tensor.element_size() if size else 0
            heard.append(Packet(name, peer, size, size * width))
            return call(tensor, *args, **kwargs)

        return wrapped

    originals = {name: getattr(dist, name) for name in WATCHED}
    for name, call in originals.items():
        setattr(dist, name, listening(name, call))
    try:
        yield heard
    finally:
        for name, call in originals.items():
            setattr(dist, name, call)


def sent(heard: list[Packet]) -> int:
    """Return the elements that this rank sent to others."""
    return sum(packet.elements for packet in heard if packet.operation == "isend")
