"""`tilewise report`: one page about plans, simulations, benches and training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tilewise.cli.naming import InputError
from tilewise.report import read_source, render, save_figures


def report(
    sources: Annotated[
        list[Path], typer.Argument(help="plan, simulation or bench files, folders of runs")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="the page to write")] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None, typer.Option(help="also write every figure as PNG and SVG into this folder")
    ] = None,
    title: Annotated[str, typer.Option(help="what stands above the page")] = "tilewise report",
) -> None:
    """Draw plans, simulations, benches and runs on one page that needs nothing else."""
    found = [read_source(path) for path in sources]
    page = render(found, title=title)
    try:
        output.write_text(page, encoding="utf-8")
        names = [] if figures is None else save_figures(found, figures)
    except OSError as error:
        raise InputError(f"report: {error.filename} cannot be written: {error.strerror}") from error
    console = Console()
    console.print(f"{output}: {len(page.encode()) / 2**20:.1f} MiB, open it in a browser")
    if figures is not None:
        console.print(f"{figures}: {len(names)} figures, each as PNG and SVG")
