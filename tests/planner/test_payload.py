"""Bytes of a plan, counted without running it, against what ranks really send."""

from __future__ import annotations

from math import prod

import pytest

from plans import NETS, build, graph_of, inputs_of, random_plan
from tilewise import Graph, Mesh, ParallelModel, Plan
from tilewise.graph.lower import plan_program
from tilewise.layout import Block, Cover, Layout, Move
from tilewise.ops.draws import Draws
from tilewise.planner.payload import Payload
from tilewise.planner.traffic import traffic
from tilewise.testing import ranks


def payload(graph: Graph, plan: Plan, devices: int, node: int = 2) -> Payload:
    planned = plan_program(graph.training, plan, ranks=devices, rank=0, draws=Draws(0))
    return Payload(planned, plan, node=node)


def train(mesh: Mesh, name: str, graph: Graph, plan: Plan) -> dict[str, int]:
    """Run one step and return the bytes handed over for each layer, gradients apart."""
    model = ParallelModel(build(name), graph, plan, mesh)
    slabs = model.scatter(*inputs_of(graph))
    slabs = slabs if isinstance(slabs, tuple) else (slabs,)

    def step() -> None:
        loss = model(*slabs).sum() if graph.loss is None else model.loss(*slabs)
        loss.backward()

    step()  # the first one also measures which way to convolve
    with mesh.trace.record() as events:
        step()
    found: dict[str, int] = {}
    for event in events:
        layer = event.layer.removesuffix(" (backward)")
        layer = "gradients" if layer.startswith("gradients of") else layer
        found[layer] = found.get(layer, 0) + event.bytes
    return found


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("devices", "seeds"), [(2, (0,)), (4, (1, 2))])
def test_bytes_are_those_of_a_real_run(name: str, devices: int, seeds: tuple[int, ...]) -> None:
    graph = graph_of(name)
    for seed in seeds:
        plan = random_plan(graph, devices, seed)
        expected = payload(graph, plan, devices)
        real: dict[str, int] = {}
        for one in ranks(devices, train, name, graph, plan):
            for layer, size in one.items():
                real[layer] = real.get(layer, 0) + size
        assert sum(real.values()) == expected.bytes
        assert real.pop("gradients", 0) == sum(one.bytes for one in expected.shared)
        for one in expected.shared:
            expected.bytes_by_layer[one.layer] -= one.bytes
        assert real == {k: v for k, v in expected.bytes_by_layer.items() if v}


def test_a_halo_by_hand() -> None:
    graph = graph_of("dense")
    found = payload(graph, Plan.uniform(graph, "h2"), 2)
    halos = [sent for sent in found.sent if sent.kind == "halo" and sent.layer == "last"]
    (forth, back) = found.traffic(halos[0])
    assert back is not None
    assert forth.elements == back.elements == 2 * prod((4, 5, 6))  # one row each way


def test_near_and_far_add_up_to_the_messages() -> None:
    layout = Layout.of((8, 16, 8), "nch", "n2 h4 c2", ranks=16)
    halo = Cover.on(layout, {2: lambda a, b: Block.clipped(a - 1, b + 1, 8)})
    move = Move(Cover.of(Layout.of((8, 16, 8), "nch", "h2 c8", ranks=16)), halo)
    for node in (1, 2, 4, 16):
        found = traffic(move, node)
        for rank in range(16):
            peers = [m for m in move.receives(rank) if m.peer != rank]
            near = [m for m in peers if m.peer // node == rank // node]
            assert found.near[rank] == sum(m.elements for m in near)
            assert found.near_messages[rank] == len(near)
            assert found.received[rank] == sum(m.elements for m in peers)
            assert found.far_messages[rank] == len(peers) - len(near)
