"""Which cuts survive a reshape.

A reshape joins and takes apart groups of neighbouring dims. A cut of a group survives where the
ranks, in order, hold consecutive stretches of it that are balanced blocks before and after:

    (4, 6) → (24)       cut dim 0 by 4    0‥5|6‥11|12‥17|18‥23     survives
                        cut dim 1 by 2    0‥2 and 6‥8 and …        does not
    (8, 6) → (2, 4, 6)  cut dim 0 by 4    becomes dim 0 by 2 and dim 1 by 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from math import prod

from tilewise.layout.blocks import block
from tilewise.layout.layout import Axes, Axis, Layout


def reshape_axes(x: Layout, shape: Sequence[int]) -> Axes | None:
    """Return the axes of x reshaped where every rank keeps the elements it has, else None."""
    if not prod(x.shape):
        return Axes([Axis(x.ranks)])
    placed = [[axis] for axis in x.axes]
    for old, new in _groups(x.shape, shape):
        at = [i for i, axis in enumerate(x.axes) if axis.dim in old]
        found = _regroup(x, [x.axes[i] for i in at], old, shape, new) if at else []
        if found is None:
            return None
        for i, axes in zip(at, found):
            placed[i] = axes
    return Axes(chain.from_iterable(placed))


def reshapable(x: Layout, shape: Sequence[int]) -> Layout:
    """Return a layout of x that can be reshaped in place, as close to its own as it gets.

    Cuts that survive stay. Each other one moves to the largest dim that can take it whole or in
    factors; where none can, it leaves replicas.
    """

    def fits() -> bool:
        return reshape_axes(Layout(x.shape, chain.from_iterable(placed)), shape) is not None

    placed = [[Axis(axis.size)] for axis in x.axes]
    homeless = []
    for i, axis in enumerate(x.axes):
        placed[i] = [axis]
        if not fits():
            placed[i] = [Axis(axis.size)]
            homeless.append(i)
    largest_first = sorted(range(len(x.shape)), key=lambda dim: -x.shape[dim])
    for i in homeless:
        done: list[Axis] = []
        todo = [x.axes[i].size]
        while todo:
            size, *todo = todo
            for dim in largest_first:
                placed[i] = [*done, Axis(size, dim), Axis(prod(todo))]
                parts = Axes(chain.from_iterable(placed)).parts(dim)
                if parts <= x.shape[dim] and fits():
                    done.append(Axis(size, dim))
                    break
            else:
                prime = next(k for k in range(2, size + 1) if size % k == 0)
                if prime < size:
                    todo = [prime, size // prime, *todo]
                else:
                    done.append(Axis(size))
            placed[i] = [*done, Axis(prod(todo))]
    return Layout(x.shape, chain.from_iterable(placed))


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the smallest runs of old and new dims that hold equally many elements."""
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (a := prod(old[first:i])) != (b := prod(new[second:j])):
            if a < b:
                i += 1
            else:
                j += 1
        yield range(first, i), range(second, j)


def _regroup(
    x: Layout, axes: list[Axis], old: range, shape: Sequence[int], new: range
) -> list[list[Axis]] | None:
    """Return what each of the axes that cut a group's old dims becomes on its new dims."""
    cut = {axis.dim for axis in axes}
    wide = [dim for dim in new if shape[dim] > 1] or list(new)
    only = [dim for dim in old if x.shape[dim] > 1] or list(old)
    if len(wide) == len(only) == 1 and cut == set(only):
        return [[Axis(axis.size, wide[0])] for axis in axes]
    # Ranks in order must hold consecutive stretches: all dims outside the last cut one are cut
    # into single elements, by axes in the order of the dims.
    if [axis.dim for axis in axes] != sorted(axis.dim for axis in axes):
        return None
    if any(x.degrees[dim] != x.shape[dim] for dim in old if dim < max(cut)):
        return None
    dealt = _deal([axis.size for axis in axes], [(dim, shape[dim]) for dim in wide])
    if dealt is None:
        return None
    flat = Axes(chain.from_iterable(dealt))
    before = _starts([(x.shape[dim], x.degrees[dim]) for dim in old])
    after = _starts([(shape[dim], flat.parts(dim)) for dim in new])
    return dealt if before == after else None


def _deal(sizes: list[int], dims: list[tuple[int, int]]) -> list[list[Axis]] | None:
    """Deal the axes out to dims, outermost first: each is cut into single elements, or takes all.

    Returns a list of axes for each of `sizes`.
    """
    dealt: list[list[Axis]] = []
    open_dims = iter(dims)
    left = prod(sizes)
    dim = room = 0
    for size in sizes:
        dealt.append([])
        while size > 1:
            if not room:
                dim, extent = next(open_dims, (0, 0))
                if not extent or (left > extent and left % extent):
                    return None
                room = min(left, extent)
            part = min(size, room)
            if size % part or room % part:
                return None
            dealt[-1].append(Axis(part, dim))
            size, room, left = size // part, room // part, left // part
            room = 0 if room == 1 else room
    return dealt


def _starts(dims: Sequence[tuple[int, int]]) -> list[int]:
    """List where each part begins in the flattened dims, given as (extent, parts)."""
    starts = [[block(extent, parts, k)[0] for k in range(parts)] for extent, parts in dims]
    strides = [prod(extent for extent, _ in dims[i + 1 :]) for i in range(len(dims))]
    return [
        sum(start * stride for start, stride in zip(combination, strides))
        for combination in product(*starts)
    ]
