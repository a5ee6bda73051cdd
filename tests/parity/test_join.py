"""Cat, stack, split, select and friends against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawing import WORLDS, layouts, many
from tilewise.comm import Mesh
from tilewise.errors import OperatorError
from tilewise.layout import REPLICA, Axes, Axis, Cover, Layout, Move
from tilewise.ops.join import cat, chunk, index_select, select, split, stack, unbind
from tilewise.testing import assert_matches_serial, ranks


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def drawn_axes(draw: st.DrawFn, shape: list[int], world: int) -> Axes | None:
    return draw(st.none() | layouts(shape, world).map(lambda layout: layout.axes))


def check_cat(mesh: Mesh, operands: list[Layout], dim: int, axes: Axes | None) -> None:
    operation = cat(operands, dim, axes=axes)
    whole = tensors(*(operand.shape for operand in operands))
    assert_matches_serial(mesh, operation, lambda *t: torch.cat(t, dim), whole, operands)


@st.composite
def cats(draw: st.DrawFn) -> tuple[int, list[Layout], int, Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    operands = []
    for size in sizes:
        shape[dim] = size
        operands.append(draw(layouts(list(shape), world)))
    shape[dim] = sum(sizes)
    return world, operands, dim, drawn_axes(draw, shape, world)


@many(150)
@given(cats())
def test_cat(case: tuple[int, list[Layout], int, Axes | None]) -> None:
    ranks(case[0], check_cat, *case[1:])


def check_stack(mesh: Mesh, operands: list[Layout], dim: int, axes: Axes | None) -> None:
    operation = stack(operands, dim, rank=mesh.rank, axes=axes)
    whole = tensors(*(operand.shape for operand in operands))
    assert_matches_serial(mesh, operation, lambda *t: torch.stack(t, dim), whole, operands)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[int, list[Layout], int, Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    dim = draw(st.integers(-len(shape) - 1, len(shape)))
    operands = draw(st.lists(layouts(shape, world), min_size=1, max_size=4))
    out = list(shape)
    out.insert(dim % (len(shape) + 1), len(operands))
    return world, operands, dim, drawn_axes(draw, out, world)


@many(80)
@given(stacks())
def test_stack(case: tuple[int, list[Layout], int, Axes | None]) -> None:
    ranks(case[0], check_stack, *case[1:])


def check_one(mesh: Mesh, kind: str, x: Layout, dim: int, how: Any, axes: Axes | None) -> None:
    (whole,) = tensors(x.shape)
    if kind == "split":
        operation = split(x, how, dim, rank=mesh.rank, axes=axes)
        serial = lambda x: x.split(how, dim)  # noqa: E731
    elif kind == "chunk":
        operation = chunk(x, how, dim, rank=mesh.rank, axes=axes)
        serial = lambda x: x.chunk(how, dim)  # noqa: E731
    elif kind == "index_select":
        operation = index_select(x, dim, how, axes=axes)
        serial = lambda x: x.index_select(dim, torch.tensor(how, dtype=torch.int64))  # noqa: E731
    elif kind == "select":
        operation = select(x, dim, how, axes=axes)
        serial = lambda x: x.select(dim, how)  # noqa: E731
    else:
        operation = unbind(x, dim, axes=axes)
        serial = lambda x: x.unbind(dim)  # noqa: E731
    if axes is not None:
        assert all(out.axes == axes for out in operation.outs)
    assert_matches_serial(mesh, operation, serial, [whole], [x])


@st.composite
def takings(draw: st.DrawFn) -> tuple[int, str, Layout, int, Any, Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    extent = shape[dim]
    kind = draw(st.sampled_from(["split", "chunk", "index_select", "select", "unbind"]))
    without = [e for at, e in enumerate(shape) if at != dim % len(shape)]
    how: Any = None
    if kind == "split":
        ends = sorted(draw(st.lists(st.integers(0, extent), max_size=3)))
        how = [b - a for a, b in zip([0, *ends], [*ends, extent])]
    elif kind == "chunk":
        how = draw(st.integers(1, 8))
    elif kind == "index_select":
        how = draw(st.lists(st.integers(0, extent - 1), max_size=9))
    elif kind == "select":
        how = draw(st.integers(-extent, extent - 1))
    shape_out = without if kind in ("select", "unbind") else shape
    return world, kind, draw(layouts(shape, world)), dim, how, drawn_axes(draw, shape_out, world)


@many(300)
@given(takings())
def test_parts(case: tuple[int, str, Layout, int, Any, Axes | None]) -> None:
    ranks(case[0], check_one, *case[1:])


def moves(operation: Any, sources: list[Layout]) -> list[bool]:
    """Whether each operand has to move."""
    return [
        not Move(Cover.of(source), need.cover).local
        for source, need in zip(sources, operation.needs)
    ]


def test_operands_that_lie_alike_do_not_move() -> None:
    a, b = (Layout((4, c, 8), [Axis(2, 0), Axis(2, 2)]) for c in (3, 5))
    assert moves(cat([a, b], 1), [a, b]) == [False, False]
    assert moves(stack([a, a], 1, rank=0), [a, a]) == [False, False]
    assert moves(split(a, [1, 2], 1, rank=0), [a]) == [False]
    assert moves(select(a, 1, 2), [a]) == [False]
    assert moves(unbind(a, 1), [a]) == [False]
    assert moves(index_select(a, 1, [2, 0]), [a]) == [False]


def test_no_rank_holds_a_whole_operand_of_a_cat_along_a_cut_dim() -> None:
    a, b = (Layout((4, 8), [Axis(4, 1)]) for _ in "ab")
    operation = cat([a, b], 1)
    held = [[need.cover.local_shape(rank)[1] for need in operation.needs] for rank in range(4)]
    assert held == [[4, 0], [4, 0], [0, 4], [0, 4]]


def test_a_cat_follows_its_largest_operand() -> None:
    a, b, c = (Layout((2, n), [Axis(2, dim)]) for n, dim in [(3, REPLICA), (4, 1), (4, 0)])
    assert cat([a, b, c], 1).out == Layout((2, 11), [Axis(2, 1)])


def check_formats(mesh: Mesh) -> None:
    x = Layout((2, 6, 4, 5), [Axis(2, 2)])
    local = torch.randn(x.local_shape(mesh.rank)).to(memory_format=torch.channels_last)
    parts = split(x, [2, 4], 1, rank=mesh.rank)
    for part in parts.bind(mesh, [x], layer="test")(local):
        assert part.is_contiguous(memory_format=torch.channels_last)
    for axes in (None, Axes([Axis(2, 1)])):
        joined = cat([x, x], 1, axes=axes).bind(mesh, [x, x], layer="test")(local, local)
        assert joined.is_contiguous(memory_format=torch.channels_last)
    rows = unbind(x, 1).bind(mesh, [x], layer="test")(local)
    assert all(row.is_contiguous() for row in rows)


def test_memory_formats() -> None:
    ranks(2, check_formats)


def test_illegal_arguments_are_refused() -> None:
    x, y = Layout((4, 6)), Layout((5, 6))
    for wrong in [
        lambda: cat([x, y], 1),
        lambda: cat([x, Layout((4, 6, 1))], 1),
        lambda: cat([x], 2),
        lambda: stack([x, y], 0, rank=0),
        lambda: split(x, [2, 3], 1, rank=0),
        lambda: split(x, [7, -1], 1, rank=0),
        lambda: chunk(x, 0, 1, rank=0),
        lambda: select(x, 1, 6),
        lambda: index_select(x, 1, [6]),
    ]:
        with pytest.raises(OperatorError):
            wrong()
