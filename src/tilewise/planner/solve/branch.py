"""Branch and bound: what is left where the best weights leave a gap.

The best weights for all assignments are where several of them, each too slow or too large for
itself, balance each other. Layers in which these differ are what the bound cannot decide. So the
candidates of one of them are split into two parts, each of which has weights and a bound of its own
and fewer candidates that may beat the best assignment; the part with the lowest bound is next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np

from tilewise.planner.solve.eliminate import in_time
from tilewise.planner.solve.joint import Joint, Some
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.problem import Floats, Ints
from tilewise.planner.solve.restrict import fitting
from tilewise.planner.solve.search import TOLERANCE
from tilewise.planner.solve.weights import Weights, propose

TURNS, FIRST = 8, 40
"""How many weights to try in one part at most, and in the first one."""
FEWER = 0.7
"""Of which part of the candidates or undecided variables costs are put together anew: more tensors
are charged exactly, and variables with one candidate are out of the way."""
NEAR, FAR = 0.1, 0.03
"""Which part of the gap better weights should promise to be tried, and how large a gap counts as a
part of the bound at most."""


@dataclass(slots=True)
class Part:
    """Candidates of each variable, and what is known of the assignments that they make."""

    bound: float
    weights: Weights
    candidates: list[Ints]
    joint: Joint

    @property
    def live(self) -> int:
        """How many candidates there are."""
        return sum(map(len, self.candidates))

    @property
    def undecided(self) -> int:
        """How many variables have several candidates."""
        return sum(len(some) > 1 for some in self.candidates)


class Branches:
    """The parts that are still open; their candidates are places among those that were live.

    Args:
        live: the candidates.
        joint: what they cost.
        cap: the most memory.
        floor: the least burst that any assignment has.
        take: is told of assignments that seem to keep the cap and to be faster than `seconds`.
        seconds: says how fast the best assignment is.
        ended: says whether to stop.
    """

    def __init__(
        self,
        live: Live,
        joint: Joint,
        cap: int | None,
        floor: int,
        *,
        take: Callable[[list[int]], None],
        seconds: Callable[[], float],
        ended: Callable[[], bool],
    ) -> None:
        self._joint, self._cap, self._floor = joint, cap, floor
        self._take, self._seconds, self._ended = take, seconds, ended
        self._sums = live.problem.sums if cap is not None else 0
        self._live = live.candidates
        pairs = list(zip(live.problem.variables, live.candidates, strict=True))
        self._held = [v.held[some] for v, some in pairs]
        self._burst = [v.burst[some] for v, some in pairs]
        sizes = [len(own) for own in joint.own]
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._total = sum(sizes)
        self._places = np.zeros((0, len(sizes)), np.int64)
        self._planes = np.zeros((0, 2 + self._sums))
        self._most = 0.0
        self._serial = count()
        self._open: list[tuple[float, int, Part]] = []
        self.looked = 0

    def add(self, part: Part) -> None:
        """Take a part to look at, unless some variable has no candidate left."""
        if all(len(some) for some in part.candidates):
            heappush(self._open, (part.bound, -next(self._serial), part))

    @property
    def parts(self) -> list[Part]:
        """What is open."""
        return [part for *_, part in self._open]

    @property
    def bound(self) -> float:
        """No assignment in an open part is faster than this."""
        return self._open[0][0] if self._open else np.inf

    def run(self, deadline: float) -> None:
        """Look at parts until none can have a better assignment, or time is up.

        From the part with the lowest bound one way leads on to ever smaller parts, up to a single
        assignment or a part that has no better one: that is how good assignments are found early.
        """
        while self._open and self.bound < self._limit and not self._ended():
            part: Part | None = heappop(self._open)[-1]
            while part is not None and not self._ended():
                self.looked += 1
                try:
                    smaller = self._look(part, deadline)
                except TimeoutError:
                    self.add(part)
                    return
                part = smaller[0] if smaller else None
                for other in smaller[1:]:
                    self.add(other)
            if part is not None:
                self.add(part)

    @property
    def _limit(self) -> float:
        return self._seconds() * (1.0 - TOLERANCE)

    def _look(self, part: Part, deadline: float) -> list[Part]:
        """Bound a part, drop candidates, and split what is left."""
        if not self._drop_unfit(part):
            return []
        fewer = part.live < FEWER * part.joint.live and bool(part.joint.shared)
        if fewer or part.undecided < FEWER * part.joint.undecided:
            part.joint = part.joint.among(part.candidates)
        some = Some(part.joint, part.candidates)
        weights, mixture = part.weights, np.zeros(0)
        for turn in range(TURNS if self.looked > 1 else FIRST):
            in_time(deadline)
            bound = some.least(self._vector(weights)) + self._constant(weights)
            self._meet(some.found, some.costs())
            better = bound > part.bound
            if better or not turn:
                part.bound, part.weights = max(bound, part.bound), weights
            if part.bound >= self._limit or self._ended():
                break
            if better or not turn:
                if not self._drop(part, some, bound):
                    return []
                if part.live < sum(map(len, some.kept)):
                    some = Some(part.joint, part.candidates)
            inside = self._inside(part)
            proposed, height, mixture = self._best_weights(inside)
            gap = min(self._seconds() - part.bound, FAR * part.bound)
            if height - part.bound <= NEAR * gap:
                break
            weights = proposed if better else part.weights.toward(proposed, 0.5)
        if part.bound >= self._limit:
            return []
        if self._ended():
            return [part]
        return self._split(part, self._places[self._inside(part)], mixture)

    def _vector(self, weights: Weights) -> Floats:
        byte = weights.byte if self._cap is not None else ()
        held = np.zeros(self._joint.parts - 3)
        held[: len(byte)] = byte
        return np.concatenate(([1.0, weights.overlap, 1.0 - weights.overlap], held))

    def _constant(self, weights: Weights) -> float:
        return 0.0 if self._cap is None else sum(weights.byte) * (self._floor - self._cap)

    def _meet(self, places: Ints, costs: Floats) -> None:
        """Learn from an assignment, and offer it if it is the best so far."""
        forward, backward, sync, *held = costs.tolist()
        over = np.zeros(0)
        seconds = forward + max(backward, sync)
        if self._cap is not None:
            over = (np.array(held) + self._floor - self._cap) / max(self._cap, 1)
            if over.max() > 0 and not self._most:
                self._most = seconds / over.max()
        self._places = np.vstack((self._places, places))
        plane = np.array([forward + sync, backward - sync, *over])
        self._planes = np.vstack((self._planes, plane))
        if seconds >= self._seconds():
            return
        burst = max(int(some[k]) for some, k in zip(self._burst, places, strict=True))
        if self._cap is None or max(held) + burst < self._cap + 1:  # shares leave rounding
            self._take([int(some[k]) for some, k in zip(self._live, places, strict=True)])

    def _inside(self, part: Part) -> Ints:
        """Return which assignments that were met are in a part."""
        live = np.zeros(self._total, bool)
        for start, some in zip(self._starts, part.candidates, strict=True):
            live[start + some] = True
        return np.flatnonzero(live[self._places + self._starts].all(1))

    def _best_weights(self, inside: Ints) -> tuple[Weights, float, Floats]:
        """Return the weights whose bound may be highest, how high, and what balances there."""
        if not len(inside):
            return Weights(), np.inf, np.zeros(0)
        found = propose(self._planes[inside], self._most, self._cap)
        self._most = found.most
        return found.weights, found.height, found.mixture

    def _drop_unfit(self, part: Part) -> bool:
        """Drop what no assignment of a part within the cap has; say if anything is left."""
        if self._cap is None:
            return True
        pairs = zip(self._held, self._burst, part.candidates, strict=True)
        masks = fitting([(held[some], burst[some]) for held, burst, some in pairs], self._cap)
        part.candidates = [some[mask] for some, mask in zip(part.candidates, masks, strict=True)]
        return all(len(some) for some in part.candidates)

    def _drop(self, part: Part, some: Some, bound: float) -> bool:
        """Drop candidates with which nothing is better than the best; say if any are left."""
        margins = some.marginals()
        spare = self._limit - bound + min(float(values.min()) for values in margins)
        part.candidates = [
            kept[values < spare] for kept, values in zip(some.kept, margins, strict=True)
        ]
        return all(len(kept) for kept in part.candidates)

    def _split(self, part: Part, met: Ints, mixture: Floats) -> list[Part]:
        """Split the candidates of the variable about which the bound is least decided.

        That is the one which differs the most between the assignments that balance each other, in
        the bytes that it holds or in how much of its sums is to hide; candidates with less of it
        than these have on average are apart from those with more.
        """
        sizes = np.array([len(some) for some in part.candidates])
        if sizes.max() == 1:
            return []  # a single assignment, which was met
        some = np.flatnonzero(mixture > 1e-9)
        shares = mixture[some] / max(float(mixture[some].sum()), 1e-9)
        weights = self._vector(part.weights)[3:]
        widest, v, first = 0.0, -1, np.zeros(0, bool)
        for u in np.flatnonzero(sizes > 1).tolist() if len(some) else ():
            own = self._joint.own[u]
            for seconds in (own[:, 3:] @ weights, own[:, 2] - own[:, 1]):
                mine = seconds[met[some, u]]
                mean = float(mine @ shares)
                spread = float((mine - mean) ** 2 @ shares)
                below = seconds[part.candidates[u]] < mean
                if spread > widest and below.any() and not below.all():
                    widest, v, first = spread, u, below
        if not widest:
            v, place = self._unpaid(part, met, some, sizes)
            first = part.candidates[v] == place
            if not first.any():
                first[0] = True
        return [
            Part(
                part.bound,
                part.weights,
                [c[half] if u == v else c for u, c in enumerate(part.candidates)],
                part.joint,
            )
            for half in (first, ~first)
        ]

    def _unpaid(self, part: Part, met: Ints, some: Ints, sizes: Ints) -> tuple[int, int]:
        """Return a variable and a candidate where the bound charges an assignment too little."""
        if not len(some):
            v = int(sizes.argmax())
            return v, int(part.candidates[v][0])
        places = met[some[0]]
        v = int(sizes.argmax())
        unpaid = part.joint.unpaid(places, self._vector(part.weights))
        for least, members in sorted(unpaid, key=lambda one: -one[0]):
            member = max(members, key=lambda u: int(sizes[u]))
            if least > 0 and sizes[member] > 1:
                v = member
                break
        return v, int(places[v])
