"""Bring a tensor from one cover to another, and gradients back.

start ──▶ messages travel ──▶ finish
      (compute here)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm.chain import Chain, Later, hand_on, take, token_of
from tilewise.comm.formats import memory_format, same_memory
from tilewise.comm.frame import Box, Frame, overlap
from tilewise.comm.mesh import Group, Mesh
from tilewise.errors import CommError
from tilewise.layout import Cover, Layout, Message, Move

HALF = (torch.bfloat16, torch.float16)


class Exchange:
    """One move of a tensor among the ranks of a mesh, made ready for this rank.

    Layout: source → target; where the source holds partial sums or overlapping blocks they are
        added. Positions of the target past the tensor's edge get `fill`.
    Communication: one message to each peer that needs anything, none to oneself; partial sums
        that stay where they are go through one all-reduce over the ranks that share them.
    Adjoint: the same for the move back.

    `kind` is what waiting for it counts as: `halo`, `redistribution` or `sync`. With `fresh`, the
    gradient that comes back to it is memory of its own: this rank's slab of it stays in place.
    """

    def __init__(
        self,
        mesh: Mesh,
        source: Layout | Cover,
        target: Layout | Cover,
        *,
        layer: str,
        fill: float = 0.0,
        kind: str | None = None,
        fresh: bool = False,
    ) -> None:
        source = Cover.of(source) if isinstance(source, Layout) else source
        target = Cover.of(target) if isinstance(target, Layout) else target
        self.mesh = mesh
        self.layer, self.fresh = layer, fresh
        self.move = Move(source, target)
        if kind is None:
            kind = "halo" if source.axes == target.axes else "redistribution"
        self.forth = _Way(mesh, self.move, layer, fill, kind)
        self.back = _Way(mesh, self.move.adjoint, f"{layer} (backward)", 0.0, kind)

    @cached_property
    def core(self) -> Box | None:
        """Where this rank's slab lies in the target, if it lies there whole and is its alone.

        Its gradient then concerns nobody else, and only what surrounds it travels.
        """
        mine = [m for m in self.forth.receives if m.peer == self.mesh.rank]
        if len(mine) != 1 or len(mine[0].transfers) != 1:
            return None
        (own,) = mine[0].transfers
        asked = [transfer.source for message in self.back.sends for transfer in message.transfers]
        alone = not any(overlap(box, own.target) for box in asked)
        return own.target if alone and own.shape == self.forth.in_shape else None

    @property
    def arriving(self) -> list[Box]:
        """The boxes of the target that come from others."""
        rank = self.mesh.rank
        return [t.target for m in self.forth.receives if m.peer != rank for t in m.transfers]

    @property
    def silent(self) -> bool:
        """Whether nothing has to be done in either direction, on any rank."""
        return self.forth.still and self.back.still

    def start(self, tensor: Tensor) -> Pending:
        """Post all messages of the forward move, outside of autograd."""
        return self.forth.start(tensor)

    def start_adjoint(self, grad: Tensor | Frame) -> Pending:
        """Post all messages of the move back, outside of autograd.

        A frame holds only what others get; what this rank keeps is the caller's business.
        """
        return self.back.start(grad)

    def __call__(self, tensor: Tensor, chain: Chain | None = None) -> Tensor:
        """Exchange and record the adjoint; `chain` orders it among the other messages."""
        if self.silent:
            return tensor
        out: Tensor
        later = None if chain is None else chain.later
        out, token = _ExchangeFunction.apply(tensor, token_of(chain, tensor), self, later)
        hand_on(chain, token)
        return out


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, token: Tensor | None, exchange: Exchange, later: Later | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.exchange, ctx.later = exchange, later
        ctx.differentiable = tensor.is_floating_point() or tensor.is_complex()
        out = exchange.start(tensor).finish()
        if same_memory(out, tensor):
            out = out.clone()
        return out, take(ctx, token, 1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, token: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        if not ctx.differentiable:
            return None, token, None, None
        exchange: Exchange = ctx.exchange
        core = exchange.core if exchange.fresh and grad.dtype not in HALF else None
        given: Tensor | Frame = grad
        if core is not None:
            boxes = exchange.arriving
            given = Frame(boxes, [grad[box] for box in boxes], grad)
        pending = exchange.start_adjoint(given)
        if ctx.later is not None:
            ctx.later.run()
        if core is None:
            return pending.finish(), token, None, None
        found = grad[core]
        pending.finish_into(found)
        return found, token, None, None


class _Way:
    """One direction of an exchange on this rank."""

    def __init__(self, mesh: Mesh, move: Move, layer: str, fill: float, kind: str) -> None:
        self.mesh, self.layer, self.fill, self.kind = mesh, layer, fill, kind
        self.tag = mesh.tag()
        rank = mesh.rank
        self.still = move.local
        self.in_shape = move.source.local_shape(rank)
        self.out_shape = move.target.local_shape(rank)
        self.group: Group | None = None
        self.sends: list[Message] = []
        self.receives: list[Message] = []
        if self.still:
            return
        if move.stays:
            self.group = mesh.group(move.source.sharers(rank))
            return
        self.sends = [message for message in move.sends(rank) if message.peer != rank]
        self.receives = move.receives(rank)
        self.adds = not move.source.disjoint
        arriving = sum(message.elements for message in self.receives)
        self.covered = not self.adds and arriving == prod(self.out_shape)
        self.inside = move.target.boxes(rank)
        self.source = move.source

    @cached_property
    def shows_format(self) -> bool:
        """Whether the slabs of all ranks show in which memory format they are.

        Where some do not, replicas of the result could differ in format and so in rounding.
        """
        shapes = {self.source.local_shape(rank) for rank in range(self.mesh.size)}
        return all(shape[1] > 1 and prod(shape[2:]) > 1 and prod(shape) for shape in shapes)

    @property
    def elements_sent(self) -> int:
        """What this rank hands over; a sum counts its buffer once."""
        if self.group is not None:
            return prod(self.in_shape) if self.group.size > 1 else 0
        return sum(packet.elements for packet in self.sends)

    def start(self, tensor: Tensor | Frame) -> Pending:
        if isinstance(tensor, Frame):
            return self._post(tensor, tensor.like.new_empty(0))
        if tuple(tensor.shape) != self.in_shape:
            raise CommError(
                f"exchange of {self.layer}: rank {self.mesh.rank} brings a slab of shape "
                f"{tuple(tensor.shape)}, its layout says {self.in_shape}"
            )
        tensor = tensor.detach()
        if self.still:
            return Pending(self, tensor)
        if self.group is not None:
            return self._start_sum(tensor, self.group)
        return self._post(tensor, tensor)

    def _post(self, source: Tensor | Frame, like: Tensor) -> Pending:
        """Start all messages; `like` says of which kind the values are."""
        tag = self.tag * KINDS + _KIND.get(like.dtype, KINDS - 1)
        incoming: list[tuple[Message, Tensor | None, Any]] = []
        outgoing: list[tuple[Message, Tensor, Any]] = []
        with self.mesh.together(layer=self.layer):
            for message in self.receives:
                if message.peer == self.mesh.rank:
                    incoming.append((message, None, None))
                    continue
                buffer = like.new_empty(message.elements)
                work = self.mesh.receive(buffer, message.peer, tag=tag, layer=self.layer)
                incoming.append((message, buffer, work))
            for message in self.sends:
                buffer = _pack(source, message)
                work = self.mesh.send(buffer, message.peer, tag=tag, layer=self.layer)
                outgoing.append((message, buffer, work))
        return Pending(self, like, incoming, outgoing)

    def _start_sum(self, tensor: Tensor, group: Group) -> Pending:
        # Ranks may differ in memory format, so all of them sum in the same order of elements.
        buffer = tensor.clone(memory_format=torch.contiguous_format)
        work = self.mesh.sum(buffer, group, layer=self.layer, wait=False)
        return Pending(self, tensor, total=buffer, work=work)


class Pending:
    """Messages under way. The tensor they come from must not change before they are finished."""

    def __init__(
        self,
        way: _Way,
        tensor: Tensor,
        incoming: Sequence[tuple[Message, Tensor | None, Any]] = (),
        outgoing: Sequence[tuple[Message, Tensor, Any]] = (),
        *,
        total: Tensor | None = None,
        work: Any = None,
    ) -> None:
        self.way, self.tensor, self.incoming, self.outgoing = way, tensor, incoming, outgoing
        self.total, self.work = total, work
        self.version = _version(tensor)
        self.finished = False

    def finish(self) -> Tensor:
        """Wait for all messages and return this rank's part of the target; call it once."""
        way = self.way
        if self.finished:
            raise CommError(f"exchange of {way.layer}: finished twice; start it again")
        self.finished = True
        if way.still:
            return self.tensor
        if way.group is not None and self.total is not None:
            way.mesh.finish(self.work, way.group, layer=way.layer)
            return self.total.contiguous(memory_format=memory_format(self.tensor))
        out = _allocate(self.tensor, way)
        self._collect(out, own=True)
        return out.to(self.tensor.dtype)

    def finish_into(self, out: Tensor | Frame) -> None:
        """Wait for all messages and put or add what others sent to where it belongs in `out`."""
        self.finished = True
        self._collect(out, own=False)

    def _collect(self, out: Tensor | Frame, *, own: bool) -> None:
        way = self.way
        for message, buffer, work in self.incoming:
            if work is not None:
                way.mesh.wait(work, "receive", peer=message.peer, layer=way.layer, kind=way.kind)
            elif not own:
                continue
            _unpack(out, message, buffer, self.tensor, add=way.adds)
        for message, _, work in self.outgoing:
            way.mesh.wait(work, "send", peer=message.peer, layer=way.layer, kind=way.kind)
        if _version(self.tensor) != self.version:
            raise CommError(
                f"exchange of {way.layer}: its slab was changed in place on rank {way.mesh.rank} "
                "while it was being sent; finish the exchange first, or start it with a copy"
            )
        self.incoming = self.outgoing = ()


