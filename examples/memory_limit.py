"""The largest cube that trains under a limit of memory, on one, two and four ranks.

Looks for the largest edge, a multiple of 16, at which CosmoFlow does two steps of one volume with
no process above the limit. The limit is the kernel's (RLIMIT_DATA, as by `ulimit -d`): each size
really trains, or really dies of memory. All sizes are cut out of one volume in one file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tilewise.models import cosmoflow

STEP = 16
PLANS = {1: "1", 2: "d2", 4: "d4"}
OUT_OF_MEMORY = ("out of memory", "bad_alloc", "MemoryError", "could not create a memory")
RECIPE = """
plan = "{plan}"
[model]
name = "{script}:any_size"
args = {{width = {width}}}
[data]
path = "{volumes}"
shares = [1.0]
transforms = {{x = ["log1p", {{normalize = {{mean = 1.9, std = 0.7}}}}]}}
augment = [{{crop = {{size = [{size}, {size}, {size}]}}}}]
prefetch = 0
[train]
loss = "mse"
batch = 1
epochs = {steps}
optimizer = "adamw"
[checkpoint]
epochs = 0
"""
console = Console()


class AnySize(nn.Module):
    """CosmoFlow of 128³ with a mean over each eighth before its head, for volumes of any size."""

    def __init__(self, width: float) -> None:
        super().__init__()
        plain = cosmoflow(size=128, width=width)
        self.features, self.head = plain.features, plain.head
        self.eighths = nn.AdaptiveAvgPool3d(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.eighths(self.features(x)).flatten(1))
        return out


def any_size(*, width: float = 1.0) -> AnySize:
    """Build the network of the recipe."""
    return AnySize(width)


@dataclass(frozen=True)
class Trial:
    """How a size fared on some ranks."""

    ranks: int
    size: int
    trained: bool
    peak_bytes: int
    seconds: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=1500, help="MB of a process")
    parser.add_argument("--largest", type=int, default=320, help="edge of the volume in the file")
    parser.add_argument("--first", type=int, default=176, help="edge to begin with on one rank")
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--out", type=Path, default=Path("runs") / "memory-limit")
    return parser.parse_args()


def tilewise(words: list[str], limit: int | None = None) -> tuple[int, str]:
    """Run a command, each of its processes under a limit of bytes; returns its code and words."""

    def bounded() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    # tuning would try every convolution in four ways first, for speed, and needs memory for that
    # memory that is kept counts against the limit, gaps included
    own = {"TILEWISE_TUNE": "off", "TILEWISE_KEEP_MEMORY": "off", "OMP_NUM_THREADS": "1"}
    environment = os.environ | own
    ran = subprocess.run(
        [sys.executable, "-m", "tilewise", *words], env=environment, preexec_fn=bounded,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stdout


def attempt(options: argparse.Namespace, ranks: int, size: int) -> Trial:
    """Train cubes of a size on some ranks, or run out of memory."""
    run = options.out / f"{ranks}-ranks-{size}-{time.time_ns()}"
    recipe = run.with_suffix(".toml")
    text = RECIPE.format(
        plan=PLANS[ranks], script=Path(__file__).resolve(), volumes=options.out / "volume",
        size=size, width=options.width, steps=options.steps,
    )  # fmt: skip
    recipe.write_text(text, encoding="utf-8")
    start = time.monotonic()
    words = ["train", str(recipe), "--ranks", str(ranks), "--out", str(run)]
    code, said = tilewise(words, options.limit * 10**6)
    seconds = time.monotonic() - start
    log = run / "failure.log"
    said += log.read_text(encoding="utf-8") if log.exists() else ""
    if code and not any(words in said for words in OUT_OF_MEMORY):
        raise SystemExit(f"{size}³ on {ranks} ranks failed, but not of memory:\n{said}")
    summary = run / "summary.json"
    peaks = json.loads(summary.read_text(encoding="utf-8"))["peak_bytes"] if not code else [0]
    console.print(
        f"{ranks} ranks, {size}³: {'out of memory' if code else 'trains'} ({seconds:.0f} s)",
        highlight=False,
    )
    return Trial(ranks, size, not code, max(peaks), seconds)


def largest(options: argparse.Namespace, ranks: int, guess: float) -> list[Trial]:
    """Return the trials of a search up or down from a guess, in steps of 16."""
    size = min(max(round(guess / STEP), 1) * STEP, options.largest)
    trials = [attempt(options, ranks, size)]
    step = STEP if trials[0].trained else -STEP
    while trials[-1].trained == trials[0].trained and 0 < size + step <= options.largest:
        size += step
        trials.append(attempt(options, ranks, size))
    return trials


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "volume").exists():
        words = ["data", "make", "cosmology", str(options.out / "volume"), "--count", "1"]
        code, said = tilewise([*words, "--size", str(options.largest)])
        if code:
            raise SystemExit(said)
    trials: list[Trial] = []
    table = Table(title=f"CosmoFlow, batch 1, {options.limit} MB a process")
    for column in (
        "ranks",
        "plan",
        "largest cube",
        "too large",
        "voxels",
        "most resident on a rank",
    ):
        table.add_column(column, justify="right")
    first: Trial | None = None
    guess = float(options.first)
    for ranks in sorted(options.ranks):
        found = largest(options, ranks, guess)
        trials += found
        best = max((one for one in found if one.trained), key=lambda one: one.size, default=None)
        if best is None:
            table.add_row(str(ranks), PLANS[ranks], "none")
            continue
        first = first or best
        guess = best.size * 2 ** (1 / 3)
        larger = [f"{one.size}³" for one in found if not one.trained]
        table.add_row(
            str(ranks), PLANS[ranks], f"{best.size}³", larger[-1] if larger else "",
            f"{(best.size / first.size) ** 3:.2f} ×", f"{best.peak_bytes / 2**20:.0f} MiB",
        )  # fmt: skip
    console.print(table)
    text = json.dumps([asdict(one) for one in trials], indent=1) + "\n"
    (options.out / "trials.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
