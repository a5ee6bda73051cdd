"""Clip gradients by their global norm."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.comm import Exchange
from tilewise.graph.parallel import ParallelModel
from tilewise.layout import PARTIAL, REPLICA, Axis, Cover, Layout


@torch.no_grad()
def clip_grad_norm_(model: ParallelModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`.

    Returns the norm before. A block that several ranks hold counts once.

    Communication: one number from every rank.
    """
    if norm_type <= 0 or norm_type != norm_type:
        raise ValueError(f"clip_grad_norm_: norm_type (={norm_type}) must be positive")
    found = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    infinite = norm_type == float("inf")
    device = found[0][1].device if found else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, grad in found:
        if not grad.numel():
            continue
        if infinite:
            total = torch.maximum(total, grad.abs().max().double())
        else:
            copies = _copies(model.held.covers[name])
            total += grad.double().abs().pow(norm_type).sum() / copies
    norms = _everyone(model, total)
    norm = norms.max() if infinite else norms.sum().pow(1.0 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in found:
        grad.mul_(scale.to(grad.dtype))
    return norm.to(found[0][1].dtype) if found else norm


def _copies(cover: Cover) -> int:
    """Return how many ranks hold the same block."""
    copies = 1
    for axis in cover.axes:
        copies *= axis.size if axis.dim in (REPLICA, PARTIAL) else 1
    return copies


def _everyone(model: ParallelModel, number: Tensor) -> Tensor:
    """Gather one number from every rank, in rank order."""
    size = model.mesh.size
    split = Layout((size,), [Axis(size, 0)])
    whole = Layout.replicated((size,), ranks=size)
    exchange = Exchange(model.mesh, split, whole, layer="clip_grad_norm_")
    return exchange.start(number.reshape(1)).finish()
