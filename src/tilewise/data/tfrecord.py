"""TFRecord files with one example each, such as those of the MLPerf HPC CosmoFlow benchmark.

    file      length (8) │ its checksum (4) │ example (length) │ its checksum (4)
    example   features { feature { key "x", value { bytes_list | float_list | int64_list } } … }

Only the wire format is read, by a parser of our own; the values of a plain file are memory-mapped,
so that a slab's pages alone are read. A gzipped file is decompressed up to the slab's end.
"""

from __future__ import annotations

import gzip
import mmap
import struct
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewise.data.handles import Handles
from tilewise.data.region import Array, Box, cut_out
from tilewise.data.source import CHOOSE, Counts, Field, Source, Storage, native
from tilewise.errors import DataError

BYTES, FLOATS, INTEGERS = 1, 2, 3
HEADER, FOOTER = 12, 4
_BROKEN = (IndexError, KeyError, EOFError, OSError, UnicodeDecodeError, struct.error, zlib.error)


class Feature(NamedTuple):
    """Where a feature's values lie in its file."""

    kind: int
    at: int
    size: int


class TfRecordSource(Source):
    """One example to a file.

    Args:
        files: in the order of the samples.
        formats: dtype and shape of features that are stored as bytes. By default `x` is int16 of
            shape (s, s, s, 4), as in CosmoFlow; other bytes are uint8. `Permuted` brings the
            channels to the front.
        keys: the features to read, in order; all by default.
        reference: which of the files the others must be like.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        formats: Mapping[str, tuple[str, Sequence[int]]] | None = None,
        keys: Sequence[str] | None = None,
        *,
        open_files: int = 16,
        reference: int = 0,
    ) -> None:
        given = [files] if isinstance(files, (str, Path)) else files
        self.files = [Path(file) for file in given]
        if not self.files:
            raise DataError("data: no TFRecord files given")
        self._reference = self.files[reference]
        self.origin = self._reference if len(self.files) > 1 else None
        self.counts = Counts()
        self._formats = dict(formats or {})
        self._handles: Handles[_File] = Handles(_File, _File.close, kind="TFRecord",
                                                limit=open_files)  # fmt: skip
        self._found: dict[Path, dict[str, Feature]] = {}
        self.fields: dict[str, Field] = {}
        with self._handles.looking():
            with self._handles.use(self._reference) as file:
                features = self._features(self._reference, file)
                self._packed = file.packed
            for key in sorted(features) if keys is None else keys:
                feature = _feature(features, self._reference, key)
                self.fields[key] = self._field(key, feature)
                self._check_size(self._reference, key, feature)

    def _field(self, key: str, feature: Feature) -> Field:
        if feature.kind == FLOATS:
            return Field((feature.size // 4,), np.dtype("float32"))
        if feature.kind == INTEGERS:
            raise DataError(
                f"data: {self._reference}: {key!r} is a list of packed integers, expected bytes or "
                f"floats; {CHOOSE}"
            )
        if key in self._formats:
            dtype, shape = self._formats[key]
            return Field(tuple(shape), native(np.dtype(dtype), f"{self._reference}: {key!r}"))
        side = round((feature.size / 8) ** (1 / 3))
        if key == "x" and side**3 * 8 == feature.size:
            return Field((side, side, side, 4), np.dtype("int16"))
        return Field((feature.size,), np.dtype("uint8"))

    def __len__(self) -> int:
        return len(self.files)

    def storage(self, field: str) -> Storage:
        found = self.fields[field]
        return Storage(
            found.shape,
            found.dtype.itemsize,
            compression="gzip" if self._packed else "none",
            whole=self._packed,
        )

    def place(self, index: int, field: str) -> str:
        return f"{self.files[index]}: {field!r}"

    def touched(self, index: int, field: str, box: Box) -> int:
        return self.storage(field).touched(box)

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        path = self.files[index]
        with self._handles.use(path) as file:
            feature = _feature(self._features(path, file), path, field)
            self._check_size(path, field, feature)
            _read(file, feature.at, self.fields[field], box, out)

    def verify(self, index: int) -> None:
        """Check the file's checksums, which cover all of it."""
        path = self.files[index]
        with self._handles.use(path) as file:
            size = file.length(path)
            for what, at, count in (("length", 0, 8), ("example", HEADER, size)):
                found = struct.unpack("<I", file.read(at + count, 4))[0]
                if found != masked_crc(file.read(at, count)):
                    raise DataError(
                        f"data: {path}: the checksum of its {what} does not fit, expected "
                        f"{found:#010x}"
                    )

    def close(self) -> None:
        self._handles.close()

    def _features(self, path: Path, file: _File) -> dict[str, Feature]:
        if path not in self._found:
            try:
                self._found[path] = _parse(file, HEADER, HEADER + file.length(path))
            except _BROKEN as error:
                raise DataError(
                    f"data: {path}: not a whole TensorFlow example, expected one: {error!r}"
                ) from error
        return self._found[path]

    def _check_size(self, path: Path, key: str, feature: Feature) -> None:
        field = self.fields[key]
        if feature.size != field.bytes or (feature.kind == FLOATS) != (field.dtype.kind == "f"):
            raise DataError(
                f"data: {path}: {key!r}: {feature.size} bytes found, expected {field.bytes} for "
                f"{field}"
            )


