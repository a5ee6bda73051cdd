"""Bad input is one error that names file, key, expected and found, on all ranks at that batch."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import data_files
from tilewise import data as td
from tilewise.comm import Mesh
from tilewise.errors import DataError
from tilewise.layout import Layout
from tilewise.testing import ranks

COUNT, SHAPE, LABELS = 6, (2, 8, 4, 4), (3,)
BAD = 4


def write(folder: Path, format: str = "hdf5-each") -> Path:
    return data_files.write(folder, format, data_files.arrays(COUNT, SHAPE, LABELS, "float32"))


def train(
    mesh: Mesh, path: str, options: dict[str, Any], between: str = "", user: int | None = None
) -> tuple[int, str]:
    """Go through two epochs; return how many batches came and what was raised then."""
    cuts = [
        Layout.of((2, *SHAPE), "ncdhw", "d2", ranks=mesh.size),
        Layout.replicated((2, *LABELS), ranks=mesh.size),
    ]
    taken = 0
    try:
        loader = td.loader(path, cuts, mesh=mesh, shuffle=False, **options)
        if user is not None:
            os.seteuid(user)
        for epoch in range(2):
            for _ in loader:
                taken += 1
            if between and epoch == 0:
                mesh.agree("epoch")
                if mesh.rank == 0:
                    CHANGES[between](Path(path))
                mesh.agree("changed")
        return taken, ""
    except DataError as error:
        return taken, str(error)


def fails(path: Path, *texts: str, taken: int = 2, between: str = "", **options: Any) -> None:
    """Both ranks raise the same error, with these words, at the same batch."""
    first, second = ranks(2, train, str(path), options, between)
    assert first == second
    assert first[0] == taken, first
    for text in texts:
        assert text in first[1], first[1]


def replace(path: Path, key: str, values: Any) -> None:
    with h5py.File(path, "a") as file:
        del file[key]
        if values is not None:
            file[key] = values


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def make_longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 8)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "truncate": lambda folder: truncate(folder / f"{BAD:05d}.h5"),
    "lengthen": lambda folder: make_longer(folder / f"{BAD:05d}.h5"),
    "remove": lambda folder: (folder / f"{BAD:05d}.h5").unlink(),
    "truncate npy": lambda folder: truncate(folder / "x.npy"),
    "resize": lambda folder: zarr.open(folder / "data.zarr", mode="a")["x"].resize(
        (COUNT - 1, *SHAPE)
    ),
}


@pytest.mark.parametrize("store", [None, 1 << 20])
@pytest.mark.parametrize(
    ("key", "values", "texts"),
    [
        ("x", None, ["key 'x' not found", "it has 'y'"]),
        ("y", np.zeros(4, "f4"), ["'y'", "shape (4,) found", "expected (3,)"]),
        ("x", np.zeros((8, 4, 4), "f4"), ["'x'", "rank 3 found", "expected rank 4"]),
        ("x", np.zeros(SHAPE, "f8"), ["'x'", "dtype float64 found", "expected float32"]),
    ],
)
def test_one_of_many_files_is_different(
    tmp_path: Path, key: str, values: Any, texts: list[str], store: int | None
) -> None:
    write(tmp_path)
    replace(tmp_path / f"{BAD:05d}.h5", key, values)
    fails(tmp_path, f"{BAD:05d}.h5", "epoch 1, batch 3", *texts, store_bytes=store)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_missing_and_truncated_files(tmp_path: Path, prefetch: int) -> None:
    write(tmp_path)
    source = td.open_source(tmp_path)
    assert isinstance(source, td.Hdf5Source)
    bad = tmp_path / f"{BAD:05d}.h5"
    truncate(bad)
    fails(tmp_path, f"{bad}: not a whole HDF5 file", "truncated", prefetch=prefetch)
    bad.unlink()
    bad.symlink_to(tmp_path / "nowhere")
    fails(tmp_path, f"{bad}: no such file", prefetch=prefetch)


@pytest.mark.parametrize("change", ["truncate", "lengthen", "remove"])
def test_files_that_change_between_epochs(tmp_path: Path, change: str) -> None:
    write(tmp_path)
    words = "no such file" if change == "remove" else "bytes found, expected"
    fails(tmp_path, f"{BAD:05d}.h5", "epoch 2, batch 3", words, taken=5, between=change)


def test_the_store_does_not_mind_files_that_change(tmp_path: Path) -> None:
    write(tmp_path)
    fails(tmp_path, "", taken=6, between="remove", store_bytes=1 << 20)


def test_arrays_that_change_between_epochs(tmp_path: Path) -> None:
    write(tmp_path / "npy", "npy")
    fails(tmp_path / "npy", "x.npy", "bytes found", taken=3, between="truncate npy")


def test_a_zarr_array_that_changes(tmp_path: Path) -> None:
    write(tmp_path, "zarr")
    facts = '{"format": "zarr", "count": 6, "fields": {"x": {"shape": [2, 8, 4, 4], "dtype": '
    facts += '"float32"}, "y": {"shape": [3], "dtype": "float32"}}}'
    (tmp_path / "set.json").write_text(facts)
    fails(tmp_path, "'x'", "metadata changed", taken=3, between="resize")


@pytest.mark.parametrize("store", [None, 1 << 20])
def test_values_that_are_not_finite(tmp_path: Path, store: int | None) -> None:
    """Only one of the two ranks reads the bad half."""
    data = data_files.arrays(COUNT, SHAPE, LABELS, "float32")
    data["x"][BAD, 1, 6, 3, 2] = np.nan
    data_files.write(tmp_path, "npy", data)
    fails(tmp_path, "", taken=6, store_bytes=store)
    fails(
        tmp_path, "rank 1: data: ", "x.npy: nan found at (1, 6, 3, 2) of sample 4", "finite",
        finite=True, store_bytes=store,
    )  # fmt: skip


def unreadable(mesh: Mesh, path: str) -> tuple[int, str]:
    try:
        return train(mesh, path, {}, user=65534)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user")
def test_no_permission() -> None:
    folder = write(Path("/tmp") / f"tilewise-{os.getpid()}")
    try:
        bad = folder / f"{BAD:05d}.h5"
        bad.chmod(0)
        first, second = ranks(2, unreadable, str(folder))
        assert first == second
        assert first[0] == 2
        assert f"{bad}: no permission to read it" in first[1]
    finally:
        shutil.rmtree(folder)


def absent_on_one(mesh: Mesh, path: str) -> tuple[int, str]:
    return train(mesh, path if mesh.rank == 0 else f"{path}/nowhere", {})


def test_a_set_that_one_rank_does_not_see(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = ranks(2, absent_on_one, str(tmp_path))
    assert first == second
    assert "rank 1: data: " in first[1]
    assert "nowhere: no such file or folder" in first[1]


class Strange:
    """A Dataset that cannot say how long it is, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        if self.rank == 1:
            raise KeyError("length")
        return 4

    def __getitem__(self, index: int) -> Any:
        return np.float32(index)


