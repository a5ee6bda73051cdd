"""Where a tensor's elements lie in memory, and in which order."""

from __future__ import annotations

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Return channels_last where the tensor is so and not contiguous too, contiguous otherwise."""
    last = CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def is_last(tensor: Tensor) -> bool:
    """Whether the channels are innermost in memory, and not just as well outermost."""
    return memory_format(tensor) is not torch.contiguous_format


def formatted(tensor: Tensor, *, last: bool) -> Tensor:
    """Return a tensor with its channels innermost in memory, or outermost."""
    format = CHANNELS_LAST.get(tensor.dim(), torch.contiguous_format) if last else None
    return tensor.contiguous(memory_format=format or torch.contiguous_format)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of the same memory, real or not."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
