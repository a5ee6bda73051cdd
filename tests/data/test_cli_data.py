"""`tilewise data inspect` and `tilewise data check` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from click.testing import Result
from typer.testing import CliRunner

import data_files
from tilewise import data as td
from tilewise.cli.data import data_app
from tilewise.cli.naming import InputError
from tilewise.data.check import check_source, open_for_check
from tilewise.data.planned import planned_layouts
from tilewise.errors import DataError
from tilewise.plan import Plan


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments])


def as_json(*arguments: str | Path) -> Any:
    result = run(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture
def chunked(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset(
            "x", data=np.zeros((6, 2, 8, 8, 8), "int16"), chunks=(1, 2, 8, 8, 2), compression="gzip"
        )
        file["y"] = np.zeros((6, 8, 8, 8), "uint8")
    return tmp_path / "data.h5"


def test_inspect_shows_what_is_stored(chunked: Path) -> None:
    code, found = as_json("inspect", chunked)
    assert code == 0
    assert found["samples"] == 6
    assert found["bytes"] == 6 * (1024 * 2 + 512)
    x, y = found["fields"]
    assert x == {
        "name": "x", "shape": [2, 8, 8, 8], "dtype": "int16", "sample_bytes": 2048,
        "chunks": [1, 2, 8, 8, 2], "compression": "gzip",
    }  # fmt: skip
    assert (y["chunks"], y["compression"]) == (None, "none")
    text = run("inspect", chunked).stdout
    for words in ("6 samples", "2×8×8×8", "1×2×8×8×2", "gzip", "uint8", "2.0 KiB"):
        assert words in text
    assert len(as_json("inspect", chunked, "--key", "y")[1]["fields"]) == 1


def test_inspect_foretells_what_a_plan_reads(chunked: Path) -> None:
    """The amplification it shows is the one that a loader then measures."""
    _, found = as_json("inspect", chunked, "--plan", "d4")
    x, y = found["reads"]
    assert x["slab"] == [2, 2, 8, 8]
    assert x["amplification"] == pytest.approx(4)
    assert x["chunks"] == [1, 2, 2, 8, 8]
    assert (y["amplification"], y["chunks"]) == (1, None)
    assert as_json("inspect", chunked, "--plan", "w4")[1]["reads"][0]["amplification"] == 1
    source = td.open_source(chunked, ["x"])
    for layout in planned_layouts(source, "d4"):
        for rank in range(4):
            td.read_cover(source, "x", [0], layout, rank)
    assert source.counts.amplification == pytest.approx(4)
    text = run("inspect", chunked, "--plan", "d4").stdout
    assert "x: 'd4' reads 4.0 times the bytes of its slabs; chunks of 1×2×2×8×8 would fit" in (
        text.replace("\n", " ")
    )


@pytest.mark.parametrize(("extent", "plan"), [(37, "d2"), (37, "d3 w2"), (29, "d4 h3"), (7, "d7")])
def test_inspect_advises_chunks_that_fit_uneven_slabs(
    tmp_path: Path, extent: int, plan: str
) -> None:
    """A file with the chunks advised reads as little as was foretold, and needs no advice."""
    shape = (2, 1, extent, extent, extent)

    def read(name: str, chunks: tuple[int, ...]) -> Any:
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("x", shape, "int16", chunks=chunks)
        return as_json("inspect", tmp_path / name, "--plan", plan)[1]["reads"][0]

    whole = read("whole.h5", (1, *shape[1:]))
    assert whole["with_chunks"] < 0.7 * whole["amplification"]
    again = read("again.h5", tuple(whole["chunks"]))
    assert again["amplification"] == pytest.approx(whole["with_chunks"])
    assert again["chunks"] is None


def test_inspect_takes_plans_by_layer(chunked: Path, tmp_path: Path) -> None:
    from tilewise.layout import Degrees

    file = tmp_path / "plan.json"
    Plan({"conv1": Degrees.parse("n2 d2"), "fc": Degrees.parse("f4")}).save(file)
    assert as_json("inspect", chunked, "--plan", file)[1]["plan"] == "n2 d2"
    assert as_json("inspect", chunked, "--plan", "conv*=h2,fc=f2")[1]["plan"] == "h2"
    assert isinstance(run("inspect", chunked, "--plan", "{}").exception, InputError)


def test_layouts_of_degrees() -> None:
    samples = [{"x": np.zeros((3, 4, 6)), "y": np.zeros((4, 6)), "z": np.zeros(4), "k": 1}]
    layouts = planned_layouts(td.WholeSamples(samples), "n2 h2 c2", batch=4)
    assert [str(layout) for layout in layouts] == ["4/2×3×4/2×6", "4/2×4/2×6", "4/2×4", "4/2"]
    assert all(layout.ranks == 8 for layout in layouts)


def test_inspect_of_nothing(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "nowhere")
    assert isinstance(result.exception, DataError)
    assert "nowhere: no such file or folder" in str(result.exception)


# -- check -------------------------------------------------------------------------------------


def test_check_lists_every_bad_file(tmp_path: Path) -> None:
    """The first file is bad too: what most of the files hold is what counts."""
    data = data_files.arrays(8, (2, 4, 4), (3,), "float32")
    data["x"][6, 1, 2, 3] = np.inf
    data_files.write(tmp_path, "hdf5-each", data)
    assert as_json("check", tmp_path, "--no-finite")[0] == 0
    with h5py.File(tmp_path / "00000.h5", "w") as file:
        file["x"], file["y"] = np.zeros((2, 4, 5), "f4"), np.zeros(3, "f8")
    with h5py.File(tmp_path / "00002.h5", "w") as file:
        file["x"] = data["x"][2]
    (tmp_path / "00005.h5").write_bytes((tmp_path / "00005.h5").read_bytes()[:500])
    code, found = as_json("check", tmp_path)
    assert code == 1
    assert not found["ok"]
    assert found["samples"] == 8
    bad = [(one["sample"], one["error"]) for one in found["bad"]]
    assert [sample for sample, _ in bad] == [0, 0, 2, 5, 6]
    for (_, text), words in zip(
        bad,
        [
            ("00000.h5: 'x'", "(2, 4, 5) found, expected (2, 4, 4) as in most samples"),
            ("00000.h5: 'y'", "dtype float64 found, expected float32"),
            ("00002.h5", "key 'y' not found"),
            ("00005.h5", "truncated"),
            ("00006.h5: 'x'", "inf found at (1, 2, 3)"),
        ],
    ):
        assert all(word in text for word in words), text
    text = run("check", tmp_path)
    assert text.exit_code == 1
    assert "8 samples, 4 bad" in text.stdout
    assert "00005.h5" in text.stdout.replace("\n", "")


@pytest.mark.parametrize("format", [f for f in data_files.FORMATS if f not in ("dataset", "nifti")])
def test_check_of_good_sets(tmp_path: Path, format: str) -> None:
    data = data_files.arrays(3, (4, 3, 3, 3), (3,))
    folder = data_files.write(tmp_path, format, data)
    path = {"hdf5": "data.h5", "hdf5-chunked": "data.h5", "zarr": "data.zarr"}.get(format, "")
    code, found = as_json("check", folder / path)
    assert (code, found["ok"], found["samples"]) == (0, True, 3)
    assert "all good" in run("check", folder / path).stdout


def test_check_finds_what_reading_alone_does_not(tmp_path: Path) -> None:
    record = bytearray(data_files.example({"x": np.zeros((4, 3, 3, 3), "int16")}))
    (tmp_path / "a.tfrecord").write_bytes(bytes(record))
    record[60] ^= 1
    (tmp_path / "b.tfrecord").write_bytes(bytes(record))
    code, found = as_json("check", tmp_path)
    assert code == 1
    assert [one["sample"] for one in found["bad"]] == [1]
    assert "b.tfrecord: the checksum" in found["bad"][0]["error"]


@pytest.mark.parametrize("kind", ["tfrecord", "nii"])
def test_check_goes_on_after_a_bad_first_file(tmp_path: Path, kind: str) -> None:
    """The first file is broken, and the third is of another shape than the others."""
    nibabel = pytest.importorskip("nibabel")
    for index in range(5):
        edge = 4 if index == 2 else 3
        path = tmp_path / f"{index}.{kind}"
        if kind == "nii":
            nibabel.save(nibabel.Nifti1Image(np.zeros((edge,) * 3, "int16"), np.eye(4)), path)
        else:
            path.write_bytes(data_files.example({"x": np.zeros((4, edge, edge, edge), "int16")}))
    (tmp_path / f"0.{kind}").write_bytes(b"nonsense")
    code, found = as_json("check", tmp_path)
    assert code == 1
    assert [one["sample"] for one in found["bad"]] == [0, 2]
    assert f"0.{kind}: not a whole" in found["bad"][0]["error"]
    assert f"2.{kind}" in found["bad"][1]["error"]
    assert kind == "tfrecord" or "as in most samples" in found["bad"][1]["error"]


def test_check_notes_absent_chunks(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(3, 4), chunks=(1, 4), dtype="int16")
    array[:2] = 7
    code, found = as_json("check", tmp_path / "a.zarr")
    assert code == 0
    assert "1 chunks do not exist" in found["notes"][0]
    text = run("check", tmp_path / "a.zarr").stdout
    assert "3 samples, nothing bad, but see the notes above" in text.replace("\n", " ")
    assert "all good" not in text


def test_check_of_what_cannot_be_opened(tmp_path: Path) -> None:
    assert isinstance(run("check", tmp_path / "nowhere").exception, InputError)
    (tmp_path / "a.npy").write_bytes(b"nonsense")
    code, found = as_json("check", tmp_path / "a.npy")
    assert code == 1
    assert "a.npy: not a whole NPY file" in found["bad"][0]["error"]


def test_check_of_a_made_set(tmp_path: Path) -> None:
    made = run("make", "images", tmp_path / "set", "--size", "16", "--count", "5",
               "--files", "each", "--workers", "1")  # fmt: skip
    assert made.exit_code == 0, made.output
    assert as_json("check", tmp_path / "set")[0] == 0
    assert as_json("inspect", tmp_path / "set")[1]["samples"] == 5
    (tmp_path / "set" / "00003.h5").unlink()
    code, found = as_json("check", tmp_path / "set")
    assert code == 1
    assert [one["sample"] for one in found["bad"]] == [3]
    assert "00003.h5: no such file" in found["bad"][0]["error"]


def test_check_reports_its_progress(tmp_path: Path) -> None:
    data_files.write(tmp_path, "npy", data_files.arrays(3, (2, 2), (1,)))
    seen: list[int] = []
    assert not list(check_source(open_for_check(tmp_path), progress=seen.append))
    assert seen == [1, 2, 3]
