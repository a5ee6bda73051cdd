"""Give values to a split model that was built on the meta device, one whole module at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.errors import PlanError
from tilewise.graph.held import Held

Init = Callable[[nn.Module], Any]


def materialize(held: Held, init: Init | None, seed: int, device: torch.device) -> None:
    """Initialise every module that holds tensors without values, and keep this rank's blocks."""
    paths = {module: path for path, module in held.model.named_modules()}
    empty = [name for name in held.places if held.get(name).is_meta]
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
        whole = _whole(held, module, paths[module])
        if init is not None:
            init(whole)
        else:
            whole.reset_parameters()  # type: ignore[operator]
        _keep(held, whole, paths[module], device)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        held.model.apply(visit)


def _own(module: nn.Module, path: str) -> set[str]:
    """Return the full names of the tensors that a module holds itself."""
    prefix = f"{path}." if path else ""
    return {prefix + key for owner in (module._parameters, module._buffers) for key in owner}


def _whole(held: Held, module: nn.Module, path: str) -> nn.Module:
    """Return the module with whole tensors of its own on the CPU; children stay as they are."""
    whole = type(module).__new__(type(module))
    whole.__dict__.update(module.__dict__)
    prefix = f"{path}." if path else ""

    def made(key: str, block: Tensor | None) -> Tensor | None:
        if block is None:
            return None
        full = torch.empty(held.covers[prefix + key].shape, dtype=block.dtype)
        if isinstance(block, nn.Parameter):
            return nn.Parameter(full, requires_grad=block.requires_grad)
        return full

    whole.__dict__["_parameters"] = {k: made(k, p) for k, p in module._parameters.items()}
    whole.__dict__["_buffers"] = {k: made(k, b) for k, b in module._buffers.items()}
    return whole


def _keep(held: Held, whole: nn.Module, path: str, device: torch.device) -> None:
    """Put this rank's blocks of the whole tensors where the model holds them."""
    prefix = f"{path}." if path else ""
    for owner in (whole._parameters, whole._buffers):
        for key, tensor in owner.items():
            if tensor is not None:
                held.put(prefix + key, held.cut(prefix + key, tensor.detach()).to(device))
