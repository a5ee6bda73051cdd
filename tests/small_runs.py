"""A small model, small sets and runs of recipes on the pool's ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from tilewise import Mesh
from tilewise.comm.pool import exhausted
from tilewise.testing import ranks
from tilewise.train.journal import METRICS, read_journal
from tilewise.train.loop import train

HERE = Path(__file__)


class Regressor(nn.Module):
    """Everything that a plan may get wrong, on a few numbers: norm, dropout, pooling, a head."""

    def __init__(self, dropout: float = 0.3, overflow: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(inplace=True),
            nn.MaxPool3d(2, padding=1), nn.Conv3d(4, 6, 3, padding=1),
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)
        self.overflow = overflow

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        if self.overflow:
            x = x * 1e30 * 1e30
        out: Tensor = self.head(self.dropout(x.mean((2, 3, 4))))
        return out


class Segmenter(nn.Module):
    """A class for every voxel."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv3d(2, 5, 3, padding=1), nn.BatchNorm3d(5), nn.ReLU(inplace=True)
        )
        self.outer = nn.Conv3d(5, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x))
        return out


def make_set(folder: Path, *, count: int = 10, segment: bool = False) -> Path:
    """Write samples of uneven extents as NPY files."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, 2, 7, 6, 5)).astype("float32")
    if segment:
        y = (x[:, 0] > 0.3).astype("uint8") + (x[:, 1] > 1).astype("uint8")
    else:
        y = np.stack([x.mean((1, 2, 3, 4)), x[:, 0].std((1, 2, 3)), x[:, 1, 0, 0, 0]], 1)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y if segment else y.astype("float32"))
    return folder


def recipe(data: Path, *, segment: bool = False, **changes: Any) -> dict[str, Any]:
    """Return a recipe as plain values; `train_lr=0.1` changes `train.lr`."""
    table: dict[str, Any] = {
        "model": {"name": f"{HERE}:{'Segmenter' if segment else 'Regressor'}"},
        "data": {"path": str(data), "shares": [0.8, 0.1, 0.1]},
        "train": {
            "loss": "cross_entropy" if segment else "mse",
            "epochs": 2,
            "batch": 4,
            "lr": 1e-2,
            "precision": "float64",
        },
        "metrics": {"names": ["dice", "iou", "accuracy"] if segment else ["mse", "mae"]},
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        if name:
            table.setdefault(section, {})[name] = value
        else:
            table[section] = value
    return table


def run(mesh: Mesh, table: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train on a rank to the end; returns the summary."""
    summary: dict[str, Any] = exhausted(train(mesh, table, options), lambda event: None)
    return summary


def trained(
    count: int, table: dict[str, Any], out: Path, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train on so many of the pool's ranks; returns the summary and the journal."""
    summary = ranks(count, run, table, {"out": str(out), **options})[0]
    return summary, read_journal(out / METRICS)


def losses(journal: Iterable[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in journal if record["kind"] == "train"]
