"""The priced problem against the planned program: seconds of every layer's messages."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from torch import nn

from plans import graph_of
from tilewise import Graph, Plan, capture, search
from tilewise.errors import PlanError
from tilewise.graph.lower import plan_program
from tilewise.layout import Degrees
from tilewise.ops.draws import Draws
from tilewise.planner.chosen import chosen_moves
from tilewise.planner.cost import Setting
from tilewise.planner.formulate import formulate, formulate_plan
from tilewise.planner.formulation import Formulation
from tilewise.planner.machine import load_machine
from tilewise.planner.payload import Payload
from tilewise.planner.price import sum_s, traffic_s
from tilewise.planner.rows import rows, together
from tilewise.planner.solve import evaluate
from tilewise.planner.timeline import KINDS, fullest, peak_bytes
from tilewise.simulate import simulate
from tilewise.simulate.simulation import Simulation

ONE_NODE = load_machine("lassen").model_copy(update={"devices_per_node": 64, "overlap_halo": 0.0})


def formulated(graph: Graph, devices: int, **options: object) -> Formulation:
    return formulate(graph, Setting(ONE_NODE, devices, "float32", 4, "adam"), **options)  # type: ignore[arg-type]


def planned(graph: Graph, plan: Plan, devices: int) -> Payload:
    found = plan_program(graph.training, plan, ranks=devices, rank=0, draws=Draws(0))
    return Payload(found, plan, node=64)


def costs_what_it_sends(found: Formulation, choice: tuple[int, ...], payload: Payload) -> None:
    """Assert that messages of every layer cost what the planned program's do, there and back."""
    moves = chosen_moves(found, choice)
    for node in found.choices.program.nodes:
        if node.name not in found.costs:
            continue
        cost = found.costs[node.name].take(np.array([choice[found.choices.owner[node.name]]]))
        forward = float((cost.halo_forward + cost.exchange_forward)[0])
        backward = float((cost.halo_backward + cost.exchange_backward)[0])
        for move in moves.get(node.name, []):
            forward += float(move.forward[0, 0])
            backward += float(move.backward[0, 0])
        real = [0.0, 0.0]
        for sent in payload.sent:
            handed_out = (
                sent.layer == "output" and node.out in payload.planned.program.output_values
            )
            if sent.layer == node.name or handed_out:
                forth, back = payload.traffic(sent)
                real[0] += traffic_s(ONE_NODE, forth, sent.itemsize)
                real[1] += 0.0 if back is None else traffic_s(ONE_NODE, back, sent.itemsize)
        assert forward == pytest.approx(real[0], rel=1e-9), f"{node.name} forward"
        assert backward == pytest.approx(real[1], rel=1e-9), f"{node.name} backward"


@pytest.mark.parametrize("degrees", ["n2", "n2 h2", "h2 w2", "d2 h2", "c4"])
def test_messages_of_uniform_plans_cost_what_the_planned_program_sends(degrees: str) -> None:
    """Forward and backward; extents are even, and no tensor with a halo comes from elsewhere."""
    graph = graph_of("unet")
    found = formulated(graph, 4)
    choice = found.choice(Plan.uniform(graph, degrees))
    costs_what_it_sends(found, choice, planned(graph, found.plan(choice), 4))


@pytest.mark.parametrize("name", ["small", "joined", "unet", "cosmoflow"])
def test_a_plan_and_its_choice_are_the_same(name: str) -> None:
    graph = graph_of(name)
    found = formulated(graph, 8)
    rng = np.random.default_rng(0)
    choice = tuple(int(rng.integers(len(some))) for some in found.choices.candidates)
    assert found.choice(found.plan(choice)) == choice
    assert evaluate(found.problem, choice).seconds > 0


@pytest.mark.parametrize("name", ["small", "joined", "unet", "cosmoflow"])
def test_rows_add_up_to_the_step(name: str) -> None:
    graph = graph_of(name)
    found = formulated(graph, 4)
    choice = found.choice(Plan.uniform(graph, "n2 h2"))
    table = rows(found, choice, planned(graph, found.plan(choice), 4))
    cost = evaluate(found.problem, choice)
    busy = sum(row.compute_s + row.halo_s + row.exchange_s for row in table)
    assert busy == pytest.approx(cost.forward + cost.backward - found.waiting_seconds(choice))
    assert sum(row.sync_s for row in table) == pytest.approx(cost.sync)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("degrees", ["n2 h2", "n2 c2", "c2 f2"])
