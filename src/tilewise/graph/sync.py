"""Sum parameter gradients over the ranks that share a block, while backward goes on.

Parameters enter a pass through two nodes for each bucket. In backward the inner one runs as soon
as the bucket's last gradient is there and starts the sum; the outer one, recorded before all other
nodes, runs after them and waits. A flag beside each gradient tells whether any rank had one: a
parameter that got none on all ranks keeps none.

    parameter ──outer──▶ ──inner──▶ layers            forward
    .grad ◀──wait─── ◀──start sum── ◀── gradients     backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm import Chain, Group, Mesh

BUCKET_BYTES = 8 * 2**20


@dataclass
class Bucket:
    """Parameters whose gradients are summed together: same group, same dtype.

    `waiting` holds gradients of passes that were not to be summed yet.
    """

    group: Group
    names: list[str] = field(default_factory=list)
    bytes: int = 0
    waiting: dict[str, Tensor] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"gradients of {self.names[0]}" + (" …" if len(self.names) > 1 else "")


class GradSync:
    """The buckets of one program, in the order in which the program reads their parameters."""

    def __init__(self, mesh: Mesh, uses: Sequence[tuple[str, Tensor, tuple[int, ...]]]) -> None:
        self.mesh = mesh
        self.buckets: list[Bucket] = []
        open_buckets: dict[tuple[tuple[int, ...], torch.dtype], Bucket] = {}
        self.place: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
        for name, tensor, ranks in uses:
            if (name, ranks) in self.place:
                continue
            key = (ranks, tensor.dtype)
            bucket = open_buckets.get(key)
            if bucket is None or bucket.bytes >= BUCKET_BYTES:
                bucket = open_buckets[key] = Bucket(mesh.group(ranks))
                self.buckets.append(bucket)
            self.place[name, ranks] = (self.buckets.index(bucket), len(bucket.names))
            bucket.names.append(name)
            bucket.bytes += tensor.numel() * tensor.element_size()

    def enter(self, parameters: dict[str, Tensor], *, sync: bool) -> Entry:
        """Record the outer nodes; call first in a pass."""
        return Entry(self, parameters, sync=sync)


class Entry:
    """One pass' way into the parameters."""

    def __init__(self, buckets: GradSync, parameters: dict[str, Tensor], *, sync: bool) -> None:
        self.buckets = buckets
        self.outer: list[tuple[Tensor, ...]] = []
        self.states: list[_State] = []
        self.inner: dict[int, tuple[Tensor, ...]] = {}
        for bucket in buckets.buckets:
            state = _State(buckets.mesh, bucket, sync)
            self.states.append(state)
            self.outer.append(_Outer.apply(state, *(parameters[name] for name in bucket.names)))

    def get(self, name: str, ranks: tuple[int, ...], chain: Chain) -> Tensor:
        """Return a parameter to compute with; the first of a bucket records its inner node."""
        index, position = self.buckets.place[name, ranks]
        if index not in self.inner:
            token, *entered = _Inner.apply(self.states[index], chain.token, *self.outer[index])
            chain.token = token
            self.inner[index] = tuple(entered)
        return self.inner[index][position]


@dataclass
class _State:
    mesh: Mesh
    bucket: Bucket
    sync: bool
    work: Any = None
    flat: Tensor | None = None
    complete: bool = False


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: _State, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        state: _State = ctx.state
        if state.flat is None:
            return None, *grads
        if state.work is not None:
            state.mesh.finish(state.work, state.bucket.group, layer=state.bucket.label)
            state.work = None
        flat, state.flat = state.flat, None
        if state.complete:
            return None, *grads
        touched = flat[-len(grads) :].tolist()
        return None, *(grad if seen else None for grad, seen in zip(grads, touched))


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, state: _State, token: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.state = state
        ctx.shapes = [parameter.shape for parameter in parameters]
        ctx.like = parameters[0].detach()
        ctx.set_materialize_grads(False)
        new_token = None if token is None else token.clone()
        return new_token, *(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        state: _State = ctx.state
        bucket = state.bucket
        waiting = bucket.waiting
        if not state.sync:
            for name, grad in zip(bucket.names, grads):
                if grad is not None:
                    waiting[name] = grad + waiting[name] if name in waiting else grad.clone()
            return None, token, *(None for _ in grads)
        total = sum(shape.numel() for shape in ctx.shapes)
        flat = ctx.like.new_zeros(total + len(grads))
        views = []
        state.complete = all(grad is not None for grad in grads)
        at = 0
        for i, (name, shape, grad) in enumerate(zip(bucket.names, ctx.shapes, grads)):
            view = flat[at : at + shape.numel()].view(shape)
            at += shape.numel()
            views.append(view)
            for part in (grad, waiting.pop(name, None)):
                if part is not None:
                    view += part
                    flat[total + i] = 1
        if bucket.group.size > 1:
            state.work = state.mesh.sum(flat, bucket.group, layer=bucket.label, wait=False)
        state.flat = flat
        return None, token, *views
