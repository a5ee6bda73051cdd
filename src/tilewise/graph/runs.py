"""The programs of a parallel model: planned for each mode and shape, bound to the mesh when run.

Planning is local: any rank may ask how something would be cut. Binding opens groups and numbers
messages, so all ranks do it together, after they have agreed on what they are about to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.comm import Exchange, Mesh
from tilewise.graph.captured import Graph
from tilewise.graph.executable import Executable, output_layouts
from tilewise.graph.graph import Program
from tilewise.graph.held import Held
from tilewise.graph.lower import Planned, plan_program
from tilewise.graph.shapes import key
from tilewise.graph.sync import Aside
from tilewise.layout import Layout
from tilewise.ops.draws import Draws
from tilewise.plan import Plan


class Runs:
    """All programs of a parallel model.

    `shell` is the module tree whose modes decide which program runs.
    """

    def __init__(
        self, graph: Graph, plan: Plan, mesh: Mesh, held: Held, draws: Draws, shell: nn.Module
    ) -> None:
        self.graph, self.plan, self.mesh, self.held = graph, plan, mesh, held
        self.draws, self.shell = draws, shell
        self.aside = Aside()
        self._planned: dict[Any, Planned] = {}
        self._executables: dict[Any, Executable] = {}
        self._exchanges: dict[tuple[Layout, Layout], Exchange] = {}

    def modes(self) -> dict[str, bool]:
        """Return whether each module trains."""
        return {path: module.training for path, module in self.shell.named_modules()}

    def planned(self, examples: tuple[Any, ...], targets: Any = None) -> Planned:
        """Plan the program of the present modes for inputs of these shapes."""
        modes = self.modes()
        which = (key(examples), key(targets), tuple(modes.values()))
        if which not in self._planned:
            # The caller's own modes must not get into a program that later passes share.
            with torch.inference_mode(False), torch.enable_grad(), _no_autocast():
                program = self.graph.program(modes, examples, targets)
                self._planned[which] = plan_program(
                    program, self.plan, ranks=self.mesh.size, rank=self.mesh.rank, draws=self.draws
                )
        return self._planned[which]

    def input_layouts(self, examples: tuple[Any, ...], targets: Any = None) -> tuple[Layout, ...]:
        """Return how the inputs, and the targets after them, are cut."""
        planned = self.planned(examples, targets)
        return tuple(planned.layouts[value] for value in planned.program.inputs)

    def output_layouts(self, examples: tuple[Any, ...]) -> tuple[Layout, ...]:
        """Return how the outputs are cut."""
        return output_layouts(self.planned(examples), self.plan)

    def run(
        self, tensors: list[Tensor], examples: tuple[Any, ...], targets: Any, *, sync: bool
    ) -> tuple[tuple[Tensor, ...], Planned]:
        """Agree with all ranks on a pass and run it."""
        planned = self.planned(examples, targets)
        layouts = self.input_layouts(examples, targets)
        self.mesh.agree(
            "forward", self._facts(tensors, layouts, sync), error=self._error(tensors, layouts)
        )
        executable = self._executables.get(id(planned))
        if executable is None:
            with torch.inference_mode(False):
                executable = Executable(
                    planned, self.plan, self.mesh, self.held, self.draws, self.aside
                )
            self._executables[id(planned)] = executable
        self.draws.step += 1
        return executable.run(tensors, sync=sync), planned

    def exchange(self, source: Layout, target: Layout, *, layer: str) -> Exchange:
        """Return an exchange between two layouts, made ready once; all ranks ask together."""
        found = self._exchanges.get((source, target))
        if found is None:
            found = self._exchanges[source, target] = Exchange(
                self.mesh, source, target, layer=layer
            )
        return found

    def _error(self, tensors: list[Tensor], layouts: tuple[Layout, ...]) -> str | None:
        """Say what is wrong with this rank's part of a pass."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [layout.local_shape(self.mesh.rank) for layout in layouts]
        if shapes != expected:
            return (
                f"slabs of shape {shapes} do not fit, this rank holds {expected} of the global "
                f"{[layout.shape for layout in layouts]}; use scatter(), or say batch= or at() "
                "for another global shape"
            )
        empty = next((name for name in self.held.places if self.held.get(name).is_meta), None)
        if empty is not None:
            return f"{empty} has no values yet; call materialize() first"
        return None

    def _facts(
        self, tensors: list[Tensor], layouts: tuple[Layout, ...], sync: bool
    ) -> dict[str, Any]:
        """Return what all ranks must bring alike to a pass."""
        device = tensors[0].device.type
        training = self.modules[""].training
        return {
            "shapes": [layout.shape for layout in layouts],
            "dtypes": [str(tensor.dtype) for tensor in tensors],
            "inputs with gradients": [i for i, t in enumerate(tensors) if t.requires_grad],
            "training": training,
            "but for": [p for p, module in self.modules.items() if module.training != training],
            "gradients": torch.is_grad_enabled(),
            "autocast": torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device)),
            "frozen": [
                name for name in self.held.parameters if not self.held.get(name).requires_grad
            ],
            "no_sync": not sync,
        }


def _no_autocast() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)
