"""Pooling and adaptive pooling against one device."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from drawing import WORLDS, layouts, many
from tilewise.comm import Mesh
from tilewise.errors import OperatorError
from tilewise.layout import Axes, Cover, Layout
from tilewise.ops.adaptive import adaptive_pool
from tilewise.ops.operation import Operation
from tilewise.ops.pool import PoolSpec, _Average, pool
from tilewise.testing import assert_matches_serial, ranks

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE = {
    ("max", 1): F.adaptive_max_pool1d,
    ("max", 2): F.adaptive_max_pool2d,
    ("max", 3): F.adaptive_max_pool3d,
    ("avg", 1): F.adaptive_avg_pool1d,
    ("avg", 2): F.adaptive_avg_pool2d,
    ("avg", 3): F.adaptive_avg_pool3d,
}


def values(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Random values, or such that many are equal, or −inf in most places."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    if kind == "ties":
        x = x.round().relu()
    if kind == "-inf":
        x = x.where(x > 1, -torch.inf)
    x = x.to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if kind == "last" else x


def serial_pool(spec: PoolSpec, x: torch.Tensor) -> Any:
    if spec.kind == "max":
        return MAX[spec.ndim](
            x,
            spec.kernel,
            spec.stride,
            spec.padding,
            spec.dilation,
            spec.ceil_mode,
            return_indices=spec.return_indices,
        )
    args = (spec.ceil_mode, spec.count_include_pad, spec.divisor_override)
    if spec.ndim == 1 and spec.divisor_override is not None:
        sizes = (1, *spec.kernel), (1, *spec.stride), (0, *spec.padding)
        return F.avg_pool2d(x.unsqueeze(-2), *sizes, *args).squeeze(-2)
    return AVG[spec.ndim](x, spec.kernel, spec.stride, spec.padding, *args[: 1 + spec.ndim])


def check_pool(
    mesh: Mesh, x: Layout, spec: PoolSpec, axes: Axes | None, dtype: torch.dtype, kind: str
) -> None:
    operation = pool(x, spec, axes=axes, rank=mesh.rank)
    data = values(x.shape, dtype, kind)
    assert_matches_serial(mesh, operation, lambda t: serial_pool(spec, t), [data], [x])


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, Layout, PoolSpec, Axes | None, str]:
    world = draw(st.sampled_from(WORLDS))
    ndim = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["max", "avg"]))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(ndim))
    dilation = tuple(draw(st.integers(1, 2)) if kind == "max" else 1 for _ in range(ndim))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    least = [max(d * (k - 1) + 1 - 2 * p, d) for k, d, p in zip(kernel, dilation, padding)]
    if (kind, ndim) == ("avg", 3):
        least = list(kernel)
    spec = PoolSpec.of(
        kind,
        kernel,
        ndim=ndim,
        stride=draw(st.one_of(st.none(), st.integers(1, 3))),
        padding=padding,
        dilation=dilation,
        ceil_mode=draw(st.booleans()),
        count_include_pad=draw(st.booleans()),
        divisor_override=draw(st.sampled_from([None, None, 3])) if kind == "avg" else None,
        return_indices=draw(st.booleans()) if kind == "max" else False,
    )
    space = [draw(st.integers(low, low + (8 if ndim < 3 else 4))) for low in least]
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space)[
        draw(st.integers(0, 4)) == 0 :
    ]
    x = draw(layouts(shape, world))
    axes = draw(st.one_of(st.none(), layouts(shape, world).map(lambda layout: layout.axes)))
    data = draw(st.sampled_from(["random", "ties", "-inf"] if kind == "max" else ["random"]))
    return world, x, spec, axes, data


@given(pools())
@many(120)
def test_pool_matches_one_device(case: Any) -> None:
    world, x, spec, axes, data = case
    ranks(world, check_pool, x, spec, axes, torch.float64, data)


CASES = [
    (2, "h2", (2, 3, 9, 8), {"kernel": 3, "stride": 2, "padding": 1}),
    (4, "h2 w2", (2, 3, 9, 8), {"kernel": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    (8, "h8", (1, 2, 5, 4), {"kernel": 3, "stride": 1, "padding": 1}),
    (3, "d3", (1, 2, 5, 4, 4), {"kernel": 2}),
    (6, "w6", (2, 3, 13), {"kernel": 5, "stride": 3, "padding": 2, "ceil_mode": True}),
    (4, "h2 c2", (2, 3, 9, 8), {"kernel": (9, 3), "stride": (9, 2), "padding": (0, 1)}),
    (4, "h4", (2, 3, 8, 8), {"kernel": 8}),
    (4, "n2 h2", (3, 3, 7, 7), {"kernel": 7, "stride": 1}),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("case", CASES)
def test_pool_cases(case: Any, kind: str, dtype: torch.dtype) -> None:
    world, degrees, shape, arguments = case
    if (kind, len(shape), dtype) == ("avg", 5, torch.bfloat16):
        pytest.skip("torch averages no 3-D bfloat16 on CPU")
    x = Layout.of(shape, "nc" + "dhw"[5 - len(shape) :], degrees, ranks=world)
    spec = PoolSpec.of(kind, ndim=len(shape) - 2, **arguments)
    kinds = ["random", "ties"] + ["last"] * (len(shape) == 4) + ["-inf"] * (kind == "max")
    for data in kinds:
        ranks(world, check_pool, x, spec, None, dtype, data)


def check_plain(mesh: Mesh, x: Layout, spec: PoolSpec) -> None:
    bound = pool(x, spec, rank=mesh.rank).bind(mesh, [x], layer="pool")
    assert bound.brings[0] is None or bound.brings[0].silent
    assert bound.finishes[0] is None or bound.finishes[0].silent
    local = values(x.shape, torch.float32, "ties")[x.slab(mesh.rank)]
    split, whole = local.clone().requires_grad_(), local.clone().requires_grad_()
    y, expected = bound(split), serial_pool(spec, whole)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(split.grad, whole.grad)


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_samples_and_channels_need_no_messages(kind: str) -> None:
    spec = PoolSpec.of(kind, 3, ndim=2, stride=2, padding=1, ceil_mode=True)
    ranks(4, check_plain, Layout.of((4, 6, 9, 9), "nchw", "n2 c2", ranks=4), spec)
    spec = PoolSpec.of(kind, 3, ndim=1, stride=2, padding=1)
    ranks(2, check_plain, Layout.of((4, 6, 9), "ncw", "n2", ranks=2), spec)


def check_format(mesh: Mesh, x: Layout, spec: PoolSpec) -> None:
    bound = pool(x, spec, rank=mesh.rank).bind(mesh, [x], layer="pool")
    local = torch.randn(x.local_shape(mesh.rank)).contiguous(memory_format=torch.channels_last)
    local.requires_grad_()
    y = bound(local)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.nn.functional.relu(y, inplace=True).sum().backward()
    assert local.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_channels_last_is_kept(kind: str) -> None:
    x = Layout.of((2, 6, 9, 9), "nchw", "h2", ranks=2)
    ranks(2, check_format, x, PoolSpec.of(kind, 3, ndim=2, stride=2, padding=1))


def check_step_over(mesh: Mesh, x: Layout, spec: PoolSpec) -> None:
    """Windows that read nothing but padding: torch has no right gradient for them."""
    data = values(x.shape, torch.float64, "random")
    bound = pool(x, spec, rank=mesh.rank).bind(mesh, [x], layer="pool")
    local = data[x.slab(mesh.rank)].clone().requires_grad_()
    y, _ = bound(local)
    y.sum().backward()
    slab = bound.operation.outs[0].slab(mesh.rank)
    assert torch.equal(y.detach(), serial_pool(spec, data)[0][slab])
    assert not local.grad.any()


def test_windows_that_step_over_the_input() -> None:
    spec = PoolSpec.of("max", 2, ndim=1, padding=1, dilation=3, return_indices=True)
    for degrees in ("w2", "n2"):
        ranks(2, check_step_over, Layout.of((2, 1, 2), "ncw", degrees, ranks=2), spec)


def check_adaptive(
    mesh: Mesh,
    x: Layout,
    kind: str,
    size: tuple[int | None, ...],
    indices: bool,
    axes: Axes | None,
    dtype: torch.dtype,
    data: str,
) -> None:
    operation = adaptive_pool(
        x, kind, size, return_indices=indices, axes=axes, rank=mesh.rank, layer="adaptive"
    )
    _no_whole_dim(operation, x, size)

    def serial(t: torch.Tensor) -> Any:
        extra = {"return_indices": indices} if kind == "max" else {}
        full = [old if new is None else new for old, new in zip(t.shape[2:], size)]
        return ADAPTIVE[kind, len(size)](t, full, **extra)

    assert_matches_serial(mesh, operation, serial, [values(x.shape, dtype, data)], [x])


def _no_whole_dim(operation: Operation, x: Layout, size: tuple[int | None, ...]) -> None:
    """Dims reduced to one output move no input, where the work stays."""
    need = operation.needs[0].cover
    if need.axes != x.axes:
        return
    for dim, extent in enumerate(size, start=len(x.shape) - len(size)):
        if extent == 1:
            assert need.blocks[dim] == Cover.of(x).blocks[dim]


@st.composite
def adaptives(draw: st.DrawFn) -> Any:
    world = draw(st.sampled_from(WORLDS))
    ndim = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["max", "avg"]))
    most = 9 if ndim < 3 else 5
    space = [draw(st.integers(1, most)) for _ in range(ndim)]
    size = tuple(draw(st.sampled_from([None, 1, 1, 2, 3, 4, 5, 7])) for _ in range(ndim))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *space)
    x = draw(layouts(shape, world))
    axes = draw(st.one_of(st.none(), layouts(shape, world).map(lambda layout: layout.axes)))
    indices = kind == "max" and draw(st.booleans())
    data = draw(st.sampled_from(["random", "ties", "-inf"] if kind == "max" else ["random"]))
    return world, x, kind, size, indices, axes, torch.float64, data


@given(adaptives())
@many(120)
def test_adaptive_matches_one_device(case: Any) -> None:
    world, *arguments = case
    ranks(world, check_adaptive, *arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("size", [(1, 1), (7, 7), (3, 1)])
def test_adaptive_cases(size: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    x = Layout.of((2, 3, 9, 14), "nchw", "h2 w2", ranks=4)
    for data in ("random", "last"):
        ranks(4, check_adaptive, x, kind, size, False, None, dtype, data)


def test_global_pooling_moves_no_input() -> None:
    x = Layout.of((3, 4, 64, 64), "nchw", "h2 w2", ranks=4)
    for kind in ("avg", "max"):
        spec = PoolSpec.of(kind, 64, ndim=2)
        for plan in (
            lambda rank, kind=kind: adaptive_pool(x, kind, (1, 1), rank=rank),
            lambda rank, spec=spec: pool(x, spec, rank=rank),
        ):
            operations = [plan(rank) for rank in range(4)]
            assert all(o.needs[0].cover == Cover.of(x) for o in operations)
            sizes = [p.size for ends in operations[0].inner for c in ends for p in c.blocks[0]]
            assert all(size <= 4 for size in sizes)
            assert operations[0].out.degrees == (1, 1, 1, 1)


def check_traffic(mesh: Mesh, x: Layout, kind: str) -> None:
    bound = adaptive_pool(x, kind, (1, 1), rank=mesh.rank).bind(mesh, [x], layer="head")
    local = torch.randn(x.local_shape(mesh.rank), requires_grad=True)
    with mesh.trace.record() as forth:
        y = bound(local)
    with mesh.trace.record() as back:
        y.sum().backward()
    if kind == "avg":
        assert [(event.operation, event.bytes) for event in forth] == [("sum", 4 * y.numel())]
        assert not back
    else:
        assert sum(event.bytes for event in forth) == 3 * (4 + 8) * y.numel()
        # every replica has the whole gradient of its own row
        assert not back


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_traffic_of_global_pooling(kind: str) -> None:
    ranks(4, check_traffic, Layout.of((3, 4, 64, 64), "nchw", "h2 w2", ranks=4), kind)


ERRORS = [
    ({"kernel": 4, "kind": "avg", "ndim": 3, "padding": 2}, "of 3-D average pooling must not"),
    ({"kernel": 12}, "conv9: the kernel (12, 12) with dilation (1, 1) reaches further"),
    ({"kernel": 3, "padding": 2}, "padding (=(2, 2)) must lie between 0 and half of the kernel"),
    ({"kernel": 3, "stride": 0}, "stride (=(0, 0)) must be at least 1"),
    ({"kernel": 3, "kind": "min"}, "kind (='min') must be 'max' or 'avg'"),
    ({"kernel": 3, "kind": "avg", "dilation": 2}, "dilation (=(2, 2)) must be 1 for average"),
    ({"kernel": 3, "kind": "avg", "return_indices": True}, "return_indices needs max pooling"),
    ({"kernel": 3, "kind": "avg", "divisor_override": 0}, "divisor_override (=0) must not be 0"),
    ({"kernel": 3, "ndim": 1}, "input (2, 3, 9, 9) has 4 dims, 1-D pooling takes 2 or 3"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS)
def test_pool_errors(arguments: dict[str, Any], text: str) -> None:
    spec = PoolSpec.of(**{"kind": "max", "ndim": 2} | arguments)
    x = Layout.of((2, 3, 9, 9), "chwd" if spec.ndim == 3 else "nchw", "h2", ranks=2)
    with pytest.raises(OperatorError) as caught:
        pool(x, spec, rank=0, layer="conv9")
    assert str(caught.value).startswith("conv9: ")
    assert text in str(caught.value)


def test_adaptive_errors() -> None:
    x = Layout.of((2, 3, 9, 9), "nchw", "h2", ranks=2)
    with pytest.raises(OperatorError, match=r"head: size .* must be at least 1"):
        adaptive_pool(x, "avg", (1, 0), rank=0, layer="head")
    with pytest.raises(OperatorError, match=r"head: kind .* must be 'max' or 'avg'"):
        adaptive_pool(x, "min", (1, 1), rank=0, layer="head")
    with pytest.raises(OperatorError, match=r"head: return_indices needs max"):
        adaptive_pool(x, "avg", (1, 1), return_indices=True, rank=0, layer="head")
    with pytest.raises(OperatorError, match=r"head: size .* names 1 dims"):
        adaptive_pool(x, "avg", (1,), rank=0, layer="head")
    with pytest.raises(OperatorError, match=r"head: input .* must not be empty in space"):
        adaptive_pool(Layout((2, 3, 0, 9), x.axes), "avg", (1, 1), rank=0, layer="head")


@given(st.data())
@many(60)
def test_volumes_with_channels_innermost_average_as_torch_does(data: st.DataObject) -> None:
    def each(low: int, high: int) -> list[int]:
        return [data.draw(st.integers(low, high)) for _ in range(3)]

    kernel, stride = each(1, 4), each(1, 5)
    padding = [data.draw(st.integers(0, width // 2)) for width in kernel]
    extents = [data.draw(st.integers(width, width + 6)) for width in kernel]
    divisor = data.draw(st.sampled_from([None, 3]))
    x = torch.randn(2, 3, *extents, dtype=torch.float64)
    found = x.contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    expected = x.detach().clone().requires_grad_()
    y = _Average.apply(found, kernel, stride, padding, 1 / (divisor or prod(kernel)))
    truth = F.avg_pool3d(expected, kernel, stride, padding, divisor_override=divisor)
    seed = torch.randn_like(truth)
    y.backward(seed)
    truth.backward(seed)
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(found.grad, expected.grad)
