"""The learning rate as a function of the step alone, so that a run resumes by its step."""

from __future__ import annotations

from math import cos, pi

from tilewise.train.recipe import ScheduleSection


def rate_factor(schedule: ScheduleSection, step: int, total: int) -> float:
    """Return the factor on the learning rate for step `step` of `total`, counted from 0.

    It rises over `warmup` steps, reaching 1 at the last of them. Then `linear` and `cosine` fall
    towards `end`, where they would be one step after the last, as torch's schedules are: no step is
    wasted on a rate of 0. `step` multiplies by `factor` at each of the milestones, which are shares
    of all steps.
    """
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "step":
        passed = sum(step >= round(share * total) for share in schedule.milestones)
        return float(schedule.factor**passed)
    rest = total - schedule.warmup
    done = min((step - schedule.warmup) / rest, 1.0) if rest > 0 else 1.0
    fallen = done if schedule.kind == "linear" else (1.0 - cos(pi * done)) / 2.0
    return 1.0 - (1.0 - schedule.end) * fallen
