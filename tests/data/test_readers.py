"""Every reader returns exactly the box asked for, reads no more than it must, and says so."""

from __future__ import annotations

import gzip
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data_files
from drawing import covers
from tilewise.data import (
    Hdf5Source,
    NiftiSource,
    NpySource,
    Permuted,
    Source,
    Subset,
    SubVolumes,
    TfRecordSource,
    WholeSamples,
    ZarrSource,
    open_source,
    read_cover,
    split,
)
from tilewise.data.region import Box, pieces, runs, seen, stretches
from tilewise.data.source import PAGE, Storage
from tilewise.errors import DataError, LayoutError
from tilewise.layout import Block, Cover, Layout, block

SHAPE, LABELS, COUNT = (2, 5, 6, 7), (3,), 4
VOXELS = (5, 6, 7)


@pytest.fixture(scope="module", params=data_files.FORMATS)
def set_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Source, data_files.Arrays]:
    """A set in each format. NIfTI has images for labels, the others a vector."""
    format = request.param
    labels = VOXELS if format == "nifti" else LABELS
    data = data_files.arrays(COUNT, SHAPE, labels)
    folder = data_files.write(tmp_path_factory.mktemp(format), format, data)
    return data_files.opened(folder, format, SHAPE), data


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    out = []
    for extent in shape:
        start = draw(st.integers(0, extent))
        out.append((start, draw(st.integers(start, extent))))
    return tuple(out)


def read(source: Source, index: int, field: str, box: Box) -> np.ndarray[Any, Any]:
    out = np.empty([stop - start for start, stop in box], source.fields[field].dtype)
    source.read(index, field, box, out)
    return out


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_box(set_of: tuple[Source, data_files.Arrays], draw: st.DataObject) -> None:
    source, data = set_of
    assert len(source) == COUNT
    index = draw.draw(st.integers(0, COUNT - 1))
    for field in ("x", "y"):
        shape = data[field].shape[1:]
        assert source.fields[field].shape == shape
        assert source.fields[field].dtype == data[field].dtype
        box = draw.draw(boxes(shape))
        before = source.counts.requested_bytes, source.counts.touched_bytes
        found = read(source, index, field, box)
        np.testing.assert_array_equal(found, data[field][index][slices(box)])
        assert source.counts.requested_bytes - before[0] == found.nbytes
        assert source.counts.touched_bytes - before[1] >= found.nbytes


def test_sources_travel_to_other_processes(set_of: tuple[Source, data_files.Arrays]) -> None:
    source, data = set_of
    copy = pickle.loads(pickle.dumps(source))
    box = tuple((0, extent) for extent in SHAPE)
    np.testing.assert_array_equal(read(copy, 2, "x", box), data["x"][2])
    source.close()
    np.testing.assert_array_equal(read(source, 1, "x", box), data["x"][1])


@pytest.mark.parametrize(
    "dtype", ["uint8", "int16", "float16", "float32", "float64", "int64", ">f4"]
)
def test_dtypes_on_disk(tmp_path: Path, dtype: str) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = values
    np.save(tmp_path / "a.npy", values)
    for source in (Hdf5Source(tmp_path / "a.h5"), NpySource(tmp_path / "a.npy")):
        assert source.fields["x"].dtype == np.dtype(dtype).newbyteorder("=")
        np.testing.assert_array_equal(read(source, 1, "x", ((1, 3), (0, 4))), values[1, 1:])


def test_scalars_and_nested_keys(tmp_path: Path) -> None:
    for index in range(2):
        with h5py.File(tmp_path / f"{index}.h5", "w") as file:
            file["group/label"] = np.int64(index + 5)
            file["x"] = np.arange(3.0)
    source = open_source(tmp_path)
    assert list(source.fields) == ["group/label", "x"]
    assert read(source, 1, "group/label", ()) == 6
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file["label"] = np.arange(4)
    assert read(Hdf5Source(tmp_path / "all.h5"), 3, "label", ()) == 3


