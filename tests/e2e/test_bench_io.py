"""`tilewise bench io` measures what it says."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import finish
from tilewise.bench import io
from tilewise.comm import Mesh
from tilewise.testing import ranks


def exhausted(steps: Generator[int, None, Any]) -> tuple[int, Any]:
    total = 0
    while True:
        try:
            total += next(steps)
        except StopIteration as end:
            return total, end.value


def ways(mesh: Mesh, folder: str) -> tuple[int, bool]:
    """Return how many samples this rank wrote, and whether all ways bring the same slabs."""
    case = io.IoCase(folder, 8, 5, 2)
    written, _ = exhausted(io.make_set(mesh, case))
    mesh.agree("made")
    whole = io._Whole(mesh, case)
    others = [io._Slabs(mesh, case, "d2", stored=stored) for stored in (False, True)]
    same = True
    for epoch in range(2):
        expected = list(whole.epoch(epoch))
        assert len(expected) == 3
        for way in others:
            for a, b in zip(expected, way.epoch(epoch), strict=True):
                same &= all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
    for way in (whole, *others):
        way.close()
    return written, same


def test_all_ways_bring_the_same_slabs(tmp_path: Path) -> None:
    assert ranks(2, ways, str(tmp_path)) == [(3, True), (2, True)]
    assert io.IoCase(str(tmp_path), 8, 5, 2).exists
    assert not io.IoCase(str(tmp_path), 8, 6, 2).exists


def test_the_command_prints_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--ranks 2 --gib 0.002 --edge 16 --rounds 1 --steps 1 --json --folder sets"
    assert finish(f"tilewise bench io {words}", monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    rates = [found[f"{way}_samples_s"] for way in ("whole", "slab", "store", "store_moved")]
    assert min(rates) > 0
    assert found["slab_over_whole"] == rates[1] / rates[0]
    total, labels = found["set_bytes"], found["samples"] * 16
    assert found["samples"] * found["sample_bytes"] == total
    halves = [(total + labels) // 2] * 2
    read = found["bytes_read_per_rank"]
    assert read["whole"] == [total, 0]
    assert read["slab"] == read["store_first"] == halves
    assert read["store"] == read["store_moved"] == [0, 0]
    assert found["training"]["step_s"]["memory"] > 0
    assert found["training"]["input_share"] < 1
    assert len(list((tmp_path / "sets").iterdir())) == 2
    assert finish("tilewise bench io --ranks 3 --batch 2", monkeypatch) == 2
    assert "--batch" in capsys.readouterr().err
