"""The public result of capture: layers, and programs for any mode and shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tilewise.errors import CaptureError
from tilewise.graph.capture import Tracer
from tilewise.graph.graph import Node, Program, Value
from tilewise.graph.labels import SPACE, labels
from tilewise.graph.rule import REGISTRY
from tilewise.plan import Layer


class Graph:
    """A captured model.

    The training program describes its layers; programs for other modes and shapes are traced when
    they are asked for, share the parameters, and name their layers alike.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        loss: Callable[..., Any] | None,
        targets: tuple[Any, ...] | None,
    ) -> None:
        self.tracer: Tracer | None = Tracer(model, loss)
        self.inputs = tree_map(self.tracer.faked, inputs)
        self.loss = loss
        self.targets: tuple[Any, ...] | None = None
        if loss is not None:
            self.targets = (
                self.tracer.guess_targets(self.inputs)
                if targets is None
                else tree_map(self.tracer.faked, targets)
            )
        self._programs: dict[Any, Program] = {}

    def attach(self, model: nn.Module) -> None:
        """Give a graph that came from another process the model it was captured from."""
        if self.tracer is None:
            self.tracer = Tracer(model, self.loss)

    def __getstate__(self) -> dict[str, Any]:
        traced = {"training": self.training, "evaluation": self.evaluation, "plain": self.plain}
        examples = {
            "inputs": tree_map(_meta, self.inputs),
            "targets": tree_map(_meta, self.targets),
        }
        known = {"modules": self.modules, "idle_bytes": self.idle_bytes, "tracer": None}
        return self.__dict__ | traced | examples | known

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The paths of all modules."""
        assert self.tracer is not None
        return tuple(path for path, _ in self.tracer.template.named_modules())

    @cached_property
    def idle_bytes(self) -> int:
        """Bytes of parameters and buffers that training does not read, which every rank holds."""
        assert self.tracer is not None
        template = self.tracer.template
        aliases: dict[Tensor, list[str]] = {}
        for named in (template.named_parameters, template.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                aliases.setdefault(tensor, []).append(name)
        values = (value for node in self.training.nodes for value in node.values())
        read = {str(value.source) for value in values if value.held}
        idle = (tensor for tensor, names in aliases.items() if read.isdisjoint(names))
        return sum(tensor.numel() * tensor.element_size() for tensor in idle)

    def modes(self, training: bool) -> dict[str, bool]:
        """Return the mode of every module after `train()` or `eval()`."""
        return dict.fromkeys(self.modules, training)

    def program(
        self,
        modes: dict[str, bool],
        inputs: tuple[Any, ...] | None = None,
        targets: tuple[Any, ...] | None = None,
    ) -> Program:
        """Return the program for these modes and input shapes; with targets, that of the loss."""
        inputs = self.inputs if inputs is None else inputs
        key = (tuple(modes.items()), _shapes(inputs), _shapes(targets))
        if key not in self._programs:
            if self.tracer is None:
                raise CaptureError("capture: this graph came without its model; attach() it first")
            self._programs[key] = self.tracer.trace(inputs, targets, modes)
        return self._programs[key]

    @cached_property
    def training(self) -> Program:
        """The training program, with the loss where one was given."""
        return self.program(self.modes(True), targets=self.targets)

    @cached_property
    def plain(self) -> Program:
        """The training program without the loss."""
        return self.program(self.modes(True))

    @cached_property
    def evaluation(self) -> Program:
        """The evaluation program, without the loss."""
        return self.program(self.modes(False))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in program order, with what a plan needs to know of them."""
        named = labels(self.training)
        found = [_layer(node, named) for node in self.training.nodes]
        seen = {layer.name for layer in found}
        named = labels(self.evaluation)
        found += [_layer(n, named) for n in self.evaluation.nodes if n.name not in seen]
        return tuple(found)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one forward pass."""
        return sum(layer.flops for layer in self.layers)

    def __repr__(self) -> str:
        rows = [
            f"  {layer.name}: {layer.kind} {'×'.join(map(str, layer.shape))}"
            for layer in self.layers
        ]
        return "\n".join(["Graph(", *rows, ")"])


def capture(
    model: nn.Module,
    inputs: Any,
    loss: Callable[..., Any] | None = None,
    *,
    targets: tuple[Any, ...] | None = None,
) -> Graph:
    """Capture a model for example inputs, which may be fake or meta tensors.

    With `loss`, a function of (output, *targets), the loss becomes part of the graph. Targets are
    examples like the inputs; without them their shape is guessed from the output.
    """
    inputs = as_tuple(inputs)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)):
        raise CaptureError("capture: example inputs hold no tensor")
    return Graph(model, inputs, loss, None if targets is None else as_tuple(targets))


def as_tuple(inputs: Any) -> tuple[Any, ...]:
    """Return positional inputs as a tuple; a single one may stand alone."""
    if isinstance(inputs, tuple):
        return inputs
    return tuple(inputs) if isinstance(inputs, list) else (inputs,)


def _meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")


def _shapes(tree: Any) -> Any:
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in tree_leaves(tree)
    )


def _layer(node: Node, named: dict[Value, str]) -> Layer:
    parameters = [value for value in node.values() if value.origin == "parameter"]
    return Layer(
        node.name,
        node.kind,
        node.out.shape,
        _extents(node, named),
        tuple(str(value.source) for value in parameters),
        sum(prod(value.shape) for value in parameters),
        node.flops,
    )


def _extents(node: Node, named: dict[Value, str]) -> dict[str, int]:
    """Return the degrees that the layer has, and how far each can be cut."""
    registered = REGISTRY.get(node.kind)
    if registered is None or not registered.cuts:
        return {}
    text = named[node.out]
    found = {
        letter: node.out.shape[dim] for dim, letter in enumerate(text) if letter in "n" + SPACE
    }
    if "c" not in text:
        return found
    filters = node.out.shape[text.index("c")]
    if node.kind.startswith("conv") or node.kind == "linear":
        return found | _channel_extents(node, filters)
    return found | {"c": filters, "f": filters, "cf": filters} if found or filters else found


def _channel_extents(node: Node, filters: int) -> dict[str, int]:
    x = node.args[0]
    channels = x.shape[-1] if node.kind == "linear" else x.shape[1]
    groups = _groups(node)
    if groups > 1:
        return {"c": groups, "f": groups, "cf": groups}
    return {"c": channels, "f": filters}


def _groups(node: Node) -> int:
    if node.kind == "linear":
        return 1
    weight = node.args[1].shape
    channels = node.args[0].shape[1]
    if "transpose" in node.kind:
        return int(node.out.shape[1] // weight[1])
    return int(channels // weight[1])
