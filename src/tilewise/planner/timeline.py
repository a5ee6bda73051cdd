"""The memory of a step as it goes by: what the fullest rank holds at its fullest moment.

What the last layers keep is gone when backward reaches the first ones, and their gradients are not
there yet when it begins. So each call is looked at in turn:

    always                blocks, states and the network's inputs, which whoever trains holds on to
    forward of call i     kept up to i + workspace of i + what passes while its operands are moved
    backward of call i    kept up to i, but for results that only later calls keep + gradients from
                          i on + gradients between calls (see spans.py) + burst of i and what passes
                          while gradients of its operands move back, or after it a copy of the small
                          gradients of the bucket that is complete then
    optimizer             all gradients + temporaries of one parameter

A stretch that is computed again keeps only what it reads. In its backward all that its calls save
is there, up to the call that backward has come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.sync import ALONE_BYTES, BUCKET_BYTES
from tilewise.planner.chosen import chosen_copies
from tilewise.planner.formulation import Formulation

PHASES = ("forward", "backward", "optimizer")
KINDS = ("parameters", "gradients", "states", "kept", "passing")
"""What bytes are of: gradients are those of parameters, kept are activations and inputs."""


@dataclass(frozen=True)
class Moment:
    """One moment of a step: a call's `forward` or `backward`, or its update by the `optimizer`."""

    phase: str
    call: int


@dataclass(frozen=True)
class Moments:
    """Bytes on the fullest rank at each call: forward, backward, and while the optimizer runs."""

    names: tuple[str, ...]
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    optimizer: NDArray[np.float64]

    @property
    def peak_bytes(self) -> int:
        """What is held at the fullest of all moments."""
        return int(self.every.max(initial=0.0))

    @property
    def fullest(self) -> Moment:
        """The moment at which most is held."""
        return self.at(int(self.every.argmax()))

    @property
    def every(self) -> NDArray[np.float64]:
        """All moments, one phase after another."""
        return np.concatenate((self.forward, self.backward, self.optimizer))

    def above(self, limit: int) -> list[Moment]:
        """Return moments above a limit that are fuller than those beside them, fullest first."""
        every = self.every
        sides = np.pad([self.forward, self.backward, self.optimizer], ((0, 0), (1, 1)))
        peaks = (sides[:, 1:-1] >= sides[:, :-2]) & (sides[:, 1:-1] > sides[:, 2:])
        found = np.flatnonzero((every > limit) & peaks.ravel())
        return [self.at(int(k)) for k in found[np.argsort(-every[found], kind="stable")]]

    def bytes_at(self, moment: Moment) -> float:
        """Return what is held at a moment."""
        return float(self.every[PHASES.index(moment.phase) * len(self.names) + moment.call])

    def at(self, index: int) -> Moment:
        """Return the moment at a place of `every`."""
        phase, call = divmod(index, len(self.names))
        return Moment(PHASES[phase], call)


def peak_bytes(found: Formulation, choice: Sequence[int]) -> int:
    """Return the bytes that the fullest rank holds at its fullest moment."""
    return moments(found, choice).peak_bytes


@dataclass(frozen=True)
class Fullest:
    """The moment at which the fullest rank holds most: a phase of a layer, and bytes by kind."""

    phase: str
    layer: str
    bytes_by_kind: dict[str, int]


def fullest(found: Formulation, choice: Sequence[int]) -> Fullest:
    """Return what the peak is made of; its kinds add up to `peak_bytes`."""
    held = by_kind(found, choice)
    every = Moments(tuple(found.called), *held.sum(1))
    phase, call = every.fullest.phase, every.fullest.call
    *kinds, _ = held[PHASES.index(phase), :, call].round().astype(np.int64).tolist()
    kinds.append(every.peak_bytes - sum(kinds))
    return Fullest(phase, every.names[call], dict(zip(KINDS, kinds, strict=True)))


def moments(found: Formulation, choice: Sequence[int]) -> Moments:
    """Return what the fullest rank holds from call to call."""
    return Moments(tuple(found.called), *by_kind(found, choice).sum(1))


