"""One self-contained page about plans, simulations, benches and training runs."""

from tilewise.report.figures import save_figures
from tilewise.report.page import render
from tilewise.report.sources import Source, read_source

__all__ = ["Source", "read_source", "render", "save_figures"]