def test_several_stacked_files(tmp_path: Path) -> None:
    values = np.arange(35).reshape(7, 5)
    for name, part in (("a", values[:3]), ("b", values[3:4]), ("c", values[4:])):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = part
    source = Hdf5Source(sorted(tmp_path.iterdir()), stacked=True, open_files=1)
    assert len(source) == 7
    for index in (6, 0, 3, 2, 4):
        np.testing.assert_array_equal(read(source, index, "x", ((1, 4),)), values[index, 1:4])
    assert "b.h5" in source.place(3, "x")


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    data = data_files.arrays(9, (2, 3), (1,))
    data_files.write(tmp_path, "hdf5-each", data)
    source = Hdf5Source(sorted(tmp_path.iterdir()), open_files=3)
    for index in [*range(9), 0, 8]:
        read(source, index, "x", ((0, 2), (0, 3)))
        assert 1 <= len(source._handles) <= 3
    source.close()
    assert len(source._handles) == 0


def test_zarr_arrays_shards_and_version_2(tmp_path: Path) -> None:
    values = np.arange(96, dtype="float32").reshape(4, 4, 6)
    single = zarr.create_array(tmp_path / "one.zarr", shape=values.shape, chunks=(1, 2, 6),
                               dtype="float32")  # fmt: skip
    single[...] = values
    group = zarr.open_group(tmp_path / "shards.zarr", mode="w")
    sharded = group.create_array("x", shape=values.shape, chunks=(1, 2, 2), shards=(1, 4, 6),
                                 dtype="float32")  # fmt: skip
    sharded[...] = values
    old = zarr.create_array(tmp_path / "old.zarr", shape=values.shape, chunks=(1, 2, 6),
                            dtype="float32", zarr_format=2)  # fmt: skip
    old[...] = values
    for name, touched in (("one", 48), ("shards", 64), ("old", 48)):
        source = open_source(tmp_path / f"{name}.zarr")
        box = ((1, 2), (1, 6))
        np.testing.assert_array_equal(read(source, 3, "x", box), values[3, 1:2, 1:6])
        assert source.touched(3, "x", box) == {48: 2 * 6 * 4, 64: 3 * 2 * 2 * 4}[touched]


