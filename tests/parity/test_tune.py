"""Ways to do the local work are measured once, the same on all ranks, and never change results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tilewise import Degrees, Mesh, parallelize
from tilewise.comm.formats import formatted, is_last
from tilewise.ops import conv_run, tune
from tilewise.ops.conv_local import LocalConv, Way, Ways
from tilewise.ops.conv_spec import ConvSpec
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close

SHAPE = (2, 32, 50, 48)


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
        mock.patch.dict(os.environ, {"TILEWISE_CACHE": folder, **settings}),
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
    found: list[tuple[Ways, Ways]] = list(stretch[0].run.fused.chosen.values())
    return found[0][True] if found else None


def test_measured_once_and_chosen_alike(tmp_path: Path) -> None:
    first = ranks(2, convolve, str(tmp_path), {})
    again = ranks(2, convolve, str(tmp_path), {})
    assert first[0][0] is not None
    assert first[0][0] == first[1][0] == again[0][0] == again[1][0]
    assert [count for _, count in first] == [1, 1]
    assert [count for _, count in again] == [0, 0]
    kept = json.loads((tmp_path / "ways.json").read_text())
    assert all(len(times) == 3 * len(tune.WAYS) + 1 and min(times) > 0 for times in kept.values())


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
    with mock.patch.dict(os.environ, {"TILEWISE_CACHE": folder}):
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
        with (
            mock.patch.object(conv_run, "worth_tuning", return_value=True),
            mock.patch.object(conv_run, "choose", return_value=(ways, ways)),
        ):
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
        times = [*phases[0], *phases[1], *phases[2], change]
        found = tune._best(times, last=False, data=True)
        assert found == Ways(tune.WAYS[plain], chosen, chosen, last=False)
        alone = tune._best(times, last=False, data=False)  # 1.4 and a change are more than 2
        assert alone.weight == tune.WAYS[plain]


def test_onednn_stays_switched_off_where_the_user_did_so() -> None:
    x, weight, dy = torch.randn(1, 4, 9, 9), torch.randn(8, 4, 3, 3), torch.randn(1, 8, 9, 9)
    conv = LocalConv(ConvSpec.of(weight.shape, padding=1), (1, 1), (1, 8, 9, 9), 1)
    found = []
    torch.backends.mkldnn.enabled = False
    try:
        assert not tune._leaves_onednn(conv, x, weight)
        key = tune._key(conv, x, weight)
        for onednn in (False, True):
            way = Way(patch=False, last=False, onednn=onednn)
            dx = conv.data(way, dy, x, weight, None, lambda outer: None)
            found.append((dx, conv.weight(way, dy, x, weight, None, bias=False)[0]))
    finally:
        torch.backends.mkldnn.enabled = True
    assert key != tune._key(conv, x, weight)
    for plain, other in zip(*found):
        assert torch.equal(plain, other)
