"""Read an exported graph into a program of operator calls.

In-place operators are rewritten so that every value is written once: whoever reads the old name
afterwards, or a view of it, reads the new value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tilewise.errors import CaptureError
from tilewise.graph.graph import Names, Node, Program, Value, op_name, values_in

MODEL, LOSS = "model.", "loss."
aten = torch.ops.aten

SAME_ORDER = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
    "ravel", "unsafe_view", "alias", "detach", "contiguous", "to", "type_as", "dropout",
    "feature_dropout", "alpha_dropout", "feature_alpha_dropout",
}  # fmt: skip
"""Calls whose result may be the operand's memory, read in the same order."""


class Reader:
    """Read one exported program."""

    def __init__(
        self, exported: Any, leaves: set[str], cumulative: set[str], trained: set[str]
    ) -> None:
        self.exported = exported
        self.cumulative, self.trained = cumulative, trained
        self.names = Names(leaves)
        self.env: dict[Any, Any] = {}
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self.current: dict[Value, Value] = {}
        self.view_of: dict[Value, Node] = {}
        self.storage: dict[Value, int] = {}
        self.count = 0

    def program(self) -> Program:
        signature = self.exported.graph_signature
        held = {
            "parameter": signature.inputs_to_parameters,
            "buffer": signature.inputs_to_buffers,
            "constant": signature.inputs_to_lifted_tensor_constants,
        }
        outputs: list[Any] = []
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                value = self.env[node] = self._placeholder(node, held)
                if value is not None:
                    self.storage[value] = node.meta["val"].untyped_storage()._cdata
            elif node.op == "output":
                outputs = list(node.args[0])
            else:
                self._call(node, self.env, self.exported.graph_module, no_grad=False)
        found = [self._value(o) if isinstance(o, torch.fx.Node) else o for o in outputs]
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            raise CaptureError(
                "capture: the exported graph mutates its inputs functionally; this form of "
                "torch.export is not supported"
            )
        return Program(
            self._live(found),
            tuple(self.inputs),
            self.exported.call_spec.in_spec,
            tuple(found),
            self.exported.call_spec.out_spec,
        )

    def _live(self, outputs: list[Any]) -> tuple[Node, ...]:
        """Drop nodes whose results nobody reads, such as views remade after a mutation."""
        wanted = {value for value in outputs if isinstance(value, Value)}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            effect = node.in_place is not None and any(value.held for value in node.values())
            effect = effect or node.kind in ("batch_norm", "instance_norm")
            if effect or any(out in wanted for out in node.outs):
                wanted.update(node.values())
                kept.append(node)
        return tuple(reversed(kept))

    def _placeholder(self, node: Any, held: dict[str, dict[str, str]]) -> Value | None:
        example = node.meta.get("val")
        if not isinstance(example, Tensor):
            return None
        for origin, names in held.items():
            if node.name in names:
                source = names[node.name]
                if origin == "parameter" and source.startswith(LOSS):
                    raise CaptureError(
                        f"capture: the loss has a parameter of its own ({source.removeprefix(LOSS)}"
                        "); make it part of the model"
                    )
                constant = None
                if origin == "constant" or source.startswith(LOSS):
                    origin = "constant"
                    constant = self._constant(source)
                name = source.removeprefix(MODEL)
                return Value(
                    node.name,
                    tuple(example.shape),
                    example.dtype,
                    origin,
                    name,
                    constant,
                    trained=origin == "parameter" and name in self.trained,
                )
        value = Value(node.name, tuple(example.shape), example.dtype, "input", len(self.inputs))
        self.inputs.append(value)
        return value

    def _constant(self, source: str) -> Tensor | None:
        found = self.exported.constants.get(source)
        if found is None:
            found = self.exported.state_dict.get(source)
        if found is None:
            found = dict(self.exported.graph_module.named_buffers()).get(source)
        if isinstance(found, FakeTensor) or not isinstance(found, Tensor):
            return None
        return found.detach()

    def _value(self, node: Any, env: dict[Any, Any] | None = None) -> Any:
        found = (self.env if env is None else env)[node]
        return self._latest(found)

    def _latest(self, found: Any) -> Any:
        if isinstance(found, Value):
            while found in self.current:
                found = self.current[found]
            return found
        if isinstance(found, (list, tuple)):
            return type(found)(self._latest(item) for item in found)
        return found

    def _call(self, node: Any, env: dict[Any, Any], owner: Any, *, no_grad: bool) -> None:
        if node.op == "get_attr":
            found = owner
            for part in node.target.split("."):
                found = getattr(found, part)
            if isinstance(found, Tensor):
                found = Value(
                    node.name, tuple(found.shape), found.dtype, "constant", node.target, found
                )
            env[node] = found
            return
        args = torch.fx.node.map_arg(node.args, lambda n: self._value(n, env))
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: self._value(n, env))
        if node.target is operator.getitem:
            env[node] = args[0][args[1]]
            return
        if "set_grad_enabled" in str(node.target):
            enabled, submodule, *operands = args
            self._inline(node, env, submodule, operands, no_grad=not enabled)
            return
        if node.target is aten._assert_tensor_metadata.default:
            env[node] = None  # it guards a cast while tracing, and computes nothing
            return
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(
                f"capture: {node.target} at '{self._path(node)}' is not an operator call; "
                "control flow that depends on values cannot be split"
            )
        env[node] = self._operator(node, args, dict(kwargs), no_grad=no_grad)

    def _inline(
        self,
        node: Any,
        env: dict[Any, Any],
        submodule: Any,
        operands: Sequence[Any],
        *,
        no_grad: bool,
    ) -> None:
        inner: dict[Any, Any] = {}
        feed = iter(operands)
        for item in submodule.graph.nodes:
            if item.op == "placeholder":
                inner[item] = next(feed)
            elif item.op == "output":
                result = torch.fx.node.map_arg(item.args[0], lambda n: self._value(n, inner))
                env[node] = result
            else:
                self._call(item, inner, submodule, no_grad=no_grad)

    def _path(self, node: Any) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(list(stack.values())))[0] if stack else ""
        path = path if isinstance(path, str) else ""
        if path == "model" or path.startswith(MODEL):
            return path.removeprefix("model").removeprefix(".")
        return path

    def _operator(
        self, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, no_grad: bool
    ) -> Any:
        op = node.target
        path = self._path(node)
        mutated = _mutated(op, args, kwargs)
        functional = _functional(op) if mutated and not mutated[0].held else op
        if mutated and functional is None:
            raise CaptureError(
                f"capture: {op} at '{path}' writes into a tensor and has no form that does not; "
                "write the layer without the in-place operator"
            )
        kind = op_name(functional)
        if kind == "batch_norm" and path in self.cumulative:
            counter = self._counter(args[3])
            kwargs = {**kwargs, "momentum": None, "num_batches_tracked": counter}
        example = node.meta["val"]
        several = isinstance(example, (list, tuple))
        outs = tuple(
            self._new(f"{node.name}.{i}" if several else node.name, item)
            for i, item in enumerate(example if several else [example])
        )
        in_values = values_in((args, kwargs))
        for out, item in zip(outs, example if several else [example]):
            self.storage[out] = item.untyped_storage()._cdata
        if kind.endswith("dropout") and (args[1] == 0 or not args[2]):
            self.storage[outs[0]] = self.storage[in_values[0]]  # torch hands the operand back
        main = not (mutated and mutated[0].held) and kind != "pad"
        name = self.names.take(path, kind, main=main)
        in_place = op if mutated else None
        made = Node(name, functional, tuple(args), kwargs, outs, path, several, in_place, no_grad)
        self.nodes.append(made)
        if mutated and not mutated[0].held:
            self._write(mutated[0], outs[0])
        elif not mutated and in_values:
            for out in outs:
                if self.storage.get(out) == self.storage.get(in_values[0], -1):
                    self.view_of[out] = made
        if mutated and mutated[0].held and not several:
            return mutated[0]  # whoever reads the result reads what the model holds
        return list(outs) if several else outs[0]

    def _counter(self, running_mean: Value) -> Value:
        """Return the batch counter that belongs to a batch norm's running mean."""
        wanted = str(running_mean.source).replace("running_mean", "num_batches_tracked")
        for value in self.env.values():
            if isinstance(value, Value) and value.origin == "buffer" and value.source == wanted:
                return value
        raise CaptureError(f"capture: no buffer {wanted} beside {running_mean.source}")

    def _new(self, name: str, example: Any) -> Value:
        self.count += 1
        if not isinstance(example, Tensor):
            raise CaptureError(
                f"capture: {name} is a {type(example).__name__} that depends on values; a split "
                "model can only pass tensors between layers"
            )
        return Value(name, tuple(example.shape), example.dtype, "node")

    def _write(self, old: Value, new: Value) -> None:
        """Let later readers of `old`, of what it views and of its views see `new`."""
        self.current[old] = new
        view = self.view_of.get(old)
        if view is not None:
            source = self._latest(view.values()[0])
            whole = self._unview(view, old, new)
            if source.held:
                self._store(source, whole, view.path)
            else:
                self._write(source, whole)
            self.view_of[new] = replace(view, args=self._latest_tree(view.args), outs=(new,))
        for value, node in list(self.view_of.items()):
            operand = node.values()[0]
            if value not in self.current and self._latest(operand) is not operand:
                self._remake(node)

    def _store(self, held: Value, new: Value, path: str) -> None:
        """Write a tensor into what the model holds."""
        copy = aten.copy_.default
        out = Value(f"{held.name}'", held.shape, held.dtype, "node")
        name = self.names.take(path, op_name(copy), main=False)
        self.nodes.append(Node(name, copy, (held, new), {}, (out,), path, in_place=copy))

    def _remake(self, node: Node) -> None:
        """Take a view again, of the tensor as it is now."""
        outs = tuple(self._new(f"{out.name}'", _example(out)) for out in node.outs)
        name = self.names.take(node.path, node.kind, main=False)
        made = replace(node, name=name, args=self._latest_tree(node.args), outs=outs)
        self.nodes.append(made)
        for old, new in zip(node.outs, outs):
            self.current[old] = new
            self.view_of[new] = made
            self.storage[new] = self.storage[old]

    def _latest_tree(self, tree: Any) -> Any:
        if isinstance(tree, (tuple, list)):
            return type(tree)(self._latest_tree(item) for item in tree)
        return self._latest(tree)

    def _unview(self, view: Node, old: Value, new: Value) -> Value:
        """Return the viewed tensor with the view's part replaced by `new`."""
        source = self._latest(view.values()[0])
        kind = view.kind
        if kind in ("slice", "narrow", "select"):
            op, args = _scatter(view, source, new)
        elif kind in SAME_ORDER and _size(source) == _size(old):
            op, args = aten.reshape.default, (new, list(source.shape))
        else:
            raise CaptureError(
                f"capture: '{view.path}' writes into a {kind} of a tensor; write the layer without "
                "the in-place operator"
            )
        out = Value(f"{source.name}'", source.shape, source.dtype, "node")
        self.storage[out] = self.storage[source]
        name = self.names.take(view.path, op_name(op), main=False)
        self.nodes.append(Node(name, op, args, {}, (out,), view.path))
        return out


def _example(value: Value) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _size(value: Value) -> int:
    return int(torch.Size(value.shape).numel())


def _scatter(view: Node, source: Value, new: Value) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if view.kind == "select":
        return aten.select_scatter.default, (source, new, *view.args[1:])
    if view.kind == "narrow":
        dim, start, length = view.args[1:]
        start += source.shape[dim] if start < 0 else 0
        return aten.slice_scatter.default, (source, new, dim, start, start + length)
    return aten.slice_scatter.default, (source, new, *view.args[1:])


def _mutated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
    """List the operands that the schema says are written."""
    found = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(value, Value):
                found.append(value)
    return found


FUNCTIONAL = {
    "bernoulli_.float": aten.bernoulli.p,
    "normal_": aten.normal_functional.default,
}


def _functional(op: Any) -> Any:
    """Return the form of an in-place operator that makes a new tensor, or None."""
    name = op._schema.name.split("::")[1]
    overload = op._overloadname
    special = FUNCTIONAL.get(name if overload == "default" else f"{name}.{overload}")
    if special is not None or not name.endswith("_"):
        return special
    packet = getattr(aten, name.removesuffix("_"), None)
    if packet is None or overload not in packet.overloads():
        return None
    return getattr(packet, overload)
