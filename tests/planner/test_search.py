"""The search from a captured model to a plan: better than what people use, and explained."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from plans import NETS, build, graph_of
from tilewise import Plan, capture, models, search
from tilewise.auto.finals import contenders, uniform_plans
from tilewise.cli.plan_others import MOST_ALTERNATIVES, show_alternatives, show_sensitivity
from tilewise.errors import PlanError
from tilewise.layout import Degrees
from tilewise.planner.baselines import NAMES, seconds_of
from tilewise.planner.candidates import all_degrees
from tilewise.planner.cost import Setting
from tilewise.planner.explain import Alternative
from tilewise.planner.formulate import formulate
from tilewise.planner.machine import CallTime, LayerTime, load_machine
from tilewise.planner.places import resolved
from tilewise.planner.search import Found, parse_bytes
from tilewise.planner.sensitivity import RATES, SHARES, scaled
from tilewise.planner.solve import Solution, evaluate, solve


@pytest.fixture(scope="module")
def found() -> Found:
    return search(graph_of("joined"), devices=4, machine="p100x4", time_limit=20.0)


def test_no_baseline_is_faster(found: Found) -> None:
    assert found.optimal
    assert set(found.baselines) == set(NAMES)
    for one in found.baselines.values():
        assert one.step_seconds >= found.step_seconds * (1 - 1e-9)
    shared = {name: found.shared_degrees(one.plan) for name, one in found.baselines.items()}
    for name, degrees in shared.items():
        choice = found.formulation.choice(found.baselines[name].plan)
        assert degrees is None or found.formulation.nearest(degrees) == choice
    assert shared["uniform"] is not None
    best = found.baselines["uniform"].step_seconds
    assert best <= found.baselines["data"].step_seconds
    assert best <= found.baselines["spatial"].step_seconds
    assert best <= found.baselines["model"].step_seconds


def test_a_search_without_a_limit_has_the_seconds_of_the_whole_problem(found: Found) -> None:
    problem, timed = found.formulation.problem, found.formulation.timed
    for one, other in zip(problem.transfers, timed.transfers, strict=True):
        labels = np.unique(one.leaves), np.unique(np.concatenate([c.wants for c in one.consumers]))
        moves, seconds = one.cost(*labels), other.cost(*labels)
        assert (moves.forward == seconds.forward).all()
        assert (moves.backward == seconds.backward).all()
        assert not seconds.held.any()
    assert any(t.cost(t.leaves[:9], t.consumers[0].wants[:9]).held.any() for t in problem.transfers)
    assert found.free.peak_bytes == evaluate(problem, found.free.choice).peak_bytes


def test_the_best_uniform_plan_is_the_best_of_all(found: Found) -> None:
    graph = graph_of("joined")
    plans = [Plan.uniform(graph, d) for d in ("n4", "n2 h2", "h4", "h2 w2", "c4", "f4", "n2 c2")]
    best = min(found.price(plan).step_seconds for plan in plans)
    assert found.baselines["uniform"].step_seconds <= best * (1 + 1e-9)


class Tied(torch.nn.Module):
    """A convolution, and a transposed one by the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.conv_transpose2d(self.a(x).relu(), self.a.weight, padding=1)


def test_plans_that_shared_parameters_forbid_are_no_contenders() -> None:
    found = search(capture(Tied(), torch.randn(4, 3, 16, 16)), devices=4, machine="lassen")
    plans = contenders(found)
    assert plans[0] == found.plan
    assert all(found.price(plan).step_seconds > 0 for plan in plans)
    with pytest.raises(ValueError, match="tied"):
        [found.seconds(plan) for plan in uniform_plans(found).values()]


def test_spatial_plans_cut_what_layers_have() -> None:
    small = capture(torch.nn.Conv2d(6, 6, 3, padding=1), torch.randn(3, 6, 8, 8))
    spatial = search(small, devices=3, machine="p100x4").baselines["spatial"].plan
    assert {str(degrees) for degrees in spatial.layers.values()} <= {"h3", "w3"}
    linear = capture(torch.nn.Linear(6, 6), torch.randn(3, 6))
    assert "spatial" not in search(linear, devices=3, machine="p100x4").baselines


