"""Find the browser that the tests drive; install Debian's where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

from playwright.sync_api import Page

Open = Callable[..., Page]
"""Opens a report from disk."""

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = ("apt-get install --yes --no-install-recommends chromium fonts-dejavu-core",)


def find_chromium() -> str:
    """Return the path of a Chromium; raises with what to do if there is none to be had."""
    return _found() or _installed()


def _found() -> str | None:
    given = os.environ.get("TILEWISE_CHROMIUM")
    if given:
        if not os.access(given, os.X_OK):
            raise RuntimeError(f"TILEWISE_CHROMIUM (={given!r}) is not a program")
        return given
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _installed() -> str:
    """Install the browser from Debian's packages."""
    said = []
    for command in ("apt-get update", *INSTALL):
        words = command.split() if os.geteuid() == 0 else ["sudo", "-n", *command.split()]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            said.append(f"{command}: {error}")
        else:
            said.append(f"{command}: exit code {done.returncode}\n{done.stderr[-1000:]}")
    path = _found()
    if path is None:
        raise RuntimeError(
            "the report's tests need Chromium and could not install it; run 'apt-get install "
            "chromium', or set TILEWISE_CHROMIUM to one\n" + "\n".join(said)
        )
    return path
