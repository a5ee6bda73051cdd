"""`tilewise plan`: the fastest plan of a model on a machine, and why."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

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
    parse_shape,
)
from tilewise.cli.plan_extras import check_layers, extras, plain
from tilewise.cli.plan_others import (
    show_alternatives,
    show_comparison,
    show_difference,
    show_frontier,
    show_left_out,
    show_sensitivity,
)
from tilewise.cli.plan_tables import explain_local, show_plan
from tilewise.errors import PlanError
from tilewise.graph import Graph, capture
from tilewise.graph.parallel import check_names
from tilewise.plan import Plan
from tilewise.plan.plan import DETAILS
from tilewise.planner.details import details
from tilewise.planner.search import Found, search
from tilewise.planner.solve import InfeasibleError


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="file.py:callable, package.module:callable, or a name such as resnet50"
        ),
    ],
    input: Annotated[list[str], typer.Option(help="global shape, such as 64x3x224x224; repeats")],
    devices: Annotated[int, typer.Option(min=1, help="devices to plan for")],
    machine: Annotated[str, typer.Option(help="a preset such as lassen, local, or a machine file")],
    memory: Annotated[
        str | None, typer.Option(help="what a device may hold, such as 16GiB")
    ] = None,
    loss: Annotated[str, typer.Option(help=", ".join(LOSSES))] = "none",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, rmsprop, adam or adamw")] = "adam",
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16")] = "float32",
    pin: Annotated[
        list[str] | None, typer.Option(help="fix a layer, as 'conv1=n64 d8'; repeats")
    ] = None,
    arg: Annotated[list[str] | None, typer.Option(help="key=value for the model; repeats")] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="layers may be computed again to spare memory")
    ] = False,
    pareto: Annotated[bool, typer.Option("--pareto", help="show time against memory")] = False,
    explain: Annotated[
        list[str] | None,
        typer.Option(
            help="a layer: price all ways to split it, and say why others are left out; repeats"
        ),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="vary each rate of the machine by 10 %")
    ] = False,
    diff: Annotated[Path | None, typer.Option(help="compare with another plan file")] = None,
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="seconds to search, once priced")
    ] = 60.0,
    price_limit: Annotated[
        float, typer.Option(min=0.0, help="seconds to prove prices of other ways, for a report")
    ] = 10.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="a plan file to write")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Find the fastest plan for MODEL on a machine that need not be at hand."""
    shapes = [parse_shape(text) for text in input]
    other = _other_plan(diff)
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"-o: there is no folder {output.parent}; make it first")
    if output is not None and output.is_dir():
        raise InputError(f"-o: {output} is a folder; name a file in it")
    kind, criterion, kept = parse_dtype(dtype), parse_loss(loss), calibration(machine, devices)
    with torch.device("meta"):
        found_model = build_model(model, tuple(arg or ()), kind, 0)
    inputs = tuple(torch.empty(shape, dtype=kind, device="meta") for shape in shapes)
    graph = capture(found_model, inputs, criterion)
    if other is not None:
        _check_other(graph, other, devices)
    check_layers(graph, explain or ())
    console = Console(stderr=True)
    try:
        with console.status(f"planning {model} for {devices} devices"):
            found = search(
                graph,
                devices=devices,
                machine=machine,
                memory=memory,
                optimizer=optimizer,
                dtype=dtype,
                pins=_pins(pin or ()),
                recompute=recompute,
                time_limit=time_limit,
            )
            extra = extras(
                found, pareto=pareto, explain=explain or (), other=other, sensitivity=sensitivity
            )
    except InfeasibleError as error:
        print(f"tilewise: {error}", file=sys.stderr)
        if json_:
            print(json.dumps({"error": str(error)} | error.as_dict()))
        sys.exit(1)
    told = found.as_dict() | plain(extra)
    if kept is not None:
        told["machine_file"] = kept.as_dict()
    began = time.monotonic()
    if output is not None or json_:
        with console.status("proving prices of other ways for a report (--price-limit)"):
            about = {"model": model, "loss": loss, **details(found, time_limit=price_limit)}
    took = time.monotonic() - began
    if output is not None:
        _write(output, found.plan, told | about)
    if json_:
        print(json.dumps(told | {DETAILS: about}))
        return
    if kept is not None:
        explain_local(kept, Console())
    _show(found, extra, Console())
    if output is not None:
        print(f"\nprices of other ways, for a report, were proven in {took:.1f} s (--price-limit)")
        print(f"written to {output}")


def _write(path: Path, plan: Plan, about: dict[str, Any]) -> None:
    """Write a plan file with what a report shows of it."""
    data = json.loads(plan.to_json()) | {DETAILS: about}
    path.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")


def _other_plan(path: Path | None) -> Plan | None:
    if path is None:
        return None
    if not path.is_file():
        raise InputError(f"--diff: there is no file {path}")
    return Plan.load(path)


def _check_other(graph: Graph, other: Plan, devices: int) -> None:
    """Refuse a plan to compare with that is one for another model or number of devices."""
    try:
        check_names(graph, other)
        other.check(devices)
    except PlanError as error:
        raise InputError(f"--diff: {error}") from error


def _pins(texts: Iterable[str]) -> dict[str, str]:
    """Read pins, each a layer or a pattern with degrees; of several patterns the last one wins."""
    found: dict[str, str] = {}
    for text in texts:
        layer, equals, degrees = (part.strip() for part in text.partition("="))
        if not equals or not layer:
            raise InputError(f"--pin: {text!r} must be layer=degrees, such as 'conv1=n64 d8'")
        if found.setdefault(layer, degrees) != degrees:
            raise InputError(f"--pin: {layer} is fixed as {found[layer]!r} and as {degrees!r}")
    return found


def _show(found: Found, extra: dict[str, Any], console: Console) -> None:
    show_plan(found, console)
    show_comparison(found, console)
    if "frontier" in extra:
        show_frontier(extra["frontier"], console)
    for layer, alternatives, left_out in extra.get("explain", ()):
        show_alternatives(layer, alternatives, found, console)
        show_left_out(layer, left_out, console)
    if "sensitivity" in extra:
        show_sensitivity(extra["sensitivity"], console)
    if "diff" in extra:
        show_difference(found, extra["diff"], console)
