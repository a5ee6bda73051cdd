"""One rank simulated against the same rank of a real run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from plans import NETS, build, graph_of, inputs_of, random_plan
from tilewise import Graph, Mesh, ParallelModel, Plan
from tilewise.bench.memory import LiveBytes
from tilewise.graph.lower import plan_program
from tilewise.ops.draws import Draws
from tilewise.planner.payload import Payload
from tilewise.simulate.rank import RankRun, run_rank
from tilewise.testing import ranks
from wire import wire

WITHIN = 0.01  # of a real rank's live bytes: what hosts agree on is not simulated


def train(mesh: Mesh, name: str, graph: Graph, plan: Plan) -> tuple[Counter[Any], int, int]:
    """Run a step; returns what was handed to torch.distributed, and the most bytes alive."""
    model = ParallelModel(build(name), graph, plan, mesh)
    slabs = model.scatter(*inputs_of(graph))
    slabs = slabs if isinstance(slabs, tuple) else (slabs,)

    def step() -> None:
        outputs = model(*slabs) if graph.loss is None else model.loss(*slabs)
        outputs.backward(torch.ones_like(outputs))

    with mesh.trace.record():
        step()
    model.zero_grad()
    with wire() as heard, LiveBytes() as live:
        step()
    sent = Counter(
        (packet.operation, packet.peer, packet.bytes)
        for packet in heard
        if packet.operation == "isend" or (packet.operation == "all_reduce" and packet.bytes != 24)
    )
    held = [*model.parameters(), *model.buffers(), *slabs]
    return sent, live.peak, sum(t.numel() * t.element_size() for t in held)


def handed(run: RankRun) -> Counter[Any]:
    sends = [("isend", m.peer, m.bytes) for _, m in run.messages if m.sent]
    return Counter([*sends, *(("all_reduce", None, one.bytes) for _, one in run.sums)])


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("devices", "seed"), [(2, 0), (4, 1)])
def test_messages_and_memory_are_those_of_a_real_run(name: str, devices: int, seed: int) -> None:
    graph = graph_of(name)
    plan = random_plan(graph, devices, seed)
    real = ranks(devices, train, name, graph, plan)
    runs = [
        run_rank(build(name), graph, plan, ranks=devices, rank=rank, optimizer="sgd")
        for rank in range(devices)
    ]
    for run, (sent, peak, held) in zip(runs, real, strict=True):
        assert handed(run) == sent
        assert run.block_bytes + run.other_bytes == held
        assert run.peak_bytes - held == pytest.approx(peak, rel=WITHIN)
    planned = plan_program(graph.training, plan, ranks=devices, rank=0, draws=Draws(0))
    expected = Payload(planned, plan, node=2)
    assert sum(run.handed_bytes for run in runs) == expected.bytes
