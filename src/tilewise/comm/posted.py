"""Moves that start when their source is there and end where they are needed.

start ──▶ messages travel behind other layers ──▶ finish
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm.chain import Chain, hand_on, take, token_of
from tilewise.comm.exchange import Exchange, Joined, Pending, pack
from tilewise.layout import Message

SMALL = 16_384
"""Elements up to which the latency of a message counts more than its size."""


class Convoy:
    """Moves of one tensor that start at once: their small messages for one peer travel as one.

    Back, each starts by itself, where its gradient is there.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = tuple(exchanges)
        ways = [exchange.forth for exchange in self.exchanges]
        self.sends = _small_for_one_peer([way.sends for way in ways])
        self.receives = _small_for_one_peer(
            [[m for m in way.receives if m.peer != way.mesh.rank] for way in ways]
        )

    def start(self, tensor: Tensor) -> list[Pending]:
        """Post all messages, outside of autograd."""
        tensor = tensor.detach()
        arriving: list[Joined] = [{} for _ in self.exchanges]
        leaving: list[Joined] = [{} for _ in self.exchanges]
        if self.sends or self.receives:
            self._join(tensor, arriving, leaving)
        return [
            exchange.forth.start(tensor, *joined)
            for exchange, *joined in zip(self.exchanges, arriving, leaving)
        ]

    def _join(self, tensor: Tensor, arriving: list[Joined], leaving: list[Joined]) -> None:
        ways = [exchange.forth for exchange in self.exchanges]
        mesh = ways[0].mesh
        with mesh.together(layer=ways[0].layer):
            for peer, some in self.receives.items():
                first = ways[some[0][0]]
                sizes = [message.elements for _, message in some]
                buffer = tensor.new_empty(sum(sizes))
                work = mesh.receive(buffer, peer, tag=first.tagged(tensor), layer=first.layer)
                once = Once(work)
                for (place, message), part in zip(some, buffer.split(sizes)):
                    arriving[place][peer] = (message, part, once)
            for peer, some in self.sends.items():
                first = ways[some[0][0]]
                buffer = torch.cat([pack(tensor, message) for _, message in some])
                work = mesh.send(buffer, peer, tag=first.tagged(tensor), layer=first.layer)
                once = Once(work)
                for place, message in some:
                    leaving[place][peer] = (message, buffer, once)


def _small_for_one_peer(
    messages: Sequence[Sequence[Message]],
) -> dict[int, list[tuple[int, Message]]]:
    """Return by peers the small messages, with the places of their moves, if there are several.

    Both sides know of each message how large it is.
    """
    found: dict[int, list[tuple[int, Message]]] = {}
    for place, some in enumerate(messages):
        for message in some:
            if message.elements <= SMALL:
                found.setdefault(message.peer, []).append((place, message))
    return {peer: some for peer, some in found.items() if len(some) > 1}


class Once:
    """Work that several wait for; one of gloo's receives that is waited for twice never ends."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class Posted:
    """One pass of an exchange that starts when its source is there and ends where it is needed.

    In backward it starts where the gradient is there and ends where that is needed. What `start`
    returns beside it ties the two ends together for autograd.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.forth: Pending | None = None
        self.back: Pending | None = None

    @classmethod
    def start(
        cls, convoy: Convoy, tensor: Tensor, chain: Chain | None
    ) -> tuple[tuple[Posted, Tensor], ...]:
        """Post all messages of moves that start together."""
        found = []
        for exchange, pending in zip(convoy.exchanges, convoy.start(tensor)):
            posted = cls(exchange)
            posted.forth = pending
            tie, token = _Start.apply(tensor, token_of(chain, tensor), posted)
            hand_on(chain, token)
            found.append((posted, tie))
        return tuple(found)

    def finish(self, tie: Tensor, chain: Chain | None) -> Tensor:
        """Wait for all messages and return this rank's part of the target; call it once."""
        out: Tensor
        out, token = _Finish.apply(tie, token_of(chain, tie), self)
        hand_on(chain, token)
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, token: Tensor | None, posted: Posted
    ) -> tuple[Tensor, Tensor | None]:
        ctx.posted = posted
        return tensor.new_empty(0), take(ctx, token, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, token: Tensor | None) -> tuple[Any, ...]:
        pending, ctx.posted.back = ctx.posted.back, None
        # without: nothing that backward passes depends on what was moved, on any rank
        return None if pending is None else pending.finish(), token, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tie: Tensor, token: Tensor | None, posted: Posted
    ) -> tuple[Tensor, Tensor | None]:
        ctx.posted = posted
        pending, posted.forth = posted.forth, None
        assert pending is not None
        return pending.finish(), take(ctx, token, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, token: Tensor | None) -> tuple[Any, ...]:
        start = ctx.next_functions[0][0]
        if start is None or not torch._C._will_engine_execute_node(start):
            return None, token, None  # nobody asks for the gradient of what was moved, on any rank
        ctx.posted.back = ctx.posted.exchange.start_adjoint(grad)
        return grad.new_empty(0), token, None
