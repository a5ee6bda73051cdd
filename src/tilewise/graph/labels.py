"""What each dim of each value is: sample, channel, depth, height, width, or none of them.

A value's labels are a string with one letter for each dim, such as `nchw`; a dot is a dim that no
degree cuts. They tell which degrees a layer has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tilewise.graph.graph import Node, Program, Value

SPACE = "dhw"
RESHAPES = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "unsafe_view",
}  # fmt: skip


def labels(program: Program) -> dict[Value, str]:
    """Label the dims of every computed value and input of a program."""
    found: dict[Value, str] = {value: natural(len(value.shape)) for value in program.inputs}
    for node in program.nodes:
        operands = [value for value in node.values() if value in found]
        for out in node.outs:
            found[out] = _label(node, out, operands, found)
    return found


def natural(ndim: int) -> str:
    """Return the labels that torch's layers expect of a tensor with so many dims."""
    if ndim <= 2:
        return "nc"[:ndim]
    if ndim <= 5:
        return "nc" + SPACE[5 - ndim :]
    return "nc" + "." * (ndim - 5) + SPACE


def _label(node: Node, out: Value, operands: list[Value], found: dict[Value, str]) -> str:
    ndim = len(out.shape)
    if not operands:
        return natural(ndim) if node.kind in ("new_empty", "new_zeros", "new_ones") else "." * ndim
    rule = _RULES.get(node.kind)
    first = found[operands[0]]
    if node.kind.startswith("conv") and node.kind != "conj":
        return natural(ndim)
    if rule is not None and node.args and operands[0] is _first_value(node):
        return _unique(rule(node, out, operands[0], first))
    like = [value for value in operands if len(value.shape) == ndim]
    if like:
        return found[max(like, key=lambda value: prod(value.shape))]
    if len(first) > ndim:
        return "." * ndim
    return "." * (ndim - len(first)) + first


def _first_value(node: Node) -> object:
    first = node.args[0]
    return first[0] if isinstance(first, (list, tuple)) and first else first


def _unique(text: str) -> str:
    seen: set[str] = set()
    out = []
    for letter in text:
        out.append("." if letter in seen else letter)
        if letter != ".":
            seen.add(letter)
    return "".join(out)


def _argument(node: Node, index: int, name: str, default: object) -> object:
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def permutation(node: Node, ndim: int) -> list[int]:
    """Return which dim of the operand each dim of a permuted result is."""
    if node.kind == "numpy_T":
        return list(range(ndim))[::-1]
    if node.kind == "permute":
        order = _argument(node, 1, "dims", ())
        assert isinstance(order, (list, tuple))
        return [int(dim) % ndim for dim in order]
    moved = [
        _listed(_argument(node, i, name, ())) for i, name in ((1, "source"), (2, "destination"))
    ]
    source, destination = ([dim % ndim for dim in dims] for dims in moved)
    rest = iter(dim for dim in range(ndim) if dim not in source)
    to = dict(zip(destination, source))
    return [to[dim] if dim in to else next(rest) for dim in range(ndim)]


def _listed(dims: object) -> list[int]:
    return [int(dim) for dim in dims] if isinstance(dims, (list, tuple)) else [int(str(dims))]


def _permute(node: Node, out: Value, x: Value, text: str) -> str:
    return "".join(text[dim] for dim in permutation(node, len(text)))


def _transpose(node: Node, out: Value, x: Value, text: str) -> str:
    if node.kind == "t":
        return text[::-1]
    a, b = (int(str(_argument(node, i, f"dim{i - 1}", 0))) % len(text) for i in (1, 2))
    order = list(text)
    order[a], order[b] = order[b], order[a]
    return "".join(order)


def _linear(node: Node, out: Value, x: Value, text: str) -> str:
    return channel_last(text)


def channel_last(text: str) -> str:
    """Relabel so that the last dim is the channel, as a linear layer takes it."""
    if not text or text[-1] == "c":
        return text
    return text[:-1].replace("c", text[-1]) + "c"


def _matmul(node: Node, out: Value, x: Value, text: str) -> str:
    if len(out.shape) != len(x.shape):
        return "." * len(out.shape)
    return channel_last(text)


def _reshape(node: Node, out: Value, x: Value, text: str) -> str:
    letters = []
    for old, new in dim_groups(x.shape, out.shape):
        inside = [text[dim] for dim in old if text[dim] != "." and x.shape[dim] > 1]
        inside = inside or [text[dim] for dim in old if text[dim] != "."]
        merged = next((letter for letter in "cn" if letter in inside), (inside or ["."])[0])
        if len(old) == 1:
            merged = text[old[0]]
        outer = next((dim for dim in new if out.shape[dim] > 1), new[0] if new else None)
        letters += [merged if dim == outer else "." for dim in new]
    return "".join(letters)


def dim_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Match the dims of a reshape: groups of equal size, as small as possible, in order.

    Extents of 1 stand beside the dim before them, or alone where both sides have one.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i] == new[j]:
            groups.append(([i], [j]))
            i, j = i + 1, j + 1
            continue
        if i < len(old) and old[i] == 1 and (j == len(new) or new[j] != 1):
            groups.append(([i], []))
            i += 1
            continue
        if j < len(new) and new[j] == 1 and (i == len(old) or old[i] != 1):
            groups.append(([], [j]))
            j += 1
            continue
        left, right = [i], [j]
        a, b = old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= old[i]
                left.append(i)
                i += 1
            else:
                b *= new[j]
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def _reduce(node: Node, out: Value, x: Value, text: str) -> str:
    if len(out.shape) == len(x.shape):
        return text
    dims = _argument(node, 1, "dim", None)
    gone = {dim % len(text) for dim in _listed(dims)} if dims not in (None, []) else set()
    gone = gone or set(range(len(text)))
    return "".join(letter for dim, letter in enumerate(text) if dim not in gone)


def _select(node: Node, out: Value, x: Value, text: str) -> str:
    dim = int(str(_argument(node, 1, "dim", 0))) % len(text)
    return text[:dim] + text[dim + 1 :]


def _stack(node: Node, out: Value, x: Value, text: str) -> str:
    dim = int(str(_argument(node, 1, "dim", 0))) % len(out.shape)
    return text[:dim] + "." + text[dim:]


def _expand(node: Node, out: Value, x: Value, text: str) -> str:
    return "." * (len(out.shape) - len(text)) + text


_RULES: dict[str, Callable[[Node, Value, Value, str], str]] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "var", "std", "argmax"), _reduce),
    **dict.fromkeys(("expand", "expand_as", "repeat"), _expand),
    **dict.fromkeys(("transpose", "t", "swapaxes"), _transpose),
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("permute", "movedim", "moveaxis", "numpy_T"), _permute),
    "linear": _linear,
    "select": _select,
    "unbind": _select,
    "stack": _stack,
}
