"""Normalisations against torch on one device, however the input is cut."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from drawing import WORLDS, layouts, many
from tilewise.comm import Chain, Mesh
from tilewise.comm.formats import formatted
from tilewise.errors import OperatorError
from tilewise.layout import REPLICA, Axis, Layout, block
from tilewise.ops.batch_norm import batch_norm
from tilewise.ops.group_norm import group_norm
from tilewise.ops.norm import instance_norm, layer_norm
from tilewise.ops.summary import moments_of
from tilewise.testing import assert_close, assert_matches_serial, ranks

FLOATS = st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])


def values(shape: Any, seed: int, dtype: torch.dtype, *, last: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return out.contiguous(memory_format=formats[len(shape)]) if last and len(shape) > 3 else out


def replicated(mesh: Mesh, *tensors: Tensor) -> list[Layout]:
    return [Layout.replicated(t.shape, ranks=mesh.size) for t in tensors]


@st.composite
def cases(draw: st.DrawFn, low: int = 2, high: int = 5, multiple: int = 1) -> dict[str, Any]:
    """Draw a shape, how it lies and how to compute on it."""
    world = draw(st.sampled_from(WORLDS))
    ndim = draw(st.integers(low, high))
    shape = [draw(st.integers(1, 7 if ndim < 4 else 4)) for _ in range(ndim)]
    shape[1] *= multiple
    x = draw(layouts(shape, world))
    work = draw(st.one_of(st.none(), layouts(shape, world)))
    return {
        "world": world,
        "x": x,
        "axes": None if work is None else work.axes,
        "dtype": draw(FLOATS),
        "last": draw(st.booleans()),
    }


TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 6e-2}


def conditioned(case: dict[str, Any], count: int) -> dict[str, Any]:
    """Use float64 where a statistic has few values: gradients are then differences of nothing."""
    return case if count >= 8 else case | {"dtype": torch.float64}


# batch norm


def pieces(x: Tensor, degrees: tuple[int, ...], dims: tuple[int, ...], function: Any) -> Tensor:
    """Apply `function` to each block of x along dims and put the results together."""
    if not dims:
        return function(x) if x.numel() else x
    dim = dims[0]
    cuts = [block(x.shape[dim], degrees[dim], index) for index in range(degrees[dim])]
    parts = [x.narrow(dim, a, b - a) for a, b in cuts]
    return torch.cat([pieces(part, degrees, dims[1:], function) for part in parts], dim)


def serial_batch_norm(x: Tensor, *weights: Tensor, work: Layout, statistics: str) -> Tensor:
    """Normalise on one device each set of samples and space that shares statistics."""
    apart = {"global": (), "spatial": (0,), "local": (0, *range(2, x.dim()))}[statistics]
    return pieces(
        x, work.degrees, apart, lambda part: F.batch_norm(part, None, None, *weights, training=True)
    )


def run_batch_norm(mesh: Mesh, case: dict[str, Any], affine: bool, statistics: str) -> None:
    x, dtype = case["x"], case["dtype"]
    operation = batch_norm(
        x,
        affine=affine,
        track=False,
        statistics=statistics,
        axes=case["axes"],
        rank=mesh.rank,
    )
    operands = [values(x.shape, 0, dtype, last=case["last"])]
    operands += [values(x.shape[1:2], seed, dtype) for seed in (1, 2)] * affine
    assert_matches_serial(
        mesh,
        operation,
        lambda *t: serial_batch_norm(*t, work=operation.out, statistics=statistics),
        operands,
        [x, *replicated(mesh, *operands[1:])],
        tolerance=TOLERANCE[dtype],
    )


def legal(case: dict[str, Any], **attributes: Any) -> bool:
    try:
        batch_norm(case["x"], axes=case["axes"], rank=0, **attributes)
    except OperatorError:
        return False
    return True


@many(60)
@given(cases(), st.booleans(), st.sampled_from(["global", "global", "spatial", "local"]))
def test_batch_norm(case: dict[str, Any], affine: bool, statistics: str) -> None:
    assume(legal(case, statistics=statistics))
    count = prod(case["x"].shape) // case["x"].shape[1] if statistics == "global" else 0
    ranks(case["world"], run_batch_norm, conditioned(case, count), affine, statistics)


def run_steps(
    mesh: Mesh, case: dict[str, Any], momentum: float | None, statistics: str, steps: int
) -> list[Tensor]:
    """Train and evaluate for some steps; the running statistics must follow one device's."""
    x, dtype, axes = case["x"], case["dtype"], case["axes"]
    attributes = {"momentum": momentum, "axes": axes, "rank": mesh.rank, "affine": False}
    train = batch_norm(x, statistics=statistics, **attributes)
    evaluate = batch_norm(x, training=False, **attributes)
    buffer_layout = Layout(x.shape[1:2], train.needs[1].cover.axes)
    slab = buffer_layout.slab(mesh.rank)
    sources = [x, buffer_layout, buffer_layout]
    number = torch.zeros((), dtype=torch.long)
    if momentum is None:
        sources.append(Layout.replicated((), ranks=mesh.size))
    bound = [op.bind(mesh, sources, layer="test") for op in (train, evaluate)]
    mean, var = torch.zeros(x.shape[1], dtype=dtype), torch.ones(x.shape[1], dtype=dtype)
    local_mean, local_var = mean[slab].clone(), var[slab].clone()
    for step in range(steps):
        whole = values(x.shape, step, dtype) * (step + 1) + 3 * step
        number += 1
        rest = [number] if momentum is None else []
        factor = 1.0 / (step + 1) if momentum is None else momentum
        for one, training in zip(bound, (True, False)):
            expected = F.batch_norm(whole, mean, var, None, None, training, factor)
            found = one(whole[x.slab(mesh.rank)], local_mean, local_var, *rest)
            if not training or statistics == "global":
                out = train.out.slab(mesh.rank)
                assert_close(found, expected[out], "output", tolerance=TOLERANCE[dtype])
        assert_close(local_mean, mean[slab], "running mean")
        assert_close(local_var, var[slab], "running var")
    return [local_mean, local_var]


