"""Linear layers, and matrix products of two activations.

A linear layer is cut like a convolution: samples and space as they lie, channels by `c` and `f`
(see channels.py). A product of two activations is cut along its result's dims, batch, rows and
columns; the dim that is summed over is brought whole.

    (…, M, K) @ (…, K, N) → (…, M, N)       a keeps … and M, b keeps … and N
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, REPLICA, Axes, Block, Cover, Degrees, Layout
from tilewise.ops.channels import Channels, check_degrees, deal
from tilewise.ops.operation import Need, Operation, shared
from tilewise.ops.pointwise import broadcast


def linear(
    x: Layout,
    weight: Sequence[int],
    *,
    dims: str,
    degrees: Degrees,
    rank: int,
    bias: bool = False,
    layer: str = "linear",
) -> Operation:
    """Plan x times the transpose of a weight of shape (F, C); operands are x, weight[, bias].

    `dims` names the dims of x, such as `nc` or `nhwc`; a dot is a dim that is never cut. The
    last one is the channel.

    Layout: x any → y cut by n, d, h, w and into c·f channel parts.
    Communication: gather of x over `f`; reduce-scatter of y over `c`. The weight block's gradient
        is partial over n, d, h, w.
    Adjoint: gather of dy over `c`; reduce-scatter of dx over `f`.
    """
    filters, channels = weight
    product = _Product(x, channels, filters, dims, degrees, layer)
    needs = [Need(product.x), Need(product.weight(out_first=True))]
    if bias:
        needs.append(Need(product.bias((filters,))))
    with_bias = product.cut.adds_bias(rank, x.ranks)

    def local(inner: list[Any], x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias[0] if bias and with_bias else None)

    return Operation(tuple(needs), local, (product.gives,), (product.y,))


def matmul(
    x: Layout,
    weight: Sequence[int],
    *,
    dims: str,
    degrees: Degrees,
    layer: str = "matmul",
) -> Operation:
    """Plan x times a weight of shape (C, F); operands are x, weight.

    Layout, Communication, Adjoint: those of `linear`.
    """
    channels, filters = weight
    product = _Product(x, channels, filters, dims, degrees, layer)
    needs = (Need(product.x), Need(product.weight(out_first=False)))

    def local(inner: list[Any], x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.t())

    return Operation(needs, local, (product.gives,), (product.y,))


def addmm(
    bias: Sequence[int],
    x: Layout,
    weight: Sequence[int],
    *,
    degrees: Degrees,
    rank: int,
    beta: float = 1.0,
    alpha: float = 1.0,
    layer: str = "addmm",
) -> Operation:
    """Plan beta·bias + alpha·(x times a weight of shape (C, F)); operands are bias, x, weight.

    The bias has any shape that broadcasts to the product's.

    Layout, Communication, Adjoint: those of `linear`; a dim along which the bias is broadcast
        gets its gradient summed.
    """
    channels, filters = weight
    product = _Product(x, channels, filters, "nc", degrees, layer)
    if broadcast([bias, product.y.shape], layer) != product.y.shape:
        raise OperatorError(
            f"{layer}: bias {tuple(bias)} must broadcast to the product {product.y.shape}"
        )
    needs = (
        Need(product.bias(bias)),
        Need(product.x),
        Need(product.weight(out_first=False)),
    )
    with_bias = product.cut.adds_bias(rank, x.ranks)

    def local(inner: list[Any], bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight.t()) * alpha
        return y + bias * beta if with_bias else y

    return Operation(needs, local, (product.gives,), (product.y,))


def bmm(a: Layout, b: Layout, *, axes: Axes | None = None, layer: str = "bmm") -> Operation:
    """Plan the matrix product of two activations as torch.matmul defines it.

    Layout: a and b any → the result cut as `axes` say, or as the larger operand is in the dims
        that the result has.
    Communication: one move of each operand that does not lie with the result: a along batch and
        rows, b along batch and columns, both whole along the dim that is summed over.
    Adjoint: the gradients move back, summed over the dims along which the operand was shared.
    """
    shape, kept = _result(a, b, layer)
    if axes is None:
        source, keep = max(zip((a, b), kept), key=lambda pair: prod(pair[0].shape))
        at = dict.fromkeys(range(len(source.shape)), REPLICA)
        axes = source.axes.relabel(at | {dim: out for out, dim in keep.items()})
    out = Layout(shape, axes)
    needs = tuple(
        Need.of(Layout(operand.shape, shared(out.axes, keep)))
        for operand, keep in zip((a, b), kept)
    )

    def local(inner: list[Any], a: Tensor, b: Tensor) -> Tensor:
        return torch.matmul(a, b)

    return Operation(needs, local, (Cover.of(out),), (out,))


def _result(a: Layout, b: Layout, layer: str) -> tuple[tuple[int, ...], list[dict[int, int]]]:
    """Return the result's shape and, for a and b, which of its dims is which of theirs.

    Dims that an operand does not have, or is broadcast along, are left out.
    """
    summed = (len(a.shape) - 1, max(len(b.shape) - 2, 0))
    if not a.shape or not b.shape or a.shape[summed[0]] != b.shape[summed[1]]:
        raise OperatorError(
            f"{layer}: the last dim of {a.shape} must equal the last but one of {b.shape}"
        )
    batch = broadcast([a.shape[:-2], b.shape[:-2]], layer)
    rows, columns = a.shape[-2:-1], b.shape[-1:] if len(b.shape) > 1 else ()
    shape = (*batch, *rows, *columns)
    kept = []
    for operand in (a, b):
        lead = len(batch) - len(operand.shape[:-2])
        kept.append(
            {
                dim + lead: dim
                for dim, extent in enumerate(operand.shape[:-2])
                if extent == batch[dim + lead]
            }
        )
    if rows:
        kept[0][len(batch)] = len(a.shape) - 2
    if columns:
        kept[1][len(shape) - 1] = len(b.shape) - 1
    return shape, kept


class _Product:
    """What an activation, a weight block, a bias and their product lie like."""

    def __init__(
        self, x: Layout, channels: int, filters: int, dims: str, degrees: Degrees, layer: str
    ) -> None:
        if len(dims) != len(x.shape) or not dims.endswith("c"):
            raise OperatorError(
                f"{layer}: dims {dims!r} must name the {len(x.shape)} dims of the input {x.shape}, "
                "the channel c last"
            )
        if x.shape[-1] != channels:
            raise OperatorError(
                f"{layer}: the input's last dim (={x.shape[-1]}) must be what the weight takes "
                f"(={channels})"
            )
        check_degrees(degrees, dims, x.shape, layer)
        self.y = Layout.of((*x.shape[:-1], filters), dims, degrees, ranks=x.ranks)
        self.cut = Channels(channels, filters, degrees)
        self.work = {name: dim for dim, name in enumerate(dims[:-1]) if name != "."}
        last = len(dims) - 1
        kept = Cover.of(self.y).blocks[:last]
        self.x = Cover(x.shape, self._deal(c=last, f=PARTIAL), (*kept, self.cut.inputs))
        self.gives = Cover(self.y.shape, self._deal(c=PARTIAL, f=last), (*kept, self.cut.outputs))

    def weight(self, *, out_first: bool) -> Cover:
        """Return the weight block, (filters, channels) or (channels, filters)."""
        cut = self.cut
        alike = dict.fromkeys(self.work, PARTIAL)
        if out_first:
            axes = self._deal(**alike, c=1, f=0)
            return Cover((cut.filters, cut.channels), axes, (cut.outputs, cut.inputs))
        axes = self._deal(**alike, c=0, f=1)
        return Cover((cut.channels, cut.filters), axes, (cut.inputs, cut.outputs))

    def bias(self, shape: Sequence[int]) -> Cover:
        """Return the part of a bias that broadcasts to this rank's partial sum of y."""
        lead = len(self.y.shape) - len(shape)
        keep = {
            dim + lead: dim
            for dim, extent in enumerate(shape)
            if extent == self.y.shape[dim + lead]
        }
        whole = {dim: (Block.of(0, extent),) for dim, extent in enumerate(shape)}
        blocks = whole | {dim: self.gives.blocks[out] for out, dim in keep.items()}
        return Cover(tuple(shape), shared(self.gives.axes, keep), tuple(blocks.values()))

    def _deal(self, **at: int) -> Axes:
        return deal(self.cut.degrees, self.y.ranks, self.work | at)
