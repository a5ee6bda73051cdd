"""The local arithmetic of a convolution, in each of the ways to do it.

A slab can be convolved by itself and *patched* where its halo comes in, or *extended* by its halo
first; its channels can lie outermost or innermost in memory. Which is fastest depends on the shape
and the machine. None of them changes what is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from tilewise.comm import Frame
from tilewise.comm.formats import format_of, formatted, is_last
from tilewise.ops.conv_spec import ConvSpec
from tilewise.ops.conv_taps import weight_gradient
from tilewise.ops.halo import Halo

By = Literal["torch", "onednn", "taps"]


@dataclass(frozen=True)
class Way:
    """Convolve the slab and patch it, or extend it first; channels innermost in memory or not.

    `by` oneDNN: torch leaves it for kernels of its own where a batch of one is small: a slab of
    32 × 18 × 32 × 32 takes three times as long there. With channels innermost the gradient of x
    is then found as a convolution of dy, where it is one. What a single tap with a stride does not
    read is left out before. By `taps`: the gradient of the weight comes as matrix products.
    """

    patch: bool
    last: bool
    by: By = "torch"


@dataclass(frozen=True)
class Ways:
    """The way of each phase: forward, the gradient of x, and that of the weight.

    `last` says how the result lies in memory.
    """

    forward: Way
    data: Way
    weight: Way
    last: bool

    @classmethod
    def plainly(cls, last: bool) -> Ways:
        """Return what torch does by itself with x in this memory format."""
        way = Way(patch=False, last=last)
        return cls(way, way, way, last)


@dataclass(frozen=True)
class LocalConv:
    """One rank's part of a convolution.

    Args:
        spec: the convolution.
        padding: what the convolution of the extended slab pads by itself: the dims not split.
        out: the shape of the result.
        groups: the groups of this rank's channels.
        halo: what surrounds the slab; None where the operand given is all that is needed.
    """

    spec: ConvSpec
    padding: tuple[int, ...]
    out: tuple[int, ...]
    groups: int
    halo: Halo | None = None

    def forward(
        self,
        way: Way,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        receive: Callable[[], Frame],
    ) -> tuple[Tensor, Frame | None]:
        """Convolve a slab; `receive` hands over the faces of its halo, as late as possible."""
        halo = self.halo
        if halo is None:
            return self._convolve(way, x, weight, bias, self.padding), None
        if way.patch and halo.thin is not None:
            y = self._convolve(way, x, weight, bias, halo.inner_padding)
            frame = receive()
            halo.patch(y, frame, weight, self.groups)
        else:
            frame = receive()
            extended = halo.extend(x, frame, last=way.last)
            y = self._convolve(way, extended, weight, bias, self.padding)
        return y, frame

    def data(
        self,
        way: Way,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        frame: Frame | None,
        send: Callable[[Frame], Any],
    ) -> Tensor:
        """Return the slab's gradient; `send` gets that of the faces, as early as possible."""
        mask = [True, False, False]
        halo = self.halo
        if halo is None or frame is None:
            return like(self._backward(way, dy, x, weight, mask, self.padding)[0], x)
        if way.patch and halo.thin is not None:
            send(halo.outer_grads(dy, frame, weight, self.groups))
            return like(self._backward(way, dy, x, weight, mask, halo.inner_padding)[0], x)
        # what only lends its shape is gone before anything is sent
        grad: Tensor = self._backward(
            way, dy, halo.shaped(x, last=way.last), weight, mask, self.padding
        )[0]
        send(Frame(frame.boxes, [grad[box] for box in frame.boxes], grad))
        dx = grad[halo.core]
        return dx if is_last(grad) == is_last(x) else like(dx, x)  # not every kernel keeps it

    def weight(
        self,
        way: Way,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        frame: Frame | None,
        *,
        bias: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the weight and, if wanted, of the bias."""
        mask = [False, True, bias]
        halo = self.halo
        if way.by == "taps" and self.groups == 1 and 0 not in (*self.out, *weight.shape):
            dw, db = self._tapped(way, dy, x, frame, bias=bias)
        elif halo is None or frame is None:
            _, dw, db = self._backward(way, dy, x, weight, mask, self.padding)
        elif way.patch and halo.thin is not None:
            _, dw, db = self._backward(way, dy, x, weight, mask, halo.inner_padding)
            halo.add_weight_grad(dw, dy, frame, weight, self.groups)
        else:
            extended = halo.extend(x, frame, last=way.last)
            _, dw, db = self._backward(way, dy, extended, weight, mask, self.padding)
        return like(dw, weight), db if bias else None

    def _convolve(
        self, way: Way, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...]
    ) -> Tensor:
        spec = self.spec
        if not prod(self.out) or not x.numel() or not weight.numel():
            y = x.new_zeros(self.out)
            return y if bias is None else y.add_(bias.view(-1, *[1] * spec.ndim))
        x, stride = self._read(way, x)
        x, weight = formatted(x, last=way.last), formatted(weight, last=way.last)
        if way.by == "onednn" and torch.backends.mkldnn.enabled:
            return torch.ops.aten.mkldnn_convolution(  # type: ignore[no-any-return]
                x, weight, bias, padding, stride, spec.dilation, self.groups
            )
        return torch.convolution(
            x, weight, bias, stride, padding, spec.dilation, False, [0] * spec.ndim,
            self.groups,
        )  # fmt: skip

    def _backward(
        self,
        way: Way,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        mask: list[bool],
        padding: tuple[int, ...],
    ) -> Any:
        spec = self.spec
        if not prod(self.out) or not x.numel() or not weight.numel():
            dims = [dim for dim in range(dy.dim()) if dim != 1]
            return torch.zeros_like(x), torch.zeros_like(weight), dy.sum(dims)
        if way.last and way.by == "onednn" and self.turns(padding) and mask[0]:
            return self._turned(dy, weight, padding), None, None
        whole = x
        x, stride = self._read(way, x)
        dy = formatted(dy, last=way.last)
        if mask[0]:
            weight, x = formatted(weight, last=way.last), _shaped(x, last=way.last)
        else:
            weight, x = _shaped(weight, last=way.last), formatted(x, last=way.last)
        if way.by == "onednn" and torch.backends.mkldnn.enabled:
            dy, x = dy.to_mkldnn(), x.to_mkldnn()
        found = torch.ops.aten.convolution_backward(
            dy, x, weight, [self.out[1]], stride, padding, spec.dilation, False,
            [0] * spec.ndim, self.groups, mask,
        )  # fmt: skip
        dx, dw, db = (t.to_dense() if t is not None and t.is_mkldnn else t for t in found)
        if dx is not None and dx.shape != whole.shape:
            dx = self._spread(dx, whole)
        return dx, dw, db

    @property
    def thins(self) -> bool:
        """Whether only every so many of the values of x are read at all."""
        spec = self.spec
        padded = any(before or after for before, after in spec.padding)
        return set(spec.kernel) == {1} and set(spec.stride) != {1} and not padded

    @property
    def _grid(self) -> tuple[slice, ...]:
        return (slice(None), slice(None), *(slice(None, None, step) for step in self.spec.stride))

    def _read(self, way: Way, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return the values of x to compute with, and the stride among them."""
        if self.thins and way.by == "onednn":
            return x[self._grid], (1,) * self.spec.ndim
        return x, self.spec.stride

    def _spread(self, dx: Tensor, x: Tensor) -> Tensor:
        """Put the gradient of the values that are read to where they lie in x."""
        whole = torch.zeros_like(x)
        whole[self._grid] = dx
        return whole

    def _tapped(
        self, way: Way, dy: Tensor, x: Tensor, frame: Frame | None, *, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        dy, x = formatted(dy, last=way.last), formatted(x, last=way.last)
        parts = [(x, [0] * spec.ndim)]
        if self.halo is not None and frame is not None:
            parts = self.halo.parts(x, frame, last=way.last)
        dw = weight_gradient(
            dy, parts, spec.kernel, stride=spec.stride, padding=self.padding,
            dilation=spec.dilation, last=way.last,
        )  # fmt: skip
        return dw, dy.sum([0, *range(2, dy.dim())]) if bias else None

    def turns(self, padding: tuple[int, ...]) -> bool:
        """Whether the gradient of x is a convolution of dy, by the kernel turned round."""
        fits = all(width <= far for width, far in zip(padding, self._reach))
        once = self.groups == 1 and set(self.spec.stride) == {1}
        return fits and once and bool(torch.backends.mkldnn.enabled)

    @property
    def _reach(self) -> list[int]:
        return [step * (size - 1) for step, size in zip(self.spec.dilation, self.spec.kernel)]

    def _turned(self, dy: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Tensor:
        spec = self.spec
        turned = weight.flip(*range(2, weight.dim())).transpose(0, 1)
        return torch.ops.aten.mkldnn_convolution(  # type: ignore[no-any-return]
            formatted(dy, last=True), formatted(turned, last=True), None,
            [far - width for far, width in zip(self._reach, padding)], spec.stride,
            spec.dilation, 1,
        )  # fmt: skip


def _shaped(tensor: Tensor, *, last: bool) -> Tensor:
    """Return a tensor in this format of which only the shape counts: itself, or one not filled."""
    wanted = format_of(tensor, last=last)
    if tensor.is_contiguous(memory_format=wanted):
        return tensor
    return torch.empty_like(tensor, memory_format=wanted)


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """Return a tensor in the memory format of another."""
    return formatted(tensor, last=is_last(model))