def by_kind(found: Formulation, choice: Sequence[int]) -> NDArray[np.float64]:
    """Return what the fullest rank holds in each phase, of each kind, at each call."""
    names, again = found.called, _again(found, choice)
    given, saved, later, left, moved, burst, workspace, *rest = _columns(found, choice)
    block, trained, gradient, copy, shared = rest
    inner = saved + later
    held = np.zeros((len(PHASES), len(KINDS), len(names)))
    parameters, gradients, states, kept, passing = held.swapaxes(0, 1)
    parameters[:] = block.sum()
    gradients[1] = np.cumsum(gradient[::-1])[::-1]
    gradients[2] = gradient.sum()
    states[:] = trained.sum() * found.setting.states
    kept[:] = given.sum()
    kept[0] += np.cumsum(np.where(again, left, inner) + moved)
    kept[1] = kept[0] - np.where(again, left, later)
    forward, backward = _passing(found, choice, names)
    passing[0] = np.where(again, inner, 0.0) + workspace + forward
    passing[1] = np.maximum(burst + backward, _buckets(shared))
    passing[2] = copy
    for span in found.spans:
        passing[1, span.first + 1 : span.last] += span.bytes[choice[span.owner]]
    for stretch in _together(found, again):
        # results that later calls keep are gone when backward comes to the stretch
        kept[1, stretch] = kept[0, stretch.stop - 1] - left[stretch].sum()
        passing[1, stretch] += np.cumsum(inner[stretch]) - later[stretch]
    return held


def _columns(found: Formulation, choice: Sequence[int]) -> NDArray[np.float64]:
    """Return the bytes of every call: one row for each thing that they are of."""
    copies = chosen_copies(found, choice)
    columns = np.zeros((12, len(found.called)))
    for index, name in enumerate(found.called):
        cost, k = found.costs[name], choice[found.choices.owner[name]]
        columns[:, index] = (
            cost.given_bytes[k],
            cost.saved_bytes[k],
            cost.later_bytes[k],
            cost.left_bytes[k],
            copies.get(name, 0),
            cost.burst_bytes[k],
            cost.workspace_bytes[k],
            cost.block_bytes[k],
            cost.trained_bytes[k],
            cost.gradient_bytes[k],
            cost.copy_bytes[k],
            cost.trained_bytes[k] * (cost.sync[k] > 0),
        )
    return columns


def _again(found: Formulation, choice: Sequence[int]) -> NDArray[np.bool_]:
    """Return which calls are computed again in backward."""
    owner = found.choices.owner
    return np.array([found.costs[name].again[choice[owner[name]]] > 0 for name in found.called])


def _passing(
    found: Formulation, choice: Sequence[int], names: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what is there while each call's operands move, and their gradients back.

    Calls that want a tensor alike share its move; here each of them pays.
    """
    place = {name: index for index, name in enumerate(names)}
    forward, backward = np.zeros(len(names)), np.zeros(len(names))
    for value, readers in found.readers.items():
        moves = found.moves[value]
        source = int(moves.leaves[choice[found.choices.places[value].owner]])
        for reader, wants in zip(readers, moves.wants, strict=True):
            _, there, back = moves.one(source, int(wants[choice[reader.variable]]))
            forward[place[reader.node.name]] += there
            backward[place[reader.node.name]] += back
    return forward, backward


def _together(found: Formulation, again: NDArray[np.bool_]) -> list[slice]:
    """Return the runs of calls that are computed again together: neighbours of one owner."""
    owners = [found.choices.owner[name] for name in found.called]
    runs: list[slice] = []
    for index in np.flatnonzero(again).tolist():
        if runs and runs[-1].stop == index and owners[index] == owners[index - 1]:
            runs[-1] = slice(runs[-1].start, index + 1)
        else:
            runs.append(slice(index, index + 1))
    return runs


def _buckets(shared: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what is copied for the bucket of gradients that begins with each call.

    As sync.py fills it: large gradients are summed where they lie. Backward comes to that call
    last, so there the bucket is complete.
    """
    out = np.zeros_like(shared)
    begin, size = 0, 0.0
    for index, one in enumerate(shared):
        if size >= BUCKET_BYTES:
            size = 0.0
        if not size:
            begin = index
        size += one
        out[begin] += one if one < ALONE_BYTES else 0.0
    return out
