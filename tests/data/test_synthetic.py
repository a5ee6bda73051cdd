"""The sets to train on: what they hold, and what a trivial predictor scores."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import combinations

import numpy as np
import pytest

from tilewise.data.synthetic import KINDS, brain, cosmology, gaussian, images, mesh, organs
from tilewise.data.synthetic.kind import constant_class
from tilewise.data.write import Array
from tilewise.errors import DataError

needs_nilearn = pytest.mark.skipif(find_spec("nilearn") is None, reason="needs the extra brain")
EVERY = [pytest.param(k, marks=needs_nilearn) if k == "brain" else k for k in KINDS]
SIZES = {"cosmology": 16, "organs": 24, "mesh": 20, "images": 16, "brain": 16}


@pytest.mark.parametrize("kind", EVERY)
def test_samples_have_the_shape_and_dtype_that_the_fields_say(kind: str) -> None:
    for size in (KINDS[kind].SMALLEST, SIZES[kind] + 1):
        sample = KINDS[kind].sample(size, 3, 5)
        for name, field in KINDS[kind].fields(size).items():
            assert sample[name].shape == field.shape
            assert sample[name].dtype == np.dtype(field.dtype)
            assert np.isfinite(sample[name]).all()


@pytest.mark.parametrize("kind", EVERY)
def test_a_sample_is_a_function_of_seed_and_index(kind: str) -> None:
    size = SIZES[kind]

    def made(seed: int, index: int) -> bytes:
        return KINDS[kind].sample(size, seed, index)["x"].tobytes()

    first = made(1, 2)
    made(7, 7)
    assert made(1, 2) == first
    assert len({first, made(1, 3), made(2, 2), made(2, 1)}) == 4


@pytest.mark.parametrize("shape", [(16,), (16, 10), (9, 8, 7)])
def test_a_gaussian_field_has_the_power_it_was_given(shape: tuple[int, ...]) -> None:
    waves = gaussian.wave_numbers(shape)
    power = 1 / (1 + waves) ** 2
    rng = np.random.default_rng(0)
    mean_power = np.zeros(waves.shape)
    variance = 0.0
    draws = 600
    for _ in range(draws):
        field = gaussian.gaussian_field(rng, power, shape)
        mean_power += np.abs(np.fft.rfftn(field) / field.size) ** 2 / draws
        variance += float(np.square(field).mean()) / draws
    assert mean_power / power == pytest.approx(1.0, abs=0.5)
    assert float((mean_power / power).mean()) == pytest.approx(1.0, abs=0.05)
    assert variance == pytest.approx(gaussian.total(power, shape), rel=0.05)


def test_constant_class_scores_the_commonest() -> None:
    scores = constant_class(np.array([[6, 1], [2, 1]]), ("no", "yes"))
    assert scores["predictor"] == "all no"
    assert scores["accuracy"] == pytest.approx(0.8)
    assert scores["dice"] == {"no": pytest.approx(1.6 / 1.8), "yes": 0.0}
    assert scores["cross_entropy"] == pytest.approx(-0.8 * np.log(0.8) - 0.2 * np.log(0.2))


# Cosmology


def test_only_the_modes_longer_than_half_the_edge_know_the_large_scale_target() -> None:
    waves = gaussian.wave_numbers((32, 32, 32))
    low, high = (
        cosmology.spectrum(waves, sigma=0.6, ns=0.8, k0=6.0, large=large) for large in (-2.0, 2.0)
    )
    long = (waves < 2) & (waves > 0)
    assert np.array_equal(low[~long], high[~long])
    assert high[long] / low[long] == pytest.approx(np.exp(4), rel=1e-4)


def test_targets_are_normalised_and_the_mean_predictor_scores_a_third() -> None:
    y = np.stack([cosmology.sample(16, 0, index)["y"] for index in range(100)])
    assert -1 <= y.min() < -0.9
    assert 0.9 < y.max() <= 1
    scores = cosmology.baseline(y)
    assert scores["mse"] == pytest.approx(1 / 3, abs=0.06)
    assert scores["mse"] == pytest.approx(float(((y - y.mean(0)) ** 2).mean()), rel=1e-5)
    assert cosmology.parameters(np.array([-1, 0, 1, 1]))["ns"] == pytest.approx(0.3)


def test_counts_are_poisson_about_a_density_of_mean_one() -> None:
    x = np.stack([cosmology.sample(16, 1, index)["x"] for index in range(60)])
    low, high = cosmology.DEPTH
    assert x.min() == 0
    expected = (high - low) / np.log(high / low)
    assert float(x.mean()) == pytest.approx(expected, rel=0.15)


# Organs


def test_organs_hold_lesions_that_brightness_alone_does_not_tell() -> None:
    samples = [organs.sample(32, 0, index) for index in range(12)]
    x, y = (np.stack([sample[name] for sample in samples]) for name in "xy")
    tallies = np.stack([organs.tally(part) for part in y])
    scores = organs.baseline(tallies)
    assert 0.85 < scores["accuracy"] < 0.98
    assert (tallies > 0).all()
    for edge in np.linspace(0.5, 1.2, 15):
        bright = x[:, 0] > edge
        hit = float((bright & (y == 2)).sum())
        assert 2 * hit / float(bright.sum() + (y == 2).sum()) < 0.5


# Mesh


def crosses_itself(cell: Array) -> bool:
    """Return whether opposite edges of a quadrilateral of 4 points (x, y) meet."""

    def side(a: Array, b: Array, c: Array) -> float:
        return float((b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]))

    def meet(a: Array, b: Array, c: Array, d: Array) -> bool:
        return side(a, b, c) * side(a, b, d) <= 0 and side(c, d, a) * side(c, d, b) <= 0

    a, b, c, d = cell
    return meet(a, b, c, d) or meet(b, c, d, a)


def test_tangled_cells_are_those_with_a_bad_corner_or_a_crossing() -> None:
    rng = np.random.default_rng(0)
    size = 12
    grid = np.stack(np.meshgrid(*[np.arange(size, dtype=float)] * 2, indexing="ij"))
    nodes = grid + rng.normal(0, 0.35, grid.shape)
    found = mesh.tangled(nodes)
    crossing = 0
    for i in range(size - 1):
        for j in range(size - 1):
            ring = [nodes[:, i, j], nodes[:, i + 1, j], nodes[:, i + 1, j + 1], nodes[:, i, j + 1]]
            convex = all(
                np.linalg.det(np.stack([ring[at] - ring[at - 1], ring[(at + 1) % 4] - ring[at]]))
                > 0
                for at in range(4)
            )
            assert found[i, j] == (not convex)
            if crosses_itself(np.stack(ring)):
                crossing += 1
                assert found[i, j]
    assert crossing > 3
    assert not mesh.tangled(grid).any()
    assert mesh.tangled(grid[:, ::-1]).all()


def test_nodes_of_a_tangled_cell_are_marked() -> None:
    cells = np.zeros((3, 3), bool)
    cells[0, 2] = True
    assert np.argwhere(mesh.to_nodes(cells)).tolist() == [[0, 2], [0, 3], [1, 2], [1, 3]]


def test_channels_of_a_sheared_mesh_are_what_geometry_says() -> None:
    size = 6
    first, second = np.meshgrid(*[np.arange(size, dtype=float)] * 2, indexing="ij")
    nodes = np.stack([2 * first + second, 3 * second])
    movement = np.stack([0.5 * first, np.zeros_like(first)])
    x = dict(zip(mesh.CHANNELS, mesh.channels(nodes, movement)))
    expected = {
        "movement_1": 0,
        "next_0_0": 2,
        "next_0_1": 0,
        "next_1_0": 1,
        "next_1_1": 3,
        "last_0_0": -2,
        "last_0_1": 0,
        "last_1_0": -1,
        "last_1_1": -3,
        "area": 6,
        "corner_area": 6,
        "aspect": np.log(2 / np.sqrt(10)),
        "cosine": 1 / np.sqrt(10),
        "growth": 1.5,
        "circulation": 0.5,
    }
    for name, value in expected.items():
        assert x[name] == pytest.approx(np.full((size, size), value), abs=1e-5), name


def test_a_few_nodes_of_every_mesh_tangle() -> None:
    for size, count in ((24, 40), (64, 8)):
        tallies = np.stack([mesh.tally(mesh.sample(size, 0, i)["y"]) for i in range(count)])
        shares = tallies[:, 1] / tallies.sum(1)
        assert 0.02 < shares.mean() < 0.2
        assert shares.min() > 0.005
        assert shares.max() < 0.3
        assert mesh.baseline(tallies)["accuracy"] == pytest.approx(1 - shares.mean())


def test_the_mesh_is_shown_before_it_tangles() -> None:
    sample = mesh.sample(48, 0, 0)
    position = sample["x"][:2].astype(np.float64)
    shown = mesh.to_nodes(mesh.tangled((position + 1) * 47 / 2))
    after = (position + 1) * 47 / 2 + sample["x"][2:4]
    assert shown.mean() < 0.6 * sample["y"].mean()
    assert (mesh.to_nodes(mesh.tangled(after)) == sample["y"][0]).mean() > 0.999


# Images


def test_images_are_of_all_classes_and_none_is_common() -> None:
    y = np.array([int(images.sample(16, 0, index)["y"]) for index in range(400)])
    tallies = np.stack([images.tally(label) for label in y])
    assert (tallies.sum(0) > 20).all()
    assert images.baseline(tallies)["accuracy"] < 0.16
    assert len(images.CLASSES) == 10


def test_the_mean_colour_does_not_tell_the_class() -> None:
    samples = [images.sample(16, 0, index) for index in range(400)]
    colours = np.stack([sample["x"].mean((1, 2)) for sample in samples])
    spread = colours.std(0)
    y = np.array([int(sample["y"]) for sample in samples])
    means = np.stack([colours[y == label].mean(0) for label in range(10)])
    assert all((np.abs(a - b) < spread).all() for a, b in combinations(means, 2))


# Brain


@needs_nilearn
def test_brain_keeps_the_front_for_testing() -> None:
    facts = brain.facts(64, 24, 0)
    assert facts["held_out"] == [3, 7, 11, 15, 19, 23]
    for index in range(24):
        box = brain.crop(64, 0, index)
        assert all(0 <= part.start < part.stop <= n for part, n in zip(box, brain.EXTENTS))
        assert [part.start for part in box] == facts["starts"][index]
        front = box[brain.FRONT]
        if index in facts["held_out"]:
            assert front.start >= brain.BORDER
        else:
            assert front.stop <= brain.BORDER


@needs_nilearn
def test_brain_samples_are_the_real_template() -> None:
    image, labels = brain.template()
    assert image.shape == (197, 233, 189)
    assert brain.fields(500)["x"].shape == (1, 197, 77, 189)
    sample = brain.sample(500, 0, 3)
    assert np.array_equal(sample["x"][0], image[:, 156:])
    assert np.array_equal(sample["y"], labels[:, 156:])
    assert (labels[image == 0] == 0).mean() > 0.99
    assert image[labels == 2].mean() > image[labels == 1].mean() + 0.1


def test_brain_without_nilearn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nilearn", None)
    with pytest.raises(DataError, match=r"pip install 'tilewise\[brain\]'"):
        brain.template.__wrapped__()


@needs_nilearn
def test_a_template_of_other_extents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brain, "EXTENTS", (91, 109, 91))
    with pytest.raises(DataError, match=r"\(197, 233, 189\), not \(91, 109, 91\)"):
        brain.template.__wrapped__()
