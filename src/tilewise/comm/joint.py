"""Small messages for one peer that travel as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SMALL_BYTES = 32 << 10
"""Up to which, together, the latency of messages counts more than their size."""


class Part:
    """A message that travels with others; `work` is that of all of them."""

    def __init__(self, buffer: Tensor, tag: int) -> None:
        self.buffer, self.tag = buffer, tag
        self.work: Any = None

    def wait(self) -> None:
        self.work.wait()


class Joint:
    """Messages that wait for each other, and start when all of them are known.

    A rank's peer lists what travels between them in the same order, so both find the same parts.
    """

    def __init__(self, send: Any) -> None:
        self._send = send
        self._parts: dict[tuple[Any, int], list[list[Part]]] = {}

    def add(self, how: Any, buffer: Tensor, peer: int, tag: int) -> Part | None:
        """Take a message; None if it is too large to travel with others."""
        if buffer.nbytes > SMALL_BYTES:
            return None
        groups = self._parts.setdefault((how, peer), [[]])
        last = [part.buffer for part in groups[-1]]
        alike = not last or last[0].dtype == buffer.dtype
        if not alike or sum(one.nbytes for one in last) + buffer.nbytes > SMALL_BYTES:
            groups.append([])
        groups[-1].append(Part(buffer, tag))
        return groups[-1][-1]

    def start(self, start: Callable[[Any, Tensor, int, int], Any]) -> None:
        """Start one message for each group of parts."""
        for (how, peer), groups in self._parts.items():
            for parts in groups:
                buffers = [part.buffer for part in parts]
                if len(parts) == 1:
                    parts[0].work = start(how, buffers[0], peer, parts[0].tag)
                    continue
                sent = how is self._send
                whole = torch.cat(buffers) if sent else _room(buffers)
                work = _Whole(start(how, whole, peer, parts[0].tag), whole, () if sent else buffers)
                for part in parts:
                    part.work = work


@dataclass
class _Whole:
    """What all parts of a message wait for; it is waited for once, then parts get what came."""

    work: Any
    buffer: Tensor | None
    parts: Sequence[Tensor]

    def wait(self) -> None:
        if self.work is None:
            return
        self.work.wait()
        if self.parts and self.buffer is not None:
            for part, came in zip(self.parts, self.buffer.split([p.numel() for p in self.parts])):
                part.copy_(came)
        self.work = self.buffer = None
        self.parts = ()


def _room(buffers: Sequence[Tensor]) -> Tensor:
    return buffers[0].new_empty(sum(buffer.numel() for buffer in buffers))
