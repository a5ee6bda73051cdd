"""Ways to do the local work are measured once, the same on all ranks, and never change results."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fixed_ways import fixed_ways
from tilewise import Degrees, Mesh, parallelize
from tilewise.comm.formats import formatted, is_last
from tilewise.ops import tune
from tilewise.ops.conv_local import By, LocalConv, Way, Ways
from tilewise.ops.conv_spec import ConvSpec
from tilewise.ops.halo import Halo
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close

SHAPE = (2, 32, 50, 48)
ON = {"TILEWISE_TUNE": "on"}


def convolve(
    mesh: Mesh, folder: str, settings: dict[str, str], plan: str = "h2"
) -> tuple[Ways | None, int]:
    """Compare a convolution with one device; returns the ways chosen and how many were measured."""
    torch.manual_seed(0)
    serial = nn.Conv2d(32, 96, 3, padding=1)
    split = nn.Conv2d(32, 96, 3, padding=1)
    split.load_state_dict(serial.state_dict())
    x = torch.randn(SHAPE, requires_grad=True)
    measured = mock.Mock(wraps=tune._measure)
    with (
        mock.patch.dict(os.environ, {"TILEWISE_CACHE": folder, **ON, **settings}),
        mock.patch.object(tune, "_measure", measured),
    ):
        model = parallelize(split, x, plan, mesh=mesh)
        slab = model.scatter(x.detach()).requires_grad_()
        y = model(slab)
    y.square().sum().backward()
    expected = serial(x)
    expected.square().sum().backward()
    assert slab.grad is not None
    exchange = model.input_layouts[0].slab(mesh.rank)
    assert x.grad is not None
    assert_close(model.gather(y), expected, "output", tolerance=1e-4)
    assert_close(slab.grad, x.grad[exchange], "input", tolerance=1e-4)
    for name, parameter in serial.named_parameters():
        grad: Any = model.get_parameter(name).grad
        assert_close(model.gather_held(name, grad), _grad(parameter), name, tolerance=1e-4)
    return _chosen(model), measured.call_count


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _chosen(model: Any) -> Ways | None:
    (run,) = model.runs._runs.values()
    (stretch,) = run.executable.stretches[:1]
    found: list[Ways] = list(stretch[0].run.fused.chosen.values())
    return found[0] if found else None


def test_measured_once_and_chosen_alike(tmp_path: Path) -> None:
    first = ranks(2, convolve, str(tmp_path), {})
    again = ranks(2, convolve, str(tmp_path), {})
    assert first[0][0] is not None
    assert first[0][0] == first[1][0] == again[0][0] == again[1][0]
    assert [count for _, count in first] == [1, 1]
    assert [count for _, count in again] == [0, 0]
    kept = json.loads((tmp_path / "ways.json").read_text())
    assert all(len(times) == 3 * len(tune.WAYS) + 2 and min(times) > 0 for times in kept.values())


@pytest.mark.parametrize("plan", ["n2", "c2", "f2", "w2", "c2 f2", "h2 f2", "h2 w2"])
def test_every_kind_of_split_is_measured(plan: str, tmp_path: Path) -> None:
    found = ranks(Degrees.parse(plan).product, convolve, str(tmp_path), {}, plan)
    assert len({ways for ways, _ in found}) == 1
    assert any(count == 1 for _, count in found)  # ranks with slabs alike may measure for others


@pytest.mark.parametrize("content", ["", "[]", "{not json"])
def test_a_broken_file_is_measured_again(content: str, tmp_path: Path) -> None:
    (tmp_path / "ways.json").write_text(content)
    assert [count for _, count in ranks(2, convolve, str(tmp_path), {})] == [1, 1]
    assert json.loads((tmp_path / "ways.json").read_text())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = ranks(2, convolve, str(tmp_path / "file" / "below"), {})
    assert [count for _, count in found] == [1, 1]


def test_switched_off_nothing_is_measured(tmp_path: Path) -> None:
    found = ranks(2, convolve, str(tmp_path), {"TILEWISE_TUNE": "off"})
    assert [count for _, count in found] == [0, 0]
    assert not list(tmp_path.iterdir())


def deterministic(mesh: Mesh, folder: str) -> int:
    torch.use_deterministic_algorithms(True)
    try:
        return convolve(mesh, folder, {})[1]
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_measure_nothing(tmp_path: Path) -> None:
    assert ranks(2, deterministic, str(tmp_path)) == [0, 0]


def change_format(mesh: Mesh, folder: str) -> None:
    """Bring the same x in another memory format; on the first rank's slab that does not show."""
    torch.manual_seed(0)
    conv = nn.Conv2d(256, 256, 3, padding=1)
    x = torch.randn(32, 256, 3, 1)
    expected = conv(x).detach()
    with mock.patch.dict(os.environ, {"TILEWISE_CACHE": folder, **ON}):
        model = parallelize(conv, x, "h2", mesh=mesh)
        slab = model.scatter(x)
        for format in (torch.contiguous_format, torch.channels_last):
            y = model.gather(model(slab.contiguous(memory_format=format)))
            assert_close(y.detach(), expected, "output", tolerance=1e-4)


