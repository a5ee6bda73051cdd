"""What the machine that this process runs on has."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container that this process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if CGROUP.is_file():
        text = CGROUP.read_text().strip()
        total = min(total, int(text)) if text.isdigit() else total
    return total
