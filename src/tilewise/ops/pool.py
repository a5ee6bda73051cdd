"""Max and average pooling, split along any dims.

A rank that computes outputs [a, b) of a split dim fetches the inputs that their windows read and
pools them without padding; past the tensor's edge stands −inf or 0:

    kernel 3, stride 2, padding 1, outputs [2, 4)    input   · · · 3 4 5 6 7 · ·
                                                     output        └─2─┘
                                                                       └─3─┘

A dim that is not split keeps its padding for the local operator, so nothing is copied there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm.formats import is_last, memory_format
from tilewise.layout import Axes, Block, Cover, Layout, Window, block
from tilewise.ops.adaptive import adaptive_pool, relocate
from tilewise.ops.constants import there
from tilewise.ops.operation import Need, Operation, tied_zeros
from tilewise.ops.pool_spec import PoolSpec

_ATEN = torch.ops.aten
_FORTH = {
    ("max", 2): _ATEN.max_pool2d_with_indices,
    ("max", 3): _ATEN.max_pool3d_with_indices,
    ("avg", 2): _ATEN.avg_pool2d,
    ("avg", 3): _ATEN.avg_pool3d,
}
_BACK = {
    ("max", 2): _ATEN.max_pool2d_with_indices_backward,
    ("max", 3): _ATEN.max_pool3d_with_indices_backward,
    ("avg", 2): _ATEN.avg_pool2d_backward,
    ("avg", 3): _ATEN.avg_pool3d_backward,
}


def pool(
    x: Layout, spec: PoolSpec, *, axes: Axes | None = None, rank: int, layer: str = "pool"
) -> Operation:
    """Plan max or average pooling; with `return_indices` the second result holds int64 indices.

    Indices are flat positions in the global spatial plane, as on one device.

    Layout: x any → y cut as `axes` say or as x is. Where windows span a whole split dim, the
        ranks along it hold replicas of y unless `axes` say otherwise.
    Communication: the halo that windows reach into, one message to each peer that holds any;
        none where only samples and channels are split. Windows that span a whole split dim move
        no input (see adaptive_pool).
    Adjoint: the halo's gradient goes back and is added.
    """
    outputs = spec.check(x, layer)
    lead = len(x.shape) - spec.ndim
    extents = x.shape[lead:]
    if _spans_split(x, axes, spec, outputs):
        return adaptive_pool(
            x,
            spec.kind,
            outputs,
            return_indices=spec.return_indices,
            axes=axes,
            rank=rank,
            layer=layer,
        )
    y = Layout((*x.shape[:lead], *outputs), x.axes if axes is None else axes)
    native = tuple(
        parts == 1 and not _misses(window, extent, count)
        for window, extent, count, parts in zip(spec.windows, extents, outputs, y.degrees[lead:])
    )
    blocks = list(Cover.of(y).blocks[:lead])
    for dim, window in enumerate(spec.windows, start=lead):
        if native[dim - lead]:
            blocks.append((Block.of(0, x.shape[dim]),))
            continue
        cuts = [block(y.shape[dim], y.degrees[dim], k) for k in range(y.degrees[dim])]
        blocks.append(tuple(Block.clipped(*window.inputs(*cut), x.shape[dim]) for cut in cuts))
    need = Need(
        Cover(x.shape, y.axes, tuple(blocks)),
        fill=-inf if spec.kind == "max" else 0.0,
        fresh=prod(y.local_shape(rank)) > 0,
    )
    local = _Local(spec, extents, y.local_shape(rank), y.intervals(rank)[lead:], native)
    results = (y, y) if spec.return_indices else (y,)
    return Operation((need,), local, tuple(Cover.of(out) for out in results), results)


def _spans_split(x: Layout, axes: Axes | None, spec: PoolSpec, outputs: Sequence[int]) -> bool:
    """Whether windows tile the input and one of them spans a whole split dim."""
    lead = len(x.shape) - spec.ndim
    if spec.divisor_override is not None or not prod(x.shape):
        return False
    for window, extent, count in zip(spec.windows, x.shape[lead:], outputs):
        tiles = window.kernel * count == extent and window.dilation == 1 and not window.before
        if not tiles or (count > 1 and window.stride != window.kernel):
            return False
    split = [x.axes.parts(dim) * (axes or x.axes).parts(dim) for dim in range(len(x.shape))]
    return any(count == 1 and parts > 1 for count, parts in zip(outputs, split[lead:]))


def _first_tap(window: Window, output: int) -> int:
    """Return the first position at or after 0 that a window reads."""
    start = output * window.stride - window.before
    return start if start >= 0 else start % window.dilation


def _misses(window: Window, extent: int, count: int) -> bool:
    """Whether a dilated window steps over the whole input, which torch's kernels do not expect."""
    return any(_first_tap(window, output) >= extent for output in range(count))


