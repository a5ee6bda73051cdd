"""Convolution and transposed convolution, split along samples, space, channels and filters.

Channels of every activation are cut into c·f balanced parts. A convolution gathers x over `f`,
convolves with its weight block, and reduce-scatters y over `c`:

    x  part ci·f+fi ──gather over f──▶ input channels of ci
    w  block (filters of fi) × (channels of ci)
    y  filters of fi, partial over c ──reduce-scatter over c──▶ part ci·f+fi

Halos travel in the same messages as the gather. Grouped convolutions are cut along whole groups
and need neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import OperatorError
from tilewise.layout import (
    PARTIAL,
    REPLICA,
    Axes,
    Axis,
    Cover,
    Degrees,
    Layout,
    Window,
    block,
)
from tilewise.layout.cover import Block
from tilewise.ops.operation import Need, Operation, tied_zeros

SPACE = "dhw"


@dataclass(frozen=True)
class ConvSpec:
    """A convolution's arguments, one entry for each spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    @property
    def windows(self) -> tuple[Window, ...]:
        extra = self.output_padding or (0,) * self.ndim
        return tuple(
            Window(k, s, d, before, after - (more if self.transposed else 0), self.transposed)
            for k, s, d, (before, after), more in zip(
                self.kernel, self.stride, self.dilation, self.padding, extra
            )
        )

    @classmethod
    def of(
        cls,
        weight: Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int | tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        transposed: bool = False,
        output_padding: int | Sequence[int] = 0,
    ) -> ConvSpec:
        """Read the arguments as torch takes them; padding may also be (before, after) pairs."""
        kernel = tuple(weight[2:])
        dilation = _each(dilation, kernel)
        if padding == "valid":
            padding = 0
        if padding == "same":
            totals = [d * (k - 1) for k, d in zip(kernel, dilation)]
            pairs = tuple((total // 2, total - total // 2) for total in totals)
        else:
            assert not isinstance(padding, str)
            listed = [padding] * len(kernel) if isinstance(padding, int) else list(padding)
            listed = listed * len(kernel) if len(listed) == 1 else listed
            pairs = tuple((p, p) if isinstance(p, int) else (p[0], p[1]) for p in listed)
        return cls(
            kernel,
            _each(stride, kernel),
            pairs,
            dilation,
            groups,
            transposed,
            _each(output_padding, kernel) if transposed else (),
        )


def _each(value: int | Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * len(kernel) if len(values) == 1 else values)


def conv(
    x: Layout,
    weight: Sequence[int],
    spec: ConvSpec,
    *,
    degrees: Degrees,
    rank: int,
    bias: bool = False,
    layer: str = "conv",
) -> Operation:
    """Plan a convolution of x by a weight of this global shape; operands are x, weight[, bias].

    Layout: x any → y cut by n, d, h, w and into c·f channel parts.
    Communication: halos and the gather of x over `f` in one message to each peer; reduce-scatter
        of y over `c`. The weight block's gradient is partial over n, d, h, w.
    Adjoint: gather of dy over `c`; halos and reduce-scatter of dx over `f` in one message.
    """
    channels, filters = _check(x, weight, spec, layer)
    ranks = x.ranks
    space = SPACE[3 - spec.ndim :]
    _check_degrees(degrees, space, x, layer)
    outputs = [window.outputs(e) for window, e in zip(spec.windows, x.shape[2:])]
    if any(extent < 1 for extent in outputs):
        raise OperatorError(
            f"{layer}: the kernel {spec.kernel} reaches further than the padded input "
            f"{x.shape[2:]} with padding {spec.padding} and dilation {spec.dilation}; pad more "
            "or use a smaller kernel"
        )
    y = Layout.of((x.shape[0], filters, *outputs), "nc" + space, degrees, ranks=ranks)

    def axes(c: int, f: int, work: int | None = None) -> Axes:
        """Deal out n, d, h, w as the work is split, or to `work`; c and f as given."""
        at = {name: dim for dim, name in enumerate("n." + space)} | {"c": c, "f": f}
        return Axes(
            [
                *(
                    Axis(size, at[name] if work is None or name in "cf" else work)
                    for name, size in degrees.items()
                    if name in at
                ),
                Axis(degrees.replicas(ranks)),
            ]
        )

    cut = _Channels(channels, filters, spec, degrees)
    f_role, c_role = (1, 1) if cut.grouped else (PARTIAL, PARTIAL)
    x_axes = axes(1, f_role)
    y_axes = axes(c_role, 1)
    space_blocks = [
        tuple(
            _input_block(window, x.shape[dim], *block(y.shape[dim], parts, index), parts)
            for index in range(parts)
        )
        for dim, (window, parts) in enumerate(zip(spec.windows, y.degrees[2:]), start=2)
    ]
    samples = Cover.of(y).blocks[0]
    x_need = Cover(x.shape, x_axes, (samples, cut.inputs, *space_blocks))
    y_give = Cover(y.shape, y_axes, (samples, cut.outputs, *Cover.of(y).blocks[2:]))

    if cut.grouped:
        w_axes = axes(0, 0, PARTIAL)
        w_blocks = [cut.inputs if spec.transposed else cut.outputs, (Block.of(0, weight[1]),)]
    elif spec.transposed:
        w_axes, w_blocks = axes(0, 1, PARTIAL), [cut.inputs, cut.outputs]
    else:
        w_axes, w_blocks = axes(1, 0, PARTIAL), [cut.outputs, cut.inputs]
    kernel_blocks = [(Block.of(0, extent),) for extent in spec.kernel]
    w_need = Cover(tuple(weight), w_axes, (*w_blocks, *kernel_blocks))
    needs = [Need(x_need), Need(w_need)]
    if bias:
        b_axes = axes(0, 0, PARTIAL) if cut.grouped else axes(PARTIAL, 0, PARTIAL)
        needs.append(Need(Cover((filters,), b_axes, (cut.outputs,))))

    first = cut.grouped or degrees.c == 1 or _digit(x_axes, rank, degrees, ranks) == 0
    local = _Local(
        spec,
        out=y_give.local_shape(rank),
        outputs=y.intervals(rank)[2:],
        extents=x.shape[2:],
        split=tuple(parts > 1 for parts in y.degrees[2:]),
        with_bias=first,
        groups=cut.local_groups(x_need.local_shape(rank)[1]),
    )
    return Operation(tuple(needs), local, (y_give,), (y,))


def _digit(axes: Axes, rank: int, degrees: Degrees, ranks: int) -> int:
    """Return the rank's position along the channel degree c."""
    return rank // (degrees.f * degrees.replicas(ranks)) % degrees.c


@dataclass(frozen=True)
class _Channels:
    """How a convolution's input channels and filters are dealt out."""

    channels: int
    filters: int
    spec: ConvSpec
    degrees: Degrees

    @property
    def grouped(self) -> bool:
        return self.spec.groups > 1

    def _whole_groups(self, size: int) -> tuple[Block, ...]:
        parts = self.degrees.c * self.degrees.f
        step = size // self.spec.groups
        cuts = [block(self.spec.groups, parts, index) for index in range(parts)]
        return tuple(Block.of(start * step, stop * step) for start, stop in cuts)

    @property
    def inputs(self) -> tuple[Block, ...]:
        if self.grouped:
            return self._whole_groups(self.channels)
        c = self.degrees.c
        return tuple(Block.of(*block(self.channels, c, index)) for index in range(c))

    @property
    def outputs(self) -> tuple[Block, ...]:
        if self.grouped:
            return self._whole_groups(self.filters)
        c, f = self.degrees.c, self.degrees.f
        return tuple(
            Block.union([block(self.filters, c * f, ci * f + fi) for ci in range(c)])
            for fi in range(f)
        )

    def local_groups(self, local_channels: int) -> int:
        return local_channels * self.spec.groups // self.channels if self.grouped else 1


def _input_block(window: Window, extent: int, start: int, stop: int, parts: int) -> Block:
    """Return the inputs that outputs [start, stop) read.

    A dim that is not split keeps its padding for the local operator where that can express it.
    """
    if parts == 1 and (window.transposed or window.before == window.after):
        return Block.of(0, extent)
    first, last = window.inputs(start, stop)
    if window.transposed:
        return Block.of(max(first, 0), min(last, extent))
    return Block.clipped(first, last, extent)


class _Local:
    """The local convolution of one rank."""

    def __init__(
        self,
        spec: ConvSpec,
        *,
        out: tuple[int, ...],
        outputs: Sequence[tuple[int, int]],
        extents: Sequence[int],
        split: tuple[bool, ...],
        with_bias: bool,
        groups: int,
    ) -> None:
        self.spec, self.out, self.with_bias, self.groups = spec, out, with_bias, groups
        self.padding = [0] * spec.ndim
        self.output_padding = [0] * spec.ndim
        self.crops: list[tuple[int, int, int]] = []
        for i, (window, is_split) in enumerate(zip(spec.windows, split)):
            if not is_split and (spec.transposed or window.before == window.after):
                self.padding[i] = window.before
                if spec.transposed:
                    self.output_padding[i] = spec.output_padding[i]
            elif spec.transposed:
                start, stop = outputs[i]
                first = max(window.inputs(start, stop)[0], 0)
                self.crops.append(
                    (i + 2, start - first * window.stride + window.before, stop - start)
                )

    def __call__(self, inner: list[Any], x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        if not prod(self.out):
            return tied_zeros(self.out, x, weight, *bias)
        b = bias[0] if bias and self.with_bias else None
        if not x.numel() or not weight.numel():
            y = tied_zeros(self.out, x, weight, *bias)
            return y if b is None else y + b.view(-1, *[1] * self.spec.ndim)
        late = b if self.crops else None
        y = torch.ops.aten.convolution(
            x,
            weight,
            None if self.crops else b,
            self.spec.stride,
            self.padding,
            self.spec.dilation,
            self.spec.transposed,
            self.output_padding,
            self.groups,
        )
        for dim, start, length in self.crops:
            y = _crop(y, dim, start, length)
        if late is not None:
            y = y + late.view(-1, *[1] * self.spec.ndim)
        return y


def _crop(y: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Take [start, start + length) along dim, zeros where y has nothing."""
    before, after = max(-start, 0), max(start + length - y.shape[dim], 0)
    if before or after:
        pad = [0, 0] * (y.dim() - dim - 1) + [before, after]
        y = torch.nn.functional.pad(y, pad)
        start += before
    return y.narrow(dim, start, length)


def _check(x: Layout, weight: Sequence[int], spec: ConvSpec, layer: str) -> tuple[int, int]:
    """Return the global numbers of channels and filters, or raise what one device would."""
    if len(x.shape) != spec.ndim + 2:
        raise OperatorError(
            f"{layer}: input {x.shape} has {len(x.shape)} dims, a {spec.ndim}-D convolution takes "
            f"{spec.ndim + 2} (sample, channel and {spec.ndim} of space); add a batch dim of 1"
        )
    channels = weight[0] if spec.transposed else weight[1] * spec.groups
    filters = weight[1] * spec.groups if spec.transposed else weight[0]
    if x.shape[1] != channels:
        raise OperatorError(
            f"{layer}: input channels (={x.shape[1]}) must be what the weight {tuple(weight)} with "
            f"groups={spec.groups} takes (={channels})"
        )
    if channels % spec.groups or filters % spec.groups:
        raise OperatorError(
            f"{layer}: channels (={channels}) and filters (={filters}) must be divisible by "
            f"groups (={spec.groups})"
        )
    return channels, filters


def _check_degrees(degrees: Degrees, space: str, x: Layout, layer: str) -> None:
    names = {"d": "depth", "h": "height", "w": "width"}
    for name, size in degrees.items():
        if size > 1 and name in names and name not in space:
            raise OperatorError(
                f"{layer}: has no {names[name]} to cut by {name}{size} (input {x.shape}); use "
                f"{', '.join(space)}, n, c or f"
            )


__all__ = ["REPLICA", "ConvSpec", "conv"]
