"""Rates as if measured on this machine, so that tests of auto plans only measure layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tilewise.auto.calibrate import CONDITIONS, conditions
from tilewise.planner.machine import Machine, load_machine, local_path


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


def tilewise_here(folder: Path, *arguments: str) -> Any:
    """Run a command with that cache folder; returns what it printed as JSON."""
    result = subprocess.run(
        [sys.executable, "-m", "tilewise", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"TILEWISE_CACHE": str(folder)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
