"""Convolutions, split every way, against one device."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawing import WORLDS, degrees, layouts, many
from fixed_ways import EXACT, fixed_ways
from tilewise.comm import Chain, Mesh
from tilewise.errors import LayoutError, OperatorError
from tilewise.layout import Axis, Degrees, Layout, Window
from tilewise.ops.conv import ConvSpec, conv
from tilewise.ops.conv_local import Way, Ways
from tilewise.ops.tune import WAYS
from tilewise.testing import assert_matches_serial, ranks

Case = dict[str, Any]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def serial(x: Tensor, weight: Tensor, *bias: Tensor, **arguments: Any) -> Tensor:
    """Convolve on one device; padding in pairs is applied first."""
    transposed = arguments.pop("transposed", False)
    padding = arguments.get("padding", 0)
    if isinstance(padding, list) and isinstance(padding[0], tuple):
        x = F.pad(x, [width for pair in reversed(padding) for width in pair])
        arguments["padding"] = 0
    name = "conv_transpose" if transposed else "conv"
    out: Tensor = getattr(F, f"{name}{x.dim() - 2}d")(x, weight, *bias, **arguments)
    return out


def operands(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.get("seed", 0))
    filters = case["weight"][0]
    if case["arguments"].get("transposed"):
        filters = case["weight"][1] * case["arguments"].get("groups", 1)
    sizes = [case["x"], case["weight"]] + ([(filters,)] if case["bias"] else [])
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    tensors = [tensor.to(case.get("dtype", torch.float64)) for tensor in tensors]
    if case.get("last") and len(case["x"]) in FORMATS:
        tensors[0] = tensors[0].contiguous(memory_format=FORMATS[len(case["x"])])
    return tensors


def check(mesh: Mesh, case: Case) -> None:
    whole = operands(case)
    x = case.get("layout") or Layout.replicated(case["x"], ranks=mesh.size)
    operation = conv(
        x,
        case["weight"],
        ConvSpec.of(case["weight"], **case["arguments"]),
        degrees=Degrees.parse(case["degrees"]),
        rank=mesh.rank,
        bias=case["bias"],
    )
    others = case.get("others") or [
        Layout.replicated(tensor.shape, ranks=mesh.size) for tensor in whole[1:]
    ]
    forward, data, weight = (Way(*way) for way in case.get("ways", [(False, False)] * 3))
    ways = Ways(forward, data, weight, case.get("y_last", False))
    with fixed_ways(ways):
        assert_matches_serial(
            mesh,
            operation,
            lambda *tensors: serial(*tensors, **case["arguments"]),
            whole,
            [x, *others],
        )


@st.composite
def arguments(draw: st.DrawFn, ndim: int, transposed: bool) -> tuple[list[int], dict[str, Any]]:
    """Draw a kernel and what torch's functions take."""

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=ndim, max_size=ndim))

    kernel, stride, dilation = each(1, 4), each(1, 3), each(1, 2)
    found: dict[str, Any] = {"stride": stride, "dilation": dilation}
    if transposed:
        found["transposed"] = True
        found["padding"] = each(0, 3)
        found["output_padding"] = [
            draw(st.integers(0, max(pair) - 1)) for pair in zip(stride, dilation)
        ]
        return kernel, found
    kind = draw(st.sampled_from(["number", "numbers", "pairs", "same", "valid"]))
    if kind == "same":
        found["stride"] = 1
    found["padding"] = {
        "number": draw(st.integers(0, 3)),
        "numbers": each(0, 3),
        "pairs": list(zip(each(0, 3), each(0, 3))),
    }.get(kind, kind)
    return kernel, found


def smallest(window: Window) -> int:
    """Return the fewest inputs that give an output."""
    return next(extent for extent in range(1, 100) if window.outputs(extent) >= 1)


@st.composite
def cases(draw: st.DrawFn, *, transposed: bool = False) -> tuple[int, Case]:
    """Draw a number of ranks and a convolution split over them."""
    world = draw(st.sampled_from(WORLDS))
    ndim = draw(st.integers(1, 3))
    kernel, found = draw(arguments(ndim, transposed))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    inputs = draw(st.sampled_from([1, 1, 2, 3])) if groups > 1 else draw(st.integers(1, 9))
    outputs = draw(st.integers(1, 3)) if groups > 1 else draw(st.integers(1, 10))
    found["groups"] = groups
    first = inputs * groups if transposed else outputs * groups
    weight = (first, outputs if transposed else inputs, *kernel)
    windows = ConvSpec.of(weight, **found).windows
    more = st.integers(0, {1: 12, 2: 7, 3: 4}[ndim])
    space = [smallest(window) + draw(more) for window in windows]
    x = (draw(st.integers(1, 3)), inputs * groups, *space)
    bias = draw(st.booleans())
    shapes = [weight] + ([(outputs * groups,)] if bias else [])
    return world, {
        "x": x,
        "weight": weight,
        "arguments": found,
        "bias": bias,
        "layout": draw(layouts(x, world)),
        "degrees": str(draw(degrees(world, "ncf" + "dhw"[3 - ndim :]))),
        "others": [draw(layouts(shape, world)) for shape in shapes],
        "last": draw(st.booleans()),
        "ways": [
            draw(st.tuples(st.booleans(), st.booleans(), st.sampled_from(EXACT))) for _ in range(3)
        ],
        "y_last": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
    }


