"""Everything that a recipe becomes on the ranks of a mesh: model, sets, optimizer, loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilewise import data
from tilewise.auto.plan import read_plan
from tilewise.comm import Mesh
from tilewise.errors import RecipeError
from tilewise.graph import ParallelModel, capture
from tilewise.graph.captured import Graph
from tilewise.models.find import find_model
from tilewise.plan import Plan
from tilewise.plan.given import AUTO
from tilewise.train.inputs import Sets, examples, make_loader, open_sets
from tilewise.train.losses import loss_function, loss_sums
from tilewise.train.metrics import MeanLoss, Metric, make_metric
from tilewise.train.optimizer import make_optimizer, planned_as
from tilewise.train.payload import Payload
from tilewise.train.precision import Precision
from tilewise.train.recipe import Recipe


@dataclass
class Job:
    """A run, ready to go."""

    recipe: Recipe
    mesh: Mesh
    sets: Sets
    model: ParallelModel
    frozen: list[str]
    optimizer: Optimizer
    loader: data.Loader
    metrics: list[Metric]

    def train_mode(self) -> None:
        """Put the model into training mode; what is frozen keeps its running statistics."""
        self.model.train()
        for path in self.frozen:
            self.model.get_submodule(path).eval()

    @property
    def steps_per_epoch(self) -> int:
        """How many optimizer steps an epoch has."""
        return -(-len(self.loader) // self.recipe.train.accumulate)

    @property
    def total_steps(self) -> int:
        """How many optimizer steps the whole run has at most."""
        total = self.recipe.train.epochs * self.steps_per_epoch
        limit = self.recipe.train.steps
        return total if limit is None else min(total, limit)

    def close(self) -> None:
        """End the loader and close all files; all ranks must."""
        self.loader.close()
        self.sets.close()


def build(mesh: Mesh, recipe: Recipe) -> Job:
    """Build the recipe on a mesh; all ranks do so together."""
    sets = open_sets(recipe)
    x, *targets = examples(sets.train, recipe)
    plain = build_model(recipe)
    frozen = freeze(plain, recipe.model.frozen)
    graph, plan = planned(plain, x, tuple(targets), recipe, mesh)
    model = ParallelModel(plain, graph, plan, mesh, seed=recipe.train.seed)
    del plain
    optimizer = make_optimizer(recipe.train, model.parameters())
    loader = make_loader(
        sets.train, model.input_covers, recipe, mesh, training=True, name="training"
    )
    return Job(recipe, mesh, sets, model, frozen, optimizer, loader, make_metrics(recipe, sets))


def build_model(recipe: Recipe) -> nn.Module:
    """Build the plain model with its first values: drawn, or those of a trained one."""
    section = recipe.model
    function = find_model(section.name)
    torch.manual_seed(section.seed)
    try:
        model = function(**section.args)
    except Exception as error:
        raise RecipeError(
            f"recipe: model {section.name} with {section.args} raised {error!r}"
        ) from error
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"recipe: model {section.name} is a {type(model).__name__}, not an nn.Module"
        )
    model = model.to(torch.float64 if recipe.train.precision == "float64" else torch.float32)
    if section.pretrained is not None:
        load_pretrained(model, Path(section.pretrained), section.fresh)
    return model


def load_pretrained(model: nn.Module, path: Path, fresh: Sequence[str]) -> None:
    """Load a state dict; tensors that a pattern of `fresh` names keep the values they have."""
    state = read_state(path)
    own = model.state_dict()
    kept = {name for name in own if any(_names(pattern, name) for pattern in fresh)}
    missing = sorted(set(own) - kept - set(state))
    surplus = sorted(set(state) - kept - set(own))
    if missing or surplus:
        what = f"lacks {missing[0]}" if missing else f"has {surplus[0]}, which the model has not"
        raise RecipeError(
            f"recipe: model.pretrained: {path} {what}; name the layers to start afresh in "
            "model.fresh"
        )
    for name in sorted(set(own) - kept):
        if state[name].shape != own[name].shape:
            raise RecipeError(
                f"recipe: model.pretrained: {name} has shape {tuple(state[name].shape)} in {path}, "
                f"{tuple(own[name].shape)} in the model; name its layer in model.fresh"
            )
    model.load_state_dict({n: own[n] if n in kept else state[n] for n in own})


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a state dict from a safetensors file or one of torch's; no code in it is run."""
    if not path.is_file():
        raise RecipeError(f"recipe: model.pretrained: there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            payload = Payload(path)
            return {name: payload.tensor(name).clone() for name in payload.entries}
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RecipeError(f"recipe: model.pretrained: {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise RecipeError(f"recipe: model.pretrained: {path} holds no state dict")
    return found


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop gradients of all parameters that a pattern names; returns the modules that are frozen.

    A pattern names modules or parameters: `features.*`, `encoder`, `fc.weight`.
    """
    frozen: list[str] = []
    for pattern in patterns:
        paths = [path for path, _ in model.named_modules() if path and _names(pattern, path)]
        names = [name for name, _ in model.named_parameters() if _names(pattern, name)]
        if not paths and not names:
            raise RecipeError(f"recipe: model.frozen: no layer matches {pattern!r}")
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        frozen += paths
    return list(dict.fromkeys(frozen))


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern names a module or parameter, or a module around it."""
    parts = name.split(".")
    around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(path == pattern or fnmatchcase(path, pattern) for path in around)


def planned(
    model: nn.Module, x: Tensor, targets: tuple[Tensor, ...], recipe: Recipe, mesh: Mesh
) -> tuple[Graph, Plan]:
    """Capture the model with its loss, and plan it for the ranks of a mesh."""
    graph = capture(model, x, loss_function(recipe), targets=targets)
    limit = recipe.memory if recipe.plan == AUTO else None
    with Precision(recipe.train.precision).autocast():
        plan = read_plan(
            graph, recipe.plan, mesh, memory=limit, optimizer=planned_as(recipe.train),
            model=model, options=plan_options(recipe),
        )  # fmt: skip
    return graph, plan


def plan_options(recipe: Recipe) -> dict[str, Any]:
    """Return what the recipe says of a plan beside degrees."""
    train = recipe.train
    options: dict[str, Any] = {}
    if train.recompute:
        options["recompute"] = tuple(train.recompute)
    if train.statistics != "global":
        options["statistics"] = train.statistics
    return options


def make_metrics(recipe: Recipe, sets: Sets) -> list[Metric]:
    """Return the loss over all samples and the recipe's metrics."""
    shares = loss_sums(recipe)
    classes = sets.facts.get("classes", ())
    found = [make_metric(name, classes) for name in recipe.metrics.names]
    if shares is not None:
        found.insert(0, MeanLoss(shares, indices=recipe.train.loss == "cross_entropy"))
    return found
