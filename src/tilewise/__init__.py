"""Train any PyTorch CNN on many devices by splitting every dimension that a convolution has."""

from tilewise.comm import Mesh
from tilewise.graph import (
    Graph,
    ParallelModel,
    capture,
    clip_grad_norm_,
    full_state_dict,
    load_optimizer_state_dict,
    optimizer_state_dict,
    parallelize,
)
from tilewise.layout import Degrees, Layout
from tilewise.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "Degrees",
    "Graph",
    "Layout",
    "Mesh",
    "ParallelModel",
    "Plan",
    "capture",
    "clip_grad_norm_",
    "full_state_dict",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "parallelize",
]
