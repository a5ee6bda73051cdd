"""Find the fastest assignment that fits, with a proof or a certified gap.

1. Good assignments by coordinate descent from the hints and from cheap candidates.
2. Rounds of bounding: bound each candidate, drop those that cannot beat the best, take better
   weights. Sweeps of messages shrink thousands of candidates to a few; as soon as there are few
   enough to eliminate variables, bounds are exact but for the weights. Where that is much work,
   the least sums alone lead to better weights first, and a few candidates of each variable with
   low bounds are searched by themselves for a better assignment.
3. As soon as an exact minimum is little work, what is left is split into parts, each with weights
   of its own (see branch.py), until none can have a better assignment or time is up.
4. Where it stays much work, enumeration of what is left, ever wider, until nothing is set aside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from tilewise.planner.solve.branch import FAR, NEAR, Branches, Part
from tilewise.planner.solve.descend import Descent, cheapest
from tilewise.planner.solve.eliminate import Order
from tilewise.planner.solve.evaluate import Cost, evaluate
from tilewise.planner.solve.joint import Joint
from tilewise.planner.solve.known import know
from tilewise.planner.solve.live import Live
from tilewise.planner.solve.problem import Floats, Ints, Problem
from tilewise.planner.solve.relax import Relaxation
from tilewise.planner.solve.restrict import fitting, picked, restrict
from tilewise.planner.solve.search import TOLERANCE, Search
from tilewise.planner.solve.solution import Solution
from tilewise.planner.solve.terms import WORK, Terms
from tilewise.planner.solve.weights import AROUND, Cuts, Weights

ENTRIES = 1 << 16
"""How many moves of one tensor to know at first; more when the bounds need it."""
NARROWEST, WIDER, WIDEST = 1 << 10, 1 << 4, 1 << 18
"""The fewest partial assignments to keep at once, the next larger number, and the most."""
PART = 0.5
"""How far to go from the best weights of several sums to those that may be better."""
MANY, WORTH = 1 << 23, 0.05
"""With so many moves, which part of the candidates is worth dropping: all moves are copied then."""
FEW, TRYING, HEAVY = 16, 0.15, 1 << 24
"""How many candidates of each variable to try together, in which part of the time left, and how
many sums an exact minimum of all would have to look at for that, and for looking for good weights
before all candidates are bounded, to be worth while."""
POOR, LONGER = 1.1, 2
"""How many times the bound the best assignment takes for more to be tried, and in how many times as
much of the time."""
AIM, LEAST = 0.25, 0.01
"""Up to which part of the gap above the bound, and of the bound, to enumerate at once: where no
good assignment is known, most of what is below the best one is not worth looking at."""
LITTLE, TABLED = 1 << 24, 1 << 25
"""How many sums of costs an exact minimum may look at for parts to be bounded by themselves, and
how many numbers all costs of pairs of candidates may be for that."""
HINTS = 2
"""From how many hints to descend."""

Among = Callable[["Solver", list[Ints], float], tuple[Weights, Sequence[int] | None]]
"""Searches among few candidates of each variable, where a solver is, for so many seconds."""


class Solver:
    """The state of solving one problem; only what is faster than `limit` is looked for.

    Args:
        problem: what to solve.
        cap: the most memory; None is no limit.
        deadline: when to stop, by the monotonic clock. To set an earlier one and a later one again
            is to look in between; large steps are taken as if there were no earlier one.
        limit: seconds.
        judge: says whether an assignment is allowed, beyond what the problem knows of it, or None:
            it is not, and the problem should know why before it is solved. Then solving ends.
        before: one of the same variables with fewer sums, to begin with what it knows: candidates,
            moves and messages.
        among: how to search among few candidates of each variable. Returns the best weights and a
            better assignment, if there are any. Weights of more sums than the problem has end
            solving: whoever goes on, with these sums too, begins near them (`proposed`).
        widest: the most partial assignments to keep at once; below NARROWEST nothing is enumerated.
    """

    def __init__(
        self,
        problem: Problem,
        cap: int | None,
        deadline: float,
        limit: float = np.inf,
        *,
        judge: Callable[[tuple[int, ...]], bool | None] | None = None,
        before: Solver | None = None,
        among: Among | None = None,
        widest: int = WIDEST,
    ) -> None:
        self.began = time.monotonic()
        self.problem = problem = know(problem)
        self.cap = cap
        self.deadline = self._end = deadline
        self.limit = limit
        self.best: tuple[int, ...] | None = None
        self.cost: Cost | None = None
        self.bound = 0.0
        self.width: int = NARROWEST if before is None else before.width
        self.weights = Weights()
        self.proposed: Weights | None = None
        self.statistics: dict[str, float] = {"rounds": 0, "exact": 0, "searches": 0, "width": 0}
        self.ended = False
        self._judge = judge
        self._among: Among = among or Solver._search_few
        known = None if before is None else before._relaxation
        self._live: Live = Live(problem, ENTRIES, before=None if before is None else before._live)
        self._relaxation: Relaxation = Relaxation(self._live, Weights(), self._penalty(), known)
        self._descent = Descent(problem, cap)
        self._cuts = Cuts(cap)
        self._descended: set[tuple[int, ...]] = set()
        self._random = np.random.default_rng(0)
        self._exact, self._work = False, 0.0
        self._grows = True
        self._spared = Weights()
        self._order: Order | None = None
        self._low: Sequence[Floats] | None = None
        self._tried: tuple[bytes, ...] = ()
        self._too_many = np.inf
        self._widest = widest
        self._open: list[Part] = [] if before is None else before._open

    @property
    def seconds(self) -> float:
        """The best time so far, or the limit."""
        return self.limit if self.cost is None else self.cost.seconds

    @property
    def closed(self) -> bool:
        """Whether no assignment is faster than the best one, or than the limit."""
        return self.bound >= self.seconds * (1.0 - TOLERANCE)

    @property
    def late(self) -> bool:
        """Whether time is up, or the problem lacks something."""
        return self.ended or time.monotonic() > self.deadline

    @property
    def candidates(self) -> list[Ints]:
        """Those that may be part of an assignment that is faster than the best one."""
        return self._live.candidates

    def shorten(self, deadline: float) -> None:
        """Stop earlier, and do not come to know more moves: others will."""
        self.deadline = self._end = deadline
        self._grows = False

    def lengthen(self, deadline: float) -> None:
        """Stop later, and come to know more moves again."""
        self.deadline = self._end = deadline
        self._grows = True

    def offer(self, choice: Sequence[int], *, least: bool = False) -> Cost | None:
        """Take an assignment if it is the best so far; return its cost if it keeps all ties.

        `least` tells that it has the least weighted sum, or that nothing that is known is against
        it: if it is not allowed, that is worth knowing.
        """
        try:
            cost = evaluate(self.problem, choice)
        except ValueError:
            return None
        self._cuts.add(cost, self._floor())
        fits: bool | None = self.cap is None or cost.peak_bytes <= self.cap
        better = bool(fits) and cost.seconds < self.seconds
        if self._judge is not None and (least or better):
            fits = self._judge(tuple(choice))
            self.ended |= fits is None
        if fits and better:
            self.best, self.cost = tuple(choice), cost
        return cost

    def descend(self, choice: Sequence[int]) -> None:
        """Offer an assignment and what coordinate descent makes of it."""
        self.offer(choice)
        if tuple(choice) not in self._descended:
            self._descended.add(tuple(choice))
            byte = self._relaxation.weights.byte
            self.offer(self._descent(choice, byte=byte, deadline=self.deadline))

    def start(self, hints: Sequence[Sequence[int]]) -> None:
        """Descend from the best hints and from the fastest candidates."""
        ranked = []
        for hint in hints:
            cost = self.offer(hint)
            if cost is not None:
                over = 0 if self.cap is None else max(cost.peak_bytes - self.cap, 0)
                ranked.append((over, cost.seconds, tuple(hint)))
        for _, _, choice in sorted(set(ranked))[:HINTS]:
            self.descend(choice)
        first = cheapest(self.problem)
        if first is not None:
            self.descend(first)

    def resume(
        self,
        weights: Weights,
        bound: float,
        costs: Iterable[Cost],
        proposed: Weights | None = None,
    ) -> None:
        """Begin near weights that gave a good bound, with what assignments cost that were seen.

        At those that are proposed, if there are any.
        """
        for cost in costs:
            self._cuts.add(cost, self._floor())
        self.weights, self.bound = weights, bound
        if proposed is None:
            proposed = weights.toward(self._cuts.best(), PART)
        # more sums may have come since it was proposed
        self._relaxation.reweigh(proposed.of_sums(len(weights.byte)))

    def follow(self, other: Solver, costs: Iterable[Cost] = ()) -> None:
        """Begin where one is that has these sums or fewer, and these candidates or more."""
        count = self.problem.sums if self.cap is not None else 0
        now = other._relaxation.weights.of_sums(count)
        self.resume(other.weights.of_sums(count), other.bound, costs, now)

    def solve(self) -> None:
        """Improve the best assignment and the bound until they meet or time is up."""
        self._relaxation.penalty = self._penalty()
        self._relaxation.reweigh(self._relaxation.weights)
        if self._drop_unfit():
            with suppress(TimeoutError):  # what was found and proven before stays true
                self._improve()

    def _improve(self) -> None:
        idle = 0
        while not (self.closed or self.late):
            before = self.bound, self.seconds
            moved = self._round()
            if self.closed or self.late:
                break
            gained = self.bound > before[0] * (1 + 1e-4) or self.seconds < before[1] * (1 - 1e-4)
            idle = 0 if gained and moved else idle + 1
            if self._branch(LITTLE):
                break
            if idle < self._patience():
                continue
            if not self._live.whole:
                if not self._grows or not self._live.grow(max(self._end, self.deadline)):
                    break
                self._keep([np.ones(k, bool) for k in self._live.sizes])
            elif self._branch(WORK) or self.width > self._widest:
                break
            elif not self._search(self.width) and not self.ended:
                if self.width == self._widest:
                    break
                self.width = min(WIDER * self.width, self._widest)

    def _patience(self) -> int:
        """Return how many rounds to wait for a better bound by other weights."""
        if not self._live.whole:
            return 1
        if not self._exact:
            return 3
        return 4 if self._improvable() else 1

    def solution(self) -> Solution | None:
        """Return the best assignment with what is proven about it."""
        if self.best is None or self.cost is None:
            return None
        bound = min(self.bound, self.seconds)
        gap = (self.seconds - bound) / bound if bound > 0 else np.inf
        return Solution(
            self.best,
            self.seconds,
            self.cost.peak_bytes,
            bound,
            self.closed,
            0.0 if self.seconds == bound else gap,
            self.weights,
            time.monotonic() - self.began,
            self.statistics,
        )

    def _penalty(self) -> float:
        if np.isfinite(self.seconds):
            return 4.0 * self.seconds
        variables = self.problem.variables
        return sum(float((v.forward + v.backward + v.sync).max()) for v in variables) + 1e-6

    def _floor(self) -> int:
        """Return the least burst that an assignment of live candidates has."""
        pairs = zip(self.problem.variables, self._live.candidates)
        return max(int(v.burst[c].min()) for v, c in pairs)

    def _drop_unfit(self) -> bool:
        """Drop the candidates that no assignment within the cap has; say if any are left."""
        if self.cap is None:
            return True
        pairs = zip(self.problem.variables, self._live.candidates)
        masks = fitting([(v.held[c], v.burst[c]) for v, c in pairs], self.cap)
        return all(mask.all() for mask in masks) or self._keep(masks)

    def _keep(self, masks: Sequence[np.ndarray], scores: Sequence[Floats] | None = None) -> bool:
        """Keep live candidates; if some variable has none left, the best is proven best."""
        if self._live.whole and all(mask.all() for mask in masks):
            return True
        if not self._drop(masks, scores):
            return False
        self._relaxation.reweigh(self._relaxation.weights)
        return True

    def _drop(self, masks: Sequence[np.ndarray], scores: Sequence[Floats] | None = None) -> bool:
        """Keep live candidates; the relaxation is to be told by weights."""
        few = all(mask.any() for mask in masks) and self._live.whole
        if few and self._live.moves > MANY:
            kept, count = sum(int(mask.sum()) for mask in masks), sum(self._live.sizes)
            if kept > (1.0 - WORTH) * count:
                self._low = scores  # to leave them out now would take longer than they do
                return True
        self._low = None
        self._live.keep(masks, scores)
        if min(self._live.sizes) == 0:
            self.bound = max(self.bound, self.seconds)
            return False
        return True

    def _round(self) -> bool:
        """Bound all candidates and drop some; return whether the weights changed."""
        self.statistics["rounds"] += 1
        relaxation = self._relaxation
        weights, before = relaxation.weights, self.bound
        bounds, decoded = self._bounds()
        if self.closed:
            return False
        if not (self._exact and self._improvable()):  # soon there are better ones to begin with
            self.descend(self._choice(decoded))
        if self._exact and self._work <= HEAVY and np.isinf(self.seconds):
            self._spare()
        if self._low is not None:
            bounds = [np.maximum(*both) for both in zip(self._low, bounds, strict=True)]
        tuned = self.weights
        worthwhile = self._work > HEAVY or self._poor
        if self._live.whole and worthwhile and max(self._live.sizes) > FEW + 1:
            tuned = self._try_few(bounds)
        self._live.lean(decoded, 1.5 / (3.0 + self.statistics["rounds"]))
        limit = min(self.seconds, self._live.slowest() if np.isinf(self.seconds) else np.inf)
        if not self._drop([b < limit * (1 - TOLERANCE) for b in bounds], bounds):
            return False
        if self.ended:
            return False
        proposed = self._cuts.best()
        if tuned != self.weights:
            proposed = tuned
        elif self.problem.sums > 1 and self.bound <= before:
            proposed = self.weights.toward(proposed, PART)
        if proposed == weights:
            # Nothing new was learnt there; look between there and where the bound was highest.
            proposed = self.weights.toward(proposed, float(self._random.uniform(0.1, 0.9)))
        relaxation.reweigh(proposed)
        return proposed != weights

    @property
    def _poor(self) -> bool:
        """Whether the best assignment of those that fit a cap is far from the bound."""
        return self.cap is not None and self.seconds > POOR * self.bound

    def _spare(self) -> None:
        """Look for any assignment that fits, where bytes count more and more."""
        if self._spared == self.weights or not any(self.weights.byte):
            return
        self._spared = self.weights
        for factor in AROUND:
            if factor > 1.0 and np.isinf(self.seconds) and not self.late:
                terms = Terms(self._relaxation, self.weights.times(factor), self._order)
                self.descend(self._choice(terms.eliminate(self.deadline).best()))

    def _try_few(self, bounds: Sequence[Floats]) -> Weights:
        """Look for better assignments among the few candidates of each variable with low bounds.

        Of these there are so few that bounds are exact but for the weights. Returns the weights
        that were best there.
        """
        few = []
        for v, (some, low) in enumerate(zip(self._live.candidates, bounds, strict=True)):
            best = some[np.argsort(low, kind="stable")[:FEW]]
            few.append(best if self.best is None else np.union1d(best, [self.best[v]]))
        tried = tuple(some.tobytes() for some in few)
        left = self.deadline - time.monotonic()
        if tried == self._tried or left <= 0 or self.ended:
            return self.weights
        self._tried = tried
        weights, better = self._among(self, few, (LONGER if self._poor else 1) * TRYING * left)
        if better is not None:
            self.descend(better)
        if len(weights.byte) > self.problem.sums:
            self.proposed, self.ended = weights, True
        return weights

    def _search_few(self, few: list[Ints], seconds: float) -> tuple[Weights, Sequence[int] | None]:
        problem = restrict(self.problem, dict(enumerate(few)))
        deadline = time.monotonic() + seconds
        # that there is no better one among them is of no use
        inner = Solver(problem, self.cap, deadline, self.seconds, widest=NARROWEST)
        inner._cuts.join(self._cuts)
        inner.follow(self)
        inner.solve()
        self._cuts.join(inner._cuts)
        return inner.weights, None if inner.best is None else picked(few, inner.best)

    def _bounds(self) -> tuple[list[Floats], list[int]]:
        """Bound all candidates; return also the places of a good assignment.

        There are no bounds where the assignment is as fast as the bound.
        """
        relaxation = self._relaxation
        if self._live.whole:
            # with so many moves there is more work than that, and no memory for it
            moves = self._live.moves
            small = moves <= WORK and moves < self._too_many / 2
            terms = Terms(relaxation, relaxation.weights, before=self._order) if small else None
            self._order = None if terms is None else terms.order
            self._work = np.inf if self._order is None else self._order.work
            self._exact = self._work <= WORK
            if small and not self._exact:
                self._too_many = moves
            if terms is not None and self._exact:
                self.statistics["exact"] += 1
                found = terms.eliminate(self.deadline)
                best = found.best()
                self._proven(found.least, ())
                self.offer(self._choice(best))
                if self.closed:
                    return [], best
                # even if that is the end: whoever goes on has fewer candidates then
                self.offer(self._choice(best), least=True)
                return self._proven(found.least, found.marginals()), best
        for _ in range(2):
            relaxation.sweep()
        bounds, best = self._marginals()
        self.offer(self._choice(best))
        return bounds, relaxation.decode()

    def _improvable(self) -> bool:
        """Whether other weights promise a much better bound."""
        self._cuts.best()
        gap = min(self.seconds - self.bound, FAR * self.bound)
        return self._cuts.height - self.bound > NEAR * gap

    def _marginals(self) -> tuple[list[Floats], list[int]]:
        """Bound all candidates by a tree, at random or of the tensors with one consumer first."""
        live, relaxation = self._live, self._relaxation
        order = self._random.permutation(len(live.links))
        if self.statistics["rounds"] % 2:
            shared = np.array([link.share.min() < 1 for link in live.links], bool)
            order = np.argsort(shared, kind="stable")
        total, bounds, best = relaxation.marginals(order.tolist())
        return self._proven(total, bounds), best

    def _proven(self, total: float, bounds: Sequence[Floats]) -> list[Floats]:
        """Take a bound of the weighted sum; return those of all candidates in seconds."""
        weights, constant = self._relaxation.weights, 0.0
        if self.cap is not None:
            constant = sum(weights.byte) * (self._floor() - self.cap)
        if total + constant > self.bound:
            self.bound = min(total + constant, self.seconds)
            self.weights = weights
        return [b + constant for b in bounds]

    def _choice(self, places: Sequence[int]) -> list[int]:
        return [int(c[k]) for c, k in zip(self._live.candidates, places)]

    def _branch(self, most: int) -> bool:
        """Split what is left into ever smaller parts, if an exact minimum is at most so much work.

        Returns whether it was.
        """
        if not (self._live.whole and self._exact and self._work <= most):
            return False
        entries = sum(len(one.first_labels) * len(one.second_labels) for one in self._live.links)
        if entries * (3 + self.problem.sums) > TABLED:
            return False
        slowest = self._live.slowest()
        joint = Joint.of(self._live, max(self._penalty(), slowest))
        if joint.work > WORK:
            return False
        self.statistics["searches"] += 1
        branches = Branches(
            self._live,
            joint,
            self.cap,
            self._floor(),
            take=self.descend,
            seconds=lambda: min(self.seconds, slowest),
            ended=lambda: self.ended,
        )
        first = Part(self.bound, self.weights, joint.candidates, joint)
        for part in self._parts(joint) or [first]:
            branches.add(part)
        branches.run(self.deadline)
        self.weights = first.weights
        self._open = [
            replace(part, candidates=self._live.some(part.candidates)) for part in branches.parts
        ]
        self.statistics["parts"] = branches.looked
        # no assignment is that slow: where nothing faster is left, none keeps the cap
        bound = branches.bound if branches.bound < slowest else np.inf
        self.bound = max(self.bound, min(bound, self.seconds))
        return True

    def _parts(self, joint: Joint) -> list[Part]:
        """Return the parts that a solver before this one left open, as far as they are live."""
        count = self.problem.sums if self.cap is not None else 0
        return [
            Part(part.bound, part.weights.of_sums(count), self._live.places(part.candidates), joint)
            for part in self._open
        ]

    def _search(self, width: int) -> bool:
        """Enumerate what is left and near the bound; return whether that is worth doing again."""
        self.statistics["searches"] += 1
        self.statistics["width"] = width
        first, *others = self.weights.around()
        if self._work > HEAVY:
            others = []  # each takes as long again
        order = Terms(self._relaxation, first, before=self._order).in_turn()
        terms = [Terms(self._relaxation, weights, order) for weights in (first, *others)]
        before = self.seconds
        target = min(self.bound + max(AIM * (before - self.bound), LEAST * self.bound), before)
        found = Search(self._live, terms, self.cap).run(target, width, self.deadline)
        bound = min(found.bound, target)
        for places in found.choices:
            cost = self.offer(self._choice(places), least=True)
            bound = min(bound, np.inf if cost is None else cost.seconds)
        if len(found.choices):
            self.descend(self._choice(found.choices[0]))
        self.bound = max(self.bound, min(bound, self.seconds))
        self._relaxation.reweigh(self.weights)
        return self.seconds < before * (1 - 1e-3) or self.bound >= target
