"""Activations whose backward is written over the gradient that it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

OVERWRITTEN_BYTES = 2**20
"""From which size it is: torch's own node is the faster one for small tensors."""


class Overwriting:
    """`relu` or `leaky_relu`; nobody else may hold the gradient of its result.

    Args:
        local: computes it, in place or not.
    """

    def __init__(
        self,
        kind: str,
        slope: float,
        local: Callable[[list[Any], Tensor], Tensor],
    ) -> None:
        self.kind, self.slope, self.local = kind, slope, local

    def __call__(self, inner: list[Any], x: Tensor) -> Tensor:
        # torch lets no node of ours write over a view
        if x._is_view() or x.nbytes < OVERWRITTEN_BYTES:
            return self.local(inner, x)
        out: Tensor = _Overwriting.apply(self, x)
        return out

    def back(self, dy: Tensor, kept: Tensor, is_result: bool) -> Tensor:
        """Return the gradient of the operand: written over that of the result.

        Not where derivatives of derivatives are wanted.
        """
        over = {} if torch.is_grad_enabled() else {"grad_input": dy}
        given = (kept, 0) if self.kind == "relu" else (kept, self.slope, is_result)
        op = aten.threshold_backward if self.kind == "relu" else aten.leaky_relu_backward
        found: Tensor = op(dy, *given, **over)
        return found


class _Overwriting(torch.autograd.Function):
    """Keeps what torch would: the operand, or the result of a rectifier or what is in place."""

    @staticmethod
    def forward(ctx: Any, call: Overwriting, x: Tensor) -> Tensor:
        y = call.local([], x)
        if y is x:
            ctx.mark_dirty(x)
        ctx.call, ctx.is_result = call, y is x or call.kind == "relu"
        ctx.save_for_backward(y if ctx.is_result else x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (kept,) = ctx.saved_tensors
        return None, ctx.call.back(dy, kept, ctx.is_result)
