"""`tilewise bench plans`: how good is the plan that the planner finds?"""

from __future__ import annotations

import json
import warnings
from collections.abc import Generator
from typing import Annotated

import torch
import typer
from rich.console import Console

from tilewise.bench.plans import PlanRows, measure_plans
from tilewise.cli.bench_options import Backend, Json, Rounds, in_ms, new_table
from tilewise.cli.crew import Crew
from tilewise.cli.naming import build_model, parse_shape
from tilewise.comm import Mesh
from tilewise.graph import capture


def plans(
    model: Annotated[
        str,
        typer.Argument(
            help="file.py:callable, package.module:callable, or a name such as resnet50"
        ),
    ],
    input: Annotated[list[str], typer.Option(help="global shape, such as 2x3x64x64; repeats")],
    ranks: Annotated[int, typer.Option(min=2, help="local ranks to start")] = 2,
    arg: Annotated[list[str] | None, typer.Option(help="key=value for the model; repeats")] = None,
    rounds: Rounds = 6,
    backend: Backend = "gloo",
    json_: Json = False,
) -> None:
    """Run the auto plan, all uniform ones and some mixes, and compare with the predictions."""
    shapes = tuple(map(parse_shape, input))
    with torch.device("meta"):  # what does not run is said before ranks are started
        built = build_model(model, tuple(arg or ()), torch.float32, 0)
    capture(built, tuple(torch.empty(shape, device="meta") for shape in shapes))
    task = (model, tuple(arg or ()), shapes, rounds)
    with Crew(ranks, backend=backend, timeout=7200.0) as crew:
        found: PlanRows = crew.run(run_plans, *task, title=f"plans of {model}")[0]
        ranks = crew.size
    if json_:
        print(json.dumps({"model": model, "ranks": ranks} | found.as_dict()))
        return
    table = new_table(f"one training step of {model}, {ranks} ranks, milliseconds",
                      "", "predicted", "measured", "error")  # fmt: skip
    rows = sorted(found.rows, key=lambda row: row.measured_s)
    for row in rows:
        table.add_row(row.plan, *in_ms(row.predicted_s, row.measured_s), f"{row.error:.0%}")
    console = Console()
    console.print(table)
    for row in rows:
        if row.degrees:
            console.print(f"{row.plan}: {row.degrees}", style="dim", highlight=False)
    console.print(
        f"regret {found.regret:.3f} (auto over the fastest), rank correlation "
        f"{found.rank_correlation:.2f}, median error {found.median_error:.0%}, of mixes "
        f"{found.mixes_error:.0%}; steps take {found.drift:.2f} times what they took when the plan "
        "was made, which the predictions allow for: the median error without that is "
        f"{found.error_without_drift:.0%}",
    )


def run_plans(
    mesh: Mesh,
    name: str,
    arguments: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    rounds: int,
) -> Generator[str, None, PlanRows]:
    """Build the model and its inputs on one rank and measure."""
    warnings.simplefilter("ignore")
    found = build_model(name, arguments, torch.float32, 0)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    return (yield from measure_plans(mesh, found, inputs, rounds))
