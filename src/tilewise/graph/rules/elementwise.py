"""Plan a call that works element by element on its operands."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.graph.graph import Call
from tilewise.graph.rule import Lowered, Site
from tilewise.ops.pointwise import pointwise


def elementwise(site: Site) -> Lowered:
    """Run the call on slabs, with broadcasting; in place where it was written so."""
    node = site.node
    values = node.values()

    operation = pointwise(
        [site.layout(value) for value in values],
        Call(node.op, node.args, node.kwargs),
        axes=site.axes,
        layer=node.name,
    )
    written = None
    if node.in_place is not None and operation.out.shape == values[0].shape:
        write = Call(node.in_place, node.args, node.kwargs)

        def written(inner: list[Any], *tensors: Tensor) -> Tensor:
            result: Tensor = write(*tensors)
            return result

    return Lowered(operation, values, in_place=written)
