"""`tilewise train`: from a recipe to a trained model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tilewise.cli.crew import Crew
from tilewise.cli.exits import STOPPED_CODE
from tilewise.cli.naming import parse_plan
from tilewise.cli.train_show import Show, show_check
from tilewise.errors import TilewiseError
from tilewise.layout import Degrees
from tilewise.plan import Plan
from tilewise.plan.given import AUTO, is_file, whole_degrees
from tilewise.planner.solve import InfeasibleError
from tilewise.train.check import check as check_recipe
from tilewise.train.inputs import make_missing
from tilewise.train.journal import METRICS
from tilewise.train.lock import RunLock
from tilewise.train.loop import train as train_on_rank
from tilewise.train.recipe import Recipe, read_recipe, shipped
from tilewise.train.resume import CHECKPOINTS, LATEST


def train(
    recipe: Annotated[str, typer.Argument(help=f"a TOML file, or {', '.join(shipped())}")],
    ranks: Annotated[int, typer.Option(min=0, help="local ranks; 0 is as the plan needs")] = 0,
    backend: Annotated[str, typer.Option(help="gloo, mpi or nccl")] = "gloo",
    plan: Annotated[
        str | None, typer.Option(help="'n2 h2', 'conv*=h2,fc=f2', a plan file, auto")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="change the recipe: section.key=value; repeats"),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="latest, or the folder of a checkpoint or of a run")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run; else runs/RECIPE")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="write a trace of some steps for each rank")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="validate model, data, plan and memory; do not train")
    ] = False,
    timeout: Annotated[float, typer.Option(help="seconds to wait for a silent rank")] = 300.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="how often local ranks that fail are started again")
    ] = 0,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Train as RECIPE says, on local ranks or on those of a launcher."""
    found = read_recipe(recipe, set_ or ())
    if plan is not None:
        found = found.model_copy(update={"plan": plan_text(plan)})
    if check:
        _check(found, ranks or found.ranks or ranks_of(found), json_)
        return
    folder = out or Path("runs") / Path(recipe).stem
    crew = Crew(ranks or found.ranks or ranks_of(found), backend=backend, timeout=timeout)
    console = Console(stderr=True, quiet=json_)
    with claimed(crew, folder, resume), Show(console) as show, crew:
        prepare_data(found, crew, show)
        if max_restarts and crew.mesh is not None:
            show.say("--max-restarts is for local ranks; a launcher starts its own again")

        def arguments(attempt: int) -> tuple[Any, ...]:
            saved = attempt and any((folder / CHECKPOINTS).glob("step-*"))
            start = LATEST if saved else resume
            return found.as_dict(), {"out": str(folder), "resume": start, "profile": profile}

        results = crew.follow(
            train_on_rank, arguments,
            report=show.event, say=show.say, folder=folder, max_restarts=max_restarts,
        )  # fmt: skip
    summary = {**results[0], "peak_bytes": [one["peak_bytes"] for one in results]}
    summary |= {"ranks": crew.size, "out": str(folder)}
    if crew.first:
        text = json.dumps(summary, indent=1)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    if json_:
        print(json.dumps(summary))
    else:
        show.summary(summary)
    if summary["preempted"]:
        show.say(f"stopped and saved at step {summary['steps']}; --resume latest goes on")
        raise typer.Exit(STOPPED_CODE)


def _check(recipe: Recipe, ranks: int, json_: bool) -> None:
    """Show what a recipe comes to; exit with 1 if it does not fit the memory."""
    try:
        found = check_recipe(recipe, ranks)
    except InfeasibleError as error:
        print(f"tilewise: {error}", file=sys.stderr)
        sys.exit(1)
    if json_:
        print(json.dumps({**asdict(found), "fits": found.fits, "ranks": ranks}))
    else:
        show_check(found, recipe, ranks)
    sys.exit(0 if found.fits else 1)


@contextmanager
def claimed(crew: Crew, folder: Path, resume: str | None) -> Iterator[None]:
    """Hold the folder of a run, on one process for all; a folder that is taken is an error."""
    with ExitStack() as held:
        problem = None
        if crew.first:
            try:
                held.enter_context(RunLock(folder))
                if resume is None and not crew.attempt and (folder / METRICS).exists():
                    problem = (
                        f"{folder} holds a run; say --resume latest to go on with it, or --out for "
                        "another folder"
                    )
                if resume not in (None, LATEST) and not Path(str(resume)).is_dir():
                    problem = (
                        f"--resume: there is no folder {resume}; say latest, or name the folder of "
                        "a run or of a checkpoint"
                    )
            except TilewiseError as error:
                problem = str(error)
        crew.meet("train", error=problem)
        yield


def plan_text(text: str) -> str | dict[str, str]:
    """Read `--plan` into what a recipe's plan may be."""
    parsed = parse_plan(text)
    return text if isinstance(parsed, Plan) else parsed


def ranks_of(recipe: Recipe) -> int:
    """Return how many ranks the plan needs; for `auto`, as many as there are cores."""
    if recipe.plan == AUTO:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if isinstance(recipe.plan, str) and is_file(recipe.plan):
        degrees: list[Any] = list(Plan.load(recipe.plan).layers.values())
    elif isinstance(recipe.plan, str):
        degrees = [whole_degrees(recipe.plan)]
    else:
        degrees = [Degrees.parse(text) for text in recipe.plan.values()]
    return max((one.product for one in degrees), default=1)


def prepare_data(recipe: Recipe, crew: Crew, show: Show) -> None:
    """Make the recipe's set if there is none, on one process only."""
    make = recipe.data.make
    if make is None:
        return

    def missing(tick: Callable[[], None]) -> None:
        def made(count: int) -> None:
            show.made(count)
            tick()

        if not Path(recipe.data.path).exists():
            show.making(make.kind, make.count)
            make_missing(recipe.data, made)

    crew.first_alone("data", missing)
