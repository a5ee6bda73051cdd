"""`tilewise bench scaling`: a layer or a model on several numbers of ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tilewise.bench.scaling import (
    Point,
    measure_model_point,
    measure_point,
    model_letters,
    with_ratios,
)
from tilewise.cli.bench_options import Backend, Json, Rounds, find_case, in_ms, new_table
from tilewise.cli.crew import Crew
from tilewise.cli.naming import InputError, build_model, parse_shape
from tilewise.comm import Mesh


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
        case = find_case(layer)
        letters, task = case.degrees, (measure_point, case)
    tasks = [(*task, letter, weak, rounds) for letter in letters]
    points = [point for some in scaled(tasks, counts, backend, weak=weak) for point in some]
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


def scaled(
    tasks: Sequence[tuple[Any, ...]], counts: Sequence[int], backend: str, *, weak: bool
) -> list[list[Point]]:
    """Run what measures a point on each number of ranks; returns the points of each task."""
    found: list[list[Point]] = [[] for _ in tasks]
    for count in counts:
        with Crew(count, backend=backend, timeout=3600.0) as crew:
            for points, task in zip(found, tasks):
                points.append(crew.run(*task)[0])
    return [with_ratios(points, weak=weak) for points in found]


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
