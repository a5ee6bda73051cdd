"""A machine: what its devices and links can do, read from a JSON file.

Units stand in the names of the keys. Every file carries the sources of its numbers; nothing about
any machine is in the code.

    one device   ── node link ──   the other devices of its node
                 ── network   ──   devices of other nodes
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tilewise.errors import TilewiseError, meant
from tilewise.ops.kept import folder

Floats = NDArray[np.float64]
PRESETS = Path(__file__).parent / "machines"
LOCAL = "local"
FASTEST = 1e15
"""Bytes a second that nothing moves: a rate above was never measured."""

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class MachineError(TilewiseError, ValueError):
    """A machine file that cannot be used."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Part):
    """What a message of n bytes costs: latency + n / bandwidth; a device's own share of it.

    `concurrent_messages` is how many messages to different peers a device has under way at once:
    so many latencies pass together.
    """

    latency_s: NotNegative
    bandwidth_bytes_per_s: Positive
    concurrent_messages: Annotated[int, Field(ge=1)] = 1


class AllReduce(_Part):
    """A sum of n bytes over p ranks.

        up to small_bytes     log2(p) · (latency + n / bandwidth)
        above                 2·log2(p)·latency + 2·(p−1)/p · n / bandwidth

    Latency and bandwidth are the slowest link's among the ranks, times `latency_share` and
    `efficiency`; `overhead_s` is paid once.
    """

    small_bytes: NotNegative
    efficiency: Positive
    latency_share: NotNegative = 1.0
    overhead_s: NotNegative = 0.0


class Curve(_Part):
    """A share of the peak by the size of something, straight between points on a log axis."""

    at: tuple[Positive, ...]
    share: tuple[Share, ...]

    @model_validator(mode="after")
    def _check(self) -> Curve:
        if len(self.at) != len(self.share) or not self.at:
            raise ValueError("at and share must have equally many entries, at least one")
        if any(a >= b for a, b in zip(self.at, self.at[1:])):
            raise ValueError("at must increase")
        return self

    def __call__(self, sizes: Floats) -> Floats:
        found = np.interp(np.log(np.maximum(sizes, 1e-300)), np.log(self.at), self.share)
        return np.asarray(found, np.float64)


class Arithmetic(_Part):
    """How fast one kind of layer computes in one dtype.

    The rate is the peak times a share by floating point operations of one call and a share by the
    geometric mean of its input and output channels.
    """

    by_flops: Curve
    by_channels: Curve


class Compute(_Part):
    """One dtype: peak rate, and what each kind of layer reaches of it.

    Kinds are torch's names (`conv2d`, `linear`); `default` is for the others with arithmetic.
    `backward_share` is the rate of backward relative to forward.
    """

    peak_flops_per_s: Positive
    kinds: dict[str, Arithmetic]
    backward_share: Positive = 1.0

    @model_validator(mode="after")
    def _check(self) -> Compute:
        if "default" not in self.kinds:
            raise ValueError("kinds must have a 'default'")
        return self


class LayerTime(_Part):
    """A measured layer: its kind, the local shapes of operands in order, and its seconds."""

    kind: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    options: str = ""
    forward_s: NotNegative
    backward_s: NotNegative


class CallTime(_Part):
    """A call that was measured split over all ranks, its own messages included.

    `call` is the key of planner/calls.py.
    """

    call: str
    forward_s: NotNegative
    backward_s: NotNegative


