"""Compare a split operator with one device, and a primitive with its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.comm import Chain, Exchange, Mesh
from tilewise.layout import PARTIAL, Axis, Cover, Layout
from tilewise.ops.operation import Operation

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}


def error(found: Tensor, expected: Tensor, largest: float = 0.0) -> float:
    """Return max|a−b| / max(max|b|, 1e-3 × the largest magnitude among tensors of that kind)."""
    if found.shape != expected.shape:
        raise AssertionError(f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    if not expected.numel():
        return 0.0
    a, b = found.detach().double(), expected.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), (a - b).abs()).max().item()
    scale = max(b.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item(), 1e-3 * largest)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")


def assert_close(
    found: Tensor, expected: Tensor, what: str, *, largest: float = 0.0, tolerance: float = 0.0
) -> None:
    """Raise unless the error is within the tolerance of the dtype, or the one given."""
    limit = tolerance or TOLERANCE.get(expected.dtype, 0.0)
    found_error = error(found, expected, largest)
    if not found_error <= limit:
        raise AssertionError(f"{what}: error {found_error:.2e} exceeds {limit:.0e}")


def assert_matches_serial(
    mesh: Mesh,
    operation: Operation,
    serial: Callable[..., Any],
    operands: Sequence[Tensor],
    layouts: Sequence[Layout],
    *,
    seed: int = 0,
    tolerance: float = 0.0,
) -> None:
    """Compare results and the gradients of all operands with one device.

    `serial` takes the global operands. Each rank cuts its slabs from them by `layouts`, runs the
    operation forward and backward, and compares its slabs of everything.
    """
    whole = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in operands]
    expected = _tuple(serial(*whole))
    generator = torch.Generator().manual_seed(seed + 1)
    seeds = [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in expected
    ]
    tracked = [(t, s) for t, s in zip(expected, seeds) if t.requires_grad]
    if tracked:
        torch.autograd.backward([t for t, _ in tracked], [s for _, s in tracked])

    local = [
        t.detach()[layout.slab(mesh.rank)].clone().requires_grad_(t.is_floating_point())
        for t, layout in zip(operands, layouts)
    ]
    chain = Chain()
    chain.start()
    bound = operation.bind(mesh, layouts, layer="test")
    found = _tuple(bound(*local, chain=chain))
    assert len(found) == len(expected)
    slabs = [layout.slab(mesh.rank) for layout in operation.outs]
    largest = max((t.detach().abs().max().item() for t in expected if t.numel()), default=0.0)
    for i, (t, e, slab) in enumerate(zip(found, expected, slabs)):
        assert_close(t, e[slab], f"output {i}", largest=largest, tolerance=tolerance)
    split = [(t, s[slab]) for t, s, slab in zip(found, seeds, slabs) if t.requires_grad]
    if not split:
        return
    torch.autograd.backward([t for t, _ in split], [s for _, s in split])
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in whole]
    largest = max((g.abs().max().item() for g in grads if g.numel()), default=0.0)
    for i, (t, layout) in enumerate(zip(local, layouts)):
        if not t.requires_grad:
            continue
        found_grad = torch.zeros_like(t) if t.grad is None else t.grad
        assert_close(
            found_grad,
            grads[i][layout.slab(mesh.rank)],
            f"gradient of operand {i}",
            largest=largest,
            tolerance=tolerance,
        )


def assert_adjoint(mesh: Mesh, source: Layout | Cover, target: Layout | Cover) -> None:
    """Check ⟨Ax, y⟩ = ⟨x, A'y⟩ for an exchange, counting replicas once.

    The inner products run over distinct holders: x over the source's, y over the target's.
    """
    source = Cover.of(source) if isinstance(source, Layout) else source
    target = Cover.of(target) if isinstance(target, Layout) else target
    exchange = Exchange(mesh, source, target, layer="adjoint")
    x = _same_on_replicas(source, mesh.rank, 1)
    y = _same_on_replicas(target, mesh.rank, 2)
    forth = exchange.start(x).finish()
    back = exchange.start_adjoint(y).finish()
    sums = torch.stack(
        [
            (forth * y).sum() * _first(target, mesh.rank),
            (back * x).sum() * _first(source, mesh.rank),
        ]
    )
    everyone = Layout((2,), [Axis(mesh.size, PARTIAL)])
    total = Exchange(mesh, everyone, Layout.replicated((2,), ranks=mesh.size), layer="adjoint")
    left, right = total.start(sums).finish().tolist()
    if abs(left - right) > 1e-10 * max(abs(left), abs(right), 1.0):
        raise AssertionError(f"⟨Ax, y⟩ = {left} differs from ⟨x, A'y⟩ = {right}")


def _same_on_replicas(cover: Cover, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(_holder(cover, rank) * 7 + seed)
    return torch.randn(cover.local_shape(rank), generator=generator, dtype=torch.float64)


def _holder(cover: Cover, rank: int) -> int:
    """Return the first of the ranks that hold the same as `rank` does."""
    digits = [
        0 if axis.dim == -1 else digit for axis, digit in zip(cover.axes, cover.axes.digits(rank))
    ]
    return cover.axes.rank(digits)


def _first(cover: Cover, rank: int) -> float:
    return float(_holder(cover, rank) == rank)


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
