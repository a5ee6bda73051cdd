"""State dicts: blocks that torch.distributed.checkpoint can save and reload under another plan.

A cut tensor appears in a state dict as a `Block`: this rank's part together with the boxes it
covers in the whole. Replicas are written once. Loading takes blocks, whole tensors, or a mix.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tilewise.errors import PlanError
from tilewise.graph.held import take, whole_cover
from tilewise.layout import Cover

if TYPE_CHECKING:
    from tilewise.graph.parallel import ParallelModel


aten = torch.ops.aten
_CARRIED = (aten.detach, aten.clone, aten._to_copy, aten.copy_)


class Block(Tensor):
    """This rank's part of a cut tensor; to the outside it has the shape of the whole.

    It is there to be saved and loaded. What a state dict's tensors are otherwise asked for (detach,
    clone, move, copy) works on the part; all else is an error.
    """

    local: Tensor
    cover: Cover
    rank: int

    @staticmethod
    def __new__(cls, local: Tensor, cover: Cover, rank: int) -> Block:
        made: Block = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, cover.shape, dtype=local.dtype, device=local.device
        )
        made.local, made.cover, made.rank = local.detach(), cover, rank
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0]
        if func.overloadpacket not in _CARRIED or not isinstance(first, Block):
            raise PlanError(
                f"{func}: a block of a cut tensor is only for saving and loading; use "
                "full_state_dict() for the whole"
            )
        local = func(*(a.local if isinstance(a, Block) else a for a in args), **(kwargs or {}))
        return first if local is first.local else Block(local, first.cover, first.rank)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Block, (self.local, self.cover, self.rank)

    def boxes(self) -> Iterator[tuple[torch.Size, torch.Size, Tensor]]:
        """Yield (offsets in the whole, sizes, view of the local part) for each box."""
        coords = self.cover.coords(self.rank)
        pieces = [blocks[i].pieces for blocks, i in zip(self.cover.blocks, coords)]
        for box in product(*pieces):
            sizes = [piece.stop - piece.start for piece in box]
            view = self.local[tuple(slice(p.at, p.at + s) for p, s in zip(box, sizes))]
            yield torch.Size(piece.start for piece in box), torch.Size(sizes), view

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for offsets, sizes, _ in self.boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=sizes) for offsets, sizes, _ in self.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, _, view in self.boxes():
            if index.offset is None or tuple(offsets) == tuple(index.offset):
                return view
        raise PlanError(f"checkpoint: no box at {index.offset} of {index.fqn} on this rank")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Block({tuple(self.local.shape)} of {tuple(self.shape)} on rank {self.rank})"


def full_state_dict(model: ParallelModel) -> dict[str, Any]:
    """Return the ordinary state dict of one device, whole, on every rank.

    As in torch's, tensors that are not cut are the model's own, not copies.

    Communication: each cut tensor is gathered once.
    """
    gathered: dict[int, Tensor] = {}
    out: dict[str, Any] = model.state_dict()
    for name, found in out.items():
        if isinstance(found, Block):
            key = id(model.held.get(name))
            if key not in gathered:
                gathered[key] = gather(model, name, found.local)
            out[name] = gathered[key]
    return out


def gather(model: ParallelModel, name: str, local: Tensor) -> Tensor:
    """Return a tensor that is cut as the parameter or buffer `name` is, whole on every rank."""
    cover = model.held.covers[name]
    whole = whole_cover(cover.shape, model.mesh.size)
    return model.runs.exchange(cover, whole, layer=name).start(local.detach()).finish()


def block(model: ParallelModel, name: str, local: Tensor) -> Any:
    """Return a tensor that is cut as the parameter or buffer `name` is, as it is saved."""
    if not model.held.is_cut(name):
        return local
    return Block(local, model.held.covers[name], model.mesh.rank)


def part(model: ParallelModel, name: str, found: Any) -> Any:
    """Return this rank's part of what was loaded: a block, or a whole tensor."""
    cover = model.held.covers[name]
    if isinstance(found, Block):
        if not found.cover.same_blocks(cover):
            raise PlanError(
                f"load_state_dict: {name} is a block of another plan; load it through "
                "torch.distributed.checkpoint, or from a full state dict"
            )
        return found.local
    if not isinstance(found, Tensor) or not model.held.is_cut(name):
        return found
    if tuple(found.shape) != cover.shape:
        raise PlanError(
            f"load_state_dict: {name} has shape {tuple(found.shape)}, the model's has {cover.shape}"
        )
    return take(found, cover, model.mesh.rank)


def install(model: ParallelModel) -> None:
    """Let the model's state_dict give blocks and its load_state_dict take them."""

    def after(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        this = cast("ParallelModel", module)
        for name in this.held.covers:
            found = state.get(prefix + name)
            if isinstance(found, Tensor):
                state[prefix + name] = block(this, name, found)

    def before(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        this = cast("ParallelModel", module)
        for name in this.held.covers:
            if prefix + name in state:
                state[prefix + name] = part(this, name, state[prefix + name])

    model._register_state_dict_hook(after)
    model.register_load_state_dict_pre_hook(before)
