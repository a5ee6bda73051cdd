"""`tilewise data`: look at a set, check it, make one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tilewise.cli.data_make import make
from tilewise.cli.naming import InputError, parse_plan
from tilewise.data import open_source
from tilewise.data.amplification import size_text
from tilewise.data.arguments import AMPLIFIED
from tilewise.data.check import Finding, check_source, notes, open_for_check
from tilewise.data.inspection import FieldFacts, ReadCost, field_facts, read_plan
from tilewise.errors import DataError
from tilewise.layout import Degrees
from tilewise.plan import Plan

data_app = typer.Typer(help="Look at a data set, check it, make one.", no_args_is_help=True)
data_app.command()(make)

PathArgument = Annotated[Path, typer.Argument(help="a file, a folder of files or a Zarr store")]
KeyOption = Annotated[list[str] | None, typer.Option(help="a field to read; repeats")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]


@data_app.command()
def inspect(
    path: PathArgument,
    plan: Annotated[
        str | None, typer.Option(help="degrees such as 'd2 h2', or a plan file: its first layer's")
    ] = None,
    key: KeyOption = None,
    json_: JsonOption = False,
) -> None:
    """Show shapes, dtypes, chunks and compression, and what a plan would cost to read."""
    source = open_source(path, key)
    facts = field_facts(source)
    degrees = None if plan is None else _first_degrees(plan)
    costs = [] if degrees is None else read_plan(source, degrees)
    total = sum(one.sample_bytes for one in facts) * len(source)
    if json_:
        found: dict[str, Any] = {
            "path": str(path),
            "samples": len(source),
            "bytes": total,
            "fields": [asdict(one) for one in facts],
        }
        if degrees is not None:
            found |= {"plan": str(degrees), "reads": [asdict(cost) for cost in costs]}
        print(json.dumps(found))
        return
    console = Console()
    console.print(_facts_table(facts, f"{path}: {len(source)} samples, {size_text(total)}"))
    if degrees is not None:
        console.print(_costs_table(costs, f"read by '{degrees}' on {degrees.product} ranks"))
        for cost in costs:
            if cost.amplification > AMPLIFIED:
                console.print(escape(_advice(cost, degrees)), soft_wrap=True)


def _first_degrees(plan: str) -> Degrees:
    """Return the degrees that a plan gives the network's input: those of its first layer."""
    parsed = parse_plan(plan)
    if isinstance(parsed, str):
        return Degrees.parse(parsed)
    layers: Mapping[str, str | Degrees] = parsed.layers if isinstance(parsed, Plan) else parsed
    if not layers:
        raise InputError(f"--plan: {plan} names no layer")
    return Degrees.parse(next(iter(layers.values())))


def _facts_table(facts: list[FieldFacts], title: str) -> Table:
    table = Table(title=title)
    for column in ("field", "a sample", "dtype", "bytes", "chunks", "compression"):
        table.add_column(column)
    for one in facts:
        table.add_row(
            one.name,
            _extents(one.shape) or "one number",
            one.dtype,
            size_text(one.sample_bytes),
            "none" if one.chunks is None else _extents(one.chunks),
            one.compression,
        )
    return table


def _costs_table(costs: list[ReadCost], title: str) -> Table:
    table = Table(title=title)
    for column in ("field", "largest slab", "bytes a rank", "amplification", "worst rank"):
        table.add_column(column)
    for cost in costs:
        style = "[red]" if cost.amplification > AMPLIFIED else ""
        table.add_row(
            cost.name,
            _extents(cost.slab) or "one number",
            size_text(cost.slab_bytes),
            f"{style}{cost.amplification:.2f}",
            f"{cost.worst:.2f}",
        )
    return table


def _advice(cost: ReadCost, degrees: Degrees) -> str:
    text = f"{cost.name}: '{degrees}' reads {cost.amplification:.1f} times the bytes of its slabs"
    if cost.chunks is None or cost.with_chunks is None:
        return f"{text}; a plan that cuts fewer dims reads less"
    text += f"; chunks of {_extents(cost.chunks)} would fit"
    if cost.with_chunks > 1:
        text += f" best ({cost.with_chunks:.2f} times)"
    return f"{text}, or a plan that cuts fewer dims"


def _extents(extents: tuple[int, ...]) -> str:
    return "×".join(map(str, extents))


@data_app.command()
def check(
    path: PathArgument,
    key: KeyOption = None,
    finite: Annotated[bool, typer.Option(help="whether values must be finite")] = True,
    json_: JsonOption = False,
) -> None:
    """Read a whole set and list every bad file; the exit code is 1 if there is any."""
    start = time.monotonic()
    if not path.exists():
        raise InputError(f"data: {path}: no such file or folder")
    samples, found, remarks = _check(path, key, finite)
    if json_:
        bad = [asdict(one) for one in found]
        seconds = round(time.monotonic() - start, 3)
        print(json.dumps({"ok": not bad, "path": str(path), "samples": samples, "bad": bad,
                          "notes": remarks, "seconds": seconds}))  # fmt: skip
    else:
        console = Console()
        for one in found:
            console.print(f"[red]bad[/] sample {one.sample}: {escape(one.error)}", soft_wrap=True)
        for note in remarks:
            console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
        spoiled = len({one.sample for one in found})
        verdict = f"[red]{spoiled} bad[/]" if found else "[green]all good[/]"
        if remarks and not found:
            verdict = "[yellow]nothing bad, but see the notes above[/]"
        console.print(f"{escape(str(path))}: {samples} samples, {verdict}", soft_wrap=True)
    sys.exit(1 if found else 0)


def _check(
    path: Path, keys: list[str] | None, finite: bool
) -> tuple[int, list[Finding], list[str]]:
    """Return the number of samples, what is bad, and what may be."""
    try:
        source = open_for_check(path, keys)
    except DataError as error:
        return 0, [Finding(0, str(error))], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"checking {path.name}", total=len(source))
        found = []
        for one in check_source(
            source, finite=finite, progress=lambda done: progress.update(bar, completed=done)
        ):
            found.append(one)
            progress.update(bar, description=f"checking {path.name}, {len(found)} bad")
    return len(source), found, notes(source)
