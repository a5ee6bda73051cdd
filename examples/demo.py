"""From nothing to a trained network on two ranks, and what that was worth: make demo

Makes a small set of cosmology volumes, looks for a plan for the cores there are, trains CosmoFlow
split, goes on under another plan half way through, trains the same on one device, and compares.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tilewise.cli.app import app

FOLDER = Path("runs") / "demo"
SET = FOLDER / "volumes"
EPOCHS, COUNT, BATCH, SIZE = 4, 160, 8, 64
RECIPE = [
    f"data.path={SET}", f"data.make.count={COUNT}", "data.shares=[0.8,0.2]",
    f"data.make.size={SIZE}", f"model.args.size={SIZE}", f"train.epochs={EPOCHS}",
    f"train.batch={BATCH}", "train.lr=1e-3", "schedule.kind=constant",
    "metrics.names=['mse']",
]  # fmt: skip
RANKS = 2
console = Console()


def tilewise(*words: str) -> None:
    """Run a command as a user would, its progress on this terminal."""
    console.print(f"\n[bold]$ tilewise {' '.join(words)}[/]", highlight=False)
    subprocess.run([sys.executable, "-m", "tilewise", *words], check=True)


def train(out: Path, plan: str, ranks: int, *more: str) -> float:
    """Train and return the seconds that it took."""
    changes = [word for change in RECIPE for word in ("--set", change)]
    start = time.monotonic()
    tilewise(
        "train", "cosmoflow", "--ranks", str(ranks), "--plan", plan, "--out", str(out),
        *changes, *more,
    )  # fmt: skip
    return time.monotonic() - start


def steps(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def other_plan(run: Path) -> str:
    """Return a plan that is not the one a run had."""
    first = next(iter(read(run / "plan.json")["layers"].values()))
    return "d2" if first.startswith("n") else "n2"


def knows(command: str) -> bool:
    """Whether this version has a command."""
    names = [one.name or getattr(one.callback, "__name__", "") for one in app.registered_commands]
    return command in names


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    start = time.monotonic()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    console.print(f"{cores} cores; training on {RANKS} ranks")
    split, alone = FOLDER / "split", FOLDER / "one-device"
    half = (COUNT * 8 // 10) // BATCH * EPOCHS // 2
    seconds = train(split, "auto", RANKS, "--set", f"train.steps={half}")
    plans = [read(split / "plan.json")["layers"]]
    seconds += train(split, other_plan(split), RANKS, "--resume", "latest")
    plans.append(read(split / "plan.json")["layers"])
    alone_seconds = train(alone, "1", 1)
    compare(split, alone, seconds, alone_seconds, plans, half)
    if knows("report"):
        tilewise("report", str(split), str(alone), "-o", str(FOLDER / "report.html"))
    console.print(f"{time.monotonic() - start:.0f} s in all; everything is in {FOLDER}")


def compare(
    split: Path,
    alone: Path,
    seconds: float,
    alone_seconds: float,
    plans: list[dict[str, str]],
    half: int,
) -> None:
    """Print how a run that changed its plan after half of the steps compares with one device."""
    mine, other = steps(split), steps(alone)
    if len(mine) != len(other):
        raise SystemExit(f"{len(mine)} steps split, {len(other)} on one device")
    apart = [abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(mine, other)]
    alone_pace, *paces = (
        median(r["seconds"] for r in some[5:]) for some in (other, mine[:half], mine[half:])
    )
    trivial = read(SET / "set.json")["baseline"]["mse"]
    table = Table(title=f"CosmoFlow, {len(mine)} steps of {BATCH} volumes of {SIZE}³")
    for column in ("", "one rank", f"{RANKS} ranks"):
        table.add_column(column, justify="right" if column else "left")
    summaries = [read(run / "summary.json") for run in (alone, split)]
    errors = [summary["valid"]["mse"] for summary in summaries]
    table.add_row("plans", "1", " then ".join(map(shown, plans)))
    table.add_row("time, starting included", f"{alone_seconds:.1f} s", f"{seconds:.1f} s")
    table.add_row(
        "time of a step", f"{1e3 * alone_pace:.0f} ms",
        " then ".join(f"{1e3 * pace:.0f} ms" for pace in paces),
    )  # fmt: skip
    table.add_row("speed-up", "", " then ".join(f"{alone_pace / pace:.2f}" for pace in paces))
    memory = [max(summary["peak_bytes"]) / 2**20 for summary in summaries]
    table.add_row("memory of a rank", *(f"{size:.0f} MiB" for size in memory))
    table.add_row("losses apart, first 20 steps", "", f"{max(apart[:20]):.1e}")
    table.add_row("… later, as float32's rounding grows", "", f"{max(apart[20:]):.1e}")
    table.add_row("test error (MSE)", *(f"{error:.4f}" for error in errors))
    table.add_row("… of the trivial predictor's", *(f"{error / trivial:.2f}" for error in errors))
    console.print(table)


def shown(plan: dict[str, str]) -> str:
    splits = list(dict.fromkeys(plan.values()))
    return splits[0] if len(splits) == 1 else f"mixed ({', '.join(splits)})"


if __name__ == "__main__":
    main()
