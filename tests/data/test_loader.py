"""The loader hands every rank its slabs of the same global batches, whatever the plan."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data_files
import tilewise as tw
from drawing import layouts
from tilewise import data as td
from tilewise.comm import Mesh
from tilewise.data.augment import Geometric, dims_of
from tilewise.data.chance import Chance
from tilewise.errors import DataError
from tilewise.layout import Block, Cover, Layout
from tilewise.testing import RanksError, ranks

Arrays = data_files.Arrays
COUNT = 7
VOXELS = (4, 4, 5)
SHAPE = (2, *VOXELS)


# -- on each rank ----------------------------------------------------------------------------


def epochs(
    mesh: Mesh, folder: Path, format: str, cuts: list[Layout], count: int, options: dict[str, Any]
) -> list[list[tuple[tuple[int, ...], list[Any]]]]:
    """Return the batches of some epochs: their samples and this rank's slabs."""
    source = data_files.opened(folder, format, SHAPE)
    loader = td.loader(source, cuts, mesh=mesh, **options)
    found = []
    for _ in range(count):
        batches = []
        for batch in loader:
            for tensor, cut in zip(batch, cuts, strict=True):
                local = cut.with_shape((batch.size, *cut.shape[1:])).local_shape(mesh.rank)
                assert tuple(tensor.shape) == local
                assert tensor.is_contiguous()
            assert len(batch.samples) == batch.size
            batches.append((batch.samples, [tensor.numpy() for tensor in batch]))
        found.append(batches)
    loader.close()
    return found


def gathered(results: list[Any], cuts: list[Layout]) -> list[list[tuple[Any, list[Any]]]]:
    """Put all ranks' slabs together; where several ranks hold an element they must agree."""
    out = []
    for epoch in range(len(results[0])):
        batches = []
        for number in range(len(results[0][epoch])):
            samples = results[0][epoch][number][0]
            fields = []
            for field, cut in enumerate(cuts):
                shape = (len(samples), *cut.shape[1:])
                whole = np.full(shape, np.nan)
                for rank, result in enumerate(results):
                    assert result[epoch][number][0] == samples
                    slab = whole[cut.with_shape(shape).slab(rank)]
                    mine = result[epoch][number][1][field]
                    assert np.isnan(slab).all() or np.array_equal(slab, mine)
                    slab[...] = mine
                fields.append(whole)
            batches.append((samples, fields))
        out.append(batches)
    return out


# -- what a rank alone would do with whole samples -------------------------------------------


def augmented(
    fields: list[Any], augment: tuple[Any, ...], seed: int, epoch: int, sample: int
) -> list[Any]:
    """Augment whole arrays: x, and y where it has the same spatial extents."""
    concerned = [field.shape[-3:] == VOXELS for field in fields]
    fields = [field.astype("float64") for field in fields]
    for number, one in enumerate(augment):
        chance = Chance(seed, epoch, sample, number)
        if isinstance(one, Geometric):
            fields = [
                moved(field, one, chance) if yes else field for field, yes in zip(fields, concerned)
            ]
        elif isinstance(one, td.Noise):
            shape = fields[0].shape
            box = tuple((0, extent) for extent in shape)
            noise = chance.normal(shape, box, torch.float32).numpy() * one.std
            fields[0] = fields[0] + noise
        else:
            value = one.low + (one.high - one.low) * chance.uniform()
            fields[0] = fields[0] * value if isinstance(one, td.Scale) else fields[0] + value
    return fields


def moved(field: Any, one: Geometric, chance: Chance) -> Any:
    lead = field.ndim - 3
    if isinstance(one, td.Flip):
        axes = [
            lead + dim for k, dim in enumerate(dims_of(one.dims, 3)) if chance.uniform(k) < one.p
        ]
        return np.flip(field, axes)
    if isinstance(one, td.Roll):
        dims = dims_of(one.dims, 3)
        shifts = [chance.below(field.shape[lead + dim], k) for k, dim in enumerate(dims)]
        return np.roll(field, shifts, [lead + dim for dim in dims])
    if isinstance(one, td.Crop):
        for k, size in enumerate(one.size):
            axis = field.ndim - len(one.size) + k
            start = chance.below(field.shape[axis] - size + 1, k)
            field = np.take(field, range(start, start + size), axis)
        return field
    assert isinstance(one, td.Transpose)
    assert one.dims == "d h"
    if field.shape[lead] != field.shape[lead + 1] or chance.uniform(0) <= chance.uniform(1):
        return field
    return np.swapaxes(field, lead, lead + 1)