@pytest.mark.parametrize("name", ["joined", "unet", "cosmoflow"])
def test_bytes_by_kind_add_up(name: str, degrees: str, again: bool) -> None:
    """To the blocks of the planned program, to what is held, and at the peak to the peak."""
    graph = graph_of(name)
    found = formulated(graph, 4, recompute=again)
    plan = Plan.uniform(graph, degrees)
    if again:
        plan = Plan(plan.layers, recompute=tuple(" ".join(s) for s in found.choices.stretches if s))
    choice = found.choice(plan)
    plan = found.plan(choice)
    program = plan_program(graph.training, plan, ranks=4, rank=0, draws=Draws(0))
    table = rows(found, choice, Payload(program, plan, node=64))
    blocks = sum(
        4 * max(prod(need.cover.local_shape(rank)) for rank in range(4))
        for lowered in program.lowered
        for value, need in zip(lowered.operands, lowered.operation.needs)
        if value.origin == "parameter"
    )
    total = together(table)
    assert total["parameters"] == total["gradients"] == total["states"] // 2 == blocks
    held = sum(int(v.held[k].item()) for v, k in zip(found.problem.variables, choice))
    moved = sum(int(m.held[0, 0]) for some in chosen_moves(found, choice).values() for m in some)
    assert 4 * blocks + total["kept"] == pytest.approx(held + moved, abs=len(table))
    peak = fullest(found, choice)
    assert sum(peak.bytes_by_kind.values()) == peak_bytes(found, choice)
    assert peak.layer in found.called
    assert all(peak.bytes_by_kind[kind] <= total[kind] + len(table) for kind in KINDS)
    for row in table:
        assert list(row.bytes_by_kind) == list(KINDS)
        assert min(row.bytes_by_kind.values()) >= 0


