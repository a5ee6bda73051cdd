"""`tilewise bench page`: measure all that the performance page shows, and write its tables."""

from __future__ import annotations

import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer

from tilewise.bench.layers import CASES, Row, measure_layers
from tilewise.bench.messages import PRIMITIVES, SIZES, Primitive, measure_messages
from tilewise.bench.model import ModelRow
from tilewise.bench.scaling import Point, measure_point
from tilewise.cli.bench_model import run_model
from tilewise.cli.bench_options import find_case
from tilewise.cli.bench_scaling import scaled
from tilewise.cli.crew import Crew
from tilewise.cli.naming import InputError, parse_plan, parse_shape
from tilewise.ops.kept import machine_name

MODELS = (
    ("cosmoflow", ("size=128",), "1x4x128x128x128", "d2"),
    ("unet3d", ("width=0.5",), "1x1x64x64x64", "d2"),
    ("mesh1k", (), "1x18x256x256", "h2"),
    ("resnet50", (), "2x3x224x224", "n2"),
    ("resnet50", (), "2x3x224x224", "h2"),
    ("alexnet", (), "8x3x224x224", "*=n2,classifier.*=f2"),
)
QUICK_MODELS = (
    ("cosmoflow", ("size=32",), "2x4x32x32x32", "d2"),
    ("unet3d", ("width=0.25",), "1x1x32x32x32", "d2"),
)
SCALED_LAYERS = ("cosmoflow_conv3", "wrn_conv3")
MARKS = ("machine", "layers", "models", "messages", "scaling")
QUICK_LAYERS = ("cosmoflow_conv2", "cosmoflow_conv3", "resnet_res3b_branch2a")


def page(
    into: Annotated[Path, typer.Argument(help="a page with `<!-- bench NAME -->` marks")],
    backends: Annotated[str, typer.Option(help="joined by commas")] = "gloo,mpi",
    rounds: Annotated[int, typer.Option(min=1, help="rounds of all measurements in turn")] = 7,
    quick: Annotated[bool, typer.Option(help="small layers and models only")] = False,
) -> None:
    """Measure layers, models, messages and scaling and write the tables of a page."""
    if not into.is_file():
        raise InputError(f"page: there is no file {into}")
    for mark in MARKS:
        fill(into.read_text(), mark, [])
    cases = [case for case in CASES if not quick or case.name in QUICK_LAYERS]
    work = [(case, letter) for case in cases for letter in case.degrees]
    models = QUICK_MODELS if quick else MODELS
    layers: dict[str, list[Row]] = {}
    steps: dict[str, list[ModelRow]] = {}
    messages: dict[str, list[Primitive]] = {}

    def write(mark: str, lines: list[str]) -> None:
        """Write each table when it is there: what was measured stays if something fails later."""
        into.write_text(fill(into.read_text(), mark, lines))

    write("machine", [_machine(rounds, quick)])
    for backend in backends.split(","):
        with Crew(2, backend=backend, timeout=3600.0) as crew:
            layers[backend] = crew.run(
                measure_layers, work, rounds, title=f"{backend}: layers", total=len(work)
            )[0]
            write("layers", _layers(layers))
            total = len(PRIMITIVES) * len(SIZES)
            messages[backend] = crew.run(
                measure_messages, rounds, title=f"{backend}: messages", total=total
            )[0]
            write("messages", _messages(messages))
            steps[backend] = []
            for name, arguments, shape, plan in models:
                task = (name, arguments, (parse_shape(shape),), parse_plan(plan), rounds)
                title = f"{backend}: {name} {plan}"
                row: ModelRow = crew.run(run_model, *task, title=title, total=rounds + 1)[0]
                row.plan, row.model = plan, f"{name} {shape}"
                steps[backend].append(row)
                write("models", _models(steps))
    scaling = {weak: _scaling(quick, backend, rounds, weak=weak) for weak in (False, True)}
    write("scaling", _points(scaling, backend))
    print(f"wrote {into}")


def _scaling(quick: bool, backend: str, rounds: int, *, weak: bool) -> list[list[Point]]:
    names = SCALED_LAYERS[:1] if quick else SCALED_LAYERS
    tasks = [
        (measure_point, case, letter, weak, rounds)
        for case in map(find_case, names)
        for letter in case.degrees
    ]
    return scaled(tasks, (1, 2, 4), backend, weak=weak)


