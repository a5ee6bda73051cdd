"""`tilewise predict`: run a trained model on a set, split."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tilewise.cli.crew import Crew
from tilewise.cli.naming import InputError, named_checkpoint
from tilewise.cli.train import plan_text, ranks_of
from tilewise.comm.pool import RanksError
from tilewise.data.output import check_output
from tilewise.train.predict import predict as predict_on_rank
from tilewise.train.predict import recipe_of
from tilewise.train.supervise import FOREVER_S


def predict(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a run or of a checkpoint")],
    data: Annotated[Path, typer.Argument(help="a set; its first field is the input")],
    output: Annotated[Path, typer.Option("-o", "--output", help="a .h5, .npy or .zarr to write")],
    ranks: Annotated[int, typer.Option(min=0, help="local ranks; 0 is as the plan needs")] = 0,
    plan: Annotated[
        str | None, typer.Option(help="'n2 h2', 'conv*=h2,fc=f2', a plan file, auto")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=0, help="samples at a time; 0 is as many as a step of training holds")
    ] = 0,
    classes: Annotated[
        bool, typer.Option("--classes", help="write the likeliest class of each element")
    ] = False,
    backend: Annotated[str, typer.Option(help="gloo, mpi or nccl")] = "gloo",
    timeout: Annotated[float, typer.Option(help="seconds to wait for a silent rank")] = 300.0,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Predict DATA with the model of CHECKPOINT, each rank writing its own slabs."""
    start = time.monotonic()
    folder, saved = named_checkpoint("predict", checkpoint)
    recipe = recipe_of(folder)
    if plan is not None:
        recipe = recipe.model_copy(update={"plan": plan_text(plan)})
        count = ranks or ranks_of(recipe)
        chosen = recipe.plan
    else:
        count = ranks or saved.ranks
        chosen = json.dumps(saved.plan) if count == saved.ranks else recipe.plan
    check_output(output)
    partial = output.with_name(f".{output.stem}.partial{output.suffix}")
    crew = Crew(count, backend=backend, timeout=timeout, limit=FOREVER_S)
    if crew.first:
        _remove(partial)
    crew.meet("predict")
    options = {"checkpoint": str(folder), "data": str(data), "out": str(partial), "plan": chosen,
               "batch": batch, "classes": classes}  # fmt: skip
    with crew:
        try:
            title = "" if json_ else "predicting"
            results = crew.run(predict_on_rank, options, title=title)
        except RanksError as error:
            raise InputError(f"predict: {error}") from error
        if crew.first:
            partial.rename(output)
    seconds = time.monotonic() - start
    summary = {**results[0], "ranks": crew.size, "out": str(output), "seconds": round(seconds, 3)}
    if json_:
        print(json.dumps(summary))
        return
    Console().print(
        f"{output}: {' × '.join(map(str, summary['shape']))} {summary['dtype']}, of which a rank "
        f"wrote {' × '.join(map(str, summary['slab']))} of a sample; {seconds:.1f} s",
        highlight=False,
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
