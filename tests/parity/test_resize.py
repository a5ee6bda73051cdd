"""Interpolation and pixel shuffling against one device."""

from __future__ import annotations

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
from tilewise.ops.resize import pixel_shuffle, pixel_unshuffle, resize
from tilewise.ops.sampling import Sampling
from tilewise.testing import assert_matches_serial, ranks

MODES = {
    1: ["nearest", "nearest-exact", "linear"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic"],
    3: ["nearest", "nearest-exact", "trilinear"],
}


def values(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    format = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)] if last else None
    return x.to(dtype).contiguous(memory_format=format or torch.contiguous_format)


def check(
    mesh: Mesh,
    x: Layout,
    mode: str,
    size: tuple[int, ...] | None,
    scales: tuple[float, ...] | None,
    corners: bool,
    axes: Axes | None,
    dtype: torch.dtype = torch.float64,
    last: bool = False,
) -> None:
    operation = resize(
        x, mode, size=size, scales=scales, align_corners=corners, axes=axes, rank=mesh.rank
    )

    def serial(t: torch.Tensor) -> torch.Tensor:
        extra = {} if mode.startswith("nearest") else {"align_corners": corners}
        return F.interpolate(t, size=size, scale_factor=scales, mode=mode, **extra)

    assert_matches_serial(mesh, operation, serial, [values(x.shape, dtype, last)], [x])


@st.composite
def resizes(draw: st.DrawFn) -> Any:
    world = draw(st.sampled_from(WORLDS))
    ndim = draw(st.integers(1, 3))
    most = 9 if ndim < 3 else 5
    space = tuple(draw(st.integers(1, most)) for _ in range(ndim))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space)
    mode = draw(st.sampled_from(MODES[ndim]))
    corners = not mode.startswith("nearest") and draw(st.booleans())
    size: Any = None
    scales: Any = None
    if draw(st.booleans()):
        size = tuple(draw(st.integers(1, 2 * most)) for _ in range(ndim))
    else:
        # where a factor leaves the extent as it is, torch's nearest kernels disagree
        factors = st.sampled_from([0.4, 0.5, 1.0, 1.3, 1.7, 2.0, 2.5, 3.0])
        scales = tuple(
            draw(
                factors.filter(
                    lambda s, e=extent: (
                        int(e * s) >= 1 and (s == 1 or int(e * s) != e or mode != "nearest")
                    )
                )
            )
            for extent in space
        )
    x = draw(layouts(shape, world))
    axes = draw(st.one_of(st.none(), layouts(shape, world).map(lambda layout: layout.axes)))
    return world, x, mode, size, scales, corners, axes


@given(resizes())
@many(120)
def test_resize_matches_one_device(case: Any) -> None:
    world, *arguments = case
    ranks(world, check, *arguments)


CASES = [
    ((2, 3, 7, 6), "bilinear", None, (2.0, 2.0), False),
    ((2, 3, 7, 6), "bilinear", (14, 12), None, True),
    ((2, 3, 7, 6), "bicubic", (5, 17), None, False),
    ((2, 3, 7, 6), "nearest", None, (2.0, 2.0), False),
    ((2, 3, 7, 6), "nearest-exact", (3, 11), None, False),
    ((2, 3, 4, 7, 6), "trilinear", None, (2.0, 2.0, 2.0), False),
    ((2, 3, 4, 7, 6), "nearest", (3, 9, 6), None, False),
]


@pytest.mark.parametrize("degrees", ["h2", "h8", "h2 w2", "n2 c2", "h4 c2"])
@pytest.mark.parametrize("case", CASES)
def test_resize_cases(case: Any, degrees: str) -> None:
    shape, *arguments = case
    x = Layout.of(shape, "nc" + "dhw"[5 - len(shape) :], degrees, ranks=8)
    for dtype in (torch.float32, torch.bfloat16):
        for last in (False, True):
            ranks(8, check, x, *arguments, None, dtype, last)


def test_nearest_chooses_what_torch_chooses() -> None:
    """Against 2-D: on ties, some of torch's 1-D and 3-D kernels round otherwise than their own
    backward does."""
    for extent in (1, 2, 3, 7, 55, 100, 123):
        ramp = torch.arange(extent, dtype=torch.float32).view(1, 1, 1, -1)
        cases = [(n, None) for n in (1, 2, 5, 41, 82, 94, 110, 123, 300)]
        factors = [(int(extent * f), f) for f in (0.3, 0.7, 1.1, 1.3, 1.7, 2.2, 3.3)]
        cases += [(n, f) for n, f in factors if n not in (0, extent)]
        for outputs, factor in cases:
            size = {"size": (1, outputs)} if factor is None else {"scale_factor": (1, factor)}
            for mode in ("nearest", "nearest-exact"):
                sampling = Sampling(mode, extent, outputs, factor=factor)
                index, _ = sampling.taps(0, outputs, torch.float32)
                expected = F.interpolate(ramp, **size, mode=mode).long()
                assert torch.equal(index[0], expected[0, 0, 0]), sampling


