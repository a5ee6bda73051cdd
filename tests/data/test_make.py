"""Making a set: the same bytes however it is made, and on disk what its description says."""

from __future__ import annotations

import importlib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import typer
import zarr
from typer.testing import CliRunner

from tilewise.cli.data_make import make
from tilewise.data import TfRecordSource, open_source
from tilewise.data.synthetic import KINDS, generate
from tilewise.data.write import Array, Field, chunk, lay_out
from tilewise.errors import DataError

SIZES = {"cosmology": 16, "organs": 16, "mesh": 17, "images": 16, "brain": 12}
WAYS = (("hdf5", "one"), ("hdf5", "each"), ("zarr", "one"), ("npy", "one"))
needs_nilearn = pytest.mark.skipif(find_spec("nilearn") is None, reason="needs the extra brain")
EVERY = [pytest.param(k, marks=needs_nilearn) if k == "brain" else k for k in KINDS]

# The package exports the function of the same name.
making = importlib.import_module("tilewise.data.synthetic.generate")
app = typer.Typer()
app.command()(make)


def read(folder: Path) -> dict[str, Array]:
    """Read a whole set by the words of the contract, with no reader of ours."""
    facts = json.loads((folder / "set.json").read_text())
    names = list(facts["fields"])
    if facts["files"] == "each":
        samples = []
        for index in range(facts["count"]):
            with h5py.File(folder / f"{index:05d}.h5") as file:
                samples.append({name: file[name][()] for name in names})
        return {name: np.stack([sample[name] for sample in samples]) for name in names}
    if facts["format"] == "hdf5":
        with h5py.File(folder / "data.h5") as file:
            return {name: file[name][()] for name in names}
    if facts["format"] == "zarr":
        group: Any = zarr.open_group(folder / "data.zarr", mode="r")
        return {name: group[name][:] for name in names}
    return {name: np.load(folder / f"{name}.npy") for name in names}


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", EVERY)
def test_every_format_holds_the_same_numbers(kind: str, tmp_path: Path) -> None:
    size, count = SIZES[kind], 5
    expected = [KINDS[kind].sample(size, 4, index) for index in range(count)]
    for number, (format, files) in enumerate(WAYS):
        out = tmp_path / str(number)
        facts = generate(
            kind, out, size=size, count=count, seed=4, format=format, files=files, workers=1
        )
        assert facts == json.loads((out / "set.json").read_text())
        found = read(out)
        assert (facts["format"], facts["files"]) == (format, files)
        assert (facts["kind"], facts["count"], facts["seed"]) == (kind, count, 4)
        for name, field in facts["fields"].items():
            assert found[name].shape == (count, *field["shape"])
            assert str(found[name].dtype) == field["dtype"]
            assert found[name].tobytes() == b"".join(part[name].tobytes() for part in expected)
        tallies = np.stack([KINDS[kind].tally(part["y"]) for part in expected])
        assert facts["baseline"] == KINDS[kind].baseline(tallies)


@pytest.mark.parametrize(("format", "files"), WAYS)
def test_readers_open_what_was_made(format: str, files: str, tmp_path: Path) -> None:
    generate("mesh", tmp_path / "set", size=17, count=3, format=format, files=files, workers=1)
    source = open_source(tmp_path / "set")
    assert len(source) == 3
    for name, array in read(tmp_path / "set").items():
        assert source.fields[name].shape == array.shape[1:]


def test_volumes_are_made_as_the_benchmarks_files(tmp_path: Path) -> None:
    """The record's own reader checks lengths and checksums; the channels are last in the file."""
    generate("cosmology", tmp_path / "set", size=16, count=3, seed=4, format="tfrecord", workers=1)
    files = sorted((tmp_path / "set").glob("*.tfrecord"))
    stored = TfRecordSource(files)
    assert stored.fields["x"].shape == (16, 16, 16, 4)
    for index in range(len(files)):
        stored.verify(index)
    source = open_source(tmp_path / "set")
    for index in range(3):
        expected = KINDS["cosmology"].sample(16, 4, index)
        for name, values in expected.items():
            field = source.fields[name]
            found = np.empty(field.shape, field.dtype)
            source.fill(index, name, tuple((0, extent) for extent in field.shape), found)
            np.testing.assert_array_equal(found, values)
    with pytest.raises(DataError, match="'tfrecord' is CosmoFlow's"):
        generate("mesh", tmp_path / "mesh", size=17, count=1, format="tfrecord", workers=1)


@pytest.mark.parametrize(("format", "files"), WAYS)
def test_the_number_of_processes_changes_no_byte(format: str, files: str, tmp_path: Path) -> None:
    def made(name: str, workers: int) -> dict[str, bytes]:
        finished: list[int] = []
        generate(
            *("cosmology", tmp_path / name),
            size=16,
            count=7,
            format=format,
            files=files,
            workers=workers,
            progress=finished.append,
        )
        assert sum(finished) == 7
        return bytes_of(tmp_path / name)

    alone = made("alone", 1)
    assert made("two", 2) == alone
    if format == "zarr":
        assert made("three", 3) == alone


def test_processes_are_started_only_for_work_that_takes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[range] = []
    kept = making._share_out

    def share_out(task: Any, indices: range, workers: int, progress: Any) -> Any:
        shared.append(indices)
        return kept(task, indices, workers, progress)

    monkeypatch.setattr(making, "_share_out", share_out)
    monkeypatch.setattr(making, "_cores", lambda: 2)
    generate("images", tmp_path / "quick", size=16, count=6)
    assert shared == []
    monkeypatch.setattr(making, "PATIENCE", 0.0)
    generate("images", tmp_path / "slow", size=16, count=6)
    assert shared == [range(1, 6)]
    assert bytes_of(tmp_path / "quick") == bytes_of(tmp_path / "slow")


