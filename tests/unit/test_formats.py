"""Changing memory formats changes no value."""

from __future__ import annotations

import pytest
import torch

from tilewise.comm.formats import CHANNELS_LAST, ELEMENTS, fill, formatted, is_last

SHAPES = [(2, 64, 80, 90), (1, 48, 20, 21, 22), (3, 5, 7, 9), (1, 40, 6, 3, 5), (2, 1, 600, 600)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_formats_are_changed_both_ways(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    expected = x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    last = formatted(x, last=True)
    assert last.stride() == expected.stride()
    assert torch.equal(last, x)
    first = formatted(last, last=False)
    assert first.is_contiguous()
    assert torch.equal(first, x)
    assert formatted(first, last=False) is first
    assert is_last(last) == (shape[1] > 1)


def test_gradients_pass_through_a_change() -> None:
    x = torch.randn(1, 64, 80, 90, requires_grad=True)
    formatted(x, last=True).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dims", [(2,), (3,), (2, 3)])
def test_slabs_are_filled_into_larger_ones(dims: tuple[int, ...], last: bool) -> None:
    """A box that is not one piece in memory, too."""
    x = torch.randn(2, 64, 80, 90)
    assert x[0].numel() >= ELEMENTS
    whole = torch.zeros([extent + 2 * (dim in dims) for dim, extent in enumerate(x.shape)])
    whole = formatted(whole, last=last)
    box = whole[tuple(slice(1, -1) if dim in dims else slice(None) for dim in range(4))]
    for source in (x, formatted(x, last=True)):
        whole.zero_()
        fill(box, source)
        assert torch.equal(box, x)
        assert int((whole != 0).sum()) == int((x != 0).sum())
