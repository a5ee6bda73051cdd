"""Linear layers and matrix products against one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from drawing import WORLDS, degrees, layouts, many
from tilewise.comm import Mesh
from tilewise.errors import OperatorError
from tilewise.layout import Axes, Axis, Cover, Degrees, Layout, Move
from tilewise.ops.linear import addmm, bmm, linear, matmul
from tilewise.testing import assert_matches_serial, ranks


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def check_linear(mesh: Mesh, x: Layout, filters: int, how: dict) -> None:
    kind, bias, dtype = how["kind"], how["bias"], how["dtype"]
    channels = x.shape[-1]
    weight = (filters, channels) if kind == "linear" else (channels, filters)
    rest = {"dims": how["dims"], "degrees": how["degrees"]}
    if kind == "linear":
        operation = linear(x, weight, rank=mesh.rank, bias=bias, **rest)
        serial = F.linear
    else:
        operation, serial, bias = matmul(x, weight, **rest), torch.matmul, False
    operands = tensors(x.shape, weight, *[(filters,)] * bias, dtype=dtype)
    lie = [x, *(Layout.replicated(t.shape, ranks=mesh.size) for t in operands[1:])]
    assert operation.out == Layout.of(
        (*x.shape[:-1], filters), how["dims"], how["degrees"], ranks=mesh.size
    )
    assert_matches_serial(mesh, operation, serial, operands, lie)


@st.composite
def linears(draw: st.DrawFn) -> tuple[int, Layout, int, dict]:
    world = draw(st.sampled_from(WORLDS))
    dims = draw(st.sampled_from(["c", "nc", "n.c", "nwc", "nhwc", "n..c", "ndhwc"]))
    shape = [draw(st.integers(1, 3 if len(dims) > 3 else 7)) for _ in dims[:-1]]
    shape.append(draw(st.integers(1, 9)))
    how = {
        "dims": dims,
        "degrees": draw(degrees(world, dims.replace(".", "") + "f")),
        "kind": draw(st.sampled_from(["linear", "linear", "matmul"])),
        "bias": draw(st.sampled_from([True, True, False])),
        "dtype": draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
    }
    return world, draw(layouts(shape, world)), draw(st.integers(1, 9)), how


@many(200)
@given(linears())
def test_linear(case: tuple[int, Layout, int, dict]) -> None:
    world, x, filters, how = case
    ranks(world, check_linear, x, filters, how)


@pytest.mark.parametrize("text", ["c8", "f8", "c2 f4", "c4 f2", "n2 c2 f2"])
def test_more_parts_than_channels_or_filters(text: str) -> None:
    how = {
        "dims": "nc",
        "degrees": Degrees.parse(text),
        "kind": "linear",
        "bias": True,
        "dtype": torch.float64,
    }
    for channels, filters in [(3, 5), (1, 2), (2, 1)]:
        ranks(8, check_linear, Layout((3, channels), [Axis(8, 1)]), filters, how)


@pytest.mark.parametrize("text", ["n4", "c4", "f4", "c2 f2"])
def test_bfloat16(text: str) -> None:
    # Large enough that no slab's largest number is near zero: partial sums are rounded to 8 bits.
    how = {
        "dims": "nc",
        "degrees": Degrees.parse(text),
        "kind": "linear",
        "bias": True,
        "dtype": torch.bfloat16,
    }
    ranks(4, check_linear, Layout((16, 64), [Axis(4, 0)]), 32, how)


@pytest.mark.parametrize("text", ["c8", "f8", "c2 f4"])
def test_layers_of_equal_degrees_meet_without_a_move(text: str) -> None:
    x = Layout.of((4, 16), "nc", text, ranks=8)
    operation = linear(x, (24, 16), dims="nc", degrees=Degrees.parse(text), rank=0)
    assert operation.out == Layout.of((4, 24), "nc", text, ranks=8)
    gathers = not Move(Cover.of(x), operation.needs[0].cover).local
    scatters = not Move(operation.gives[0], Cover.of(operation.out)).local
    assert (gathers, scatters) == {"c8": (False, True), "f8": (True, False)}.get(text, (True, True))
    sums = Move(operation.gives[0], Cover.of(operation.out))
    for rank in range(8):
        peers = {message.peer for message in sums.receives(rank)}
        assert len(peers) == Degrees.parse(text).c


def check_addmm(mesh: Mesh, x: Layout, bias: tuple[int, ...], filters: int, text: str) -> None:
    operands = tensors(bias, x.shape, (x.shape[1], filters))
    operation = addmm(
        bias,
        x,
        operands[2].shape,
        degrees=Degrees.parse(text),
        rank=mesh.rank,
        beta=0.5,
        alpha=2.0,
    )
    lie = [Layout.replicated(t.shape, ranks=mesh.size) for t in operands]
    lie[1] = x

    def serial(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(bias, x, weight, beta=0.5, alpha=2.0)

    assert_matches_serial(mesh, operation, serial, operands, lie)


@pytest.mark.parametrize("bias", [(), (1,), (6,), (5, 1), (1, 6), (5, 6)])
@pytest.mark.parametrize("text", ["n2 c2", "c2 f2", "f4"])
def test_addmm(bias: tuple[int, ...], text: str) -> None:
    ranks(4, check_addmm, Layout((5, 7), [Axis(4, 1)]), bias, 6, text)


def check_bmm(mesh: Mesh, a: Layout, b: Layout, axes: Axes | None) -> None:
    operation = bmm(a, b, axes=axes)
    assert_matches_serial(mesh, operation, torch.matmul, tensors(a.shape, b.shape), [a, b])


@st.composite
def products(draw: st.DrawFn) -> tuple[int, Layout, Layout, Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    sizes = st.integers(1, 5)
    batch = draw(st.lists(sizes, max_size=2))
    rows, inner, columns = draw(sizes), draw(sizes), draw(sizes)
    shapes = []
    for matrix in ([rows, inner], [inner, columns]):
        own = [draw(st.sampled_from([extent, 1])) for extent in batch]
        shapes.append([*own[draw(st.integers(0, len(own))) :], *matrix])
    if draw(st.integers(0, 3)) == 0:
        shapes[0] = [inner]
    elif draw(st.integers(0, 3)) == 0:
        shapes[1] = [inner]
    out = torch.matmul(torch.ones(shapes[0]), torch.ones(shapes[1])).shape
    axes = draw(st.none() | layouts(out, world).map(lambda layout: layout.axes))
    return world, draw(layouts(shapes[0], world)), draw(layouts(shapes[1], world)), axes


@many(120)
@given(products())
def test_product_of_two_activations(case: tuple[int, Layout, Layout, Axes | None]) -> None:
    world, *rest = case
    ranks(world, check_bmm, *rest)


def test_batch_and_row_cuts_stay_and_the_summed_dim_is_made_whole() -> None:
    a = Layout((6, 4, 8), [Axis(2, 0), Axis(2, 1), Axis(2, 2)])
    b = Layout((6, 8, 3), [Axis(2, 0), Axis(4)])
    operation = bmm(a, b)
    assert operation.out == Layout((6, 4, 3), [Axis(2, 0), Axis(2, 1), Axis(2)])
    assert Move(Cover.of(b), operation.needs[1].cover).local


def test_degrees_without_a_dim_are_refused() -> None:
    x = Layout((8, 512), [Axis(2, 0)])
    with pytest.raises(
        OperatorError, match=r"fc: has no height to cut by h2 \(input 8×512\); use n, c or f"
    ):
        linear(x, (10, 512), dims="nc", degrees=Degrees(h=2), rank=0, layer="fc")
    with pytest.raises(OperatorError, match="has no sample to cut by n2"):
        linear(Layout((512,), [Axis(2, 0)]), (10, 512), dims="c", degrees=Degrees(n=2), rank=0)


def test_illegal_shapes_are_refused() -> None:
    x = Layout((8, 5))
    with pytest.raises(OperatorError, match="last dim"):
        linear(x, (10, 6), dims="nc", degrees=Degrees(), rank=0)
    with pytest.raises(OperatorError, match="must name the 2 dims"):
        linear(x, (10, 5), dims="nhc", degrees=Degrees(), rank=0)
    with pytest.raises(OperatorError, match="must broadcast to"):
        addmm((3, 8, 6), x, (5, 6), degrees=Degrees(), rank=0)
    with pytest.raises(OperatorError, match="must equal"):
        bmm(x, Layout((6, 2)))
