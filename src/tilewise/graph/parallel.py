"""The parallel model: an ordinary nn.Module over this rank's slabs and blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.comm import Mesh
from tilewise.errors import PlanError, meant
from tilewise.graph import optimizers, state
from tilewise.graph.at import At
from tilewise.graph.captured import Graph
from tilewise.graph.executable import Watch
from tilewise.graph.held import Held, at_rest, digest
from tilewise.graph.lower import plan_program
from tilewise.graph.materialize import Init, materialize
from tilewise.graph.runs import Runs
from tilewise.graph.shapes import Shape, batch_of, tensors_in, with_batch, with_shapes
from tilewise.layout import Cover, Layout
from tilewise.ops.draws import Draws
from tilewise.plan import Plan
from tilewise.plan.given import is_file, whole_degrees

PlanLike = str | Mapping[str, str] | Plan | Path


def as_plan(graph: Graph, plan: PlanLike) -> Plan:
    """Read degrees for all layers, degrees by layer pattern, or a plan file."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Path) or (isinstance(plan, str) and is_file(plan)):
        return Plan.load(plan)
    if isinstance(plan, str):
        return Plan.uniform(graph, whole_degrees(plan))
    return Plan.of(graph, plan)


class ParallelModel(nn.Module):
    """A split model. Call it with this rank's slabs; it returns this rank's slabs.

    Modules, parameters and buffers keep their names and classes; tensors that the plan cuts hold
    this rank's block. Layers run from the captured graph: a module's own forward, and hooks on it,
    are not called. A submodule that has the name of a method here is found in `_modules`.

    Gradients are summed over the ranks that share a block during backward, so that every rank has
    the gradient of one device. A loss of a split output counts once for each distinct slab: the
    gradient is that of the *sum* of the ranks' losses. Use `loss` or `mean` for a mean.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        plan: Plan,
        mesh: Mesh,
        *,
        seed: int = 0,
        read_halos: bool = False,
    ) -> None:
        super().__init__()
        plan.check(mesh.size)
        check_names(graph, plan)
        graph.attach(model)
        mesh.agree("parallelize", _facts(model, graph, plan, seed))
        mesh.agree(
            "parallelize: the model must have the same values on every rank; seed all ranks alike "
            "before building it, or load the same checkpoint",
            digest(model),
        )
        self.plan, self.mesh, self.graph, self.draws = plan, mesh, graph, Draws(seed)
        planned = [
            plan_program(program, plan, ranks=mesh.size, rank=mesh.rank, draws=self.draws)
            for program in (graph.training, graph.evaluation)
        ]
        self.fallbacks = tuple(dict.fromkeys(name for p in planned for name in p.fallbacks))
        lowered = [one for p in planned for one in p.lowered]
        self.held = Held(model, lowered, ranks=mesh.size, rank=mesh.rank)
        shell = self.held.model
        modules = dict(shell.named_modules()) | {"": self}
        self.runs = Runs(graph, plan, mesh, self.held, self.draws, modules, read_halos=read_halos)
        self.synchronises = True
        self.training = model.training
        self._parameters, self._buffers = shell._parameters, shell._buffers
        self._modules = shell._modules
        self._non_persistent_buffers_set = shell._non_persistent_buffers_set
        optimizers.watch(self)
        state.install(self)

    # -- running ---------------------------------------------------------------------------

    def forward(self, *inputs: Any, batch: int | None = None) -> Any:
        """Run on this rank's slabs; `batch` is the global batch where it is not the example's."""
        return self._of_batch(batch)(*inputs)

    def loss(self, *tensors: Any, batch: int | None = None) -> Tensor:
        """Return the loss of input slabs and target slabs, the same on every rank."""
        return self._of_batch(batch).loss(*tensors)

    def mean(self, values: Tensor, *, output: int = 0, batch: int | None = None) -> Tensor:
        """Return the mean of a tensor that is split as an output is, over all ranks.

        Its gradient is that of the mean on one device. Values may lack dims that are not cut.
        Those of a pass at another global shape go to `at(...).mean`.
        """
        return self._of_batch(batch).mean(values, output=output, guessed=batch is None)

    # -- shapes ----------------------------------------------------------------------------

    def at(self, *shapes: Shape) -> At:
        """Return this model, with the same parameters, for inputs of other global shapes.

        Targets of a loss follow the inputs; where they are left out, their shapes are guessed.
        """
        remaining = iter(shapes)
        inputs = with_shapes(self.graph.inputs, remaining)
        rest = list(remaining)
        if not rest:
            return At(self, inputs)
        if len(rest) != len(tensors_in(self.graph.targets)):
            raise PlanError(
                f"at: {len(shapes)} shapes for {len(shapes) - len(rest)} inputs and "
                f"{len(tensors_in(self.graph.targets))} targets"
            )
        return At(self, inputs, with_shapes(self.graph.targets or (), iter(rest)))

    def _of_batch(self, batch: int | None) -> At:
        inputs, targets = self.graph.inputs, self.graph.targets
        if batch is not None:
            old = batch_of(inputs)
            inputs = with_batch(inputs, old, batch)
            targets = None if targets is None else with_batch(targets, old, batch)
        return At(self, inputs, targets)

    @property
    def input_layouts(self) -> tuple[Layout, ...]:
        """How the inputs are cut; with a loss, its targets come after them."""
        return self._of_batch(None).input_layouts

    @property
    def input_covers(self) -> tuple[Layout | Cover, ...]:
        """What forward takes: the input layouts, or with `read_halos` covers with their halo."""
        return self._of_batch(None).input_covers

    @property
    def output_layouts(self) -> tuple[Layout, ...]:
        """How the outputs are cut."""
        return self._of_batch(None).output_layouts

    def scatter(self, *tensors: Any, batch: int | None = None) -> Any:
        """Cut this rank's slabs out of whole inputs (and targets), which every rank has."""
        return self._of_batch(batch).scatter(*tensors)

    def formatted(self, *slabs: Tensor, batch: int | None = None) -> tuple[Tensor, ...]:
        """Return slabs in the memory format in which the model computes, if it has run before.

        Others are copied in every pass; outputs come in the format of the inputs, with channels
        outermost where that does not show, as with a single channel.
        """
        return self._of_batch(batch).formatted(*slabs)

    def gather(self, outputs: Any, *, batch: int | None = None) -> Any:
        """Return whole outputs on every rank from this rank's slabs of them."""
        return self._of_batch(batch).gather(outputs)

    # -- training --------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of passes in this block unsummed; the next pass after it sums them too.

        Until then `.grad` is this rank's share: the ranks' shares add up to the gradient, with all
        that was there before. Clearing or scaling it on all ranks does as it would with the whole.
        Hooks on parameters do not get these gradients.
        """
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Let `watch` see every layer of the passes in this block, before and after it runs."""
        before, self.runs.watch = self.runs.watch, watch
        try:
            yield
        finally:
            self.runs.watch = before

    # -- what the model holds --------------------------------------------------------------

    def materialize(
        self, init: Init | None = None, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> ParallelModel:
        """Give values to a model that was built on the meta device, to all that has none yet.

        One module after the other is made whole on the CPU, initialised, cut and freed, in the
        order of `nn.Module.apply`; only modules that hold tensors of their own are. Each rank
        ends with its blocks of what one device gets from

            torch.manual_seed(seed); model.to_empty(device="cpu"); model.apply(init)

        Args:
            init: a function of a module that sets its tensors; `module.reset_parameters()` by
                default. `lambda module: None` leaves blocks without values for load_state_dict.
            seed: of torch's generator, which is left as it was.
            device: where the blocks go. Build the optimizer afterwards.
        """
        materialize(
            self.held,
            init,
            seed,
            torch.device(device),
            lambda name: state.gather(self, name, self.held.get(name)),
        )
        return self

    def cover(self, name: str) -> Cover:
        """Return how a parameter or buffer is cut over the ranks."""
        return at_rest(self.held.covers[name])

    def gather_held(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor that is cut as the parameter `name` is, whole on every rank."""
        return state.gather(self, name, local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlanError(
            "a parallel model is tied to its mesh and can be neither copied nor pickled; load its "
            "full_state_dict() into a plain model and parallelize that, or save its state_dict()"
        )

    def extra_repr(self) -> str:
        return f"ranks={self.mesh.size}, rank={self.mesh.rank}"


def check_names(graph: Graph, plan: Plan) -> None:
    """Raise unless a plan's names and patterns are those of layers of the graph."""
    known = {layer.name for layer in graph.layers}
    unknown = [name for name in plan.layers if name not in known]
    if unknown:
        raise PlanError(
            f"plan: it names {unknown[0]!r}, which is not a layer of this model; "
            f"{meant(unknown[0], known)}the plan may have been made for another model"
        )
    for pattern in plan.recompute:
        if not any(Plan(recompute=(pattern,)).recomputes(name) for name in known):
            guess = meant(pattern, known)
            raise PlanError(
                f"plan: no layer matches {pattern!r}, which is to be recomputed{'; ' * bool(guess)}"
                f"{guess}".rstrip()
            )


def _facts(model: nn.Module, graph: Graph, plan: Plan, seed: int) -> dict[str, Any]:
    """Return what all ranks must bring alike; long texts as their hashes."""

    def short(text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    return {
        "model": type(model).__name__,
        "inputs": [tuple(tensor.shape) for tensor in tensors_in(graph.inputs)],
        "layers": short(repr(graph)),
        "plan": short(plan.to_json()),
        "seed": seed,
    }
