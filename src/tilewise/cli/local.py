"""Say which measurements `--machine local` stands for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tilewise.planner.machine import LOCAL, newest_local

DAY = 24 * 60 * 60


@dataclass(frozen=True)
class Calibration:
    """A kept file of measurements, and when it was written."""

    path: Path
    written: datetime

    def told(self, now: datetime) -> str:
        """Say where it is and how old."""
        seconds = max((now - self.written).total_seconds(), 0.0)
        for unit, length in (("day", DAY), ("hour", 3600), ("minute", 60)):
            if seconds >= length:
                count = int(seconds // length)
                age = f"{count} {unit}{'s' * (count > 1)} ago"
                break
        else:
            age = "just now"
        return f"machine {LOCAL}: {self.path}, measured {age} ({self.written:%Y-%m-%d %H:%M})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "measured": self.written.astimezone().isoformat(timespec="seconds"),
        }


def calibration(machine: str, devices: int) -> Calibration | None:
    """Return the measurements that a machine's name stands for; none but for `local`."""
    if machine != LOCAL:
        return None
    path = newest_local(devices)
    return Calibration(path, datetime.fromtimestamp(path.stat().st_mtime))
