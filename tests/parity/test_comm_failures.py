"""Peers that die, fall silent or take another path end in an error that names them, not in a hang.

These ranks are processes of their own with a short timeout, not those of the shared pool.
"""

from __future__ import annotations

import re

import pytest

import failing_ranks
from worlds import meet

EXPECTED = {
    "silent_receive": "receive of conv1: no answer from rank 1 on rank 0",
    "silent_send": "send of conv1: no answer from rank 1 on rank 0",
    "silent_sum": "sum of norm1: no answer from rank 1 on rank 0",
    "silent_backward": r"receive of conv1 \(backward\): no answer from rank 1 on rank 0",
    "silent_agree": "agree of plan: no answer from rank 1 on rank 0",
    "another_path": "receive of conv1: no answer from rank 1 on rank 0",
    "another_dtype": "receive of conv1: no answer from rank 1 on rank 0",
    "silent_mesh": "open of mesh: no answer from rank 1 on rank 0",
    "death": "(send|receive) of conv1: no answer from rank 1 on rank 0",  # whichever meets it first
    "death_in_sum": "sum of norm1: no answer from rank 1 on rank 0",
}


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    scenarios = [getattr(failing_ranks, name) for name in EXPECTED]
    return meet(scenarios, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", EXPECTED)
def test_failures_are_named(scenario: str, met: dict[str, str]) -> None:
    text = met[scenario]
    assert re.search(f"CommError: {EXPECTED[scenario]}", text), text
    assert "the peer died, stopped, or took another path through the model" in text