@pytest.mark.parametrize("machine", ["p100x4", "lassen"])
def test_a_step_adds_up(machine: str) -> None:
    found = search(graph_of("joined"), devices=4, machine=machine, pins={"*": "n4"})
    parts = found.cost.forward + found.backward_seconds + found.cost.sync
    assert parts - found.hidden_seconds == pytest.approx(found.step_seconds)
    assert found.cost.sync > 0
    # all gradients are in one bucket, whose sums begin when backward is done
    assert found.hidden_seconds == pytest.approx(0.0, abs=1e-12)


def test_a_follower_that_is_pinned_as_it_would_follow_does_not_differ(found: Found) -> None:
    graph = graph_of("joined")
    name = next(one.name for one in graph.layers if one.name not in found.formulation.names)
    degrees = resolved(graph, found.plan)
    pinned = Plan({**found.plan.layers, name: degrees[name]})
    assert resolved(graph, pinned) == degrees


def test_the_way_that_was_chosen_is_always_shown(found: Found) -> None:
    layer = found.formulation.names[0]
    ways = found.explain(layer)
    (chosen,) = [one for one in ways if one.chosen]
    bounds = [replace(one, step_seconds=0.0, exact=False) for one in ways if not one.chosen]
    console = Console(record=True, width=200, file=StringIO())
    show_alternatives(layer, [*bounds * MOST_ALTERNATIVES, chosen], found, console)
    assert f"{chosen.degrees} *" in console.export_text()


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("name", ["small", "joined"])
def test_bytes_are_those_of_the_planned_dtype(name: str, dtype: str) -> None:
    """The same as of the model captured in that dtype; integers and statistics keep theirs."""
    kind, (_, shape, loss) = getattr(torch, dtype), NETS[name]
    cast = capture(build(name).to(kind), (torch.zeros(shape, dtype=kind),), loss)
    for devices, degrees in ((2, "n2"), (4, "h2 w2"), (4, "n2 c2")):
        plan = Plan.uniform(cast, degrees)
        same, other = (
            search(graph, devices=devices, machine="p100x4", dtype=dtype, pins=plan.layers)
            for graph in (cast, graph_of(name))
        )
        assert other.payload(plan).bytes_by_layer == same.payload(plan).bytes_by_layer
        assert [row.bytes for row in other.rows] == [row.bytes for row in same.rows]
        assert other.step_seconds == pytest.approx(same.step_seconds)


def test_layers_that_a_plan_does_not_name_follow_the_one_before(found: Found) -> None:
    graph = graph_of("joined")
    pinned = search(graph, devices=4, machine="p100x4", pins={"stem": "w4"}, time_limit=20.0)
    whole = found.price(Plan.of(graph, {"*": "n4"}))
    for some in (found, pinned):
        priced = some.price(Plan.of(graph, {"stem": "n4"}))
        assert priced.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
        assert priced.peak_bytes == whole.peak_bytes
    with pytest.raises(PlanError, match="'elsewhere', which is not a layer"):
        found.price(Plan({"elsewhere": Degrees.parse("n4")}))


def test_a_plan_that_computes_again_is_priced_so(found: Found) -> None:
    again = search(graph_of("joined"), devices=4, machine="p100x4", recompute=True)
    stretches = again.formulation.choices.stretches
    plan = replace(found.plan, recompute=tuple(" ".join(s) for s in stretches if s))
    assert found.price(plan) == again.price(plan)
    assert found.price(plan).step_seconds > found.step_seconds


def test_many_choices_are_priced_as_one_by_one() -> None:
    """With layers computed again too, and tensors that several read."""
    again = search(graph_of("joined"), devices=4, machine="lassen", recompute=True).formulation
    draw = np.random.default_rng(0)
    choices = np.stack([draw.integers(size, size=60) for size in again.problem.choices], 1)
    expected = [evaluate(again.problem, tuple(choice)).seconds for choice in choices.tolist()]
    assert np.allclose(seconds_of(again, choices), expected, rtol=1e-12)


def test_the_frontier_agrees_with_limited_searches(found: Found) -> None:
    points = found.frontier(6)
    assert len(points) > 1
    assert [one.peak_bytes for one in points] == sorted({one.peak_bytes for one in points})
    assert [one.step_seconds for one in points] == sorted(
        {one.step_seconds for one in points}, reverse=True
    )
    assert points[-1].step_seconds == pytest.approx(found.free.seconds)
    assert all(one.optimal for one in points)
    for point in points[1:-1]:
        limited = search(
            graph_of("joined"), devices=4, machine=found.machine, memory=point.peak_bytes
        )
        assert limited.step_seconds <= point.step_seconds * (1 + 1e-9)
        assert limited.step_seconds >= point.step_seconds * (1 - 1e-3)
    with pytest.raises(PlanError, match=r"points \(=1\) of a frontier"):
        found.frontier(1)


