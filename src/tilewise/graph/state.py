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
from torch.optim import Optimizer

from tilewise.errors import PlanError
from tilewise.graph.held import take
from tilewise.layout import Cover

if TYPE_CHECKING:
    from tilewise.graph.parallel import ParallelModel


class Block:
    """This rank's part of a cut tensor, and where it lies in the whole."""

    def __init__(self, local: Tensor, cover: Cover, rank: int) -> None:
        self.local, self.cover, self.rank = local, cover, rank

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.cover.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

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

    def __repr__(self) -> str:
        return f"Block({tuple(self.local.shape)} of {tuple(self.shape)} on rank {self.rank})"


def wrap(model: ParallelModel, state: dict[str, Any]) -> None:
    """Replace the cut tensors of a state dict by blocks."""
    for name, tensor in state.items():
        cover = model.held.covers.get(name)
        if cover is not None and isinstance(tensor, Tensor) and _is_cut(cover):
            state[name] = Block(tensor, cover, model.mesh.rank)


def unwrap(model: ParallelModel, state: dict[str, Any], prefix: str = "") -> None:
    """Replace blocks and whole tensors of a state dict by this rank's parts."""
    for name, found in list(state.items()):
        cover = model.held.covers.get(name.removeprefix(prefix))
        if isinstance(found, Block):
            if cover is None or not found.cover.same_blocks(cover):
                raise PlanError(
                    f"load_state_dict: {name} is a block of another plan; load it through "
                    "torch.distributed.checkpoint, or from a full state dict"
                )
            state[name] = found.local
        elif isinstance(found, Tensor) and cover is not None and tuple(found.shape) == cover.shape:
            state[name] = take(found, cover, model.mesh.rank) if _is_cut(cover) else found


def full_state_dict(model: ParallelModel) -> dict[str, Tensor]:
    """Return the ordinary state dict of one device, whole, on every rank.

    Communication: each cut tensor is gathered once.
    """
    gathered: dict[int, Tensor] = {}
    out: dict[str, Tensor] = {}
    for name, found in model.state_dict().items():
        if not isinstance(found, Block):
            out[name] = found
            continue
        key = id(model.held.get(name))
        if key not in gathered:
            gathered[key] = model.gather_held(name, found.local)
        out[name] = gathered[key]
    return out


def _is_cut(cover: Cover) -> bool:
    return any(axis.dim >= 0 for axis in cover.axes)


def optimizer_state_dict(model: ParallelModel, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by parameter name, cut as the parameters are.

    Numbers of the parameter groups are tensors, so that a checkpoint needs no pickle.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    _initialise(optimizer)
    state: dict[str, Any] = {}
    for parameter, values in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in values.items():
            if isinstance(value, Tensor):
                state[f"state.{name}.{key}"] = _like_parameter(model, name, parameter, value)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            number = _as_tensor(value)
            if number is not None:
                state[f"group.{index}.{key}"] = number
    return state


def load_optimizer_state_dict(
    model: ParallelModel, optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Load what `optimizer_state_dict` gave, also where whole tensors stand for blocks."""
    names = {id(p): name for name, p in model.named_parameters()}
    _initialise(optimizer)
    for parameter, values in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in values.items():
            found = state.get(f"state.{name}.{key}")
            if isinstance(value, Tensor) and found is not None:
                if isinstance(found, Block):
                    found = found.local
                elif found.shape != value.shape:
                    found = model.held.cut(name, found)
                values[key] = found.detach().clone().to(value.dtype)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            found = state.get(f"group.{index}.{key}")
            if found is not None:
                group[key] = _from_tensor(found, value)


def _like_parameter(model: ParallelModel, name: str, parameter: Tensor, value: Tensor) -> Any:
    cover = model.held.covers[name]
    if value.shape == parameter.shape and _is_cut(cover):
        return Block(value, cover, model.mesh.rank)
    return value


def _initialise(optimizer: Optimizer) -> None:
    """Make the state that a first step would make, without changing any parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or not parameters:
        return
    grads = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for p, grad in zip(parameters, grads):
        p.grad = grad
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    for values in optimizer.state.values():
        if "step" in values:
            values["step"] = values["step"] * 0


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    if isinstance(value, (tuple, list)) and all(isinstance(v, (int, float)) for v in value):
        return torch.tensor([float(v) for v in value], dtype=torch.float64)
    return None


def _from_tensor(found: Tensor, like: Any) -> Any:
    if isinstance(like, Tensor):
        return found.to(like.dtype)
    if isinstance(like, (tuple, list)):
        return type(like)(type(old)(new) for old, new in zip(like, found.tolist()))
    return type(like)(found.item())


def install(model: ParallelModel) -> None:
    """Let the model's state_dict give blocks and its load_state_dict take them."""

    def after(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        wrap(cast("ParallelModel", module), state)

    def before(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        unwrap(cast("ParallelModel", module), state, prefix)

    model._register_state_dict_hook(after)
    model.register_load_state_dict_pre_hook(before)
