"""Compute stretches of layers again in backward instead of keeping their activations.

The stretch is one node of the outer graph: forward keeps its inputs only, backward runs it again
with gradients and goes through it. It does so on every rank, whatever its slab, because the
stretch may hold messages. Buffers are not updated a second time, and random layers draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm import Chain
from tilewise.ops.draws import Draws

Body = Callable[[Sequence[Tensor], Chain, bool], tuple[Tensor, ...]]


@dataclass
class _Conditions:
    """What the first run of a stretch saw and the second must see."""

    step: int
    device: str
    autocast: bool
    dtype: torch.dtype


def recomputed(
    body: Body, inputs: Sequence[Tensor], chain: Chain, draws: Draws
) -> tuple[Tensor, ...]:
    """Run `body(inputs, chain, again)`, keeping nothing but its inputs for backward."""
    if not any(tensor.requires_grad for tensor in inputs):
        return body(inputs, chain, False)
    device = inputs[0].device.type
    conditions = _Conditions(
        draws.step,
        device,
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
    )
    token = torch.zeros((), requires_grad=True) if chain.token is None else chain.token
    new_token, *outputs = _Stretch.apply(body, draws, conditions, token, *inputs)
    if chain.token is not None:
        chain.token = new_token
    return tuple(outputs)


class _Stretch(torch.autograd.Function):
    token_at = 0

    @staticmethod
    def forward(
        ctx: Any,
        body: Body,
        draws: Draws,
        conditions: _Conditions,
        token: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.body, ctx.draws, ctx.conditions = body, draws, conditions
        ctx.save_for_backward(*inputs)
        outputs = body([tensor.detach() for tensor in inputs], Chain(), False)
        given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        outputs = tuple(  # a view of an input could not be written in place later
            t.clone() if t.untyped_storage().data_ptr() in given else t for t in outputs
        )
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return token.clone(), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        conditions, draws = ctx.conditions, ctx.draws
        needed = ctx.needs_input_grad[4:]
        inputs = [
            tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needed)
        ]
        chain = Chain()
        step, draws.step = draws.step, conditions.step
        try:
            with (
                torch.enable_grad(),
                torch.autocast(
                    conditions.device, enabled=conditions.autocast, dtype=conditions.dtype
                ),
            ):
                chain.start()
                start = chain.token
                outputs = ctx.body(inputs, chain, True)
        finally:
            draws.step = step
        ends = [(t, g) for t, g in zip(outputs, grads) if t.requires_grad]
        if chain.token is not start and chain.token is not None:
            ends.append((chain.token, torch.zeros_like(chain.token)))
        torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
        return (
            None,
            None,
            None,
            token,
            *(tensor.grad if need else None for tensor, need in zip(inputs, needed)),
        )
