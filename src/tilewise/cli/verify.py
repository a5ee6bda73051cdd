"""`tilewise verify`: show that a split run equals the run on one device."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Generator
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from tilewise.cli.crew import Crew
from tilewise.cli.naming import InputError, build_model, parse_dtype, parse_plan, parse_shape
from tilewise.comm import Mesh
from tilewise.comm.pool import RanksError
from tilewise.graph import as_plan, capture
from tilewise.graph.lower import plan_program
from tilewise.graph.parallel import check_names
from tilewise.layout import Degrees
from tilewise.ops.draws import Draws
from tilewise.plan.given import AUTO, whole_degrees
from tilewise.testing.verify import LOSSES, TOLERANCE, Result, stage_count, verify_in_stages

KINDS = ("output", "input_grad", "param_grad", "buffers", "loss")
LIMIT = 3600.0


def verify(
    model: Annotated[
        str,
        typer.Argument(
            help="file.py:callable, package.module:callable, or a name such as resnet50"
        ),
    ],
    input: Annotated[list[str], typer.Option(help="global shape, such as 2x3x64x64; repeats")],
    ranks: Annotated[int, typer.Option(min=1, help="local ranks to start")] = 2,
    plan: Annotated[str, typer.Option(help="'n2 h2', 'conv*=h2,fc=f2', a file or auto")] = "n2",
    arg: Annotated[list[str] | None, typer.Option(help="key=value for the model; repeats")] = None,
    loss: Annotated[str, typer.Option(help=" or ".join(LOSSES))] = "mse",
    steps: Annotated[int, typer.Option(min=0, help="steps of SGD with momentum to follow")] = 5,
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16")] = "float64",
    backend: Annotated[str, typer.Option(help="gloo, mpi or nccl")] = "gloo",
    seed: Annotated[int, typer.Option(help="of weights and data")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Train MODEL on one device and split, on the same numbers, and compare everything."""
    start = time.monotonic()
    if loss not in LOSSES:
        raise InputError(f"--loss: {loss!r} must be one of {', '.join(LOSSES)}")
    task = (model, tuple(arg or ()), tuple(map(parse_shape, input)), parse_plan(plan), loss, steps,
            dtype, seed)  # fmt: skip
    crew = Crew(ranks, backend=backend, timeout=LIMIT)  # local ranks start when they are to run
    _dry_run(task, crew.size)
    console = Console(stderr=True, quiet=json_)
    console.print(f"training {model} on one device and on {crew.size} ranks …")
    title, total = "" if json_ else "verify", stage_count(steps)
    with crew:
        try:
            result: Result = crew.run(run, *task, title=title, total=total)[0]
        except RanksError as error:
            raise InputError(f"verify: {error}") from error
    result.seconds = time.monotonic() - start
    if json_:
        print(json.dumps(_as_json(result, model, plan, crew.size)))
    else:
        _show(result, model, plan, crew.size)
    sys.exit(0 if result.ok else 1)


def _dry_run(task: tuple[Any, ...], ranks: int) -> None:
    """Find bad input before any rank is started."""
    name, arguments, shapes, plan, _, _, dtype, seed = task
    if plan == AUTO:
        return
    if isinstance(plan, str):
        whole_degrees(plan)
    for degrees in plan.values() if isinstance(plan, dict) else ():
        Degrees.parse(degrees)
    model = build_model(name, arguments, _dtype(dtype), seed)
    inputs = [torch.empty(shape, dtype=_dtype(dtype), device="meta") for shape in shapes]
    graph = capture(model, tuple(inputs))
    checked = as_plan(graph, plan)
    checked.check(ranks)
    check_names(graph, checked)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers without a rule, which the result names
        for program in (graph.training, graph.evaluation):
            plan_program(program, checked, ranks=ranks, rank=0, draws=Draws(seed))


def run(
    mesh: Mesh,
    name: str,
    arguments: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    plan: Any,
    loss: str,
    steps: int,
    dtype: str,
    seed: int,
) -> Generator[str, None, Result]:
    """Verify on one rank of the mesh; yields what comes next."""
    warnings.simplefilter("ignore")
    found = build_model(name, arguments, _dtype(dtype), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(_dtype(dtype))
        for shape in shapes
    ]
    return (yield from verify_in_stages(mesh, found, inputs, plan, loss=loss, steps=steps))


def _dtype(text: str) -> torch.dtype:
    """Read a dtype for which it is known how far apart results may be."""
    return parse_dtype(text, known=[str(one).removeprefix("torch.") for one in TOLERANCE])


def _as_json(result: Result, model: str, plan: str, ranks: int) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "model": model,
        "plan": plan,
        "ranks": ranks,
        "max_error": {kind: result.max_error.get(kind, 0.0) for kind in KINDS},
        "worst_layer": result.worst_layer,
        "fallbacks": list(result.fallbacks),
        "seconds": round(result.seconds, 3),
    }


def _show(result: Result, model: str, plan: str, ranks: int) -> None:
    console = Console()
    table = Table(title=f"{model} split '{plan}' on {ranks} ranks against one device")
    table.add_column("compared")
    table.add_column("largest error", justify="right")
    table.add_column("limit", justify="right")
    for kind in KINDS:
        value = result.max_error.get(kind)
        shown = "none to compare" if value is None else f"{value:.1e}"
        style = "red" if value is not None and value > result.tolerance else ""
        table.add_row(kind.replace("_", " "), f"[{style}]{shown}[/]" if style else shown,
                      f"{result.tolerance:.0e}")  # fmt: skip
    console.print(table)
    console.print(f"largest of all: {result.worst:.1e} at {result.worst_layer}")
    for note in result.notes:
        console.print(f"reduced: {note}")
    for name in result.fallbacks:
        console.print(f"undivided: {name} has no rule and runs whole on every rank")
    if result.drift is not None and result.drift > result.tolerance:
        console.print(
            f"one device's own losses move by {result.drift:.1e} when its input changes in the "
            "last bit: these steps magnify rounding; follow fewer --steps, or a larger --input"
        )
    verdict = "[green]equal[/]" if result.ok else "[red]not equal[/]"
    console.print(f"{verdict} within {result.tolerance:.0e}, {result.seconds:.1f} s")
