"""`tilewise bench model`: time whole training steps."""

from __future__ import annotations

import json
import warnings
from collections.abc import Generator
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tilewise.bench.model import ModelRow, measure_model
from tilewise.cli.bench_options import Backend, Json, Ranks, Rounds, in_ms, new_table
from tilewise.cli.crew import Crew
from tilewise.cli.naming import build_model, parse_plan, parse_shape
from tilewise.comm import Mesh


def model(
    model: Annotated[
        str,
        typer.Argument(
            help="file.py:callable, package.module:callable, or a name such as resnet50"
        ),
    ],
    input: Annotated[list[str], typer.Option(help="global shape, such as 2x3x64x64; repeats")],
    plan: Annotated[str, typer.Option(help="'n2 h2', 'conv*=h2,fc=f2', a file or auto")] = "n2",
    ranks: Ranks = 2,
    arg: Annotated[list[str] | None, typer.Option(help="key=value for the model; repeats")] = None,
    rounds: Rounds = 5,
    backend: Backend = "gloo",
    json_: Json = False,
) -> None:
    """Time whole training steps: one thread, as many threads as ranks, DDP, and split."""
    build_model(model, tuple(arg or ()), torch.float32, 0)
    task = (model, tuple(arg or ()), tuple(map(parse_shape, input)), parse_plan(plan), rounds)
    with Crew(ranks, backend=backend, timeout=3600.0) as crew:
        row: ModelRow = crew.run(run_model, *task, title=model, total=rounds + 1)[0]
    row.plan = plan
    if json_:
        print(json.dumps(row.as_dict()))
        return
    table = new_table(f"one training step of {model}, plan {plan}, {row.ranks} ranks",
                   "", "ms", "speed-up of the split run")  # fmt: skip
    lines = [
        ("one thread", row.serial_1t_s, row.speedup_vs_1t),
        (f"{row.ranks} threads", row.serial_pt_s, row.speedup_vs_pt),
        (
            f"{row.ranks} threads, memory kept",
            row.serial_pt_kept_s,
            row.serial_pt_kept_s / row.split_s,
        ),
        ("DDP", row.ddp_s, row.speedup_vs_ddp),
        ("DDP, memory kept", row.ddp_kept_s, row.ddp_kept_s and row.ddp_kept_s / row.split_s),
        ("split, messages left out", row.local_s, row.efficiency),
        ("split", row.split_s, 1.0),
    ]
    for name, seconds, ratio in lines:
        if seconds is not None and ratio is not None:
            table.add_row(name, *in_ms(seconds), f"{ratio:.2f}")
    ratio = row.peak_bytes_split / max(row.peak_bytes_serial, 1)
    Console().print(
        table,
        f"bytes that a step adds: one rank {row.peak_bytes_serial / 2**20:.0f} MiB, split "
        f"{row.peak_bytes_split / 2**20:.0f} MiB at most ({ratio:.2f}); spread of the one-thread "
        f"times {row.serial_spread:.0%}",
    )


def run_model(
    mesh: Mesh,
    name: str,
    arguments: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    plan: Any,
    rounds: int,
) -> Generator[int, None, ModelRow]:
    """Build the model and its inputs on one rank and measure."""
    warnings.simplefilter("ignore")
    found = build_model(name, arguments, torch.float32, 0)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    return (yield from measure_model(mesh, name, found, inputs, plan, rounds))
