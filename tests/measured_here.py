"""Rates as if measured on this machine, so that tests of auto plans only measure layers."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from scripts import finish
from tilewise import Mesh
from tilewise.auto import calls, finals, plan
from tilewise.auto.calibrate import CONDITIONS, conditions
from tilewise.cli.crew import Crew
from tilewise.comm.pool import Pool
from tilewise.planner.machine import Machine, load_machine, local_path

until_the_end = ExitStack()


def rates_here(devices: int) -> Machine:
    """Return a preset that says it was measured here."""
    sources = {CONDITIONS: conditions(f"0×{devices}")}
    update = {"name": "local", "sources": sources, "devices_per_node": devices}
    return load_machine("lassen").model_copy(update=update)


def keep_rates(folder: Path, *devices: int) -> None:
    """Put rates into a cache folder."""
    with mock.patch.dict(os.environ, {"TILEWISE_CACHE": str(folder)}):
        for count in devices:
            local_path(count).write_text(rates_here(count).to_json())


@contextmanager
def measuring_briefly(folder: str) -> Iterator[None]:
    """Keep in a folder what is measured: calls and steps few times, however long they take."""
    with (
        mock.patch.dict(os.environ, {"TILEWISE_CACHE": folder}),
        mock.patch.multiple(calls, BLOCKS=1, BLOCK_S=0.0),
        mock.patch.object(finals, "STEPS", 1),
        mock.patch.object(plan, "ROUNDS", (2, 2, 2)),
    ):
        yield


def tilewise_here(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *arguments: str,
) -> Any:
    """Run a command in this process with that cache folder, its ranks measuring briefly.

    Returns what it printed as JSON.
    """
    start = Crew.start

    def start_quick(crew: Crew) -> Pool:
        pool = start(crew)
        pool.run(tuple(range(crew.size)), _measure_briefly, (str(folder),), 60.0)
        return pool

    monkeypatch.setattr(Crew, "start", start_quick)
    monkeypatch.setenv("TILEWISE_CACHE", str(folder))
    code = finish(shlex.join(["tilewise", *arguments, "--json"]), monkeypatch)
    shown, said = capfd.readouterr()
    assert code == 0, said
    return json.loads(shown)


def _measure_briefly(mesh: Mesh, folder: str) -> None:
    """Be a rank that measures briefly until it ends."""
    until_the_end.enter_context(measuring_briefly(folder))
