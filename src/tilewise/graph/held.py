"""What the model holds: parameters and buffers, each rank its blocks, under their own names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from tilewise.errors import PlanError
from tilewise.graph.graph import Value
from tilewise.graph.rule import Lowered
from tilewise.graph.template import rebuild
from tilewise.layout import PARTIAL, REPLICA, Axes, Axis, Cover, Layout

K = TypeVar("K", bound=Hashable)


class Held:
    """How every parameter and buffer is cut, and this rank's blocks of them."""

    def __init__(self, model: nn.Module, lowered: Iterable[Lowered], *, ranks: int, rank: int):
        self.ranks, self.rank = ranks, rank
        self.covers: dict[str, Cover] = {}
        identity = {name: id(tensor) for name, tensor in named_tensors(model)}
        chosen = chosen_covers(lowered, lambda value: identity[str(value.source)], ranks)
        for name, tensor in named_tensors(model):
            self.covers[name] = chosen.get(identity[name]) or whole_cover(tensor.shape, ranks)
        self.model = rebuild(model, self._parameter, self._buffer)
        self.places = dict(_places(self.model))
        self.parameters = [name for name, _ in self.model.named_parameters()]

    def _parameter(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self.cut(name, whole.detach()), requires_grad=whole.requires_grad)

    def _buffer(self, name: str, whole: Tensor) -> Tensor:
        return self.cut(name, whole.detach())

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of this rank's block of a whole tensor."""
        return take(whole, self.covers[name], self.rank)

    def is_cut(self, name: str) -> bool:
        """Whether ranks hold different blocks of a parameter or buffer."""
        return any(axis.dim >= 0 for axis in self.covers[name].axes)

    def storage(self, value: Value) -> Cover:
        """Return how a held value lies on the ranks."""
        if value.origin == "constant":
            return whole_cover(value.shape, self.ranks)
        return self.covers[str(value.source)]

    def tensor(self, value: Value) -> Tensor:
        """Return this rank's block of a held value."""
        if value.origin == "constant":
            if value.constant is None:
                raise PlanError(f"the constant {value.source} has no value to compute with")
            return value.constant
        return self.get(str(value.source))

    def get(self, name: str) -> Tensor:
        """Return this rank's block of a parameter or buffer as it is now."""
        owner, key = self.places[name]
        return owner[key]

    def put(self, name: str, block: Tensor) -> None:
        """Replace this rank's block of a tensor that has no values, under all its names."""
        old = self.get(name)
        if not old.is_meta:
            old.data.copy_(block)
            return
        new = nn.Parameter(block, old.requires_grad) if isinstance(old, nn.Parameter) else block
        for owner, key in self.places.values():
            if owner[key] is old:
                owner[key] = new


def chosen_covers(
    lowered: Iterable[Lowered], key: Callable[[Value], K], ranks: int
) -> dict[K, Cover]:
    """Return how parameters and buffers are held: as all calls need them, or else whole.

    `key` tells which of them are the same tensor.
    """
    chosen: dict[K, Cover] = {}
    for plan in lowered:
        for value, need in zip(plan.operands, plan.operation.needs, strict=True):
            if value.origin not in ("parameter", "buffer"):
                continue
            cover = at_rest(need.cover)
            if key(value) not in chosen:
                chosen[key(value)] = cover
            elif not chosen[key(value)].same_blocks(cover):
                chosen[key(value)] = whole_cover(value.shape, ranks)
    return chosen


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List all parameters and buffers under all their names."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _places(model: nn.Module) -> Iterator[tuple[str, tuple[dict[str, Tensor], str]]]:
    """Yield where each tensor is kept; converting a model puts new buffers there."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None:
                    yield prefix + key, (cast(dict[str, Tensor], owner), key)


def digest(model: nn.Module) -> str:
    """Return a short text that tells models with different values apart."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in named_tensors(model):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel() and not tensor.is_meta and not tensor.is_complex():
            wide = tensor.detach().flatten()
            sums = (wide.sum(dtype=torch.float64), wide[::2].sum(dtype=torch.float64), wide[-1])
            found.update(repr([float(number) for number in sums]).encode())
    return found.hexdigest()


def at_rest(cover: Cover) -> Cover:
    """Return the cover as storage: where work shares a block, ranks hold replicas of it."""
    axes = Axes(Axis(a.size, REPLICA if a.dim == PARTIAL else a.dim) for a in cover.axes)
    return Cover(cover.shape, axes, cover.blocks)


def whole_cover(shape: Iterable[int], ranks: int) -> Cover:
    """Return the cover of a tensor that every rank holds."""
    return Cover.of(Layout.replicated(tuple(shape), ranks=ranks))


def take(whole: Tensor, cover: Cover, rank: int) -> Tensor:
    """Copy a rank's block out of a whole tensor."""
    out = whole
    for dim in range(whole.dim()):
        pieces = cover.block(rank, dim).pieces
        if not pieces:
            return whole.new_empty(cover.local_shape(rank))
        parts = [out.narrow(dim, piece.start, piece.stop - piece.start) for piece in pieces]
        out = torch.cat(parts, dim) if len(parts) > 1 else parts[0]
    return out.clone(memory_format=torch.contiguous_format)
