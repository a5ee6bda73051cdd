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
from tilewise.comm.exchange import Exchange, Pending


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
        cls, exchanges: Sequence[Exchange], tensor: Tensor, chain: Chain | None
    ) -> tuple[tuple[Posted, Tensor], ...]:
        """Post all messages of moves of one tensor; small ones for one peer travel as one."""
        with exchanges[0].mesh.joined(layer=exchanges[0].layer):
            pendings = [exchange.start(tensor) for exchange in exchanges]
        found = []
        for exchange, pending in zip(exchanges, pendings):
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
