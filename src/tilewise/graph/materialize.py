"""Give values to a split model that was built on the meta device, one whole module at a time."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.errors import PlanError
from tilewise.graph.held import Held

Init = Callable[[nn.Module], Any]


def materialize(
    held: Held,
    init: Init | None,
    seed: int,
    device: torch.device,
    gathered: Callable[[str], Tensor],
) -> None:
    """Initialise every module that holds tensors without values, and keep this rank's blocks.

    `gathered` gives a tensor that has values whole. Those are for `init` to read; they stay.
    """
    paths = {module: path for path, module in held.model.named_modules()}
    empty = {name: None for name in held.places if held.get(name).is_meta}
    mine = {module: [n for n in empty if n in _own(module, path)] for module, path in paths.items()}
    for module, names in mine.items():
        if names and init is None and not hasattr(module, "reset_parameters"):
            raise PlanError(
                f"materialize: {names[0]} belongs to a {type(module).__name__}, which has no "
                "reset_parameters(); pass init=, a function that sets a module's tensors"
            )

    def visit(module: nn.Module) -> None:
        if not mine[module]:
            return
        whole = _whole(held, module, paths[module], empty, gathered)
        if init is not None:
            init(whole)
        else:
            whole.reset_parameters()  # type: ignore[operator]
        for name in mine[module]:
            key = name.rpartition(".")[2]
            tensor = whole._parameters.get(key, whole._buffers.get(key))
            if tensor is not None:
                held.put(name, held.cut(name, tensor.detach()).to(device))

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        held.model.apply(visit)


def _own(module: nn.Module, path: str) -> set[str]:
    """Return the full names of the tensors that a module holds itself."""
    prefix = f"{path}." if path else ""
    return {prefix + key for owner in (module._parameters, module._buffers) for key in owner}


def _whole(
    held: Held,
    module: nn.Module,
    path: str,
    empty: Container[str],
    gathered: Callable[[str], Tensor],
) -> nn.Module:
    """Return the module with whole tensors of its own on the CPU; children stay as they are."""
    whole = type(module).__new__(type(module))
    whole.__dict__.update(module.__dict__)
    prefix = f"{path}." if path else ""

    def made(key: str, block: Tensor | None) -> Tensor | None:
        if block is None:
            return None
        full = torch.empty(held.covers[prefix + key].shape, dtype=block.dtype)
        if prefix + key not in empty:
            full.copy_(gathered(prefix + key))
        if isinstance(block, nn.Parameter):
            return nn.Parameter(full, requires_grad=block.requires_grad)
        return full

    whole.__dict__["_parameters"] = {k: made(k, p) for k, p in module._parameters.items()}
    whole.__dict__["_buffers"] = {k: made(k, b) for k, b in module._buffers.items()}
    return whole
