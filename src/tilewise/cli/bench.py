"""`tilewise bench`: measure on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tilewise.bench.layers import CASES, Row, measure
from tilewise.cli.bench_io import io
from tilewise.cli.naming import InputError
from tilewise.testing.ranks import Pool

bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
bench_app.command()(io)


@bench_app.callback()
def _root() -> None:
    """Measure on this machine."""


@bench_app.command()
def layers(
    ranks: Annotated[int, typer.Option(min=1, help="local ranks to start")] = 2,
    layers: Annotated[str, typer.Option(help="names joined by commas; all by default")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="rounds of all measurements in turn")] = 7,
    backend: Annotated[str, typer.Option(help="torch.distributed backend")] = "gloo",
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Time convolutions of the papers on one rank and split, forward and backward."""
    known = {case.name: case for case in CASES}
    wanted = [name for name in layers.split(",") if name] or list(known)
    for name in wanted:
        if name not in known:
            raise InputError(f"--layers: {name!r} is not one of {', '.join(known)}")
    work = [(known[name], letter) for name in wanted for letter in known[name].degrees]
    rows: list[Row] = []
    pool = Pool(ranks, backend=backend, timeout=600.0)
    try:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("layers", total=len(work))
            for case, letter in work:
                progress.update(task, description=f"{case.name} {letter}{ranks}")
                members = tuple(range(ranks))
                rows.append(pool.run(members, measure, (case, letter, rounds), 600.0)[0])
                progress.advance(task)
    finally:
        pool.close()
    if json_:
        print(json.dumps({"rows": [row.as_dict() for row in rows]}))
    else:
        _show(rows)


def _show(rows: list[Row]) -> None:
    table = Table(title="forward and backward, one thread a rank, milliseconds")
    for name in ("layer", "split", "one rank", "own share", "split run", "efficiency", "speed-up"):
        table.add_column(name, justify="left" if name in ("layer", "split") else "right")
    for row in rows:
        table.add_row(
            row.layer,
            row.degrees,
            *(f"{1e3 * value:.1f}" for value in (row.serial_s, row.local_s, row.split_s)),
            f"{row.efficiency:.2f}",
            f"{row.speedup:.2f}",
        )
    console = Console()
    console.print(table)
    spread = max(row.serial_spread for row in rows)
    console.print(
        f"efficiency = own share / split run; spread of the one-rank times up to {spread:.0%}"
    )
