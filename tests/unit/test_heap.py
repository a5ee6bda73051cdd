"""Freed memory is kept for the next tensor, and given back where that is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PAGES = (96 << 20) // os.sysconf("SC_PAGE_SIZE")
PROGRAM = """
import resource, torch
from tilewise import Mesh
from tilewise.comm.heap import freed_returned

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(96 << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

Mesh()
found = [faults(), faults(), faults()]
with freed_returned():
    found += [faults(), faults()]
print(*found, faults(), faults())
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="glibc's malloc only")
@pytest.mark.parametrize("switch", ["on", "off"])
def test_a_tensor_takes_the_pages_of_the_one_before(switch: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TILEWISE_KEEP_MEMORY": switch},
        capture_output=True,
        text=True,
        check=True,
    )
    fresh = [int(count) > PAGES / 2 for count in told.stdout.split()]
    kept = switch == "off"
    assert fresh == [True, kept, kept, True, True, True, kept], told.stdout
