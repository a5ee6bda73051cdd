"""The parallel model: an ordinary nn.Module over this rank's slabs and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tilewise.comm import Exchange, Mesh
from tilewise.errors import PlanError
from tilewise.graph import optimizers, state
from tilewise.graph.captured import Graph, as_tuple, capture
from tilewise.graph.executable import Executable
from tilewise.graph.held import Held, at_rest, whole_cover
from tilewise.graph.lower import plan_program
from tilewise.layout import PARTIAL, Axes, Axis, Cover, Layout
from tilewise.ops.draws import Draws
from tilewise.plan import Plan

PlanLike = str | Mapping[str, str] | Plan | Path


def parallelize(
    model: nn.Module,
    inputs: Any,
    plan: PlanLike = "1",
    *,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    mesh: Mesh | None = None,
    seed: int = 0,
) -> ParallelModel:
    """Split a model over the ranks of a mesh.

    Args:
        model: any nn.Module; it is left as it is.
        inputs: example inputs of the global shape, one tensor or a tuple; fake or meta ones do.
        plan: degrees for all layers such as `n2 h2`, a dict of degrees by layer pattern, a Plan,
            or the path of a plan file.
        loss: a function of (output, *targets), for `ParallelModel.loss`.
        targets: example targets of the loss, where their shape cannot be guessed.
        mesh: the ranks that take part; all of torch.distributed's by default.
        seed: of dropout and other random layers; the same seed draws the same under every plan.
    """
    mesh = Mesh() if mesh is None else mesh
    graph = capture(model, inputs, loss, targets=None if targets is None else as_tuple(targets))
    return ParallelModel(model, graph, as_plan(graph, plan), mesh, seed=seed)


def as_plan(graph: Graph, plan: PlanLike) -> Plan:
    """Read a plan in any of the forms that `parallelize` takes."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return Plan.load(plan)
    if isinstance(plan, str):
        return Plan.uniform(graph, plan)
    return Plan.of(graph, plan)