AUGMENT = st.sampled_from(
    [
        (),
        (td.Flip("d h w"),),
        (td.Roll("d h w"), td.Flip("w", p=1.0)),
        (td.Transpose("d h"), td.Flip("d")),
        (td.Crop((3, 2, 4)),),
        (td.Roll("h"), td.Crop((4, 3, 3)), td.Roll("d w"), td.Scale(), td.Noise(0.5)),
        (td.Transpose("d h"), td.Roll("d"), td.Shift(), td.Flip("d h")),
    ]
)


def seen_shape(shape: tuple[int, ...], augment: tuple[Any, ...]) -> tuple[int, ...]:
    for one in augment:
        if isinstance(one, td.Crop) and shape[-3:] == VOXELS:
            shape = (*shape[:-3], *one.size)
    return shape


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Path, Arrays]]:
    """Sets in all formats, with voxel labels and with a vector."""
    out = {}
    for format in data_files.FORMATS:
        for labels in (VOXELS,) if format == "nifti" else (VOXELS, (3,)):
            if format == "tfrecord" and labels == VOXELS:
                continue
            data = data_files.arrays(COUNT, SHAPE, labels)
            folder = tmp_path_factory.mktemp(format)
            out[format, labels] = (data_files.write(folder, format, data), data)
    return out


