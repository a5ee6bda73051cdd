"""The `tilewise` command."""

from __future__ import annotations

import sys

import typer

from tilewise.cli.bench import bench_app
from tilewise.cli.calibrate import calibrate
from tilewise.cli.data import data_app
from tilewise.cli.doctor import doctor
from tilewise.cli.exits import exit_code
from tilewise.cli.export import export
from tilewise.cli.plan import plan
from tilewise.cli.predict import predict
from tilewise.cli.report import report
from tilewise.cli.simulate import simulate
from tilewise.cli.train import train
from tilewise.cli.verify import verify
from tilewise.errors import TilewiseError
from tilewise.switches import check_switches

app = typer.Typer(
    help="Train PyTorch CNNs split over many devices, with the results of one.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.command()(verify)
app.command()(plan)
app.command()(simulate)
app.command()(calibrate)
app.command()(doctor)
app.command()(report)
app.command()(train)
app.command()(predict)
app.command()(export)
app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")


@app.callback()
def _root() -> None:
    """Train PyTorch CNNs split over many devices, with the results of one."""
    check_switches()


def main() -> None:
    """Run the command; bad input ends in one line and exit code 2, a run that failed in 1."""
    try:
        app()
    except TilewiseError as error:
        print(f"tilewise: {error}", file=sys.stderr)
        if (mpi := sys.modules.get("tilewise.comm.mpi")) is not None:
            mpi.leave(exit_code(error))  # others may wait for this rank
        sys.exit(exit_code(error))
