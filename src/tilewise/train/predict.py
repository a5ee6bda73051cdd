"""Run a trained model on a set, split, each rank writing its own slabs of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise import data
from tilewise.auto import read_plan
from tilewise.comm import Mesh
from tilewise.data.output import create_output, open_output
from tilewise.errors import RecipeError
from tilewise.graph import Graph, ParallelModel, capture
from tilewise.layout import Degrees, Layout
from tilewise.ops.loss import class_indices
from tilewise.plan import Plan
from tilewise.plan.given import AUTO
from tilewise.train.checkpoint import Checkpoints
from tilewise.train.inputs import transforms
from tilewise.train.job import build_model
from tilewise.train.manifest import Manifest
from tilewise.train.metrics import holders
from tilewise.train.precision import Precision
from tilewise.train.recipe import Recipe, from_dict


@dataclass
class Prediction:
    """What is to be predicted.

    Args:
        checkpoint: the folder of a checkpoint.
        data: a set whose first field is the input; others are not read.
        out: an HDF5, NPY or Zarr file that is being written.
        plan: degrees, degrees by pattern, a plan file, or a plan as JSON text.
        batch: samples at a time; 0 is what `batch_size` finds.
        classes: write the likeliest class of each element instead of the outputs; 0 or 1 for each
            output, where those were trained as logits of yes and no.
    """

    checkpoint: str
    data: str
    out: str
    plan: str | dict[str, str]
    batch: int = 0
    classes: bool = False


def predict(mesh: Mesh, options: dict[str, Any]) -> Generator[int, None, dict[str, Any]]:
    """Predict on the ranks of a mesh; yields after every batch."""
    task = Prediction(**options)
    recipe = recipe_of(Path(task.checkpoint))
    source = data.open_source(task.data, None if not recipe.data.fields else recipe.data.fields[:1])
    field = next(iter(source.fields))
    if not task.batch:
        task.batch = batch_size(mesh.size, task, source)
    model = load_model(mesh, recipe, task, source)
    model.eval()
    loader = data.loader(
        source,
        model.input_covers,
        fields=[field],
        shuffle=False,
        transforms={field: [*_changes(recipe, source, field), _dtype(recipe)]},
        mesh=mesh,
        name="prediction",
    )
    layout = _output_layout(model)
    dtype = torch.uint8 if task.classes else _dtype(recipe)
    shown, judged = _judged(recipe, layout) if task.classes else (layout, _as_it_is)
    out = Path(task.out)
    if mesh.rank == 0:
        create_output(out, shown, len(source), _name(dtype))
    mesh.agree("prediction")
    output = open_output(out)
    precision = Precision(recipe.train.precision)
    done = 0
    with torch.no_grad():
        for batch in loader:
            with precision.autocast():
                result = model(batch[0], batch=batch.size)
            cut = shown.with_shape((batch.size, *shown.shape[1:]))
            slab = judged(result).to(dtype)
            start, *rest = (interval[0] for interval in cut.intervals(mesh.rank))
            if holders(cut, mesh.rank)[0] == mesh.rank:
                output.write((done + start, *rest), slab.numpy())
            done += batch.size
            yield done
    mesh.agree("prediction")
    loader.close()
    return {
        "samples": done,
        "batch": task.batch,
        "shape": [done, *shown.shape[1:]],
        "slab": list(shown.local_shape(mesh.rank)[1:]),
        "dtype": _name(dtype),
    }


def recipe_of(checkpoint: Path) -> Recipe:
    """Return the recipe that a checkpoint was trained by."""
    extra = Manifest.read(checkpoint.absolute()).extra
    if "recipe" not in extra:
        raise RecipeError(f"{checkpoint}: holds no recipe; it was not saved by tilewise train")
    return from_dict(extra["recipe"], str(checkpoint))


def batch_size(ranks: int, task: Prediction, source: data.Source) -> int:
    """Return how many samples are as much input, for so many ranks, as a step of training had.

    At least one, and one for each part that the plan cuts samples into; at most all of them. Only
    one for a checkpoint that does not say what its inputs were.
    """
    saved = Manifest.read(Path(task.checkpoint).absolute())
    trained = prod(map(int, saved.extra.get("input", (0,)))) * ranks // saved.ranks
    fits = trained // prod(next(iter(source.fields.values())).shape)
    return max(min(max(fits, _sample_degree(task.plan)), len(source)), 1)


def _sample_degree(plan: str | dict[str, str]) -> int:
    """Return into how many parts some layer of a plan cuts the samples of a batch."""
    if plan == AUTO:
        return 1
    if isinstance(plan, dict):
        degrees = [Degrees.parse(text) for text in plan.values()]
    elif plan.lstrip().startswith("{"):
        degrees = list(Plan.from_json(plan).layers.values())
    elif plan.endswith(".json"):
        degrees = list(Plan.load(plan).layers.values())
    else:
        degrees = [Degrees.parse(plan)]
    return max((one.n for one in degrees), default=1)


def load_model(mesh: Mesh, recipe: Recipe, task: Prediction, source: data.Source) -> ParallelModel:
    """Build the recipe's model for a set's samples, split as the task says, with saved values."""
    plain = build_model(recipe.without_pretrained())
    shape = next(iter(source.fields.values())).shape
    x = torch.empty((task.batch, *shape), dtype=_dtype(recipe), device="meta")
    graph = capture(plain, x)
    plan: Any = task.plan
    if isinstance(plan, str) and plan.lstrip().startswith("{"):
        plan = _without_loss(Plan.from_json(plan), graph)
    model = ParallelModel(plain, graph, read_plan(graph, plan, mesh), mesh)
    folder = Path(task.checkpoint)
    Checkpoints(folder.parent, mesh=mesh).load(folder, model=model)
    return model


def _without_loss(plan: Plan, graph: Graph) -> Plan:
    """Leave out calls of the loss, which a plan for training names too."""
    known = {layer.name for layer in graph.layers}
    layers = {
        name: degrees
        for name, degrees in plan.layers.items()
        if name in known or not name.startswith("#")
    }
    return replace(plan, layers=layers)


def _changes(recipe: Recipe, source: data.Source, field: str) -> list[Any]:
    kept = {name: some for name, some in recipe.data.transforms.items() if name == field}
    section = recipe.data.model_copy(update={"transforms": kept})
    return transforms(source, section).get(field, [])


def _output_layout(model: ParallelModel) -> Layout:
    layouts = model.output_layouts
    if len(layouts) != 1:
        raise RecipeError(f"predict: the model has {len(layouts)} outputs; only one can be written")
    return layouts[0]


def _judged(recipe: Recipe, layout: Layout) -> tuple[Layout, Callable[[Tensor], Tensor]]:
    """Return how classes are cut, and the function that finds them in outputs."""
    if recipe.train.loss == "binary_cross_entropy":
        return layout, lambda logits: logits > 0
    if len(layout.shape) < 2 or not 2 <= layout.shape[1] <= 256:
        raise RecipeError(
            f"predict: outputs of shape {layout.shape} have no classes, which are 2 to 256 "
            "channels; leave --classes out"
        )
    if layout.degrees[1] > 1:
        raise RecipeError("predict: classes need outputs that the plan does not cut along channels")
    return class_indices(layout), lambda scores: scores.argmax(1)


def _as_it_is(result: Tensor) -> Tensor:
    return result


def _dtype(recipe: Recipe) -> torch.dtype:
    return torch.float64 if recipe.train.precision == "float64" else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
