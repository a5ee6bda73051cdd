"""Does a plan stay the best when the machine is a little other than its file says?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewise.layout import Degrees
from tilewise.planner.cost import Setting
from tilewise.planner.formulate import formulate
from tilewise.planner.formulation import Formulation
from tilewise.planner.machine import Machine
from tilewise.planner.moment import Sums
from tilewise.planner.solve import evaluate, solve
from tilewise.planner.within import Limited

SHARES = (0.9, 1.1)
PEAK, BACKWARD = "compute.peak_flops_per_s", "compute.backward_share"
CURVES = ("compute.by_flops", "compute.by_channels")
"""Their sizes are scaled: calls have to be so many times as large to reach the same."""

RATES = (
    PEAK,
    BACKWARD,
    *CURVES,
    "memory_bandwidth_bytes_per_s",
    "call_s",
    "node.latency_s",
    "node.bandwidth_bytes_per_s",
    "network.latency_s",
    "network.bandwidth_bytes_per_s",
    "all_reduce.efficiency",
    "all_reduce.latency_share",
    "all_reduce.overhead_s",
    "overlap_halo",
    "overlap_sums",
)


@dataclass(frozen=True)
class Tried:
    """One rate times `share`: how much slower the plan is than the best one would be then.

    Where `proven`, it is at most so much: the best one may not fit. Otherwise the search there
    ended before it had proven its plan the best, and a faster one may exist.
    """

    rate: str
    share: float
    regret: float
    changed: int
    proven: bool

    @property
    def survives(self) -> bool:
        """Whether no plan was found that is faster by more than one part in a thousand."""
        return self.regret < 1e-3


def sensitivity(
    found: Formulation,
    limited: Limited,
    *,
    pins: Mapping[str, Degrees],
    time_limit: float,
) -> Iterator[Tried]:
    """Yield, for each rate and share, what the choice loses there; `changed` counts layers.

    Where the machine stays as it is (a share of 1 does not grow) there is nothing to yield. A link
    that is not there is not searched for: with it nothing changes.

    Rates change no bytes: the moments that were limited for this plan are limited for the best one
    there. At others its peak may still be above the limit.
    """
    setting = found.setting
    others = list(_others(setting.machine))
    searched = sum(_matters(rate, setting) for rate, _, _ in others)
    for rate, share, machine in others:
        if _matters(rate, setting):
            other = replace(setting, machine=machine)
            part = time_limit / searched
            yield Tried(rate, share, *_lost(found, limited, other, pins=pins, time_limit=part))
        else:
            yield Tried(rate, share, 0.0, 0, limited.solution.optimal)


def _others(machine: Machine) -> Iterator[tuple[str, float, Machine]]:
    """Yield the machines that are a little other than this one."""
    for rate in RATES:
        for share in SHARES:
            other = scaled(machine, rate, share)
            if other != machine:
                yield rate, share, other


def _matters(rate: str, setting: Setting) -> bool:
    """Whether a rate has a part in any price; on one node nothing passes the network."""
    return setting.devices > setting.node or not rate.startswith("network.")


def _lost(
    found: Formulation,
    limited: Limited,
    setting: Setting,
    *,
    pins: Mapping[str, Degrees],
    time_limit: float,
) -> tuple[float, int, bool]:
    """Return what the choice loses, how many layers change, and whether that is proven."""
    choice, cap = limited.solution.choice, limited.cap
    again = any(found.choices.stretches)
    other = formulate(found.graph, setting, pins=pins, recompute=again)
    problem = other.problem
    if cap is not None:
        problem = Sums(other).problem(limited.moments, cap)
    best = solve(problem, cap, time_limit=time_limit, hints=[choice])
    seconds = evaluate(other.problem, choice).seconds
    differs = sum(a != b for a, b in zip(choice, best.choice, strict=True))
    return seconds / best.seconds - 1.0, differs, best.optimal


def scaled(machine: Machine, rate: str, share: float) -> Machine:
    """Return the machine with one of RATES times `share`; what is a share itself stays below 1.

    Measured times of layers and calls stand in the place of rates of arithmetic, and go with them.
    """
    data: dict[str, Any] = machine.model_dump()
    first, _, key = rate.partition(".")
    if first == "compute":
        for dtype in data["compute"].values():
            _scale_compute(dtype, rate, share)
        for row in (*data["layer_times"], *data["call_times"]):
            row["forward_s"] /= share if rate == PEAK else 1.0
            row["backward_s"] /= share if rate in (PEAK, BACKWARD) else 1.0
    elif key:
        data[first][key] *= share
    else:
        data[first] *= share
        if first.startswith("overlap"):
            data[first] = min(data[first], 1.0)
    return Machine.model_validate(data)


def _scale_compute(dtype: dict[str, Any], rate: str, share: float) -> None:
    key = rate.removeprefix("compute.")
    if rate not in CURVES:
        dtype[key] *= share
        return
    for kind in dtype["kinds"].values():
        curve = kind[key]
        curve["at"] = tuple(share * size for size in curve["at"])
