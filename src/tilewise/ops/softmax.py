"""Softmax and its logarithm along any dim, cut or not; the input is never gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, REPLICA, Axes, Cover, Layout
from tilewise.ops.operation import Need, Operation
from tilewise.ops.summary import Summary, widened


def softmax(
    x: Layout,
    dim: int,
    *,
    log: bool = False,
    axes: Axes | None = None,
    rank: int,
    layer: str = "softmax",
) -> Operation:
    """Plan a softmax along `dim`, or with `log` its logarithm. Only the result is kept.

    Layout: x any → y cut as `axes` say or as x is.
    Communication: none where dim is not cut; otherwise the largest element and the sum of
        exponentials of each slab, one message to each rank that shares them.
    Adjoint: one all-reduce of a number for each sum.
    """
    ndim = len(x.shape)
    if not -ndim <= dim < ndim:
        raise OperatorError(f"{layer}: dim (={dim}) must be a dim of the input {x.shape}")
    work = Layout(x.shape, x.axes if axes is None else axes)
    along = Along(work, dim % ndim)

    def local(inner: list[Any], x: Tensor) -> Tensor:
        return along(inner, x, log=log)

    return Operation((Need.of(work),), local, (Cover.of(work),), (work,), along.inner)


def log_softmax(
    x: Layout, dim: int, *, axes: Axes | None = None, rank: int, layer: str = "log_softmax"
) -> Operation:
    """Plan the logarithm of a softmax: see `softmax`."""
    return softmax(x, dim, log=True, axes=axes, rank=rank, layer=layer)


class Along:
    """A softmax along one dim of slabs, for operators that have one inside."""

    def __init__(self, work: Layout, dim: int) -> None:
        self.dim = dim
        self.summary = Summary(work, (dim,))
        self.inner: tuple[tuple[Cover, Cover], ...] = ()
        if self.summary.split:
            shape = [1 if d == dim else extent for d, extent in enumerate(work.shape)]
            whole = Layout(shape, work.axes.relabel({dim: REPLICA}))
            used = Layout(shape, work.axes.relabel({dim: PARTIAL}))
            self.inner = (self.summary.ends(), (Cover.of(whole), Cover.of(used)))

    def __call__(self, inner: list[Any], x: Tensor, *, log: bool) -> Tensor:
        """Compute on this rank's slab; `inner` are the exchanges of `self.inner`."""
        if not self.summary.split:
            return (torch.log_softmax if log else torch.softmax)(x, self.dim)
        with torch.no_grad():
            top, total = self._log_sum(inner[0], widened(x))
        kept: list[Tensor] = []
        total = inner[1](_Sum.apply(x, total, kept, log))
        y: Tensor = _Shift.apply(x.detach(), top, total, kept, log, self.dim)
        return y

    def _log_sum(self, exchange: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest element and log Σ exp(x − largest), over all ranks.

        Their sum would round the second one away far from zero.
        """
        dim = self.dim
        if x.shape[dim]:
            top = x.amax(dim, keepdim=True)
            # where all is −∞ the difference would be NaN
            sums = (x - top.masked_fill(top == -torch.inf, 0)).exp_().sum(dim, keepdim=True)
        else:
            top = x.new_full([1 if d == dim else e for d, e in enumerate(x.shape)], -torch.inf)
            sums = torch.zeros_like(top)
        tops, parts = exchange(torch.stack([top, sums])).unbind(0)
        top = tops.amax(dim, keepdim=True)
        return top, (parts * (tops - top).exp()).sum(dim, keepdim=True).log()


class _Sum(torch.autograd.Function):
    """The logarithm of the sum of exponentials, given.

    All of the gradient of x comes through here: what it needs, `_Shift` leaves in `kept` on its
    way back. So only the result is kept, and half types are rounded once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, kept: list[Tensor], log: bool) -> Tensor:
        ctx.kept, ctx.log = kept, log
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        y, grad = ctx.kept
        ctx.kept.clear()
        wide, dy = widened(y), widened(grad)
        dx = torch.addcmul(dy, wide.exp(), dtotal) if ctx.log else wide * (dy + dtotal)
        return dx.to(y.dtype), None, None, None


class _Shift(torch.autograd.Function):
    """x − top − total, or its exponential; a function of total alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        top: Tensor,
        total: Tensor,
        kept: list[Tensor],
        log: bool,
        dim: int,
    ) -> Tensor:
        shifted = (widened(x) - top).sub_(total)
        y = (shifted if log else shifted.exp_()).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.kept, ctx.log, ctx.dim = kept, log, dim
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        ctx.kept[:] = [y, grad]
        dy = widened(grad)
        product = dy if ctx.log else dy * y
        return None, None, -product.sum(ctx.dim, keepdim=True), None, None, None
