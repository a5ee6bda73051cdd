"""`tilewise bench io`: measure input."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tilewise.bench.input_share import EDGE, batches_needed, measure_training, training_report
from tilewise.bench.io import IoCase, make_set, measure, report
from tilewise.cli.naming import InputError
from tilewise.comm.pool import Pool
from tilewise.data.amplification import size_text

WAYS = {
    "whole": "rank 0 reads whole samples and scatters",
    "slab": "every rank reads its slabs",
    "store": "from memory, every rank its own tiles",
    "store_moved": "from memory, batch cut: tiles change ranks",
}
TIMEOUT = 600.0


def io(
    ranks: Annotated[int, typer.Option(min=2, help="local ranks to start")] = 2,
    gib: Annotated[float, typer.Option(min=0.0, help="size of the set that is made")] = 1.25,
    edge: Annotated[int, typer.Option(min=1, help="edge of a volume of 4 channels")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="global batch")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of all measurements in turn")] = 5,
    steps: Annotated[
        int, typer.Option(min=0, help="training steps in each round; 0 leaves training out")
    ] = 8,
    folder: Annotated[
        Path | None, typer.Option(help="where to keep the sets, and find them again")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Time whole-sample reading, slab reads and the store; and what input costs in training."""
    if batch < ranks:
        raise InputError(f"--batch: {batch} samples cannot be cut into {ranks} parts")
    with _folder(folder) as base:
        one = IoCase(str(base / f"volumes-{edge}"), edge, 1, batch)
        count = max(round(gib * 2**30 / one.sample_bytes), batch)
        case = IoCase(f"{one.folder}-{count}", edge, count, batch)
        number = batch * batches_needed(steps)
        small = IoCase(str(base / f"volumes-{EDGE}-{number}"), EDGE, number, batch)
        pool = Pool(ranks, timeout=TIMEOUT)
        try:
            run = _Runner(pool)
            run.make(case)
            epochs = 2 + rounds * len(WAYS)
            found = report(case, run("reading", epochs, measure, case, rounds))
            if steps:
                run.make(small)
                times = run("training", 3 * rounds, measure_training, small, rounds, steps)[0]
                found["training"] = training_report(times)
        finally:
            pool.close()
    if json_:
        print(json.dumps(found))
    else:
        _show(found)


class _Runner:
    """Runs measurements on all ranks of a pool, with a bar that shows how far they are."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __call__(
        self, title: str, total: int, function: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            bar = progress.add_task(title, total=total)
            return self.pool.run(
                tuple(range(self.pool.size)),
                function,
                arguments,
                TIMEOUT,
                lambda done: progress.advance(bar, done),
            )

    def make(self, case: IoCase) -> None:
        """Make a set unless it is there."""
        if not case.exists:
            shutil.rmtree(case.folder, ignore_errors=True)
            Path(case.folder).mkdir(parents=True)
            title = f"making {size_text(case.count * case.sample_bytes)}"
            self(title, len(range(0, case.count, self.pool.size)), make_set, case)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Lend the folder given, or one that is gone afterwards."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="tilewise-io-") as found:
        yield Path(found)


def _show(found: dict[str, Any]) -> None:
    table = Table(
        title=f"{found['samples']} samples of {size_text(found['sample_bytes'])}, "
        f"{found['ranks']} ranks, files out of the page cache"
    )
    for column in ("input", "samples/s", "spread", "bytes read on each rank"):
        table.add_column(column, justify="left" if column == "input" else "right")
    for name, text in WAYS.items():
        read = found["bytes_read_per_rank"][name]
        table.add_row(
            text,
            f"{found[f'{name}_samples_s']:.1f}",
            f"{found[f'{name}_spread']:.0%}",
            ", ".join(map(size_text, read)),
        )
    console = Console()
    console.print(table)
    console.print(
        f"slabs / whole samples {found['slab_over_whole']:.2f}, store / slabs "
        f"{found['store_over_slab']:.2f} ({found['store_moved_over_slab']:.2f} where tiles change "
        f"ranks); load of the machine {found['load']:.1f}",
        highlight=False,
    )
    if "training" in found:
        steps = found["training"]
        console.print(
            f"a step of CosmoFlow-{EDGE}³ takes {1e3 * steps['step_s']['memory']:.0f} ms; input "
            f"from files costs {steps['input_share']:.1%} of it, from the store "
            f"{steps['input_share_store']:.1%} (of the cores' time {steps['input_cpu_share']:.1%} "
            f"and {steps['input_cpu_share_store']:.1%})",
            highlight=False,
        )
