"""`tilewise calibrate`: measure this machine for the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tilewise.auto.calibrate import BY_CHANNELS, BY_FLOPS, Measured, machine_of
from tilewise.auto.calibrate import calibrate as measure
from tilewise.auto.plan import keep
from tilewise.auto.tell import hosts
from tilewise.cli.bench_options import Backend
from tilewise.cli.crew import Crew
from tilewise.cli.fits import warn_of_fits
from tilewise.cli.naming import InputError
from tilewise.comm.launch import engine
from tilewise.planner.machine import LOCAL, Machine, local_path


def calibrate(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="a machine file to write besides")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="local ranks to start")] = 2,
    backend: Backend = "gloo",
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure what this machine's ranks compute and send, for `--machine local` and auto plans.

    What is found is kept for those by the number of ranks and the backend; `-o` writes it to a file
    too, which `--machine FILE` takes for any number of devices, also elsewhere. About a minute.
    """
    if output is not None and not output.parent.is_dir():
        raise InputError(f"-o: there is no directory {output.parent}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting ranks", total=None)
        found = Measured()
        with Crew(ranks, backend=backend) as crew:
            ranks, spread = crew.size, crew.run(hosts)[0]
            steps = measure(found, lambda function, *args: crew.run(function, *args)[0])
            for number, (name, total) in enumerate(steps):
                progress.update(task, description=name, total=total, completed=number)
        progress.update(task, description="done", completed=progress.tasks[0].total)
    machine = machine_of(found, ranks, name=LOCAL, spread=spread)
    keep(machine, ranks, engine(backend))
    written = local_path(ranks, engine(backend)) if output is None else output
    if output is not None:
        machine = machine.model_copy(update={"name": output.stem})
        output.write_text(machine.to_json(), encoding="utf-8")
    warn_of_fits(machine.fit_errors)
    if json_:
        print(json.dumps({"machine": str(written), "fit_errors": machine.fit_errors}))
    else:
        _show(machine)
        print(f"kept for --machine {LOCAL} in {local_path(ranks, engine(backend))}")
        if output is not None:
            print(f"also written to {output}")


def _best(machine: Machine, kind: str) -> float:
    """Return the highest rate, in operations a second, of the layers that are measured."""
    cases = [*BY_FLOPS[kind], *BY_CHANNELS[kind]]
    flops = np.array([case.flops for case in cases])
    channels = np.array([case.mean_channels for case in cases])
    return float((flops / machine.arithmetic_s(kind, "float32", flops, channels)).max())


def _show(machine: Machine) -> None:
    compute = machine.compute["float32"]
    table = Table(title=f"rates of {machine.name}")
    table.add_column("measured")
    table.add_column("found", justify="right")
    table.add_column("typical error of the fit", justify="right")
    memory = f"{machine.memory_bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    rate = machine.node.bandwidth_bytes_per_s / 1e9
    link = f"{1e6 * machine.node.latency_s:.0f} µs, {rate:.2f} GB/s"
    sums = f"{machine.all_reduce.efficiency:.2f} times that bandwidth"
    said = {kind: f"{_best(machine, kind) / 1e9:.0f} GFLOP/s at best" for kind in BY_FLOPS}
    said |= {"memory": memory, "messages": link, "sums": sums}
    for name, error in machine.fit_errors.items():
        table.add_row(name, said[name], f"{error:.0%}")
    for name, rates in machine.compute.items():
        if name != "float32":
            share = rates.peak_flops_per_s / compute.peak_flops_per_s
            table.add_row(name, f"{share:.2g} times float32's rates", "–")
    Console().print(table)
