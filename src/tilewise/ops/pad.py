"""Padding, cropping, slicing, flipping and rolling.

Each output position is a copy of one input position, or the padding's value. A rank fetches the
interval of sources that its block of the result is made of:

    reflect by 2, 2      source   2 1│0 1 2 3│2 1
    replicate            source   0 0│0 1 2 3│3 3
    circular             source   2 3│0 1 2 3│0 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.comm.formats import memory_format
from tilewise.errors import OperatorError
from tilewise.layout import Axes, Block, Cover, Layout
from tilewise.layout.blocks import Interval
from tilewise.layout.cover import Piece
from tilewise.ops.gather import Taps, gather
from tilewise.ops.operation import Need, Operation, tied_zeros

Rule = Callable[[int, int], Block]
MODES = ("constant", "reflect", "replicate", "circular")


def pad(
    x: Layout,
    pads: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
    *,
    axes: Axes | None = None,
    rank: int,
    layer: str = "pad",
) -> Operation:
    """Plan padding as F.pad does: (before, after) of the last dim first; negative pads crop.

    Layout: x any → y cut as `axes` say or as x is.
    Communication: what the cuts of y take from other ranks' slabs, in one message to each peer;
        none where the padded dims are not split.
    Adjoint: gradients of what was fetched go back and are added.
    """
    widths = _check(x, pads, mode, layer)
    shape = list(x.shape)
    for dim, (before, after) in widths.items():
        shape[dim] += before + after
    y = Layout(shape, x.axes if axes is None else axes)
    out = y.local_shape(rank)
    fill = 0.0 if value is None else float(value)

    if all(y.degrees[dim] == 1 for dim in widths):

        def local(inner: list[Any], x: Tensor) -> Tensor:
            return F.pad(x, list(pads), mode, fill) if prod(out) else tied_zeros(out, x)

        return _operation(x, y, {dim: _whole(x, dim) for dim in widths}, local)

    if mode in ("reflect", "replicate"):
        return _indexed(x, y, widths, mode, rank)
    rules = {}
    for dim, (before, after) in widths.items():
        if mode == "circular":
            first, last = max(-before, 0), x.shape[dim] - max(-after, 0)
            rules[dim] = _around(first, last - first, max(before, 0))
        else:
            rules[dim] = _clipped(x.shape[dim], before)
    return _operation(x, y, rules, fill=fill)


def slice_dim(
    x: Layout,
    dim: int,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
    *,
    axes: Axes | None = None,
    rank: int,
    layer: str = "slice",
) -> Operation:
    """Plan x[start:stop:step] along one dim, by Python's rules for slices.

    Layout: x any → y cut evenly as `axes` say or as x is.
    Communication: what an even cut of y takes from other ranks' slabs; none where the dim is not
        split.
    Adjoint: gradients go back; what was left out gets zeros.
    """
    dim = _dim(x, dim, layer)
    if step < 1:
        raise OperatorError(f"{layer}: step (={step}) must be at least 1; use flip to turn a dim")
    first, last, _ = slice(start, stop, step).indices(x.shape[dim])
    shape = list(x.shape)
    shape[dim] = len(range(first, last, step))
    y = Layout(shape, x.axes if axes is None else axes)

    def source(start: int, stop: int) -> Block:
        if start >= stop:
            return Block.of(0, 0)
        return Block.of(first + start * step, first + (stop - 1) * step + 1)

    split = y.degrees[dim] > 1
    rules = {dim: source if split else _whole(x, dim)}
    window = slice(None, None, step) if split else slice(first, last, step)
    at = tuple(window if d == dim else slice(None) for d in range(len(shape)))

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return x[at].clone(memory_format=memory_format(x))

    return _operation(x, y, rules, None if split and step == 1 else local)


def flip(
    x: Layout,
    dims: Sequence[int],
    *,
    axes: Axes | None = None,
    rank: int,
    layer: str = "flip",
) -> Operation:
    """Plan the reversal of some dims.

    Layout: x any → y cut as `axes` say or as x is.
    Communication: the mirrored slab of each split dim.
    Adjoint: the same backwards.
    """
    dims = [_dim(x, dim, layer) for dim in dims]
    if len(set(dims)) != len(dims):
        raise OperatorError(f"{layer}: dims (={tuple(dims)}) must name each dim once")
    y = Layout(x.shape, x.axes if axes is None else axes)

    def mirrored(extent: int) -> Rule:
        return lambda start, stop: Block.of(extent - stop, extent - start)

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return torch.flip(x, dims).contiguous(memory_format=memory_format(x))

    return _operation(x, y, {dim: mirrored(x.shape[dim]) for dim in dims}, local)


def roll(
    x: Layout,
    shifts: int | Sequence[int],
    dims: int | Sequence[int] | None = None,
    *,
    axes: Axes | None = None,
    rank: int,
    layer: str = "roll",
) -> Operation:
    """Plan a circular shift along some dims.

    Layout: x any → y cut as `axes` say or as x is.
    Communication: what moves across a cut; none where the dims are not split.
    Adjoint: the same backwards.
    """
    amounts = [shifts] if isinstance(shifts, int) else list(shifts)
    if dims is None and len(x.shape) == 1:
        dims = 0
    if dims is None or (not isinstance(dims, int) and not len(dims)):
        raise OperatorError(
            f"{layer}: dims (={dims}) must be given for an input {x.shape}: rolling the flattened "
            "tensor has no split form; flatten it first"
        )
    where = [_dim(x, dim, layer) for dim in ([dims] if isinstance(dims, int) else dims)]
    if len(amounts) != len(where):
        raise OperatorError(
            f"{layer}: shifts (={tuple(amounts)}) and dims (={tuple(where)}) must be as many"
        )
    total = dict.fromkeys(where, 0)
    for dim, amount in zip(where, amounts):
        total[dim] += amount
    moved = {dim: amount for dim, amount in total.items() if amount % max(x.shape[dim], 1)}
    y = Layout(x.shape, x.axes if axes is None else axes)
    if any(y.degrees[dim] > 1 for dim in moved):
        rules = {dim: _around(0, x.shape[dim], amount) for dim, amount in moved.items()}
        return _operation(x, y, rules)

    def local(inner: list[Any], x: Tensor) -> Tensor:
        out = torch.roll(x, list(moved.values()), list(moved))
        return out.contiguous(memory_format=memory_format(x))

    return _operation(x, y, {}, local if moved else None)


def _operation(
    x: Layout,
    y: Layout,
    rules: dict[int, Rule],
    local: Callable[..., Tensor] | None = None,
    *,
    fill: float = 0.0,
) -> Operation:
    """Fetch by `rules` what each block of y is made of; all other dims are cut as y is.

    Without local work the result is what was brought, and a copy where nothing had to be.
    """
    need = Cover(x.shape, y.axes, Cover.on(y, rules).blocks)
    if local is None:
        local = _copy if need.same_blocks(Cover.of(x)) else _as_brought
    return Operation((Need(need, fill),), local, (Cover.of(y),), (y,))


def _as_brought(inner: list[Any], x: Tensor) -> Tensor:
    return x


def _copy(inner: list[Any], x: Tensor) -> Tensor:
    return x.clone()


def _whole(x: Layout, dim: int) -> Rule:
    return lambda start, stop: Block.of(0, x.shape[dim])


def _clipped(extent: int, before: int) -> Rule:
    return lambda start, stop: Block.clipped(start - before, stop - before, extent)


def _around(first: int, period: int, lead: int) -> Rule:
    """Go around inputs [first, first + period), of which output `lead` is the first."""

    def source(start: int, stop: int) -> Block:
        size, pieces = Block.circular(start - lead, stop - lead, period)
        return Block(size, tuple(Piece(p.start + first, p.stop + first, p.at) for p in pieces))

    return source


def _indexed(x: Layout, y: Layout, widths: dict[int, Interval], mode: str, rank: int) -> Operation:
    """Fetch an interval of sources and pick from it: for reflect and replicate."""

    def sources(dim: int, start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop) - widths[dim][0]
        last = x.shape[dim] - 1
        if mode == "reflect":
            index = last - (last - index.abs()).abs()
        return index.clamp(0, last)

    def interval(dim: int) -> Rule:
        def source(start: int, stop: int) -> Block:
            if start >= stop:
                return Block.of(0, 0)
            index = sources(dim, start, stop)
            return Block.of(int(index.min()), int(index.max()) + 1)

        return source

    taps = []
    for dim in widths:
        index = sources(dim, *y.intervals(rank)[dim])
        if len(index) and not torch.equal(index - index[0], torch.arange(len(index))):
            taps.append(Taps(dim, (index - index.min())[None]))

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return gather(x, taps)

    return _operation(x, y, {dim: interval(dim) for dim in widths}, local if taps else None)


def _dim(x: Layout, dim: int, layer: str) -> int:
    """Count a dim from the front."""
    ndim = len(x.shape)
    if not -ndim <= dim < ndim:
        raise OperatorError(
            f"{layer}: dim (={dim}) must lie between {-ndim} and {ndim - 1} for an input {x.shape}"
        )
    return dim % ndim


def _check(x: Layout, pads: Sequence[int], mode: str, layer: str) -> dict[int, Interval]:
    """Return (before, after) of each padded dim, or raise what one device would."""
    ndim, count = len(x.shape), len(pads) // 2
    if mode not in MODES:
        raise OperatorError(f"{layer}: mode (={mode!r}) must be one of {MODES}")
    if len(pads) % 2 or count > ndim:
        raise OperatorError(
            f"{layer}: pads (={tuple(pads)}) must be pairs of (before, after) for at most the "
            f"{ndim} dims of an input {x.shape}, the last dim first"
        )
    if mode != "constant" and (count not in (1, 2, 3) or ndim - count not in (1, 2)):
        raise OperatorError(
            f"{layer}: pads (={tuple(pads)}) of mode {mode!r} must name the 1, 2 or 3 dims of "
            f"space of an input {x.shape}, all but channel and sample"
        )
    widths = {}
    for i in range(count):
        dim = ndim - 1 - i
        before, after = widths[dim] = (pads[2 * i], pads[2 * i + 1])
        extent = x.shape[dim]
        left = extent + min(before, 0) + min(after, 0)
        if left < 0 or extent + before + after < 0:
            raise OperatorError(
                f"{layer}: pads {before, after} of dim {dim} crop more than its extent (={extent})"
            )
        most = {"reflect": extent - 1, "circular": left, "replicate": inf if extent else 0}
        if max(before, after, 0) > max(most.get(mode, inf), 0):
            raise OperatorError(
                f"{layer}: pads {before, after} of dim {dim} must be at most {most[mode]} for "
                f"mode {mode!r} on an extent of {extent}; pad less or use mode 'constant'"
            )
    return {dim: width for dim, width in widths.items() if any(width)}
