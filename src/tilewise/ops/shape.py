"""Permute, reshape, expand and repeat.

Where the result's slabs hold the same elements as the operand's, nothing moves and the result may
share memory with the operand, as on one device. A reshape keeps a cut that lies on the outermost
of the dims that it joins or takes apart, where the blocks stay balanced:

    (N, C, H, W) → (N, C·H·W)     n stays, c stays where p divides C; h and w move elsewhere first
    (N, C) → (N, g, C/g)          n stays, c stays where p divides g, or is g times a divisor of C/g
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from tilewise.comm.formats import CHANNELS_LAST
from tilewise.errors import OperatorError
from tilewise.layout import REPLICA, Axes, Block, Cover, Layout, block
from tilewise.layout.regroup import reshapable, reshape_axes
from tilewise.ops.operation import Need, Operation, shared
from tilewise.ops.pointwise import broadcast, broadcast_cover


def permute(
    x: Layout, dims: Sequence[int], *, axes: Axes | None = None, layer: str = "permute"
) -> Operation:
    """Plan x with its dims in another order.

    Layout: x any → cut as `axes` say, or as x is.
    Communication: none, or one move of x to where `axes` want it.
    Adjoint: the same, back.
    """
    ndim = len(x.shape)
    order = [dim % ndim for dim in dims if -ndim <= dim < ndim]
    if len(dims) != ndim or sorted(order) != list(range(ndim)):
        raise OperatorError(f"{layer}: dims {tuple(dims)} must name each dim of {x.shape} once")
    if axes is None:
        axes = x.axes.relabel({dim: at for at, dim in enumerate(order)})
    out = Layout([x.shape[dim] for dim in order], axes)
    need = Need.of(Layout(x.shape, axes.relabel(dict(enumerate(order)))))

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return dense(x.permute(order))

    return Operation((need,), local, (Cover.of(out),), (out,))


def transpose(
    x: Layout, a: int, b: int, *, axes: Axes | None = None, layer: str = "transpose"
) -> Operation:
    """Plan x with two dims swapped, as `permute` does."""
    ndim = len(x.shape)
    a, b = checked_dim(a, ndim, x, layer), checked_dim(b, ndim, x, layer)
    order = list(range(ndim))
    order[a], order[b] = b, a
    return permute(x, order, axes=axes, layer=layer)


def reshape(
    x: Layout,
    shape: Sequence[int],
    *,
    rank: int,
    axes: Axes | None = None,
    layer: str = "reshape",
) -> Operation:
    """Plan x in another shape; flatten, unflatten, squeeze, unsqueeze and view are this too.

    Layout: x any → cut as `axes` say, or as x is wherever the shape allows it.
    Communication: none where the cuts survive. Otherwise one move of x to cuts that do, so that
        no rank has to hold more than its share as long as any dim can take the cut; one more move
        where `axes` name cuts that cannot be reshaped to.
    Adjoint: the same, back.
    """
    shape = _resolved(x.shape, shape, layer)
    stays = reshape_axes(x, shape)
    out = None if axes is None else Layout(shape, axes)
    back = None if out is None or stays == axes else reshape_axes(out, x.shape)
    if out is not None and back is not None:
        need, gives = Layout(x.shape, back), out
    else:
        need = x if stays is not None else reshapable(x, shape)
        gives = Layout(shape, reshape_axes(need, shape) or ())
    local_shape = gives.local_shape(rank)

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return dense(x.reshape(local_shape))

    return Operation((Need.of(need),), local, (Cover.of(gives),), (out or gives,))


def expand(
    x: Layout,
    shape: Sequence[int],
    *,
    rank: int,
    axes: Axes | None = None,
    layer: str = "expand",
) -> Operation:
    """Plan x with dims of extent 1 made larger, and new dims in front; −1 keeps an extent.

    The result is a view that holds each element once, as on one device.

    Layout: x any → cut as `axes` say, or as x is in the dims that keep their extent.
    Communication: none, or one move of x to where the result lies.
    Adjoint: the gradient is summed over the dims that were expanded, and over the ranks that cut
        them.
    """
    lead = len(shape) - len(x.shape)
    old = (1,) * lead + x.shape
    shape = tuple(old[dim] if e == -1 and dim >= lead else e for dim, e in enumerate(shape))
    if lead < 0 or broadcast([x.shape, shape], layer) != shape:
        raise OperatorError(f"{layer}: {x.shape} cannot be expanded to {shape}")
    if axes is None:
        keeps = {d: d + lead if e == shape[d + lead] else REPLICA for d, e in enumerate(x.shape)}
        axes = x.axes.relabel(keeps)
    out = Layout(shape, axes)
    local_shape = out.local_shape(rank)

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return x.expand(local_shape)

    return Operation((Need(broadcast_cover(x.shape, out)),), local, (Cover.of(out),), (out,))


def repeat(
    x: Layout,
    repeats: Sequence[int],
    *,
    rank: int,
    axes: Axes | None = None,
    layer: str = "repeat",
) -> Operation:
    """Plan x put side by side as often as `repeats` say; new dims stand in front.

    Layout: x any → cut as `axes` say, or as x is.
    Communication: none where the repeated dims are not cut; otherwise one move of what each
        rank's part of the result shows of x.
    Adjoint: the gradients of all copies are summed.
    """
    lead = len(repeats) - len(x.shape)
    if lead < 0 or min(repeats, default=0) < 0:
        raise OperatorError(
            f"{layer}: repeats {tuple(repeats)} must be at least 0 and as many as {x.shape} has "
            "dims, or more"
        )
    at = {dim: dim + lead for dim in range(len(x.shape))}
    shape = [e * times for e, times in zip((1,) * lead + x.shape, repeats)]
    out = Layout(shape, x.axes.relabel(at) if axes is None else axes)
    blocks: list[tuple[Block, ...]] = []
    times = list(out.local_shape(rank)[:lead])
    for dim, extent in enumerate(x.shape, start=lead):
        parts = out.degrees[dim]
        cuts = [block(out.shape[dim], parts, index) for index in range(parts)]
        blocks.append(
            tuple(Block.circular(start, stop, extent) for start, stop in cuts)
            if parts > 1
            else (Block.of(0, extent),)
        )
        times.append(1 if parts > 1 else repeats[dim])
    keep = {out_dim: dim for dim, out_dim in at.items()}
    need = Need(Cover(x.shape, shared(out.axes, keep), tuple(blocks)))

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return x.repeat(times)

    return Operation((need,), local, (Cover.of(out),), (out,))


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor without gaps: channels last where its elements lie so, else contiguous."""
    format = CHANNELS_LAST.get(tensor.dim())
    if format is not None and tensor.stride(1) == 1 and not tensor.is_contiguous():
        return tensor.contiguous(memory_format=format)
    return tensor.contiguous()


def checked_dim(dim: int, ndim: int, x: Layout, layer: str) -> int:
    """Return `dim` counted from the front, or raise."""
    if not -ndim <= dim < ndim:
        raise OperatorError(f"{layer}: {x.shape} has no dim {dim}; use 0 to {ndim - 1}")
    return dim % ndim


def _resolved(old: tuple[int, ...], shape: Sequence[int], layer: str) -> tuple[int, ...]:
    """Return the shape with −1 replaced."""
    known = prod(extent for extent in shape if extent != -1)
    total = prod(old)
    guess = total // known if known else 0
    found = tuple(guess if extent == -1 else extent for extent in shape)
    if list(shape).count(-1) > 1 or prod(found) != total:
        raise OperatorError(
            f"{layer}: {old} has {total} elements, which do not fill the shape {tuple(shape)}"
        )
    return found


__all__ = [
    "checked_dim",
    "dense",
    "expand",
    "permute",
    "repeat",
    "reshape",
    "reshape_axes",
    "transpose",
]
