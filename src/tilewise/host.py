"""What the machine that this process runs on has."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/memory.max")
STATM = Path("/proc/self/statm")


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container that this process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if CGROUP.is_file():
        text = CGROUP.read_text().strip()
        total = min(total, int(text)) if text.isdigit() else total
    return total


def resident_bytes() -> int:
    """Return the memory that this process holds; where that is not known, the most it ever did."""
    if STATM.is_file():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
