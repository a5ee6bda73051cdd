"""The memory of a step as it goes by: what the fullest rank holds at its fullest moment.

What the last layers keep is gone when backward reaches the first ones, and their gradients are not
there yet when it begins. So each call is looked at in turn:

    forward of call i     blocks and states + kept up to i + workspace of i + what passes while its
                          operands are moved
    backward of call i    blocks and states + kept up to i, but for results that only later calls
                          keep + gradients from i on + gradients between calls (see spans.py)
                          + burst of i and what passes while gradients of its operands move back,
                          or after it a copy of the small gradients of the bucket that is complete
                          then
    optimizer             blocks and states + all gradients + temporaries of one parameter

A stretch that is computed again keeps only what it reads. In its backward all that its calls save
is there, up to the call that backward has come to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.sync import ALONE_BYTES, BUCKET_BYTES
from tilewise.planner.formulate import Formulation
from tilewise.planner.rows import chosen_moves

PHASES = ("forward", "backward", "optimizer")


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


def moments(found: Formulation, choice: Sequence[int]) -> Moments:
    """Return what the fullest rank holds from call to call."""
    copies = {
        name: sum(int(cost.held[0, 0]) for cost in costs)
        for name, costs in chosen_moves(found, choice).items()
    }
    names = found.called
    columns = np.zeros((9, len(names)))
    again = np.zeros(len(names), bool)
    owners = np.array([found.choices.owner[name] for name in names])
    for index, name in enumerate(names):
        cost, k = found.costs[name], choice[found.choices.owner[name]]
        columns[:, index] = (
            cost.saved_bytes[k],
            cost.later_bytes[k],
            cost.left_bytes[k],
            cost.given_bytes[k] + copies.get(name, 0),
            cost.burst_bytes[k],
            cost.workspace_bytes[k],
            cost.block_bytes[k],
            cost.copy_bytes[k],
            cost.block_bytes[k] * (cost.sync[k] > 0),
        )
        again[index] = cost.again[k] > 0
    saved, later, left, moved, burst, workspace, block, copy, shared = columns
    bucket = _buckets(shared)
    inner = saved + later
    kept = np.cumsum(np.where(again, left, inner) + moved)
    gradients = np.cumsum(block[::-1])[::-1]
    backward = kept - np.where(again, left, later) + gradients
    there = np.zeros(len(names))
    for span in found.spans:
        there[span.first + 1 : span.last] += span.bytes[choice[span.owner]]
    passing_forward, passing_backward = _passing(found, choice, names)
    for stretch in _together(owners, again):
        # results that later calls keep are gone when backward comes to the stretch
        before = kept[stretch.stop - 1] - left[stretch].sum()
        here = np.cumsum(inner[stretch]) - later[stretch]
        backward[stretch] = before + here + gradients[stretch]
    always = block.sum() * (found.setting.blocks - 1)
    return Moments(
        tuple(names),
        always + kept + np.where(again, inner, 0.0) + workspace + passing_forward,
        always + backward + there + np.maximum(burst + passing_backward, bucket),
        always + block.sum() + copy,
    )


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
        source = moves.leaves[[choice[found.choices.places[value].owner]]]
        wanted = [wants[choice[r.variable]] for r, wants in zip(readers, moves.wants, strict=True)]
        there, back = moves.passing(source, np.array(wanted))
        for column, reader in enumerate(readers):
            forward[place[reader.node.name]] += there[0, column]
            backward[place[reader.node.name]] += back[0, column]
    return forward, backward


def _together(owners: NDArray[np.int64], again: NDArray[np.bool_]) -> list[slice]:
    """Return the runs of calls that are computed again together: neighbours of one owner."""
    found: list[slice] = []
    for index in np.flatnonzero(again).tolist():
        if found and found[-1].stop == index and owners[index] == owners[index - 1]:
            found[-1] = slice(found[-1].start, index + 1)
        else:
            found.append(slice(index, index + 1))
    return found


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