@many(60)
@given(cases(), st.sampled_from([None, 0.1, 1.0]), st.sampled_from(["global", "spatial", "local"]))
def test_running_statistics(case: dict[str, Any], momentum: float | None, statistics: str) -> None:
    assume(legal(case, statistics=statistics))
    case = conditioned(case, 0)
    found = ranks(case["world"], run_steps, case, momentum, statistics, 3)
    work = Layout(case["x"].shape, case["x"].axes if case["axes"] is None else case["axes"])
    for rank, (mean, var) in enumerate(found):
        for other in range(rank):
            if work.coords(rank)[1] == work.coords(other)[1]:
                assert torch.equal(mean, found[other][0])
                assert torch.equal(var, found[other][1])


@pytest.mark.parametrize("statistics", ["global", "spatial"])
def test_one_value_is_refused(statistics: str) -> None:
    x = Layout((2, 3, 1), [Axis(2, 0)])
    assert statistics == "global" or not legal({"x": x, "axes": None}, statistics=statistics)
    one = Layout((1, 3, 1), [Axis(2, 1)])
    with pytest.raises(OperatorError, match="more than 1 value per channel"):
        batch_norm(one, statistics=statistics, rank=0)
    with pytest.raises(OperatorError, match="running statistics"):
        batch_norm(x, training=False, track=False, rank=0)
    with pytest.raises(OperatorError, match="one of global"):
        batch_norm(x, statistics="none", rank=0)


def run_counted(mesh: Mesh, dims: list[tuple[int, int]], statistics: str) -> tuple[int, int]:
    """Return the numbers of messages that one norm sends forward and backward."""
    x = Layout((4, 6, 8, 8), [Axis(size, dim) for size, dim in dims])
    if statistics == "instance":
        operation = instance_norm(x, track=True, rank=mesh.rank)
    else:
        operation = batch_norm(x, affine=False, statistics=statistics, rank=mesh.rank)
    buffer = Layout((6,), operation.needs[1].cover.axes)
    bound = operation.bind(mesh, [x, buffer, buffer], layer="test")
    slab = values(x.shape, 0, torch.float32)[x.slab(mesh.rank)].clone().requires_grad_()
    chain = Chain()
    chain.start()
    with mesh.trace.record() as forward:
        y = bound(slab, *(torch.ones(buffer.local_shape(mesh.rank)) for _ in range(2)), chain=chain)
    assert chain.token is not None
    with mesh.trace.record() as backward:
        (y.sum() + 0.0 * chain.token).backward()
    return len(forward), len(backward)


