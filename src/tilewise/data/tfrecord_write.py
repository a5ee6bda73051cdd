"""Write TFRecord files with one example each, as those of the MLPerf HPC CosmoFlow benchmark are.

`x` is int16 with the channels last, as bytes; `y` is a list of floats.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tilewise.data.region import Array
from tilewise.data.tfrecord import BYTES, FLOATS, masked_crc


def write_record(path: Path, sample: Mapping[str, Array]) -> None:
    """Write one example: lists of floats as they are, everything else as bytes, channels last."""
    entries = b"".join(
        _message(1, _message(1, name.encode()) + _message(2, _value(values)))
        for name, values in sample.items()
    )
    example = _message(1, entries)
    length = struct.pack("<Q", len(example))
    path.write_bytes(length + _checksum(length) + example + _checksum(example))


def _value(values: Array) -> bytes:
    if values.dtype == np.float32 and values.ndim == 1:
        return _message(FLOATS, _message(1, values.astype("<f4").tobytes()))
    last = np.moveaxis(values, 0, -1)
    return _message(BYTES, _message(1, last.astype(values.dtype.newbyteorder("<")).tobytes()))


def _message(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of the wire format."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    packed = bytearray()
    while value > 127:
        packed.append(value & 127 | 128)
        value >>= 7
    return bytes([*packed, value])


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc(data))
