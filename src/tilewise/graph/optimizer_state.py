"""Optimizer state by parameter name, cut as the parameters are, to save and to reload.

A state dict is flat and holds tensors only, so a checkpoint of it needs no pickle:

    state.layer1.weight.exp_avg    a block of the whole, like the parameter itself
    state.layer1.weight.step       a number
    known.layer1.weight            whether the optimizer had any state of the parameter
    group.0.lr                     the numbers of the parameter groups
    draws.step                     where the random layers stand

Its keys depend on the kind of optimizer only, not on what has happened to it, so that a fresh one
gives the frame into which torch.distributed.checkpoint loads.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilewise.errors import PlanError
from tilewise.graph.state import block, part

if TYPE_CHECKING:
    from tilewise.graph.parallel import ParallelModel


def optimizer_state_dict(model: ParallelModel, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state of the model's parameters, ready to be saved."""
    state: dict[str, Any] = {"draws.step": torch.tensor(model.draws.step)}
    for name, parameter, group in _stepped(model, optimizer):
        known = optimizer.state.get(parameter)
        values = known or _first_state(optimizer, group, parameter)
        state[f"known.{name}"] = torch.tensor(bool(known))
        for key, value in values.items():
            state[f"state.{name}.{key}"] = _saved(model, name, key, parameter, value)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            number = _as_tensor(value)
            if number is not None:
                state[f"group.{index}.{key}"] = number
    return state


def load_optimizer_state_dict(
    model: ParallelModel, optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Load what `optimizer_state_dict` gave, with blocks of this plan or whole tensors."""
    saved = {key.split(".")[1] for key in state if key.startswith("group.")}
    if saved and len(saved) != len(optimizer.param_groups):
        raise PlanError(
            f"load_optimizer_state_dict: {len(saved)} parameter groups were saved, the "
            f"{type(optimizer).__name__} has {len(optimizer.param_groups)}; build it as it was"
        )
    for name, parameter, group in _stepped(model, optimizer):
        if not state.get(f"known.{name}", True):
            optimizer.state.pop(parameter, None)
            continue
        values = optimizer.state.get(parameter) or _first_state(optimizer, group, parameter)
        for key, value in values.items():
            found = state.get(f"state.{name}.{key}")
            if found is None:
                raise PlanError(
                    f"load_optimizer_state_dict: there is no {key} of {name}; was it saved from "
                    f"another optimizer than {type(optimizer).__name__}?"
                )
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                found = part(model, name, found)
            values[key] = _loaded(found, value)
        optimizer.state[parameter] = values
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            found = state.get(f"group.{index}.{key}")
            if found is not None:
                group[key] = _loaded(found, value)
    if "draws.step" in state:
        model.draws.step = int(state["draws.step"])


def _stepped(
    model: ParallelModel, optimizer: Optimizer
) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """List the optimizer's parameters with their names and groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise PlanError(
                    f"{type(optimizer).__name__} steps a parameter of shape "
                    f"{tuple(parameter.shape)} that is not the model's; save its state by itself"
                )
            found.append((names[id(parameter)], parameter, group))
    return found


def _first_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state that a first step would make, by stepping a parameter of zeros."""
    stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a learning rate's schedule counts the steps
    copy.state = defaultdict(dict)
    copy.param_groups = [{**group, "params": [stand_in]}]
    copy._optimizer_step_pre_hooks = OrderedDict()
    copy._optimizer_step_post_hooks = OrderedDict()
    try:
        copy.step()
    except TypeError as error:
        raise PlanError(
            f"{type(optimizer).__name__}: its state cannot be saved by parameter, for its step "
            f"needs more than gradients ({error}); use optimizer.state_dict() where nothing is cut"
        ) from error
    return dict(copy.state[stand_in])


def _saved(model: ParallelModel, name: str, key: str, parameter: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return block(model, name, value)
    found = _as_tensor(value)
    if found is None:
        raise PlanError(f"optimizer_state_dict: {key} of {name} is a {type(value).__name__}")
    return found


def _as_tensor(value: Any) -> Tensor | None:
    """Return a number, or several, as a tensor; None for what is none."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    if isinstance(value, (tuple, list)) and all(isinstance(v, (int, float)) for v in value):
        return torch.tensor([float(v) for v in value], dtype=torch.float64)
    return None


def _loaded(found: Tensor, like: Any) -> Any:
    if isinstance(like, Tensor):
        return found.detach().clone().to(like)
    if isinstance(like, (tuple, list)):
        return type(like)(type(old)(new) for old, new in zip(like, found.tolist()))
    return type(like)(found.item())