class Product(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 16, 1)
        self.matrix = nn.Parameter(torch.zeros(16, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).transpose(1, 2) @ self.matrix


@pytest.mark.parametrize("columns", [1, 4, 256])
def test_a_product_is_as_fast_as_its_own_channels_allow(columns: int) -> None:
    """What it sums over and its columns, not some number that is the same for all of them."""
    slow = ONE_NODE.compute["float32"].model_copy(update={"peak_flops_per_s": 1e6})
    machine = ONE_NODE.model_copy(update={"compute": {"float32": slow}})
    graph = capture(Product(columns), (torch.zeros(4, 2, 8),))
    found = formulate(graph, Setting(machine, 1, "float32", 4, "adam"))
    (name,) = (node.name for node in graph.training.nodes if node.kind == "matmul")
    seconds = machine.arithmetic_s(
        "matmul", "float32", np.array(2.0 * 4 * 8 * 16 * columns), np.array(4 * columns**0.5)
    )
    assert found.costs[name].compute_forward[0] == pytest.approx(float(seconds) + machine.call_s)


def test_pins_leave_one_candidate() -> None:
    graph = graph_of("dense")
    found = formulated(graph, 4, pins={"last": Degrees(h=2, c=2)})
    assert len(found.problem.variables[found.names.index("last")]) == 1
    assert found.plan((0,) * len(found.names)).layers["last"] == Degrees(h=2, c=2)


def test_a_model_without_layers_to_split() -> None:
    graph = capture(nn.ReLU(), (torch.zeros(2, 3),))
    with pytest.raises(PlanError, match="no layer with weights or windows"):
        formulated(graph, 4)


def test_more_devices_hold_less() -> None:
    graph = graph_of("unet")
    sizes = []
    for devices, degrees in ((1, "1"), (2, "d2"), (4, "d2 h2"), (8, "d2 h2 w2")):
        found = formulated(graph, devices)
        sizes.append(evaluate(found.problem, found.choice(Plan.uniform(graph, degrees))).peak_bytes)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", ["joined", "cosmoflow", "unet"])
def test_what_a_plan_holds_does_not_depend_on_other_candidates(name: str) -> None:
    """Pools keep what they read where they bring no rows of others, and only there.

    A tensor that moves may count as kept where a reader of it might keep it: never too little.
    """
    graph = graph_of(name)
    found = formulated(graph, 6)
    rng = np.random.default_rng(1)
    for _ in range(6):
        choice = tuple(int(rng.integers(len(some))) for some in found.choices.candidates)
        plan = found.plan(choice)
        alone = formulated(graph, 6, pins=plan.layers)
        only = alone.choice(plan)
        seconds = evaluate(found.problem, choice).seconds
        assert evaluate(alone.problem, only).seconds == pytest.approx(seconds, rel=1e-9)
        peak = peak_bytes(alone, only)
        assert peak <= peak_bytes(found, choice) <= peak * (1.0 if name != "unet" else 1.05)


class Repeated(nn.Module):
    """One convolution that is applied four times, and so is all that it holds."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, channels, 3, padding=1)
        self.again = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(4):
            x = self.norm(self.again(x)).relu()
        return x


def assert_takes_as_planned(run: Simulation) -> None:
    """Which sums of small networks hide depends on who shares blocks with whom."""
    planned_s = run.agreement.planned_step_seconds
    assert planned_s is not None
    assert abs(run.step_seconds - planned_s) <= 0.02 * planned_s + run.timeline.sync_s


def shared_seconds(payload: Payload, devices: int) -> float:
    """Price the sums of what a rank brings to them, in one bucket."""
    summed = sum(one.bytes for one in payload.shared) / devices
    bucket = summed - 4 * len(payload.shared)
    everybody = np.array(float(devices))
    return float(sum_s(ONE_NODE, np.array(bucket), everybody, everybody)) * summed / bucket


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("devices", "degrees"), [(1, "1"), (4, "n4"), (4, "n2 h2"), (4, "f4")])
def test_a_shared_parameter_counts_once(devices: int, degrees: str, optimizer: str) -> None:
    model = Repeated(64)
    graph = capture(model, (torch.zeros(4, 4, 8, 8),))
    plan = Plan.uniform(graph, degrees)
    simulated = simulate(
        model, graph, plan, devices=devices, machine=ONE_NODE, optimizer=optimizer, ranks=(0,)
    )
    found = formulate(graph, simulated.setting, pins=plan.layers)
    choice = found.choice(plan)
    table = together(rows(found, choice, planned(graph, plan, devices)))
    blocks, run = simulated.runs[0].block_bytes, simulated
    if devices == 1:
        assert blocks == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert table["parameters"] == table["gradients"] == blocks
    assert table["states"] == {"sgd": 0, "adam": 2}[optimizer] * blocks
    updates = sum(float(cost.optimizer[0]) for cost in found.costs.values())
    assert updates == pytest.approx(run.timeline.optimizer_s)
    if "n" in degrees:
        summed = sum(float(cost.sync[0]) for cost in found.costs.values())
        assert summed == pytest.approx(shared_seconds(planned(graph, plan, devices), devices))
    assert run.agreement.bytes_equal
    assert_takes_as_planned(run)
    if degrees != "f4":
        assert run.agreement.peak_ratio == pytest.approx(1.0, rel=0.08)


class Transferred(nn.Module):
    """A trained head, on a body that is frozen; or a frozen middle between trained layers."""

    def __init__(self, trained_stem: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 64, 3, padding=1).requires_grad_(trained_stem)
        self.body = nn.Conv2d(64, 64, 3, padding=1).requires_grad_(False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.stem(x).relu()).relu().mean((2, 3)))
        return out


@pytest.mark.parametrize("trained_stem", [False, True])
@pytest.mark.parametrize(("devices", "degrees"), [(1, "1"), (4, "n4"), (4, "n2 h2")])
def test_frozen_parameters_are_not_trained(devices: int, degrees: str, trained_stem: bool) -> None:
    model = Transferred(trained_stem)
    graph = capture(model, (torch.zeros(4, 4, 8, 8),))
    plan = Plan.uniform(graph, degrees)
    simulated = simulate(model, graph, plan, devices=devices, machine=ONE_NODE, ranks=(0,))
    found = formulate(graph, simulated.setting, pins=plan.layers)
    table = together(rows(found, found.choice(plan), planned(graph, plan, devices)))
    trained = 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert table["parameters"] == 4 * sum(one.numel() for one in model.parameters())
    assert table["gradients"] == trained
    assert table["states"] == simulated.runs[0].state_bytes == 2 * trained
    body = found.costs["body"]
    assert float(body.sync[0]) == float(body.optimizer[0]) == 0.0
    assert (float(body.compute_backward[0]) > 0) == trained_stem
    updates = sum(float(cost.optimizer[0]) for cost in found.costs.values())
    assert updates == pytest.approx(simulated.timeline.optimizer_s)
    assert simulated.agreement.differences == ()
    assert simulated.agreement.step_ratio == pytest.approx(1.0, rel=0.02)
    assert simulated.agreement.peak_ratio == pytest.approx(1.0, rel=0.08)


class Stacked(nn.Module):
    """Two convolutions, behind a pooling if it is wanted."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(3, 1, 1) if pooled else nn.Identity()
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.last = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.pool(x)).relu()).relu().mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("layer", "degrees"), [("last", "n4"), ("last", "n2 f2"), ("first", "h4"), ("first", "n2 c2")]
)
def test_a_plan_that_does_not_name_the_first_layer_is_priced_as_it_runs(
    layer: str, degrees: str, pooled: bool
) -> None:
    """Inputs are cut as the first layer with degrees wants them, whoever reads them before it."""
    model = Stacked(pooled)
    graph = capture(model, (torch.zeros(4, 16, 32, 32),))
    plan = Plan.of(graph, {layer: degrees})
    run = simulate(model, graph, plan, devices=4, machine=ONE_NODE, ranks=(0,))
    assert run.agreement.bytes_equal
    assert_takes_as_planned(run)
    found, choice = formulate_plan(graph, run.setting, plan)
    costs_what_it_sends(found, choice, planned(graph, plan, 4))
    priced = search(graph, devices=4, machine=ONE_NODE).price(plan)
    assert priced.step_seconds == evaluate(found.problem, choice).seconds


