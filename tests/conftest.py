import os
import pathlib
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# What tests measure of this machine under load is not for later runs.
os.environ["TILEWISE_CACHE"] = tempfile.mkdtemp(prefix="tilewise-cache-")

FIRST = {"e2e": 0, "train": 1, "planner": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of long tests, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: FIRST.get(item.path.parent.name, len(FIRST)))