class _Local:
    """The local pooling of one rank."""

    def __init__(
        self,
        spec: PoolSpec,
        extents: Sequence[int],
        out: tuple[int, ...],
        outputs: Sequence[tuple[int, int]],
        native: tuple[bool, ...],
    ) -> None:
        self.spec, self.extents, self.out, self.plain = spec, extents, out, all(native)
        self.starts = [
            0 if is_native else window.inputs(*cut)[0]
            for window, cut, is_native in zip(spec.windows, outputs, native)
        ]
        padding = [p if keep else 0 for p, keep in zip(spec.padding, native)]
        # torch has no 1-D kernels: it pools 1 × w planes, and so do we
        self.row = spec.ndim == 1
        self.ndim = spec.ndim + self.row
        lists = ([1], spec.kernel), ([1], spec.stride), ([0], padding), ([1], spec.dilation)
        self.args: list[Any] = [[*one * self.row, *values] for one, values in lists]
        self.factor: Tensor | None = None
        self.firsts: list[Tensor] | None = None
        if spec.kind == "max":
            self.args.append(spec.ceil_mode)
            if any(start < 0 for start in self.starts):
                self.firsts = [
                    torch.tensor([_first_tap(window, o) - start for o in range(*cut)])
                    for window, cut, start in zip(spec.windows, outputs, self.starts)
                ]
            return
        self.args[3:] = [spec.ceil_mode, spec.count_include_pad, spec.divisor_override]
        if not self.plain and spec.divisor_override is None:
            self.args[5] = prod(spec.kernel)
            self.factor = _correction(spec, extents, outputs)

    def __call__(self, inner: list[Any], x: Tensor) -> Any:
        if not prod(self.out):
            y = tied_zeros(self.out, x).to(self._dtype(x))
            indices = torch.zeros(self.out, dtype=torch.int64, device=x.device)
            return (y, indices) if self.spec.return_indices else y
        if self.row:
            x = x.unsqueeze(-2)
        if self.spec.kind == "avg":
            y = self._average(x)
            return y.squeeze(-2) if self.row else y
        y, indices = self._maximum(x)
        if self.row:
            y, indices = y.squeeze(-2), indices.squeeze(-2)
        if not self.spec.return_indices:
            return y
        slab = x.shape[-self.spec.ndim :]
        return y, indices if self.plain else relocate(indices, slab, self.starts, self.extents)

    def _dtype(self, x: Tensor) -> torch.dtype:
        """Return what pooling would give; autocast averages volumes in another dtype."""
        if self.spec.kind == "max" or not torch.is_autocast_enabled(x.device.type):
            return x.dtype
        ones = [1] * (self.ndim + 2)
        return _FORTH["avg", self.ndim](x.new_zeros(ones), ones[2:]).dtype  # type: ignore[no-any-return]

    def _average(self, x: Tensor) -> Tensor:
        if self._apart(x):
            y: Tensor = _Average.apply(x, *self.args[:3], 1 / (self.args[5] or prod(self.args[0])))
            return y if self.factor is None else y * there(self.factor, y.device, y.dtype)
        if self.plain:
            y = _FORTH["avg", self.ndim](x, *self.args)
            return y
        y = _Pool.apply(x, "avg", self.ndim, self.args, None)
        return y if self.factor is None else y * there(self.factor, y.device, y.dtype)

    def _apart(self, x: Tensor) -> bool:
        """Whether to average one dim after the other: volumes whose channels are innermost."""
        padded, (ceil_mode, counts_padding, divisor) = any(self.args[2]), self.args[3:]
        return (
            self.ndim == 3
            and is_last(x)
            and x.dtype in (torch.float32, torch.float64)  # sums of halves are rounded in between
            and not torch.is_autocast_enabled(x.device.type)
            and not ceil_mode
            and bool(divisor or counts_padding or not padded)
        )

    def _maximum(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.plain:
            found: tuple[Tensor, Tensor] = _FORTH["max", self.ndim](x, *self.args)
            return found
        found = _Pool.apply(x, "max", self.ndim, self.args, self.firsts)
        return found


class _Average(torch.autograd.Function):
    """Average volumes along one dim after the other, as sums of slices.

    torch copies a volume whose channels are innermost, walks it value by value, backward too, and
    loses the format. Here slices are whole rows of channels, in a third of the time.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], scale: float
    ) -> Tensor:
        ctx.scale, ctx.format, ctx.dims = scale, memory_format(x), []
        for dim, window in enumerate(zip(kernel, stride, padding), start=x.dim() - len(kernel)):
            taps, shape = _taps(x.shape[dim], *window), list(x.shape)
            ctx.dims.append((dim, x.shape, taps))
            shape[dim] = (shape[dim] + 2 * window[2] - window[0]) // window[1] + 1
            x = _summed(x, dim, shape, ctx.format, taps)
        return x.mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad = grad * ctx.scale
        for dim, shape, taps in reversed(ctx.dims):
            grad = _summed(grad, dim, shape, ctx.format, [(of, to) for to, of in taps])
        return grad, None, None, None, None


def _taps(extent: int, width: int, step: int, pads: int) -> list[tuple[slice, slice]]:
    """List for each tap of a window the outputs that read a value with it, and those values."""
    count = (extent + 2 * pads - width) // step + 1
    found = []
    for shift in range(-pads, width - pads):
        first, end = max(0, -(shift // step)), min(count, (extent - 1 - shift) // step + 1)
        if first < end:
            values = slice(first * step + shift, (end - 1) * step + shift + 1, step)
            found.append((slice(first, end), values))
    return found


def _summed(
    x: Tensor,
    dim: int,
    shape: Sequence[int],
    format: torch.memory_format,
    slices: Sequence[tuple[slice, slice]],
) -> Tensor:
    """Add to slices of a new tensor, along a dim, slices of x."""
    total = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=format)
    (to, of), *others = sorted(slices, key=lambda found: found[0].start - found[0].stop)
    ahead = (slice(None),) * dim
    if to.indices(shape[dim]) == (0, shape[dim], 1):
        total.copy_(x[(*ahead, of)])
    else:
        total.zero_()
        others = [(to, of), *others]
    for to, of in others:
        total[(*ahead, to)] += x[(*ahead, of)]
    return total


class _Pool(torch.autograd.Function):
    """Pool a fetched slab without keeping it for backward, as torch's own operators would."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kind: str, ndim: int, args: list[Any], firsts: list[Tensor] | None
    ) -> Any:
        ctx.how = kind, ndim, args
        ctx.shape, ctx.format = x.shape, memory_format(x)
        if kind == "avg":
            return _FORTH[kind, ndim](x, *args)
        y, indices = _FORTH[kind, ndim](x, *args)
        if firsts is not None:
            # where all is −inf, one device points at the first input, not at the padding
            flat = _flat([there(first, x.device) for first in firsts], x.shape[-len(firsts) :])
            flat = flat.view(y.shape[-ndim:])
            indices = torch.where(y == -inf, flat, indices)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        return y, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        kind, ndim, args = ctx.how
        if ctx.format == torch.contiguous_format:  # only its shape is looked at
            like = grad.new_empty(()).expand(ctx.shape)
        else:
            like = torch.empty(
                ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format
            )
        found = _BACK[kind, ndim](grad, like, *args, *ctx.saved_tensors)
        return found, None, None, None, None


def _flat(positions: Sequence[Tensor], extents: Sequence[int]) -> Tensor:
    """Return the flat position of every combination of positions along each dim."""
    flat = positions[0]
    for position, extent in zip(positions[1:], extents[1:]):
        flat = flat[..., None] * extent + position
    return flat


def _correction(
    spec: PoolSpec, extents: Sequence[int], outputs: Sequence[tuple[int, int]]
) -> Tensor | None:
    """Return kernel / counted elements for each output, or None where it is 1 everywhere."""
    factor = torch.ones((), dtype=torch.float64)
    for window, extent, cut in zip(spec.windows, extents, outputs):
        starts = torch.arange(*cut) * window.stride - window.before
        if spec.count_include_pad:
            counts = (starts + window.kernel).clamp(max=extent + window.before) - starts
        else:
            counts = (starts + window.kernel).clamp(max=extent) - starts.clamp(min=0)
        factor = factor[..., None] * (window.kernel / counts.double())
    return None if bool((factor == 1).all()) else factor


__all__ = ["PoolSpec", "pool"]
