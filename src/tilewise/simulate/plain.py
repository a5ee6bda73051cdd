"""A simulation as plain values, for JSON.

    {"kind": "simulation", "format": 1,
     "model": "cosmoflow", "inputs": [[64, 4, 512, 512, 512]], "devices": 2048,
     "machine": "lassen", "dtype": "float32", "optimizer": "adam",
     "plan": {layer: degrees},
     "step_seconds": …, "forward_seconds": …, "backward_seconds": …,
     "sync_seconds": all gradient sums, "tail_seconds": what of them nothing hides,
     "optimizer_seconds": …, "peak_bytes": of the fullest simulated rank,
     "agreement": {"bytes_equal": true, "planned_step_seconds": …, "planned_peak_bytes": …,
                   "planned_bytes": …, "step_ratio": …, "peak_ratio": …, "differences": []},
     "layers": [{"name", "kind", "degrees", "flops", "compute_s", "halo_s", "exchange_s",
                 "sent_bytes", "received_bytes", "messages"}],    slowest rank, all phases
     "timeline": [{"stream": "compute" | "messages" | "sync", "layer", "phase": "forward" |
                   "backward" | "again" | "optimizer", "kind", "start_s", "end_s"}],
     "memory": [{"layer", "phase", "start_s", "end_s", "peak_bytes", "end_bytes"}],  fullest rank
     "ranks": [{"rank", "step_seconds", "flops", "peak_bytes", "block_bytes", "state_bytes",
                "other_bytes", "sent_bytes", "received_bytes",
                "messages": [{"layer", "phase", "kind", "peer", "messages", "sent_bytes",
                              "received_bytes"}],
                "sums": [{"layer", "phase", "kind", "ranks", "bytes"}]}],
     "strong": [point], "weak": [point]}                          where they were asked for

    point = {"devices", "inputs", "step_seconds", "peak_bytes", "samples_per_second",
             "planned_step_seconds", "planned_peak_bytes", "bytes_equal", "plan"}

Kinds of messages: `halo` (rows of neighbours), `gather` (of x over f), `scatter` (of y over c),
`move` (between layers that lie differently), `inner` (statistics and the like), `held` (weights and
buffers that are stored otherwise). Kinds of sums: `sum` and `gradients`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewise.graph.shapes import tensors_in
from tilewise.simulate.price import Priced
from tilewise.simulate.rank import RankRun
from tilewise.simulate.record import Kernel, Message, Sum
from tilewise.simulate.schedule import Timeline

if TYPE_CHECKING:
    from tilewise.simulate.simulation import Simulation

FORMAT = 1


def as_dict(found: Simulation, *, model: str = "") -> dict[str, Any]:
    """Return a simulation as plain values."""
    timeline, fullest = found.timeline, found.fullest
    return {
        "kind": "simulation",
        "format": FORMAT,
        "model": model,
        "inputs": [list(tensor.shape) for tensor in tensors_in(found.graph.inputs)],
        "devices": found.devices,
        "machine": found.machine.name,
        "dtype": found.setting.dtype,
        "optimizer": found.setting.optimizer,
        "plan": {name: str(degrees) for name, degrees in found.plan.layers.items()},
        "step_seconds": timeline.step_seconds,
        "forward_seconds": timeline.forward_s,
        "backward_seconds": timeline.backward_s,
        "sync_seconds": timeline.sync_s,
        "tail_seconds": timeline.tail_s,
        "optimizer_seconds": timeline.optimizer_s,
        "peak_bytes": found.peak_bytes,
        "agreement": found.agreement.as_dict(),
        "layers": layers(found),
        "timeline": [bar.as_dict() for bar in timeline.bars],
        "memory": _memory(fullest, found.timelines[fullest.rank]),
        "ranks": [_rank(run, found.timelines[run.rank]) for run in found.runs],
    }


def layers(found: Simulation) -> list[dict[str, Any]]:
    """Return every layer's seconds, operations and bytes on the slowest of the simulated ranks."""
    by_layer: dict[str, list[Priced]] = {}
    for one in found.slowest:
        by_layer.setdefault(one.segment.layer, []).append(one)
    overlap = found.machine.overlap_halo
    out = []
    for node in found.graph.training.nodes:
        some = by_layer.get(node.name, [])
        totals = [_totals(run, node.name) for run in found.runs]
        degrees = found.plan.layers.get(node.name)
        out.append(
            {
                "name": node.name,
                "kind": node.kind,
                "degrees": None if degrees is None else str(degrees),
                "compute_s": sum(one.compute_s for one in some),
                "halo_s": sum(max(one.halo_s - overlap * one.compute_s, 0.0) for one in some),
                "exchange_s": sum(one.before_s + one.after_s for one in some),
            }
            | {key: max(one[key] for one in totals) for key in totals[0]}
        )
    return out


def _totals(run: RankRun, layer: str) -> dict[str, int]:
    """Add up what a rank does for a layer; sums of gradients are not a layer's alone."""
    events = [event for s in run.segments if s.layer == layer for event in s.events]
    messages = [event for event in events if isinstance(event, Message)]
    sums = [e.bytes for e in events if isinstance(e, Sum) and e.kind != "gradients"]
    return {
        "flops": sum(event.flops for event in events if isinstance(event, Kernel)),
        "sent_bytes": sum(m.bytes for m in messages if m.sent) + sum(sums),
        "received_bytes": sum(m.bytes for m in messages if not m.sent) + sum(sums),
        "messages": sum(m.sent for m in messages),
    }


def _memory(run: RankRun, timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "layer": segment.layer,
            "phase": segment.phase,
            "start_s": start,
            "end_s": end,
            "peak_bytes": segment.peak_bytes,
            "end_bytes": segment.end_bytes,
        }
        for segment, start, end in timeline.spans
        if segment.layer
    ]


def _rank(run: RankRun, timeline: Timeline) -> dict[str, Any]:
    sums = sum(one.bytes for _, one in run.sums)
    return {
        "rank": run.rank,
        "step_seconds": timeline.step_seconds,
        "flops": run.flops,
        "peak_bytes": run.peak_bytes,
        "block_bytes": run.block_bytes,
        "state_bytes": run.state_bytes,
        "other_bytes": run.other_bytes,
        "sent_bytes": sum(m.bytes for _, m in run.messages if m.sent) + sums,
        "received_bytes": sum(m.bytes for _, m in run.messages if not m.sent) + sums,
        "messages": peers(run),
        "sums": [
            {
                "layer": s.layer,
                "phase": s.phase,
                "kind": e.kind,
                "ranks": len(e.ranks),
                "bytes": e.bytes,
            }
            for s, e in run.sums
        ],
    }


def peers(run: RankRun) -> list[dict[str, Any]]:
    """Return a rank's messages, those of one layer, phase, kind and peer together."""
    found: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for segment, message in run.messages:
        key = (segment.layer, segment.phase, message.kind, message.peer)
        row = found.setdefault(
            key,
            dict(zip(("layer", "phase", "kind", "peer"), key))
            | {"messages": 0, "sent_bytes": 0, "received_bytes": 0},
        )
        row["messages"] += message.sent
        row["sent_bytes" if message.sent else "received_bytes"] += message.bytes
    return list(found.values())
