"""A parallel model for one global input shape."""

from __future__ import annotations

from functools import cached_property
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilewise.comm.formats import between
from tilewise.errors import PlanError
from tilewise.graph.graph import Program, Value
from tilewise.graph.shapes import tensors_in
from tilewise.layout import PARTIAL, Axes, Axis, Cover, Layout

if TYPE_CHECKING:
    from tilewise.graph.parallel import ParallelModel


class At:
    """A parallel model, with the same parameters, for inputs of one global shape.

    Targets of the loss are guessed where they are not given.
    """

    def __init__(
        self, model: ParallelModel, examples: tuple[Any, ...], targets: Any = None
    ) -> None:
        self.model, self.examples, self.runs = model, examples, model.runs
        if targets is not None:
            self.targets = targets

    @cached_property
    def targets(self) -> tuple[Any, ...] | None:
        """Examples of the loss' targets; None without a loss."""
        graph = self.runs.graph
        if graph.loss is None or graph.tracer is None:
            return None
        return graph.tracer.guess_targets(self.examples)

    def __call__(self, *inputs: Any) -> Any:
        """Run on this rank's slabs of the inputs."""
        return self._run(inputs, None)

    def loss(self, *tensors: Any) -> Tensor:
        """Return the loss of input slabs and target slabs, the same on every rank."""
        if self.targets is None:
            raise PlanError("loss: the model was parallelized without a loss; pass loss=")
        return cast(Tensor, self._run(tensors, self.targets))

    def _run(self, tensors: tuple[Any, ...], targets: Any) -> Any:
        outputs, program = self.runs.run(
            tensors_in(tensors),
            self.examples,
            targets,
            sync=self.model.synchronises,
            error=_unlike(tensors, (*self.examples, *(targets or ()))),
        )
        return _restore(outputs, program)

    @property
    def input_layouts(self) -> tuple[Layout, ...]:
        """How the inputs are cut; with a loss, its targets come after them."""
        return self.runs.find(self.examples, self.targets).inputs

    @property
    def input_covers(self) -> tuple[Layout | Cover, ...]:
        """What a rank hands in: the layouts, or covers of the inputs that come with their halo."""
        return self.runs.find(self.examples, self.targets).given

    @property
    def output_layouts(self) -> tuple[Layout, ...]:
        """How the outputs are cut."""
        return self.runs.find(self.examples).outputs

    def scatter(self, *tensors: Any) -> Any:
        """Cut this rank's slabs out of whole inputs (and targets), which every rank has."""
        leaves, spec = tree_flatten(tensors)
        whole = tensors_in(tensors)
        targets = self.targets if len(whole) > len(tensors_in(self.examples)) else None
        layouts = self.runs.find(self.examples, targets).given
        shapes = [tuple(tensor.shape) for tensor in whole]
        if shapes != [layout.shape for layout in layouts]:
            raise PlanError(
                f"scatter: tensors of shape {shapes} are not the global inputs "
                f"{[layout.shape for layout in layouts]}; say batch= or at() for another shape"
            )
        rest = iter(layouts)
        rank = self.runs.mesh.rank
        slabs = [
            _slab(leaf, next(rest), rank) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        out = tree_unflatten(slabs, spec)
        return out[0] if len(out) == 1 else out

    def formatted(self, *slabs: Tensor) -> tuple[Tensor, ...]:
        """Return slabs in the memory format in which the model computes, if it has run before.

        Others are copied in every pass; outputs come in the format of the inputs, with channels
        outermost where that does not show, as with a single channel.
        """
        targets = self.targets if len(slabs) > len(tensors_in(self.examples)) else None
        executable = self.runs.find(self.examples, targets).executable
        if executable is None or executable.formats.last is None:
            return slabs
        last = executable.formats.last
        return tuple(between(slab, last=last) for slab in slabs)

    def gather(self, outputs: Any) -> Any:
        """Return whole outputs on every rank from this rank's slabs of them.

        A loss of the gathered outputs, computed alike on every rank, has the gradient of one
        device: every rank's counts as the same one.
        """
        leaves, spec = tree_flatten(outputs)
        layouts = self.output_layouts
        if len(tensors_in(outputs)) != len(layouts):
            raise PlanError(
                f"gather: {len(tensors_in(outputs))} tensors for the {len(layouts)} outputs of the "
                "model"
            )
        rest = iter(layouts)
        whole = [
            self._gathered(leaf, next(rest)) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        return tree_unflatten(whole, spec)

    def mean(self, values: Tensor, *, output: int = 0, guessed: bool = False) -> Tensor:
        """Return the mean of a tensor that is split as an output is, over all ranks.

        Its gradient is that of the mean on one device. Values may lack dims that are not cut. With
        `guessed`, no other pass may have had an output of this shape that is cut differently.
        """
        layout = self.output_layouts[output]
        mesh = self.runs.mesh
        facts = {"output": output, "global": layout.shape, "dtype": str(values.dtype)}
        others = [outputs[output] for outputs in self.runs.outputs() if output < len(outputs)]
        error = _no_mean(values, layout, others if guessed else [], mesh.rank)
        mesh.agree("mean", facts, error=error)
        partial = Axes(Axis(a.size, PARTIAL if a.dim >= 0 else a.dim) for a in layout.axes)
        target = Layout.replicated((2,), ranks=mesh.size)
        exchange = self.runs.exchange(Layout((2,), partial), target, layer="mean")
        total = values.sum(dtype=torch.float64)
        sums = exchange(torch.stack([total, total.new_full((), values.numel())]))
        return (sums[0] / sums[1].detach()).to(values.dtype)

    def _gathered(self, slab: Tensor, layout: Layout) -> Tensor:
        target = Layout.replicated(layout.shape, ranks=layout.ranks)
        return self.runs.exchange(layout, target, layer="gather")(slab)


def _slab(whole: Tensor, layout: Layout | Cover, rank: int) -> Tensor:
    """Copy a rank's slab out of a whole tensor; what lies past the edge is zero."""
    if isinstance(layout, Layout):
        return whole[layout.slab(rank)].contiguous()
    out = whole.new_zeros(layout.local_shape(rank))
    dims = [layout.block(rank, dim).pieces for dim in range(whole.dim())]
    for pieces in product(*dims):
        here = tuple(slice(piece.at, piece.at + piece.stop - piece.start) for piece in pieces)
        out[here] = whole[tuple(slice(piece.start, piece.stop) for piece in pieces)]
    return out


def _no_mean(values: Tensor, layout: Layout, others: list[Layout], rank: int) -> str | None:
    """Say why values are not to be averaged as slabs of a layout."""
    if not values.is_floating_point():
        return f"values of {values.dtype} have no mean; convert them to a floating point dtype"
    shape = tuple(values.shape)
    if not _fits(shape, layout, rank):
        return (
            f"values of shape {shape} are not cut as the output {layout.shape} is, of which this "
            f"rank has {layout.local_shape(rank)}; say batch=, or use at(...).mean"
        )
    for other in others:
        if other.axes != layout.axes and _fits(shape, other, rank):
            return (
                f"values of shape {shape} may be of the output {layout.shape} or of {other.shape}, "
                "which are cut differently; say batch=, or use at(...).mean"
            )
    return None


def _fits(shape: tuple[int, ...], layout: Layout, rank: int) -> bool:
    """Whether a tensor is a slab, or one whose dims that are not cut are of size 1 or gone."""
    local = layout.local_shape(rank)
    cut = {axis.dim for axis in layout.axes if axis.dim >= 0}
    return any(
        cut <= set(dims)
        and all(
            size == local[dim] or (size == 1 and dim not in cut) for size, dim in zip(shape, dims)
        )
        for dims in combinations(range(len(local)), len(shape))
    )


def _unlike(given: tuple[Any, ...], examples: tuple[Any, ...]) -> str | None:
    """Say how inputs differ in structure, or in what is no tensor, from the examples."""
    leaves, spec = tree_flatten(given)
    expected, wanted = tree_flatten(examples)
    if spec != wanted:
        return f"inputs are put together as {spec}, the examples as {wanted}"
    for leaf, example in zip(leaves, expected):
        if isinstance(leaf, Tensor) != isinstance(example, Tensor) or (
            not isinstance(example, Tensor) and leaf != example
        ):
            return (
                f"an input is {_described(leaf)}, the example was {_described(example)}; what is "
                "no tensor is part of the captured model: parallelize it with the other value"
            )
    return None


def _described(leaf: Any) -> str:
    return f"a tensor {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def _restore(outputs: tuple[Tensor, ...], program: Program) -> Any:
    """Put tensors into the structure that the model returns."""
    found = iter(outputs)
    leaves = [next(found) if isinstance(value, Value) else value for value in program.outputs]
    return tree_unflatten(leaves, program.out_spec)