def strange_on_one(mesh: Mesh) -> str:
    try:
        td.loader(Strange(mesh.rank), Layout.replicated((2,), ranks=mesh.size), mesh=mesh)
    except DataError as error:
        return str(error)
    return ""


def test_whatever_one_rank_raises_on_opening_is_raised_on_all() -> None:
    assert ranks(2, strange_on_one) == ["data: rank 1: KeyError('length')"] * 2


def failing_function(mesh: Mesh, path: str) -> list[Any]:
    """Use a function that raises for the second half of the depth, where rank 1 is."""
    calls = []

    def function(tensor: Any) -> Any:
        calls.append(1)
        if mesh.rank == 1 and len(calls) > 5:
            raise RuntimeError("cannot do that")
        return tensor * 2

    steps = {"x": function}
    found: list[Any] = [train(mesh, path, {"transforms": steps, "store_bytes": 1 << 20})]
    steps = {"x": lambda tensor: tensor.sum()}
    found.append(train(mesh, path, {"transforms": steps}))
    return found


def test_functions_that_raise(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = ranks(2, failing_function, str(tmp_path))
    assert first == second
    assert "cannot be transformed: RuntimeError('cannot do that')" in first[0][1]
    assert "transforms must be element-wise" in first[1][1]


@pytest.mark.parametrize("how", ["record", "packed", "more", "nothing"])
def test_broken_records(tmp_path: Path, how: str) -> None:
    record = data_files.example({"x": np.zeros((4, 3, 3, 3), "int16")})
    content = {
        "record": record[:-50],
        "packed": gzip.compress(record)[:-20],
        "more": record * 2,
        "nothing": b"",
    }[how]
    (tmp_path / "a.tfrecord").write_bytes(content)
    words = {
        "record": "truncated",
        "packed": "not a whole TensorFlow example",
        "more": "another record follows",
        "nothing": "not a whole TFRecord file",
    }
    with pytest.raises(DataError, match=words[how]) as raised:
        td.open_source(tmp_path)
    assert str(tmp_path / "a.tfrecord") in str(raised.value)


def test_records_of_other_sizes(tmp_path: Path) -> None:
    for name, side in (("a", 3), ("b", 2)):
        record = data_files.example({"x": np.zeros((4, side, side, side), "int16")})
        (tmp_path / f"{name}.tfrecord").write_bytes(record)
    source = td.open_source(tmp_path)
    with pytest.raises(DataError, match=r"b.tfrecord: 'x': 64 bytes found, expected 216"):
        source.read(1, "x", ((0, 4),) + ((0, 3),) * 3, np.empty((4, 3, 3, 3), "int16"))


def test_broken_chunks(tmp_path: Path) -> None:
    write(tmp_path, "zarr")
    chunk = next(
        path for path in (tmp_path / "data.zarr" / "x" / "c" / "1").rglob("*") if path.is_file()
    )
    chunk.write_bytes(chunk.read_bytes()[:-7])
    source = td.open_source(tmp_path / "data.zarr")
    with pytest.raises(DataError, match=r"data.zarr: 'x': cannot read .* of sample 1"):
        source.read(1, "x", tuple((0, extent) for extent in SHAPE), np.empty(SHAPE, "float32"))


def test_broken_npy_and_nifti(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    write(tmp_path / "npy", "npy")
    truncate(tmp_path / "npy" / "x.npy")
    with pytest.raises(DataError, match=r"x.npy: not a whole NPY file"):
        td.open_source(tmp_path / "npy")
    image = nibabel.Nifti1Image(np.zeros((4, 5, 6), "int16"), np.eye(4))
    for name in ("a.nii", "b.nii"):
        nibabel.save(image, tmp_path / name)
    truncate(tmp_path / "b.nii")
    source = td.open_source(tmp_path)
    with pytest.raises(DataError, match=r"b.nii: cannot read"):
        source.read(1, "x", ((0, 1), (0, 4), (0, 5), (0, 6)), np.empty((1, 4, 5, 6), "int16"))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"", "not a known kind of file"),
        ("a.h5", b"nonsense", "not a whole HDF5 file"),
        ("a.npy", b"nonsense", "not a whole NPY file"),
        ("folder/readme", b"", "no data found in the folder"),
        ("folder/zarr.json", b"{}", "no arrays found"),
        ("folder/set.json", b"{}", "not the description of a data set"),
        ("folder/set.json", b'{"format": "csv", "count": 1, "fields": {}}', "'csv' is not known"),
    ],
)
def test_what_cannot_be_opened(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(DataError, match=text):
        td.open_source(tmp_path / name.split("/")[0])


def test_what_set_json_promises(tmp_path: Path) -> None:
    write(tmp_path, "npy")
    facts = (
        '{"format": "npy", "count": %d, "fields": {"x": {"shape": [2, 8, 4, 4], "dtype": "%s"}}}'
    )
    (tmp_path / "set.json").write_text(facts % (6, "float32"))
    assert list(td.open_source(tmp_path).fields) == ["x"]
    (tmp_path / "set.json").write_text(facts % (7, "float32"))
    with pytest.raises(DataError, match=r"6 samples found, expected 7 by set\.json"):
        td.open_source(tmp_path)
    (tmp_path / "set.json").write_text(facts % (6, "int16"))
    with pytest.raises(DataError, match=r"float32 found, expected .*int16"):
        td.open_source(tmp_path)


def test_keys_and_dtypes_that_cannot_be_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros((3, 2)), np.zeros((2, 2))
        file["words"] = np.array([b"a", b"b"])
        file.create_group("empty")
    with pytest.raises(DataError, match=r"key 'z' not found.*'words', 'x', 'y'"):
        td.open_source(tmp_path / "a.h5", ["z"])
    with pytest.raises(DataError, match=r"first dims .*'x': 3, 'y': 2"):
        td.open_source(tmp_path / "a.h5", ["x", "y"])
    with pytest.raises(DataError, match="'words': dtype"):
        td.open_source(tmp_path / "a.h5", ["words"])
    with pytest.raises(DataError, match="key 'empty' not found, expected a dataset"):
        td.open_source(tmp_path / "a.h5", ["empty"])
    write(tmp_path / "z", "zarr")
    with pytest.raises(DataError, match="key 'z' not found"):
        td.open_source(tmp_path / "z" / "data.zarr", ["z"])


def open_files() -> set[str]:
    """Return the HDF5 files that this process has open."""
    found = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return {path for path in found if path.endswith(".h5")}


def failing_loaders(mesh: Mesh, path: str) -> list[tuple[str, set[str]]]:
    """Make loaders that fail; return each error, with the files then open while it is handled."""
    cut = Layout.of((2, *SHAPE), "ncdhw", f"d{mesh.size}", ranks=mesh.size)
    label = Layout.replicated((2, *LABELS), ranks=mesh.size)
    cases: list[tuple[list[Layout], dict[str, Any]]] = [
        ([cut, Layout.replicated((2, 7), ranks=mesh.size)], {}),
        ([cut], {"fields": ["nothing"]}),
        ([cut, label], {"prefetch": -mesh.rank - 1}),
    ]
    if mesh.size > 1:
        cases.append(([cut, label], {"prefetch": -mesh.rank}))  # fails on one rank only
    found = []
    for layouts, options in cases:
        try:
            td.loader(path, layouts, mesh=mesh, **options)
        except DataError as error:
            found.append((str(error), open_files()))
    assert len(found) == len(cases)
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_files_are_closed_where_a_loader_cannot_be_made(tmp_path: Path, count: int) -> None:
    path = str(write(tmp_path))
    for found in ranks(count, failing_loaders, path):
        for error, still in found:
            assert not [file for file in still if file.startswith(path)], error


def test_fields_that_could_be_taken_for_each_other(tmp_path: Path) -> None:
    """Only the alphabet would order them, so the order must be said."""
    cuts = [Layout((2, 3)), Layout((2, 3))]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["noisy"], file["clean"] = np.ones((2, 3), "f4"), np.zeros((2, 3), "f4")
    with pytest.raises(DataError, match=r"alike \(3 float32\).* \['clean', 'noisy'\].*fields="):
        td.loader(tmp_path / "a.h5", cuts)
    noisy, clean = next(iter(td.loader(tmp_path / "a.h5", cuts, fields=["noisy", "clean"])))
    assert noisy.all()
    assert not clean.any()
    facts = {"shape": [3], "dtype": "float32"}
    made = {"format": "hdf5", "count": 2, "fields": {"noisy": facts, "clean": facts}}
    (tmp_path / "a.h5").rename(tmp_path / "data.h5")
    (tmp_path / "set.json").write_text(json.dumps(made))
    noisy, clean = next(iter(td.loader(tmp_path, cuts)))
    assert noisy.all()
    assert not clean.any()
    np.save(tmp_path / "x.npy", np.ones((2, 3)))
    np.save(tmp_path / "y.npy", np.zeros((2, 3)))
    (tmp_path / "set.json").unlink()
    (tmp_path / "data.h5").unlink()
    assert next(iter(td.loader(tmp_path, cuts)))[0].all()


@pytest.mark.parametrize(
    ("extra", "text"),
    [(1.5, "'extra': a scalar"), (np.array([b"a", b"b"]), "'extra': dtype"), ([1, 2, 3], "first")],
)
def test_fields_of_a_path_are_the_only_ones_opened(tmp_path: Path, extra: Any, text: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["extra"] = np.ones((2, 3), "f4"), extra
    with pytest.raises(DataError, match=f"{text}.*fields=.*keys=.*--key"):
        td.loader(tmp_path / "a.h5", Layout((2, 3)))
    assert next(iter(td.loader(tmp_path / "a.h5", Layout((2, 3)), fields=["x"])))[0].all()


def test_a_first_file_that_is_unlike_the_others(tmp_path: Path) -> None:
    """The file that decided the fields is named, as it may be the bad one."""
    for folder, key, values in (("a", "x", np.zeros((2, 8, 4, 5), "f4")), ("b", "y", None)):
        replace(write(tmp_path / folder) / "00000.h5", key, values)
    cuts = [Layout((2, *SHAPE)), Layout((2, *LABELS))]
    words = r"in the order \['x', 'y'\].* those of .*00000.h5, and `tilewise data check`"
    with pytest.raises(DataError, match=words):
        td.loader(tmp_path / "a", cuts)
    train, _ = td.split(td.open_source(tmp_path / "a"), (0.5, 0.5), seed=1)
    with pytest.raises(DataError, match=words):
        td.loader(train, cuts)
    with pytest.raises(DataError, match=r"2 layouts for the fields \['x'\].*00000.h5"):
        td.loader(tmp_path / "b", cuts)


def test_datasets_that_misbehave() -> None:
    class Odd:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise OSError("disk on fire")
            return np.zeros(3 if index == 0 else 4)

    source = td.WholeSamples(Odd())
    out = np.empty(3)
    with pytest.raises(DataError, match=r"Odd\[1\] raised OSError\('disk on fire'\)"):
        source.read(1, "0", ((0, 3),), out)
    with pytest.raises(DataError, match=r"Odd\[2\]: '0': shape \(4,\) found, expected \(3,\)"):
        source.read(2, "0", ((0, 3),), out)
    with pytest.raises(DataError, match="not a map-style Dataset"):
        td.WholeSamples(iter([1]))
