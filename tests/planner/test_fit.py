"""Fits find the machine that made the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tilewise import Mesh
from tilewise.auto.calibrate import (
    ARRAYS,
    BY_CHANNELS,
    BY_FLOPS,
    CHECKS,
    MESSAGES,
    TYPICAL,
    Case,
    Measured,
    _timed_together,
    fullest_host,
    machine_of,
    resident,
)
from tilewise.cli.fits import warn_of_fits
from tilewise.host import resident_bytes
from tilewise.planner.fit import FAILED, Timed, curve_error, fit_all_reduce, fit_line, fit_link
from tilewise.planner.machine import Link, Machine
from tilewise.planner.price import sum_s
from tilewise.testing import ranks


def test_a_link_is_found_again() -> None:
    link, error = fit_link(MESSAGES, [2e-5 + size / 3e9 for size in MESSAGES])
    assert link.latency_s == pytest.approx(2e-5)
    assert link.bandwidth_bytes_per_s == pytest.approx(3e9)
    assert error < 1e-6


def test_lines_never_have_negative_parts() -> None:
    start, slope, error = fit_line([1.0, 10.0, 100.0], [1.0, 20.0, 300.0])
    assert start >= 0
    assert slope > 0
    assert error < FAILED
    start, slope, error = fit_line([1.0, 10.0, 100.0], [3.0, 2.0, 1.0])
    assert (start, slope) == (1.0, 0.01)
    assert error >= FAILED


@pytest.mark.parametrize(
    "seconds",
    [
        [1571e-6] * 5,
        [1571e-6, 1571e-6, 1571e-6, 1571e-6, 1571.1e-6],
        [5e-3, 4e-3, 3e-3, 2e-3, 1e-3],
        [9e-3, 1e-4, 1e-4, 2e-4, 4e-3],
        [1e-9, 1e-9, 1e-9, 1e-9, 1.0],
        [1e-5, 1e-1, 1e-1, 1e-1, 1e-2],
    ],
)
def test_whatever_was_measured_a_byte_takes_a_likely_time(seconds: list[float]) -> None:
    """The largest message never passes ten times as fast as it did, nor ten times as slowly."""
    link, _ = fit_link(MESSAGES, seconds)
    assert 0.1 <= MESSAGES[-1] / link.bandwidth_bytes_per_s / seconds[-1] <= 10
    assert link.latency_s <= max(seconds)
    sums, _ = fit_all_reduce(link, 4, MESSAGES, seconds)
    machine = synthetic().model_copy(update={"node": link, "network": link, "all_reduce": sums})
    found = sum_s(machine, np.array(float(MESSAGES[-1])), np.array(4.0), np.array(1.0))
    assert 0.1 <= float(found) / seconds[-1] <= 11


def test_random_times_give_likely_rates() -> None:
    for seed in range(200):
        seconds = 10.0 ** np.random.default_rng(seed).uniform(-6, 0, len(MESSAGES))
        _, slope, _ = fit_line(MESSAGES, seconds.tolist())
        assert 0.1 <= slope * MESSAGES[-1] / seconds[-1] <= 10, seed


def test_a_failed_fit_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the line that stands in its place is near all times."""
    found = measured()
    found.messages, found.sums = [1571e-6] * len(MESSAGES), [3e-3] * len(MESSAGES)
    found.touch_s, found.arrays = 1.0, [1e-3] * len(ARRAYS)
    machine = machine_of(found, 2)
    warn_of_fits(machine.fit_errors)
    said = capsys.readouterr().err
    assert all(name in said for name in ("messages", "sums", "memory"))
    assert machine.believable
    assert machine.node.bandwidth_bytes_per_s == pytest.approx(MESSAGES[-1] / 1571e-6)
    assert machine.memory_bandwidth_bytes_per_s == pytest.approx(ARRAYS[-1] / 1e-3)


def test_a_start_is_no_longer_than_a_call() -> None:
    found = measured()
    found.call_s = found.touch_s = 1.0
    machine = machine_of(found, 2)
    assert machine.call_s < 1e-5
    assert machine.compute["float32"].peak_flops_per_s < 10 * 5e10
    assert machine.memory_bandwidth_bytes_per_s == pytest.approx(1e10, rel=0.15)


def test_one_rank_has_sums_too() -> None:
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=2e9)
    found, _ = fit_all_reduce(link, 1, MESSAGES, [size / 1e9 for size in MESSAGES])
    assert found.efficiency > 0


def times_that_grow_late(mesh: Mesh) -> tuple[int, list[float]]:
    """Let all sizes take equally long in the first rounds; returns how many tries there were.

    By a clock that only calls advance.
    """
    tries, now = 0, 0.0

    def prepare(size: int) -> Any:
        def call() -> None:
            nonlocal now
            now += 1e-4 + (size / 2e9 if tries else 0.0)

        return call

    def looked(sizes: Any, seconds: Any) -> bool:
        nonlocal tries
        tries += 1
        return tries > 2

    clock = SimpleNamespace(perf_counter=lambda: now)
    with (
        mock.patch("tilewise.auto.calibrate.grows", looked),
        mock.patch("tilewise.auto.calibrate.time", clock),
    ):
        times = _timed_together(mesh, MESSAGES, prepare)
    return tries, times


