"""Calls that rearrange: they follow their operand."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.graph.graph import values_in
from tilewise.graph.labels import permutation
from tilewise.graph.rule import Lowered, Site, rule
from tilewise.graph.rules.undivided import fallback
from tilewise.ops.join import cat, select, split, stack, unbind
from tilewise.ops.operation import Operation
from tilewise.ops.pad import flip, roll, slice_dim
from tilewise.ops.scatter import slice_scatter
from tilewise.ops.shape import expand, permute, repeat, reshape, transpose


@rule(
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
    "unsafe_view", "ravel", cuts=False,
)  # fmt: skip
def _reshape(site: Site) -> Lowered:
    x = site.node.values()[0]
    operation = reshape(site.layout(x), site.node.out.shape, rank=site.rank, layer=site.node.name)
    return Lowered(operation, (x,))


@rule("permute", "movedim", "moveaxis", "numpy_T", cuts=False)
def _permute(site: Site) -> Lowered:
    x = site.node.values()[0]
    order = permutation(site.node, len(x.shape))
    return Lowered(permute(site.layout(x), order, layer=site.node.name), (x,))


@rule("transpose", "t", "swapaxes", cuts=False)
def _transpose(site: Site) -> Lowered:
    x = site.node.values()[0]
    a, b = (
        (0, -1) if site.node.kind == "t" else (site.argument(1, "dim0"), site.argument(2, "dim1"))
    )
    if site.node.kind == "t" and len(x.shape) < 2:
        a, b = 0, 0
    return Lowered(transpose(site.layout(x), a, b, layer=site.node.name), (x,))


@rule("expand", "expand_as", "broadcast_to", cuts=False)
def _expand(site: Site) -> Lowered:
    x = site.node.values()[0]
    operation = expand(site.layout(x), site.node.out.shape, rank=site.rank, layer=site.node.name)
    return Lowered(operation, (x,))


@rule("repeat", cuts=False)
def _repeat(site: Site) -> Lowered:
    x = site.node.values()[0]
    repeats = site.argument(1, "repeats")
    return Lowered(repeat(site.layout(x), repeats, rank=site.rank, layer=site.node.name), (x,))


@rule("cat", "concat", "concatenate")
def _cat(site: Site) -> Lowered:
    values = values_in(site.argument(0, "tensors"))
    dim = site.argument(1, "dim", 0)
    layouts = [site.layout(value) for value in values]
    return Lowered(cat(layouts, dim, axes=site.axes, layer=site.node.name), values)


@rule("stack", cuts=False)
def _stack(site: Site) -> Lowered:
    values = values_in(site.argument(0, "tensors"))
    dim = site.argument(1, "dim", 0)
    layouts = [site.layout(value) for value in values]
    return Lowered(stack(layouts, dim, rank=site.rank, layer=site.node.name), values)


@rule(
    "chunk", "split", "split_with_sizes", "tensor_split", "unsafe_split", "unsafe_chunk",
    cuts=False,
)  # fmt: skip
def _split(site: Site) -> Lowered:
    x = site.node.values()[0]
    dim = site.argument(2, "dim", 0) % len(x.shape)
    sizes = [out.shape[dim] for out in site.node.outs]
    operation = split(site.layout(x), sizes, dim, rank=site.rank, layer=site.node.name)
    return Lowered(operation, (x,))


@rule("unbind", cuts=False)
def _unbind(site: Site) -> Lowered:
    x = site.node.values()[0]
    dim = site.argument(1, "dim", 0)
    return Lowered(unbind(site.layout(x), dim, layer=site.node.name), (x,))


@rule("select", cuts=False)
def _select(site: Site) -> Lowered:
    x = site.node.values()[0]
    dim, index = site.argument(1, "dim"), site.argument(2, "index")
    return Lowered(select(site.layout(x), dim, index, layer=site.node.name), (x,))


@rule("slice", cuts=False)
def _slice(site: Site) -> Lowered:
    x = site.node.values()[0]
    dim = site.argument(1, "dim", 0)
    start, stop = site.argument(2, "start", None), site.argument(3, "end", None)
    operation = slice_dim(
        site.layout(x),
        dim,
        start,
        stop,
        site.argument(4, "step", 1),
        rank=site.rank,
        layer=site.node.name,
    )
    return Lowered(operation, (x,))


@rule("narrow", cuts=False)
def _narrow(site: Site) -> Lowered:
    x = site.node.values()[0]
    dim, start, length = site.node.args[1:4]
    start = start % x.shape[dim] if start < 0 else start
    operation = slice_dim(
        site.layout(x), dim, start, start + length, 1, rank=site.rank, layer=site.node.name
    )
    return Lowered(operation, (x,))


@rule("flip", cuts=False)
def _flip(site: Site) -> Lowered:
    x = site.node.values()[0]
    dims = site.argument(1, "dims")
    return Lowered(flip(site.layout(x), dims, rank=site.rank, layer=site.node.name), (x,))


@rule("roll", cuts=False)
def _roll(site: Site) -> Lowered:
    x = site.node.values()[0]
    shifts, dims = site.argument(1, "shifts"), site.argument(2, "dims", None)
    return Lowered(roll(site.layout(x), shifts, dims, rank=site.rank, layer=site.node.name), (x,))


@rule("slice_scatter", cuts=False)
def _slice_scatter(site: Site) -> Lowered:
    x, new = site.node.values()
    if site.argument(5, "step", 1) != 1:
        return fallback(site)
    dim = site.argument(2, "dim", 0)
    start, stop = site.argument(3, "start", None), site.argument(4, "end", None)
    operation = slice_scatter(
        site.layout(x),
        site.layout(new),
        dim,
        0 if start is None else start,
        x.shape[dim] if stop is None else stop,
        rank=site.rank,
        layer=site.node.name,
    )
    return Lowered(operation, (x, new))


@rule("broadcast_tensors", cuts=False)
def _broadcast(site: Site) -> Lowered:
    values = site.node.values()
    each = [
        expand(site.layout(value), out.shape, rank=site.rank, layer=site.node.name)
        for value, out in zip(values, site.node.outs)
    ]

    def local(inner: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(one.local(inner, tensor) for one, tensor in zip(each, tensors))

    needs = tuple(one.needs[0] for one in each)
    gives, outs = tuple(one.gives[0] for one in each), tuple(one.out for one in each)
    return Lowered(Operation(needs, local, gives, outs), values)