def check_local(mesh: Mesh, x: Layout, size: tuple[int, ...], last: bool) -> None:
    """Nothing travels for samples and channels; the memory format stays."""
    bound = resize(x, "bilinear", size=size, rank=mesh.rank).bind(mesh, [x], layer="up")
    format = torch.channels_last if last else torch.contiguous_format
    local = torch.randn(x.local_shape(mesh.rank)).contiguous(memory_format=format)
    with mesh.trace.record() as events:
        y = bound(local.requires_grad_())
        torch.relu_(y).sum().backward()
    assert y.is_contiguous(memory_format=format)
    if x.degrees[2:] == (1, 1):
        assert not events


@pytest.mark.parametrize("degrees", ["n2 c2", "h2 w2"])
def test_messages_and_memory_format(degrees: str) -> None:
    x = Layout.of((4, 4, 6, 6), "nchw", degrees, ranks=4)
    for last in (False, True):
        ranks(4, check_local, x, (12, 9), last)


def check_shuffle(mesh: Mesh, x: Layout, up: bool, factor: int, axes: Axes | None) -> None:
    plan, serial = (pixel_shuffle, F.pixel_shuffle) if up else (pixel_unshuffle, F.pixel_unshuffle)
    operation = plan(x, factor, axes=axes, rank=mesh.rank)
    data = values(x.shape, torch.float64, False)
    assert_matches_serial(mesh, operation, lambda t: serial(t, factor), [data], [x])


@given(st.data())
@many(60)
def test_shuffles_match_one_device(data: st.DataObject) -> None:
    world = data.draw(st.sampled_from(WORLDS))
    up, factor = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    few = st.integers(1, 4)
    shape = [data.draw(few) for _ in range(4)][data.draw(st.booleans()) :]
    for dim in (-3,) if up else (-2, -1):
        shape[dim] *= factor**2 if up else factor
    x = data.draw(layouts(shape, world))
    axes = data.draw(st.one_of(st.none(), layouts(shape, world).map(lambda layout: layout.axes)))
    ranks(world, check_shuffle, x, up, factor, axes)


X = Layout.of((2, 3, 9, 9), "nchw", "h2", ranks=2)
ERRORS = [
    ("cubic", {"size": (2, 2)}, "mode (='cubic') for an input (2, 3, 9, 9) must be one of"),
    ("trilinear", {"size": (2, 2)}, "mode (='trilinear') for an input (2, 3, 9, 9)"),
    ("bilinear", {"size": (2, 0)}, "size (=(2, 0)) and the input's space (9, 9) must be at least"),
    ("bilinear", {"scales": (2.0, 0.1)}, "size (=(18, 0)) and the input's space (9, 9)"),
    ("bilinear", {}, "size (=None) or scales (=None) must be given"),
    ("bilinear", {"size": (2,)}, "must have one entry for each of the 2 dims of space"),
    ("bilinear", {"size": (2, 2), "antialias": True}, "antialias (=True) is not supported"),
    ("nearest", {"size": (2, 2), "align_corners": True}, "align_corners (=True) needs an interpol"),
]


@pytest.mark.parametrize(("mode", "arguments", "text"), ERRORS)
def test_resize_errors(mode: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(OperatorError) as caught:
        resize(X, mode, **arguments, rank=0, layer="up2")
    assert str(caught.value).startswith("up2: ")
    assert text in str(caught.value)


def test_shuffle_errors() -> None:
    with pytest.raises(OperatorError, match=r"ps: channels \(=3\) must be divisible by the square"):
        pixel_shuffle(X, 2, rank=0, layer="ps")
    with pytest.raises(OperatorError, match=r"ps: height \(=9\) and width \(=9\) must be divisib"):
        pixel_unshuffle(X, 2, rank=0, layer="ps")
    with pytest.raises(OperatorError, match=r"ps: factor \(=0\) must be at least 1"):
        pixel_shuffle(X, 0, rank=0, layer="ps")
    with pytest.raises(OperatorError, match=r"ps: input .* has 2 dims"):
        pixel_shuffle(Layout((4, 4)), 2, rank=0, layer="ps")
