"""Gradients that come in new tensors which nobody else holds: they can be written over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from tilewise.graph.graph import Node, Value

aten = torch.ops.aten

PRODUCTS = ("conv", "linear")
GIVE_NEW = (*PRODUCTS, "batch_norm", "max_pool", "avg_pool")
"""How the names of calls begin whose first operand's gradient is a new tensor."""

OVERWRITING = ("relu", "leaky_relu")
"""Calls whose backward can be written over the gradient that it gets."""

OVERWRITTEN_BYTES = 2**20
"""From which size it is: torch's own node is the faster one for small tensors."""


def fresh_gradients(nodes: Iterable[Node]) -> set[str]:
    """Name the parameters that one convolution or linear layer reads, and nothing else."""
    return {
        str(value.source)
        for value, readers in _readers(nodes).items()
        if value.origin == "parameter" and _one_of(readers, PRODUCTS)
    }


def unshared(nodes: Iterable[Node], outputs: Collection[Value]) -> set[Value]:
    """Return the results that one call reads and nothing else, and whose gradients are new."""
    return {
        value
        for value, readers in _readers(nodes).items()
        if value.origin == "node"
        and value not in outputs
        and _one_of(readers, GIVE_NEW)
        and readers[0].args[0] is value
    }


def overwrites(node: Node, free: Collection[Value]) -> bool:
    """Whether a call's backward is written over its result's gradient, as `free` ones can be."""
    return node.kind in OVERWRITING and node.out in free and _slope(node) >= 0


class Overwriting:
    """A local activation whose backward is written over the gradient that it gets."""

    def __init__(self, node: Node, local: Any) -> None:
        self.kind, self.slope, self.local = node.kind, _slope(node), local

    def __call__(self, inner: list[Any], x: Tensor) -> Tensor:
        # torch lets no node of ours write over a view
        if x._is_view() or x.nbytes < OVERWRITTEN_BYTES:
            return self.local(inner, x)  # type: ignore[no-any-return]
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
        y: Tensor = call.local([], x)
        if y is x:
            ctx.mark_dirty(x)
        ctx.call, ctx.is_result = call, y is x or call.kind == "relu"
        ctx.save_for_backward(y if ctx.is_result else x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (kept,) = ctx.saved_tensors
        return None, ctx.call.back(dy, kept, ctx.is_result)


def _slope(node: Node) -> float:
    if node.kind == "relu":
        return 0.0
    return float(node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01))


def _readers(nodes: Iterable[Node]) -> dict[Value, list[Node]]:
    found: dict[Value, list[Node]] = defaultdict(list)
    for node in nodes:
        for value in node.values():
            found[value].append(node)
    return found


def _one_of(readers: list[Node], kinds: tuple[str, ...]) -> bool:
    return len(readers) == 1 and readers[0].kind.startswith(kinds)
