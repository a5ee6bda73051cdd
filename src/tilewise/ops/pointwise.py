"""Element-wise operators with broadcasting: the shortest example of an operator.

Where operands lie differently, the smaller bill is moved: the result is computed where the
largest operand lies, and the others are brought there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor

from tilewise.errors import OperatorError
from tilewise.layout import Axes, Cover, Layout
from tilewise.ops.operation import Need, Operation, shared


def pointwise(
    operands: Sequence[Layout],
    function: Callable[..., Tensor],
    *,
    axes: Axes | None = None,
    layer: str = "pointwise",
) -> Operation:
    """Plan `function` of the operands, element by element.

    Layout: operands any → the broadcast shape, cut as `axes` say or as the largest operand is.
    Communication: none where the operands lie alike; otherwise one move of each that does not.
    Adjoint: an operand that is broadcast over a split dim gets its gradient summed over it.
    """
    shape = broadcast([operand.shape for operand in operands], layer)
    if axes is None:
        largest = max(operands, key=lambda operand: prod(operand.shape))
        lead = len(shape) - len(largest.shape)
        axes = largest.axes.relabel({d: d + lead for d in range(len(largest.shape))})
    out = Layout(shape, axes)
    needs = tuple(Need(broadcast_cover(operand.shape, out)) for operand in operands)

    def local(inner: list[Any], *tensors: Tensor) -> Tensor:
        return function(*tensors)

    return Operation(needs, local, (Cover.of(out),), (out,))


def broadcast(shapes: Sequence[Sequence[int]], layer: str) -> tuple[int, ...]:
    """Return the common shape, by torch's rules."""
    ndim = max(len(shape) for shape in shapes)
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    out = []
    for extents in zip(*padded):
        distinct = {extent for extent in extents if extent != 1}
        if len(distinct) > 1:
            raise OperatorError(
                f"{layer}: shapes {' and '.join(str(tuple(shape)) for shape in shapes)} cannot be "
                "broadcast together"
            )
        out.append(distinct.pop() if distinct else 1)
    return tuple(out)


def broadcast_cover(shape: Sequence[int], out: Layout) -> Cover:
    """Return what each rank needs of an operand of this shape to compute its slab of `out`."""
    lead = len(out.shape) - len(shape)
    keep = {dim + lead: dim for dim, extent in enumerate(shape) if extent == out.shape[dim + lead]}
    return Cover.of(Layout(shape, shared(out.axes, keep)))
