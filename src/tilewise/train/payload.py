"""Tensors in a file that holds numbers and their names, nothing else: the safetensors format.

    8 bytes     length of the header, little-endian
    header      JSON: {name: {"dtype": "F32", "shape": [6, 3], "data_offsets": [0, 72]}, …}
    data        the tensors one after the other

It is written here rather than through a library to know when the bytes are on the disk, to take
their checksum on the way, and to read a part of a tensor without the rest.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 1 << 22


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], note: Mapping[str, str] = {}
) -> tuple[int, int]:
    """Write tensors to a new file and onto the disk; returns its size and its checksum.

    `note` goes into the header, as text for people and tools.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(note)} if note else {}
    at = 0
    for name in ordered:
        tensor = tensors[name]
        if tensor.dtype not in NAMES:
            raise CheckpointError(
                f"{name}: a tensor of {tensor.dtype} cannot be saved; convert it to one of "
                f"{', '.join(str(dtype) for dtype in NAMES)}"
            )
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = 0
    with open(path, "xb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            checksum = zlib.crc32(part, checksum)
        for name in ordered:
            if tensors[name].numel():
                flat = tensors[name].detach().cpu().contiguous().reshape(-1)
                view: Any = flat.view(torch.uint8).numpy()
                file.write(view)
                checksum = zlib.crc32(view, checksum)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + at, checksum


def checksum_of(path: Path) -> int:
    """Return the checksum of a file's bytes."""
    found = 0
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            found = zlib.crc32(part, found)
    return found


class Payload:
    """A file of tensors, mapped into memory: reading a part of one touches that part only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        try:
            self._read_header()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path}: this is not a file of tensors ({error})") from error

    def _read_header(self) -> None:
        length = int.from_bytes(self._bytes[:8], "little")
        self._start = 8 + length
        data_bytes = len(self._bytes) - self._start
        if data_bytes < 0:
            raise ValueError("its header is longer than the file")
        header = json.loads(self._bytes[8 : self._start].decode())
        header.pop("__metadata__", None)
        self.entries: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
        for name, entry in header.items():
            dtype, shape = DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
            if min(shape, default=0) < 0 or not 0 <= begin <= end <= data_bytes:
                raise ValueError(f"{name} lies outside of the file")
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} has {end - begin} bytes for shape {shape}")
            self.entries[name] = (dtype, shape, self._start + begin)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that reads from the file when it is used."""
        dtype, shape, begin = self.entries[name]
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=begin).view(shape)
