"""The programs of a parallel model: planned for each mode and shape, bound to the mesh when run.

Planning is local: any rank may ask how something would be cut. Binding opens groups and numbers
messages, so all ranks do it together, after they have agreed on what they are about to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.comm import Exchange, Mesh
from tilewise.graph.captured import Graph
from tilewise.graph.executable import Executable, Watch
from tilewise.graph.graph import Program
from tilewise.graph.halos import inputs_with_halos
from tilewise.graph.held import Held
from tilewise.graph.lower import Planned, draws_numbers, plan_program
from tilewise.graph.shapes import key
from tilewise.graph.shares import Shares
from tilewise.graph.steps import output_layouts
from tilewise.layout import Cover, Layout
from tilewise.ops.draws import Draws
from tilewise.ops.tune import tuning
from tilewise.plan import Plan


@dataclass
class Run:
    """One program: how its tensors are cut, and once it has run, its steps.

    `given` is what is handed in of the inputs: with their halo where they are read with it.
    """

    planned: Planned
    inputs: tuple[Layout, ...]
    given: tuple[Layout | Cover, ...]
    outputs: tuple[Layout, ...]
    executable: Executable | None = None


class Runs:
    """All programs of a parallel model; the modes of `modules` decide which one runs.

    Set `watch` to see the steps of every pass.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        mesh: Mesh,
        held: Held,
        draws: Draws,
        modules: Mapping[str, nn.Module],
        *,
        read_halos: bool = False,
    ) -> None:
        self.graph, self.plan, self.mesh, self.held = graph, plan, mesh, held
        self.draws, self.modules, self.read_halos = draws, modules, read_halos
        self.shares = Shares(mesh, held)
        self.watch: Watch | None = None
        self._runs: dict[Any, Run] = {}
        self._exchanges: dict[tuple[Layout | Cover, Layout | Cover, str], Exchange] = {}

    def find(self, examples: tuple[Any, ...], targets: Any = None) -> Run:
        """Return the program of the present modes for inputs of these shapes, planned."""
        modes = {path: module.training for path, module in self.modules.items()}
        which = (key(examples), key(targets), tuple(modes.values()))
        if which not in self._runs:
            # The caller's own modes must not get into a program that later passes share.
            with torch.inference_mode(False), torch.enable_grad(), no_autocast():
                program = self.graph.program(modes, examples, targets)
                planned = plan_program(
                    program, self.plan, ranks=self.mesh.size, rank=self.mesh.rank, draws=self.draws
                )
            if self.read_halos:
                planned.direct = inputs_with_halos(planned)
            inputs = tuple(planned.layouts[value] for value in program.inputs)
            given = tuple(planned.direct.get(v, planned.layouts[v]) for v in program.inputs)
            self._runs[which] = Run(planned, inputs, given, output_layouts(planned, self.plan))
        return self._runs[which]

    def run(
        self,
        tensors: list[Tensor],
        examples: tuple[Any, ...],
        targets: Any,
        *,
        sync: bool,
        error: str | None = None,
    ) -> tuple[tuple[Tensor, ...], Program]:
        """Agree with all ranks on a pass and run it, or raise this rank's error on all of them."""
        found = self.find(examples, targets)
        facts = self._facts(tensors, found.inputs, sync) if self.mesh.size > 1 else None
        error = error or self._error(tensors, found.given) or _drawn_again(found.planned.program)
        self.mesh.agree("forward", facts, error=error)
        if found.executable is None:
            with torch.inference_mode(False):
                found.executable = Executable(
                    found.planned, self.plan, self.mesh, self.held, self.draws, self.shares
                )
        self.draws.step += 1
        outputs = found.executable.run(tensors, sync=sync, watch=self.watch)
        return outputs, found.planned.program

    def outputs(self) -> list[tuple[Layout, ...]]:
        """Return how the outputs of all programs that have run are cut."""
        return [run.outputs for run in self._runs.values() if run.executable is not None]

    def exchange(self, source: Layout | Cover, target: Layout | Cover, *, layer: str) -> Exchange:
        """Return an exchange beside the programs, made ready once; all ranks ask together."""
        which = (source, target, layer)
        if which not in self._exchanges:
            self._exchanges[which] = Exchange(self.mesh, source, target, layer=layer)
        return self._exchanges[which]

    def _error(self, tensors: list[Tensor], layouts: tuple[Layout | Cover, ...]) -> str | None:
        """Say what is wrong with this rank's part of a pass."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [layout.local_shape(self.mesh.rank) for layout in layouts]
        if shapes != expected:
            return (
                f"slabs of shape {shapes} do not fit, this rank holds {expected} of the global "
                f"{[layout.shape for layout in layouts]}; use scatter(), or say batch= or at() "
                "for another global shape"
            )
        if any(t.requires_grad for t, cut in zip(tensors, layouts) if isinstance(cut, Cover)):
            return (
                "an input that comes with its halo has no gradient of its own slab; parallelize "
                "without read_halos to have it"
            )
        for parent, name, path, module in self._submodules:
            if parent._modules.get(name) is not module:
                return (
                    f"{path} is not the module that was split; change its tensors in place, or "
                    "parallelize a model with the other module"
                )
        empty = next((name for name in self.held.places if self.held.get(name).is_meta), None)
        if empty is not None:
            return f"{empty} has no values yet; call materialize() first"
        return None

    @cached_property
    def _submodules(self) -> list[tuple[nn.Module, str, str, nn.Module]]:
        """List the modules that were split, with their parents and names there."""
        found = []
        for path, module in self.modules.items():
            parent, _, name = path.rpartition(".")
            if path:
                found.append((self.modules[parent], name, path, module))
        return found

    def _facts(
        self, tensors: list[Tensor], layouts: tuple[Layout, ...], sync: bool
    ) -> dict[str, Any]:
        """Return what all ranks must bring alike to a pass."""
        device = tensors[0].device.type if tensors else "cpu"
        training = self.modules[""].training
        return {
            "shapes": [layout.shape for layout in layouts],
            "dtypes": [str(tensor.dtype) for tensor in tensors],
            "inputs with gradients": [i for i, t in enumerate(tensors) if t.requires_grad],
            "training": training,
            "but for": [p for p, module in self.modules.items() if module.training != training],
            "gradients": torch.is_grad_enabled(),
            "tuning": tuning(),
            "autocast": torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device)),
            "frozen": [
                name for name in self.held.parameters if not self.held.get(name).requires_grad
            ],
            "no_sync": not sync,
            "gradients to be summed": self.shares.names,
        }


def _drawn_again(program: Program) -> str | None:
    """Say why a pass with random layers cannot run in backward: it would draw others there."""
    if torch._C._current_graph_task_id() == -1 or not draws_numbers(program):
        return None
    return (
        "a pass of random layers was started in backward, as torch.utils.checkpoint does, and "
        "would not draw what the first one drew; say in the plan which layers are computed again, "
        "as in Plan.uniform(graph, degrees, recompute=('*',))"
    )


@contextmanager
def no_autocast() -> Iterator[None]:
    """Compute in the tensors' own dtypes, whatever the caller's autocast says."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
