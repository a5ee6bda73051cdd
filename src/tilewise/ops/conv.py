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

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewise.comm.formats import between, is_last
from tilewise.errors import OperatorError
from tilewise.layout import (
    PARTIAL,
    Axes,
    Cover,
    Degrees,
    Layout,
    Window,
    block,
)
from tilewise.layout.cover import Block
from tilewise.ops.channels import Channels, check_degrees, deal
from tilewise.ops.conv_local import LocalConv
from tilewise.ops.conv_run import ConvRun
from tilewise.ops.conv_spec import ConvSpec
from tilewise.ops.operation import Need, Operation, tied_zeros

SPACE = "dhw"
TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: torch.conv_transpose1d,
    2: torch.conv_transpose2d,
    3: torch.conv_transpose3d,
}


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
    check_degrees(degrees, "n" + space, x.shape, layer)
    outputs = _outputs(x, spec, layer)
    y = Layout.of((x.shape[0], filters, *outputs), "nc" + space, degrees, ranks=ranks)

    def axes(c: int, f: int, work: int | None = None) -> Axes:
        """Deal out n, d, h, w as the work is split, or to `work`; c and f as given."""
        at = {name: dim for dim, name in enumerate("n." + space) if name != "."}
        if work is not None:
            at = dict.fromkeys(at, work)
        return deal(degrees, ranks, at | {"c": c, "f": f})

    cut = Channels(channels, filters, degrees, spec.groups)
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

    out, groups = y_give.local_shape(rank), cut.local_groups(x_need.local_shape(rank)[1])
    with_bias = cut.adds_bias(rank, ranks)
    split = [parts > 1 for parts in y.degrees[2:]]
    if spec.transposed:
        transposed = _Transposed(spec, out, y.intervals(rank)[2:], split, with_bias, groups)
        return Operation(tuple(needs), transposed, (y_give,), (y,))
    padding = tuple(
        0 if is_split or before != after else before
        for (before, after), is_split in zip(spec.padding, split)
    )
    local = LocalConv(spec, padding, out, groups)
    work = prod(y.shape) * prod(weight[1:]) / ranks
    shapes = x_need.local_shape(rank), w_need.local_shape(rank)
    fused = partial(ConvRun, local, shapes=shapes, with_bias=with_bias, work=work)
    return Operation(tuple(needs), fused, (y_give,), (y,), fused=True)


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


class _Transposed:
    """The local transposed convolution of one rank."""

    def __init__(
        self,
        spec: ConvSpec,
        out: tuple[int, ...],
        outputs: Sequence[tuple[int, int]],
        split: Sequence[bool],
        with_bias: bool,
        groups: int,
    ) -> None:
        self.spec, self.out, self.with_bias, self.groups = spec, out, with_bias, groups
        self.padding = [0] * spec.ndim
        self.output_padding = [0] * spec.ndim
        self.crops: list[tuple[int, int, int]] = []
        for i, (window, is_split) in enumerate(zip(spec.windows, split)):
            if not is_split:
                self.padding[i] = window.before
                self.output_padding[i] = spec.output_padding[i]
            else:
                start, stop = outputs[i]
                first = max(window.inputs(start, stop)[0], 0)
                self.crops.append(
                    (i + 2, start - first * window.stride + window.before, stop - start)
                )

    def __call__(self, inner: list[Any], x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        b = bias[0] if bias and self.with_bias else None
        if not prod(self.out) or not x.numel() or not weight.numel():
            y = tied_zeros(self.out, x, weight, *bias).to(self._dtype(x, weight))
            return y if b is None else y.add_(b.view(-1, *[1] * self.spec.ndim))
        # the function that autocast knows; it does not know aten.convolution
        y = TRANSPOSED[self.spec.ndim](
            x, weight, None if self.crops else b, self.spec.stride, self.padding,
            self.output_padding, self.groups, self.spec.dilation,
        )  # fmt: skip
        y = between(y, last=is_last(x))  # torch's own kernels for volumes lose the format
        if not self.crops:
            return y
        y = _crop(y, self.crops)
        return y if b is None else y.add_(b.view(-1, *[1] * self.spec.ndim))

    def _dtype(self, x: Tensor, weight: Tensor) -> torch.dtype:
        """Return what the convolution would give: peers with more to do expect the same."""
        if not torch.is_autocast_enabled(x.device.type):
            return x.dtype
        ones = [1] * (self.spec.ndim + 2)
        return TRANSPOSED[self.spec.ndim](x.new_zeros(ones), weight.new_zeros(ones)).dtype


def _crop(y: Tensor, crops: Sequence[tuple[int, int, int]]) -> Tensor:
    """Take [start, start + length) along each dim named, zeros where y has nothing."""
    pad = [0, 0] * (y.dim() - 2)
    for dim, start, length in crops:
        at = 2 * (y.dim() - 1 - dim)
        pad[at : at + 2] = -start, start + length - y.shape[dim]
    return torch.nn.functional.pad(y, pad) if any(pad) else y


def _outputs(x: Layout, spec: ConvSpec, layer: str) -> list[int]:
    """Return the global spatial extents of the result."""
    outputs = [window.outputs(e) for window, e in zip(spec.windows, x.shape[2:])]
    if min(outputs) < 1 and spec.transposed:
        raise OperatorError(
            f"{layer}: the padding {spec.padding} takes away all of the result of input "
            f"{x.shape[2:]} and kernel {spec.kernel}; pad less"
        )
    if min(outputs) < 1:
        raise OperatorError(
            f"{layer}: the kernel {spec.kernel} reaches further than the padded input "
            f"{x.shape[2:]} with padding {spec.padding} and dilation {spec.dilation}; pad more "
            "or use a smaller kernel"
        )
    return outputs


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


__all__ = ["ConvSpec", "conv"]
