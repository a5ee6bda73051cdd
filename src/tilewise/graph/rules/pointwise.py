"""Element-wise calls: whatever torch tags as pointwise and no other rule takes.

Import this module after the other rules.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilewise.graph.graph import op_name
from tilewise.graph.rule import REGISTRY, Lowered, Site, rule
from tilewise.graph.rules.elementwise import elementwise
from tilewise.layout import Axis, Layout
from tilewise.ops.operation import Need, Operation
from tilewise.ops.pointwise import broadcast_cover, pointwise

aten = torch.ops.aten

UNTAGGED = (
    "relu6", "hardtanh", "dropout_identity", "clone", "contiguous", "detach",
    "alias", "lift_fresh_copy", "zeros_like", "ones_like", "empty_like", "full_like",
    "selu", "celu", "rrelu_eval", "mish", "logsigmoid", "log_sigmoid", "hardswish", "hardsigmoid",
    "softplus", "elu", "leaky_relu", "silu", "gelu", "relu", "softsign", "where", "masked_fill",
    "threshold", "clamp", "clamp_min", "clamp_max", "clip", "square", "float", "double", "half",
    "fill", "copy", "glu_jvp", "multiply", "subtract", "divide", "true_divide", "add", "sub",
    "mul", "div", "rsub", "pow", "abs", "neg", "exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh",
    "lerp", "addcmul", "addcdiv", "hardshrink", "softshrink", "tanhshrink", "expm1", "log1p",
)  # fmt: skip


def _tagged() -> Iterator[str]:
    """Yield the plain names of all operators that torch tags as pointwise."""
    for name in dir(aten):
        packet = getattr(aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket) or name.endswith("_"):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            seeded = torch.Tag.nondeterministic_seeded in op.tags
            single = len(op._schema.returns) == 1
            if torch.Tag.pointwise in op.tags and not seeded and single:
                yield op_name(op)
                break


@rule("to", "type_as", "to_copy")
def _cast(site: Site) -> Lowered:
    """Cast the first operand; a second one only tells the dtype."""
    x, dtype = site.node.values()[0], site.node.out.dtype
    operation = pointwise(
        [site.layout(x)], lambda x: x.to(dtype), axes=site.axes, layer=site.node.name
    )
    return Lowered(operation, (x,))


@rule("prelu")
def _prelu(site: Site) -> Lowered:
    x, weight = site.node.values()
    shape = (weight.shape[0], *[1] * (len(x.shape) - 2)) if weight.shape else ()
    operation = pointwise(
        [site.layout(x), Layout.replicated(shape, ranks=site.ranks)],
        lambda x, weight: aten.prelu(x, weight.reshape(-1)),
        axes=site.axes,
        layer=site.node.name,
    )
    cover = broadcast_cover(shape, operation.out)
    flat = Layout(weight.shape, [Axis(a.size, a.dim) for a in cover.axes])
    needs = (operation.needs[0], Need.of(flat))
    return Lowered(Operation(needs, operation.local, operation.gives, operation.outs), (x, weight))


for kind in dict.fromkeys((*_tagged(), *UNTAGGED)):
    if kind not in REGISTRY:
        rule(kind)(elementwise)
