"""The loss of every split beside one device's: CosmoFlow under several plans, on one picture.

Trains the same network on the same batches on one device, with one thread and with two, and split
in several ways, in float32 and float64. Rounding makes curves drift apart; how far two runs on
one device do is the measure for the split ones. Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from tilewise.models import cosmoflow

ALONE, THREADS = "one device", "one device, 2 threads"
PLANS = {"n2": 2, "d2": 2, "d2 h2": 4, "auto": 2}  # and the ranks of each
console = Console()


def on_threads(*, threads: int, **options: Any) -> nn.Module:
    """Build CosmoFlow for a rank that may use so many threads; ranks have one otherwise."""
    torch.set_num_threads(threads)
    return cosmoflow(**options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=32, help="edge of a volume")
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--precisions", nargs="+", default=["float32", "float64"])
    parser.add_argument("--out", type=Path, default=Path("runs") / "loss-curves")
    parser.add_argument("--picture", type=Path, help="an .svg or .png to draw")
    return parser.parse_args()


def train(options: argparse.Namespace, name: str, precision: str) -> list[float]:
    """Train one run unless that was done; returns its losses."""
    run: Path = options.out / precision / name.replace(" ", "-").replace(",", "")
    if not (run / "summary.json").exists():
        ranks = PLANS.get(name, 1)
        plan = name if name in options.plans else "1"
        measured = options.out / "float32" / "auto" / "plan.json"
        if plan == "auto" and measured.exists():  # the same plan in both precisions
            plan = str(measured)
        epoch = min(25, options.steps)
        changes = {
            "data.path": options.out / "volumes", "data.make.size": options.size,
            "data.make.count": epoch * options.batch, "data.shares": "[1.0]",
            "model.args.size": options.size, "model.args.width": options.width,
            "train.precision": precision, "train.batch": options.batch,
            "train.steps": options.steps, "train.epochs": -(-options.steps // epoch),
            "checkpoint.epochs": 0, "metrics.names": "[]",
        }  # fmt: skip
        if name == THREADS:
            changes |= {"model.name": f"{__file__}:on_threads", "model.args.threads": 2}
        words = [
            "train", "cosmoflow", "--plan", plan, "--ranks", str(ranks), "--out", str(run),
            *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")),
        ]  # fmt: skip
        console.print(f"$ tilewise {' '.join(words)}", highlight=False, soft_wrap=True)
        # tuning would let the kernels, and with them the rounding, differ from day to day
        environment = os.environ | {"TILEWISE_TUNE": "off"}
        subprocess.run([sys.executable, "-m", "tilewise", *words], check=True, env=environment)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


def apart(one: list[float], other: list[float]) -> list[float]:
    """Return how far two curves are apart at each step, relative to the second."""
    return [abs(a - b) / abs(b) for a, b in zip(one, other, strict=True)]


def main() -> None:
    options = arguments()
    curves: dict[str, dict[str, list[float]]] = {}
    for precision in options.precisions:
        names = [ALONE, *([THREADS] if precision == "float32" else []), *options.plans]
        curves[precision] = {name: train(options, name, precision) for name in names}
    show(options, curves)
    if options.picture:
        draw(options, curves)
    text = json.dumps(curves, indent=1) + "\n"
    (options.out / "curves.json").write_text(text, encoding="utf-8")


def show(options: argparse.Namespace, curves: dict[str, dict[str, list[float]]]) -> None:
    """Print how far each run is from one device's."""
    table = Table(title=f"Losses apart from one device's, relative, {options.steps} steps")
    for column in ("", "precision", "steps 1–20", "all", "from 2 threads, all"):
        table.add_column(column, justify="right" if column else "left")
    for precision, some in curves.items():
        for name in (name for name in some if name != ALONE):
            alone = apart(some[name], some[ALONE])
            figures = [max(alone[:20]), max(alone)]
            if THREADS in some and name != THREADS:
                figures.append(max(apart(some[name], some[THREADS])))
            row = [f"{figure:.1e}" for figure in figures]
            table.add_row(label(options, name), precision, *row)
        console.print(f"{precision}: {some[ALONE][0]:.4f} at first, {some[ALONE][-1]:.4f} at last")
    console.print(table)


def label(options: argparse.Namespace, name: str) -> str:
    """Return the name of a run, with the splits that a plan of its own came to."""
    if name != "auto":
        return name
    plan = json.loads((options.out / "float32" / name / "plan.json").read_text(encoding="utf-8"))
    return f"auto ({', '.join(dict.fromkeys(plan['layers'].values()))})"


def draw(options: argparse.Namespace, curves: dict[str, dict[str, list[float]]]) -> None:
    """Draw the curves, and below how far each is from one device's."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = ("#343a40", "#868e96", "#2f6fde", "#d9730d", "#0b7a75", "#b8338a")
    figure = Figure(figsize=(6.4, 5.2))
    above, below = figure.subplots(2, sharex=True)
    for colour, (name, losses) in zip(colours, next(iter(curves.values())).items()):
        steps = range(1, len(losses) + 1)
        shown = label(options, name)
        style = {ALONE: "-", THREADS: "--"}.get(name, "-")
        above.plot(steps, losses, style, color=colour, linewidth=1, label=shown)
        if name != ALONE:
            for some in (some for some in curves.values() if name in some):
                distance = apart(some[name], some[ALONE])
                visible = [value or None for value in distance]
                below.plot(steps, visible, style, color=colour, linewidth=0.8)
    above.set_ylabel(f"loss, {options.precisions[0]}")
    above.legend(fontsize=7, frameon=False)
    below.set_yscale("log")
    below.set_ylabel("apart from one device, relative")
    below.set_xlabel("step")
    for precision, height in zip(options.precisions, (0.9, 0.32)):
        below.text(0.02, height, precision, transform=below.transAxes, fontsize=8)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tilewise"}):
        figure.savefig(options.picture, bbox_inches="tight", dpi=120)


if __name__ == "__main__":
    main()
