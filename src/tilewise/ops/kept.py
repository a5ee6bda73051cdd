"""What was measured on this machine, kept on disk for the next run.

Files lie in `$TILEWISE_CACHE`, or `tilewise` in the user's cache folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def folder() -> Path:
    """Return where measurements are kept on this machine."""
    return Path(
        os.environ.get("TILEWISE_CACHE")
        or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tilewise"
        )
    )


@cache
def machine_name() -> str:
    """Return what kind of processor this is."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@cache
def own_version() -> str:
    """Return the version of tilewise; it may run from a folder that nobody installed."""
    try:
        return version("tilewise")
    except PackageNotFoundError:
        return "not installed"


def load(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing where it cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def store(path: Path, entries: Mapping[str, Any]) -> None:
    """Add to a file, as a whole or not at all; a file that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks that store at the same time wait in turn
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump(load(path) | dict(entries), file)
            os.replace(file.name, path)
    except OSError:
        return
