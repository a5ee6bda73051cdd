"""Train any PyTorch CNN on many devices by splitting every dimension that a convolution has."""

import importlib
from typing import TYPE_CHECKING, Any

from tilewise.auto import parallelize
from tilewise.comm import Mesh
from tilewise.graph import (
    GradScaler,
    Graph,
    ParallelModel,
    capture,
    clip_grad_norm_,
    full_state_dict,
    load_optimizer_state_dict,
    optimizer_state_dict,
)
from tilewise.layout import Degrees, Layout
from tilewise.plan import Plan
from tilewise.planner.search import Found, search

if TYPE_CHECKING:
    from tilewise import data as data

__version__ = "0.1.0"

__all__ = [
    "Degrees",
    "Found",
    "GradScaler",
    "Graph",
    "Layout",
    "Mesh",
    "ParallelModel",
    "Plan",
    "capture",
    "clip_grad_norm_",
    "data",
    "full_state_dict",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "parallelize",
    "search",
]


def __getattr__(name: str) -> Any:
    """Import `tw.data`, and the file formats with it, when it is first asked for."""
    if name == "data":
        return importlib.import_module("tilewise.data")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
