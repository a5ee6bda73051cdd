"""Peers that die, fall silent or take another path end in an error that names them, not in a hang.

These ranks are processes of their own with a short timeout, not those of the shared pool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("failing_ranks.py")
TIMEOUT = 2.0

EXPECTED = {
    "silent_receive": "receive of conv1: no answer from rank 1 on rank 0",
    "silent_send": "send of conv1: no answer from rank 1 on rank 0",
    "silent_sum": "sum of norm1: no answer from rank 1 on rank 0",
    "silent_backward": "receive of conv1 (backward): no answer from rank 1 on rank 0",
    "silent_agree": "agree of plan: no answer from rank 1 on rank 0",
    "another_path": "receive of conv1: no answer from rank 1 on rank 0",
    "another_dtype": "receive of conv1: no answer from rank 1 on rank 0",
    "silent_mesh": "open of mesh: no answer from rank 1 on rank 0",
}
DEATHS = {
    "death": "receive of conv1: no answer from rank 1 on rank 0",
    "death_in_sum": "sum of norm1: no answer from rank 1 on rank 0",
}


def start(store: Path, *scenarios: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(store), *scenarios],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> dict[str, tuple[str, float]]:
    """Return what rank 0 met in each scenario, and how long it took."""
    try:
        out, errors = processes[0].communicate(timeout=90)
        processes[1].communicate(timeout=30)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert out.strip(), errors
    found: dict[str, tuple[str, float]] = json.loads(out.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    folder = tmp_path_factory.mktemp("ranks")
    worlds = [start(folder / name, name) for name in DEATHS]
    worlds.append(start(folder / "alive", *EXPECTED))
    found: dict[str, tuple[str, float]] = {}
    for world in worlds:
        found |= finish(world)
    return found


@pytest.mark.parametrize("scenario", [*EXPECTED, *DEATHS])
def test_failures_are_named(scenario: str, met: dict[str, tuple[str, float]]) -> None:
    text, seconds = met[scenario]
    assert f"CommError: {(EXPECTED | DEATHS)[scenario]}" in text
    assert "the peer died, stopped, or took another path through the model" in text
    assert seconds < 6 * TIMEOUT
