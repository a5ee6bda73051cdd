"""Go through a whole set and find everything that would stop a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import numpy as np

from tilewise.data.hdf5 import Hdf5Source
from tilewise.data.making import check_finite
from tilewise.data.open import (
    HDF5,
    NIFTI,
    TFRECORD,
    open_files,
    open_source,
    read_facts,
)
from tilewise.data.region import stretches
from tilewise.data.source import Source
from tilewise.data.zarr import ZarrSource
from tilewise.errors import DataError

# Elements read at a time.
PIECE = 1 << 23


@dataclass(frozen=True)
class Finding:
    """Something bad, and the first sample that it spoils."""

    sample: int
    error: str


def open_for_check(path: str | Path, keys: Sequence[str] | None = None) -> Source:
    """Open a set; of many files, what most of them hold is what all should hold."""
    path = Path(path)
    files = _separate_files(path)
    if files:
        facts = read_facts(path) if (path / "set.json").is_file() else None
        names = list(facts["fields"]) if facts and keys is None else keys
        return _like_most(Hdf5Source(files, names, reference=_typical(files, _contents)))
    if path.is_dir():
        for endings in (TFRECORD, NIFTI):
            files = sorted(file for file in path.iterdir() if file.name.endswith(endings))
            if files:
                reference = _typical(files, lambda file: _fields(file, keys))
                return _like_most(open_files(files, keys, reference) or open_source(path, keys))
    return open_source(path, keys)


def _like_most(source: Source) -> Source:
    source.like = "most samples"
    return source


def check_source(
    source: Source, *, finite: bool = True, progress: Callable[[int], Any] = lambda done: None
) -> Iterator[Finding]:
    """Read every sample and check what a run would check; yield what is wrong as it is found."""
    for index in range(len(source)):
        errors: dict[str, None] = {}
        try:
            source.verify(index)
        except DataError as error:
            errors[str(error)] = None
        for name in source.fields:
            try:
                _read_all(source, index, name, finite)
            except DataError as error:
                errors[str(error)] = None
        for text in errors:
            yield Finding(index, text)
        progress(index + 1)


def notes(source: Source) -> list[str]:
    """Say what is not an error but may be one."""
    if not isinstance(source, ZarrSource):
        return []
    absent = {name: source.absent(name) for name in source.fields}
    return [
        f"{source.place(0, name)}: {count} chunks do not exist and read as the fill value, which "
        "is right only if they were written empty"
        for name, count in absent.items()
        if count
    ]


def _read_all(source: Source, index: int, name: str, finite: bool) -> None:
    field = source.fields[name]
    for stretch in stretches(field.shape, PIECE):
        box = tuple(
            (cut.start or 0, extent if cut.stop is None else cut.stop)
            for cut, extent in zip(stretch, field.shape)
        )
        out = np.empty([stop - start for start, stop in box], field.dtype)
        source.read(index, name, box, out)
        if finite:
            check_finite(source.place(index, name), index, box, out)


def _separate_files(path: Path) -> list[Path]:
    """Return the HDF5 files of a folder with one sample to a file; none for other sets."""
    if not path.is_dir():
        return []
    if (path / "set.json").is_file():
        facts = read_facts(path)
        if facts.get("format") != "hdf5" or facts.get("files") != "each":
            return []
        return [path / f"{index:05d}.h5" for index in range(facts["count"])]
    return sorted(file for file in path.iterdir() if file.suffix in HDF5)


def _typical(files: Sequence[Path], contents: Callable[[Path], Hashable | None]) -> int:
    """Return the number of the first file that holds what most of them hold."""
    held = [contents(file) for file in files]
    common = Counter(one for one in held if one is not None).most_common(1)
    return held.index(common[0][0]) if common else 0


def _fields(path: Path, keys: Sequence[str] | None) -> tuple[Any, ...] | None:
    try:
        return tuple(open_source(path, keys).fields.items())
    except DataError:
        return None


def _contents(path: Path) -> tuple[Any, ...] | None:
    found: list[Any] = []

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found.append((name, item.shape, str(item.dtype)))

    try:
        with h5py.File(path, "r") as file:
            file.visititems(note)
    except OSError:
        return None
    return tuple(sorted(found))
