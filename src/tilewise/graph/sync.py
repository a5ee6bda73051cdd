"""Sum parameter gradients over the ranks that share a block, while backward goes on.

Parameters enter a pass through two nodes for each bucket. In backward the inner one runs as soon
as the bucket's last gradient is there and starts the sum; the outer one, recorded before all other
nodes, runs after them and waits. A flag beside each gradient tells whether any rank had one: a
parameter that got none on all ranks keeps none.

    parameter ──outer──▶ ──inner──▶ layers            forward
    .grad ◀──wait─── ◀──start sum── ◀── gradients     backward

A pass that is not to be summed adds this rank's share to `.grad` instead, see `shares`. The next
sum over the holders of the parameter's block takes the share along.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm import Chain, Group, Mesh
from tilewise.comm.chain import Later, Promise, take
from tilewise.graph.reach import Gate, Passing, Reach, leave
from tilewise.graph.recompute import Stretch
from tilewise.graph.shares import Shares, Use, at_end_of_backward

BUCKET_BYTES = 8 * 2**20
ALONE_BYTES = 64 * 2**10
"""From which size a gradient that nothing else shares is summed where it lies, not in a copy."""


@dataclass
class Bucket:
    """Parameters whose gradients are summed together: same group, same dtype.

    Those in `alone` are large and summed in place, beside the buffer that takes the others.
    `fresh` numbers, from 1, those whose gradients nothing else shares.
    """

    group: Group
    names: list[str] = field(default_factory=list)
    alone: set[str] = field(default_factory=set)
    fresh: list[int] = field(default_factory=list)
    bytes: int = 0

    @property
    def uses(self) -> list[Use]:
        return [(name, self.group.ranks) for name in self.names]

    @property
    def label(self) -> str:
        return f"gradients of {self.names[0]}" + (" …" if len(self.names) > 1 else "")


class GradSync:
    """The buckets of one program, in the order in which the program reads their parameters."""

    def __init__(
        self,
        mesh: Mesh,
        shares: Shares,
        uses: Sequence[Use],
        fresh: Container[str],
        parameters: dict[str, Tensor],
    ) -> None:
        self.mesh, self.shares, self.reach = mesh, shares, Reach()
        self.buckets: list[Bucket] = []
        open_buckets: dict[Any, Bucket] = {}
        self.place: dict[Use, tuple[int, int]] = {}
        for use in dict.fromkeys(uses):
            name, ranks = use
            if len(ranks) < 2:
                continue
            tensor = parameters[name]
            key = (ranks, tensor.dtype, tensor.device)
            bucket = open_buckets.get(key)
            if bucket is None or bucket.bytes >= BUCKET_BYTES:
                bucket = open_buckets[key] = Bucket(mesh.group(ranks))
                self.buckets.append(bucket)
            self.place[use] = (self.buckets.index(bucket), len(bucket.names))
            size = tensor.numel() * tensor.element_size()
            bucket.names.append(name)
            bucket.bytes += size
            if name in fresh:
                bucket.fresh.append(len(bucket.names))
                if size >= ALONE_BYTES:
                    bucket.alone.add(name)


class Entry:
    """One pass' way into the parameters, and out to the outputs; make it before all else."""

    def __init__(
        self,
        buckets: GradSync,
        parameters: dict[str, Tensor],
        chain: Chain,
        *,
        outputs: int,
        sync: bool,
    ) -> None:
        self.buckets, self.parameters, self.chain = buckets, parameters, chain
        shares = buckets.shares
        self.left = sync and bool(shares.besides(buckets.place))
        at_end = shares.sum if self.left else None
        self.passing = Passing(buckets.mesh, buckets.reach, [True] * outputs, at_end)
        self.outer: list[tuple[Tensor, ...]] = []
        self.states: list[_State] = []
        self.inner: dict[int, tuple[Tensor, ...]] = {}
        for bucket in buckets.buckets:
            entering = [parameters[name] for name in bucket.names]
            state = _State(buckets.mesh, bucket, shares, entering, self.passing, sync)
            self.states.append(state)
            self.outer.append(_Outer.apply(state, *entering))
        if not sync:
            for name, parameter in parameters.items():
                shares.watch(name, parameter)

    def get(self, use: Use) -> Tensor:
        """Return a parameter to compute with; the first of a bucket records its inner node."""
        if use not in self.buckets.place:
            parameter = self.parameters[use[0]]
            if self.buckets.reach.always(use):
                return parameter
            gated: Tensor = Gate.apply(self.passing, use, parameter)
            return gated
        index, position = self.buckets.place[use]
        if index not in self.inner:
            token, *entered = _Inner.apply(
                self.states[index], self.chain.later, self.chain.token, *self.outer[index]
            )
            self.chain.token = token
            self.inner[index] = tuple(entered)
        return self.inner[index][position]

    def leave(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outputs, tied to all that has to run in backward."""
        self.buckets.reach.find(outputs, _use_at)
        if len(outputs) == 1 and not self.left:
            return outputs
        return leave(outputs, self.passing, self.chain)


def _use_at(node: Any, number: int) -> Use | None:
    """Return the parameter or stretch that stands at an output of a node, if it is one of ours."""
    kind = getattr(node, "_forward_cls", None)
    if kind is Gate:
        return node.use  # type: ignore[no-any-return]
    if kind is _Inner and number > 0:
        return node.state.bucket.uses[number - 1]  # type: ignore[no-any-return]
    if kind is Stretch and number > 0:
        return Stretch.use(node.stretch, number - 1)
    return None


@dataclass
class _State:
    """What the two nodes of a bucket know of each other in one pass."""

    mesh: Mesh
    bucket: Bucket
    shares: Shares
    parameters: list[Tensor]
    passing: Passing
    sync: bool
    works: list[Any] = field(default_factory=list)
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
        flat, state.flat = state.flat, None
        if flat is None:
            _keep(state, grads, _executed(ctx))
            return None, *(None for _ in grads)
        for work in state.works:
            state.mesh.finish(work, state.bucket.group, layer=state.bucket.label)
        state.works.clear()
        if state.complete:
            return None, *grads
        touched = flat[-len(grads) :].tolist()
        return None, *(grad if seen else None for grad, seen in zip(grads, touched))


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, state: _State, later: Later, token: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.state, ctx.later = state, later
        # gradients that nothing else shares may come as promises
        ctx.promises = dict.fromkeys(state.bucket.fresh)
        ctx.set_materialize_grads(False)
        return take(ctx, token, 0), *(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        state: _State = ctx.state
        uses = state.bucket.uses
        ctx.later.run()
        grads = tuple(_kept_promise(ctx, i, grad) for i, grad in enumerate(grads, 1))
        grads = tuple(g if state.passing.wants(use) else None for g, use in zip(grads, uses))
        outer = ctx.next_functions[-1][0]
        if not torch._C._will_engine_execute_node(outer):
            # gradients of other tensors were asked for
            return None, None, token, *(None for _ in grads)
        returned = any(_is_returned(node) for node, _ in outer.next_functions)
        if not state.sync and not returned:
            return None, None, token, *grads
        if not returned:
            at_end_of_backward(state.shares.sum)
        fetched = [not returned and executed for executed in _executed(outer)]
        return None, None, token, *_start_sum(state, grads, fetched)


def _kept_promise(ctx: Any, number: int, grad: Tensor | None) -> Tensor | None:
    """Return a gradient that was put off, now found, or the one that came."""
    promise: Promise | None = ctx.promises.get(number)
    if grad is None or promise is None:
        return grad
    assert promise.value is not None, "a gradient was promised and not found"
    ctx.promises[number] = None
    return promise.value


def _is_returned(node: Any) -> bool:
    """Whether autograd.grad was asked for this parameter's gradient, not backward."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for just this: a leaf whose gradient is handed out
        return True
    return False


def _executed(outer: Any) -> list[bool]:
    """Tell for each parameter of a bucket whether this backward adds to its `.grad`."""
    nodes = [node for node, _ in outer.next_functions]
    return [not _is_returned(node) and torch._C._will_engine_execute_node(node) for node in nodes]


def _start_sum(
    state: _State, grads: Sequence[Tensor | None], fetched: Sequence[bool]
) -> list[Tensor]:
    """Start the sums of gradients, together with the shares that `fetched` allows."""
    bucket = state.bucket
    packed = [
        p.numel() for name, p in zip(bucket.names, state.parameters) if name not in bucket.alone
    ]
    flat = state.parameters[0].detach().new_empty(sum(packed) + len(grads))
    *slots, flags = flat.split([*packed, len(grads)])
    state.complete = all(grad is not None for grad in grads)
    sums: list[Tensor] = []
    flags.fill_(1.0)
    for i, (use, parameter, grad) in enumerate(zip(bucket.uses, state.parameters, grads)):
        share = state.shares.take(use, parameter) if fetched[i] else None
        if grad is None and share is None:
            flags[i] = 0.0
        if use[0] in bucket.alone:
            total = torch.zeros_like(parameter) if grad is None else grad
            total = total.contiguous()  # all ranks sum in the same order of elements
        else:
            total = slots.pop(0).view(parameter.shape)
            total.zero_() if grad is None else total.copy_(grad)
        if share is not None:
            total += share
            share.zero_()  # the sum is added to it
        sums.append(total)
    buffers = [t for t, name in zip(sums, bucket.names) if name in bucket.alone]
    state.works = [
        state.mesh.sum(buffer, bucket.group, layer=bucket.label, wait=False)
        for buffer in (*buffers, flat)
    ]
    state.flat = flat
    return sums


def _keep(state: _State, grads: Sequence[Tensor | None], executed: Sequence[bool]) -> None:
    """Add gradients to `.grad` that are not to be summed yet."""
    for use, parameter, grad, wanted in zip(state.bucket.uses, state.parameters, grads, executed):
        if wanted:  # also without a gradient: another rank may have one
            state.shares.add(use, parameter, grad)
