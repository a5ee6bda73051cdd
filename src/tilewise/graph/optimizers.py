"""Refuse to step what is not summed yet, and by whole tensors where a plan cuts parameters."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tilewise.errors import PlanError

if TYPE_CHECKING:
    from tilewise.graph.parallel import ParallelModel

ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop",
    "Rprop", "SparseAdam",
}  # fmt: skip
WHOLE = {
    "LBFGS": "its line search needs inner products of whole gradients",
    "Adafactor": "it keeps row and column statistics of whole matrices",
    "Muon": "it orthogonalises whole matrices",
    "LAMB": "it scales steps by the norms of whole tensors",
    "LARS": "it scales steps by the norms of whole tensors",
    "Shampoo": "it preconditions whole matrices",
    "SOAP": "it preconditions whole matrices",
}

_models: weakref.WeakSet[ParallelModel] = weakref.WeakSet()
_watching: list[Any] = []
_warned: set[str] = set()


def watch(model: ParallelModel) -> None:
    """Check every optimizer that steps the model's parameters from now on."""
    _models.add(model)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, *_: Any) -> None:
    for model in _models:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        model.runs.shares.check(type(optimizer).__name__, parameters)
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if names & ELEMENTWISE and not {n.upper() for n in names} & {w.upper() for w in WHOLE}:
        return
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    cut = [
        name
        for model in _models
        for name in model.held.parameters
        if model.held.is_cut(name) and id(model.held.get(name)) in mine
    ]
    if not cut:
        return
    kind = type(optimizer).__name__
    for name, reason in WHOLE.items():
        if name.upper() in {n.upper() for n in names}:
            raise PlanError(
                f"{kind}: cannot step the parameter {cut[0]}, of which this rank holds a block "
                f"({reason}); use an element-wise optimizer such as SGD or AdamW, or a plan "
                "without c and f"
            )
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(
            f"{kind}: not known to be element-wise; its steps on cut parameters such as {cut[0]} "
            "equal one device's only if it treats every element by itself",
            stacklevel=3,
        )
