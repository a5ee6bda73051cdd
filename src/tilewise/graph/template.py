"""Copies of a model's structure with other tensors in it.

A template holds fake parameters of the global shapes, so that tracing costs no memory; the
parallel model holds this rank's blocks. Both keep the classes, names and modes of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def rebuild(
    model: Module,
    parameter: Callable[[str, nn.Parameter], nn.Parameter],
    buffer: Callable[[str, Tensor], Tensor],
) -> Module:
    """Copy the module tree, with each tensor replaced once: tied tensors and modules stay tied."""
    tensors: dict[int, Tensor] = {}
    modules: dict[int, nn.Module] = {}

    def tensor(name: str, old: Tensor | None) -> Tensor | None:
        if old is None:
            return None
        if id(old) not in tensors:
            if isinstance(old, nn.Parameter):
                tensors[id(old)] = parameter(name, old)
            else:
                tensors[id(old)] = buffer(name, old)
        return tensors[id(old)]

    def copy(prefix: str, old: nn.Module) -> nn.Module:
        if id(old) in modules:
            return modules[id(old)]
        new = type(old).__new__(type(old))
        new.__dict__.update(old.__dict__)
        modules[id(old)] = new
        held = new.__dict__
        held["_parameters"] = {k: tensor(prefix + k, p) for k, p in old._parameters.items()}
        held["_buffers"] = {k: tensor(prefix + k, b) for k, b in old._buffers.items()}
        held["_modules"] = {
            k: None if child is None else copy(f"{prefix}{k}.", child)
            for k, child in old._modules.items()
        }
        return new

    out = copy("", model)
    assert isinstance(out, type(model))
    return out
