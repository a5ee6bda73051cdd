"""The gradient of a weight by matrix products of single taps equals torch's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tilewise.comm.formats import formatted
from tilewise.ops import conv_taps
from tilewise.testing.compare import assert_close

KINDS = (torch.conv1d, torch.conv2d, torch.conv3d)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, list[int]]:
    space = draw(st.integers(1, 3))

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=space, max_size=space))

    return {
        "extents": each(1, 9),
        "kernel": each(1, 4),
        "stride": each(1, 3),
        "padding": each(0, 3),
        "dilation": each(1, 3),
    }


@given(
    convolutions(),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([1, 64, conv_taps.BLOCK]),
    st.data(),
)
def test_any_convolution(
    case: dict[str, list[int]],
    samples: int,
    channels: int,
    filters: int,
    last: bool,
    block: int,
    data: st.DataObject,
) -> None:
    extents, kernel = case.pop("extents"), case.pop("kernel")
    reaches = [d * (k - 1) for d, k in zip(case["dilation"], kernel)]
    padded = [e + 2 * p for e, p in zip(extents, case["padding"])]
    assume(all(reach < extent for reach, extent in zip(reaches, padded)))
    torch.manual_seed(0)
    x = torch.randn(samples, channels, *extents, dtype=torch.float64)
    weight = torch.randn(filters, channels, *kernel, dtype=torch.float64, requires_grad=True)
    y = KINDS[len(kernel) - 1](x, weight, None, *case.values())  # type: ignore[arg-type]
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, weight, dy)
    with mock.patch.object(conv_taps, "BLOCK", block):
        found = conv_taps.weight_gradient(
            formatted(dy, last=last), cut(formatted(x, last=last), data), kernel, **case, last=last
        )
    assert_close(found, expected, "weight gradient", tolerance=1e-12)


def cut(x: Tensor, data: st.DataObject) -> list[conv_taps.Part]:
    """Cut a tensor along two of its dims of space, as a slab and its halo are."""
    parts: list[conv_taps.Part] = [(x, [0] * (x.dim() - 2))]
    for _ in range(2):
        part, begin = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        dim = data.draw(st.integers(2, x.dim() - 1))
        at = data.draw(st.integers(0, part.shape[dim]))
        moved = [b + at * (i == dim - 2) for i, b in enumerate(begin)]
        sizes = [at, part.shape[dim] - at]
        parts += zip(part.split(sizes, dim), (begin, moved))
    return parts


@pytest.mark.parametrize("last", [False, True])
def test_rounding_is_no_worse_than_torchs(last: bool) -> None:
    torch.manual_seed(0)
    x, dy = torch.rand(1, 16, 96, 96), torch.rand(1, 16, 96, 96)

    def torchs(dtype: torch.dtype) -> Tensor:
        weight = torch.zeros(16, 16, 3, 3, dtype=dtype, requires_grad=True)
        y = torch.conv2d(x.to(dtype), weight, padding=1)
        return torch.autograd.grad(y, weight, dy.to(dtype))[0].double()

    found = conv_taps.weight_gradient(
        formatted(dy, last=last), [(formatted(x, last=last), (0, 0))], (3, 3),
        stride=(1, 1), padding=(1, 1), dilation=(1, 1), last=last,
    )  # fmt: skip
    exact = torchs(torch.float64)
    mine, other = ((one - exact).abs().max() for one in (found.double(), torchs(torch.float32)))
    assert mine <= 2 * other + 1e-7 * exact.abs().max()
