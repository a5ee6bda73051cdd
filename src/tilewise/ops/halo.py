"""What surrounds a slab in a convolution, and what it adds to the results.

The extended slab is the slab with a rim around it, as wide as the kernel reaches along each dim
that is split. The rim is cut into faces: those of the first such dim go over the whole extent of
the dims after it, corners included; those of the next dim only over the slab's own extent of the
dims before it.

    ┌─────────────┐
    │   dim 0     │        y = convolution of the slab, padded with zeros
    ├───┬─────┬───┤          + a thin convolution of each face with the kernel's rows that meet it
    │ 1 │slab │ 1 │
    ├───┴─────┴───┤        or: y = convolution of the extended slab
    │   dim 0     │
    └─────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.comm import Exchange, Frame, Pending
from tilewise.comm.formats import CHANNELS_LAST, fill
from tilewise.comm.frame import Box, extents, overlap
from tilewise.ops.conv_spec import ConvSpec


@dataclass(frozen=True)
class Face:
    """One side of the rim, and the thin convolution that it takes part in.

    Args:
        box: where it lies in the extended slab.
        outputs: the results that it adds to.
        kernel: the part of the weight that meets it.
        pads: rows of zeros that make it as long as that part of the kernel reads.
        padding: what the thin convolution pads by itself.
    """

    box: Box
    outputs: Box
    kernel: Box
    pads: tuple[int, ...]
    padding: tuple[int, ...]

    def strip(self, piece: Tensor) -> Tensor:
        return pad(piece, self.pads) if any(self.pads) else piece

    def unpadded(self, strip: Tensor) -> Tensor:
        return pad(strip, [-width for width in self.pads]) if any(self.pads) else strip


@dataclass(frozen=True)
class Halo:
    """The rim of one rank's slab.

    `faces` are those sides that others send; `thin` says how each takes part in the convolution
    where the slab alone can be convolved first.
    """

    shape: tuple[int, ...]
    core: Box
    boxes: tuple[Box, ...]
    empty: tuple[Box, ...]
    thin: tuple[Face, ...] | None
    inner_padding: tuple[int, ...]
    spec: ConvSpec

    @classmethod
    def of(
        cls, bring: Exchange, spec: ConvSpec, padding: Sequence[int], out: tuple[int, ...]
    ) -> Halo | None:
        """Return the rim, or None where the slab is not one piece of the extended one."""
        core = bring.core
        if core is None:
            return None
        shape = bring.forth.out_shape
        sides = _sides(shape, core)
        arriving = bring.arriving
        live = [s for s in sides if any(overlap(s[2], box) is not None for box in arriving)]
        boxes = tuple(box for _, _, box in live)
        empty = tuple(box for _, _, box in sides if box not in boxes)
        thin = _thin(live, core, shape, spec, padding, out)
        inner = [
            before if core[i + 2] != slice(0, shape[i + 2]) else width
            for i, ((before, _), width) in enumerate(zip(spec.padding, padding))
        ]
        return cls(shape, core, boxes, empty, thin, tuple(inner), spec)

    def receive(self, pending: Pending, x: Tensor) -> Frame:
        """Wait for the faces; zeros where they reach past the tensor's edge."""
        frame = self.zeros(x)
        pending.finish_into(frame)
        return frame

    def zeros(self, x: Tensor) -> Frame:
        """Return the faces of a rim of zeros."""
        return Frame(self.boxes, [x.new_zeros(extents(box)) for box in self.boxes], x)

    def extend(self, x: Tensor, frame: Frame, *, last: bool) -> Tensor:
        """Return the slab with its rim."""
        out = self.shaped(x, last=last)
        fill(out[self.core], x)
        for box, piece in zip(frame.boxes, frame.pieces):
            out[box] = piece
        for box in self.empty:
            out[box].zero_()
        return out

    def parts(self, x: Tensor, frame: Frame, *, last: bool) -> list[tuple[Tensor, list[int]]]:
        """Return the pieces of the extended slab, and where each begins along the dims of space."""
        boxes = (self.core, *frame.boxes)
        if any(box[dim] != slice(0, self.shape[dim]) for box in boxes for dim in (0, 1)):
            return [(self.extend(x, frame, last=last), [0] * self.spec.ndim)]
        pieces = (x, *frame.pieces)
        return [(piece, [s.start for s in box[2:]]) for piece, box in zip(pieces, boxes)]

    def shaped(self, x: Tensor, *, last: bool = False) -> Tensor:
        """Return an extended slab without values."""
        format = CHANNELS_LAST.get(len(self.shape)) if last else None
        return torch.empty(
            self.shape,
            dtype=x.dtype,
            device=x.device,
            memory_format=format or torch.contiguous_format,
        )

    def patch(self, y: Tensor, frame: Frame, weight: Tensor, groups: int) -> None:
        """Add to y what the faces give."""
        for face, piece in self._thin(frame):
            y[face.outputs] += torch.convolution(
                face.strip(piece), weight[face.kernel], None, self.spec.stride, face.padding,
                self.spec.dilation, False, [0] * self.spec.ndim, groups,
            )  # fmt: skip

    def outer_grads(self, dy: Tensor, frame: Frame, weight: Tensor, groups: int) -> Frame:
        """Return the gradient of the faces."""
        found = []
        for face, piece in self._thin(frame):
            strip = face.strip(piece)
            grad = self._backward(face, dy, strip, weight, groups, [True, False, False])
            found.append(face.unpadded(grad[0]))
        return Frame(frame.boxes, found, dy)

    def add_weight_grad(
        self, dw: Tensor, dy: Tensor, frame: Frame, weight: Tensor, groups: int
    ) -> None:
        """Add to dw what the faces give."""
        for face, piece in self._thin(frame):
            strip = face.strip(piece)
            grad = self._backward(face, dy, strip, weight, groups, [False, True, False])
            dw[face.kernel] += grad[1]

    def _backward(
        self, face: Face, dy: Tensor, strip: Tensor, weight: Tensor, groups: int, mask: list[bool]
    ) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            dy[face.outputs].contiguous(), strip, weight[face.kernel].contiguous(), None,
            self.spec.stride, face.padding, self.spec.dilation, False, [0] * self.spec.ndim,
            groups, mask,
        )  # fmt: skip
        return grads

    def _thin(self, frame: Frame) -> list[tuple[Face, Tensor]]:
        assert self.thin is not None
        return list(zip(self.thin, frame.pieces))