@st.composite
def patchable(draw: st.DrawFn) -> tuple[int, Case]:
    """Draw a convolution of stride 1 that keeps the extents, on slabs as wide as its halo."""
    ndim = draw(st.integers(1, 3))
    world = draw(st.sampled_from([2, 3, 4, 6, 8]))
    split = draw(degrees(world, "n" + "dhw"[3 - ndim :]))
    kernel = [draw(st.sampled_from([1, 3, 5])) for _ in range(ndim)]
    dilation = [draw(st.integers(1, 2)) for _ in range(ndim)]
    halos = [d * (k - 1) // 2 for k, d in zip(kernel, dilation)]
    parts = [getattr(split, name) for name in "dhw"[3 - ndim :]]
    space = [p * max(h, 1) + draw(st.integers(0, 3)) for p, h in zip(parts, halos)]
    groups = draw(st.sampled_from([1, 1, 2]))
    inputs, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    x = (draw(st.integers(1, 2)), inputs * groups, *space)
    return world, {
        "x": x,
        "weight": (outputs * groups, inputs, *kernel),
        "arguments": {"padding": halos, "dilation": dilation, "groups": groups},
        "bias": draw(st.booleans()),
        "layout": Layout.of(x, "nc" + "dhw"[3 - ndim :], split, ranks=world),
        "degrees": str(split),
        "last": draw(st.booleans()),
        "ways": [(True, draw(st.booleans()), draw(st.sampled_from(EXACT))) for _ in range(3)],
    }


@many(100)
@given(patchable())
def test_convolutions_patched_with_their_halo(drawn: tuple[int, Case]) -> None:
    world, case = drawn
    ranks(world, check, case)


@many(200)
@given(cases())
def test_convolutions(drawn: tuple[int, Case]) -> None:
    world, case = drawn
    ranks(world, check, case)


@many(120)
@given(cases(transposed=True))
def test_transposed_convolutions(drawn: tuple[int, Case]) -> None:
    world, case = drawn
    ranks(world, check, case)


@many(40)
@given(st.booleans().flatmap(lambda transposed: cases(transposed=transposed)))
def test_float32(drawn: tuple[int, Case]) -> None:
    world, case = drawn
    ranks(world, check, case | {"dtype": torch.float32})


@many(90)
@given(
    st.one_of(cases(), patchable()).filter(lambda drawn: len(drawn[1]["x"]) > 3),
    st.lists(st.sampled_from(WAYS), min_size=3, max_size=3),
)
def test_ways_that_are_measured(drawn: tuple[int, Case], ways: list[Way]) -> None:
    world, case = drawn
    case |= {"dtype": torch.float32, "ways": [astuple(way) for way in ways]}
    ranks(world, check, case)


def test_even_kernels_whose_padding_is_symmetric_are_not_patched() -> None:
    """A dilated kernel of four taps reaches as far to both sides, but has none in the middle."""
    case = {
        "x": (1, 1, 5),
        "weight": (1, 1, 4),
        "arguments": {"stride": [1], "dilation": [2], "padding": 3, "groups": 1},
        "bias": False,
        "layout": Layout((1, 1, 5), [Axis(2, 2)]),
        "degrees": "w2",
        "ways": [(True, False)] * 3,
        "seed": 0,
    }
    ranks(2, check, case)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("degrees", "padding"), [("h3", 0), ("n3", 0), ("h3", 1)])
def test_single_taps_with_a_stride_leave_out_what_they_do_not_read(
    degrees: str, padding: int, last: bool
) -> None:
    case = {
        "x": (3, 3, 11, 9),
        "weight": (4, 3, 1, 1),
        "arguments": {"stride": [2, 3], "padding": padding},
        "bias": True,
        "degrees": degrees,
        "last": last,
        "y_last": last,
        "dtype": torch.float32,
        "ways": [(False, last, "onednn")] * 3,
    }
    ranks(3, check, case)


