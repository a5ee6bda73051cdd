"""Does a plan stay the best when the machine is a little other than its file says?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewise.layout import Degrees
from tilewise.planner.formulate import formulate
from tilewise.planner.formulation import Formulation
from tilewise.planner.machine import Machine
from tilewise.planner.moment import Sums
from tilewise.planner.solve import evaluate, solve
from tilewise.planner.within import Limited

SHARES = (0.9, 1.1)
RATES = (
    "compute.peak_flops_per_s",
    "memory_bandwidth_bytes_per_s",
    "call_s",
    "node.latency_s",
    "node.bandwidth_bytes_per_s",
    "network.latency_s",
    "network.bandwidth_bytes_per_s",
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

    Rates change no bytes: the moments that were limited for this plan are limited for the best one
    there. At others its peak may still be above the limit.
    """
    choice, cap = limited.solution.choice, limited.cap
    share_of_time = time_limit / (len(RATES) * len(SHARES))
    for rate in RATES:
        for share in SHARES:
            machine = scaled(found.setting.machine, rate, share)
            setting = replace(found.setting, machine=machine)
            again = any(found.choices.stretches)
            other = formulate(found.graph, setting, pins=pins, recompute=again)
            problem = other.problem
            if cap is not None:
                problem = Sums(other).problem(limited.moments, cap)
            best = solve(problem, cap, time_limit=share_of_time, hints=[choice])
            seconds = evaluate(other.problem, choice).seconds
            differs = sum(a != b for a, b in zip(choice, best.choice, strict=True))
            yield Tried(rate, share, seconds / best.seconds - 1.0, differs, best.optimal)


def scaled(machine: Machine, rate: str, share: float) -> Machine:
    """Return the machine with one of RATES times `share`."""
    data: dict[str, Any] = machine.model_dump()
    first, _, key = rate.partition(".")
    if first == "compute":
        for dtype in data["compute"].values():
            dtype[key] *= share
    elif key:
        data[first][key] *= share
    else:
        data[first] *= share
    return Machine.model_validate(data)
