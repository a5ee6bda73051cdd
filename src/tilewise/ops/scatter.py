"""Replace a stretch of one dim by another tensor: what writing into a slice amounts to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.errors import OperatorError
from tilewise.layout import Axes, Block, Cover, Layout
from tilewise.ops.operation import Need, Operation


def slice_scatter(
    x: Layout,
    new: Layout,
    dim: int,
    start: int,
    stop: int,
    *,
    axes: Axes | None = None,
    rank: int,
    layer: str = "slice_scatter",
) -> Operation:
    """Plan x with [start, stop) of one dim replaced; operands are x and the replacement.

    Layout: x any → cut as `axes` say, or as x is.
    Communication: the replacement moves to where its stretch of the result lies.
    Adjoint: the same, back; x gets no gradient where it was replaced.
    """
    dim %= len(x.shape)
    start, stop, _ = slice(start, stop).indices(x.shape[dim])
    if new.shape != (*x.shape[:dim], stop - start, *x.shape[dim + 1 :]):
        raise OperatorError(
            f"{layer}: {new.shape} cannot stand for [{start}, {stop}) of dim {dim} of {x.shape}"
        )
    out = Layout(x.shape, x.axes if axes is None else axes)

    def inside(first: int, last: int) -> tuple[int, int]:
        return max(first, start), max(min(last, stop), max(first, start))

    blocks = list(Cover.of(out).blocks)
    blocks[dim] = tuple(
        Block.of(low - start, high - start)
        for low, high in (
            inside(block.pieces[0].start, block.pieces[0].stop) if block.pieces else (start, start)
            for block in blocks[dim]
        )
    )
    needs = (Need.of(out), Need(Cover(new.shape, out.axes, tuple(blocks))))
    here = out.intervals(rank)[dim]
    low, high = inside(*here)

    def local(inner: list[Any], x: Tensor, new: Tensor) -> Tensor:
        if low >= high:  # the empty replacement still takes part in backward
            return x + new.sum()
        y = x.clone()
        y.narrow(dim, low - here[0], high - low).copy_(new)
        return y

    return Operation(needs, local, (Cover.of(out),), (out,))