@pytest.mark.parametrize("pins", [{}, {"up": "f4"}])
def test_bytes_of_the_layers_are_all_that_is_sent(pins: dict[str, str]) -> None:
    """Also what hands the network's result out, whose channels the last layer may have cut."""
    graph = capture(build("joined"), (torch.zeros(4, 3, 10, 8),))
    some = search(graph, devices=4, machine="p100x4", pins=pins, time_limit=20.0)
    sent = some.payload(some.plan)
    assert ("output" in sent.bytes_by_layer) == bool(pins)
    assert sum(row.bytes for row in some.rows) == sent.bytes


def test_a_plan_for_one_device_is_not_split() -> None:
    alone = search(graph_of("dense"), devices=1, machine="lassen")
    assert all(degrees.product == 1 for degrees in alone.plan.layers.values())
    assert alone.rows[0].bytes == 0


def test_explanations_price_the_chosen_way_at_the_step(found: Found) -> None:
    ways = found.explain("wide", time_limit=20.0)
    assert len(ways) == len(
        found.formulation.choices.candidates[found.formulation.names.index("wide")]
    )
    (chosen,) = [way for way in ways if way.chosen]
    assert chosen.step_seconds == pytest.approx(found.step_seconds)
    assert chosen.alone_seconds == pytest.approx(found.step_seconds)
    for way in ways:
        assert way.step_seconds >= found.step_seconds * (1 - 1e-6)
        assert way.step_seconds <= way.alone_seconds * (1 + 1e-6) or not way.exact
    with pytest.raises(PlanError, match="no layer 'nowhere' to explain"):
        found.explain("nowhere")


def test_the_plan_bounds_the_way_it_has(found: Found) -> None:
    """Not proven best, its way may be cheaper, but no table says that it is."""
    ways = found.explain("wide", time_limit=20.0)
    (chosen,) = [way for way in ways if way.chosen]
    below = 0.9 * found.step_seconds

    def shown(way: Alternative) -> str:
        console = Console(record=True, width=200, file=StringIO())
        show_alternatives("wide", [way], found, console)
        return " ".join(console.export_text().split())

    proven = shown(chosen)
    assert "+0.0%" in proven
    assert "≤" not in proven
    unproven = shown(replace(chosen, step_seconds=below, exact=False))
    assert "+0.0%" in unproven
    assert "≤ the plan's own step, which is not proven best" in unproven
    assert "-10.0%" not in unproven
    found_less = shown(replace(chosen, step_seconds=below))
    assert "-10.0%" in found_less
    assert "a faster one was found while pricing" in found_less


@pytest.mark.parametrize("short", [False, True])
def test_every_way_is_chosen_as_good_or_left_out_for_a_reason(found: Found, short: bool) -> None:
    if short:
        limit = found.frontier()[0].peak_bytes
        found = search(
            graph_of("joined"), devices=4, machine="p100x4", memory=limit, time_limit=20.0
        )
    ways = found.explain("wide", time_limit=20.0)
    groups = found.left_out("wide", ways)
    gone = [str(one.degrees) for some in groups.values() for one in some]
    best = found.step_seconds * (1 + 1e-8)
    as_good = [str(way.degrees) for way in ways if way.step_seconds <= best]
    assert str(found.plan.layers["wide"]) in as_good
    every = [str(Degrees(*row)) for row in all_degrees(4).tolist()]
    assert sorted(gone + as_good) == sorted(every)
    assert ("no plan with it fits in memory" in groups) == short
    assert all(one.reason for some in groups.values() for one in some)
    for way in ways:
        assert (way.peak_bytes is not None) == (way.exact and np.isfinite(way.step_seconds))
        assert way.peak_bytes is None or way.peak_bytes <= found.memory_bytes
    (peak,) = [way.peak_bytes for way in ways if way.chosen]
    assert peak == found.peak_bytes
    before = found.left_out("wide")
    assert before == {rule: groups[rule] for rule in before}
    assert set(groups) - set(before) <= {
        "no plan with it fits in memory", "proven slower, however other layers are split",
    }  # fmt: skip


