"""Put tensors together and take them apart along one dim: cat, stack, split, select and friends.

Along a cut dim each rank asks for just what falls in its block of the result, so no rank holds a
whole operand.

    cat of 6 and 2, cut by 2       a a a a|a a b b
                                   rank 0 asks for a[0:4], rank 1 for a[4:6] and b[0:2]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewise.comm.formats import memory_format
from tilewise.errors import OperatorError
from tilewise.layout import REPLICA, Axes, Block, Cover, Layout, block
from tilewise.ops.constants import there
from tilewise.ops.operation import Need, Operation, shared
from tilewise.ops.shape import checked_dim, dense


def cat(
    operands: Sequence[Layout], dim: int, *, axes: Axes | None = None, layer: str = "cat"
) -> Operation:
    """Plan the operands one after the other along `dim`.

    Layout: operands any → cut as `axes` say, or as the largest operand is.
    Communication: none for an operand that lies with the result while `dim` is not cut; otherwise
        one move of the stretches of it that fall in each rank's block.
    Adjoint: the same, back.
    """
    first = operands[0]
    dim = checked_dim(dim, len(first.shape), first, layer)
    for operand in operands[1:]:
        if not _alike(first.shape, operand.shape, dim):
            raise OperatorError(
                f"{layer}: {operand.shape} cannot follow {first.shape} along dim {dim}; all other "
                "extents must be equal"
            )
    sizes = [operand.shape[dim] for operand in operands]
    out = Layout(
        _resized(first.shape, dim, sum(sizes)), _largest(operands) if axes is None else axes
    )
    needs = []
    for operand, stop in zip(operands, accumulate(sizes)):
        start = stop - operand.shape[dim]
        wanted = [Block.of(max(a, start) - start, min(b, stop) - start) for a, b in _cuts(out, dim)]
        needs.append(Need(_along(Layout(operand.shape, out.axes), dim, wanted)))

    def local(inner: list[Any], *tensors: Tensor) -> Tensor:
        joined = torch.cat(tensors, dim)
        # An empty operand hides from torch that the others are channels_last.
        formats = {memory_format(tensor) for tensor in tensors if tensor.numel()}
        return joined.contiguous(memory_format=formats.pop()) if len(formats) == 1 else joined

    return Operation(tuple(needs), local, (Cover.of(out),), (out,))


def stack(
    operands: Sequence[Layout],
    dim: int,
    *,
    rank: int,
    axes: Axes | None = None,
    layer: str = "stack",
) -> Operation:
    """Plan the operands side by side along a new dim.

    Layout: operands any → cut as `axes` say, or as the largest operand is.
    Communication: one move of each operand that does not lie with the result; where the new dim
        is cut, operands are brought to all ranks along it.
    Adjoint: the same, back.
    """
    first = operands[0]
    dim = checked_dim(dim, len(first.shape) + 1, first, layer)
    for operand in operands[1:]:
        if operand.shape != first.shape:
            raise OperatorError(
                f"{layer}: {operand.shape} cannot be stacked on {first.shape}; all extents must "
                "be equal"
            )
    shape = (*first.shape[:dim], len(operands), *first.shape[dim:])
    keep = {at if at < dim else at + 1: at for at in range(len(first.shape))}
    if axes is None:
        axes = first.axes.relabel({at: new for new, at in keep.items()})
    out = Layout(shape, axes)
    need = Need.of(Layout(first.shape, shared(out.axes, keep)))
    start, stop = out.intervals(rank)[dim]

    def local(inner: list[Any], *tensors: Tensor) -> Tensor:
        # Operands of other ranks take part with nothing: every rank records the same graph.
        rows = [
            tensor.unsqueeze(dim).narrow(dim, 0, int(start <= index < stop))
            for index, tensor in enumerate(tensors)
        ]
        return torch.cat(rows, dim)

    return Operation((need,) * len(operands), local, (Cover.of(out),), (out,))


def split(
    x: Layout,
    sizes: Sequence[int],
    dim: int,
    *,
    rank: int,
    axes: Axes | None = None,
    layer: str = "split",
) -> Operation:
    """Plan pieces of x of these sizes along `dim`, one result for each.

    Layout: x any → each piece cut by itself, as `axes` say or as x is.
    Communication: none where `dim` is not cut; otherwise one move for all pieces together.
    Adjoint: the same, back.
    """
    dim = checked_dim(dim, len(x.shape), x, layer)
    if sum(sizes) != x.shape[dim] or min(sizes, default=0) < 0:
        raise OperatorError(
            f"{layer}: sizes {tuple(sizes)} must add up to the extent of dim {dim} of {x.shape}"
        )
    target = Layout(x.shape, x.axes if axes is None else axes)
    outs = tuple(target.with_shape(_resized(x.shape, dim, size)) for size in sizes)
    offsets = [stop - size for stop, size in zip(accumulate(sizes), sizes)]
    wanted = [
        _union([(at + start, at + stop) for at, (start, stop) in zip(offsets, cuts)])
        for cuts in zip(*(_cuts(out, dim) for out in outs))
    ]
    need = Need(_along(target, dim, wanted))
    lengths = [out.local_shape(rank)[dim] for out in outs]

    def local(inner: list[Any], x: Tensor) -> tuple[Tensor, ...]:
        return tuple(dense(piece) for piece in x.split(lengths, dim))

    return Operation((need,), local, tuple(Cover.of(out) for out in outs), outs)


def chunk(
    x: Layout,
    chunks: int,
    dim: int,
    *,
    rank: int,
    axes: Axes | None = None,
    layer: str = "chunk",
) -> Operation:
    """Plan x in `chunks` pieces as torch cuts them: of equal size, the last ones less or absent.

    Layout, Communication, Adjoint: those of `split`.
    """
    dim = checked_dim(dim, len(x.shape), x, layer)
    if chunks < 1:
        raise OperatorError(f"{layer}: chunks (={chunks}) must be at least 1")
    extent = x.shape[dim]
    step = -(-extent // chunks)
    sizes = [min(step, extent - at) for at in range(0, extent, step)] if extent else [0] * chunks
    return split(x, sizes, dim, rank=rank, axes=axes, layer=layer)


def index_select(
    x: Layout,
    dim: int,
    indices: Sequence[int],
    *,
    axes: Axes | None = None,
    layer: str = "index_select",
) -> Operation:
    """Plan the rows of x that `indices` name along `dim`, in that order, repeats among them.

    Layout: x any → cut as `axes` say, or as x is.
    Communication: none where `dim` is not cut and x lies with the result; otherwise one move of
        the rows that each rank's block names.
    Adjoint: the same, back; a row named twice gets both gradients.
    """
    dim = checked_dim(dim, len(x.shape), x, layer)
    extent = x.shape[dim]
    if any(not 0 <= index < extent for index in indices):
        raise OperatorError(
            f"{layer}: indices {tuple(indices)} must lie between 0 and {extent - 1}, dim {dim} of "
            f"{x.shape}"
        )
    out = Layout(_resized(x.shape, dim, len(indices)), x.axes if axes is None else axes)
    target = Layout(x.shape, out.axes)
    if target == x and x.degrees[dim] == 1:
        rows = torch.tensor(indices, dtype=torch.int64)
        need = Need.of(x)
    else:
        rows = None
        wanted = [_union([(i, i + 1) for i in indices[a:b]]) for a, b in _cuts(out, dim)]
        need = Need(_along(target, dim, wanted))

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return x if rows is None else dense(x.index_select(dim, there(rows, x.device)))

    return Operation((need,), local, (Cover.of(out),), (out,))


def select(
    x: Layout, dim: int, index: int, *, axes: Axes | None = None, layer: str = "select"
) -> Operation:
    """Plan x[index] along `dim`, which the result does not have.

    Layout: x any → cut as `axes` say, or as x is; where `dim` is cut the ranks along it hold
        replicas.
    Communication: none where `dim` is not cut and x lies with the result; otherwise one move of
        that row.
    Adjoint: the same, back; all other rows get zeros.
    """
    dim = checked_dim(dim, len(x.shape), x, layer)
    extent = x.shape[dim]
    if not -extent <= index < extent:
        raise OperatorError(
            f"{layer}: index (={index}) must lie within dim {dim} of {x.shape}, extent {extent}"
        )
    row = index % extent
    out, target = _without(x, dim, axes)
    need = Need.of(x) if target == x else Need(_along(target, dim, [Block.of(row, row + 1)]))
    at = row if target == x else 0

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return dense(x.select(dim, at))

    return Operation((need,), local, (Cover.of(out),), (out,))


def unbind(x: Layout, dim: int, *, axes: Axes | None = None, layer: str = "unbind") -> Operation:
    """Plan all rows of x along `dim`, one result for each.

    Layout: x any → cut as `axes` say, or as x is; where `dim` is cut the ranks along it hold
        replicas.
    Communication: none where `dim` is not cut and x lies with the result; otherwise one move that
        makes `dim` whole.
    Adjoint: the same, back.
    """
    dim = checked_dim(dim, len(x.shape), x, layer)
    out, target = _without(x, dim, axes)
    outs = (out,) * x.shape[dim]

    def local(inner: list[Any], x: Tensor) -> tuple[Tensor, ...]:
        return tuple(dense(row) for row in x.unbind(dim))

    return Operation((Need.of(target),), local, tuple(Cover.of(out) for out in outs), outs)


def _without(x: Layout, dim: int, axes: Axes | None) -> tuple[Layout, Layout]:
    """Return the layouts of x without `dim` and of x when it lies with that."""
    if axes is None:
        after = {at: at - 1 for at in range(dim + 1, len(x.shape))}
        axes = x.axes.relabel({dim: REPLICA} | after)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    before = {at: at + 1 for at in range(dim, len(shape))}
    return Layout(shape, axes), Layout(x.shape, axes.relabel(before))


def _along(layout: Layout, dim: int, blocks: Sequence[Block]) -> Cover:
    """Return the layout's cover with other blocks along `dim`."""
    dims = list(Cover.of(layout).blocks)
    dims[dim] = tuple(blocks)
    return Cover(layout.shape, layout.axes, tuple(dims))


def _cuts(layout: Layout, dim: int) -> list[tuple[int, int]]:
    """Return the balanced blocks of `dim`."""
    parts = layout.degrees[dim]
    return [block(layout.shape[dim], parts, index) for index in range(parts)]


def _union(intervals: Sequence[tuple[int, int]]) -> Block:
    """Keep the intervals side by side, neighbours as one piece."""
    merged: list[tuple[int, int]] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return Block.union(merged)


def _largest(operands: Sequence[Layout]) -> Axes:
    return max(operands, key=lambda operand: prod(operand.shape)).axes


def _resized(shape: Sequence[int], dim: int, extent: int) -> tuple[int, ...]:
    """Return the shape with another extent of `dim`."""
    return (*shape[:dim], extent, *shape[dim + 1 :])


def _alike(a: Sequence[int], b: Sequence[int], dim: int) -> bool:
    return len(a) == len(b) and all(at == dim or e == f for at, (e, f) in enumerate(zip(a, b)))