def test_what_does_not_grow_is_measured_again() -> None:
    (first, times), (other, _) = ranks(2, times_that_grow_late)
    assert first == 3
    assert other == 0  # it goes by what the first one says
    assert times[-1] > times[0]


@pytest.mark.parametrize("start", [1e-5, 1e-3])
def test_a_sum_is_found_again(start: float) -> None:
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=2e9)
    found, error = fit_all_reduce(link, 4, MESSAGES, [start + size / 1e9 for size in MESSAGES])
    assert error < 1e-6
    machine = synthetic().model_copy(update={"node": link, "network": link, "all_reduce": found})
    for size in MESSAGES:
        seconds = sum_s(machine, np.array(float(size)), np.array(4.0), np.array(1.0))
        assert float(seconds) == pytest.approx(start + size / 1e9)


def timed(case: Case) -> Timed:
    """Time a layer on a machine of 50 GFLOP/s, half of it below 16 channels."""
    channels = (case.channels * case.filters) ** 0.5
    seconds = 1e-6 + case.flops / (5e10 if channels >= 16 else 2.5e10)
    return Timed(case.flops, channels, seconds, 2 * seconds)


def measured() -> Measured:
    """Return what is measured of it."""
    found = Measured(touch_s=1e-6, call_s=1e-6)
    for kind in BY_FLOPS:
        found.by_flops[kind] = [timed(case) for case in BY_FLOPS[kind]]
        found.by_channels[kind] = [timed(case) for case in BY_CHANNELS[kind]]
        found.checks[kind] = [timed(case) for case in CHECKS[kind]]
    for dtype, slower in (("float32", 1.0), ("float64", 2.0), ("bfloat16", 0.5)):
        some = [timed(case) for case in TYPICAL]
        found.by_type[dtype] = [
            replace(one, forward_s=slower * one.forward_s, backward_s=slower * one.backward_s)
            for one in some
        ]
    found.arrays = [1e-6 + size / 1e10 for size in ARRAYS]
    found.messages = [1e-4 + size / 1e9 for size in MESSAGES]
    found.sums = [2e-4 + size / 1e9 for size in MESSAGES]
    return found


def synthetic() -> Machine:
    return machine_of(measured(), 2)


def test_a_machine_is_found_again() -> None:
    machine = synthetic()
    assert machine.compute["float32"].peak_flops_per_s == pytest.approx(5e10, rel=0.01)
    assert machine.memory_bandwidth_bytes_per_s == pytest.approx(1e10, rel=0.01)
    assert machine.compute["float32"].backward_share == pytest.approx(1.0)
    assert max(machine.fit_errors.values()) < 0.25
    assert machine.compute["float64"].peak_flops_per_s == pytest.approx(2.5e10, rel=0.01)
    assert machine.compute["bfloat16"].peak_flops_per_s == pytest.approx(1e11, rel=0.01)
    assert machine.fit_errors["conv3d"] < 0.05
    for flops, channels, rate in ((1e9, 64.0, 5e10), (1e8, 4.0, 2.5e10)):
        seconds = machine.arithmetic_s("conv3d", "float32", np.array(flops), np.array(channels))
        assert float(seconds) == pytest.approx(flops / rate, rel=0.05)
    assert Machine.from_json(machine.to_json()) == machine


def test_the_error_of_a_curve_is_that_of_points_between() -> None:
    sizes = [1.0, 10.0, 100.0, 1000.0]
    assert curve_error(sizes, [1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.0)
    assert curve_error(sizes, [1.0, 4.0, 3.0, 4.0]) == pytest.approx((0.5 + 1 / 3) / 2)


def test_what_ranks_hold_themselves_is_reserved() -> None:
    found = measured()
    found.resident_bytes = 300 << 20
    with mock.patch("tilewise.auto.calibrate.memory_bytes", return_value=16 << 30):
        machine = machine_of(found, 4)
        found.resident_bytes = 3 << 30
        full = machine_of(found, 4)
    assert (machine.memory_bytes, machine.reserved_bytes) == (4 << 30, 300 << 20)
    assert "held" in machine.sources["reserved_bytes"]
    assert full.reserved_bytes == 1 << 30


def holding(mesh: Mesh) -> tuple[int, int]:
    """Return what ranks hold, and again with 64 MiB more on one of them."""
    before = resident(mesh)
    more = np.ones(8 << 20) if mesh.rank == 1 else None
    after = resident(mesh)
    del more
    return before, after


def test_the_fullest_rank_tells_what_is_held() -> None:
    found = ranks(2, holding)
    assert found[0] == found[1]
    before, after = found[0]
    assert 10 << 20 < before < after
    with mock.patch("tilewise.host.STATM", Path("/nowhere")):
        assert resident_bytes() > 10 << 20


def test_memory_is_shared_by_the_ranks_of_a_host() -> None:
    assert fullest_host("0×4") == 4
    assert fullest_host("0×1 1×2 0×1 2×1") == 2
    assert fullest_host("0×1 1×1 2×1") == 1
