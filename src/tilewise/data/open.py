"""Open a set by its path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.data.hdf5 import Hdf5Source
from tilewise.data.nifti import NiftiSource
from tilewise.data.npy import NpySource
from tilewise.data.source import Source
from tilewise.data.tfrecord import TfRecordSource
from tilewise.data.views import Permuted
from tilewise.data.zarr import ZarrSource
from tilewise.errors import DataError

HDF5 = (".h5", ".hdf5", ".he5")
NIFTI = (".nii", ".nii.gz")
TFRECORD = (".tfrecord", ".tfrecord.gz")


def open_source(path: str | Path, keys: Sequence[str] | None = None) -> Source:
    """Open files of any known format.

    Args:
        path: an HDF5 file with many samples, a folder of HDF5 files with one sample each, a Zarr
            store, an NPY file, a folder with one NPY file for each field, CosmoFlow's TFRecord
            files (one or a folder, channels brought to the front), NIfTI images (one or a folder,
            one for each sample), or a folder with a `set.json` that `tilewise data make` wrote.
        keys: the fields to read, in order; all of them by default.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"data: {path}: no such file or folder, expected a data set")
    if path.is_dir():
        return _open_folder(path, keys)
    if path.suffix in HDF5:
        return Hdf5Source(path, keys)
    if path.suffix == ".npy":
        return _open_npy({"x": path}, keys, path)
    source = open_files([path], keys)
    if source is None:
        known = ", ".join((*HDF5, ".npy", *TFRECORD, *NIFTI))
        raise DataError(f"data: {path}: not a known kind of file, expected one of {known}")
    return source


def _open_folder(path: Path, keys: Sequence[str] | None) -> Source:
    if (path / "set.json").is_file():
        return _open_made(path, keys)
    if any((path / name).exists() for name in ("zarr.json", ".zgroup", ".zarray")):
        return ZarrSource(path, keys)
    files = sorted(file for file in path.iterdir() if file.suffix in HDF5)
    if files:
        return Hdf5Source(files, keys)
    source = open_files(sorted(path.iterdir()), keys)
    if source is not None:
        return source
    arrays = {file.stem: file for file in sorted(path.glob("*.npy"))}
    if arrays:
        return _open_npy(arrays, keys, path)
    raise DataError(
        f"data: {path}: no data found in the folder, expected HDF5, NPY, TFRecord or NIfTI files "
        "or a Zarr store"
    )


def open_files(
    files: Sequence[Path], keys: Sequence[str] | None, reference: int = 0
) -> Source | None:
    """Open those of the files that are of a kind with one sample to a file."""
    records = [file for file in files if file.name.endswith(TFRECORD)]
    if records:
        return _open_records(records, keys, reference)
    images = [file for file in files if file.name.endswith(NIFTI)]
    return NiftiSource({"x": images}, reference=reference) if images else None


def _open_records(files: Sequence[Path], keys: Sequence[str] | None, reference: int = 0) -> Source:
    """Open CosmoFlow's files with the channels in front."""
    source = TfRecordSource(files, keys=keys, reference=reference)
    cubes = [name for name, field in source.fields.items() if len(field.shape) == 4]
    return Permuted(source, dict.fromkeys(cubes, (3, 0, 1, 2)))


def _open_npy(files: dict[str, Path], keys: Sequence[str] | None, path: Path) -> Source:
    for key in keys or ():
        if key not in files:
            raise DataError(f"data: {path}: key {key!r} not found, it has {list(files)}")
    return NpySource({key: files[key] for key in keys or files})


def read_facts(path: Path) -> dict[str, Any]:
    """Read a made set's `set.json`."""
    file = path / "set.json"
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        fields = {
            name: (tuple(map(int, about["shape"])), str(about["dtype"]))
            for name, about in facts["fields"].items()
        }
        return {**facts, "fields": fields, "count": int(facts["count"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"data: {file}: not the description of a data set, expected format, count and "
            f"fields: {error!r}"
        ) from error


def _open_made(path: Path, keys: Sequence[str] | None) -> Source:
    facts = read_facts(path)
    names = list(keys or facts["fields"])
    source: Source
    if facts.get("format") == "hdf5" and facts.get("files", "one") == "one":
        source = Hdf5Source(path / "data.h5", names)
    elif facts.get("format") == "hdf5":
        source = Hdf5Source([path / f"{k:05d}.h5" for k in range(facts["count"])], names)
    elif facts.get("format") == "zarr":
        source = ZarrSource(path / "data.zarr", names)
    elif facts.get("format") == "npy":
        source = _open_npy({name: path / f"{name}.npy" for name in facts["fields"]}, names, path)
    elif facts.get("format") == "tfrecord":
        records = [path / f"{k:05d}.tfrecord" for k in range(facts["count"])]
        source = _open_records(records, names)
    else:
        raise DataError(f"data: {path / 'set.json'}: format {facts.get('format')!r} is not known")
    try:
        _check_made(path, facts, source)
    except DataError:
        source.close()
        raise
    return source


def _check_made(path: Path, facts: dict[str, Any], source: Source) -> None:
    if len(source) != facts["count"]:
        raise DataError(
            f"data: {path}: {len(source)} samples found, expected {facts['count']} by set.json"
        )
    for name, field in source.fields.items():
        expected = facts["fields"].get(name)
        if expected != (field.shape, field.dtype.name):
            raise DataError(
                f"data: {source.place(0, name)}: {field.shape} {field.dtype.name} found, expected "
                f"{expected} by set.json"
            )
