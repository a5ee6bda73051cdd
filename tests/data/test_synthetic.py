"""The sets to train on: what they hold, what a trivial predictor scores, and that one can learn."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise.data.synthetic import KINDS, brain, cosmology, gaussian, images, mesh, organs
from tilewise.data.synthetic.kind import constant_class

Array = NDArray[Any]
SIZES = {"cosmology": 16, "organs": 24, "mesh": 20, "images": 16, "brain": 16}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small arithmetic on busy cores is fastest on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_shape_and_dtype_that_the_fields_say(kind: str) -> None:
    for size in (KINDS[kind].SMALLEST, SIZES[kind] + 1):
        sample = KINDS[kind].sample(size, 3, 5)
        for name, field in KINDS[kind].fields(size).items():
            assert sample[name].shape == field.shape
            assert sample[name].dtype == np.dtype(field.dtype)
            assert np.isfinite(sample[name]).all()


@pytest.mark.parametrize("kind", KINDS)
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
    y = np.stack([cosmology.sample(16, 0, index)["y"] for index in range(200)])
    assert -1 <= y.min() < -0.95
    assert 0.95 < y.max() <= 1
    scores = cosmology.baseline(y)
    assert scores["mse"] == pytest.approx(1 / 3, abs=0.04)
    assert scores["mse"] == pytest.approx(float(((y - y.mean(0)) ** 2).mean()), rel=1e-5)
    assert cosmology.parameters(np.array([-1, 0, 1, 1]))["ns"] == pytest.approx(0.6)


def test_counts_are_poisson_about_a_density_of_mean_one() -> None:
    x = np.stack([cosmology.sample(16, 1, index)["x"] for index in range(60)])
    low, high = cosmology.DEPTH
    assert x.min() == 0
    expected = (high - low) / np.log(high / low)
    assert float(x.mean()) == pytest.approx(expected, rel=0.15)


def band_powers(x: Array) -> Array:
    """Return the logarithms of the power of log-counts in bands of wave number, by channel."""
    size = x.shape[-1]
    waves = gaussian.wave_numbers((size,) * 3)
    edges = [0.5, 2.0, 3.0, 4.5, 6.5, 9.0, 12.0, 16.0]
    bands = np.digitize(waves, [edge for edge in edges if edge < size / 2]).ravel()
    modes = np.fft.rfftn(np.log1p(x.astype(np.float32)), axes=(1, 2, 3))
    features = [np.bincount(bands, np.square(np.abs(part)).ravel())[1:] for part in modes]
    return np.log(np.stack(features) / np.bincount(bands)[1:]).ravel()


def explained(features: Array, y: Array, *, folds: int = 4) -> Array:
    """Return the share of each target's variance that ridge regression predicts out of sample."""
    predicted = np.empty_like(y)
    for fold in range(folds):
        test = np.arange(len(y)) % folds == fold
        mean, spread = features[~test].mean(0), features[~test].std(0)
        inputs = np.c_[(features - mean) / spread, np.ones(len(y))]
        known = inputs[~test]
        gram = known.T @ known + 5.0 * np.eye(inputs.shape[1])
        predicted[test] = inputs[test] @ np.linalg.solve(gram, known.T @ y[~test])
    shares: Array = 1 - np.square(predicted - y).mean(0) / y.var(0)
    return shares


def test_larger_cubes_carry_more_information() -> None:
    samples = [cosmology.sample(32, 0, index) for index in range(360)]
    y = np.stack([sample["y"] for sample in samples]).astype(np.float64)
    whole, eighth, sixty_fourth = (
        explained(np.stack([band_powers(s["x"][:, :edge, :edge, :edge]) for s in samples]), y)
        for edge in (32, 16, 8)
    )
    large = list(cosmology.RANGES).index("large")
    assert whole[large] > 0.65
    assert eighth[large] < 0.3
    assert sixty_fourth[large] < 0.1
    others = [at for at in range(4) if at != large]
    assert (whole[others] > 0.35).all()
    assert (eighth[others] > 0.25).all()
    assert whole.mean() > eighth.mean() + 0.1
    assert eighth.mean() > sixty_fourth.mean() + 0.05


# Volumes of voxels


def dice(predicted: Array, y: Array, label: int) -> float:
    hit = float(((predicted == label) & (y == label)).sum())
    return 2 * hit / float((predicted == label).sum() + (y == label).sum())


