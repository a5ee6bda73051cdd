"""Small tensors that are known before a pass: made on the host, brought to a device once.

A copy from the host's memory makes the host wait for the device, in every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.weak import WeakTensorKeyDictionary

Kind = tuple[torch.device, torch.dtype]

_copies: dict[Tensor, dict[Kind, Tensor]] = WeakTensorKeyDictionary()  # type: ignore[assignment]


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors that any later pass can use, whatever mode the present one is in."""
    with torch.inference_mode(False), unset_fake_temporarily():
        yield


def there(constant: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor that nobody changes on a device; its copy lives as long as it does."""
    kind = device, dtype or constant.dtype
    if kind == (constant.device, constant.dtype):
        return constant
    copies = _copies.setdefault(constant, {})
    if kind not in copies:
        with ordinary_tensors():
            copies[kind] = constant.to(*kind)
    return copies[kind]


@lru_cache(maxsize=4096)
def numbers(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, made once."""
    with ordinary_tensors():
        return torch.tensor(values, dtype=dtype, device=device)