def test_another_seed_makes_another_set(tmp_path: Path) -> None:
    for seed in (0, 1):
        generate("images", tmp_path / str(seed), size=16, count=3, seed=seed, workers=1)
    assert read(tmp_path / "0")["x"].tobytes() != read(tmp_path / "1")["x"].tobytes()


def test_a_longer_set_begins_with_the_shorter_one(tmp_path: Path) -> None:
    for count in (2, 4):
        generate("mesh", tmp_path / str(count), size=16, count=count, workers=1)
    short, long = read(tmp_path / "2"), read(tmp_path / "4")
    assert all(np.array_equal(short[name], long[name][:2]) for name in short)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cats"}, "'cats' must be one of cosmology, organs, mesh, images, brain"),
        ({"size": 4}, "size 4 is below 16"),
        ({"count": 0}, "count 0 must be at least 1"),
        ({"seed": -1}, "seed -1 must be in"),
        ({"workers": 0}, "workers 0 must be at least 1"),
        ({"format": "csv"}, "'csv' must be one of hdf5, zarr, npy, tfrecord"),
        ({"files": "two"}, "'two' must be one of one, each"),
        ({"format": "npy", "files": "each"}, "'each' is for hdf5"),
        ({"size": 10**6}, "the set takes .* GB, but"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_left(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"kind": "images", "size": 16, "count": 2, **change}
    with pytest.raises(DataError, match=message):
        generate(options.pop("kind"), tmp_path / "set", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "set"
    out.mkdir()
    generate("images", out, size=16, count=2, workers=1)
    before = bytes_of(out)
    with pytest.raises(DataError, match="is not empty"):
        generate("images", out, size=16, count=3, workers=1)
    assert bytes_of(out) == before
    generate("images", out, size=16, count=3, workers=1, overwrite=True)
    assert len(read(out)["y"]) == 3
    (out / "set.json").unlink()
    with pytest.raises(DataError, match=r"has no set\.json"):
        generate("images", out, size=16, count=3, workers=1, overwrite=True)
    with pytest.raises(DataError, match="is a file"):
        generate("images", out / "data.h5", size=16, count=3, workers=1)


def test_a_failure_leaves_the_old_set_and_no_half_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "set"
    generate("images", out, size=16, count=3, workers=1)
    before = bytes_of(out)

    def full(size: int, seed: int, index: int) -> dict[str, Array]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(KINDS["images"], "sample", full)
    with pytest.raises(DataError, match=r"cannot be written: .*No space left"):
        generate("images", out, size=16, count=4, workers=1, overwrite=True)
    assert bytes_of(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


class Deadly:
    """Ends the process that unpickles it, as the system does when memory is short."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_a_worker_that_dies_ends_in_one_error() -> None:
    with pytest.raises(DataError, match="a worker process died"):
        making._share_out(("images", 16, 0, Deadly()), range(4), 2, print)  # type: ignore[arg-type]


def test_a_sample_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    writer = lay_out(tmp_path, {"x": Field((2, 3), "float32")}, 2, format="npy")
    with pytest.raises(DataError, match=r"sample 1: 'x' is float64 \(2, 3\)"):
        writer.write(1, {"x": np.zeros((2, 3))})
    with pytest.raises(DataError, match=r"float32 \(3, 2\), but the set holds float32 \(2, 3\)"):
        writer.write(0, {"x": np.zeros((3, 2), np.float32)})
    writer.write(1, {"x": np.ones((3, 2), np.float32).T})
    assert np.load(tmp_path / "x.npy").sum() == 6


def test_zarr_chunks_cut_space() -> None:
    assert chunk(Field((4, 64, 64, 64), "int16")) == (4, 32, 32, 32)
    assert chunk(Field((197, 77, 189), "uint8")) == (32, 32, 32)
    assert chunk(Field((4,), "float32")) == (4,)
    assert chunk(Field((), "int64")) == ()


def test_zarr_chunks_of_zeros_are_written_too(tmp_path: Path) -> None:
    writer = lay_out(tmp_path, {"x": Field((40, 2), "float32")}, 1, format="zarr")
    writer.write(0, {"x": np.zeros((40, 2), np.float32)})
    chunks = [path for path in (tmp_path / "data.zarr" / "x" / "c").rglob("*") if path.is_file()]
    assert len(chunks) == 2


# The command


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    options = ["--size", "16", "--count", "4", "--format", "npy", "--seed", "9", "--json"]
    result = CliRunner().invoke(app, ["cosmology", str(tmp_path / "set"), *options])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    facts = json.loads((tmp_path / "set" / "set.json").read_text())
    assert {name: summary[name] for name in facts} == facts
    assert summary["path"] == str(tmp_path / "set")
    assert summary["bytes"] == sum(len(part) for part in bytes_of(tmp_path / "set").values())
    assert summary["seconds"] > 0
    assert facts["targets"] == ["sigma", "ns", "k0", "large"]


@pytest.mark.parametrize("kind", ["images", "mesh"])
def test_the_command_shows_a_table_and_the_baseline(kind: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [kind, str(tmp_path), "--size", "16", "--count", "2"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "2 samples as hdf5" in text
    assert "baseline (all " in text
    assert ("shares" in text) == (kind == "mesh")


def test_the_command_raises_what_the_root_command_turns_into_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cats", str(tmp_path / "set")])
    assert isinstance(result.exception, DataError)