def test_organs_hold_lesions_that_brightness_alone_does_not_tell() -> None:
    samples = [organs.sample(32, 0, index) for index in range(12)]
    x, y = (np.stack([sample[name] for sample in samples]) for name in "xy")
    tallies = np.stack([organs.tally(part) for part in y])
    scores = organs.baseline(tallies)
    assert 0.85 < scores["accuracy"] < 0.98
    assert (tallies > 0).all()
    best = max(dice(x[:, 0] > edge, y == 2, True) for edge in np.linspace(0.5, 1.2, 15))
    assert best < 0.5


def around(x: Tensor) -> Tensor:
    """Return for each voxel the mean brightness near it, over windows of several widths."""
    means = [
        F.avg_pool3d(x, width, 1, width // 2, count_include_pad=False) for width in (1, 3, 5, 9, 15)
    ]
    return torch.cat(means, 1)


def fitted(inputs: Tensor, labels: Tensor, *, hidden: int = 48, steps: int = 250) -> nn.Module:
    """Return a small perceptron trained on rows of inputs, the classes drawn equally often."""
    net = nn.Sequential(
        nn.BatchNorm1d(inputs.shape[1], affine=False),
        nn.Linear(inputs.shape[1], hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, int(labels.max()) + 1),
    )
    shares = torch.bincount(labels).double().sqrt()
    weights = 1 / shares[labels]
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    drawn = torch.multinomial(weights, 512 * steps, replacement=True)
    for rows in drawn.view(steps, 512):
        loss = F.cross_entropy(net(inputs[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def test_organs_can_be_learned() -> None:
    samples = [organs.sample(32, 0, index) for index in range(20)]
    x, y = (torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in "xy")
    inputs = around(x).movedim(1, -1)
    train, test = slice(0, 14), slice(14, 20)
    some = torch.randperm(inputs[train].numel() // inputs.shape[-1])[:150_000]
    net = fitted(inputs[train].flatten(0, -2)[some], y[train].flatten().long()[some])
    with torch.no_grad():
        predicted = net(inputs[test].flatten(0, -2)).argmax(1).numpy()
    truth = y[test].flatten().numpy()
    assert dice(predicted, truth, 1) > 0.5
    assert dice(predicted, truth, 2) > 0.3


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
        **{"next_0_0": 2, "next_0_1": 0, "next_1_0": 1, "next_1_1": 3},
        **{"last_0_0": -2, "last_0_1": 0, "last_1_0": -1, "last_1_1": -3},
        **{"area": 6, "corner_area": 6, "aspect": np.log(2 / np.sqrt(10)), "movement_1": 0},
        **{"cosine": 1 / np.sqrt(10), "growth": 1.5, "circulation": 0.5},
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


def test_mesh_can_be_learned() -> None:
    samples = [mesh.sample(48, 0, index) for index in range(30)]
    x, y = (torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in "xy")
    inputs = x.movedim(1, -1)
    train, test = slice(0, 22), slice(22, 30)
    net = fitted(inputs[train].flatten(0, -2), y[train].flatten().long())
    with torch.no_grad():
        predicted = net(inputs[test].flatten(0, -2)).argmax(1).numpy()
    truth = y[test].flatten().numpy()
    assert dice(predicted, truth, 1) > 0.6


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


def test_brain_samples_are_the_real_template() -> None:
    image, labels = brain.template()
    assert image.shape == (197, 233, 189)
    assert brain.fields(500)["x"].shape == (1, 197, 77, 189)
    sample = brain.sample(500, 0, 3)
    assert np.array_equal(sample["x"][0], image[:, 156:])
    assert np.array_equal(sample["y"], labels[:, 156:])
    assert (labels[image == 0] == 0).mean() > 0.99
    assert image[labels == 2].mean() > image[labels == 1].mean() + 0.1


def test_brain_can_be_learned() -> None:
    samples = [brain.sample(48, 0, index) for index in range(16)]
    x, y = (np.stack([sample[name] for sample in samples]) for name in "xy")
    held_out = np.array([brain.is_held_out(index) for index in range(16)])
    means = [x[:, 0][~held_out][y[~held_out] == label].mean() for label in range(3)]
    edges = [(means[0] + means[1]) / 2, (means[1] + means[2]) / 2]
    predicted = np.digitize(x[:, 0][held_out], edges)
    scores = brain.baseline(np.stack([brain.tally(part) for part in y[held_out]]))
    assert 0.3 < scores["accuracy"] < 0.8
    assert dice(predicted, y[held_out], 1) > 0.85
    assert dice(predicted, y[held_out], 2) > 0.85
