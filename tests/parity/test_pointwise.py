"""Element-wise operators with broadcasting against one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawing import WORLDS, layouts, many
from tilewise.comm import Mesh
from tilewise.errors import OperatorError
from tilewise.layout import Axes, Axis, Cover, Layout, Move
from tilewise.ops.pointwise import pointwise
from tilewise.testing import assert_matches_serial, ranks

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "lerp": torch.lerp,
    "addcmul": torch.addcmul,
}
OPERANDS = {"relu": 1, "sigmoid": 1, "lerp": 3, "addcmul": 3}


def check(
    mesh: Mesh, name: str, operands: list[Layout], axes: Axes | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    whole = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(dtype) for x in operands
    ]
    operation = pointwise(operands, FUNCTIONS[name], axes=axes)
    if axes is not None:
        assert operation.out.axes == axes
    assert_matches_serial(mesh, operation, FUNCTIONS[name], whole, operands)


@st.composite
def broadcasts(draw: st.DrawFn) -> tuple[int, str, list[Layout], Axes | None, torch.dtype]:
    world = draw(st.sampled_from(WORLDS))
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    count = OPERANDS.get(name, 2)
    shapes = []
    for _ in range(count):
        own = [draw(st.sampled_from([extent, extent, 1])) for extent in shape]
        shapes.append(own[draw(st.sampled_from([0, 0, *range(len(own) + 1)])) :])
    out = torch.broadcast_shapes(*shapes)
    axes = draw(st.none() | layouts(out, world).map(lambda layout: layout.axes))
    return world, name, [draw(layouts(one, world)) for one in shapes], axes, dtype


@many(200)
@given(broadcasts())
def test_pointwise(case: tuple[int, str, list[Layout], Axes | None, torch.dtype]) -> None:
    ranks(case[0], check, *case[1:])


CUTS = [
    [Axis(4, 0)],
    [Axis(2, 0), Axis(2, 1)],
    [Axis(2, 2), Axis(2, 3)],
    [Axis(4, 1)],
    [Axis(4)],
    [Axis(2, 3), Axis(2)],
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "small",
    [(4, 8, 1, 1), (1, 8, 1, 1), (8, 1, 1), (1, 1, 6), (6,), (), (4, 1, 6, 6), (1, 1, 1, 1)],
)
def test_scales_of_an_activation(
    cut: list[Axis], dtype: torch.dtype, small: tuple[int, ...]
) -> None:
    x = Layout((4, 8, 6, 6), cut)
    ranks(4, check, "mul", [x, Layout.replicated(small, ranks=4)], None, dtype)


@pytest.mark.parametrize("cut", CUTS)
def test_squeeze_and_excitation_lies_with_its_activation(cut: list[Axis]) -> None:
    """A scale cut like x in the dims that both have needs no message forward."""
    x = Layout((4, 8, 6, 6), cut)
    scale = Layout((4, 8, 1, 1), x.axes.relabel({2: -1, 3: -1}))
    operation = pointwise([x, scale], torch.mul)
    assert operation.out == x
    assert all(Move(Cover.of(a), n.cover).local for a, n in zip([x, scale], operation.needs))


@pytest.mark.parametrize("world", [2, 3, 8])
def test_extents_of_one_on_cut_dims(world: int) -> None:
    for dim in range(3):
        x = Layout((2, 1, 3), [Axis(world, dim)])
        ranks(world, check, "add", [x, Layout((2, 4, 3), [Axis(world, 1)])], None, torch.float64)
        ranks(world, check, "add", [x, x], None, torch.float64)


def test_the_result_follows_the_largest_operand_and_the_first_of_equals() -> None:
    a, b, c = Layout((3, 4), [Axis(2, 0)]), Layout((3, 4), [Axis(2, 1)]), Layout((4,), [Axis(2)])
    assert pointwise([c, a, b], torch.add).out == a
    assert pointwise([b, a], torch.add).out == b


def check_kept(mesh: Mesh) -> None:
    """dtype rules of scalars and the memory format are torch's."""
    x = Layout((2, 4, 6, 5), [Axis(2, 2)])
    local = torch.randn(x.local_shape(mesh.rank)).to(memory_format=torch.channels_last)
    for shape, dtype in [((), torch.float64), ((4, 1, 1), torch.float32)]:
        small = Layout.replicated(shape, ranks=mesh.size)
        bound = pointwise([x, small], torch.mul).bind(mesh, [x, small], layer="test")
        found = bound(local, torch.ones(shape, dtype=dtype))
        assert found.dtype == torch.float32
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_dtype_and_memory_format_are_kept() -> None:
    ranks(2, check_kept)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OperatorError, match=r"residual: shapes \(2, 3\) and \(2, 4\)"):
        pointwise([Layout((2, 3)), Layout((2, 4))], torch.add, layer="residual")
