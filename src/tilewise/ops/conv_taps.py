"""The gradient of a convolution's weight, as one matrix product for each place of the kernel.

A place of the kernel (a tap) meets the padded slab shifted by its offset. With the rows of space
laid end to end, as wide as the padded slab, that shift is a number of positions:

    x   a b c d 0 | e f g h 0 | …          dw[tap] = Σ over positions p  dy[p] · x[p + offset]
    dy  p q r 0 0 | s t u 0 0 | …

so nothing is unfolded, and what lies past the end of a row is multiplied by zero: where x has
overflowed to infinity, gradients that torch finds infinite or finite may be NaN here. Rows go by in
blocks that stay in the cache, filled from wherever x lies: a slab and its halo need not be joined.
With a stride, x is taken apart into its residues first. Compared with the kernels of oneDNN for
this gradient, sums are shorter and so their rounding is less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from torch import Tensor

BLOCK = 1 << 19
"""Elements of x or dy in a block; 2 MiB of float32."""

Part = tuple[Tensor, Sequence[int]]
"""A piece of x with all samples and channels, and where it begins along each dim of space."""


def weight_gradient(
    dy: Tensor,
    parts: Sequence[Part],
    kernel: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    last: bool,
) -> Tensor:
    """Return the gradient of the weight, from dy and the disjoint parts of x, zero elsewhere.

    `last` is whether channels lie innermost in memory; other formats do, but take longer.
    """
    space, x = len(kernel), parts[0][0]
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
                block.fill_strided([(part[sample], at) for part, at in parts], begins, stride)
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

    def fill_strided(
        self, parts: Sequence[Part], begins: Sequence[int], steps: Sequence[int]
    ) -> None:
        """Put every `step`-th of the values from `begin` on, zeros where there are none."""
        extents = self.view.shape[1:]
        found = []
        for part, at in parts:
            here: list[Any] = [slice(None)]
            there: list[Any] = [slice(None)]
            starts = [begin - origin for begin, origin in zip(begins, at)]
            for start, step, extent, width in zip(starts, steps, part.shape[1:], extents):
                first = min(max(-(start // step), 0), width)  # what lies before the part's edge
                end = min(max(-(-(extent - start) // step), first), width)
                here.append(slice(first, end))
                inside = slice(start + first * step, start + end * step, step)
                there.append(inside if first < end else slice(0, 0))
            found.append((tuple(here), part[tuple(there)]))
        if sum(values[0].numel() for _, values in found) < prod(extents):
            self.view.zero_()
        for place, values in found:
            self.view[place] = values