def _sides(shape: Sequence[int], core: Box) -> list[tuple[int, bool, Box]]:
    """Cut the rim into disjoint boxes, as (dim, whether it lies before the slab, box)."""
    found = []
    box = [slice(0, extent) for extent in shape]
    for dim, inside in enumerate(core):
        for before, side in (
            (True, slice(0, inside.start)),
            (False, slice(inside.stop, shape[dim])),
        ):
            if side.start < side.stop:
                found.append((dim, before, (*box[:dim], side, *box[dim + 1 :])))
        box[dim] = inside
    return found


def _thin(
    sides: Sequence[tuple[int, bool, Box]],
    core: Box,
    shape: Sequence[int],
    spec: ConvSpec,
    padding: Sequence[int],
    out: Sequence[int],
) -> tuple[Face, ...] | None:
    """Return the thin convolutions, or None where the slab cannot be convolved by itself."""
    rims = [dim for dim, inside in enumerate(core) if inside != slice(0, shape[dim])]
    for dim in rims:
        if dim < 2:
            return None
        i = dim - 2
        before, after = spec.padding[i]
        reach = spec.dilation[i] * (spec.kernel[i] - 1)
        length = core[dim].stop - core[dim].start
        if (
            spec.stride[i] != 1
            or spec.kernel[i] % 2 == 0
            or before != after
            or reach != 2 * before
            or core[dim].start != before
            or shape[dim] - core[dim].stop != before
            or length < before
            or out[dim] != length
        ):
            return None
    faces = []
    for dim, is_before, box in sides:
        i = dim - 2
        width, half = spec.padding[i][0], spec.kernel[i] // 2
        outputs, kernel = [slice(None)] * len(shape), [slice(None)] * len(shape)
        outputs[dim] = slice(0, width) if is_before else slice(out[dim] - width, out[dim])
        kernel[dim] = slice(0, half) if is_before else slice(half + 1, spec.kernel[i])
        pads = [0] * (2 * len(shape))
        # F.pad counts from the last dim; what is missing lies on the slab's side of the face
        missing = width - spec.dilation[i]
        pads[2 * (len(shape) - 1 - dim) + (1 if is_before else 0)] = missing
        local = [
            0 if j == i or (j + 2 in rims and j > i) else spec.padding[j][0] if j + 2 in rims else p
            for j, p in enumerate(padding)
        ]
        faces.append(
            Face(box, tuple(outputs), tuple(kernel), tuple(pads) if missing else (), tuple(local))
        )
    return tuple(faces)