def test_ranks_stay_together_when_the_memory_format_changes(tmp_path: Path) -> None:
    ranks(2, change_format, str(tmp_path))


def formats_of_gradients(mesh: Mesh) -> list[bool]:
    """Return whether gradients come with channels innermost, for slabs that do not and do."""
    torch.manual_seed(0)
    conv, seen = nn.Conv2d(8, 8, 3, padding=1), list[bool]()
    x = torch.randn(2, 8, 12, 10)
    for last in (False, True):
        way, other = Way(patch=False, last=last), Way(patch=False, last=not last)
        ways = Ways(way, other, other, last)
        model = parallelize(conv, x, "h2", mesh=mesh)
        slab = formatted(model.scatter(x), last=last).requires_grad_()
        inside = slab.clone()
        inside.register_hook(lambda grad: seen.append(is_last(grad)))
        with fixed_ways(ways):
            model(inside).square().sum().backward()
    return seen


def test_a_gradient_lies_as_its_slab_does_whatever_the_way() -> None:
    assert ranks(2, formats_of_gradients) == [[False, True]] * 2


def test_ways_are_chosen_with_what_changing_formats_takes() -> None:
    """Channels innermost are faster for both gradients, if dy is changed once for the two."""
    plain, last = tune.WAYS.index(Way(False, False)), tune.WAYS.index(Way(False, True))
    phases = [[2.0] * len(tune.WAYS) for _ in range(3)]
    for phase in phases[1:]:
        phase[last] = 1.4
    for change, chosen in ((0.7, tune.WAYS[last]), (1.3, tune.WAYS[plain])):
        tuned = tune.Tuned((*phases[0], *phases[1], *phases[2], 0.1, change), last=False)
        found, seconds = tuned.best(False, data=True)
        assert found == Ways(tune.WAYS[plain], chosen, chosen, last=False)
        expected = 2.0 + (2 * 1.4 + 0.1 + 0.1 + change if change == 0.7 else 2 * 2.0)
        assert seconds == pytest.approx(expected)
        alone, _ = tuned.best(False, data=False)  # 1.4 and changes are more than 2
        assert (alone.weight == tune.WAYS[plain]) == (1.4 + 0.1 + change > 2.0)
        inside, least = tuned.best(True, data=True)  # nothing to change
        assert inside == Ways(tune.WAYS[last], tune.WAYS[last], tune.WAYS[last], last=True)
        assert least == pytest.approx(2.0 + 1.4 + 1.4)


def test_onednn_stays_switched_off_where_the_user_did_so() -> None:
    x, weight, dy = torch.randn(1, 4, 9, 9), torch.randn(8, 4, 3, 3), torch.randn(1, 8, 9, 9)
    conv = LocalConv(ConvSpec.of(weight.shape, padding=1), (1, 1), (1, 8, 9, 9), 1)
    found = []
    torch.backends.mkldnn.enabled = False
    try:
        assert not tune._onednn_differs(conv, x, weight)
        key = tune._key(conv, x, weight)
        for by in ("torch", "onednn"):
            way = Way(patch=False, last=False, by=by)
            dx = conv.data(way, dy, x, weight, None, lambda outer: None)
            found.append((dx, conv.weight(way, dy, x, weight, None, bias=False)[0]))
    finally:
        torch.backends.mkldnn.enabled = True
    assert key != tune._key(conv, x, weight)
    for plain, other in zip(*found):
        assert torch.equal(plain, other)


