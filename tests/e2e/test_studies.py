"""The scripts behind the page on results, each with one small run of its own."""

from __future__ import annotations

import math
import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from scripts import run_commands_here
from tilewise import data
from tilewise.data.synthetic.generate import generate

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_cubes_are_cut_as_sub_volumes_and_judged_as_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_commands_here(monkeypatch)
    study = script("cube_sizes")
    for name, seed in (("train", 0), ("test", 1)):
        generate("cosmology", tmp_path / name, size=16, count=3, seed=seed)
    with h5py.File(tmp_path / "test" / "data.h5") as file:
        whole = torch.from_numpy(file["x"][:])
    parts = study["parts"](whole, 2)
    cut = data.SubVolumes(data.open_source(tmp_path / "test"), {"x": (8, 8, 8)})
    assert len(parts) == len(cut) == 24
    for index in (0, 1, 10, 23):
        expected = np.empty((4, 8, 8, 8), np.int16)
        cut.read(index, "x", ((0, 4), (0, 8), (0, 8), (0, 8)), expected)
        assert torch.equal(parts[index], torch.from_numpy(expected))
    options = Namespace(
        size=16, out=tmp_path, width=0.0625, lr=1e-3, epochs=1, batch=1, warmup=0, ranks=2
    )
    run = study["train"](options, 2, 0)
    found = study["judge"](options, run, 2)
    told = study["json"].loads((run / "summary.json").read_text())["test"]["mse"]
    assert sum(found["each"]) / 4 == pytest.approx(told, rel=1e-5)
    assert sum(found["together"]) < sum(found["each"])


def test_a_run_on_two_threads_has_the_losses_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_commands_here(monkeypatch)
    study = script("loss_curves")
    options = Namespace(size=16, width=0.0625, batch=2, steps=2, plans=["n2"], out=tmp_path)
    runs = [study[name] for name in ("ALONE", "THREADS")]
    alone, threads = (study["train"](options, run, "float64") for run in runs)
    assert len(alone) == 2
    assert 0 < max(alone) < math.inf
    assert max(study["apart"](threads, alone)) < 1e-9


def test_a_size_trains_or_dies_of_memory(tmp_path: Path) -> None:
    study = script("memory_limit")
    generate("cosmology", tmp_path / "volume", size=96, count=1)
    limited = Namespace(out=tmp_path, width=1.0, steps=1, limit=400)
    assert not study["attempt"](limited, 1, 96).trained
    roomy = Namespace(out=tmp_path, width=0.0625, steps=1, limit=4000)
    small = study["attempt"](roomy, 1, 96)
    assert small.trained
    assert small.peak_bytes > 0
