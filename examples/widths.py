"""Are wider networks better? WRN-50-k for k = 1, 2, 4 on the same pictures, channels split in two.

Trains the recipe resnet50 with inner channels times k under a plan that cuts channels and filters,
from several seeds each (of weights, order and augmentation; train and test pictures stay the same),
and prints the test error. What is finished already is read from the folder. In full, and to try it:

    python examples/widths.py
    python examples/widths.py --widths 1 2 --seeds 0 --epochs 1 --count 64 --held-out 64 --size 16
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tilewise.data.synthetic import generate
from tilewise.models import wrn50

CLASSES = 10
PLANS = {"c2": "c2", "f2": "f2", "mixed": "*=n2,*.conv1=f2,*.conv3=c2"}
console = Console(width=100)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test error of WRN-50-k by k.")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--base", type=float, default=0.125, help="width of the network k = 1")
    parser.add_argument("--size", type=int, default=32, help="edge of the pictures")
    parser.add_argument("--count", type=int, default=8000, help="pictures to train on")
    parser.add_argument("--held-out", type=int, default=1000, help="pictures to judge by")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--plan", default="mixed", help=f"{', '.join(PLANS)}, or any plan")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs") / "widths")
    parser.add_argument("--picture", type=Path, help="an .svg or .png to draw")
    return parser.parse_args()


def test_error(asked: argparse.Namespace, k: int, seed: int) -> float:
    """Train one network and return its share of test pictures in a wrong class."""
    out = asked.out / f"k{k}-seed{seed}"
    summary = out / "summary.json"
    if not summary.is_file():
        pictures = asked.out / "images"
        changes = [
            "model.name=wrn50", f"model.seed={seed}", f"train.seed={seed}",
            f"model.args={{k={k}, width={asked.base}, num_classes={CLASSES}}}",
            f"data.path={pictures}/train", f"data.test={pictures}/test", "data.shares=[1.0]",
            f"train.epochs={asked.epochs}", f"train.batch={asked.batch}",
            f"train.lr={asked.lr}", f"checkpoint.epochs={asked.epochs}",
        ]  # fmt: skip
        for number, (name, count) in enumerate((("train", asked.count), ("test", asked.held_out))):
            if not (pictures / name).exists():
                generate("images", pictures / name, size=asked.size, count=count, seed=number)
        command = [
            *(sys.executable, "-m", "tilewise", "train", "resnet50", "--ranks", str(asked.ranks)),
            *("--plan", PLANS.get(asked.plan, asked.plan), "--out", str(out)),
            *("--resume", "latest"),
            *(word for change in changes for word in ("--set", change)),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    accuracy: float = json.loads(summary.read_text(encoding="utf-8"))["test"]["accuracy"]
    return 1.0 - accuracy


def claim(asked: argparse.Namespace) -> None:
    """Refuse a folder whose runs were made with other settings, for they are not to be mixed."""
    settings = {name: value for name, value in vars(asked).items()
                if name not in ("widths", "seeds", "out", "picture")}  # fmt: skip
    file = asked.out / "settings.json"
    if not file.is_file():
        asked.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    elif (found := json.loads(file.read_text(encoding="utf-8"))) != settings:
        raise SystemExit(f"{asked.out} holds runs with {found}; name another folder with --out")


def parameters(base: float, k: int) -> int:
    return sum(one.numel() for one in wrn50(k=k, num_classes=CLASSES, width=base).parameters())


def main() -> None:
    asked = arguments()
    claim(asked)
    found: dict[int, list[float]] = {k: [] for k in asked.widths}
    for seed in asked.seeds:
        for k in asked.widths:
            found[k].append(test_error(asked, k, seed))
            console.print(f"k = {k}, seed {seed}: test error {found[k][-1]:.4f}", highlight=False)
    show(asked, found)
    if asked.picture:
        draw(asked, found)


def show(asked: argparse.Namespace, found: dict[int, list[float]]) -> None:
    """Print the errors and how they compare."""
    table = Table(title=f"WRN-50-k, base width {asked.base}, plan {asked.plan}")
    for column in ("k", "parameters", "test error", "lowest … highest", "of each seed"):
        table.add_column(column, justify="right")
    for k, errors in found.items():
        each = " ".join(f"{error:.3f}" for error in errors)
        spread = f"{min(errors):.4f} … {max(errors):.4f}"
        table.add_row(str(k), f"{parameters(asked.base, k):,}", f"{mean(errors):.4f}", spread, each)
    console.print(table)
    first, *others = found
    for k in others:
        factor = mean(found[first]) / max(mean(found[k]), 1e-9)
        console.print(f"k = {k} against k = {first}: error {factor:.2f} times smaller")
    console.print(f"guessing: test error {1 - 1 / CLASSES:.2f}; everything is in {asked.out}")


def draw(asked: argparse.Namespace, found: dict[int, list[float]]) -> None:
    """Draw the errors by width."""
    figure = Figure(figsize=(4.2, 3.0))
    axes = figure.add_subplot()
    places = range(len(found))
    axes.plot(
        places, [mean(errors) for errors in found.values()], "k-", linewidth=1.5, label="mean"
    )
    for place, errors in zip(places, found.values()):
        axes.plot([place] * len(errors), errors, "ko", markersize=3)
    axes.axhline(1 - 1 / CLASSES, color="#868e96", linestyle=":", label="guessing")
    axes.set_xticks(list(places), [str(k) for k in found])
    axes.set_xlabel("k")
    axes.set_ylabel("test error")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7, frameon=False)
    asked.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(asked.picture, bbox_inches="tight")


if __name__ == "__main__":
    main()