class Block(nn.Module):
    """What keeps a memory format, and what torch's own kernels lose it in."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, 8, 3, padding=1, bias=False)  # the norm takes a bias away
        self.norm = nn.BatchNorm3d(8)
        self.pool = nn.AvgPool3d(3, stride=2, padding=1)
        self.deep = nn.Conv3d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose3d(8, 8, 2, stride=2)
        self.head = nn.Conv3d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.norm(self.stem(x)))
        y = self.up(torch.nn.functional.leaky_relu(self.deep(self.pool(skip))))
        found: Tensor = self.head(torch.cat([skip, y], 1))
        return found


def formats_of_a_network(mesh: Mesh, innermost_s: float) -> tuple[set[tuple[str, bool]], bool]:
    """Compare with one device; returns the format of each layer's result and of the output."""
    torch.manual_seed(0)
    serial = Block().double()
    x = torch.randn(2, 2, 12, 8, 8, dtype=torch.float64)
    plain = Way(patch=False, last=innermost_s < 1)
    inside: set[tuple[str, bool]] = set()

    class Watch:
        def before(self, layer: str) -> None: ...

        def after(self, layer: str, results: Any) -> None:
            inside.update((layer, is_last(y)) for y in results if y.dim() == 5 and y.shape[1] > 1)

    with fixed_ways(Ways(plain, plain, plain, plain.last), innermost_s):
        model = parallelize(serial, x, "d2", mesh=mesh)
        slab = model.scatter(x).requires_grad_()
        with model.watched(Watch()):
            y = model(slab)
        whole = model.gather(y)
        whole.square().mean().backward()
        (again,) = model.formatted(slab.detach())
        assert is_last(again) == is_last(model(again)) == plain.last
    x.requires_grad_()
    expected = serial(x)
    expected.square().mean().backward()
    assert x.grad is not None
    assert slab.grad is not None
    assert_close(whole, expected, "output", tolerance=1e-10)
    assert_close(slab.grad, x.grad[model.input_layouts[0].slab(mesh.rank)], "x", tolerance=1e-10)
    for name, parameter in serial.named_parameters():
        assert_close(_grad(model.get_parameter(name)), _grad(parameter), name, tolerance=1e-9)
    return inside, is_last(y)


@pytest.mark.parametrize("innermost_s", [0.5, 1.0])
def test_a_network_lies_in_one_format_and_hands_out_the_callers(innermost_s: float) -> None:
    for inside, outside in ranks(2, formats_of_a_network, innermost_s):
        assert inside
        assert not [layer for layer, last in inside if last != (innermost_s < 1)]
        assert not outside


def test_measuring_leaves_the_callers_random_numbers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TILEWISE_CACHE": str(tmp_path), **ON}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tune, "WORTH", 0.0)
    x = torch.randn(1, 3, 9, 8)
    for _ in range(2):  # measured, then known
        model = parallelize(nn.Conv2d(3, 4, 3), x, "1", mesh=Mesh.alone())
        before = torch.get_rng_state()
        model(x)
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("by", ["torch", "onednn"])
def test_a_gradient_lies_as_its_slab_where_the_kernel_loses_the_format(by: By) -> None:
    spec = ConvSpec((3, 3, 3), (2, 2, 2), ((1, 1),) * 3, (1, 1, 1))
    here = (slice(0, 1), slice(0, 4))
    core, box = ((*here, part, slice(0, 6), slice(0, 6)) for part in (slice(1, 5), slice(0, 1)))
    halo = Halo((1, 4, 5, 6, 6), core, (box,), (), None, (0, 1, 1), spec)
    conv = LocalConv(spec, (0, 1, 1), (1, 4, 2, 3, 3), 1, halo)
    x, dy = (formatted(torch.randn(1, 4, d, h, h), last=True) for d, h in ((4, 6), (2, 3)))
    way = Way(patch=False, last=True, by=by)
    dx = conv.data(way, dy, x, torch.randn(4, 4, 3, 3, 3), halo.zeros(x), lambda outer: None)
    assert dx.stride(1) == 1


def test_ways_that_round_worse_than_torch_are_not_taken() -> None:
    plain, fair, poor = Way(False, False), Way(False, True), Way(True, True)
    exact = torch.arange(1.0, 9.0, dtype=torch.float64)
    near, far = exact * (1 + 1e-6), exact * (1 + 1e-4)
    assert tune._poor({plain: exact, fair: near, poor: far}, exact) == {poor}
    assert tune._poor({plain: far, fair: near, poor: far}, exact) == set()
    every = [[1.0] * len(tune.WAYS) for _ in range(3)]
    every[2] = [0.5 if way == fair else math.inf if way == poor else 1.0 for way in tune.WAYS]
    tuned = tune.Tuned((*every[0], *every[1], *every[2], 0.1, 0.1), False)
    found, seconds = tuned.best(True, data=True)
    assert found.weight == fair
    assert seconds == pytest.approx(2.5)


@pytest.mark.parametrize("shape", [(2, 9, 7, 8), (1, 8, 5, 6, 7)])
def test_what_is_rounded_is_judged_by_the_exact_gradient(shape: tuple[int, ...]) -> None:
    space = len(shape) - 2
    spec = ConvSpec.of((10, shape[1], *[3] * space), padding=1)
    conv = LocalConv(spec, (1,) * space, (shape[0], 10, *shape[2:]), 1)
    x, dy = torch.rand(shape), torch.rand(conv.out)
    exact = tune._exact(conv, dy, x, None)
    found, _ = conv.weight(
        Way(False, False), dy, x, torch.rand(10, shape[1], *[3] * space), None, bias=False
    )
    assert exact is not None
    assert exact.dtype is torch.float64
    assert_close(found[: tune.JUDGED].double(), exact, "weight gradient", tolerance=1e-5)