@settings(
    max_examples=35, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_gathered_slabs_are_the_whole(
    folders: dict[Any, tuple[Path, Arrays]], draw: st.DataObject
) -> None:
    """Any format, plan, batch and augmentation, with and without a store of any size."""
    format, labels = draw.draw(st.sampled_from(sorted(folders)))
    folder, data = folders[format, labels]
    augment = draw.draw(AUGMENT)
    batch = draw.draw(st.sampled_from([1, 3, 4, COUNT, 9]))
    world = draw.draw(st.sampled_from([1, 2, 3, 4, 6]))
    cuts = [
        draw.draw(layouts((batch, *seen_shape(data[name].shape[1:], augment)), world))
        for name in ("x", "y")
    ]
    store = draw.draw(st.sampled_from([None, 0, 300, 1500, 1 << 20]))
    options = {
        "seed": draw.draw(st.integers(0, 5)),
        "augment": augment,
        "store_bytes": store,
        "prefetch": draw.draw(st.sampled_from([0, 1, 2])),
        "transforms": {"x": torch.float32},
    }
    found = gathered(ranks(world, epochs, folder, format, cuts, 3, options), cuts)
    for epoch, batches in enumerate(found):
        assert sorted(s for samples, _ in batches for s in samples) == list(range(COUNT))
        for samples, fields in batches:
            for position, sample in enumerate(samples):
                whole = [data[name][sample] for name in ("x", "y")]
                expected = augmented(whole, augment, options["seed"], epoch, sample)
                for field, values in zip(fields, expected):
                    np.testing.assert_allclose(field[position], values, rtol=1e-5, atol=1e-5)


def some(
    mesh: Mesh, folder: Path, cuts: list[Layout], state: dict[str, Any] | None, take: int
) -> tuple[list[list[Any]], dict[str, Any]]:
    """Return some augmented batches from where the state says, as one epoch, and the new state."""
    loader = td.loader(
        data_files.opened(folder, "npy", SHAPE),
        cuts,
        mesh=mesh,
        seed=5,
        augment=(td.Roll("d w"), td.Transpose("d h"), td.Noise(0.5)),
        transforms={"x": torch.float32},
        store_bytes=2000,
    )
    if state is not None:
        loader.load_state_dict(state)
    batches: list[Any] = []
    while len(batches) < take:
        for batch in loader:
            batches.append((batch.samples, [tensor.numpy() for tensor in batch]))
            if len(batches) == take:
                break
    state = loader.state_dict()
    loader.close()
    return [batches], state


def test_resuming_under_another_plan_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    """Three batches of four, into the second epoch; then two more on other ranks."""
    data_files.write(tmp_path, "npy", data_files.arrays(COUNT, SHAPE, (3,)))

    def cuts(degrees: str, world: int) -> list[Layout]:
        return [
            Layout.of((4, *SHAPE), "ncdhw", degrees, ranks=world),
            Layout.of((4, 3), "n.", degrees, ranks=world),
        ]

    def run(degrees: str, world: int, state: Any, take: int) -> tuple[list[Any], Any]:
        found = ranks(world, some, tmp_path, cuts(degrees, world), state, take)
        assert all(one[1] == found[0][1] for one in found)
        return gathered([one[0] for one in found], cuts(degrees, world))[0], found[0][1]

    expected, _ = run("1", 1, None, 5)
    first, state = run("n2 d2", 4, None, 3)
    rest, _ = run("w3", 3, state, 2)
    assert (state["epoch"], state["batches"]) == (1, 1)
    for (samples, fields), (others, found) in zip(expected, first + rest, strict=True):
        assert samples == others
        for a, b in zip(fields, found):
            np.testing.assert_array_equal(a, b)


# -- halos, transforms, other kinds of data ---------------------------------------------------


def halos(mesh: Mesh, store: int | None, folder: str) -> list[Any]:
    """Read a halo of one row and of two wrapped columns."""
    layout = Layout.of((4, *SHAPE), "ncdhw", "n2 d2", ranks=mesh.size)
    cover = Cover.on(
        layout,
        {
            2: lambda start, stop: Block.clipped(start - 1, stop + 1, SHAPE[1]),
            4: lambda start, stop: Block.circular(start - 2, stop + 2, SHAPE[3]),
        },
    )
    source = data_files.opened(Path(folder), "npy", SHAPE)
    loader = td.loader(
        source, cover, fields=["x"], mesh=mesh, store_bytes=store, shuffle=False,
        transforms={"x": [td.Normalize(3.0, 2.0)]},
    )  # fmt: skip
    out = [[(batch.samples, batch[0].numpy()) for batch in loader] for _ in range(2)]
    loader.close()
    return out


@pytest.mark.parametrize("store", [None, 1 << 20])
def test_slabs_with_their_halo(store: int | None, tmp_path: Path) -> None:
    data = data_files.arrays(COUNT, SHAPE, (3,))
    data_files.write(tmp_path, "npy", data)
    x = (data["x"].astype("float32") - 3) / 2
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0), (0, 0)))
    padded = np.pad(padded, ((0, 0),) * 4 + ((2, 2),), mode="wrap")
    for rank, epochs in enumerate(ranks(4, halos, store, str(tmp_path))):
        for batches in epochs:
            for samples, slab in batches:
                part = slice(len(samples) // 2) if rank < 2 else slice(len(samples) // 2, None)
                rows = slice(0, 4) if rank % 2 == 0 else slice(2, 6)
                np.testing.assert_allclose(slab, padded[list(samples)][part][:, :, rows], rtol=1e-6)


def channels(mesh: Mesh) -> list[Any]:
    samples = [{"x": np.full((5, 2), k, "int16"), "y": np.int64(k)} for k in range(4)]
    cuts = [
        Layout.of((4, 5, 2), "ncw", "c3", ranks=mesh.size),
        Layout.replicated((4,), ranks=mesh.size),
    ]
    steps = {
        "x": [td.Normalize([0, 1, 2, 3, 4], [1, 1, 1, 2, 2]), torch.float16],
        "y": lambda t: -t,
    }
    loader = td.loader(td.WholeSamples(samples), cuts, mesh=mesh, transforms=steps, shuffle=False)
    batch = next(iter(loader))
    assert batch[0].dtype == torch.float16
    assert batch[1].dtype == torch.int64
    return [batch[0].double().numpy(), batch[1].tolist()]


def test_transforms_know_their_channels() -> None:
    found = ranks(3, channels)
    whole = np.concatenate([part[0] for part in found], axis=1)
    k = np.arange(4.0)[:, None, None]
    expected = (k - np.arange(5.0)[:, None]) / np.array([1, 1, 1, 2, 2])[:, None]
    np.testing.assert_allclose(whole, np.broadcast_to(expected, (4, 5, 2)))
    assert all(part[1] == [0, -1, -2, -3] for part in found)


def test_log1p_and_cast() -> None:
    values = np.arange(12, dtype="uint8").reshape(2, 6)
    source = td.WholeSamples(list(values))
    steps = {"0": [td.Log1p(), td.Cast(torch.bfloat16)]}
    batch = next(iter(td.loader(source, Layout((2, 6)), transforms=steps, shuffle=False)))
    assert torch.equal(batch[0], torch.from_numpy(values).float().log1p().bfloat16())
    plain = next(iter(td.loader(source, Layout((2, 6)), shuffle=False)))
    assert torch.equal(plain[0], torch.from_numpy(values))


def test_augmentation_differs_by_seed_epoch_sample_and_kind() -> None:
    """Each of the four decides, and what is drawn is spread evenly."""
    chances = [Chance(*some) for some in product(range(2), range(3), range(40), range(2))]
    drawn = [chance.uniform() for chance in chances] + [chance.uniform(1) for chance in chances]
    assert len(set(drawn)) == len(drawn)
    counts = np.histogram(drawn, bins=8, range=(0, 1))[0]
    assert counts.sum() == len(drawn)
    assert (abs(counts - len(drawn) / 8) < 5 * np.sqrt(len(drawn) / 8)).all()
    assert {Chance(0, 0, k, 0).below(3) for k in range(50)} == {0, 1, 2}


def large(mesh: Mesh, degrees: str) -> Any:
    samples = [np.random.default_rng(0).random((3, 40, 50, 20))]
    cut = Layout.of((1, 3, 40, 50, 20), "ncdhw", degrees, ranks=mesh.size)
    loader = td.loader(
        td.SubVolumes(td.WholeSamples(samples), {"0": (40, 50, 20)}),
        cut,
        mesh=mesh,
        transforms={"0": td.Normalize([1, 2, 3], [1, 2, 4])},
        augment=(td.Roll("h"), td.Noise(1.0)),
        store_bytes=1 << 24,
    )
    return [next(iter(loader))[0].numpy() for _ in range(2)]


def test_slabs_of_many_stretches() -> None:
    """Large slabs are worked on by stretches, each of which knows its place."""
    sample = np.random.default_rng(0).random((1, 3, 40, 50, 20))
    by = Chance(0, 0, 0, 0).below(50)
    noise = Chance(0, 0, 0, 1).normal((3, 40, 50, 20), tuple((0, k) for k in sample.shape[1:]),
                                      torch.float64).numpy()  # fmt: skip
    mean, std = (np.array(some)[:, None, None, None] for some in ([1, 2, 3], [1, 2, 4]))
    expected = (np.roll(sample, by, 3) - mean) / std + noise
    for world, degrees, dim in ((1, "1", 1), (2, "h2", 3)):
        parts = ranks(world, large, degrees)
        for number in range(2):
            whole = np.concatenate([part[number] for part in parts], dim)
            np.testing.assert_allclose(whole, expected, rtol=1e-12)


class Whole(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return torch.full((2, 8), index), index


def torch_dataset(mesh: Mesh) -> list[Any]:
    cuts = [
        Layout.of((3, 2, 8), "ncw", "w4", ranks=mesh.size),
        Layout.replicated((3,), ranks=mesh.size),
    ]
    with pytest.warns(UserWarning, match=r"Whole hands over whole samples.*3\.\d times as much"):
        loader = td.loader(Whole(), cuts, mesh=mesh, shuffle=False, store_bytes=1000)
    out = [[tensor.tolist() for tensor in batch] for batch in loader]
    out += [[tensor.tolist() for tensor in batch] for batch in loader]
    return out


def test_plain_torch_datasets_work_with_a_note() -> None:
    for found in ranks(4, torch_dataset):
        expected = [[[[k] * 2] * 2 for k in some] for some in ([0, 1, 2], [3, 4])]
        assert [x for x, _ in found] == expected * 2
        assert [y for _, y in found] == [[0, 1, 2], [3, 4]] * 2


def test_amplification_is_warned_of(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((4, 8, 8)), chunks=(4, 8, 8))
    with pytest.warns(UserWarning, match=r"4\.0 times their bytes"):
        td.loader(tmp_path / "a.h5", Layout((2, 8, 8)))


def two_at_once(mesh: Mesh) -> bool:
    """Run two loaders of different plans side by side."""
    one = Layout.of((2, 6), "nw", "n2 w2", ranks=mesh.size)
    other = Layout.of((3, 6), "nw", "w4", ranks=mesh.size)
    samples = [np.arange(6.0) + 10 * k for k in range(9)]
    first = td.loader(td.WholeSamples(samples), one, mesh=mesh, store_bytes=100, name="train")
    second = td.loader(td.WholeSamples(samples), other, mesh=mesh, store_bytes=400, name="test")
    for _ in range(2):
        for a, b in zip(first, second, strict=False):
            for loader, batch, cut in ((first, a, one), (second, b, other)):
                whole = torch.tensor(np.stack([samples[k] for k in batch.samples]))
                slab = cut.with_shape(whole.shape).slab(mesh.rank)
                assert torch.equal(batch[0], whole[slab]), loader.name
    return True


def test_two_loaders_with_different_plans() -> None:
    assert all(ranks(4, two_at_once))


# -- what cannot work --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "options", "text"),
    [
        ([Layout((4, 3))], {}, r"1 layouts for the fields \['x', 'y'\]"),
        ([Layout((4, 3)), Layout((4,))], {}, r"'x' has samples of shape \(2,\)"),
        ([Layout((4, 2)), Layout((4,))], {"fields": ["x", "z"]}, "no field 'z'"),
        ([Layout((4, 2)), Layout((4,))], {"batch": 0}, r"batch \(=0\)"),
        ([Layout((4, 2)), Layout((4,))], {"prefetch": -1}, "prefetch"),
        ([Layout((4, 2)), Layout((4,))], {"store_bytes": -1}, r"store_bytes \(=-1\)"),
        ([Layout((4, 2)), Layout((4,))], {"transforms": {"z": []}}, "transforms for 'z'"),
        ([Layout((4, 2)), Layout((4,))], {"augment": ["flip"]}, "'flip' is not an augmentation"),
        ([Layout((4, 2)), Layout((4,))], {"augment": [td.Flip("h")]}, "dim 'h'|last extents"),
        ([Layout((4, 2)), Layout((4,))], {"augment": [td.Crop((3,))]}, "does not fit"),
        ([Layout((4, 2)), Layout((4,))], {"augment": [td.Transpose("h w")]}, "dim 'h'"),
        ([Layout((4, 2)), Layout((4,))], {"batch": 9, "drop_last": True}, "make no batch"),
        ([Layout.replicated((4, 2), ranks=2), Layout((4,))], {}, "for 2 ranks, the mesh has 1"),
        ([Layout(()), Layout((4,))], {}, "without a batch"),
    ],
)
def test_arguments_that_cannot_work(cuts: Any, options: dict[str, Any], text: str) -> None:
    samples = [{"x": np.zeros(2), "y": np.float32(k)} for k in range(4)]
    with pytest.raises(DataError, match=text):
        td.loader(td.WholeSamples(samples), cuts, **options)


def other_options(mesh: Mesh) -> None:
    td.loader(
        data_files.numbers(), Layout.replicated((2,), ranks=mesh.size), mesh=mesh, seed=mesh.rank
    )


def test_ranks_with_different_options_are_told() -> None:
    with pytest.raises(RanksError, match="MismatchError: data: ranks disagree"):
        ranks(2, other_options)


# -- training ----------------------------------------------------------------------------------


def losses(mesh: Mesh, plan: str, folder: str) -> list[float]:
    """Train a small network for two epochs, the last batch of each being smaller."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv3d(2, 3, 3, padding=1), torch.nn.Tanh(), torch.nn.Conv3d(3, 1, 1)
    ).double()
    model = torch.nn.Sequential(model, torch.nn.Flatten(1, 2))
    example, target = torch.empty(4, *SHAPE).double(), torch.empty(4, *VOXELS).double()
    split = tw.parallelize(
        model, (example,), plan, loss=torch.nn.functional.mse_loss, targets=target, mesh=mesh
    )
    optimizer = torch.optim.SGD(split.parameters(), lr=0.1)
    loader = td.loader(
        folder,
        split.input_layouts,
        mesh=mesh,
        transforms={"x": [torch.float64, td.Normalize(100, 50)], "y": torch.float64},
        augment=(td.Flip("d h w"), td.Noise(0.1)),
        store_bytes=1 << 20,
    )
    found = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = split.loss(*batch, batch=batch.size)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found


def test_training_is_the_same_under_every_plan(tmp_path: Path) -> None:
    data_files.write(tmp_path, "npy", data_files.arrays(COUNT, SHAPE, VOXELS))
    expected = ranks(1, losses, "1", str(tmp_path))[0]
    assert len(expected) == 4
    assert expected[-1] < expected[0]
    for world, plan in ((4, "n2 d2"), (3, "w3")):
        for found in ranks(world, losses, plan, str(tmp_path)):
            assert found == pytest.approx(expected, rel=1e-10)
