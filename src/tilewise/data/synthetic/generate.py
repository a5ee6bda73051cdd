"""Make a set: many samples, on many processes, into one folder.

Sample i depends on the seed and on i alone and has its own place on disk, so the processes share
nothing, and the set has the same bytes whatever their number. The folder gets its name when all
is written: an interrupted run leaves no half a set behind.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.synthetic import brain, cosmology, images, mesh, organs
from tilewise.data.synthetic.kind import Kind
from tilewise.data.write import DESCRIPTION, Array, Field, Writer, check_format, describe, lay_out
from tilewise.errors import DataError

KINDS: dict[str, Kind] = {
    "cosmology": cosmology,
    "organs": organs,
    "mesh": mesh,
    "images": images,
    "brain": brain,
}
# Samples are handed out so that each process gets about this many portions.
PORTIONS = 16
# Seconds of work for which no process is started: each imports torch first, for some seconds.
PATIENCE = 6.0
LARGEST_SEED = 2**63 - 1


def kind_named(name: str) -> Kind:
    """Return the kind of that name."""
    if name not in KINDS:
        raise DataError(f"kind {name!r} must be one of {', '.join(KINDS)}")
    return KINDS[name]


def generate(
    kind: str,
    out: str | Path,
    *,
    size: int = 64,
    count: int = 512,
    seed: int = 0,
    format: str = "hdf5",
    files: str = "one",
    workers: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Make a set in the folder `out` and return its description, which is also in set.json.

    `workers` processes make the samples; with 1, this one does. By default there is one a core,
    unless the first sample shows that the others take less time than processes take to start.
    `progress` is called with the number of samples finished since the last call.
    """
    out = Path(out).resolve()
    fields = _check(kind, size=size, count=count, seed=seed, workers=workers)
    _check_folder(out, overwrite=overwrite)
    check_format(format, files)
    facts = KINDS[kind].facts(size, count, seed)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _check_space(partial, fields, count)
        writer = lay_out(partial, fields, count, format=format, files=files)
        task = (kind, size, seed, writer)
        tallies = _run(task, count, workers, progress or (lambda finished: None))
        description = {
            "format": format,
            "files": files,
            "kind": kind,
            "count": count,
            "fields": {
                name: {"shape": list(field.shape), "dtype": field.dtype}
                for name, field in fields.items()
            },
            "seed": seed,
            "size": size,
            "baseline": KINDS[kind].baseline(tallies),
            **facts,
        }
        describe(partial, description)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return description


def set_bytes(fields: dict[str, Field], count: int) -> int:
    """Return how many bytes the samples take."""
    return count * sum(field.nbytes for field in fields.values())


def _check(kind: str, *, size: int, count: int, seed: int, workers: int | None) -> dict[str, Field]:
    smallest = kind_named(kind).SMALLEST
    if size < smallest:
        raise DataError(f"{kind}: size {size} is below {smallest}, the smallest that makes sense")
    if count < 1:
        raise DataError(f"count {count} must be at least 1")
    if workers is not None and workers < 1:
        raise DataError(f"workers {workers} must be at least 1")
    if not 0 <= seed <= LARGEST_SEED:
        raise DataError(f"seed {seed} must be in 0 … 2⁶³ - 1")
    return kind_named(kind).fields(size)


def _check_folder(out: Path, *, overwrite: bool) -> None:
    """Raise unless the folder is new, empty, or a set that may be replaced."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; name a folder to make")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise DataError(f"{out}: is not empty; name another folder, or say overwrite")
    if not (out / DESCRIPTION).is_file():
        raise DataError(f"{out}: has no {DESCRIPTION}, so is no set to overwrite; remove it first")


def _check_space(folder: Path, fields: dict[str, Field], count: int) -> None:
    needed, free = set_bytes(fields, count), shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{folder.parent}: the set takes {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are "
            "free; make fewer or smaller samples"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Task = tuple[str, int, int, Writer]


def _run(task: Task, count: int, workers: int | None, progress: Callable[[int], None]) -> Array:
    """Make all samples and return their tallies in order."""
    tallies: dict[int, Array] = {}
    if workers is None:
        start = time.monotonic()
        tallies.update(make(task, range(1)))
        progress(1)
        left = (time.monotonic() - start) * (count - 1)
        workers = _cores() if left > PATIENCE else 1
    rest = range(len(tallies), count)
    if min(workers, len(rest)) > 1:
        tallies.update(_share_out(task, rest, workers, progress))
    else:
        for index in rest:
            tallies.update(make(task, range(index, index + 1)))
            progress(1)
    return np.stack([tallies[index] for index in range(count)])


def _share_out(
    task: Task, indices: range, workers: int, progress: Callable[[int], None]
) -> dict[int, Array]:
    """Make some samples on processes of their own and return their tallies."""
    tallies: dict[int, Array] = {}
    portions = list(_portions(indices, workers))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(workers, len(portions)), mp_context=context) as pool:
        futures = [pool.submit(make, task, portion) for portion in portions]
        try:
            for future in as_completed(futures):
                made = future.result()
                tallies.update(made)
                progress(len(made))
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died, perhaps for lack of memory; use fewer workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return tallies


def _portions(indices: range, workers: int) -> Iterator[range]:
    step = max(1, len(indices) // (workers * PORTIONS))
    for start in range(0, len(indices), step):
        yield indices[start : start + step]


def make(task: Task, indices: range) -> dict[int, Array]:
    """Make and write some samples; return their tallies."""
    kind, size, seed, writer = task
    tallies = {}
    for index in indices:
        sample = KINDS[kind].sample(size, seed, index)
        writer.write(index, sample)
        tallies[index] = KINDS[kind].tally(sample["y"])
    return tallies
