"""Where a tensor's elements lie in memory, and in which order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CHANNELS, ELEMENTS = 32, 1 << 18
"""From how many channels and elements of a sample on it pays to transpose it as a matrix."""


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return channels_last where the tensor is so and not contiguous too, contiguous otherwise."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def is_last(tensor: Tensor) -> bool:
    """Whether the channels are innermost in memory, and not just as well outermost."""
    return memory_format(tensor) is not torch.contiguous_format


def format_of(tensor: Tensor, *, last: bool) -> torch.memory_format:
    """Return the memory format of a tensor's kind whose channels are innermost, or outermost."""
    outermost = torch.contiguous_format
    return CHANNELS_LAST.get(tensor.dim(), outermost) if last else outermost


def formatted(tensor: Tensor, *, last: bool) -> Tensor:
    """Return a tensor with its channels innermost in memory, or outermost."""
    format = format_of(tensor, last=last)
    tracked = torch.is_grad_enabled() and tensor.requires_grad
    if tracked or tensor.is_contiguous(memory_format=format):
        return tensor.contiguous(memory_format=format)
    out = torch.empty_like(tensor, memory_format=format)
    fill(out, tensor)
    return out


def between(tensor: Tensor, *, last: bool) -> Tensor:
    """Return a tensor in a memory format, outermost or innermost channels, its gradient as it was.

    Of what has no channels, or lies in both formats alike, it returns the tensor itself.
    """
    format = CHANNELS_LAST.get(tensor.dim())
    if format is None or not tensor.is_floating_point() or is_last(tensor) == last:
        return tensor
    if last and tensor.is_contiguous(memory_format=format):
        return tensor
    out: Tensor = _Between.apply(tensor, last)
    return out


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, last: bool) -> Tensor:
        ctx.was = is_last(tensor)
        return formatted(tensor, last=last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return formatted(grad, last=ctx.was), None


def fill(target: Tensor, source: Tensor) -> None:
    """Copy values between memory formats, outside of autograd.

    On the CPU torch does so element by element; a sample as a transposed matrix it copies in
    blocks, in half of the time.
    """
    alike = target.device.type == "cpu" and target.dtype == source.dtype
    if not alike or target.shape[1] < CHANNELS or target[:1].numel() < ELEMENTS:
        target.copy_(source)
        return
    for one, other in zip(target, source):
        rows, values = _matrix(one), _matrix(other)
        if rows is None or values is None:
            one.copy_(other)
        elif rows.stride(0) == 1:
            rows.t().copy_(values.t())
        else:
            rows.copy_(values)


def _matrix(sample: Tensor) -> Tensor | None:
    """View a sample as channels by positions, where positions lie at equal distances."""
    strides, extents = sample.stride()[1:], sample.shape[2:]
    steps = zip(pairwise(strides), extents)
    even = all(outer == extent * inner for (outer, inner), extent in steps)
    return sample.view(len(sample), -1) if even else None


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same memory, real or not."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
