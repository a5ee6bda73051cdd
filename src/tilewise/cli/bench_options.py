"""What the benchmarks' commands have in common."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from tilewise.bench.layers import CASES, LayerCase
from tilewise.cli.naming import InputError

Ranks = Annotated[int, typer.Option(min=1, help="local ranks to start")]
Rounds = Annotated[int, typer.Option(min=1, help="rounds of all measurements in turn")]
Backend = Annotated[str, typer.Option(help="gloo, mpi or nccl")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        left = name in ("layer", "split", "")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    return table


def in_ms(*seconds: float) -> tuple[str, ...]:
    return tuple(f"{1e3 * value:.1f}" for value in seconds)


def find_case(name: str) -> LayerCase:
    """Return the layer of a name."""
    known = {case.name: case for case in CASES}
    if name not in known:
        raise InputError(f"layer {name!r} is not one of {', '.join(known)}; a model needs --input")
    return known[name]
