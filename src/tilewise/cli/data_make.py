"""`tilewise data make`: make a set to train on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tilewise.data.synthetic import KINDS, generate
from tilewise.data.write import FILES, FORMATS


def make(
    kind: Annotated[str, typer.Argument(help=", ".join(KINDS))],
    out: Annotated[Path, typer.Argument(help="folder to make")],
    size: Annotated[int, typer.Option(help="edge of a sample: voxels, nodes or pixels")] = 64,
    count: Annotated[int, typer.Option(help="samples")] = 512,
    seed: Annotated[int, typer.Option(help="the same seed gives the same bytes")] = 0,
    format: Annotated[str, typer.Option(help=", ".join(FORMATS))] = "hdf5",
    files: Annotated[
        str, typer.Option(help=f"{' or '.join(FILES)}: hdf5 file for all, or for each sample")
    ] = "one",
    workers: Annotated[
        int,
        typer.Option("--workers", "--ranks", min=0, help="processes; 0 is as many as are worth it"),
    ] = 0,
    overwrite: Annotated[bool, typer.Option(help="replace the set in the folder")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Make a set of KIND in the folder OUT, offline and reproducible."""
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"making {kind}", total=count)
        description = generate(
            kind,
            out,
            size=size,
            count=count,
            seed=seed,
            format=format,
            files=files,
            workers=workers or None,
            overwrite=overwrite,
            progress=lambda finished: progress.advance(bar, finished),
        )
    summary = {
        **description,
        "path": str(out),
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "seconds": time.monotonic() - start,
    }
    if json_:
        print(json.dumps(summary))
    else:
        _show(summary)


def _show(summary: dict[str, Any]) -> None:
    table = Table(title=f"{summary['kind']}, seed {summary['seed']}: {summary['path']}")
    for column in ("field", "a sample", "dtype"):
        table.add_column(column)
    for name, field in summary["fields"].items():
        shape = " × ".join(map(str, field["shape"])) or "one number"
        table.add_row(name, shape, field["dtype"])
    console = Console()
    console.print(table)
    console.print(
        f"{summary['count']} samples as {summary['format']}, {summary['bytes'] / 1e6:.1f} MB, "
        f"in {summary['seconds']:.1f} s"
    )
    scores = dict(summary["baseline"])
    if len(scores.get("shares", ())) > 3:
        del scores["shares"]
    console.print(f"baseline ({scores.pop('predictor')}): {_scores(scores)}", highlight=False)


def _scores(scores: dict[str, Any]) -> str:
    parts = []
    for name, value in scores.items():
        shown = f"{value:.4g}" if isinstance(value, float) else f"({_scores(value)})"
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)