def fill(text: str, mark: str, lines: list[str]) -> str:
    """Put lines between the marks of a page."""
    begin, end = f"<!-- bench {mark} -->", f"<!-- end {mark} -->"
    if begin not in text or end not in text:
        raise InputError(f"page: it lacks the marks {begin} and {end}")
    body = "\n".join(["", *lines, ""])
    return re.sub(
        f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", lambda _: body, text, flags=re.S
    )


def _machine(rounds: int, quick: bool) -> str:
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"Measured on {day}: {machine_name()}, two ranks with one thread each, {platform.system()},"
        f" Python {python}, torch {torch.__version__}; medians of {rounds} rounds"
        + ("; a quick run, of small layers and models only." if quick else ".")
    )


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    line = "|" + "|".join("---" for _ in head) + "|"
    return ["| " + " | ".join(head) + " |", line, *("| " + " | ".join(row) + " |" for row in rows)]


def _layers(found: dict[str, list[Row]]) -> list[str]:
    head = ["layer", "split", "backend", "one rank (ms)", "own share (ms)", "split run (ms)",
            "efficiency", "speed-up"]  # fmt: skip
    rows = [
        [row.layer, row.degrees, backend, f"{1e3 * row.serial_s:.1f}", f"{1e3 * row.local_s:.1f}",
         f"{1e3 * row.split_s:.1f}", f"{row.efficiency:.2f}", f"{row.speedup:.2f}"]
        for backend, some in found.items()
        for row in some
    ]  # fmt: skip
    spread = max(row.serial_spread for some in found.values() for row in some)
    return [*_table(head, rows), "", f"Spread of the one-rank times: up to {spread:.0%}."]


def _models(found: dict[str, list[ModelRow]]) -> list[str]:
    head = ["model", "plan", "backend", "one thread (ms)", "two threads (ms)",
            "two threads, memory kept (ms)", "DDP (ms)", "DDP, memory kept (ms)",
            "own share (ms)", "split (ms)", "× one thread", "× two threads", "× DDP", "efficiency",
            "memory"]  # fmt: skip

    def cells(backend: str, row: ModelRow) -> list[str]:
        times = [
            row.serial_1t_s,
            row.serial_pt_s,
            row.serial_pt_kept_s,
            row.ddp_s,
            row.ddp_kept_s,
            row.local_s,
            row.split_s,
        ]
        ratios = [row.speedup_vs_1t, row.speedup_vs_pt, row.speedup_vs_ddp, row.efficiency]
        memory = row.peak_bytes_split / max(row.peak_bytes_serial, 1)
        return [
            row.model, row.plan, backend,
            *("—" if value is None else f"{1e3 * value:.0f}" for value in times),
            *("—" if value is None else f"{value:.2f}" for value in ratios),
            f"{memory:.2f}",
        ]  # fmt: skip

    return _table(head, [cells(backend, row) for backend, some in found.items() for row in some])


def _points(found: dict[bool, list[list[Point]]], backend: str) -> list[str]:
    head = ["layer", "split", "scaling", "backend", "forward (ms)", "backward (ms)", "forward ×",
            "backward ×"]  # fmt: skip
    rows = [
        [point.layer, point.degrees, "weak" if weak else "strong", backend,
         f"{1e3 * point.forward_s:.1f}", f"{1e3 * point.backward_s:.1f}",
         f"{point.forward_ratio:.2f}", f"{point.backward_ratio:.2f}"]
        for weak, tasks in found.items()
        for points in tasks
        for point in points
    ]  # fmt: skip
    return _table(head, rows)


def _messages(found: dict[str, list[Primitive]]) -> list[str]:
    head = ["message", "backend", "64 KiB (µs)", "1 MiB (µs)", "α (µs)", "1/β (GB/s)", "fit error"]
    rows = [
        [p.name, backend, f"{1e6 * p.seconds[65536]:.0f}", f"{1e6 * p.seconds[1048576]:.0f}",
         f"{1e6 * p.alpha_s:.0f}", f"{1e-9 / p.beta_s_per_byte:.2f}" if p.beta_s_per_byte else "—",
         f"{p.fit_error:.0%}"]
        for backend, some in found.items()
        for p in some
    ]  # fmt: skip
    return _table(head, rows)
