"""What every split operator is: bring operands, compute locally, finish partial results.

    operand ──exchange──▶ needs ──local──▶ gives ──exchange──▶ out

All communication of an operator is declared here, so that it can be counted without running it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm import Chain, Exchange, Mesh
from tilewise.layout import PARTIAL, REPLICA, Axes, Axis, Cover, Layout

Step = Callable[[Tensor], Tensor]
Local = Callable[..., Any]


@dataclass(frozen=True)
class Need:
    """What an operand must be brought to; `fill` stands past the tensor's edge.

    With `fresh`, the local work gives its gradient in memory that nobody else holds; that may
    differ between ranks, so needs are alike without it.
    """

    cover: Cover
    fill: float = 0.0
    fresh: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, where: Layout | Cover, fill: float = 0.0) -> Need:
        return cls(Cover.of(where) if isinstance(where, Layout) else where, fill)

    @property
    def home(self) -> Layout:
        """The layout that this extends: the same axes, balanced blocks, no halos."""
        axes = self.cover.axes
        return Layout(
            self.cover.shape,
            Axes(Axis(a.size, REPLICA if a.dim == PARTIAL else a.dim) for a in axes),
        )


@dataclass(frozen=True, slots=True)
class Via:
    """An exchange in the middle of one pass' local work, with the thread that it belongs to."""

    exchange: Exchange
    chain: Chain | None

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.exchange(tensor, self.chain)


@dataclass(frozen=True)
class Operation:
    """One operator, split.

    Args:
        needs: for each tensor operand, what it must be brought to. An axis along which ranks use
            the operand for different results is marked PARTIAL: its gradient is summed there.
        local: computes this rank's results from the brought operands. Its first argument is the
            list of inner exchanges, ready to call (`Via`).
        gives: what `local` returns; an axis along which results are partial sums is PARTIAL.
        outs: the layouts of the results once finished.
        inner: exchanges in the middle of the local work, as (source, target).
        fused: `local` makes, of the mesh and the exchanges of the first operand and of the result,
            what runs them and the arithmetic as one node, so that messages travel behind it.
    """

    needs: tuple[Need, ...]
    local: Local
    gives: tuple[Cover, ...]
    outs: tuple[Layout, ...]
    inner: tuple[tuple[Cover, Cover], ...] = ()
    fused: bool = False

    @property
    def out(self) -> Layout:
        """The layout of the only result."""
        (out,) = self.outs
        return out

    def bind(self, mesh: Mesh, sources: Sequence[Layout | Cover | None], *, layer: str) -> Bound:
        """Make ready for operands that lie as `sources` say; None is already as needed."""
        return Bound(self, mesh, sources, layer)


class Bound:
    """An operation on a mesh: call it with this rank's operands."""

    def __init__(
        self,
        operation: Operation,
        mesh: Mesh,
        sources: Sequence[Layout | Cover | None],
        layer: str,
    ) -> None:
        self.operation = operation
        self.layer = layer
        self.local = operation.local
        self.brings = [
            None
            if source is None
            else _noisy(
                Exchange(mesh, source, need.cover, layer=layer, fill=need.fill, fresh=need.fresh)
            )
            for source, need in zip(sources, operation.needs, strict=True)
        ]
        self.inner = [Exchange(mesh, *ends, layer=layer, kind="sync") for ends in operation.inner]
        self.finishes = [
            _noisy(Exchange(mesh, given, out, layer=layer))
            for given, out in zip(operation.gives, operation.outs, strict=True)
        ]
        self.fused: Callable[..., Tensor] | None = None
        if operation.fused:
            self.fused = operation.local(mesh, self.brings[0], self.finishes[0])

    def __call__(self, *operands: Tensor, chain: Chain | None = None) -> Any:
        """Run on local operands; returns one tensor, or a tuple where there are several."""
        brings = self.brings if self.fused is None else [None, *self.brings[1:]]
        brought = [
            operand if bring is None else bring(operand, chain)
            for bring, operand in zip(brings, operands, strict=True)
        ]
        if self.fused is not None:
            return self.fused(*brought, chain=chain)
        inner = [Via(exchange, chain) for exchange in self.inner]
        results = self.local(inner, *brought)
        if isinstance(results, Tensor):
            return _finish(results, self.finishes[0], brought, chain)
        return tuple(
            _finish(result, finish, brought, chain)
            for finish, result in zip(self.finishes, results, strict=True)
        )


def _finish(
    result: Tensor, finish: Exchange | None, operands: Sequence[Tensor], chain: Chain | None
) -> Tensor:
    """Exchange a result; it needs a gradient on all ranks if it does on one.

    A rank may leave an operand out, as a bias that another one adds, and still has to take part in
    the messages of backward.
    """
    if finish is None:
        return result
    if torch.is_grad_enabled() and not result.requires_grad and result.is_floating_point():
        tracked = [operand for operand in operands if operand.requires_grad]
        if tracked:
            result = _Tied.apply(result, *tracked)
    return finish(result, chain)


def _noisy(exchange: Exchange) -> Exchange | None:
    """Return the exchange unless nothing ever happens in it."""
    return None if exchange.silent else exchange


def shared(axes: Sequence[Axis], keep: dict[int, int]) -> Axes:
    """Return the axes of an operand of work that `axes` split.

    `keep` maps a dim of the work to the operand's dim that is cut with it. Along all other dims
    the ranks use the same part of the operand for different results: PARTIAL.
    """
    return Axes(
        Axis(axis.size, keep.get(axis.dim, PARTIAL) if axis.dim >= 0 else axis.dim) for axis in axes
    )


def tied_zeros(shape: Sequence[int], *tensors: Tensor) -> Tensor:
    """Return zeros that depend on `tensors`, with zero gradients.

    A rank with nothing to compute still takes part in every message of backward.
    """
    out: Tensor = _TiedZeros.apply(tuple(shape), *tensors)
    return out


class _Tied(torch.autograd.Function):
    """A tensor that depends on others, with zero gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)


class _TiedZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *tensors: Tensor) -> Tensor:
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tensors[0].new_zeros(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.new_zeros(shape) for shape in ctx.shapes)