class _File:
    """An open file, plain or gzipped, that is read by position."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("rb")
        self.packed = self._raw.read(2) == b"\x1f\x8b"
        self._raw.seek(0)
        self._stream = gzip.GzipFile(fileobj=self._raw) if self.packed else None
        size = path.stat().st_size
        if size < HEADER:
            self._raw.close()
            raise ValueError(f"{size} bytes long")
        self.map = (
            None if self.packed else mmap.mmap(self._raw.fileno(), 0, access=mmap.ACCESS_READ)
        )

    def read(self, at: int, size: int) -> bytes:
        """Return bytes; fewer than asked for are an error."""
        if self.map is not None:
            found = self.map[at : at + size]
        else:
            assert self._stream is not None
            self._stream.seek(at)
            found = self._stream.read(size)
        if len(found) != size:
            raise IndexError(f"{len(found)} bytes at {at}, {size} wanted")
        return found

    def length(self, path: Path) -> int:
        """Return the example's length; the file must hold it and nothing else."""
        length: int = struct.unpack("<Q", self.read(0, 8))[0]
        whole = HEADER + length + FOOTER
        if self.map is not None and len(self.map) != whole:
            more = "another record follows" if len(self.map) > whole else "it is truncated"
            raise DataError(
                f"data: {path}: {len(self.map)} bytes found, expected {whole} for one record; "
                f"{more}"
            )
        return length

    def close(self) -> None:
        if self.map is not None:
            self.map.close()
        self._raw.close()


def _read(file: _File, at: int, field: Field, box: Box, out: Array) -> None:
    little = field.dtype.newbyteorder("<")
    slices = tuple(slice(start, stop) for start, stop in box)
    if file.map is not None:
        values = np.frombuffer(file.map, little, prod(field.shape), at).reshape(field.shape)
        out[...] = cut_out(values, slices)
        return
    if len(box) < 2:
        values = np.frombuffer(file.read(at, field.bytes), little).reshape(field.shape)
        out[...] = cut_out(values, slices)
        return
    row = prod(field.shape[2:])
    (first, last), (start, stop) = box[:2]
    for outer in range(first, last):
        skip = (outer * field.shape[1] + start) * row * little.itemsize
        data = file.read(at + skip, (stop - start) * row * little.itemsize)
        plane = np.frombuffer(data, little).reshape(stop - start, *field.shape[2:])
        out[outer - first] = cut_out(plane, (slice(None), *slices[2:]))


def _feature(features: Mapping[str, Feature], path: Path, key: str) -> Feature:
    if key not in features:
        raise DataError(
            f"data: {path}: key {key!r} not found, expected a feature; it has {sorted(features)}"
        )
    return features[key]


# -- the wire format: each field is a number and a type, then a length and so many bytes -----------


def _parse(file: _File, start: int, stop: int) -> dict[str, Feature]:
    """Find the features of an example without reading their values."""
    found: dict[str, Feature] = {}
    for _, features_at, features_stop in _messages(file, start, stop):
        for _, entry_at, entry_stop in _messages(file, features_at, features_stop):
            parts = {number: span for number, *span in _messages(file, entry_at, entry_stop)}
            key_at, key_stop = parts[1]
            key = file.read(key_at, key_stop - key_at).decode()
            for kind, list_at, list_stop in _messages(file, *parts[2]):
                for _, at, end in _messages(file, list_at, list_stop):
                    found[key] = Feature(kind, at, end - at)
    return found


def _messages(file: _File, at: int, stop: int) -> list[tuple[int, int, int]]:
    """List the (number, start, stop) of the length-delimited fields of a message."""
    found = []
    while at < stop:
        tag, at = _varint(file, at)
        if tag & 7 != 2:
            raise IndexError(f"wire type {tag & 7} at {at}")
        size, at = _varint(file, at)
        if at + size > stop:
            raise IndexError(f"{size} bytes at {at} reach past {stop}")
        found.append((tag >> 3, at, at + size))
        at += size
    return found


def _varint(file: _File, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = file.read(at, 1)[0]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError(f"no end of a number at {at}")


def masked_crc(data: bytes) -> int:
    """Return the checksum that follows a length and an example."""
    import google_crc32c  # type: ignore[import-untyped]

    crc: Any = google_crc32c.value(data)
    return int(((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
