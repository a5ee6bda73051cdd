"""`tilewise bench`: measure on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from tilewise.bench.layers import CASES, Row, measure_layers
from tilewise.bench.messages import PRIMITIVES, SIZES, Primitive, measure_messages
from tilewise.cli.bench_io import io
from tilewise.cli.bench_model import model
from tilewise.cli.bench_options import (
    Backend,
    Json,
    Ranks,
    Rounds,
    find_case,
    in_ms,
    new_table,
)
from tilewise.cli.bench_page import page
from tilewise.cli.bench_plans import plans
from tilewise.cli.bench_scaling import scaling
from tilewise.cli.crew import Crew
from tilewise.cli.fits import warn_of_fits

bench_app = typer.Typer(
    help="Time layers, messages, models, plans and input on this machine.", no_args_is_help=True
)
bench_app.command()(io)
bench_app.command()(model)
bench_app.command()(page)
bench_app.command()(plans)
bench_app.command()(scaling)


@bench_app.callback()
def _root() -> None:
    """Time layers, messages, models, plans and input on this machine."""


@bench_app.command()
def layers(
    ranks: Ranks = 2,
    layers: Annotated[str, typer.Option(help="names joined by commas; all by default")] = "",
    rounds: Rounds = 7,
    backend: Backend = "gloo",
    json_: Json = False,
) -> None:
    """Time convolutions of the papers on one rank and split, forward and backward."""
    cases = [find_case(name) for name in layers.split(",") if name] or list(CASES)
    work = [(case, letter) for case in cases for letter in case.degrees]
    with Crew(ranks, backend=backend) as crew:
        rows: list[Row] = crew.run(measure_layers, work, rounds, title="layers", total=len(work))[0]
    if json_:
        print(json.dumps({"rows": [row.as_dict() for row in rows]}))
        return
    table = new_table("forward and backward, one thread a rank, milliseconds",
                   "layer", "split", "one rank", "own share", "split run", "efficiency",
                   "speed-up")  # fmt: skip
    for row in rows:
        table.add_row(
            row.layer,
            row.degrees,
            *in_ms(row.serial_s, row.local_s, row.split_s),
            f"{row.efficiency:.2f}",
            f"{row.speedup:.2f}",
        )
    spread = max(row.serial_spread for row in rows)
    Console().print(
        table, f"efficiency = own share / split run; spread of the one-rank times {spread:.0%}"
    )


@bench_app.command()
def comm(
    ranks: Annotated[int, typer.Option(min=2, help="local ranks to start")] = 2,
    rounds: Rounds = 5,
    backend: Backend = "gloo",
    json_: Json = False,
) -> None:
    """Time messages of each kind and size, and fit their latency and bandwidth."""
    with Crew(ranks, backend=backend) as crew:
        total = len(PRIMITIVES) * len(SIZES)
        found: list[Primitive] = crew.run(measure_messages, rounds, title=backend, total=total)[0]
    warn_of_fits({primitive.name: primitive.fit_error for primitive in found})
    if json_:
        rows = [primitive.as_dict() for primitive in found]
        print(json.dumps({"backend": backend, "ranks": ranks, "primitives": rows}))
        return
    table = new_table(f"{backend}, {ranks} ranks, microseconds",
                   "bytes", *(primitive.name for primitive in found))  # fmt: skip
    for size in SIZES:
        table.add_row(str(size), *(f"{1e6 * primitive.seconds[size]:.0f}" for primitive in found))
    table.add_row("α (µs)", *(f"{1e6 * primitive.alpha_s:.0f}" for primitive in found))
    rates = [1e-9 / p.beta_s_per_byte if p.beta_s_per_byte else 0.0 for p in found]
    table.add_row("1/β (GB/s)", *(f"{rate:.2f}" for rate in rates))
    table.add_row("error of the fit", *(f"{primitive.fit_error:.0%}" for primitive in found))
    Console().print(table)