def test_pinning_what_was_found_changes_no_price() -> None:
    """Also for layers that would follow another one: element-wise ones and norms."""
    graph = capture(models.resnet50(width=0.125), torch.empty(8, 3, 64, 64, device="meta"))
    free = search(graph, devices=4, machine="p100x4", time_limit=20.0)
    assert free.optimal
    conv = str(free.plan.layers["layer1.0.conv1"])
    pins = dict.fromkeys(("layer1.0.conv1", "layer1.0.bn1", "layer1.0.relu"), conv)
    pinned = search(graph, devices=4, machine="p100x4", time_limit=20.0, pins=pins)
    assert pinned.step_seconds == pytest.approx(free.step_seconds, rel=1e-9)


def test_pins_hold_and_cost() -> None:
    graph = graph_of("joined")
    free = search(graph, devices=4, machine="p100x4", time_limit=20.0)
    pinned = search(
        graph, devices=4, machine="p100x4", pins={"stem": "w4", "up": "c2 f2"}, time_limit=20.0
    )
    assert str(pinned.plan.layers["stem"]) == "w4"
    assert str(pinned.plan.layers["up"]) == "c2 f2"
    assert pinned.step_seconds >= free.step_seconds * (1 - 1e-9)


def test_a_machine_a_little_other(found: Found) -> None:
    tried = found.sensitivity()
    same = {"all_reduce.overhead_s", "overlap_halo", "overlap_sums"}  # they are 0 there
    assert {one.rate for one in tried} == set(RATES) - same
    for one in tried:
        assert one.regret >= -1e-9
        assert one.survives == (one.regret < 1e-3)
        assert one.changed > 0 or one.survives
    machine = load_machine("lassen")
    slower = scaled(machine, "network.bandwidth_bytes_per_s", 0.9)
    assert slower.network.bandwidth_bytes_per_s == 0.9 * machine.network.bandwidth_bytes_per_s
    assert slower.node == machine.node


@pytest.mark.parametrize("rate", RATES)
def test_each_rate_is_scaled_and_no_other(rate: str) -> None:
    machine = load_machine("lassen").model_copy(update={"overlap_halo": 0.5, "overlap_sums": 0.95})
    reduce = machine.all_reduce.model_copy(update={"overhead_s": 1e-5})
    machine = machine.model_copy(update={"all_reduce": reduce})
    first = rate.partition(".")[0]
    for share in SHARES:
        before, after = machine.model_dump(), scaled(machine, rate, share).model_dump()
        assert before.pop(first) != after.pop(first)
        assert before == after
    assert scaled(machine, "overlap_sums", 1.1).overlap_sums == 1.0
    assert scaled(machine, "overlap_halo", 1.1).overlap_halo == pytest.approx(0.55)


def test_curves_are_reached_by_larger_calls() -> None:
    machine = load_machine("lassen")
    other = scaled(machine, "compute.by_channels", 1.1)
    flops, channels = np.array([1e9, 1e9]), np.array([20.0, 40.0])
    before = machine.arithmetic_s("conv3d", "float32", flops, channels)
    after = other.arithmetic_s("conv3d", "float32", flops, 1.1 * channels)
    assert after == pytest.approx(before)


def test_measured_times_go_with_the_rate_of_arithmetic() -> None:
    """Where all calls are measured, a slower processor still makes a slower step."""
    graph, lassen = graph_of("joined"), load_machine("lassen")
    setting = Setting(lassen, 4, "float32", 4, "adam")
    calls = formulate(graph, setting, with_calls=True).calls
    rows = tuple(CallTime(call=key, forward_s=1e-3, backward_s=2e-3) for key in calls)
    layer = LayerTime(kind="linear", dtype="float32", shapes=((1,),), forward_s=1.0, backward_s=1.0)
    machine = lassen.model_copy(update={"call_times": rows, "layer_times": (layer,)})
    fast = scaled(machine, "compute.peak_flops_per_s", 1.25)
    back = scaled(machine, "compute.backward_share", 1.25)
    assert {(one.forward_s, one.backward_s) for one in fast.call_times} == {(8e-4, 1.6e-3)}
    assert {(one.forward_s, one.backward_s) for one in back.call_times} == {(1e-3, 1.6e-3)}
    assert fast.layer_times[0].forward_s == 0.8
    seconds = []
    for one in (machine, fast):
        found = formulate(graph, replace(setting, machine=one))
        cost = evaluate(found.problem, found.nearest(Degrees.parse("n4")))
        seconds.append(cost.seconds)
    assert seconds[1] < 0.9 * seconds[0]


