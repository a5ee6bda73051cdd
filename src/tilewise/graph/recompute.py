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
from tilewise.comm.chain import passed
from tilewise.comm.formats import same_memory
from tilewise.graph.shares import Use
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
    body: Body,
    inputs: Sequence[Tensor],
    chain: Chain,
    draws: Draws,
    *,
    name: str,
    wants: Callable[[Use], bool] | None,
) -> tuple[Tensor, ...]:
    """Run `body(inputs, chain, again)`, keeping nothing but its inputs for backward.

    `wants` tells in backward which outputs, by `Stretch.use`, have a gradient on one device; None
    where those that get one have one.
    """
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
    new_token, *outputs = Stretch.apply(body, draws, conditions, (name, wants), token, *inputs)
    if chain.token is not None:
        chain.token = new_token
    return tuple(outputs)


class Stretch(torch.autograd.Function):
    @staticmethod
    def use(name: str, output: int) -> Use:
        """Name an output as `Reach` finds it: the program's outputs that depend on it are known."""
        return name, (output,)

    @staticmethod
    def forward(
        ctx: Any,
        body: Body,
        draws: Draws,
        conditions: _Conditions,
        known: tuple[str, Callable[[Use], bool] | None],
        token: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.body, ctx.draws, ctx.conditions = body, draws, conditions
        ctx.stretch, ctx.wants = known
        ctx.token_at = 0
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        outputs = body([tensor.detach() for tensor in inputs], Chain(), False)
        outputs = tuple(  # a view of an input could not be written in place later
            t.clone() if any(same_memory(t, given) for given in inputs) else t for t in outputs
        )
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return token.clone(), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        conditions, draws = ctx.conditions, ctx.draws
        needed = ctx.needs_input_grad[5:]
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
        wanted = [
            (tensor, grad)
            for i, (tensor, grad) in enumerate(zip(outputs, grads))
            if tensor.requires_grad
            and (grad is not None if ctx.wants is None else ctx.wants(Stretch.use(ctx.stretch, i)))
        ]
        reached = _reached([tensor for tensor, _ in wanted])
        ends = [(tensor, grad) for tensor, grad in wanted if grad is not None]
        if chain.token is not start and chain.token is not None:
            ends.append((chain.token, torch.zeros_like(chain.token)))
        if ends:
            torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
        return (
            *(None for _ in range(4)),
            token,
            *(tensor.grad if id(tensor) in reached else None for tensor in inputs),
        )


def _reached(ends: Sequence[Tensor]) -> set[int]:
    """Return the ids of the leaves that these depend on, the thread of messages left out.

    Messages of a branch that nobody uses travel with zeros; one device has no gradient there.
    """
    leaves = [node.variable for end in ends for node, _ in passed(end) if hasattr(node, "variable")]
    return {id(leaf) for leaf in (*leaves, *ends)}
