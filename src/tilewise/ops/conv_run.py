"""Run a split convolution as one node, with its messages behind its arithmetic.

forward    start x's halo ─ convolve ─ finish
           gather x over f ─ convolve ─ scatter y over c
backward   dx of the halo ─ start ─ dx of the slab, dw ─ finish
           gather dy over c ─ dx ─ start scattering it over f ─ dw ─ finish
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm import Chain, Exchange, Frame, Mesh, Pending
from tilewise.comm.chain import Later, Promise, hand_on, take, token_of
from tilewise.comm.formats import formatted, is_last
from tilewise.ops.conv_local import LocalConv, Way, Ways
from tilewise.ops.halo import Halo
from tilewise.ops.tune import Tuned, choose, noise, worth_tuning

WEIGHT = 1
"""Where the weight stands among a node's tensors."""
NATIVE: dict[int, Callable[..., Tensor]] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


class ConvRun:
    """A convolution with its exchanges: call it with this rank's x, weight and bias.

    Args:
        local: this rank's arithmetic, as yet without its halo.
        bring: the exchange that brings x, if any.
        finish: the exchange that adds up and scatters partial results, if any.
        shapes: of this rank's x, with all that has to be brought, and of its weight.
        with_bias: whether this rank adds the bias.
        work: multiplications of one phase on one rank, the same number on all of them.
    """

    def __init__(
        self,
        local: LocalConv,
        mesh: Mesh,
        bring: Exchange | None,
        finish: Exchange | None,
        *,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        with_bias: bool,
        work: float,
    ) -> None:
        self.mesh, self.bring, self.finish, self.with_bias = mesh, bring, finish, with_bias
        halo = None if bring is None else Halo.of(bring, local.spec, local.padding, local.out)
        self.local = replace(local, halo=halo)
        x_shape, self.weight_shape = shapes
        self.x_shape = x_shape if bring is None or halo is None else bring.forth.in_shape
        self.work = work
        self.quiet = bring is None and finish is None and prod(local.out) > 0
        self.tuned: dict[Any, Tuned] = {}
        self.chosen: dict[Any, Ways] = {}
        self.last: bool | None = None  # the memory format of the network around it, if it has one
        self.patient = False  # whether backward soon waits for a message, with little to do

    def __call__(self, x: Tensor, weight: Tensor, *bias: Tensor, chain: Chain | None) -> Tensor:
        x, weight, *bias = _as_autocast_would(x, weight, *bias)  # type: ignore[assignment]
        ways = self.ways(x, weight, data=x.requires_grad)
        if self.quiet and not is_last(x) and ways == Ways.plainly(last=False):
            return self._natively(x, weight, *bias)
        token = None if self.quiet else token_of(chain, x, weight, *bias)
        y: Tensor
        later = chain.later if self.patient and chain is not None else None
        y, token = _Convolve.apply(self, ways, later, x, weight, token, *bias)
        hand_on(chain, token)
        return y

    def _natively(self, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        """Leave a convolution that sends nothing to torch; some kernels lose other formats."""
        local, spec = self.local, self.local.spec
        return NATIVE[spec.ndim](
            x, weight, bias[0] if bias and self.with_bias else None, spec.stride, local.padding,
            spec.dilation, local.groups,
        )  # fmt: skip

    def ways(self, x: Tensor, weight: Tensor, *, data: bool = True) -> Ways:
        """Return how to do the local work; `data` is whether the gradient of x is wanted."""
        found = self.tune(x)
        if found is None:
            return Ways.plainly(is_last(x))
        key = (x.dtype, x.device.type, data, self.last)
        if key not in self.chosen:
            last = found.last if self.last is None else self.last
            self.chosen[key], _ = found.best(last, data=data)
        return self.chosen[key]

    def tune(self, like: Tensor) -> Tuned | None:
        """Return what the ways take for slabs of this kind, if there is a choice.

        The first call of a kind measures, on all ranks. The kind is what they have in common: a
        memory format shows on some slabs only.
        """
        if len(self.x_shape) < 4 or not worth_tuning(self.work, like):
            return None
        kind = (like.dtype, like.device.type)
        if kind not in self.tuned:
            x, weight = (noise(like, shape) for shape in (self.x_shape, self.weight_shape))
            self.tuned[kind] = choose(self.local, self.mesh, x, weight, last=is_last(like))
        return self.tuned[kind]

    def pretend(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Frame | None]:
        """Return operands for `alone`: x as it is when brought, weight, dy, and a halo of zeros."""
        halo = self.local.halo
        frame = None if halo is None else halo.zeros(x)
        ways = self.ways(x, weight)
        if tuple(x.shape) != self.x_shape:
            x = formatted(x.new_zeros(self.x_shape), last=ways.last)
        dy = torch.randn_like(x.new_empty(self.local.out))
        return x, weight, formatted(dy, last=ways.last), frame

    def alone(self, x: Tensor, weight: Tensor, dy: Tensor, frame: Frame | None) -> list[Any]:
        """Do all the arithmetic, forward and backward, without a message; returns the results."""
        ways, local = self.ways(x, weight), self.local
        return [
            local.forward(ways.forward, x, weight, None, lambda: frame),  # type: ignore[arg-type, return-value]
            local.data(ways.data, dy, x, weight, frame, lambda outer: None),
            local.weight(ways.weight, dy, x, weight, frame, bias=False),
        ]


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: ConvRun,
        ways: Ways,
        later: Later | None,
        x: Tensor,
        weight: Tensor,
        token: Tensor | None,
        *bias: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        local = run.local
        b = bias[0] if bias and run.with_bias else None
        pending = None if run.bring is None else run.bring.start(x)
        if pending is not None and local.halo is None:
            x = pending.finish()
        y, frame = local.forward(
            ways.forward, x, weight, b, lambda: _receive(local.halo, pending, x)
        )
        y = formatted(y, last=ways.last)
        if run.finish is not None:
            y = run.finish.start(y).finish()
        ctx.run, ctx.ways, ctx.later, ctx.bias = run, ways, later, bool(bias)
        ctx.boxes, pieces = ((), ()) if frame is None else (frame.boxes, frame.pieces)
        ctx.save_for_backward(x, weight, *pieces)
        return y, take(ctx, token, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, token: Tensor | None) -> tuple[Any, ...]:
        run: ConvRun = ctx.run
        local, ways = run.local, ctx.ways
        _, _, _, want_x, want_w, _, *want_b = ctx.needs_input_grad
        want_bias = any(want_b) and run.with_bias
        x, weight, *pieces = ctx.saved_tensors
        frame = None if local.halo is None else Frame(ctx.boxes, pieces, x)
        if run.finish is not None:
            dy = run.finish.start_adjoint(dy).finish()
        if ways.data.last == ways.weight.last:
            dy = formatted(dy, last=ways.data.last)  # once for both
        dx = dw = db = None
        under_way: list[Pending] = []
        if want_x:
            bring = run.bring
            dx = local.data(
                ways.data, dy, x, weight, frame,
                lambda outer: under_way.append(bring.start_adjoint(outer)),  # type: ignore[union-attr]
            )  # fmt: skip
            if bring is not None and frame is None:
                under_way.append(bring.start_adjoint(dx))
        if want_w and not want_bias:
            dw = _promise(
                ctx, run, ways.data, weight,
                lambda: local.weight(ways.weight, dy, x, weight, frame, bias=False)[0],
            )  # fmt: skip
        if dw is None and (want_w or want_bias):
            dw, db = local.weight(ways.weight, dy, x, weight, frame, bias=want_bias)
        for pending in under_way:
            if frame is None:
                dx = pending.finish()
            else:
                assert dx is not None
                pending.finish_into(dx)
        return None, None, None, dx, dw, token, *([db] if ctx.bias else [])


def _promise(
    ctx: Any, run: ConvRun, way: Way, weight: Tensor, find: Callable[[], Tensor]
) -> Tensor | None:
    """Put off finding the weight's gradient behind the next message; returns what stands for it.

    None where it is not put off: who reads it does not wait for promises, or this layer's own
    message has nothing else to travel behind, as slab and halo are one.
    """
    halo = run.local.halo
    apart = run.bring is None or (way.patch and halo is not None and halo.thin is not None)
    node, number = ctx.next_functions[WEIGHT]
    promises = getattr(node, "promises", {})
    if ctx.later is None or not apart or number not in promises:
        return None
    if not torch._C._will_engine_execute_node(node):
        return None
    promise = promises[number] = Promise()

    def keep() -> None:
        promise.value = find()

    ctx.later.add(keep)
    return weight.new_zeros(1).expand(weight.shape)


def _receive(halo: Halo | None, pending: Pending | None, x: Tensor) -> Frame:
    assert halo is not None
    assert pending is not None
    return halo.receive(pending, x)


def _as_autocast_would(*tensors: Tensor) -> list[Tensor]:
    """Cast as autocast does for convolutions; it does not look into a custom node."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t if t.dtype is torch.float64 else t.to(dtype) for t in tensors]