class Machine(_Part):
    """Devices, their memory and rates, and the links between them.

    `reserved_bytes` of a device's memory are not the model's. Where convolutions copy operands
    into blocks of channels first, `workspace_channel_block` is the size of a block.
    `overlap_sums` is the share of the gradient sums that can hide behind backward.
    """

    name: str
    sources: dict[str, str]
    devices_per_node: Annotated[int, Field(ge=1)]
    memory_bytes: Annotated[int, Field(gt=0)]
    reserved_bytes: Annotated[int, Field(ge=0)] = 0
    workspace_channel_block: Annotated[int, Field(ge=1)] = 1
    memory_bandwidth_bytes_per_s: Positive
    memory_by_bytes: Curve
    call_s: NotNegative
    compute: dict[str, Compute]
    node: Link
    network: Link
    all_reduce: AllReduce
    overlap_halo: Annotated[float, Field(ge=0, le=1)]
    overlap_sums: Annotated[float, Field(ge=0, le=1)] = 1.0
    layer_times: tuple[LayerTime, ...] = ()
    call_times: tuple[CallTime, ...] = ()
    fit_errors: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Machine:
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(
                f"reserved_bytes (={self.reserved_bytes}) must be less than memory_bytes "
                f"(={self.memory_bytes})"
            )
        return self

    def rates(self, dtype: str) -> Compute:
        """Return what is known of a dtype."""
        if dtype not in self.compute:
            raise MachineError(
                f"machine {self.name}: no rates for {dtype}; it has {', '.join(self.compute)}"
            )
        return self.compute[dtype]

    def arithmetic_s(self, kind: str, dtype: str, flops: Floats, channels: Floats) -> Floats:
        """Return the seconds of calls with so many floating point operations."""
        compute = self.rates(dtype)
        found = compute.kinds.get(kind, compute.kinds["default"])
        share = found.by_flops(flops) * found.by_channels(channels)
        return flops / (compute.peak_flops_per_s * share)

    def traffic_s(self, moved_bytes: Floats) -> Floats:
        """Return the seconds in which a device reads and writes so many bytes of its memory."""
        return moved_bytes / (self.memory_bandwidth_bytes_per_s * self.memory_by_bytes(moved_bytes))

    @property
    def believable(self) -> bool:
        """Whether its links and its memory can be as fast as it says."""
        links = (self.node.bandwidth_bytes_per_s, self.network.bandwidth_bytes_per_s)
        return max(*links, self.memory_bandwidth_bytes_per_s) < FASTEST

    @cached_property
    def measured(self) -> dict[tuple[str, str, tuple[tuple[int, ...], ...], str], LayerTime]:
        """The table of measured layers by kind, dtype, shapes and options."""
        return {(row.kind, row.dtype, row.shapes, row.options): row for row in self.layer_times}

    @cached_property
    def timed(self) -> dict[str, CallTime]:
        """The table of measured calls by key."""
        return {row.call: row for row in self.call_times}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Machine:
        """Copy with changes; what was computed from the old numbers is not copied."""
        found = super().model_copy(update=update, deep=deep)
        for name in ("measured", "timed"):
            found.__dict__.pop(name, None)
        return found

    def to_json(self) -> str:
        """Return the machine as JSON text."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "machine") -> Machine:
        """Read a machine; errors name the key and the rule."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "JSON"
            raise MachineError(f"{where}: {key}: {first['msg']}") from error


def preset_names() -> tuple[str, ...]:
    """List the machines that come with the package."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def local_path(ranks: int, backend: str = "gloo") -> Path:
    """Return where the measured rates of this machine with so many ranks are kept."""
    return folder() / f"machine-{ranks}-{backend}.json"


def newest_local(ranks: int) -> Path:
    """Return the rates with so many ranks that were measured last, over whatever backend."""
    found = folder().glob(local_path(ranks, "*").name)
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise MachineError(
            f"machine: this one was not measured with {ranks} ranks yet; run tilewise "
            f"calibrate --ranks {ranks}"
        )
    return newest


def load_machine(machine: str | Path | Machine, *, devices: int = 2) -> Machine:
    """Return a preset by name, or a machine from a JSON file.

    `local` is this machine as `tilewise calibrate` measured it with as many ranks as devices.
    """
    if isinstance(machine, Machine):
        return machine
    path = Path(machine)
    if str(machine) in preset_names():
        path = PRESETS / f"{machine}.json"
    elif machine == LOCAL:
        path = newest_local(devices)
    elif not path.is_file():
        known = (*preset_names(), LOCAL)
        raise MachineError(
            f"machine: {str(machine)!r} is neither a file nor a machine that is known; "
            f"{meant(str(machine), known)}these are: {', '.join(known)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except (ValueError, OSError) as error:
        raise MachineError(f"machine {path}: this is not JSON: {error}") from error
    found = Machine.from_json(text, where=f"machine {path}")
    if machine == LOCAL and not found.believable:
        raise MachineError(
            f"machine {path}: it was too busy to be measured; run tilewise calibrate "
            f"--ranks {devices} again"
        )
    return found
