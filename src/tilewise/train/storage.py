"""Storage for torch.distributed.checkpoint that never pickles: safetensors files and a manifest.

run/checkpoints/.step-00000020.partial/   while it is written
run/checkpoints/step-00000020/            once it is whole
    rank-0.safetensors  rank-1.safetensors  manifest.json
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tilewise.errors import CheckpointError
from tilewise.train.manifest import Box, Manifest, Saved
from tilewise.train.payload import Payload, write_tensors


class Writer(StorageWriter):
    """Write one checkpoint: each rank a file in a partial folder, the first rank the manifest."""

    def __init__(self, partial: Path, about: Manifest, place: Callable[[], Path]) -> None:
        """`place` is called on the first rank: it clears the way and says where the folder goes."""
        self.partial, self.about, self.place = partial, about, place

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to forget: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """There is nothing to set up before the first rank has made the folder."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(
                    f"{item.index.fqn}: only tensors can be saved; keep other state in `extra`"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.final = self.place()
        self.partial.mkdir()
        return [
            replace(plan, storage_data=f"rank-{rank}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            found = planner.resolve_data(item)
            assert isinstance(found, Tensor)
            tensors[_key(item)] = found
        results = []
        if tensors:
            file = plan.storage_data
            facts = write_tensors(self.partial / file, tensors)
            results = [WriteResult(item.index, 0, (file, _key(item), facts)) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and give the folder its name in one step."""
        places = {one.index: one.storage_data for some in results for one in some}
        tensors = {}
        for name, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            boxes = [
                Box(tuple(chunk.offsets), tuple(chunk.sizes), *places[_index(name, chunk)][:2])
                for chunk in saved.chunks
            ]
            tensors[name] = Saved(saved.properties.dtype, tuple(saved.size), tuple(boxes))
        files = {file: facts for file, _, facts in places.values()}
        replace(self.about, tensors=tensors, files=files).write(self.partial)
        sync_folder(self.partial)
        self.partial.rename(self.final)
        sync_folder(self.final.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(StorageReader):
    """Read what a manifest names, each rank its own boxes."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to forget: a reader reads one folder."""

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=saved.dtype),
                    torch.Size(saved.shape),
                    [
                        ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                        for box in saved.boxes
                    ],
                )
                for name, saved in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        self.places = {
            MetadataIndex(name, box.offsets): box
            for name, saved in self.manifest.tensors.items()
            for box in saved.boxes
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        payloads: dict[str, Payload] = {}
        for item in plan.items:
            box = self.places[item.storage_index]
            if box.file not in payloads:
                payloads[box.file] = Payload(self.manifest.folder / box.file)
            stored = payloads[box.file].tensor(box.key)
            for dim, (at, size) in enumerate(zip(item.storage_offsets, item.lengths)):
                stored = stored.narrow(dim, at, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _key(item: WriteItem) -> str:
    """Return the name in the file: the tensor's own, and where its box lies unless at the start."""
    offset = item.index.offset
    at = ",".join(map(str, offset)) if offset is not None and any(offset) else ""
    return f"{item.index.fqn}@{at}" if at else item.index.fqn


def _index(name: str, chunk: ChunkStorageMetadata) -> MetadataIndex:
    return MetadataIndex(name, chunk.offsets)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder onto the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
