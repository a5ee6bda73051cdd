"""`tilewise bench io` measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

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


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    words = "bench io --ranks 2 --gib 0.002 --edge 16 --rounds 1 --steps 1 --json --folder sets"
    ran = subprocess.run(
        [sys.executable, "-m", "tilewise", *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
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
    bad = subprocess.run(
        [sys.executable, "-m", "tilewise", "bench", "io", "--ranks", "3", "--batch", "2"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert bad.returncode == 2
    assert "--batch" in bad.stderr