def test_absent_chunks_are_counted(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", shape=(3, 4), chunks=(1, 4), dtype="int16")
    array[1] = 7
    source = ZarrSource(tmp_path / "a.zarr")
    assert source.absent("x") == 2
    assert not read(source, 0, "x", ((0, 4),)).any()


def test_scaled_nifti(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    values = np.arange(60, dtype="int16").reshape(3, 4, 5)
    image = nibabel.Nifti1Image(values, np.eye(4))
    image.header.set_slope_inter(0.5, 10)
    nibabel.save(image, tmp_path / "a.nii")
    source = NiftiSource({"x": [tmp_path / "a.nii"]})
    assert str(source.fields["x"]) == "1×3×4×5 float32"
    stored = np.asarray(nibabel.load(tmp_path / "a.nii").dataobj)
    np.testing.assert_allclose(read(source, 0, "x", ((0, 1), (1, 3), (0, 4), (2, 5)))[0],
                               stored[1:3, :, 2:5])  # fmt: skip


def test_cosmoflow_records(tmp_path: Path) -> None:
    assert google_crc32c.value(b"123456789") == 0xE3069283
    data = data_files.arrays(3, (4, 5, 5, 5), (4,))
    data_files.write(tmp_path, "tfrecord", data)
    source = open_source(tmp_path)
    assert [str(field) for field in source.fields.values()] == ["4×5×5×5 int16", "4 float32"]
    for index in range(3):
        found = read(source, index, "x", ((1, 4), (0, 5), (2, 3), (1, 5)))
        np.testing.assert_array_equal(found, data["x"][index, 1:4, :, 2:3, 1:5])
        np.testing.assert_array_equal(read(source, index, "y", ((0, 4),)), data["y"][index])
        source.verify(index)


def test_a_flipped_bit_fails_the_checksum(tmp_path: Path) -> None:
    record = bytearray(data_files.example({"x": np.zeros((4, 3, 3, 3), "int16")}))
    record[60] ^= 4
    for name, content in (("a", bytes(record)), ("b", gzip.compress(bytes(record)))):
        (tmp_path / f"{name}.tfrecord").write_bytes(content)
        with pytest.raises(DataError, match="checksum of its example"):
            TfRecordSource(tmp_path / f"{name}.tfrecord").verify(0)


def test_touched_bytes_follow_the_chunks() -> None:
    chunked = Storage((10, 8, 8), 2, (1, 4, 8))
    assert chunked.touched(((3, 4), (0, 4), (0, 8))) == 64
    assert chunked.touched(((3, 4), (3, 5), (7, 8))) == 128
    assert chunked.touched(((3, 4), (3, 3), (0, 8))) == 0


def test_touched_bytes_of_rows_bridge_gaps_below_a_page() -> None:
    narrow = Storage((4, 8, 16), 4)
    assert narrow.touched(((1, 2), (2, 4), (0, 16))) == 2 * 16 * 4
    assert narrow.touched(((1, 2), (0, 8), (0, 8))) == 7 * 16 * 4 + 8 * 4
    wide = Storage((4, 8, 2 * PAGE), 1)
    assert wide.touched(((1, 2), (0, 8), (0, PAGE))) == 8 * PAGE


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_touched_rows_match_a_count_of_bytes(draw: st.DataObject) -> None:
    """Compare with a walk over every byte of the file."""
    shape = tuple(draw.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    shape = (*shape, draw.draw(st.sampled_from([3, 5000])))
    box = draw.draw(boxes(shape))
    wanted = np.zeros(shape, bool)
    wanted[slices(box)] = True
    at = np.flatnonzero(wanted)
    gaps = np.diff(at) - 1
    expected = len(at) + int(gaps[gaps < PAGE].sum())
    assert Storage(shape, 1).touched(box) == expected


# -- views -----------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_sub_volumes(draw: st.DataObject) -> None:
    grid = draw.draw(st.tuples(*[st.integers(1, 3)] * 3))
    size = draw.draw(st.tuples(*[st.integers(1, 3)] * 3))
    extents = tuple(parts * extent for parts, extent in zip(grid, size))
    whole = np.random.default_rng(0).random((2, 2, *extents))
    cut = SubVolumes(
        WholeSamples([{"x": x, "y": np.float32(k)} for k, x in enumerate(whole)]), {"x": size}
    )
    assert len(cut) == 2 * np.prod(grid)
    assert cut.fields["x"].shape == (2, *size)
    places = product(range(2), product(*map(range, grid)))
    for index, (sample, at) in enumerate(places):
        part = whole[sample][(slice(None), *(slice(k * s, (k + 1) * s) for k, s in zip(at, size)))]
        box = draw.draw(boxes(part.shape))
        np.testing.assert_array_equal(read(cut, index, "x", box), part[slices(box)])
        assert read(cut, index, "y", ()) == sample


def test_sub_volumes_that_do_not_fit() -> None:
    source = WholeSamples([np.zeros((7, 8))])
    with pytest.raises(DataError, match=r"extents \(7, 8\) must be multiples of \(2, 4\)"):
        SubVolumes(source, {"0": (2, 4)})
    assert len(SubVolumes(source, {"0": (2, 4)}, drop_rest=True)) == 6
    with pytest.raises(DataError, match="no field 'x'"):
        SubVolumes(source, {"x": (2, 4)})


def test_reads_of_a_view_count_in_its_base(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(64.0).reshape(1, 4, 4, 4))
    base = NpySource(tmp_path / "x.npy")
    cut = Subset(SubVolumes(base, {"x": (2, 2, 2)}), [7, 0])
    read(cut, 0, "x", ((0, 1), (0, 2), (0, 2)))
    assert cut.counts is base.counts
    assert base.counts.requested_bytes == 32
    assert "x.npy" in cut.place(1, "x")


def test_permuted_dims() -> None:
    whole = np.random.default_rng(0).random((2, 3, 4, 5))
    source = Permuted(WholeSamples(list(whole)), {"0": (2, 0, 1)})
    assert source.fields["0"].shape == (5, 3, 4)
    box = ((1, 4), (0, 2), (3, 4))
    expected = whole[1].transpose(2, 0, 1)[slices(box)]
    np.testing.assert_array_equal(read(source, 1, "0", box), expected)
    with pytest.raises(DataError, match="cannot be permuted"):
        Permuted(WholeSamples(list(whole)), {"0": (0, 1)})


def test_split_deals_each_sample_once() -> None:
    source = WholeSamples([np.float32(k) for k in range(101)])
    parts = split(source, (0.8, 0.1, 0.1), seed=3)
    assert [len(part) for part in parts] == [81, 10, 10]
    dealt = [int(read(part, k, "0", ())) for part in parts for k in range(len(part))]
    assert sorted(dealt) == list(range(101))
    assert dealt != list(range(101))
    again = split(source, (0.8, 0.1, 0.1), seed=3)
    assert [list(p.indices) for p in parts] == [list(p.indices) for p in again]
    with pytest.raises(DataError, match="sample 101"):
        Subset(source, [101])


# -- covers ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_read_cover(draw: st.DataObject) -> None:
    """A cover with halos, wrapped or clipped blocks reads what indexing the whole would give."""
    shape = draw.draw(st.tuples(*[st.integers(1, 6)] * 2))
    ranks = draw.draw(st.sampled_from([1, 2, 4]))
    whole = np.random.default_rng(0).random((3, *shape))
    some = draw.draw(covers((3, *shape), ranks))
    parts = some.axes.parts(0)
    batch = tuple(Block.of(*block(3, parts, k)) for k in range(parts))
    cover = Cover(some.shape, some.axes, (batch, *some.blocks[1:]))
    source = WholeSamples(list(whole))
    for rank in range(ranks):
        found = read_cover(source, "0", [0, 1, 2], cover, rank, fill=-1)
        expected = np.full(cover.local_shape(rank), -1.0)
        for places in product(*(cover.block(rank, dim).pieces for dim in range(3))):
            target = tuple(slice(p.at, p.at + p.stop - p.start) for p in places)
            expected[target] = whole[tuple(slice(p.start, p.stop) for p in places)]
        np.testing.assert_array_equal(found, expected)


def test_covers_that_do_not_fit() -> None:
    source = WholeSamples([np.zeros((4, 4))] * 2)
    with pytest.raises(DataError, match=r"has the shape \(2, 4, 4\)"):
        read_cover(source, "0", [0, 1], Layout((2, 4, 5)), 0)
    odd = Cover((2, 4, 4), Layout((2, 4, 4)).axes, ((Block.of(1, 2),), (Block.of(0, 4),) * 1,
                                                    (Block.of(0, 4),)))  # fmt: skip
    with pytest.raises(LayoutError, match="balanced"):
        read_cover(source, "0", [0, 1], odd, 0)


# -- index maps ------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pieces_show_what_indexing_would(draw: st.DataObject) -> None:
    stored = np.random.default_rng(0).random(draw.draw(st.tuples(*[st.integers(1, 7)] * 2)))
    perm = draw.draw(st.permutations([0, 1]))
    index = [
        np.array(draw.draw(st.lists(st.integers(0, stored.shape[dim] - 1), min_size=1, max_size=9)))
        for dim in perm
    ]
    whole = stored.transpose(perm)[np.ix_(*index)]
    box = draw.draw(boxes(whole.shape))
    out = np.full([stop - start for start, stop in box], np.nan)
    dims = [runs(Block.of(*interval), some) for interval, some in zip(box, index)]
    for piece in pieces(dims, perm):
        values = stored[slices(piece.stored)]
        out[piece.local] = seen(values, piece, perm)
        np.testing.assert_array_equal(out[piece.local], whole[slices(piece.out)])
    np.testing.assert_array_equal(out, whole[slices(box)])


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 40))
def test_stretches_cover_everything_once(shape: list[int], limit: int) -> None:
    count = np.zeros(shape, int)
    for stretch in stretches(shape, limit):
        assert count[stretch].size <= max(limit, 1)
        count[stretch] += 1
    assert (count == 1).all()
