"""A captured model: layers in program order, with global shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_map


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the program: an input, a parameter, a buffer, a constant or a result.

    `source` is the parameter's or buffer's name in the model, or the input's position; `trained`,
    whether a parameter had gradients when the model was captured.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    source: str | int | None = None
    constant: torch.Tensor | None = None
    trained: bool = False

    @property
    def held(self) -> bool:
        """Whether the model holds it, rather than computes it."""
        return self.origin in ("parameter", "buffer", "constant")

    def __repr__(self) -> str:
        return f"%{self.name}[{'×'.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Node:
    """One operator call. `args` and `kwargs` are torch's, with values in place of tensors.

    `op` makes a new tensor; `in_place` is the operator as written where that writes into its
    first operand.
    """

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Value, ...]
    path: str
    several: bool = False
    in_place: Callable[..., Any] | None = None
    no_grad: bool = False

    @property
    def kind(self) -> str:
        """The operator's plain name: `conv2d`, `relu`, `add`."""
        return op_name(self.op)

    @property
    def out(self) -> Value:
        return self.outs[0]

    def values(self) -> list[Value]:
        """List the tensor operands in order."""
        return values_in((self.args, self.kwargs))

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass, for operators with weights."""
        if self.kind.startswith("conv"):
            weight = self.args[1].shape
            spread = self.args[0].shape if "transpose" in self.kind else self.out.shape
            fan = prod(weight[1:])
            return int(2 * spread[0] * weight[0] * prod(spread[2:]) * fan)
        if self.kind in ("linear", "matmul", "mm", "addmm", "bmm"):
            operand = self.args[1 if self.kind == "addmm" else 0].shape
            return int(2 * prod(self.out.shape) * operand[-1])
        return 0

    def __repr__(self) -> str:
        return f"{self.name}: {self.kind} {self.values()} → {list(self.outs)}"

    def __getstate__(self) -> dict[str, Any]:
        state = {item.name: getattr(self, item.name) for item in fields(self)}
        return state | {"op": str(self.op), "in_place": self.in_place and str(self.in_place)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            known = _operator(value) if name in ("op", "in_place") and value else value
            object.__setattr__(self, name, known)


@dataclass(frozen=True, eq=False)
class Program:
    """The operator calls of one mode and one input shape, in order."""

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    in_spec: TreeSpec
    outputs: tuple[Any, ...]
    out_spec: TreeSpec

    @property
    def output_values(self) -> tuple[Value, ...]:
        return tuple(value for value in self.outputs if isinstance(value, Value))

    def node(self, name: str) -> Node:
        """Return the layer of this name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def consumers(self) -> dict[Value, list[Node]]:
        """Return for each value the nodes that read it, in order."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.values():
                found.setdefault(value, []).append(node)
        return found

    def first_uses(self) -> dict[str, list[Value]]:
        """Return for each node the trained parameters that no node before it reads."""
        seen: set[str] = set()
        found: dict[str, list[Value]] = {}
        for node in self.nodes:
            for value in node.values():
                if value.trained and str(value.source) not in seen:
                    seen.add(str(value.source))
                    found.setdefault(node.name, []).append(value)
        return found

    def producers(self) -> dict[Value, Node]:
        """Return for each computed value the node that makes it."""
        return {value: node for node in self.nodes for value in node.outs}


@dataclass
class Names:
    """Give each operator call its layer's name: the module's path, `path#op` for further ones."""

    leaves: set[str]
    used: set[str] = field(default_factory=set)

    def take(self, path: str, kind: str, *, main: bool) -> str:
        if main and path in self.leaves and path not in self.used:
            self.used.add(path)
            return path
        name = f"{path}#{kind}"
        count = 0
        while name in self.used:
            count += 1
            name = f"{path}#{kind}.{count}"
        self.used.add(name)
        return name


def _operator(name: str) -> Callable[..., Any]:
    """Return the operator that prints as `name`, such as aten.conv2d.default."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def op_name(op: Callable[..., Any]) -> str:
    """Return an operator's plain name, without namespace, overload or in-place underscore."""
    schema = getattr(op, "_schema", None)
    name: str = schema.name.split("::")[1] if schema is not None else getattr(op, "__name__", "?")
    return name.strip("_") if name.endswith("_") or name.startswith("_") else name


def values_in(tree: Any) -> list[Value]:
    """List the values in nested arguments, in order."""
    return list(_walk(tree))


def _walk(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _walk(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _walk(item)


def replace_values(tree: Any, change: Callable[[Value], Any]) -> Any:
    """Return nested arguments with each value replaced."""
    return tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, Value) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Value),
    )


class Call:
    """An operator with its arguments, to be called with tensors in place of the values."""

    def __init__(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.op, self.args, self.kwargs = op, args, kwargs
        self.places = [i for i, argument in enumerate(args) if isinstance(argument, Value)]
        self.nested = len(values_in((args, kwargs))) > len(self.places)

    def __call__(self, *tensors: Any) -> Any:
        if self.nested:
            feed = iter(tensors)
            args, kwargs = replace_values((self.args, self.kwargs), lambda _: next(feed))
            return self.op(*args, **kwargs)
        filled = list(self.args)
        for place, tensor in zip(self.places, tensors, strict=True):
            filled[place] = tensor
        return self.op(*filled, **self.kwargs)