def test_what_no_price_depends_on_is_not_searched_for(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def counted(*args: Any, **options: Any) -> Solution:
        nonlocal asked
        asked += 1
        return solve(*args, **options)

    monkeypatch.setattr("tilewise.planner.sensitivity.solve", counted)
    tried = found.sensitivity()
    assert found.devices <= found.machine.devices_per_node
    assert asked == sum(not one.rate.startswith("network.") for one in tried) == len(tried) - 4
    machine = found.machine.model_copy(update={"devices_per_node": 2})
    apart = search(graph_of("joined"), devices=4, machine=machine, time_limit=20.0)
    before, _ = asked, apart.sensitivity()
    assert asked - before == len(tried)


def test_what_is_not_proven_of_other_machines_is_said(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(one.proven for one in found.sensitivity())

    def unproven(*args: Any, **options: Any) -> Solution:
        return replace(solve(*args, **options), optimal=False)

    monkeypatch.setattr("tilewise.planner.sensitivity.solve", unproven)
    tried = found.sensitivity()
    assert not any(one.proven for one in tried if not one.rate.startswith("network."))
    console = Console(record=True, width=80)
    show_sensitivity(tried, console)
    assert console.export_text().count("(unproven)") == len(tried) - 4


def test_of_equally_fast_plans_one_with_less_memory_is_taken() -> None:
    """Here all layers are cut along another letter; pins and tied layers stay as they are."""
    graph = capture(models.unet3d(width=0.25), torch.empty(2, 1, 32, 32, 32, device="meta"))
    for pins in ({}, {"head": "w4"}):
        found = search(graph, devices=4, machine="lassen", pins=pins, time_limit=20.0)
        raw = solve(found.formulation.problem)
        assert found.optimal
        assert found.step_seconds <= raw.seconds * (1 + 1e-9)
        limited = search(graph, devices=4, machine="lassen", memory=found.peak_bytes - 1, pins=pins)
        assert limited.step_seconds > found.step_seconds * (1 + 1e-9)
        assert all(str(found.plan.layers[name]) == pin for name, pin in pins.items())


def test_less_memory_takes_no_less_time() -> None:
    graph = graph_of("cosmoflow")
    free = search(graph, devices=4, machine="lassen", time_limit=20.0)
    tight = int(free.cost.peak_bytes * 0.8)
    capped = search(graph, devices=4, machine="lassen", memory=tight, time_limit=20.0)
    assert capped.peak_bytes <= tight
    assert capped.step_seconds >= free.step_seconds * (1 - 1e-9)
    with pytest.raises(PlanError, match="too small"):
        search(graph, devices=4, machine="lassen", memory=1000, time_limit=20.0)


def test_what_counts_is_the_peak_not_the_sum_that_the_search_limits() -> None:
    graph = graph_of("joined")
    free = search(graph, devices=4, machine="p100x4", memory=1 << 40)
    assert free.peak_bytes < free.solution.peak_bytes  # the sum is too careful here
    again = search(graph, devices=4, machine="p100x4", memory=free.peak_bytes)
    assert again.plan == free.plan
    assert again.optimal
    fitting = [one for one in free.baselines.values() if one.peak_bytes < free.peak_bytes]
    tight = search(graph, devices=4, machine="p100x4", memory=free.peak_bytes - 1)
    for one in fitting:
        assert tight.step_seconds <= one.step_seconds * (1 + 1e-9)
    assert tight.peak_bytes < free.peak_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 2**34), ("1.5 KB", 1500), ("900MB", 9 * 10**8), (123, 123)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["16GB!", "many", "-1GiB", "0", "16gib", -1])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(PlanError, match="must be a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices"),
        ({"devices": 4.0}, "must be a whole number"),
        ({"time_limit": 0}, "must be more than 0 seconds"),
        ({"optimizer": "lbfgs"}, "optimizer"),
        ({"dtype": "float7"}, "not a dtype"),
        ({"dtype": "int8"}, "no rates for int8"),
        ({"pins": {"nowhere": "n2"}}, "no layer matches"),
        ({"pins": {"first": "n3"}}, "does not divide"),
        ({"machine": "abacus"}, "neither a file nor"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"devices": 4, "machine": "lassen"} | options
    with pytest.raises(ValueError, match=message):
        search(graph_of("dense"), **given)  # type: ignore[arg-type]
