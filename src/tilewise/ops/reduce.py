"""Reductions over any dims, cut or not: sums, means, extremes and variances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, REPLICA, Axes, Cover, Layout
from tilewise.ops.constants import numbers
from tilewise.ops.operation import Need, Operation
from tilewise.ops.summary import Summary, combine, moments, wide_sum

EXTREMES = ("amax", "amin")
PICKS = ("max", "min", "argmax", "argmin")
SPREADS = ("var", "std")
KINDS = ("sum", "mean", *EXTREMES, *PICKS, *SPREADS)


def reduce(
    x: Layout,
    kind: str,
    dims: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    correction: float = 1.0,
    axes: Axes | None = None,
    rank: int,
    layer: str = "reduce",
) -> Operation:
    """Plan a reduction over `dims`, all by default; `axes` cut x, not the result.

    `kind` is one of KINDS, with torch's gradients: amax and amin share them among all equals,
    max and min give them to the first. max and min (values and indices), argmax and argmin
    (indices) reduce one dim; indices are global. `correction` is that of var and std.

    Layout: x any, brought to `axes` → the result cut along the dims that stay, with replicas in
        place of the cuts of those that go.
    Communication: none where the reduced dims are not cut; otherwise one all-reduce of the
        result for sums and means; the rest send two numbers for each entry of the result to
        each rank that shares it.
    Adjoint: none.
    """
    chosen = _dims(x, kind, dims, layer)
    work = Layout(x.shape, x.axes if axes is None else axes)
    summary = Summary(work, chosen)
    out = _result(work, chosen, keepdim)
    plan: Callable[[Summary, str, float, int], _Plan]
    if kind in EXTREMES:
        plan = _extreme
    elif kind in PICKS:
        plan = _pick
    else:
        plan = _spread if kind in SPREADS else _sum
    local, inner, count = plan(summary, kind, correction, rank)

    def finish(inner: list[Any], x: Tensor) -> Any:
        results = [t if keepdim else _squeeze(t, chosen) for t in local(inner, x)]
        return results[0] if count == 1 else tuple(results)

    exchanges = (inner,) if summary.split else ()
    return Operation((Need.of(work),), finish, (Cover.of(out),) * count, (out,) * count, exchanges)


_Plan = tuple[Callable[[list[Any], Tensor], Sequence[Tensor]], tuple[Cover, Cover], int]


def _sum(summary: Summary, kind: str, correction: float, rank: int) -> _Plan:
    """Sum locally with all dims kept, then over the ranks that share the result."""
    work, dims = summary.work, summary.dims
    kept = _result(work, dims, keepdim=True)
    source = Layout(kept.shape, work.axes.relabel(dict.fromkeys(dims, PARTIAL)))
    count = prod(work.shape[dim] for dim in dims)

    def local(inner: list[Any], x: Tensor) -> list[Tensor]:
        if not summary.split:
            return [getattr(x, kind)(dims, keepdim=True)]
        total = inner[0](wide_sum(x, dims, keepdim=True))
        if kind == "mean":
            total = total / count
        return [total.to(x.dtype) if x.is_floating_point() else total]

    return local, (Cover.of(source), Cover.of(kept)), 1


def _extreme(summary: Summary, kind: str, correction: float, rank: int) -> _Plan:
    """Tell each other the local extreme and how often it occurs."""
    work, dims = summary.work, summary.dims
    slab = work.local_shape(rank)

    def local(inner: list[Any], x: Tensor) -> list[Tensor]:
        if not summary.split:
            return [getattr(x, kind)(dims, keepdim=True)]
        with torch.no_grad():
            if all(slab[dim] for dim in dims):
                value = getattr(x, kind)(dims, keepdim=True)
                ties = (x == value).sum(dims, keepdim=True)
            else:
                value = ties = x.new_zeros([1 if d in dims else e for d, e in enumerate(slab)])
            rows = inner[0](torch.stack([value.to(_carrier(x)), ties.to(_carrier(x))]))
            rows = _nonempty(rows, summary)
            best = getattr(rows[0], kind)(dims, keepdim=True)
            number = torch.where(rows[0] == best, rows[1], 0).sum(dims, keepdim=True)
        result: Tensor = _ShareAlike.apply(x, best.to(x.dtype), number)
        return [result]

    return local, summary.ends(), 1


class _ShareAlike(torch.autograd.Function):
    """An extreme whose gradient is shared by all elements that equal it, here and elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, best: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, best, number)
        return best.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, best, number = ctx.saved_tensors
        return (x == best) * (grad / number.to(grad.dtype)), None, None


