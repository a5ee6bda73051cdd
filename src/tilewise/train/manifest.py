"""What a checkpoint holds, as JSON: written last, so a folder without it is no checkpoint.

tensors    name -> dtype, shape and the boxes it was saved in: which file, where in the whole
files      name -> bytes and checksum
extra      what the training loop wants back: schedule, loader position, recipe, …
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewise.errors import CheckpointError
from tilewise.train.payload import DTYPES, NAMES, Payload, checksum_of

FORMAT = "tilewise checkpoint 1"
MANIFEST = "manifest.json"
FILE = re.compile(r"rank-\d+\.safetensors")
TORCHS_OWN = ".metadata"


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it lies in the whole, and under which key of which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint folder holds."""

    folder: Path
    step: int
    ranks: int
    plan: Any
    extra: dict[str, Any]
    tensors: Mapping[str, Saved]
    files: Mapping[str, tuple[int, int]]

    def names(self, part: str) -> dict[str, Saved]:
        """Return the tensors of `model` or `optimizer`, by their names there."""
        prefix = f"{part}/"
        return {
            name.removeprefix(prefix): saved
            for name, saved in self.tensors.items()
            if name.startswith(prefix)
        }

    def write(self, folder: Path) -> None:
        """Write it into a folder, and onto the disk."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "ranks": self.ranks,
            "plan": self.plan,
            "extra": self.extra,
            "files": {name: list(facts) for name, facts in self.files.items()},
            "tensors": {
                name: {
                    "dtype": NAMES[saved.dtype],
                    "shape": list(saved.shape),
                    "boxes": [[b.offsets, b.sizes, b.file, b.key] for b in saved.boxes],
                }
                for name, saved in self.tensors.items()
            },
        }
        text = json.dumps({"checksum": _checksum(body), "body": body})
        with open(folder / MANIFEST, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint; an error says why a folder is none."""
        path = folder / MANIFEST
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: there is no such folder; name one of a run or of a checkpoint"
            )
        if not path.exists():
            raise CheckpointError(
                f"{folder}: this is a checkpoint of torch's own format, which is pickled and may "
                "run any code; it is not loaded"
                if (folder / TORCHS_OWN).exists()
                else f"{folder}: there is no {MANIFEST}; it is no checkpoint, or was half deleted"
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["checksum"] != _checksum(found["body"]):
                raise ValueError("its checksum is wrong")
            return cls._of(folder, found["body"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            kind = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path}: damaged or no manifest ({kind})") from error

    @classmethod
    def _of(cls, folder: Path, body: dict[str, Any]) -> Manifest:
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']!r}, not {FORMAT!r}")
        files = {name: (int(size), int(check)) for name, (size, check) in body["files"].items()}
        for name in files:
            if not FILE.fullmatch(name):
                raise ValueError(f"{name!r} is not a name of a file of tensors")
        tensors = {}
        for name, entry in body["tensors"].items():
            shape = tuple(int(size) for size in entry["shape"])
            boxes = tuple(
                Box(tuple(map(int, offsets)), tuple(map(int, sizes)), str(file), str(key))
                for offsets, sizes, file, key in entry["boxes"]
            )
            _check_boxes(name, shape, boxes, files)
            tensors[name] = Saved(DTYPES[entry["dtype"]], shape, boxes)
        return cls(
            folder, int(body["step"]), int(body["ranks"]), body["plan"], dict(body["extra"]),
            tensors, files,
        )  # fmt: skip

    # -- checking ---------------------------------------------------------------------------

    def check_names(self) -> None:
        """Raise unless the folder holds the manifest and its files, and nothing else."""
        there = {entry.name for entry in self.folder.iterdir()}
        strangers = sorted(there - {MANIFEST, *self.files})
        if strangers:
            raise CheckpointError(
                f"{self.folder}: holds {strangers[0]!r}, which its manifest does not name; nothing "
                "of it is loaded. Move that file away if you know how it came there"
            )
        missing = sorted(set(self.files) - there)
        if missing:
            raise CheckpointError(f"{self.folder}: {missing[0]} is missing; it was half deleted")

    def check_file(self, name: str) -> None:
        """Raise unless a file holds the very bytes that were written, and the boxes in them."""
        path = self.folder / name
        size, checksum = self.files[name]
        try:
            found = path.stat().st_size
            if found != size:
                raise CheckpointError(f"{path}: damaged, it has {found} bytes instead of {size}")
            if checksum_of(path) != checksum:
                raise CheckpointError(f"{path}: damaged, its checksum is wrong")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        entries = Payload(path).entries
        for tensor, saved in self.tensors.items():
            for box in saved.boxes:
                if box.file == name and entries.get(box.key, ())[:2] != (saved.dtype, box.sizes):
                    raise CheckpointError(f"{path}: damaged, {tensor} is not what was saved")


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _check_boxes(
    name: str, shape: tuple[int, ...], boxes: Iterable[Box], files: Mapping[str, Any]
) -> None:
    """Raise unless boxes lie within the whole, in known files, and fill it."""
    filled = 0
    for box in boxes:
        if box.file not in files:
            raise ValueError(f"{name} is in {box.file!r}, which is not a file of it")
        if not len(box.offsets) == len(box.sizes) == len(shape) or not all(
            0 <= at <= at + size <= extent
            for at, size, extent in zip(box.offsets, box.sizes, shape)
        ):
            raise ValueError(f"{name} has a box outside of its shape {shape}")
        filled += math.prod(box.sizes)
    if filled != math.prod(shape):
        raise ValueError(f"{name} is saved in part: {filled} of {math.prod(shape)} elements")
