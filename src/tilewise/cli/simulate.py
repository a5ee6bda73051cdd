"""`tilewise simulate`: run a step of a world that is not there, and see what it does and takes."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Annotated

import torch
import typer
from rich.console import Console

from tilewise.cli.local import calibration
from tilewise.cli.naming import (
    LOSSES,
    InputError,
    build_model,
    parse_dtype,
    parse_loss,
    parse_plan,
    parse_shape,
)
from tilewise.cli.plan_tables import explain_local
from tilewise.cli.simulate_tables import show_layers, show_ranks, show_summary, show_sweep
from tilewise.graph import Graph, as_plan
from tilewise.plan import Plan
from tilewise.plan.given import AUTO
from tilewise.planner.solve import InfeasibleError
from tilewise.simulate import Point, Simulation, Sweep, as_dict
from tilewise.simulate import simulate as run


def simulate(
    model: Annotated[
        str,
        typer.Argument(
            help="file.py:callable, package.module:callable, or a name such as resnet50"
        ),
    ],
    input: Annotated[
        list[str], typer.Option(help="global shape, such as 64x4x512x512x512; repeats")
    ],
    devices: Annotated[
        int | None, typer.Option(min=1, max=4096, help="devices of the world")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="'n2 h2', 'conv*=h2,fc=f2' or a plan file; else the best one")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="a preset such as lassen, local, or a machine file")
    ] = "lassen",
    ranks: Annotated[
        str | None, typer.Option(help="ranks to run, as 0,1,5; else a few with the most to do")
    ] = None,
    strong: Annotated[
        str | None, typer.Option(help="devices, as 64,128,256: the same input on each number")
    ] = None,
    weak: Annotated[
        str | None, typer.Option(help="devices, as 64,128,256: a batch that grows with them")
    ] = None,
    loss: Annotated[str, typer.Option(help=", ".join(LOSSES))] = "none",
    memory: Annotated[
        str | None, typer.Option(help="what a device may hold, such as 16GiB")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, rmsprop, adam or adamw")] = "adam",
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16")] = "float32",
    arg: Annotated[list[str] | None, typer.Option(help="key=value for the model; repeats")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="seconds to search a plan")] = 10.0,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Run the split program of MODEL on ranks of a world that need not be at hand."""
    criterion = parse_loss(loss)
    counts = {"strong": _counts("--strong", strong), "weak": _counts("--weak", weak)}
    given = [count for some in counts.values() for count in some]
    if devices is None and not given:
        raise InputError("--devices: say how many, or --strong or --weak")
    size = max(given) if devices is None else devices
    kind, kept = parse_dtype(dtype), calibration(machine, size)
    with torch.device("meta"):
        built = build_model(model, tuple(arg or ()), kind, 0)
    shapes = tuple(map(parse_shape, input))
    sweep = Sweep(built, shapes, machine, kind, criterion, optimizer, memory, time_limit)
    graph = sweep.captured(shapes)
    console = Console(stderr=True)
    with console.status(f"running {model} on ranks of {size}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = _plan(sweep, graph, plan, size)
        found = run(
            built,
            graph,
            chosen,
            devices=size,
            machine=machine,
            ranks=None if ranks is None else _counts("--ranks", ranks, least=0),
            optimizer=optimizer,
            dtype=kind,
        )
        points = _points(sweep, counts)
    if json_:
        swept = {name: [point.as_dict() for point in some] for name, some in points.items()}
        local = {} if kept is None else {"machine_file": kept.as_dict()}
        print(json.dumps(as_dict(found, model=model) | swept | local))
    else:
        if kept is not None:
            explain_local(kept, Console())
        _show(found, points, model)
    sys.exit(0 if found.agreement.bytes_equal else 1)


def _counts(option: str, text: str | None, least: int = 1) -> tuple[int, ...]:
    """Read numbers joined by commas."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (-1,)
    if any(number < least for number in found):
        raise InputError(f"{option}: {text!r} must be numbers from {least} on, joined by commas")
    return found


def _plan(sweep: Sweep, graph: Graph, plan: str | None, devices: int) -> Plan:
    if plan not in (None, AUTO):
        return as_plan(graph, parse_plan(plan))
    try:
        return sweep.best(graph, devices)
    except InfeasibleError as error:
        print(f"tilewise: {error}", file=sys.stderr)
        sys.exit(1)


def _points(sweep: Sweep, counts: dict[str, tuple[int, ...]]) -> dict[str, list[Point]]:
    found = {}
    if counts["strong"]:
        found["strong"] = list(sweep.strong(counts["strong"]))
    if counts["weak"]:
        found["weak"] = list(sweep.weak(counts["weak"], base=counts["weak"][0]))
    return found


def _show(found: Simulation, points: dict[str, list[Point]], model: str) -> None:
    console = Console()
    show_layers(found, console, model)
    show_ranks(found, console)
    show_summary(found, console)
    for name, some in points.items():
        show_sweep(name, some, console)
