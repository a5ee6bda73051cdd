import gc
import os
import pathlib
import sys
import tempfile

import pytest
from hypothesis import settings

# No test depends on how long something takes.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# What tests measure of this machine under load is not for later runs.
os.environ["TILEWISE_CACHE"] = tempfile.mkdtemp(prefix="tilewise-cache-")

# Measuring takes long where more ranks than cores do it; tests/parity/test_tune.py switches it on.
os.environ["TILEWISE_TUNE"] = "off"

# Processes that tests start would compile the package again, each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

LONG = ("test_deep_models.py", "test_models.py", "test_mpi.py")
FIRST = ("e2e", "train", "planner")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of long tests, so that no worker is left with one of them at the end."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        if folder == "parity" and item.path.name in LONG:
            return 0
        return 1 + (FIRST.index(folder) if folder in FIRST else len(FIRST))

    items.sort(key=place)
    gc.collect()
    gc.freeze()  # what was imported and collected stays; looking through it all takes long
