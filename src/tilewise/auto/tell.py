"""Small things that ranks tell each other as numbers."""

from __future__ import annotations

import platform
from collections.abc import Callable
from hashlib import sha256
from itertools import groupby

import torch
from torch import Tensor

from tilewise.comm import Exchange, Mesh
from tilewise.errors import PlanError
from tilewise.layout import Axis, Layout


def everyone(mesh: Mesh, numbers: list[float]) -> Tensor:
    """Return each rank's numbers, a row each."""
    mine = torch.tensor([numbers], dtype=torch.float64)
    split = Layout((mesh.size, len(numbers)), [Axis(mesh.size, 0)])
    whole = Layout.replicated((mesh.size, len(numbers)), ranks=mesh.size)
    return Exchange(mesh, split, whole, layer="times").start(mine).finish()


def slowest(mesh: Mesh, numbers: list[float]) -> list[float]:
    """Return the largest of each number over all ranks."""
    return [float(value) for value in everyone(mesh, numbers).max(0).values]


def hosts(mesh: Mesh) -> str:
    """Say how the ranks are spread over hosts, numbered as they come: `0×4 1×4`."""
    digest = sha256(platform.node().encode()).digest()
    name = float(int.from_bytes(digest[:6], "big"))  # exact in a float64
    names = everyone(mesh, [name])[:, 0].tolist()
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    runs = [(numbers[name], len(list(some))) for name, some in groupby(names)]
    return " ".join(f"{number}×{ranks}" for number, ranks in runs)


def tell(mesh: Mesh, text: str | None) -> str:
    """Return rank 0's text on every rank; the others bring None."""
    mine = (text or "").encode()
    (length,) = mesh.total([len(mine)], layer="tell")
    if not length:
        return ""
    padded = mine or bytes(int(length))
    return bytes(map(int, mesh.total(list(padded), layer="tell"))).decode()


def told(mesh: Mesh, make: Callable[[], str]) -> str:
    """Return on every rank what rank 0 makes; where it fails, all ranks raise."""
    text = failed = None
    if mesh.rank == 0:
        text = failed = ""
        try:
            text = make()
        except Exception as error:  # whatever it is, the others wait for an answer
            failed = str(error) or repr(error)
    why = tell(mesh, failed)
    if why:
        raise PlanError(why)
    return tell(mesh, text)
