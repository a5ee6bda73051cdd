"""What autograd keeps for backward: which calls save which of their tensors.

Kept are operands (as they were brought, halos included), results, or something beside them such as
the indices of a maximum. A tensor that several calls keep counts once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tilewise.graph.graph import Node, Value

INDEX_BYTES = 8
MASK_BYTES = 1

OPERAND = {
    "gelu", "silu", "mish", "hardswish", "hardsigmoid", "softplus", "elu", "leaky_relu", "relu6",
    "hardtanh", "pow", "log", "abs", "clamp", "square", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "batch_norm", "group_norm", "instance_norm",
    "layer_norm", "linear", "mul", "div", "matmul", "bmm", "mm", "addmm", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
}  # fmt: skip
FOLLOWED = {"l1_loss"}
"""Calls that keep one tensor of their operands' size, such as the difference of two."""

RESULT = {"relu", "sigmoid", "tanh", "softmax", "log_softmax", "exp", "sqrt", "rsqrt"}


@dataclass(frozen=True)
class Keeps:
    """What a call keeps: its operands, its results, and bytes beside each element of a result."""

    operands: bool = False
    results: bool = False
    beside_bytes: int = 0


def keeps(
    node: Node, grads: Collection[Value], *, split: bool = True, in_place: bool = True
) -> Keeps:
    """Return what a call keeps; `split`, whether its windows reach into other ranks' slabs.

    That is nothing where no result is among `grads`, the values with gradients. With `in_place` it
    is written over its operand where the model says so.
    """
    kind = node.kind
    if not any(out in grads for out in node.outs):
        return Keeps()
    if kind.startswith("conv"):
        return Keeps(operands=True)
    if kind.startswith("max_pool"):
        return Keeps(operands=not split, beside_bytes=INDEX_BYTES)
    if kind.startswith("avg_pool"):
        return Keeps(operands=not split)
    if kind.endswith("dropout"):
        training = bool(node.args[2]) and node.args[1] > 0
        return Keeps(beside_bytes=MASK_BYTES if training else 0)
    if kind == "cross_entropy_loss":
        return Keeps(operands=True)
    written = in_place and node.in_place is not None
    if kind in RESULT or (kind in OPERAND and written):
        return Keeps(results=True)
    return Keeps(operands=kind in OPERAND)