class ParallelModel(nn.Module):
    """A split model. Call it with this rank's slabs; it returns this rank's slabs.

    Parameters and buffers keep their names; those that the plan cuts hold this rank's block.
    Gradients are summed over the ranks that share a block during backward.
    """

    def __init__(
        self, model: nn.Module, graph: Graph, plan: Plan, mesh: Mesh, *, seed: int = 0
    ) -> None:
        super().__init__()
        plan.check(mesh.size)
        _check_names(graph, plan)
        self.plan, self.mesh, self.graph = plan, mesh, graph
        graph.attach(model)
        self.draws = Draws(seed)
        mesh.agree("parallelize", (type(model).__name__, plan.to_json(), seed))
        self._executables: dict[Any, Executable] = {}
        self._synchronise = True
        planned = [
            plan_program(program, plan, ranks=mesh.size, rank=mesh.rank, draws=self.draws)
            for program in (graph.training, graph.evaluation)
        ]
        self.held = Held(
            model, [one for p in planned for one in p.lowered], ranks=mesh.size, rank=mesh.rank
        )
        self.fallbacks = tuple(dict.fromkeys(name for p in planned for name in p.fallbacks))
        shell = self.held.model
        self.__dict__["shell"] = shell
        self._parameters, self._buffers = shell._parameters, shell._buffers
        self._modules = shell._modules
        self._non_persistent_buffers_set = shell._non_persistent_buffers_set
        self.training = model.training
        optimizers.watch()
        state.install(self)

    # -- running ---------------------------------------------------------------------------

    def forward(self, *inputs: Any, batch: int | None = None) -> Any:
        """Run on this rank's slabs; `batch` is the global batch where it is not the example's."""
        return self._run(inputs, self._example(batch))

    def loss(self, *tensors: Any, batch: int | None = None) -> Tensor:
        """Return the loss of input slabs and target slabs, the same on every rank."""
        examples = self._example(batch)
        targets = self._targets(batch)
        return cast(Tensor, self._run(tensors, examples, targets))

    def at(self, *shapes: tuple[int, ...]) -> At:
        """Return this model, with the same parameters, for inputs of other global shapes."""
        return At(self, self._reshaped(shapes))

    def _run(self, tensors: tuple[Any, ...], examples: tuple[Any, ...], targets: Any = None) -> Any:
        executable = self._executable(examples, targets)
        leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        self._check_slabs(leaves, executable)
        self.draws.step += 1
        outputs = executable.run(leaves, sync=self._synchronise)
        return _restore(outputs, executable.planned.program)

    def _executable(self, examples: tuple[Any, ...], targets: Any = None) -> Executable:
        modes = self._modes()
        key = (_key(examples), _key(targets), tuple(modes.values()))
        if key not in self._executables:
            program = self.graph.program(modes, examples, targets)
            planned = plan_program(
                program,
                self.plan,
                ranks=self.mesh.size,
                rank=self.mesh.rank,
                draws=self.draws,
            )
            self._executables[key] = Executable(
                planned, self.plan, self.mesh, self.held, self.draws
            )
        return self._executables[key]

    def _modes(self) -> dict[str, bool]:
        self.__dict__["shell"].training = self.training
        return {path: module.training for path, module in self.__dict__["shell"].named_modules()}

    def _check_slabs(self, tensors: list[Tensor], executable: Executable) -> None:
        """Agree on this pass with all ranks before the first message."""
        layouts = executable.input_layouts
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [layout.local_shape(self.mesh.rank) for layout in layouts]
        error = None
        if shapes != expected:
            error = (
                f"slabs of shape {shapes} do not fit, rank {self.mesh.rank} holds {expected} of "
                f"the global {[layout.shape for layout in layouts]}; use scatter(), or say "
                "batch= or at() for another global shape"
            )
        facts = (
            [layout.shape for layout in layouts],
            [(str(tensor.dtype), tensor.requires_grad) for tensor in tensors],
            "train" if self.training else "eval",
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            [name for name, p in self.named_parameters() if not p.requires_grad],
            self._synchronise,
        )
        self.mesh.agree("forward", facts, error=error)

    # -- shapes ----------------------------------------------------------------------------

    def _example(self, batch: int | None) -> tuple[Any, ...]:
        return self._with_batch(self.graph.inputs, batch)

    def _targets(self, batch: int | None) -> tuple[Any, ...]:
        if self.graph.targets is None:
            raise PlanError("loss: the model was parallelized without a loss; pass loss=")
        return self._with_batch(self.graph.targets, batch)

    def _with_batch(self, examples: tuple[Any, ...], batch: int | None) -> tuple[Any, ...]:
        if batch is None:
            return examples
        old = next(leaf.shape[0] for leaf in tree_leaves(self.graph.inputs) if leaf.dim())

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != old:
                return leaf
            return _like(leaf, (batch, *leaf.shape[1:]))

        changed: tuple[Any, ...] = tree_map(change, examples)
        return changed

    def _reshaped(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
        leaves, spec = tree_flatten(self.graph.inputs)
        if len(shapes) != sum(isinstance(leaf, Tensor) for leaf in leaves):
            raise PlanError(f"at: {len(shapes)} shapes for {len(leaves)} inputs")
        remaining = iter(shapes)
        changed = [
            _like(leaf, next(remaining)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        return cast(tuple[Any, ...], tree_unflatten(changed, spec))

    @property
    def input_layouts(self) -> tuple[Layout, ...]:
        """How the inputs are cut; with a loss, its targets come after them."""
        return self._executable(self.graph.inputs, self.graph.targets).input_layouts

    @property
    def output_layouts(self) -> tuple[Layout, ...]:
        """How the outputs are cut."""
        return self._executable(self.graph.inputs).output_layouts

    def scatter(self, *tensors: Any, batch: int | None = None) -> Any:
        """Cut this rank's slabs out of whole inputs (and targets), which every rank has."""
        examples = self._example(batch)
        count = len(tree_leaves(examples))
        given = tree_leaves(tensors)
        targets = self._targets(batch) if len(given) > count else None
        return _scatter(self.mesh, self._executable(examples, targets), tensors)

    def gather(self, outputs: Any, *, batch: int | None = None) -> Any:
        """Return whole outputs on every rank from this rank's slabs of them."""
        return _gather(self.mesh, self._executable(self._example(batch)), outputs)

    def mean(self, values: Tensor, *, output: int = 0) -> Tensor:
        """Return the mean of a tensor that is split as an output is, over all ranks.

        Its gradient is that of the mean on one device.
        """
        axes = self.output_layouts[output].axes
        partial = Axes(Axis(a.size, PARTIAL if a.dim >= 0 else a.dim) for a in axes)
        exchange = Exchange(
            self.mesh,
            Layout((2,), partial),
            Layout.replicated((2,), ranks=self.mesh.size),
            layer="mean",
        )
        count = torch.tensor(float(values.numel()), dtype=values.dtype, device=values.device)
        total = exchange(torch.stack([values.sum(), count]))
        return total[0] / total[1].detach()

    # -- training --------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of passes in this block aside; the next pass after it sums them too."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def train(self, mode: bool = True) -> ParallelModel:
        super().train(mode)
        return self

    def gather_held(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor that is cut as the parameter `name` is, whole on every rank."""
        cover = self.held.covers[name]
        whole = whole_cover(cover.shape, self.mesh.size)
        return Exchange(self.mesh, cover, whole, layer=name).start(local.detach()).finish()

    def cover(self, name: str) -> Cover:
        """Return how a parameter or buffer is cut over the ranks."""
        return at_rest(self.held.covers[name])

    def extra_repr(self) -> str:
        return f"ranks={self.mesh.size}, rank={self.mesh.rank}"


class At:
    """A parallel model for another global input shape."""

    def __init__(self, model: ParallelModel, examples: tuple[Any, ...]) -> None:
        self.model, self.examples = model, examples

    def __call__(self, *inputs: Any) -> Any:
        """Run on this rank's slabs of inputs of this shape."""
        return self.model._run(inputs, self.examples)

    @property
    def input_layouts(self) -> tuple[Layout, ...]:
        return self.model._executable(self.examples).input_layouts

    @property
    def output_layouts(self) -> tuple[Layout, ...]:
        return self.model._executable(self.examples).output_layouts

    def scatter(self, *tensors: Any) -> Any:
        """Cut this rank's slabs out of whole inputs."""
        return _scatter(self.model.mesh, self.model._executable(self.examples), tensors)

    def gather(self, outputs: Any) -> Any:
        """Return whole outputs on every rank."""
        return _gather(self.model.mesh, self.model._executable(self.examples), outputs)


def _scatter(mesh: Mesh, executable: Executable, tensors: tuple[Any, ...]) -> Any:
    leaves, spec = tree_flatten(tensors)
    layouts = executable.input_layouts
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if shapes != [layout.shape for layout in layouts[: len(shapes)]]:
        raise PlanError(
            f"scatter: tensors of shape {shapes} are not the global inputs "
            f"{[layout.shape for layout in layouts]}; say batch= or at() for another shape"
        )
    slabs = [leaf[layout.slab(mesh.rank)].contiguous() for leaf, layout in zip(leaves, layouts)]
    out = tree_unflatten(slabs, spec)
    return out[0] if len(out) == 1 else out


def _gather(mesh: Mesh, executable: Executable, outputs: Any) -> Any:
    leaves, spec = tree_flatten(outputs)
    whole = []
    for leaf, layout in zip(leaves, executable.output_layouts, strict=True):
        target = Layout.replicated(layout.shape, ranks=mesh.size)
        whole.append(Exchange(mesh, layout, target, layer="gather")(leaf))
    return tree_unflatten(whole, spec)


def _restore(outputs: tuple[Tensor, ...], program: Any) -> Any:
    found = iter(outputs)
    leaves = [next(found) if hasattr(value, "origin") else value for value in program.outputs]
    return tree_unflatten(leaves, program.out_spec)


def _like(example: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(tuple(shape), dtype=example.dtype, device="meta")


def _key(examples: Any) -> Any:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in tree_leaves(examples)
    )


def _check_names(graph: Graph, plan: Plan) -> None:
    known = {layer.name for layer in graph.layers}
    unknown = [name for name in plan.layers if name not in known]
    if unknown:
        raise PlanError(
            f"plan: it names {unknown[0]!r}, which is not a layer of this model; the plan was "
            "made for another model"
        )
