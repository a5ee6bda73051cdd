"""Whole simulations against the planner, and worlds that no machine here could hold."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plans import NETS, build, graph_of, random_plan
from tilewise import Plan, capture, models
from tilewise.cli import main
from tilewise.errors import PlanError
from tilewise.graph.labels import labels
from tilewise.planner.formulate import formulate
from tilewise.planner.machine import Curve, load_machine
from tilewise.planner.places import choices
from tilewise.planner.search import search
from tilewise.planner.solve import InfeasibleError
from tilewise.planner.stretches import stretches
from tilewise.simulate import Simulation, Sweep, as_dict, simulate
from tilewise.simulate.agreement import planned_cost
from tilewise.simulate.price import Priced
from tilewise.simulate.record import Segment, Sum
from tilewise.simulate.schedule import lay

STEP = 0.03  # how far the step may be from the planner's
PEAK = 0.05  # how far the memory may be, where activations are most of it

Made = Callable[[], nn.Module]
AT_SCALE: dict[str, tuple[Made, tuple[int, ...], Any, str, int]] = {
    "cosmoflow": (
        lambda: models.cosmoflow(size=512),
        (64, 4, 512, 512, 512),
        F.mse_loss,
        "n64 d8 h2 w2",
        2048,
    ),
    "unet": (
        lambda: models.unet3d(),
        (4, 1, 128, 128, 128),
        F.cross_entropy,
        "n4 d2 h2",
        16,
    ),
}


@pytest.mark.parametrize("name", AT_SCALE)
def test_the_planner_says_the_same(name: str) -> None:
    make, shape, loss, degrees, devices = AT_SCALE[name]
    with torch.device("meta"):
        model = make()
    graph = capture(model, (torch.empty(shape, device="meta"),), loss)
    plan = Plan.uniform(graph, degrees)
    found = simulate(model, graph, plan, devices=devices, machine="lassen", ranks=(1,))
    agreement = found.agreement
    assert agreement.differences == ()
    assert agreement.step_ratio == pytest.approx(1.0, rel=STEP)
    assert agreement.peak_ratio == pytest.approx(1.0, rel=PEAK)
    forward = sum(s.flops for s in found.runs[0].segments if s.phase == "forward")
    assert forward == pytest.approx(graph.flops / devices, rel=0.01)


@pytest.mark.parametrize("name", NETS)
def test_bytes_are_the_planners_on_any_rank(name: str) -> None:
    graph = graph_of(name)
    plan = random_plan(graph, 6, 3)
    found = simulate(build(name), graph, plan, devices=6, machine="p100x4", ranks=(0, 5))
    assert found.agreement.differences == ()


@pytest.mark.parametrize("degrees", ["h4", "n4"])
def test_empty_parts_cost_what_the_planner_says(degrees: str) -> None:
    """A pin may leave ranks without work, as a run may: it is priced as it runs."""
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1)
    )
    graph = capture(model, (torch.empty(2, 16, 4, 1024, device="meta"),), F.mse_loss)
    pins = dict.fromkeys(("0", "2", "3"), degrees)
    planned = search(graph, devices=4, machine="lassen", pins=pins)
    assert {str(one) for one in planned.plan.layers.values()} == {degrees}
    found = simulate(model, graph, planned.plan, devices=4, machine="lassen", ranks=(0, 1, 2, 3))
    assert found.agreement.differences == ()
    assert found.agreement.step_ratio == pytest.approx(1.0, rel=STEP)
    assert found.agreement.peak_ratio == pytest.approx(1.0, rel=PEAK)
    free = search(graph, devices=4, machine="lassen")
    assert free.price(planned.plan).step_seconds == pytest.approx(planned.step_seconds)
    assert free.step_seconds <= planned.step_seconds


class Products(nn.Module):
    """A product of two activations, one with a weight, and one with a vector added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, width, 1)
        self.matrix = nn.Parameter(torch.zeros(width, 2 * width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.last = nn.Parameter(torch.zeros(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        z = torch.addmm(self.bias, y.mean(2) @ self.matrix, self.last)
        return z.sum() + (y @ y.transpose(1, 2)).sum()


@pytest.mark.parametrize(("degrees", "width"), [("n2", 16), ("n2", 512), ("c2", 512), ("c2", 16)])
def test_products_take_what_the_planner_says(degrees: str, width: int) -> None:
    """By their own channels, of which a rank sums over its part, and a product a gradient."""
    with torch.device("meta"):
        model = Products(width)
    graph = capture(model, (torch.empty((64, 4, 512), device="meta"),))
    plan = Plan.uniform(graph, degrees)
    found = simulate(model, graph, plan, devices=2, machine="lassen")
    problem = formulate(graph, found.setting)
    choice = problem.choice(plan)
    products = [node.name for node in graph.training.nodes if node.flops]
    assert len(products) == 4
    for name in products:
        at, cost = choice[problem.choices.owner[name]], problem.costs[name]
        for phase in ("forward", "backward"):
            ran = [one for one in found.slowest if one.segment.layer == name]
            seconds = sum(one.compute_s for one in ran if one.segment.phase == phase)
            expected = getattr(cost, f"compute_{phase}")[at]
            assert seconds == pytest.approx(expected, rel=1e-4), (name, phase)


def test_two_thousand_ranks_of_a_small_model() -> None:
    graph = graph_of("joined")
    plan = Plan.uniform(graph, "n4 h4 w4 c2")
    found = simulate(build("joined"), graph, plan, devices=2048, machine="lassen")
    assert found.agreement.differences == ()
    assert 1 < len(found.runs) <= 5
    plain = json.loads(json.dumps(as_dict(found, model="joined")))
    assert plain["devices"] == 2048
    for rank, run in zip(plain["ranks"], found.runs, strict=True):
        assert rank["sent_bytes"] == run.handed_bytes
        sent = sum(row["sent_bytes"] for row in rank["messages"])
        assert sent + sum(row["bytes"] for row in rank["sums"]) == rank["sent_bytes"]
        assert all(row["peer"] != rank["rank"] for row in rank["messages"])
    assert max(row["peak_bytes"] for row in plain["memory"]) <= plain["peak_bytes"]
    assert max(bar["end_s"] for bar in plain["timeline"]) == pytest.approx(plain["step_seconds"])
    for stream in ("compute", "sync"):
        bars = [bar for bar in plain["timeline"] if bar["stream"] == stream]
        assert all(a["end_s"] <= b["start_s"] + 1e-12 for a, b in pairwise(bars))


def test_computing_again_takes_time_and_messages_but_less_memory() -> None:
    graph = graph_of("unet")
    plan = Plan.uniform(graph, "n2 d2")
    again = Plan(plan.layers, recompute=("*",))
    one, two = (
        simulate(build("unet"), graph, some, devices=4, machine="lassen", ranks=(1,))
        for some in (plan, again)
    )
    assert two.agreement.differences == ()
    assert two.step_seconds > one.step_seconds
    assert two.runs[0].handed_bytes > one.runs[0].handed_bytes
    kept = [[s for s in found.runs[0].segments if s.phase == "forward"] for found in (one, two)]
    assert kept[1][-1].end_bytes < kept[0][-1].end_bytes
    phases = {s.phase for s in two.runs[0].segments}
    assert phases == {"forward", "again", "backward", "optimizer"}


def test_a_plan_that_computes_again_to_spare_memory() -> None:
    """It fits where no other plan does, comes from a file, and costs what the planner says."""
    with torch.device("meta"):
        model = models.unet3d(width=0.25)
    graph = capture(model, (torch.empty((4, 1, 32, 32, 32), device="meta"),), F.cross_entropy)
    where: Any = {"devices": 4, "machine": "lassen"}
    with pytest.raises(InfeasibleError) as caught:
        search(graph, memory=1, time_limit=5.0, **where)
    cap = int(0.98 * caught.value.least.bound)
    found = search(graph, memory=cap, time_limit=10.0, recompute=True, **where)
    assert found.peak_bytes <= cap
    plan = Plan.from_json(found.plan.to_json())
    assert found.formulation.choice(plan) == found.solution.choice
    again = {row.name for row in found.rows if row.recompute}
    simulated = simulate(model, graph, plan, ranks=(1,), **where)
    assert again
    assert again <= {s.layer for s in simulated.runs[0].segments if s.phase == "again"}
    assert simulated.agreement.planned_peak_bytes == found.peak_bytes
    assert simulated.agreement.planned_step_seconds == pytest.approx(found.step_seconds)
    _check_agreement(simulated, STEP)


def _check_agreement(simulated: Simulation, step: float) -> None:
    agreement = simulated.agreement
    assert agreement.differences == ()
    assert agreement.peak_ratio == pytest.approx(1.0, rel=PEAK)
    assert agreement.step_ratio == pytest.approx(1.0, rel=step)


@pytest.mark.parametrize(
    ("name", "shape", "step"),
    [
        ("resnet50", (32, 3, 128, 128), 2 * STEP),  # many small layers
        ("unet3d", (8, 1, 64, 64, 64), STEP),
    ],
)
def test_the_planner_knows_what_computing_again_costs(
    name: str, shape: tuple[int, ...], step: float
) -> None:
    """All stretches of a network under one split: residual sums, concatenations, norms."""
    with torch.device("meta"):
        model = getattr(models, name)()
    graph = capture(model, (torch.empty(shape, device="meta"),), F.cross_entropy)
    plain = Plan.uniform(graph, "n4 h2")
    some = choices(graph, labels(graph.training), 8, {})
    entries = tuple(" ".join(stretch) for stretch in stretches(some) if stretch)
    every = Plan({name: plain.layers[name] for name in some.names}, recompute=entries)
    simulated = simulate(model, graph, every, devices=8, machine="lassen", ranks=(1,))
    planned = planned_cost(graph, plain, simulated.setting)
    assert planned is not None
    assert simulated.agreement.planned_peak_bytes is not None
    assert simulated.agreement.planned_peak_bytes < planned[1]
    _check_agreement(simulated, step)


def test_computing_again_where_only_samples_are_cut() -> None:
    """The planner's peak is a little low: a stretch's result outlives the calls of its backward."""
    with torch.device("meta"):
        model = models.unet3d(width=0.25)
    graph = capture(model, (torch.empty((4, 1, 32, 32, 32), device="meta"),), F.cross_entropy)
    some = choices(graph, labels(graph.training), 4, {})
    entries = tuple(" ".join(stretch) for stretch in stretches(some) if stretch)
    plan = Plan(Plan.uniform(graph, "n4").layers, recompute=entries)
    found = simulate(model, graph, plan, devices=4, machine="lassen", ranks=(0,))
    assert found.agreement.peak_ratio == pytest.approx(1.0, rel=0.08)


LOSSES = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy_with_logits,
    None,
)


@pytest.mark.parametrize("degrees", ["1", "n2", "h2", "f2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_elements_hold_what_the_planner_says(loss: Any, degrees: str) -> None:
    """Where the result is a whole image, the loss is the peak; or the result, without one."""
    model = nn.Conv2d(1, 8, 3, padding=1)
    graph = capture(model, (torch.zeros(4, 1, 64, 64),), loss)
    devices = 1 if degrees == "1" else 2
    plan = Plan.uniform(graph, degrees)
    found = simulate(model, graph, plan, devices=devices, machine="lassen")
    assert found.agreement.peak_ratio == pytest.approx(1.0, rel=PEAK)


def test_results_with_channels_cut_move_nowhere() -> None:
    """They are handed out as they lie, in less time and memory than with whole channels."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 1))
    graph = capture(model, (torch.zeros(4, 4, 32, 32),))
    whole, cut = (
        simulate(model, graph, plan, devices=2, machine="lassen")
        for plan in (Plan.uniform(graph, "f2", io_channels=some) for some in (False, True))
    )
    for found in (whole, cut):
        assert found.agreement.peak_ratio == pytest.approx(1.0, rel=PEAK)
        assert found.agreement.step_ratio == pytest.approx(1.0, rel=STEP)
    assert cut.agreement.planned_step_seconds < whole.agreement.planned_step_seconds
    assert cut.agreement.planned_peak_bytes < whole.agreement.planned_peak_bytes


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_optimizer_passes_over_blocks_and_states(optimizer: str) -> None:
    """What is read and written by hand, and the planner's price of the same update."""
    graph = graph_of("cosmoflow")
    plan = Plan.uniform(graph, "n2 f2")
    lassen = load_machine("lassen")
    machine = lassen.model_copy(update={"memory_by_bytes": Curve(at=[1.0], share=[0.5])})
    found = simulate(build("cosmoflow"), graph, plan, devices=4, machine=machine, ranks=(0, 3),
                     optimizer=optimizer)  # fmt: skip
    run = found.runs[0]
    states = {"sgd": 0, "adam": 2}[optimizer]
    assert run.state_bytes == states * run.block_bytes
    updates = [s for s in run.segments if s.phase == "optimizer"]
    layers = [
        node.name
        for node in graph.training.nodes
        if any(value.origin == "parameter" for value in node.values())
    ]
    assert [update.layer for update in updates] == layers
    moved = run.block_bytes * (3 + 2 * states)  # parameter and gradient in, parameter out, states
    bandwidth = 0.5 * machine.memory_bandwidth_bytes_per_s
    seconds = moved / bandwidth + len(layers) * machine.call_s
    assert found.timelines[0].optimizer_s == pytest.approx(seconds)
    held = run.block_bytes * (2 + states) + run.other_bytes
    for update in updates:
        assert update.end_bytes >= held
        assert (update.peak_bytes > update.end_bytes) == (optimizer == "adam")
    formulated = formulate(graph, found.setting, pins=plan.layers)
    planned = sum(float(cost.optimizer[0]) for cost in formulated.costs.values())
    assert found.timeline.optimizer_s == pytest.approx(planned, rel=STEP)
    bars = [bar for bar in found.timeline.bars if bar.phase == "optimizer"]
    assert [bar.layer for bar in bars] == layers
    assert bars[-1].end_s == pytest.approx(found.step_seconds)


def test_a_timeline_by_hand() -> None:
    """A halo of 3 behind 0.5 of a compute of 4; a sum of 5 that starts when backward is done."""
    forward, backward = Segment("a", "forward"), Segment("a", "backward")
    gradients = (Sum("gradients", (0, 1), 8), 5.0)
    found = lay(
        [
            Priced(forward, compute_s=4.0, halo_s=3.0, before_s=1.0),
            Priced(backward, compute_s=2.0, after_s=0.5, gradients=(gradients,)),
            Priced(Segment("a", "optimizer"), compute_s=0.25),
        ],
        overlap=0.5,
    )
    assert (found.forward_s, found.backward_s, found.tail_s) == (6.0, 2.5, 5.0)
    assert found.step_seconds == 6.0 + 2.5 + 5.0 + 0.25
    assert found.seconds("messages") == 1.0 + 3.0 + 0.5
    assert found.spans[-1][1:] == (13.5, 13.75)


def test_a_sweep_gives_each_count_its_plan() -> None:
    model = build("cosmoflow")
    sweep = Sweep(model, ((4, 4, 16, 16, 16),), load_machine("lassen"), time_limit=2.0)
    points = [*sweep.strong((1, 2)), *sweep.weak((2, 4), base=2)]
    assert [point.simulation.devices for point in points] == [1, 2, 2, 4]
    assert [point.shapes[0][0] for point in points] == [4, 4, 4, 8]
    assert all(point.simulation.agreement.bytes_equal for point in points)
    with pytest.raises(PlanError, match="no whole batch"):
        list(sweep.weak((3,), base=8))


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    arguments = ["tilewise", "simulate", "alexnet", "--arg", "width=0.25", *options]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_the_command_prints_tables_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--input", "8x3x96x96", "--devices", "8", "--plan", "n4 h2", "--ranks", "0,3")
    assert run(monkeypatch, *where) == 0
    shown = capsys.readouterr().out
    assert "bytes are the planner's" in shown
    assert "simulated ranks" in shown
    assert run(monkeypatch, *where, "--json", "--strong", "2,4", "--time-limit", "2") == 0
    plain = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in plain["ranks"]] == [0, 3]
    assert [point["devices"] for point in plain["strong"]] == [2, 4]
    assert plain["plan"]["features.0"] == "n4 h2"


def test_layers_keep_their_names_on_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan = "features.*=n4 h2,features.10=f8,classifier.*=f8"
    assert run(monkeypatch, "--input=8x3x96x96", "--devices=8", f"--plan={plan}", "--ranks=0") == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    table = shown.partition("layers")[2].partition(" all ")[0]
    assert [line.endswith(" …") for line in re.findall(r".*…", table)] == [True] * 3
    for name in ("features.0", "features.9", "features.10", "features.11", "classifier.6"):
        assert f" {name} " in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--devices: say how many"),
        (("--devices", "4", "--plan", "n4", "--ranks", "4"), "rank 4 is not one of 0 … 3"),
        (("--devices", "4", "--ranks", "a"), "--ranks: 'a' must be numbers"),
        (("--devices", "4", "--plan", "n8"), "must divide the number of ranks"),
        (("--devices", "4", "--loss", "hinge"), "--loss: 'hinge' must be one of"),
        (
            ("--devices", "4", "--plan", "n4", "--machine", "abacus"),
            "nor a machine that is known",
        ),
    ],
)
def test_bad_input_is_one_line(
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "--input", "8x3x96x96", *options) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