class Tied(nn.Module):
    """Two convolutions by one weight; the second one is transposed, or else a plain one."""

    def __init__(self, transposed: bool, channels: int = 8) -> None:
        super().__init__()
        self.transposed = transposed
        self.first = nn.Conv2d(channels if not transposed else 6, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = torch.conv_transpose2d if self.transposed else torch.conv2d
        return again(self.first(x).relu(), self.first.weight, padding=1).relu().mean((2, 3))


def tied(transposed: bool, channels: int = 8) -> tuple[nn.Module, Graph, str]:
    """Return a model, what is captured of it, and the name of its second convolution."""
    model = Tied(transposed, channels)
    graph = capture(model, (torch.zeros(4, 6 if transposed else channels, 16, 16),))
    (second,) = [one.name for one in graph.layers if one.kind.startswith("conv")][1:]
    return model, graph, second


@pytest.mark.parametrize(("transposed", "channels"), [(False, 8), (False, 6), (True, 8)])
def test_layers_are_tied_by_where_a_shared_weight_lies(transposed: bool, channels: int) -> None:
    """Candidates have equal labels just where a run holds the weight as both layers need it."""
    _, graph, second = tied(transposed, channels)
    found = formulated(graph, 4)
    (tie,) = found.problem.ties
    assert [found.names[v] for v in tie.variables] == ["first", second]
    mine, theirs = (found.choices.candidates[v] for v in tie.variables)
    same = 0
    for i in range(len(mine)):
        for j in range(len(theirs)):
            plan = Plan({"first": mine.degrees(i), second: theirs.degrees(j)})
            moves = any(sent.kind == "held" for sent in planned(graph, plan, 4).sent)
            assert (tie.labels[0][i] == tie.labels[1][j]) != moves, str(plan)
            same += not moves
    assert 0 < same < len(mine) * len(theirs)


@pytest.mark.parametrize(
    ("transposed", "first", "second"),
    [
        (False, "n2 f2", "f2"),  # the same numbers, but other ranks
        (False, "f4", "n4"),
        (False, "n2 c2", "n2 f2"),
        (True, "f4", "f2"),
        (True, "n4", "c4"),
        (True, "n2 f2", "n2 c2"),  # alike
    ],
)
def test_a_shared_weight_that_lies_elsewhere_is_priced_as_it_runs(
    transposed: bool, first: str, second: str
) -> None:
    model, graph, name = tied(transposed)
    plan = Plan({"first": Degrees.parse(first), name: Degrees.parse(second)})
    run = simulate(model, graph, plan, devices=4, machine=ONE_NODE, ranks=(0,))
    assert run.agreement.bytes_equal
    assert_takes_as_planned(run)
    found, choice = formulate_plan(graph, run.setting, plan)
    payload = planned(graph, plan, 4)
    costs_what_it_sends(found, choice, payload)
    table = together(rows(found, choice, payload))
    assert table["parameters"] == run.runs[0].block_bytes
    updates = sum(float(cost.optimizer[0]) for cost in found.costs.values())
    assert updates == pytest.approx(run.timeline.optimizer_s, rel=0.05)
    searched = search(graph, devices=4, machine=ONE_NODE)
    assert searched.price(plan).step_seconds == evaluate(found.problem, choice).seconds
    assert not any(sent.kind == "held" for sent in searched.payload(searched.plan).sent)


def test_pins_that_need_other_blocks_of_a_shared_weight_leave_it_whole() -> None:
    _, graph, name = tied(False)
    found = search(graph, devices=4, machine=ONE_NODE, pins={"first": "n2 f2", name: "f2"})
    assert not found.formulation.problem.ties
    assert found.plan.layers[name] == Degrees.parse("f2")
    assert found.price(found.plan).step_seconds == found.step_seconds
    _, graph, name = tied(True)
    found = search(graph, devices=4, machine=ONE_NODE, pins={"first": "f4"})
    assert found.plan.layers[name] == Degrees.parse("c4")
