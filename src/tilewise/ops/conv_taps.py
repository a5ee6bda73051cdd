"""The gradient of a convolution's weight, as one matrix product for each place of the kernel.

A place of the kernel (a tap) meets the padded slab shifted by its offset. With the rows of space
laid end to end, as wide as the padded slab, that shift is a number of positions:

    x   a b c d 0 | e f g h 0 | …          dw[tap] = Σ over positions p  dy[p] · x[p + offset]
    dy  p q r 0 0 | s t u 0 0 | …

so nothing is unfolded, and what lies past the end of a row is multiplied by zero: where x has
overflowed to infinity, gradients that torch finds infinite or finite may be NaN here. Rows go by in
blocks that stay in the cache. With a stride, x is taken apart into its residues first. Compared
with the kernels of oneDNN for this gradient, sums are shorter and so their rounding is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from torch import Tensor

from tilewise.comm.formats import is_last

BLOCK = 1 << 19
"""Elements of x or dy in a block; 2 MiB of float32."""


def weight_gradient(
    dy: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the gradient of the weight, from dy and x in the same memory format."""
    space, last = len(kernel), is_last(x)
    outs = dy.shape[2:]
    offsets = [[tap * step for tap in range(size)] for size, step in zip(kernel, dilation)]
    reach = [max(o // s for o in some) for some, s in zip(offsets, stride)]
    widths = [out + far for out, far in zip(outs, reach)]  # of rows laid end to end
    channels, filters = x.shape[1], dy.shape[1]
    row = prod(widths[1:])
    rows = min(max(BLOCK // (row * max(channels, filters)), 1), outs[0])
    grad = x.new_zeros(filters, prod(kernel), channels)
    dy_rows = _Rows(dy, (rows, *widths[1:]), last)
    x_rows = {
        residue: _Rows(x, (rows + reach[0], *widths[1:]), last)
        for residue in product(*({o % s for o in some} for some, s in zip(offsets, stride)))
    }
    for sample in range(len(x)):
        for start in range(0, outs[0], rows):
            stop = min(start + rows, outs[0])
            dy_rows.fill(dy[sample, :, start:stop])
            for residue, block in x_rows.items():
                first = [start * stride[0], *[0] * (space - 1)]
                begins = [a + r - p for a, r, p in zip(first, residue, padding)]
                block.fill_strided(x[sample], begins, stride)
            length = (stop - start) * row
            for tap, at in enumerate(product(*offsets)):
                block = x_rows[tuple(o % s for o, s in zip(at, stride))]
                shift = _position([o // s for o, s in zip(at, stride)], widths)
                count = min(length, block.length - shift)
                own, other = dy_rows.positions[:count], block.positions[shift : shift + count]
                grad[:, tap].addmm_(own.t(), other)
    return grad.view(filters, *kernel, channels).movedim(-1, 1)


def _position(index: Sequence[int], widths: Sequence[int]) -> int:
    """Return where an index lies when rows are laid end to end."""
    found = 0
    for i, width in zip(index, widths):
        found = found * width + i
    return found


class _Rows:
    """Rows of space laid end to end, of one sample: a matrix of positions by channels."""

    def __init__(self, like: Tensor, extents: Sequence[int], last: bool) -> None:
        channels = like.shape[1]
        self.length = prod(extents)
        flat = like.new_zeros((*extents, channels) if last else (channels, *extents))
        self.view = flat.movedim(-1, 0) if last else flat
        self.positions = flat.view(-1, channels) if last else flat.view(channels, -1).t()

    def fill(self, values: Tensor) -> None:
        """Put values to the front of each row."""
        self.view[(slice(None), *(slice(0, extent) for extent in values.shape[1:]))] = values

    def fill_strided(self, x: Tensor, begins: Sequence[int], steps: Sequence[int]) -> None:
        """Put every `step`-th of the values from `begin` on, zeros where there are none."""
        here: list[Any] = [slice(None)]
        there: list[Any] = [slice(None)]
        for begin, step, extent, width in zip(begins, steps, x.shape[1:], self.view.shape[1:]):
            first = min(max(-(begin // step), 0), width)  # what lies before the tensor's edge
            end = min(max(-(-(extent - begin) // step), first), width)
            here.append(slice(first, end))
            inside = slice(begin + first * step, begin + end * step, step)
            there.append(inside if first < end else slice(0, 0))
        if any(s.stop - s.start < w for s, w in zip(here[1:], self.view.shape[1:])):
            self.view.zero_()
        self.view[tuple(here)] = x[tuple(there)]