@pytest.mark.parametrize(
    ("dims", "statistics", "expected"),
    [
        ([(2, 2)], "global", (1, 1)),
        ([(2, 1)], "global", (0, 0)),
        ([(2, REPLICA)], "global", (0, 0)),
        ([(2, 2)], "local", (1, 0)),
        ([(2, 0), (2, 2)], "global", (3, 3)),
        ([(2, 0), (2, 2)], "spatial", (3, 1)),
        ([(2, 0)], "instance", (1, 0)),
        ([(2, 2)], "instance", (1, 1)),
        ([(2, 0), (2, 2)], "instance", (3, 1)),
    ],
)
def test_messages(dims: Any, statistics: str, expected: tuple[int, int]) -> None:
    world = 2 ** len(dims)
    assert ranks(world, run_counted, dims, statistics) == [expected] * world


# layer, instance and group norm


def run_layer_norm(mesh: Mesh, case: dict[str, Any], count: int, weight: bool, bias: bool) -> None:
    x, dtype = case["x"], case["dtype"]
    normal = x.shape[-count:]
    operation = layer_norm(x, normal, weight=weight, bias=bias, axes=case["axes"], rank=mesh.rank)
    operands = [values(x.shape, 0, dtype, last=case["last"])]
    operands += [values(normal, seed, dtype) for seed, has in ((1, weight), (2, bias)) if has]

    def serial(x: Tensor, *rest: Tensor) -> Tensor:
        given = list(rest)
        w = given.pop(0) if weight else None
        return F.layer_norm(x, normal, w, *given)

    assert_matches_serial(
        mesh,
        operation,
        serial,
        operands,
        [x, *replicated(mesh, *operands[1:])],
        tolerance=TOLERANCE[dtype],
    )


@many(60)
@given(cases(), st.integers(1, 3), st.booleans(), st.booleans())
def test_layer_norm(case: dict[str, Any], count: int, weight: bool, bias: bool) -> None:
    shape = case["x"].shape
    assume(prod(shape[-count:]) > 1)  # of a single value all is zero, and rounding is all there is
    case = conditioned(case, prod(shape[-count:]))
    ranks(case["world"], run_layer_norm, case, min(count, len(shape)), weight, bias)


def run_group_norm(mesh: Mesh, case: dict[str, Any], groups: int, weight: bool, bias: bool) -> None:
    x, dtype = case["x"], case["dtype"]
    operation = group_norm(x, groups, weight=weight, bias=bias, axes=case["axes"], rank=mesh.rank)
    operands = [values(x.shape, 0, dtype, last=case["last"])]
    operands += [values(x.shape[1:2], s, dtype) for s, has in ((1, weight), (2, bias)) if has]

    def serial(x: Tensor, *rest: Tensor) -> Tensor:
        given = list(rest)
        w = given.pop(0) if weight else None
        return F.group_norm(x, groups, w, *given)

    assert_matches_serial(
        mesh,
        operation,
        serial,
        operands,
        [x, *replicated(mesh, *operands[1:])],
        tolerance=TOLERANCE[dtype],
    )