# A message's tag carries the dtype: a rank that brings another one than its peer does must not
# meet it, for gloo would fill a part of the buffer and say nothing.
KINDS = 16
_KIND = {
    dtype: kind
    for kind, dtype in enumerate(
        (
            torch.float32,
            torch.float64,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.complex128,
        )
    )
}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _allocate(like: Tensor, way: _Way) -> Tensor:
    format = memory_format(like)
    if format is not torch.contiguous_format and not way.shows_format:
        format = torch.contiguous_format
    dtype = like.dtype
    if way.adds and dtype in HALF:
        dtype = torch.float32  # so that a sum is rounded once
    out = torch.empty(way.out_shape, dtype=dtype, device=like.device, memory_format=format)
    if way.covered:
        return out
    out.fill_(way.fill)
    if way.fill:
        for box in way.inside:
            out[box] = 0
    return out


def _pack(tensor: Tensor | Frame, message: Message) -> Tensor:
    read = tensor.read if isinstance(tensor, Frame) else tensor.__getitem__
    parts = [read(transfer.source).reshape(-1) for transfer in message.transfers]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _unpack(
    out: Tensor | Frame, message: Message, buffer: Tensor | None, own: Tensor, *, add: bool
) -> None:
    at = 0
    for transfer in message.transfers:
        if buffer is None:
            part = own[transfer.source]
        else:
            part = buffer[at : at + transfer.elements].view(transfer.shape)
            at += transfer.elements
        if isinstance(out, Frame):
            out.write(transfer.target, part, add=add)
        elif add:
            out[transfer.target].add_(part)
        else:
            out[transfer.target].copy_(part)