# world, degrees, input, weight, arguments
EXPLICIT = {
    "halo beyond the neighbour": (
        8,
        "h8",
        (1, 2, 9, 5),
        (3, 2, 4, 3),
        {"dilation": 2, "padding": 3},
    ),
    "halo beyond the neighbour in 3-D": (
        8,
        "d4 w2",
        (1, 2, 5, 3, 5),
        (3, 2, 4, 2, 4),
        {"padding": [(3, 0), (1, 0), (0, 3)]},
    ),
    "more parts than rows": (8, "h8", (2, 3, 3, 4), (4, 3, 3, 3), {"padding": 1}),
    "more parts than samples": (6, "n6", (4, 3, 5, 4), (4, 3, 3, 3), {"padding": 1}),
    "more parts than channels": (8, "c4 f2", (2, 3, 5, 4), (3, 3, 3, 3), {"padding": 1}),
    "extents of one": (4, "h2 w2", (1, 1, 1, 1), (1, 1, 3, 3), {"padding": 1}),
    "replicas": (8, "h2", (2, 3, 7, 4), (4, 3, 3, 3), {"padding": 1}),
    "replicas of channels": (8, "c2 f2", (2, 4, 7, 4), (4, 4, 3, 3), {"padding": 1}),
    "samples, rows and channels": (8, "n2 h2 c2", (2, 6, 7, 5), (5, 6, 3, 3), {"padding": 1}),
    "ten filters": (4, "c2 f2", (2, 6, 4, 5), (10, 6, 3, 3), {"padding": 1}),
    "volumes": (8, "d2 h2 w2", (1, 2, 5, 6, 7), (3, 2, 3, 3, 3), {"padding": 1, "stride": 2}),
    "strides past the kernel": (3, "w3", (2, 3, 17), (4, 3, 1), {"stride": 3}),
    "every other row": (3, "h3", (2, 3, 7, 9), (4, 3, 1, 1), {"stride": 2}),
    "every other value of samples": (2, "n2", (3, 3, 7, 8), (4, 3, 1, 1), {"stride": [2, 3]}),
    "every other value and a rim": (
        2,
        "h2",
        (2, 3, 7, 8),
        (4, 3, 1, 1),
        {"stride": 2, "padding": 1},
    ),
    "groups": (4, "c2 f2", (2, 6, 5, 5), (9, 2, 3, 3), {"groups": 3, "padding": "same"}),
    "depthwise": (6, "h2 c3", (1, 4, 6, 6), (8, 1, 3, 3), {"groups": 4, "padding": 1}),
    "transposed": (
        6,
        "h3 f2",
        (1, 4, 4, 5),
        (4, 5, 3, 3),
        {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1},
    ),
    "transposed with holes": (4, "w4", (1, 2, 5), (2, 3, 1), {"transposed": True, "stride": 4}),
    "transposed, one row": (
        8,
        "h8",
        (1, 2, 1, 3),
        (2, 3, 2, 2),
        {"transposed": True, "stride": 2, "dilation": 3, "output_padding": 2},
    ),
}


@pytest.mark.parametrize("name", EXPLICIT)
@pytest.mark.parametrize("spread", [True, False])
def test_explicit_cases(name: str, spread: bool) -> None:
    """Bring x from where the convolution before it would leave it, or from everywhere."""
    world, cut, x, weight, found = EXPLICIT[name]
    dims = "nc" + "dhw"[5 - len(x) :]
    layout = Layout.of(x, dims, cut, ranks=world) if spread else None
    case = {"x": x, "weight": weight, "arguments": found, "bias": True, "layout": layout}
    ranks(world, check, case | {"degrees": cut})


