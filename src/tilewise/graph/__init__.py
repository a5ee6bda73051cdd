"""From a model to a parallel model: capture, plan, lower."""

from tilewise.graph.captured import Graph, capture
from tilewise.graph.clip import clip_grad_norm_, grad_norm
from tilewise.graph.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from tilewise.graph.parallel import ParallelModel, as_plan
from tilewise.graph.scaler import GradScaler
from tilewise.graph.state import Block, full_state_dict

__all__ = [
    "Block",
    "GradScaler",
    "Graph",
    "ParallelModel",
    "as_plan",
    "capture",
    "clip_grad_norm_",
    "full_state_dict",
    "grad_norm",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
]
