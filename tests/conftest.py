import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# What tests measure of this machine under load is not for later runs.
os.environ["TILEWISE_CACHE"] = tempfile.mkdtemp(prefix="tilewise-cache-")