def results(whole: list[Tensor], seed: Tensor, found: dict[str, Any]) -> list[Tensor]:
    """Return y and the gradients of all operands on one device, in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in whole]
    y = serial(*leaves, **found)
    return [y.detach(), *torch.autograd.grad(y, leaves, seed.double())]


def check_bfloat16(mesh: Mesh, case: Case) -> None:
    """Compare with float64, each element on the scale of the terms that make it up.

    A rank rounds its partial sum and every addition of another's, where one device often rounds
    once; and where terms cancel, that is any multiple of the result. But k partial sums are
    within (k + 2)/512 of the sum of |terms|, 2 % for 8 ranks. Some of torch's own kernels add
    their taps in bfloat16, on one device too: 3 %.
    """
    whole = operands(case | {"dtype": torch.bfloat16})
    x = case.get("layout") or Layout.replicated(case["x"], ranks=mesh.size)
    layouts = [x, *(Layout.replicated(tensor.shape, ranks=mesh.size) for tensor in whole[1:])]
    operation = conv(
        x,
        case["weight"],
        ConvSpec.of(case["weight"], **case["arguments"]),
        degrees=Degrees.parse(case["degrees"]),
        rank=mesh.rank,
        bias=case["bias"],
    )
    generator = torch.Generator().manual_seed(9)
    seed = torch.randn(operation.out.shape, generator=generator).bfloat16()
    truth = results(whole, seed, case["arguments"])
    terms = results([t.abs() for t in whole], seed.abs(), case["arguments"])

    local = [t[at.slab(mesh.rank)].clone().requires_grad_() for t, at in zip(whole, layouts)]
    chain = Chain()
    chain.start()
    y = operation.bind(mesh, layouts, layer="test")(*local, chain=chain)
    y.backward(seed[operation.out.slab(mesh.rank)])
    ours = [y.detach(), *(tensor.grad for tensor in local)]
    for one, exact, scale, at in zip(ours, truth, terms, [operation.out, *layouts], strict=True):
        slab = at.slab(mesh.rank)
        assert one.dtype == torch.bfloat16
        assert ((one.double() - exact[slab]).abs() <= 3e-2 * scale[slab]).all()


@many(40)
@given(st.booleans().flatmap(lambda transposed: cases(transposed=transposed)))
def test_bfloat16(drawn: tuple[int, Case]) -> None:
    world, case = drawn
    # Not channels_last: there oneDNN is wrong on one device too (torch 2.13), in y of grouped
    # convolutions and in the weight's gradient of transposed ones.
    ranks(world, check_bfloat16, case | {"last": False})


@pytest.mark.parametrize("name", EXPLICIT)
def test_bfloat16_of_explicit_cases(name: str) -> None:
    world, cut, x, weight, found = EXPLICIT[name]
    case = {"x": x, "weight": weight, "arguments": found, "bias": True, "degrees": cut}
    ranks(world, check_bfloat16, case)


def check_result(mesh: Mesh, case: Case, last: bool) -> None:
    """Results are fresh and dense, in the memory format that one device gives."""
    x = Layout.of(case["x"], "nc" + "dhw"[5 - len(case["x"]) :], case["degrees"], ranks=mesh.size)
    whole = operands(case | {"last": last})
    spec = ConvSpec.of(case["weight"], **case["arguments"])
    operation = conv(
        x,
        case["weight"],
        spec,
        degrees=Degrees.parse(case["degrees"]),
        rank=mesh.rank,
        bias=case["bias"],
    )
    copies = [Layout.replicated(tensor.shape, ranks=mesh.size) for tensor in whole[1:]]
    local = whole[0][x.slab(mesh.rank)].clone().requires_grad_()
    if last and local.numel():
        assert local.is_contiguous(memory_format=FORMATS[local.dim()])
    bound = operation.bind(mesh, [x, *copies], layer="conv")
    chain = Chain()
    chain.start()
    y = bound(local, *whole[1:], chain=chain)
    assert tuple(y.shape) == operation.out.local_shape(mesh.rank)
    assert y.data_ptr() != local.data_ptr()
    expected = serial(*whole, **case["arguments"])
    kept = last and expected.is_contiguous(memory_format=FORMATS[local.dim()])
    assert y.is_contiguous(memory_format=FORMATS[local.dim()] if kept else torch.contiguous_format)
    y.mul_(2).sum().backward()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("cut", ["1", "h2 w2", "c2 f2", "h2 f2", "w2 c2"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ndim", [2, 3])
def test_results_are_dense_and_keep_the_memory_format(
    ndim: int, transposed: bool, cut: str, last: bool
) -> None:
    case: Case = {
        "x": (2, 8, 6, 6, 4)[: ndim + 2],
        "weight": (8, 8, *[3] * ndim),
        "arguments": {"padding": 1, "stride": 2, "transposed": transposed},
        "bias": True,
        "degrees": cut,
        "dtype": torch.float32,
    }
    ranks(4, check_result, case, last)


def planned(
    x: tuple[int, ...] = (2, 4, 8, 8),
    weight: tuple[int, ...] = (6, 4, 3, 3),
    cut: str = "1",
    world: int = 4,
    **found: Any,
) -> Any:
    spec = ConvSpec.of(weight, layer="encoder.1", **found)
    layout = Layout.replicated(x, ranks=world)
    return conv(layout, weight, spec, degrees=Degrees.parse(cut), rank=0, layer="encoder.1")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"x": (2, 5, 8, 8)},
            "encoder.1: input channels (=5) must be what the weight (6, 4, 3, 3) with groups=1 "
            "takes (=4)",
        ),
        (
            {"x": (2, 4, 2, 8)},
            "encoder.1: the kernel (3, 3) reaches further than the padded input (2, 8) with "
            "padding ((0, 0), (0, 0)) and dilation (1, 1); pad more or use a smaller kernel",
        ),
        (
            {"x": (2, 6, 2, 8), "transposed": True, "padding": 3},
            "encoder.1: the padding ((3, 3), (3, 3)) takes away all of the result of input (2, 8) "
            "and kernel (3, 3); pad less",
        ),
        (
            {"cut": "d2"},
            "encoder.1: has no depth to cut by d2 (input 2×4×8×8); use h, w, n, c or f",
        ),
        (
            {"x": (4, 8, 8)},
            "encoder.1: input (4, 8, 8) has 3 dims, a 2-D convolution takes 4 (sample, channel and "
            "2 of space); add a batch dim of 1",
        ),
        (
            {"weight": (6, 4)},
            "encoder.1: weight (6, 4) has 2 dims; a 1-D, 2-D or 3-D convolution has 3, 4 or 5",
        ),
        ({"weight": (6, 4, 0, 3)}, "encoder.1: kernel (=(0, 3)) must be at least 1"),
        ({"weight": (0, 4, 3, 3)}, "encoder.1: weight (0, 4, 3, 3) must not be empty"),
        ({"stride": 0}, "encoder.1: stride (=(0,)) must be at least 1"),
        ({"stride": (1, -1)}, "encoder.1: stride (=(1, -1)) must be at least 1"),
        ({"dilation": 0}, "encoder.1: dilation (=(0,)) must be at least 1"),
        ({"padding": -1}, "encoder.1: padding (=(-1,)) must be at least 0"),
        ({"padding": [(1, 0), (0, -1)]}, "encoder.1: padding (=(0, -1)) must be at least 0"),
        (
            {"stride": (1, 2, 3)},
            "encoder.1: stride (=(1, 2, 3)) has 3 numbers; a 2-D convolution takes one, or 2",
        ),
        ({"padding": (1, 2, 3)}, "encoder.1: padding (=(1, 2, 3)) has 3 numbers"),
        ({"dilation": ()}, "encoder.1: dilation (=()) has 0 numbers"),
        (
            {"padding": "full"},
            "encoder.1: padding (='full') must be a number for each dim, 'same' or 'valid'",
        ),
        (
            {"padding": "same", "stride": 2},
            "encoder.1: padding='same' needs a stride of 1, this one is (2, 2)",
        ),
        (
            {"padding": "same", "transposed": True},
            "encoder.1: padding (='same') must be a number for each dim",
        ),
        (
            {"padding": [(1, 0), (1, 1)], "transposed": True},
            "encoder.1: padding (=((1, 0), (1, 1))) of a transposed convolution must be the same "
            "before and after; use output_padding",
        ),
        (
            {"output_padding": 1},
            "encoder.1: output_padding (=(1, 1)) belongs to a transposed convolution",
        ),
        (
            {"output_padding": 2, "stride": 2, "transposed": True},
            "encoder.1: output_padding (=(2, 2)) must be smaller than the stride (=(2, 2)) or the "
            "dilation (=(1, 1))",
        ),
        ({"groups": 0}, "encoder.1: groups (=0) must be at least 1"),
        (
            {"groups": 4, "x": (2, 16, 8, 8)},
            "encoder.1: channels (=16) and filters (=6) must be divisible by groups (=4)",
        ),
    ],
)
def test_errors_name_the_layer_the_value_and_the_rule(wrong: Case, message: str) -> None:
    with pytest.raises(OperatorError) as caught:
        planned(**wrong)
    assert message in str(caught.value)


def test_degrees_must_divide_the_ranks() -> None:
    with pytest.raises(LayoutError) as caught:
        planned(cut="n3")
    assert str(caught.value) == (
        "degrees 'n3': their product (=3) must divide the number of ranks (=4)"
    )


def test_arguments_are_read_as_torch_takes_them() -> None:
    assert ConvSpec.of((6, 4, 3, 3), stride=2) == ConvSpec.of((6, 4, 3, 3), stride=[2, 2])
    assert ConvSpec.of((6, 4, 3, 3), padding=[1]) == ConvSpec.of((6, 4, 3, 3), padding=1)
    assert ConvSpec.of((6, 4, 3), padding=1) == ConvSpec.of((6, 4, 3), padding=[(1, 1)])
    assert ConvSpec.of((6, 4, 4, 3), padding="same").padding == ((1, 2), (1, 1))
    assert ConvSpec.of((6, 4, 3), padding="valid").padding == ((0, 0),)
