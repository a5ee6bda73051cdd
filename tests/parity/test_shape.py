"""Permute, reshape, expand and repeat against one device."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawing import WORLDS, factors, layouts, many
from tilewise.comm import Mesh
from tilewise.errors import OperatorError
from tilewise.layout import REPLICA, Axes, Axis, Cover, Layout, Move
from tilewise.ops.operation import Operation
from tilewise.ops.shape import expand, permute, repeat, reshape, reshape_axes, transpose
from tilewise.testing import assert_matches_serial, ranks

PLANS: dict[str, Callable[..., Operation]] = {
    "permute": permute,
    "reshape": reshape,
    "expand": expand,
    "repeat": repeat,
}


def check(mesh: Mesh, kind: str, x: Layout, how: list[int], axes: Axes | None) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    rank: dict[str, Any] = {} if kind == "permute" else {"rank": mesh.rank}
    operation = PLANS[kind](x, how, axes=axes, **rank)
    if axes is not None:
        assert operation.out.axes == axes
    serial = getattr(Tensor, kind)
    assert operation.out.shape == serial(whole, how).shape
    assert_matches_serial(mesh, operation, lambda x: serial(x, how), [whole], [x])


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def permutations(draw: st.DrawFn) -> tuple[int, str, Layout, list[int], Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    shape = draw(SHAPES)
    order = draw(st.permutations(range(len(shape))))
    axes = draw(st.none() | layouts([shape[d] for d in order], world).map(lambda one: one.axes))
    return world, "permute", draw(layouts(shape, world)), list(order), axes


@st.composite
def shapes_of(draw: st.DrawFn, elements: int) -> list[int]:
    """Draw a shape of that many elements, extents of 1 among them."""
    shape = draw(factors(elements))
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return shape


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[int, str, Layout, list[int], Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    elements = draw(st.sampled_from([1, 2, 7, 8, 12, 24, 30, 36, 48, 72]))
    old, new = draw(shapes_of(elements)), draw(shapes_of(elements))
    # One-to-one dims in front and behind, as samples and space are in most networks.
    front = draw(st.lists(st.integers(1, 5), max_size=1))
    behind = draw(st.lists(st.integers(1, 5), max_size=1))
    old, new = [*front, *old, *behind], [*front, *new, *behind]
    axes = draw(st.none() | layouts(new, world).map(lambda one: one.axes))
    return world, "reshape", draw(layouts(old, world)), new, axes


@st.composite
def expansions(draw: st.DrawFn) -> tuple[int, str, Layout, list[int], Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    new = draw(SHAPES)
    old = [draw(st.sampled_from([1, extent])) for extent in new][draw(st.integers(0, len(new))) :]
    axes = draw(st.none() | layouts(new, world).map(lambda one: one.axes))
    lead = len(new) - len(old)
    open_ended = draw(st.booleans())
    how = [
        -1 if open_ended and dim >= lead and old[dim - lead] == extent else extent
        for dim, extent in enumerate(new)
    ]
    return world, "expand", draw(layouts(old, world)), how, axes


@st.composite
def repetitions(draw: st.DrawFn) -> tuple[int, str, Layout, list[int], Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    repeats = [draw(st.integers(1, 3)) for _ in range(len(shape) + draw(st.integers(0, 1)))]
    out = [e * times for e, times in zip([1] * (len(repeats) - len(shape)) + shape, repeats)]
    axes = draw(st.none() | layouts(out, world).map(lambda one: one.axes))
    return world, "repeat", draw(layouts(shape, world)), repeats, axes


@many(80)
@given(permutations())
def test_permute(case: tuple[int, str, Layout, list[int], Axes | None]) -> None:
    ranks(case[0], check, *case[1:])


@many(200)
@given(reshapes())
def test_reshape(case: tuple[int, str, Layout, list[int], Axes | None]) -> None:
    ranks(case[0], check, *case[1:])


@many(120)
@given(expansions())
def test_expand(case: tuple[int, str, Layout, list[int], Axes | None]) -> None:
    ranks(case[0], check, *case[1:])


@many(120)
@given(repetitions())
def test_repeat(case: tuple[int, str, Layout, list[int], Axes | None]) -> None:
    ranks(case[0], check, *case[1:])


@many(300)
@given(reshapes())
def test_axes_of_a_reshape_hold_the_same_elements(
    case: tuple[int, str, Layout, list[int], Axes | None],
) -> None:
    world, _, x, shape, _ = case
    axes = reshape_axes(x, shape)
    if axes is None:
        return
    out = Layout(shape, axes)
    index = torch.arange(prod(shape))
    for rank in range(world):
        before, after = index.view(x.shape)[x.slab(rank)], index.view(shape)[out.slab(rank)]
        assert before.flatten().tolist() == after.flatten().tolist()


STAYS = [
    # flatten before a classifier
    ((8, 16, 3, 3), [Axis(2, 0), Axis(4, 1)], (8, 144), [Axis(2, 0), Axis(4, 1)]),
    ((8, 16, 1, 1), [Axis(2, 0), Axis(4, 1)], (8, 16), [Axis(2, 0), Axis(4, 1)]),
    # a channel shuffle
    ((8, 16, 3, 5), [Axis(4, 1), Axis(2, 2)], (8, 4, 4, 3, 5), [Axis(4, 1), Axis(2, 3)]),
    ((8, 16, 3, 5), [Axis(8, 1)], (8, 4, 4, 3, 5), [Axis(4, 1), Axis(2, 2)]),
    ((8, 4, 4, 3), [Axis(4, 1), Axis(2, 2)], (8, 16, 3), [Axis(8, 1)]),
    # more parts than rows, and rows that do not divide
    ((3, 5), [Axis(8, 0)], (3, 1, 5), [Axis(8, 0)]),
    ((7, 6), [Axis(2, 0)], (7, 2, 3), [Axis(2, 0)]),
    ((4, 3), [Axis(2), Axis(2, 1), Axis(2, 0)], (2, 2, 3), [Axis(2), Axis(2, 2), Axis(2, 0)]),
]


@pytest.mark.parametrize(("shape", "cut", "new", "stays"), STAYS)
def test_cuts_that_survive_do_not_move(
    shape: tuple[int, ...], cut: list[Axis], new: tuple[int, ...], stays: list[Axis]
) -> None:
    x = Layout(shape, cut)
    assert reshape_axes(x, new) == Axes(stays)
    operation = reshape(x, new, rank=0)
    assert Move(Cover.of(x), operation.needs[0].cover).local
    assert operation.out == Layout(new, stays)


MOVES = [
    # height goes to channels, which divide
    ((2, 16, 8, 8), [Axis(4, 2)], (2, 1024), [Axis(4, 1)]),
    # channels do not divide, samples do
    ((4, 15, 8, 8), [Axis(2, 1), Axis(2, 3)], (4, 960), [Axis(2, 0), Axis(2, 0)]),
    # in factors: half to samples, half to channels
    ((2, 6, 8), [Axis(4, 2)], (2, 48), [Axis(2, 1), Axis(2, 0)]),
    # the cut that survives stays
    ((2, 16, 8, 8), [Axis(2, 1), Axis(2, 2)], (2, 1024), [Axis(4, 1)]),
    # none can take it
    ((3, 5), [Axis(2, 1)], (15,), [Axis(2)]),
]


@pytest.mark.parametrize(("shape", "cut", "new", "out"), MOVES)
def test_other_cuts_move_where_the_shape_allows_it(
    shape: tuple[int, ...], cut: list[Axis], new: tuple[int, ...], out: list[Axis]
) -> None:
    x = Layout(shape, cut)
    assert reshape_axes(x, new) is None
    operation = reshape(x, new, rank=0)
    assert operation.out == Layout(new, out)
    assert Move(operation.gives[0], Cover.of(operation.out)).local
    ranks(x.ranks, check, "reshape", x, list(new), None)


def test_a_wanted_cut_costs_one_move_where_it_can_be_reshaped_to() -> None:
    x = Layout((4, 6, 8), [Axis(2, 2)])
    operation = reshape(x, (4, 48), rank=0, axes=Axes([Axis(2, 1)]))
    assert operation.needs[0].cover == Cover.of(Layout(x.shape, [Axis(2, 1)]))
    assert operation.gives[0] == Cover.of(operation.out)


def test_an_empty_tensor() -> None:
    for axes in (None, Axes([Axis(2, 1)])):
        ranks(2, check, "reshape", Layout((0, 6), [Axis(2, 1)]), [3, 2, 0], axes)


def check_inferred(mesh: Mesh) -> None:
    x = Layout((4, 6, 2), [Axis(2, 0)])
    operation = reshape(x, (4, -1), rank=mesh.rank)
    whole = torch.randn(x.shape, dtype=torch.float64)
    assert_matches_serial(mesh, operation, lambda x: x.reshape(4, -1), [whole], [x])


def test_an_extent_left_open() -> None:
    ranks(2, check_inferred)


def check_formats(mesh: Mesh) -> None:
    """Results are dense, and channels_last stays or becomes what torch makes of it."""
    x = Layout((2, 4, 6, 5), [Axis(2, 2)])
    local = torch.randn(x.local_shape(mesh.rank)).to(memory_format=torch.channels_last)
    to_last = permute(x, (0, 2, 3, 1))
    moved = to_last.bind(mesh, [x], layer="test")(local)
    assert moved.is_contiguous()
    assert moved.data_ptr() == local.data_ptr()
    back = permute(to_last.out, (0, 3, 1, 2)).bind(mesh, [to_last.out], layer="test")(moved)
    assert back.is_contiguous(memory_format=torch.channels_last)
    swapped = transpose(x, 1, -1).bind(mesh, [x], layer="test")(local)
    assert swapped.is_contiguous()
    assert torch.equal(swapped, local.transpose(1, -1))


def test_memory_formats() -> None:
    ranks(2, check_formats)


def test_an_expanded_dim_is_not_cut_unless_asked() -> None:
    x = Layout((4, 1, 6), [Axis(2, 0), Axis(2, 1), Axis(2, 2)])
    assert expand(x, (4, 5, 6), rank=0).out.axes == Axes([Axis(2, 0), Axis(2, REPLICA), Axis(2, 2)])


def test_illegal_arguments_are_refused() -> None:
    x = Layout((4, 6))
    for wrong in [
        lambda: permute(x, (0, 0)),
        lambda: permute(x, (0, 1, 2)),
        lambda: transpose(x, 0, 2),
        lambda: reshape(x, (5, 5), rank=0),
        lambda: reshape(x, (-1, 5), rank=0),
        lambda: reshape(x, (-1, -1), rank=0),
        lambda: expand(x, (6,), rank=0),
        lambda: expand(x, (8, 6), rank=0),
        lambda: repeat(x, (2,), rank=0),
        lambda: repeat(x, (2, -1), rank=0),
    ]:
        with pytest.raises(OperatorError, match=r"\(4, 6\)"):
            wrong()
