"""Whether larger cubes predict better: CosmoFlow on whole volumes, on eighths and on 64ths of them.

Makes two cosmology sets, one to train on and one to judge by, and trains the same network family on
cubes of each size for several seeds. A cut cube comes from the same files, and is judged alone. All
sizes take the same number of steps: halving the edge makes a batch of four times as many cubes and
half as many epochs, so that a step of small cubes, which cost more for each voxel, is not much
slower. Runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import h5py
import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tilewise.models import cosmoflow
from tilewise.train.checkpoint import whole_state_dict
from tilewise.train.resume import checkpoint_in

CUTS = (4, 2, 1)  # parts of an edge
MEAN, STD = 1.9, 0.7  # of log(1 + counts)
console = Console()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=32, help="edge of a whole volume")
    parser.add_argument("--count", type=int, default=1024, help="volumes to train on")
    parser.add_argument("--held-out", type=int, default=256, help="volumes to judge by")
    parser.add_argument("--epochs", type=int, default=16, help="of whole volumes")
    parser.add_argument("--batch", type=int, default=16, help="whole volumes of a step")
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs") / "cube-sizes")
    parser.add_argument("--picture", type=Path, help="an .svg or .png to draw")
    return parser.parse_args()


def tilewise(*words: str) -> None:
    """Run a command as a user would."""
    console.print(f"$ tilewise {' '.join(words)}", highlight=False, soft_wrap=True)
    subprocess.run([sys.executable, "-m", "tilewise", *words], check=True)


def make_set(folder: Path, size: int, count: int, seed: int) -> None:
    if not folder.exists():
        tilewise(
            "data", "make", "cosmology", str(folder),
            "--size", str(size), "--count", str(count), "--seed", str(seed),
        )  # fmt: skip


def train(options: argparse.Namespace, cut: int, seed: int) -> Path:
    """Train on cubes of one size unless that was done; returns the run's folder."""
    edge = options.size // cut
    run: Path = options.out / f"{edge}-seed-{seed}"
    if (run / "summary.json").exists():
        return run
    changes = {
        "data.path": options.out / "train", "data.test": options.out / "test",
        "data.shares": "[1.0]", "data.sub_volumes.x": [edge] * 3,
        "data.augment": "[{flip={dims='d h w'}},{transpose={dims='d h w'}}]",
        "model.args.size": edge, "model.args.width": options.width,
        "model.seed": seed, "train.seed": seed, "train.lr": options.lr,
        "train.epochs": max(1, options.epochs // cut), "train.batch": options.batch * cut**2,
        "schedule.warmup": options.warmup,
        "checkpoint.epochs": 0, "metrics.names": "['mse']",
    }  # fmt: skip
    tilewise(
        "train", "cosmoflow", "--ranks", str(options.ranks), "--timeout", "3600",
        "--plan", f"{'d' if cut == 1 else 'n'}{options.ranks}", "--out", str(run),
        *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")),
    )  # fmt: skip
    return run


def parts(x: Tensor, cut: int) -> Tensor:
    """Cut volumes into cubes: n × c × s³ to n·cut³ × c × (s/cut)³, a volume's parts in a row."""
    count, channels, size, *_ = x.shape
    edge = size // cut
    x = x.reshape(count, channels, cut, edge, cut, edge, cut, edge)
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(count * cut**3, channels, edge, edge, edge)


@torch.no_grad()
def judge(options: argparse.Namespace, run: Path, cut: int) -> dict[str, Any]:
    """Return the errors of a run on the held-out volumes, target by target, in plain PyTorch.

    `together` is the error of the mean of what is predicted from all parts of a volume.
    """
    state, _ = whole_state_dict(checkpoint_in(run))
    model = cosmoflow(
        size=options.size // cut, width=options.width, batch_norm=True, dropout=0.0
    ).eval()
    model.load_state_dict(state)
    with h5py.File(options.out / "test" / "data.h5") as file:
        counts, wanted = file["x"][:], file["y"][:]
    found = []
    for some in np.array_split(counts, -(-len(counts) // 16)):
        x = (torch.from_numpy(some).float().log1p() - MEAN) / STD
        found.append(model(parts(x, cut)).unflatten(0, (len(some), cut**3)))
    answers, y = torch.cat(found), torch.from_numpy(wanted)
    return {
        "each": (answers - y[:, None]).square().mean((0, 1)).tolist(),
        "together": (answers.mean(1) - y).square().mean(0).tolist(),
    }


def main() -> None:
    options = arguments()
    start = time.monotonic()
    make_set(options.out / "train", options.size, options.count, seed=0)
    make_set(options.out / "test", options.size, options.held_out, seed=1)
    facts = json.loads((options.out / "test" / "set.json").read_text(encoding="utf-8"))
    errors: dict[int, list[dict[str, Any]]] = {cut: [] for cut in CUTS}
    for seed in range(options.seeds):
        for cut in reversed(CUTS):
            run = train(options, cut, seed)
            found = judge(options, run, cut)
            told = json.loads((run / "summary.json").read_text(encoding="utf-8"))["test"]["mse"]
            if abs(mean(found["each"]) - told) > 1e-3 * told:
                raise SystemExit(f"{run}: {told} by tilewise, {mean(found['each'])} by PyTorch")
            errors[cut].append(found)
    show(options, facts, errors)
    if options.picture:
        draw(options, facts, errors)
    (options.out / "errors.json").write_text(json.dumps(errors, indent=1) + "\n", encoding="utf-8")
    console.print(f"{time.monotonic() - start:.0f} s; the runs are in {options.out}")


def show(
    options: argparse.Namespace, facts: dict[str, Any], errors: dict[int, list[dict[str, Any]]]
) -> None:
    """Print the errors and how they compare."""
    table = Table(title=f"Test MSE on {options.held_out} volumes, {options.seeds} seeds")
    columns = ("cube", "MSE", "lowest … highest", *facts["targets"], "all parts together")
    for column in columns:
        table.add_column(column, justify="right")
    baseline = facts["baseline"]
    by_target = [f"{baseline['mse_by_target'][name]:.3f}" for name in facts["targets"]]
    table.add_row("the mean", f"{baseline['mse']:.4f}", "", *by_target, "")
    for cut, some in errors.items():
        totals = [mean(one["each"]) for one in some]
        table.add_row(
            f"{options.size // cut}³",
            f"{mean(totals):.4f}" + (f" ± {stdev(totals):.4f}" if len(totals) > 1 else ""),
            f"{min(totals):.4f} … {max(totals):.4f}",
            *(f"{mean(values):.3f}" for values in zip(*(one["each"] for one in some))),
            f"{mean(mean(one['together']) for one in some):.4f}",
        )
    console.print(table)
    whole = mean(mean(one["each"]) for one in errors[1])
    for cut in CUTS[:-1]:
        factor = mean(mean(one["each"]) for one in errors[cut]) / whole
        console.print(f"{options.size}³ against {options.size // cut}³: {factor:.2f} times better")


def draw(
    options: argparse.Namespace, facts: dict[str, Any], errors: dict[int, list[dict[str, Any]]]
) -> None:
    """Draw the errors by the size of the cubes."""
    figure = Figure(figsize=(5.2, 3.2))
    axes = figure.add_subplot()
    places = range(len(CUTS))
    for index, name in enumerate(facts["targets"]):
        values = [mean(one["each"][index] for one in errors[cut]) for cut in CUTS]
        axes.plot(places, values, "--", linewidth=1, label=name)
    totals = [[mean(one["each"]) for one in errors[cut]] for cut in CUTS]
    axes.plot(places, [mean(some) for some in totals], "k-", linewidth=1.8, label="all four")
    for place, some in zip(places, totals):
        axes.plot([place] * len(some), some, "ko", markersize=3)
    axes.axhline(facts["baseline"]["mse"], color="#868e96", linestyle=":", label="the mean")
    axes.set_xticks(list(places), [f"{options.size // cut}³" for cut in CUTS])
    axes.set_xlabel("cube")
    axes.set_ylabel("test MSE")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, bbox_inches="tight", dpi=150)


if __name__ == "__main__":
    main()