def _pick(summary: Summary, kind: str, correction: float, rank: int) -> _Plan:
    """Tell each other the local extreme and where it is; of equals the first one counts."""
    (dim,) = summary.dims
    start, stop = summary.work.intervals(rank)[dim]
    function = kind.removeprefix("arg")
    indices_only = kind != function

    def local(inner: list[Any], x: Tensor) -> list[Tensor]:
        if not summary.split:
            found = getattr(x, function)(dim, keepdim=True)
            return [found.indices] if indices_only else list(found)
        with torch.no_grad():
            if start < stop:
                value, index = getattr(x, function)(dim, keepdim=True)
                index = index + start
            else:
                value = index = x.new_zeros([1 if d == dim else e for d, e in enumerate(x.shape)])
            rows = inner[0](torch.stack([value.to(_carrier(x)), index.to(_carrier(x))]))
            rows = _nonempty(rows, summary)
            value, row = getattr(rows[0], function)(dim, keepdim=True)
            index = rows[1].gather(dim, row).long()
        if indices_only:
            return [index]
        picked: Tensor = _Picked.apply(x, value.to(x.dtype), index, dim, start)
        return [picked, index]

    return local, summary.ends(), 1 if indices_only else 2


class _Picked(torch.autograd.Function):
    """An extreme whose gradient goes to the element with its index, wherever that is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, index: Tensor, dim: int, start: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim, ctx.start = x.shape, dim, start
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.shape)
        extent = ctx.shape[ctx.dim]
        if not extent:
            return out, None, None, None, None
        here = (index >= ctx.start) & (index < ctx.start + extent)
        place = (index - ctx.start).clamp(0, extent - 1)
        return out.scatter(ctx.dim, place, torch.where(here, grad, 0)), None, None, None, None


def _spread(summary: Summary, kind: str, correction: float, rank: int) -> _Plan:
    """Tell each other mean and squared deviations."""
    dims = summary.dims
    freedom = max(prod(summary.work.shape[dim] for dim in dims) - correction, 0.0)

    def local(inner: list[Any], x: Tensor) -> list[Tensor]:
        if not summary.split:
            return [getattr(torch, kind)(x, dims, correction=correction, keepdim=True)]
        found, _ = moments(x, dims)
        rows = inner[0](found)
        _, m2 = combine(rows, summary.counts(rows.device), dims)
        var = m2 / freedom if freedom else m2 / torch.zeros_like(m2)
        if kind == "std":
            var = _Root.apply(var)
        return [var.to(x.dtype)]

    # every rank computes the same result, so each keeps the gradient of its own entry
    return local, summary.ends(roles=dict.fromkeys(dims, REPLICA)), 1


class _Root(torch.autograd.Function):
    """A square root whose gradient at 0 is 0, as that of a standard deviation."""

    @staticmethod
    def forward(ctx: Any, var: Tensor) -> Tensor:
        root: Tensor = var.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        slope: Tensor = (grad / (2 * root)).masked_fill_(root == 0, 0)
        return slope


def _dims(x: Layout, kind: str, dims: int | Sequence[int] | None, layer: str) -> tuple[int, ...]:
    """Return the dims to reduce, or raise what one device would."""
    ndim = len(x.shape)
    if kind not in KINDS:
        raise OperatorError(f"{layer}: kind (={kind!r}) must be one of {', '.join(KINDS)}")
    listed = [dims] if isinstance(dims, int) else list(range(ndim) if dims is None else dims)
    listed = listed or list(range(ndim))
    if any(not -ndim <= dim < ndim for dim in listed):
        raise OperatorError(f"{layer}: dims {listed} must be dims of the input {x.shape}")
    chosen = tuple(sorted({dim % ndim for dim in listed}))
    if len(chosen) != len(listed):
        raise OperatorError(f"{layer}: a dim stands twice in {listed}; name each once")
    if kind in PICKS and len(chosen) != 1:
        raise OperatorError(
            f"{layer}: {kind} gives indices along one dim, not {listed}; name one dim, or use amax "
            "or amin for the values alone"
        )
    if kind in (*EXTREMES, *PICKS) and not all(x.shape[dim] for dim in chosen):
        raise OperatorError(f"{layer}: {kind} over the empty dims {listed} of {x.shape}")
    return chosen


def _result(work: Layout, dims: tuple[int, ...], keepdim: bool) -> Layout:
    shape = [1 if dim in dims else extent for dim, extent in enumerate(work.shape)]
    axes = work.axes.relabel(dict.fromkeys(dims, REPLICA))
    if keepdim:
        return Layout(shape, axes)
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    renamed = axes.relabel({dim: place for place, dim in enumerate(kept)})
    return Layout([shape[dim] for dim in kept], renamed)


def _squeeze(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.reshape([e for dim, e in enumerate(tensor.shape) if dim not in dims])


def _carrier(x: Tensor) -> torch.dtype:
    """Return a dtype that holds values of x and indices exactly."""
    return torch.float64 if x.is_floating_point() else torch.int64


def _nonempty(rows: Tensor, summary: Summary) -> Tensor:
    """Leave out the entries of empty blocks, which stand for nothing."""
    for dim in summary.dims:
        filled = tuple(i for i, size in enumerate(summary.block_sizes(dim)) if size)
        if len(filled) < rows.shape[dim + 1]:
            rows = rows.index_select(dim + 1, numbers(filled, torch.long, rows.device))
    return rows
