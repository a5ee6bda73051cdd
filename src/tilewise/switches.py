"""Switches in the environment that are on unless they say otherwise."""

from __future__ import annotations

import os

from tilewise.errors import InputError

TUNE = "TILEWISE_TUNE"
"""Whether the ways to convolve are measured."""
KEEP_MEMORY = "TILEWISE_KEEP_MEMORY"
"""Whether freed memory is kept for the next tensor."""
SWITCHES = (TUNE, KEEP_MEMORY)

ON = ("on", "1", "yes", "true")
OFF = ("off", "0", "no", "false")


def switched_on(name: str) -> bool:
    """Whether a switch is on, as it is where it is not set or empty."""
    value = os.environ.get(name, "").strip().lower() or ON[0]
    if value not in ON + OFF:
        raise InputError(
            f"{name} (={os.environ[name]!r}) must be one of {', '.join(ON)} or {', '.join(OFF)}"
        )
    return value in ON


def check_switches() -> None:
    """Raise where a switch has a value that it cannot have."""
    for name in SWITCHES:
        switched_on(name)
