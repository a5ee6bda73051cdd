"""Bring a tensor from one cover to another, and gradients back.

start ──▶ messages travel ──▶ finish
      (compute here)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm.chain import Chain
from tilewise.comm.mesh import Group, Mesh
from tilewise.errors import CommError
from tilewise.layout import PARTIAL, Cover, Layout, Message, Move


class Exchange:
    """One move of a tensor among the ranks of a mesh, made ready for this rank.

    Layout: source → target; where the source holds partial sums or overlapping blocks they are
        added. Positions of the target past the tensor's edge get `fill`.
    Communication: one message to each peer that needs anything, none to oneself; partial sums
        that stay where they are go through one all-reduce over the ranks that share them.
    Adjoint: the same for the move back.
    """

    def __init__(
        self,
        mesh: Mesh,
        source: Layout | Cover,
        target: Layout | Cover,
        *,
        layer: str,
        fill: float = 0.0,
    ) -> None:
        source = Cover.of(source) if isinstance(source, Layout) else source
        target = Cover.of(target) if isinstance(target, Layout) else target
        self.mesh = mesh
        self.layer = layer
        move = Move(source, target)
        self.forth = _Way(mesh, move, layer, fill)
        self.back = _Way(mesh, move.adjoint, f"{layer} (backward)", 0.0)

    @property
    def silent(self) -> bool:
        """Whether nothing has to be done in either direction, on any rank."""
        return self.forth.still and self.back.still

    def start(self, tensor: Tensor) -> Pending:
        """Post all messages of the forward move, outside of autograd."""
        return self.forth.start(tensor)

    def start_adjoint(self, grad: Tensor) -> Pending:
        """Post all messages of the move back, outside of autograd."""
        return self.back.start(grad)

    def __call__(self, tensor: Tensor, chain: Chain | None = None) -> Tensor:
        """Exchange and record the adjoint; `chain` orders it among the other messages."""
        if self.silent:
            return tensor
        if chain is None or chain.token is None or not torch.is_grad_enabled():
            out: Tensor = _ExchangeFunction.apply(tensor, None, self)[0]
            return out
        out, chain.token = _ExchangeFunction.apply(tensor, chain.token, self)
        return out


class _ExchangeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, token: Tensor | None, exchange: Exchange
    ) -> tuple[Tensor, Tensor | None]:
        ctx.exchange = exchange
        out = exchange.start(tensor.detach()).finish()
        if out is tensor or out.data_ptr() == tensor.data_ptr():
            out = out.clone()
        return out, None if token is None else token.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, token: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None]:
        return ctx.exchange.start_adjoint(grad).finish(), token, None


class _Way:
    """One direction of an exchange on this rank."""

    def __init__(self, mesh: Mesh, move: Move, layer: str, fill: float) -> None:
        self.mesh, self.layer, self.fill = mesh, layer, fill
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
        if move.source.same_blocks(move.target):
            self.group = mesh.group(_sharers(move.source, rank))
            return
        self.sends = [message for message in move.sends(rank) if message.peer != rank]
        self.receives = move.receives(rank)
        self.adds = not move.source.disjoint
        self.covered = not self.adds and all(
            move.target.block(rank, dim).filled for dim in range(len(self.out_shape))
        )

    @property
    def elements_sent(self) -> int:
        """What this rank hands over; a sum counts its buffer once."""
        if self.group is not None:
            return prod(self.in_shape) if self.group.size > 1 else 0
        return sum(packet.elements for packet in self.sends)

    def start(self, tensor: Tensor) -> Pending:
        if tuple(tensor.shape) != self.in_shape:
            raise CommError(
                f"exchange of {self.layer}: rank {self.mesh.rank} brings a slab of shape "
                f"{tuple(tensor.shape)}, its layout says {self.in_shape}"
            )
        if self.still:
            return Pending(self, tensor, [], [])
        if self.group is not None:
            buffer = tensor.clone(memory_format=torch.contiguous_format)
            if self.group.size == 1 or not buffer.numel():
                return Pending(self, buffer, [], [])
            work = self.mesh.sum(buffer, self.group, layer=self.layer, wait=False)
            return Pending(self, buffer, [], [work])
        incoming: list[tuple[Message, Tensor | None, Any]] = []
        for message in self.receives:
            if message.peer == self.mesh.rank:
                incoming.append((message, None, None))
                continue
            buffer = tensor.new_empty(message.elements)
            work = self.mesh.receive(buffer, message.peer, tag=self.tag, layer=self.layer)
            incoming.append((message, buffer, work))
        outgoing = []
        for message in self.sends:
            buffer = _pack(tensor, message)
            work = self.mesh.send(buffer, message.peer, tag=self.tag, layer=self.layer)
            outgoing.append((message, buffer, work))
        return Pending(self, tensor, incoming, outgoing)


class Pending:
    """Messages under way."""

    def __init__(
        self,
        way: _Way,
        tensor: Tensor,
        incoming: list[tuple[Message, Tensor | None, Any]],
        outgoing: Sequence[Any],
    ) -> None:
        self.way, self.tensor, self.incoming, self.outgoing = way, tensor, incoming, outgoing

    def finish(self) -> Tensor:
        """Wait for all messages and return this rank's part of the target."""
        way = self.way
        mesh = way.mesh
        if way.still:
            return self.tensor
        if way.group is not None:
            for work in self.outgoing:
                mesh.finish(work, way.group, layer=way.layer)
            return self.tensor
        out = _allocate(self.tensor, way)
        for message, buffer, work in self.incoming:
            if work is not None:
                mesh.wait(work, "receive", peer=message.peer, layer=way.layer)
            _unpack(out, message, buffer, self.tensor, add=way.adds)
        for message, _, work in self.outgoing:
            mesh.wait(work, "send", peer=message.peer, layer=way.layer)
        return out


def _allocate(like: Tensor, way: _Way) -> Tensor:
    format = torch.contiguous_format
    if like.dim() == 4 and not like.is_contiguous():
        format = torch.channels_last
    elif like.dim() == 5 and not like.is_contiguous():
        format = torch.channels_last_3d
    if format is not torch.contiguous_format and not like.is_contiguous(memory_format=format):
        format = torch.contiguous_format
    out = torch.empty(way.out_shape, dtype=like.dtype, device=like.device, memory_format=format)
    return out if way.covered else out.fill_(0.0 if way.adds else way.fill)


def _pack(tensor: Tensor, message: Message) -> Tensor:
    parts = [tensor[transfer.source].reshape(-1) for transfer in message.transfers]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _unpack(
    out: Tensor, message: Message, buffer: Tensor | None, own: Tensor, *, add: bool
) -> None:
    at = 0
    for transfer in message.transfers:
        if buffer is None:
            part = own[transfer.source]
        else:
            part = buffer[at : at + transfer.elements].view(transfer.shape)
            at += transfer.elements
        if add:
            out[transfer.target] += part
        else:
            out[transfer.target] = part


def _sharers(cover: Cover, rank: int) -> list[int]:
    """List the ranks that hold partial sums of the same block as `rank`."""
    digits = cover.axes.digits(rank)
    choices = [
        range(axis.size) if axis.dim == PARTIAL else (digit,)
        for axis, digit in zip(cover.axes, digits)
    ]
    return [cover.axes.rank(choice) for choice in product(*choices)]
