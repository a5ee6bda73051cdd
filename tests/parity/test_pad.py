"""Padding, slicing, flipping and rolling against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from drawing import WORLDS, layouts, many
from tilewise.comm import Mesh
from tilewise.errors import OperatorError
from tilewise.layout import Axes, Layout
from tilewise.ops.pad import flip, pad, roll, slice_dim
from tilewise.testing import assert_matches_serial, ranks

PLANS: dict[str, Callable[..., Any]] = {
    "pad": pad,
    "slice": slice_dim,
    "flip": flip,
    "roll": roll,
}


def slice_serial(x: torch.Tensor, dim: int, start: Any, stop: Any, step: int) -> torch.Tensor:
    return x[(*[slice(None)] * (dim % x.dim()), slice(start, stop, step))]


SERIAL: dict[str, Callable[..., torch.Tensor]] = {
    "pad": F.pad,
    "slice": slice_serial,
    "flip": torch.flip,
    "roll": torch.roll,
}


def values(shape: tuple[int, ...], dtype: torch.dtype, last: bool = False) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x.to(dtype).contiguous(
        memory_format=torch.channels_last if last else torch.contiguous_format
    )


def check(
    mesh: Mesh,
    name: str,
    x: Layout,
    arguments: tuple[Any, ...],
    axes: Axes | None,
    dtype: torch.dtype = torch.float64,
    last: bool = False,
) -> None:
    operation = PLANS[name](x, *arguments, axes=axes, rank=mesh.rank, layer="test")
    assert_matches_serial(
        mesh,
        operation,
        lambda t: SERIAL[name](t, *arguments),
        [values(x.shape, dtype, last)],
        [x],
    )
    bound = operation.bind(mesh, [x], layer="test")
    local = values(x.shape, dtype, last)[x.slab(mesh.rank)].clone()
    before = local.clone()
    bound(local).add_(1)
    assert torch.equal(local, before), "the result must not share memory with the operand"


@st.composite
def placed(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, Layout, Axes | None]:
    world = draw(st.sampled_from(WORLDS))
    x = draw(layouts(shape, world))
    axes = draw(st.one_of(st.none(), layouts(shape, world).map(lambda layout: layout.axes)))
    return world, x, axes


@st.composite
def shapes(draw: st.DrawFn, ndim: int) -> tuple[int, ...]:
    most = 9 if ndim < 3 else 5
    space = [draw(st.integers(1, most)) for _ in range(ndim)]
    return (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space)


@st.composite
def pads(draw: st.DrawFn) -> Any:
    ndim = draw(st.integers(1, 3))
    shape = draw(shapes(ndim))
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    widths: list[int] = []
    for extent in reversed(shape[2:]):
        most = {"reflect": extent - 1, "circular": extent}.get(mode, 4)
        before = draw(st.integers(max(-2, 1 - extent), most))
        low = max(-2, 1 - extent - min(before, 0))
        high = min(most, extent + min(before, 0)) if mode == "circular" else most
        after = draw(st.integers(low, high))
        if mode == "circular":
            before = min(before, extent + min(after, 0))
        widths += [before, after]
    value = (draw(st.sampled_from([0.0, 1.5])),) if mode == "constant" else ()
    return shape, (tuple(widths), mode, *value)


@given(st.data())
@many(120)
def test_pad_matches_one_device(data: st.DataObject) -> None:
    shape, arguments = data.draw(pads())
    world, x, axes = data.draw(placed(shape))
    ranks(world, check, "pad", x, arguments, axes)


@given(st.data())
@many(60)
def test_slice_matches_one_device(data: st.DataObject) -> None:
    shape = data.draw(shapes(data.draw(st.integers(1, 3))))
    edge = st.one_of(st.none(), st.integers(-10, 10))
    arguments = (
        data.draw(st.integers(-len(shape), len(shape) - 1)),
        data.draw(edge),
        data.draw(edge),
        data.draw(st.integers(1, 4)),
    )
    world, x, axes = data.draw(placed(shape))
    ranks(world, check, "slice", x, arguments, axes)


@given(st.data())
@many(60)
def test_flip_matches_one_device(data: st.DataObject) -> None:
    shape = data.draw(shapes(data.draw(st.integers(1, 3))))
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    world, x, axes = data.draw(placed(shape))
    ranks(world, check, "flip", x, (dims,), axes)


@given(st.data())
@many(60)
def test_roll_matches_one_device(data: st.DataObject) -> None:
    shape = data.draw(shapes(data.draw(st.integers(1, 3))))
    dims = data.draw(st.lists(st.integers(-2, len(shape) - 1), min_size=1, max_size=3))
    shifts = [data.draw(st.integers(-12, 12)) for _ in dims]
    world, x, axes = data.draw(placed(shape))
    ranks(world, check, "roll", x, (shifts, dims), axes)


CASES = [
    ("pad", ((1, 2, 3, 1), "reflect")),
    ("pad", ((1, 2, 3, 1), "replicate")),
    ("pad", ((1, 2, 3, 1), "circular")),
    ("pad", ((0, 0, 2, -1), "circular")),
    ("pad", ((1, -1, -2, 2), "circular")),
    ("pad", ((1, 2, 3, 1), "constant", -1.0)),
    ("pad", ((0, 0, -3, -2), "constant")),
    ("pad", ((0, 0, 0, 0, 1, 2, 2, 1), "constant")),
    ("slice", (-2, 1, None, 2)),
    ("slice", (2, None, None, 1)),
    ("flip", ((2, 3),)),
    ("roll", ((2, -1), (2, 3))),
]


@pytest.mark.parametrize("degrees", ["h4", "h8", "h2 w2", "n2 c2", "1"])
@pytest.mark.parametrize("case", CASES)
def test_cases(case: tuple[str, Any], degrees: str) -> None:
    x = Layout.of((2, 3, 6, 5), "nchw", degrees, ranks=8)
    for dtype in (torch.float32, torch.bfloat16):
        for last in (False, True):
            ranks(8, check, case[0], x, case[1], None, dtype, last)


def test_nothing_to_fetch_is_still_a_copy() -> None:
    x = Layout.of((1, 1, 3), "ncw", "w3", ranks=3)
    ranks(3, check, "pad", x, ((0, 1), "replicate"), None)
    ranks(3, check, "pad", x, ((0, 0), "reflect"), None)
    ranks(3, check, "roll", x, (3, 2), None)
    ranks(3, check, "slice", x, (2, 0, 9, 1), None)


def check_silent(mesh: Mesh, name: str, x: Layout, arguments: tuple[Any, ...]) -> None:
    bound = PLANS[name](x, *arguments, rank=mesh.rank, layer="test").bind(mesh, [x], layer="t")
    with mesh.trace.record() as events:
        bound(torch.randn(x.local_shape(mesh.rank), requires_grad=True)).sum().backward()
    assert not events


def test_unsplit_dims_need_no_messages() -> None:
    x = Layout.of((4, 4, 6, 5), "nchw", "n2 c2", ranks=4)
    for name, arguments in CASES:
        if name != "pad" or len(arguments[0]) < 8:
            ranks(4, check_silent, name, x, arguments)


def check_format(mesh: Mesh, name: str, x: Layout, arguments: tuple[Any, ...]) -> None:
    bound = PLANS[name](x, *arguments, rank=mesh.rank, layer="test").bind(mesh, [x], layer="t")
    local = torch.randn(x.local_shape(mesh.rank)).contiguous(memory_format=torch.channels_last)
    assert bound(local).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("case", CASES)
def test_channels_last_is_kept(case: tuple[str, Any]) -> None:
    ranks(2, check_format, case[0], Layout.of((2, 3, 8, 8), "nchw", "h2", ranks=2), case[1])


X = Layout.of((2, 3, 6, 5), "nchw", "h2", ranks=2)
ERRORS: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (pad, ((1, 1), "mirror"), "mode (='mirror') must be one of ('constant', 'reflect'"),
    (pad, ((1, 1, 1), "constant"), "pads (=(1, 1, 1)) must be pairs of (before, after)"),
    (pad, ((1, 1) * 5, "constant"), "for at most the 4 dims"),
    (pad, ((1, 1), "reflect"), "of mode 'reflect' must name the 1, 2 or 3 dims of space"),
    (pad, ((5, 0, 0, 0), "reflect"), "pads (5, 0) of dim 3 must be at most 4 for mode 'reflect'"),
    (pad, ((0, 0, 0, 7), "circular"), "pads (0, 7) of dim 2 must be at most 6 for mode 'circ"),
    (pad, ((-3, -3), "constant"), "pads (-3, -3) of dim 3 crop more than its extent (=5)"),
    (slice_dim, (4, 0, 1), "dim (=4) must lie between -4 and 3"),
    (slice_dim, (2, 0, 1, -1), "step (=-1) must be at least 1; use flip"),
    (flip, ((1, -3),), "dims (=(1, 1)) must name each dim once"),
    (roll, (1,), "dims (=None) must be given for an input (2, 3, 6, 5)"),
    (roll, ((1, 2), 3), "shifts (=(1, 2)) and dims (=(3,)) must be as many"),
]


@pytest.mark.parametrize(("plan", "arguments", "text"), ERRORS)
def test_errors(plan: Callable[..., Any], arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(OperatorError) as caught:
        plan(X, *arguments, rank=0, layer="enc.pad1")
    assert str(caught.value).startswith("enc.pad1: ")
    assert text in str(caught.value)
