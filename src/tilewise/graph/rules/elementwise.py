"""Plan a call that works element by element on its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilewise.graph.graph import replace_values
from tilewise.graph.rule import Lowered, Site
from tilewise.ops.pointwise import pointwise


def elementwise(site: Site) -> Lowered:
    """Run the call on slabs, with broadcasting; in place where it was written so."""
    node = site.node
    values = node.values()

    def call(op: Callable[..., Any]) -> Callable[..., Tensor]:
        def function(*tensors: Tensor) -> Tensor:
            feed = iter(tensors)
            args, kwargs = replace_values((node.args, node.kwargs), lambda _: next(feed))
            result: Tensor = op(*args, **kwargs)
            return result

        return function

    operation = pointwise(
        [site.layout(value) for value in values],
        call(node.op),
        axes=site.axes,
        layer=node.name,
    )
    written = None
    if node.in_place is not None and operation.out.shape == values[0].shape:
        write = call(node.in_place)

        def written(inner: list[Any], *tensors: Tensor) -> Tensor:
            return write(*tensors)

    return Lowered(operation, values, in_place=written)
