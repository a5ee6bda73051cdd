"""The fastest plans for less and less memory."""

from __future__ import annotations

import time

import numpy as np

from tilewise.planner.formulation import Formulation
from tilewise.planner.solve import Solution
from tilewise.planner.timeline import peak_bytes
from tilewise.planner.within import Within, least_peak


def frontier(
    found: Formulation, free: Solution, best: Solution, points: int, *, time_limit: float
) -> list[Solution]:
    """Return plans for limits from the least peak found to that of the fastest plan, `free`.

    The limits are spaced evenly. Each is the best plan that was found in its part of the time;
    `best` is one that is known, for whichever limit.
    """
    share = time_limit / points
    least = least_peak(found, time.monotonic() + share, [free.choice, best.choice])
    limits = np.linspace(least.peak_bytes, peak_bytes(found, free.choice), points)
    plans, known = [best], [least.choice, best.choice]
    for limit in limits.astype(np.int64)[:-1].tolist():
        within = Within(found, limit, free, time.monotonic() + share)
        plans.append(within.run(known).solution)
        known.append(plans[-1].choice)
    return [*plans, free]
