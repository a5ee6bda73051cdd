"""One can learn from the sets: a simple model does clearly better than the trivial predictor."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise.data.synthetic import brain, cosmology, gaussian, images, mesh, organs
from tilewise.data.write import Array


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small arithmetic on busy cores is fastest on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


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
    samples = [cosmology.sample(32, 0, index) for index in range(240)]
    y = np.stack([sample["y"] for sample in samples]).astype(np.float64)
    whole, eighth, sixty_fourth = (
        explained(np.stack([band_powers(s["x"][:, :edge, :edge, :edge]) for s in samples]), y)
        for edge in (32, 16, 8)
    )
    large = list(cosmology.RANGES).index("large")
    assert whole[large] > 0.65
    assert eighth[large] < whole[large] - 0.3
    assert sixty_fourth[large] < 0.1
    others = [at for at in range(4) if at != large]
    assert (whole[others] > 0.35).all()
    assert (eighth[others] > 0.25).all()
    assert whole.mean() > eighth.mean() + 0.1
    assert eighth.mean() > sixty_fourth.mean() + 0.05


def dice(predicted: Array, y: Array, label: int) -> float:
    hit = float(((predicted == label) & (y == label)).sum())
    return 2 * hit / float((predicted == label).sum() + (y == label).sum())


def around(x: Tensor) -> Tensor:
    """Return for each voxel the mean brightness near it, over windows of several widths."""
    means = []
    for width in (1, 3, 5, 9, 15):
        mean = x
        for dim in (2, 3, 4):
            rows = mean.movedim(dim, -1)
            flat = F.avg_pool1d(rows.flatten(0, -2), width, 1, width // 2, count_include_pad=False)
            mean = flat.view(rows.shape).movedim(-1, dim)
        means.append(mean)
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
    assert dice(predicted, truth, 1) > 0.7
    assert dice(predicted, truth, 2) > 0.4


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


def convolution(channels: int, filters: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, filters, 3, stride, 1, bias=False),
        nn.BatchNorm2d(filters, momentum=0.3),
        nn.ReLU(),
    )


def test_images_can_be_learned() -> None:
    known, epochs = 1600, 6
    samples = [images.sample(32, 0, index) for index in range(known + 400)]
    x = torch.from_numpy(np.stack([sample["x"] for sample in samples])).float() / 127.5 - 1
    y = torch.from_numpy(np.stack([sample["y"] for sample in samples]))
    net = nn.Sequential(
        convolution(3, 16, 2),
        convolution(16, 32, 1),
        convolution(32, 64, 2),
        convolution(64, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, len(images.CLASSES)),
    )
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, epochs * known // 40)
    for _ in range(epochs):
        for rows in torch.randperm(known).split(40):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        right = net.eval()(x[known:]).argmax(1) == y[known:]
    tallies = np.stack([images.tally(label.numpy()) for label in y[known:]])
    assert float(right.float().mean()) > images.baseline(tallies)["accuracy"] + 0.12


@pytest.mark.skipif(find_spec("nilearn") is None, reason="needs the extra brain")
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
