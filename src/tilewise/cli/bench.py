"""`tilewise bench`: measure on this machine."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tilewise.bench.layers import CASES, LayerCase, Row, measure_layers
from tilewise.bench.messages import PRIMITIVES, SIZES, Primitive, measure_messages
from tilewise.bench.scaling import (
    Point,
    measure_model_point,
    measure_point,
    model_letters,
    with_ratios,
)
from tilewise.cli.bench_io import io
from tilewise.cli.bench_model import model
from tilewise.cli.bench_options import Backend, Json, Ranks, Rounds, in_ms, new_table
from tilewise.cli.bench_page import page
from tilewise.cli.bench_plans import plans
from tilewise.cli.crew import Crew
from tilewise.cli.naming import InputError, build_model, parse_shape
from tilewise.comm import Mesh

bench_app = typer.Typer(
    help="Time layers, messages, models, plans and input on this machine.", no_args_is_help=True
)
bench_app.command()(io)
bench_app.command()(model)
bench_app.command()(page)
bench_app.command()(plans)


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
    cases = [_case(name) for name in layers.split(",") if name] or list(CASES)
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


def _case(name: str) -> LayerCase:
    known = {case.name: case for case in CASES}
    if name not in known:
        raise InputError(f"layer {name!r} is not one of {', '.join(known)}; a model needs --input")
    return known[name]


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


@bench_app.command()
def scaling(
    layer: Annotated[str, typer.Argument(help="a layer that `bench layers` knows, or a model")],
    ranks: Annotated[str, typer.Option(help="numbers of ranks joined by commas")] = "1,2",
    input: Annotated[
        str, typer.Option(help="global shape of a model's input, such as 2x3x64x64")
    ] = "",
    arg: Annotated[list[str] | None, typer.Option(help="key=value for the model; repeats")] = None,
    weak: Annotated[
        bool, typer.Option("--weak/--strong", help="let the work grow with the ranks, or not")
    ] = False,
    rounds: Rounds = 5,
    backend: Backend = "gloo",
    json_: Json = False,
) -> None:
    """Time a layer or a model on several numbers of ranks, under each of its splits."""
    try:
        counts = sorted(int(part) for part in ranks.split(","))
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise InputError(f"--ranks: {ranks!r} must be numbers joined by commas, such as 1,2,4")
    letters: Sequence[str]
    task: tuple[Any, ...]
    if input:
        shape, arguments = parse_shape(input), tuple(arg or ())
        build_model(layer, arguments, torch.float32, 0)
        letters = model_letters(shape, counts[-1], weak=weak)
        task = (run_model_point, layer, arguments, shape)
    else:
        case = _case(layer)
        letters, task = case.degrees, (measure_point, case)
    points: list[Point] = []
    for letter in letters:
        measured = []
        for count in counts:
            with Crew(count, backend=backend, timeout=3600.0) as crew:
                measured.append(crew.run(*task, letter, weak, rounds)[0])
        points += with_ratios(measured, weak=weak)
    if json_:
        kind = "weak" if weak else "strong"
        print(json.dumps({"scaling": kind, "points": [point.as_dict() for point in points]}))
        return
    table = new_table(f"{'weak' if weak else 'strong'} scaling of {layer}, milliseconds",
                   "split", "ranks", "forward", "backward", "forward ×",
                   "backward ×")  # fmt: skip
    for point in points:
        ratios = (f"{ratio:.2f}" for ratio in (point.forward_ratio, point.backward_ratio))
        times = in_ms(point.forward_s, point.backward_s)
        table.add_row(point.degrees, str(point.ranks), *times, *ratios)
    Console().print(table)


def run_model_point(
    mesh: Mesh,
    name: str,
    arguments: tuple[str, ...],
    shape: tuple[int, ...],
    letter: str,
    weak: bool,
    rounds: int,
) -> Point:
    """Build the model on one rank and measure."""
    warnings.simplefilter("ignore")
    model = build_model(name, arguments, torch.float32, 0)
    return measure_model_point(mesh, name, model, shape, letter, weak, rounds)
