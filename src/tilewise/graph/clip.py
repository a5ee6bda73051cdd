"""Clip gradients by their global norm."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from tilewise.graph.parallel import ParallelModel
from tilewise.layout import REPLICA, Axis, Cover, Layout


@torch.no_grad()
def clip_grad_norm_(
    model: ParallelModel,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`.

    Returns the norm before. A block that several ranks hold counts once.

    Communication: one number from every rank.
    """
    norm = _norm(model, norm_type, "clip_grad_norm_")
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}; "
            "look for the layer that overflows, or pass error_if_nonfinite=False"
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for grad in found:
        grad.mul_(scale.to(grad.dtype))
    return norm.to(found[0].dtype) if found else norm


@torch.no_grad()
def grad_norm(model: ParallelModel, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients over all ranks, in float64, the same on every rank.

    Communication: one number from every rank.
    """
    return _norm(model, norm_type, "grad_norm")


def _norm(model: ParallelModel, norm_type: float, caller: str) -> Tensor:
    if not norm_type > 0:
        raise ValueError(f"{caller}: norm_type (={norm_type}) must be positive")
    model.runs.shares.check(caller, model.parameters())
    found = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    infinite = norm_type == float("inf")
    device = found[0][1].device if found else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, grad in found:
        if not grad.numel():
            continue
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        if infinite:
            total = torch.maximum(total, norm)
        else:
            total += norm.pow(norm_type) / _copies(model.cover(name))
    norms = everyone(model, total, layer="clip_grad_norm_")
    return norms.max() if infinite else norms.sum().pow(1.0 / norm_type)


def _copies(cover: Cover) -> int:
    """Return how many ranks hold the same block."""
    return prod(axis.size for axis in cover.axes if axis.dim == REPLICA)


def everyone(model: ParallelModel, number: Tensor, *, layer: str) -> Tensor:
    """Gather one number from every rank, in rank order."""
    size = model.mesh.size
    split = Layout((size,), [Axis(size, 0)])
    whole = Layout.replicated((size,), ranks=size)
    exchange = model.runs.exchange(split, whole, layer=layer)
    return exchange.start(number.reshape(1)).finish()
