"""What `tilewise calibrate` and `tilewise bench comm` say of fits."""

from __future__ import annotations

import re
from unittest import mock

import pytest

from tilewise.bench.messages import PRIMITIVES, SIZES, Primitive
from tilewise.cli import bench
from tilewise.cli.calibrate import _show
from tilewise.cli.fits import warn_of_fits
from tilewise.planner.machine import load_machine


def test_large_errors_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_fits({"memory": 0.24, "sums": 0.25, "messages": 1.3})
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("warning: some fits are bad, ")
    assert "sums 25%, messages 130%" in said.err
    assert "memory" not in said.err
    warn_of_fits({"memory": 0.1})
    assert capsys.readouterr().err == ""


def test_sums_are_so_many_times_as_fast(capsys: pytest.CaptureFixture[str]) -> None:
    machine = load_machine("lassen")
    sums = machine.all_reduce.model_copy(update={"efficiency": 12.98})
    errors = {"messages": 0.1, "sums": 0.4}
    _show(machine.model_copy(update={"all_reduce": sums, "fit_errors": errors}))
    assert "12.98 times that bandwidth" in " ".join(capsys.readouterr().out.split())


def test_each_kind_has_its_own_best_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """It is that of the layers that are measured: the best of both curves may not meet in one."""
    errors = dict.fromkeys(("conv3d", "conv2d", "linear"), 0.1)
    update = {"name": "machine", "fit_errors": errors}
    _show(load_machine("lassen").model_copy(update=update))
    said = " ".join(capsys.readouterr().out.split())
    best = dict(re.findall(r"(\w+) │ (\d+) GFLOP/s at best", said))
    assert best.keys() == errors.keys()
    rates = [int(rate) for rate in best.values()]
    assert len(set(rates)) == 3
    assert max(rates) < 15700 * 0.8
    assert "machine machine" not in said


@pytest.mark.parametrize("json", [False, True])
def test_comm_warns_beside_what_it_prints(json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    errors = dict.fromkeys(PRIMITIVES, 0.05) | {"sum": 0.6}
    found = [
        Primitive(name, dict.fromkeys(SIZES, 1e-3), 1e-6, 1e-9, error)
        for name, error in errors.items()
    ]
    with mock.patch.object(bench, "Crew") as crew:
        crew.return_value.__enter__.return_value.run.return_value = [found]
        bench.comm(json_=json)
    said = capsys.readouterr()
    assert "sum 60%" in said.err
    assert "sum" in said.out