@many(60)
@given(st.data(), st.integers(1, 4), st.sampled_from([(True, True), (True, False), (False, False)]))
def test_group_norm(data: st.DataObject, groups: int, affine: tuple[bool, bool]) -> None:
    weight, bias = affine  # torch itself cannot differentiate a bias without a weight
    case = data.draw(cases(multiple=groups))
    shape = case["x"].shape
    assume(prod(shape) > shape[0] * groups)
    case = conditioned(case, prod(shape) // (shape[0] * groups))
    ranks(case["world"], run_group_norm, case, groups, weight, bias)


def run_instance_norm(mesh: Mesh, case: dict[str, Any], affine: bool) -> None:
    x, dtype = case["x"], case["dtype"]
    operation = instance_norm(x, affine=affine, axes=case["axes"], rank=mesh.rank)
    operands = [values(x.shape, 0, dtype, last=case["last"])]
    operands += [values(x.shape[1:2], seed, dtype) for seed in (1, 2)] * affine

    def serial(x: Tensor, *weights: Tensor) -> Tensor:
        return F.instance_norm(x, None, None, *weights)

    assert_matches_serial(
        mesh,
        operation,
        serial,
        operands,
        [x, *replicated(mesh, *operands[1:])],
        tolerance=TOLERANCE[dtype],
    )


def run_instance_steps(mesh: Mesh, case: dict[str, Any]) -> None:
    x, axes = case["x"], case["axes"]
    operations = [
        instance_norm(x, track=True, use_input_stats=use, axes=axes, rank=mesh.rank)
        for use in (True, False)
    ]
    buffer = Layout(x.shape[1:2], operations[0].needs[1].cover.axes)
    slab, out = buffer.slab(mesh.rank), operations[0].out.slab(mesh.rank)
    bound = [op.bind(mesh, [x, buffer, buffer], layer="test") for op in operations]
    mean, var = values(x.shape[1:2], 1, torch.float64), values(x.shape[1:2], 2, torch.float64) ** 2
    local_mean, local_var = mean[slab].clone(), var[slab].clone()
    for step in range(2):
        whole = values(x.shape, step, torch.float64).requires_grad_()
        local = whole.detach()[x.slab(mesh.rank)].clone().requires_grad_()
        for one, use in zip(bound, (True, False)):
            expected = F.instance_norm(whole, mean, var, None, None, use, 0.1)
            found = one(local, local_mean, local_var)
            assert_close(found, expected[out], "output", tolerance=1e-8)
            seed = values(x.shape, 7, torch.float64)
            (whole_grad,) = torch.autograd.grad(expected, whole, seed)
            (local_grad,) = torch.autograd.grad(found, local, seed[out])
            assert_close(
                local_grad, whole_grad[x.slab(mesh.rank)], "gradient", largest=1.0, tolerance=1e-7
            )
        assert_close(local_mean, mean[slab], "running mean")
        assert_close(local_var, var[slab], "running var")


@many(60)
@given(cases(low=3), st.booleans(), st.booleans())
def test_instance_norm(case: dict[str, Any], affine: bool, track: bool) -> None:
    assume(prod(case["x"].shape[2:]) > 1)
    if track:
        ranks(case["world"], run_instance_steps, case)
    else:
        case = conditioned(case, prod(case["x"].shape[2:]))
        ranks(case["world"], run_instance_norm, case, affine)


def test_illegal_arguments() -> None:
    x = Layout((2, 6, 1), [Axis(2, 1)])
    with pytest.raises(OperatorError, match="spatial value"):
        instance_norm(x, rank=0)
    with pytest.raises(OperatorError, match="running statistics"):
        instance_norm(x, use_input_stats=False, rank=0)
    with pytest.raises(OperatorError, match=r"groups \(=4\)"):
        group_norm(x, 4, rank=0)
    with pytest.raises(OperatorError, match="more than 1 value per group"):
        group_norm(Layout((1, 6), [Axis(2, 1)]), 6, rank=0)
    with pytest.raises(OperatorError, match="last dims"):
        layer_norm(x, (6,), rank=0)
    with pytest.raises(OperatorError, match="sample"):
        instance_norm(Layout((2, 3), []), rank=0)
    with pytest.raises(OperatorError, match="channel dim"):
        batch_norm(Layout((2,), []), rank=0)


def run_format(mesh: Mesh) -> None:
    """Channels-last stays what it is, whole groups stay at home."""
    x = Layout((2, 4, 4, 4), [Axis(2, 2)])
    slab = values(x.shape, 0, torch.float32, last=True)[x.slab(mesh.rank)]
    slab = slab.contiguous(memory_format=torch.channels_last)
    for operation in (
        batch_norm(x, affine=False, track=False, rank=mesh.rank),
        group_norm(x, 2, weight=False, bias=False, rank=mesh.rank),
        instance_norm(x, rank=mesh.rank),
    ):
        y = operation.bind(mesh, [x], layer="test")(slab)
        assert y.is_contiguous(memory_format=torch.channels_last)
    whole = Layout((2, 4, 4, 4), [Axis(2, 1)])
    assert not group_norm(whole, 2, rank=mesh.rank).inner
    assert group_norm(whole, 1, rank=mesh.rank).inner


def test_memory_format() -> None:
    ranks(2, run_format)


def run_saved(mesh: Mesh, kind: str) -> None:
    """A normalisation keeps its input alone."""
    x = Layout((2, 8, 8, 8), [Axis(2, 2), Axis(2, 1)])
    operation = {
        "batch": batch_norm(x, track=False, rank=mesh.rank),
        "group": group_norm(x, 1, rank=mesh.rank),
        "instance": instance_norm(x, affine=True, rank=mesh.rank),
        "layer": layer_norm(x, (8, 8), rank=mesh.rank),
    }[kind]
    slab = values(x.shape, 0, torch.float32)[x.slab(mesh.rank)].clone().requires_grad_()
    wanted = values((8, 8) if kind == "layer" else (8,), 1, torch.float32).requires_grad_()
    bound = operation.bind(mesh, [x, *replicated(mesh, wanted, wanted)], layer="test")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bound(slab, wanted, wanted)
    large = {t.untyped_storage().data_ptr() for t in kept if t.numel() >= slab.numel()}
    assert large == {slab.untyped_storage().data_ptr()}


@pytest.mark.parametrize("kind", ["batch", "group", "instance", "layer"])
def test_keeps_its_input_alone(kind: str) -> None:
    ranks(4, run_saved, kind)


def run_inference_first(mesh: Mesh) -> None:
    """Training goes on after inference mode."""
    x = Layout((3, 5), [Axis(2, 1)])
    bound = layer_norm(x, (5,), weight=False, bias=False, rank=mesh.rank).bind(
        mesh, [x], layer="test"
    )
    slab = values(x.shape, 0, torch.float32)[x.slab(mesh.rank)].clone()
    with torch.inference_mode():
        before = bound(slab)
    after = bound(slab.requires_grad_())
    after.sum().backward()
    assert torch.equal(before, after)


def test_inference_first() -> None:
    ranks(2, run_inference_first)


def test_whole_groups_of_one_value() -> None:
    """A slab may hold a single value for each group where the batch has more."""
    case = {"x": Layout((2, 3, 1), [Axis(2, 0)]), "axes": None, "last": False}
    ranks(2, run_group_norm, case | {"dtype": torch.float64}, 3, False, False)


# stability


def run_stable(mesh: Mesh, kind: str, last: bool) -> None:
    """float32 far from zero: as near to the truth as one device is."""
    x = Layout((2, 4, 16, 16), [Axis(2, 2), Axis(2, 1)])
    whole = values(x.shape, 0, torch.float32, last=last) + 1e4
    seed = values(x.shape, 1, torch.float32)
    operation, function = {
        "batch": (
            batch_norm(x, affine=False, track=False, rank=mesh.rank),
            lambda t: F.batch_norm(t, None, None, None, None, True),
        ),
        "group": (
            group_norm(x, 1, weight=False, bias=False, rank=mesh.rank),
            lambda t: F.group_norm(t, 1),
        ),
        "instance": (instance_norm(x, rank=mesh.rank), F.instance_norm),
        "layer": (
            layer_norm(x, (16, 16), weight=False, bias=False, rank=mesh.rank),
            lambda t: F.layer_norm(t, (16, 16)),
        ),
    }[kind]
    slab = x.slab(mesh.rank)
    local = whole[slab].clone().requires_grad_()
    chain = Chain()
    chain.start()
    found = operation.bind(mesh, [x], layer="test")(local, chain=chain)
    found.backward(seed[slab])
    truth = whole.double().requires_grad_()
    function(truth).backward(seed.double())
    serial = whole.clone().requires_grad_()
    function(serial).backward(seed)
    assert truth.grad is not None
    assert local.grad is not None
    for mine, theirs, exact in (
        (found, function(serial), function(truth)),
        (local.grad, serial.grad, truth.grad),
    ):
        limit = (theirs - exact).abs().max().item()
        assert (mine - exact[slab]).abs().max().item() <= 1.1 * limit + 1e-6


@pytest.mark.parametrize("kind", ["batch", "group", "instance", "layer"])
@pytest.mark.parametrize("last", [False, True])
def test_stability(kind: str, last: bool) -> None:
    ranks(4, run_stable, kind, last)


def run_innermost(mesh: Mesh) -> None:
    """Many values far from zero, channels innermost, statistics of one rank alone."""
    shape = (2, 8, 32, 32, 32)
    x = Layout.replicated(shape, ranks=mesh.size)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 100.0
    truth = F.batch_norm(whole.double(), None, None, None, None, True)
    local = whole.contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    operation = batch_norm(x, affine=False, track=False, rank=mesh.rank)
    y = operation.bind(mesh, [x], layer="test")(local, chain=Chain())
    assert (y.detach() - truth).abs().max().item() <= 2e-5  # torch's own kernel: 1e-3
    assert y.is_contiguous(memory_format=torch.channels_last_3d)


def test_stability_where_channels_are_innermost() -> None:
    ranks(1, run_innermost)


@pytest.mark.parametrize("level", [0.0, 1013.0, 33904.0, 1e6])
@pytest.mark.parametrize("last", [False, True])
def test_moments_of_a_constant_have_no_spread(level: float, last: bool) -> None:
    x = formatted(torch.full((4, 8, 33, 37), level) + torch.arange(8.0).view(-1, 1, 1), last=last)
    mean, squares = moments_of(x, (0, 2, 3))
    assert torch.equal(mean.flatten(), level + torch.arange(8.0, dtype=torch.float64))
    assert float(squares.max()) <= 1e-12 * level**2
