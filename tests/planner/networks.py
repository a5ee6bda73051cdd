"""Problems shaped like networks, with costs of a made-up cluster, to measure the solver on.

The costs follow the usual rates (compute by local size, halos, channel sums, gradient sums, moved
bytes) roughly; what matters is the graph, the number of candidates and that the costs compete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from tilewise.planner.solve import Consumer, Moves, Problem, Transfer, Variable
from tilewise.planner.solve.problem import Ints

RATE = 1.0e13
LAUNCH = 1.0e-5
ALPHA = 5.0e-6
BETA = 1.0 / 1.0e10
LETTERS = "ncfdhw"


@dataclass
class Tensor:
    source: int
    channels: int
    extents: tuple[int, ...]
    leaves: np.ndarray
    readers: list[Consumer] = field(default_factory=list)


class Builder:
    """Add layers one by one; each takes tensors and returns one."""

    def __init__(self, devices: int, batch: int, dims: int) -> None:
        self.devices, self.batch, self.dims = devices, batch, dims
        self.variables: list[Variable] = []
        self.tensors: list[Tensor] = []

    def input(self, channels: int, size: int) -> Tensor:
        extents = (size,) * self.dims
        degrees = self._candidates(channels, 1, extents)
        degrees = degrees[degrees[:, 1] == 1]
        zero = np.zeros(len(degrees))
        return self._add(f"input{len(self.variables)}", degrees, channels, extents, zero, [], 1)

    def conv(self, x: Tensor, filters: int, kernel: int = 3, stride: int = 1) -> Tensor:
        extents = tuple(-(-e // stride) for e in x.extents)
        a = self._candidates(x.channels, filters, extents)
        n, c, f = a[:, 0], a[:, 1], a[:, 2]
        space = np.ceil(np.array(extents) / a[:, 3:]).prod(1)
        samples = np.ceil(self.batch / n)
        weights = np.ceil(x.channels / c) * np.ceil(filters / f) * kernel**self.dims
        work = 2 * samples * space * weights
        seconds = LAUNCH + work / RATE
        halo = np.zeros(len(a))
        local = np.ceil(np.array(extents) * stride / a[:, 3:])
        for dim in range(self.dims):
            face = local.prod(1) / local[:, dim] * (kernel // 2)
            bytes_ = 4 * samples * np.ceil(x.channels / c) * face * 2
            halo += (a[:, 3 + dim] > 1) * (kernel > 1) * (ALPHA + BETA * bytes_)
        out = 4 * samples * space * np.ceil(filters / f)
        into = 4 * samples * local.prod(1) * np.ceil(x.channels / c)
        return self._add(
            f"conv{len(self.variables)}",
            a,
            filters,
            extents,
            np.maximum(seconds, halo) + _allreduce(out, c),
            [x],
            kernel,
            backward=np.maximum(2 * seconds, halo) + _allreduce(into, f),
            sync=_allreduce(4 * weights, self.devices // (c * f)),
            held=12 * weights + into + out,
            burst=into + out,
        )

    def join(self, xs: list[Tensor], channels: int) -> Tensor:
        """An addition or a concatenation: it wants all its inputs in the layout it leaves."""
        extents = xs[0].extents
        a = self._candidates(channels, 1, extents)
        size = 4 * np.ceil(self.batch / a[:, 0]) * np.ceil(channels / a[:, 1])
        size = size * np.ceil(np.array(extents) / a[:, 3:]).prod(1)
        seconds = LAUNCH / 4 + size / 5e11
        name = f"join{len(self.variables)}"
        return self._add(
            name, a, channels, extents, seconds, xs, 1, backward=seconds, held=size, burst=size
        )

    def pool(self, x: Tensor, stride: int = 2) -> Tensor:
        shrunk = Tensor(x.source, x.channels, x.extents, x.leaves, x.readers)
        shrunk.extents = tuple(-(-e // stride) for e in x.extents)
        return self.join([shrunk], x.channels)

    def problem(self) -> Problem:
        transfers = tuple(
            Transfer(f"t{t.source}", t.source, t.leaves, tuple(t.readers), _mover(self, t))
            for t in self.tensors
            if t.readers
        )
        return Problem(tuple(self.variables), transfers)

    def _candidates(self, channels: int, filters: int, extents: tuple[int, ...]) -> np.ndarray:
        powers = [2**k for k in range(self.devices.bit_length())]
        limits = (self.batch, channels, filters, *extents)
        rows: list[tuple[int, ...]] = [()]
        for limit in limits:
            rows = [
                (*row, p)
                for row, p in product(rows, powers)
                if p <= limit and prod(row) * p <= self.devices
            ]
        return np.array(rows)

    def _add(
        self,
        name: str,
        degrees: np.ndarray,
        channels: int,
        extents: tuple[int, ...],
        forward: np.ndarray,
        inputs: list[Tensor],
        kernel: int,
        **costs: np.ndarray,
    ) -> Tensor:
        index = len(self.variables)
        self.variables.append(Variable.of(name, forward, **costs))
        joined = not name.startswith("conv")
        into, out = [0, 1, *range(3, 3 + self.dims)], [0, 2, *range(3, 3 + self.dims)]
        for x in inputs:
            x.readers.append(Consumer(index, _labels(degrees[:, into])))
        leaves = _labels(degrees[:, into if joined else out])
        tensor = Tensor(index, channels, extents, leaves)
        self.tensors.append(tensor)
        return tensor


def _allreduce(bytes_: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    ranks = np.broadcast_to(ranks, bytes_.shape)
    return np.where(
        ranks > 1, 2 * np.log2(ranks) * ALPHA + 2 * (ranks - 1) / ranks * bytes_ * BETA, 0.0
    )


def _labels(degrees: np.ndarray) -> Ints:
    exponents = np.log2(degrees).round().astype(np.int64)
    return (exponents * 16 ** np.arange(exponents.shape[1])).sum(1)


def _mover(builder: Builder, tensor: Tensor):  # type: ignore[no-untyped-def]
    size = 4.0 * builder.batch * tensor.channels * prod(tensor.extents)
    count = builder.dims + 2

    def exponents(labels: Ints) -> np.ndarray:
        return (labels[:, None] >> (4 * np.arange(count))) & 15

    def cost(source: Ints, target: Ints) -> Moves:
        s, t = exponents(source), exponents(target)
        gap = s[:, None, :] - t[None, :, :]
        kept = 2.0 ** -np.maximum(gap, 0).sum(2)
        peers = np.abs(gap).sum(2)
        into = size * 2.0 ** -t.sum(1)[None, :]
        back = size * 2.0 ** -s.sum(1)[:, None]
        kept_back = 2.0 ** -np.maximum(-gap, 0).sum(2)
        forward = ALPHA * peers + BETA * into * (1 - kept)
        backward = ALPHA * peers + BETA * back * (1 - kept_back)
        held = np.where(peers > 0, into, 0).astype(np.int64)
        return Moves(forward, backward, held)

    return cost


def resnet50(devices: int, batch: int) -> Problem:
    b = Builder(devices, batch, 2)
    x = b.pool(b.conv(b.input(3, 224), 64, 7, 2))
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            step = stride if block == 0 else 1
            y = b.conv(b.conv(b.conv(x, width, 1), width, 3, step), 4 * width, 1)
            skip = b.conv(x, 4 * width, 1, step) if block == 0 else x
            x = b.join([y, skip], 4 * width)
    b.conv(b.pool(x, 7), 1000, 1)
    return b.problem()


def inception3(devices: int, batch: int) -> Problem:
    b = Builder(devices, batch, 2)
    x = b.conv(b.conv(b.conv(b.input(3, 299), 32, 3, 2), 32), 64)
    x = b.pool(b.conv(b.conv(b.pool(x), 80, 1), 192))
    for _ in range(3):
        five = b.conv(b.conv(x, 48, 1), 64, 5)
        three = b.conv(b.conv(b.conv(x, 64, 1), 96), 96)
        x = b.join([b.conv(x, 64, 1), five, three, b.conv(b.pool(x, 1), 64, 1)], 288)
    x = b.join(
        [b.conv(x, 384, 3, 2), b.conv(b.conv(b.conv(x, 64, 1), 96), 96, 3, 2), b.pool(x)], 768
    )
    for _ in range(4):
        seven = b.conv(b.conv(b.conv(x, 160, 1), 160), 192)
        deep = b.conv(b.conv(b.conv(b.conv(b.conv(x, 160, 1), 160), 160), 160), 192)
        x = b.join([b.conv(x, 192, 1), seven, deep, b.conv(b.pool(x, 1), 192, 1)], 768)
    side = b.conv(b.conv(b.conv(b.conv(x, 192, 1), 192), 192), 192, 3, 2)
    x = b.join([b.conv(b.conv(x, 192, 1), 320, 3, 2), side, b.pool(x)], 1280)
    for _ in range(2):
        left = b.conv(x, 384, 1)
        right = b.conv(b.conv(x, 448, 1), 384)
        parts = [b.conv(t, 384) for t in (left, left, right, right)]
        x = b.join([b.conv(x, 320, 1), *parts, b.conv(b.pool(x, 1), 192, 1)], 2048)
    b.conv(b.pool(x, 8), 1000, 1)
    return b.problem()


def densenet121(devices: int, batch: int) -> Problem:
    b = Builder(devices, batch, 2)
    x = b.pool(b.conv(b.input(3, 224), 64, 7, 2))
    channels = 64
    for layers in (6, 12, 24, 16):
        features = [x]
        for _ in range(layers):
            joined = b.join(features, channels) if len(features) > 1 else x
            features.append(b.conv(b.conv(joined, 128, 1), 32))
            channels += 32
        x = b.join(features, channels)
        if layers != 16:
            channels //= 2
            x = b.pool(b.conv(x, channels, 1))
    b.conv(b.pool(x, 7), 1000, 1)
    return b.problem()


def unet3d(devices: int, batch: int) -> Problem:
    b = Builder(devices, batch, 3)
    x, skips = b.input(1, 256), []
    for level in range(4):
        x = b.conv(b.conv(x, 32 << level), 64 << level)
        skips.append(x)
        x = b.pool(x)
    x = b.conv(b.conv(x, 512), 1024)
    for level in reversed(range(4)):
        x.extents = skips[level].extents
        x = b.join([skips[level], b.conv(x, 128 << level, 1)], 192 << level)
        x = b.conv(b.conv(x, 64 << level), 64 << level)
    b.conv(x, 3, 1)
    return b.problem()


NETWORKS = {
    "resnet50": resnet50,
    "inception3": inception3,
    "densenet121": densenet121,
    "unet3d": unet3d,
}
