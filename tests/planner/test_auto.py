"""`plan="auto"`: measured calls decide, all ranks agree, and nothing is measured twice."""

from __future__ import annotations

import copy
import json
import os
import shutil
from importlib.metadata import PackageNotFoundError
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise as tw
from measured_here import keep_rates, measuring_briefly, rates_here
from tilewise import Graph, Mesh, Plan, capture
from tilewise.auto import calls as timing
from tilewise.auto import finals
from tilewise.auto import plan as auto_plans
from tilewise.auto.calibrate import conditions
from tilewise.auto.plan import auto_search, fits_here, read_plan
from tilewise.auto.tell import hosts, tell
from tilewise.cli import calibrate as command
from tilewise.comm.pool import exhausted
from tilewise.errors import PlanError
from tilewise.graph.parallel import as_plan
from tilewise.ops.kept import load, own_version
from tilewise.planner.calls import SplitCall
from tilewise.planner.cost import Setting
from tilewise.planner.formulate import formulate
from tilewise.planner.machine import CallTime, MachineError, load_machine
from tilewise.planner.search import Found, search
from tilewise.planner.solve import evaluate
from tilewise.testing import ranks

SHAPE = (4, 3, 9, 8)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Dropout(0.1), nn.Conv2d(6, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 4 * 4, 5),
    )  # fmt: skip


def split(mesh: Mesh, folder: str, memory: str | None) -> tuple[str, int, float]:
    """Parallelize twice; returns the plan, what was measured the second time, the loss' error."""
    with measuring_briefly(folder):
        x, target = torch.randn(SHAPE), torch.randint(5, (4,))
        options: dict[str, Any] = {"loss": F.cross_entropy, "mesh": mesh, "memory": memory}
        untouched, given, before = net(), net(), torch.get_rng_state()
        tw.parallelize(given, x, plan="auto", **options)
        assert torch.equal(torch.get_rng_state(), before)
        for old, new in zip(untouched.state_dict().values(), given.state_dict().values()):
            assert torch.equal(old, new)
        counted = mock.Mock(wraps=timing._time)
        tried = mock.Mock(wraps=finals.step_seconds)
        with (
            mock.patch.object(timing, "_time", counted),
            mock.patch.object(finals, "step_seconds", tried),
        ):
            model = tw.parallelize(net(), x, plan="auto", **options)
        model.eval()
        plain = net().eval()
        torch.manual_seed(1)
        x, target = torch.randn(SHAPE), torch.randint(5, (4,))
        loss = model.loss(*model.scatter(x, target))
        error = abs(float(loss) - float(F.cross_entropy(plain(x), target)))
        return model.plan.to_json(), counted.call_count + tried.call_count, error


@pytest.fixture
def folder(tmp_path: Path) -> str:
    keep_rates(tmp_path, 2, 3)
    return str(tmp_path)


def measure_all(mesh: Mesh, folder: str) -> None:
    """Measure the calls of the network, as any search for it would."""
    with measuring_briefly(folder):
        exhausted(auto_search(graph(), mesh), lambda _: None)


@pytest.fixture(scope="module")
def all_measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("measured")
    keep_rates(found, 2)
    ranks(2, measure_all, str(found))
    return found


@pytest.fixture
def measured(all_measured: Path, tmp_path: Path) -> str:
    """A folder for a test of two ranks that is not about measuring calls: they are known."""
    return str(shutil.copytree(all_measured, tmp_path / "measured"))


@pytest.mark.parametrize("devices", [2, 3])
def test_ranks_agree_and_measure_once(folder: str, devices: int) -> None:
    found = ranks(devices, split, folder, None)
    plans = {plan for plan, _, _ in found}
    assert len(plans) == 1
    assert set(json.loads(plans.pop())["layers"]) >= {"0", "3", "5", "7"}
    assert all(count == 0 for _, count, _ in found)
    assert all(error < 1e-5 for _, _, error in found)
    with measuring_briefly(folder):
        assert load_machine("local", devices=devices).name == "local"
        with pytest.raises(MachineError, match="tilewise calibrate --ranks 7"):
            load_machine("local", devices=7)


def refused(mesh: Mesh, folder: str) -> str:
    with (
        measuring_briefly(folder),
        pytest.raises(PlanError) as caught,
    ):
        tw.parallelize(net(), torch.randn(SHAPE), plan="auto", memory="1KB", mesh=mesh)
    return str(caught.value)


def test_too_little_memory_is_the_same_error_on_all_ranks(measured: str) -> None:
    said = ranks(2, refused, measured)
    assert len(set(said)) == 1
    assert "too small" in said[0]


def test_memory_is_for_auto_plans() -> None:
    with pytest.raises(PlanError, match="memory limits an 'auto' plan only"):
        tw.parallelize(net(), torch.randn(SHAPE), plan="1", memory="1GB")
    one = tw.parallelize(net(), torch.randn(SHAPE), plan="auto")
    assert all(degrees.product == 1 for degrees in one.plan.layers.values())


def telling(mesh: Mesh) -> tuple[str, str]:
    first = mesh.rank == 0
    return tell(mesh, "größer" if first else None), tell(mesh, "" if first else None)


def test_the_first_rank_tells_the_others() -> None:
    assert ranks(3, telling) == [("größer", "")] * 3


def on_two_hosts(mesh: Mesh) -> tuple[str, str]:
    """Return what times depend on, with the last rank on a host of its own or not."""
    cpu = torch.device("cpu")
    with mock.patch("platform.node", return_value="b" if mesh.rank == 2 else "a"):
        assert hosts(mesh) == "0×2 1×1"
        apart = timing.head(mesh, cpu)
    return apart, timing.head(mesh, cpu)


def test_what_is_kept_is_known_by_hosts_and_version() -> None:
    for apart, together in ranks(3, on_two_hosts):
        assert apart == together.replace("hosts 0×3", "hosts 0×2 1×1") != together
        assert f"tilewise {tw.__version__}" in together
    machine = rates_here(3)
    assert fits_here(machine, "0×3")
    assert not fits_here(machine, "0×2 1×1")
    older = machine.sources | {"conditions": conditions("0×3").replace(tw.__version__, "0.0.0")}
    assert not fits_here(machine.model_copy(update={"sources": older}), "0×3")
    free = machine.node.model_copy(update={"bandwidth_bytes_per_s": 1e30})
    assert not fits_here(machine.model_copy(update={"node": free}), "0×3")


def test_calibrate_says_on_which_hosts_it_measured(folder: str) -> None:
    crew = mock.MagicMock(size=2)
    crew.__enter__.return_value = crew
    crew.run.side_effect = lambda function: ["0×1 1×1"] if function is hosts else []
    fitted = mock.Mock(return_value=rates_here(2))
    with (
        measuring_briefly(folder),
        mock.patch.multiple(
            command, Crew=lambda *_, **__: crew, measure=lambda *_: iter(()), machine_of=fitted
        ),
    ):
        command.calibrate(None, 2, "gloo", True)
    assert fitted.call_args.kwargs["spread"] == "0×1 1×1"


def test_a_copy_that_nobody_installed_has_a_version() -> None:
    with mock.patch("tilewise.ops.kept.version", side_effect=PackageNotFoundError):
        own_version.cache_clear()
        assert "tilewise not installed" in conditions("0×1")
    own_version.cache_clear()


# -- the last word ---------------------------------------------------------------------------------


def try_plans(
    mesh: Mesh, folder: str, seconds: dict[str, float], limit: float
) -> tuple[list[str], str]:
    """Let steps under some splits be fast; returns what was tried, and what was chosen."""
    seen: list[str] = []

    def splits(plan: Plan) -> str:
        each = [str(degrees) for degrees in plan.layers.values()]
        return each[0] if len(set(each)) == 1 else " ".join(each)

    def pretend(mesh: Mesh, model: Any, graph: Graph, plan: Plan, *_: Any) -> float:
        seen.append(splits(plan))
        return seconds.get(splits(plan), 2.0)

    with (
        measuring_briefly(folder),
        mock.patch.object(finals, "step_seconds", pretend),
        mock.patch.multiple(finals, HOPELESS=1e9, SECONDS=limit),
        mock.patch.object(auto_plans, "ROUNDS", (5,)),
    ):
        return seen, splits(read_plan(graph(), "auto", mesh, model=net()))


@pytest.mark.parametrize("fast", ["1", "n2"])
def test_the_plan_that_runs_fastest_is_taken(measured: str, fast: str) -> None:
    tried, chosen = ranks(2, try_plans, measured, {fast: 1.0}, 1e9)[0]
    assert {"1", "n2"} <= set(tried)
    assert len(tried) == len(set(tried))
    assert chosen == fast


def test_plans_that_come_close_run_again(measured: str) -> None:
    tried, chosen = ranks(2, try_plans, measured, {"1": 1.05, "n2": 1.0}, 1e9)[0]
    assert {one: tried.count(one) for one in tried} == {
        one: 5 if one in ("1", "n2") else 1 for one in tried
    }
    assert chosen == "n2"


def test_a_race_ends_in_time(measured: str) -> None:
    for tried, chosen in ranks(2, try_plans, measured, {}, -1.0):
        assert len(tried) == 2
        assert tried[0] == chosen


def test_slow_turns_do_not_decide() -> None:
    """The second plan is faster by a tenth, but the machine was slow when it ran more often."""
    pace = [1.0, 1.0, 2.0, 2.0, 1.0]
    times = [[1.0 * one for one in pace], [0.9 * one for one in pace], [3.0]]
    times[0][3] = 1.2  # the machine became faster within a turn
    times[1][0] = 1.7
    found = finals.evened(times)
    assert found[1] < found[0] < found[2]
    assert found[0] / found[1] == pytest.approx(1 / 0.9, rel=0.05)
    assert finals.evened([[2.0, 1.0], [inf], []])[1:] == [inf, inf]
    assert finals.evened([[inf], [inf]]) == [inf, inf]


def keep_plans(mesh: Mesh, spare: float) -> tuple[int, int]:
    """Take two turns of two plans; returns how many were made, and how many kept."""
    captured = graph()
    kept = finals.Kept.within(spare, net(), captured, 2)
    with mock.patch.object(finals, "ParallelModel", wraps=finals.ParallelModel) as made:
        for degrees in ("1", "n2", "1", "n2"):
            plan = Plan.uniform(captured, degrees)
            finals.step_seconds(mesh, net(), captured, plan, torch.device("cpu"), "momentum", kept)
    return made.call_count, len(kept.steps)


def test_plans_are_kept_for_their_next_turn_if_there_is_room_for_all() -> None:
    one = finals._holds(net(), graph())
    assert one >= 4 * sum(p.numel() * p.element_size() for p in net().parameters())
    for times, made, kept in ((0, 4, 0), (1, 4, 0), (2, 2, 2)):
        assert ranks(2, keep_plans, times * one) == [(made, kept)] * 2


def learn(mesh: Mesh, folder: str, kept: object) -> tuple[list[str], list[str], str]:
    """Let mixed plans be slow and a learned one fast; returns what ran, then again, and the plan.

    `kept` is what a file of an older version may hold for every race.
    """
    seen: list[str] = []
    wanted = {"*": "f2", "0": "n2"}

    def splits(plan: Plan) -> str:
        return " ".join(str(degrees) for degrees in plan.layers.values())

    def pretend(mesh: Mesh, model: Any, graph: Graph, plan: Plan, *_: Any) -> float:
        seen.append(splits(plan))
        return 1.0 if splits(plan) == splits(fast) else 2.0

    def learned(found: Found, ran: Any) -> Found:
        assert set(ran.values()) <= {1.0, 2.0}
        found.plan = fast
        return found

    def always(path: Path) -> Any:
        return mock.Mock(get=lambda key: kept)

    fast = as_plan(graph(), wanted)
    runs = []
    with (
        measuring_briefly(folder),
        mock.patch.object(finals, "step_seconds", pretend),
        mock.patch.object(finals, "load", wraps=load if kept is None else always),
        mock.patch.object(auto_plans, "_learned", learned),
        mock.patch.object(finals, "HOPELESS", 1e9),
    ):
        for _ in range(2):
            chosen = splits(read_plan(graph(), "auto", mesh, model=net()))
            runs.append(list(seen))
            seen.clear()
    return runs[0], runs[1], chosen


@pytest.mark.parametrize("kept", [None, 1, "garbage", [1.0]])
def test_a_plan_that_was_learned_runs_too_and_nothing_twice(measured: str, kept: object) -> None:
    for first, second, chosen in ranks(2, learn, measured, kept):
        assert chosen in first
        assert "f2" in chosen
        assert "n2" in chosen
        assert second == ([] if kept is None else first)


def all_refuse(mesh: Mesh, folder: str) -> tuple[int, bool]:
    """Let no plan run; returns how often that was tried, and whether a plan came of it."""
    tried = mock.Mock(return_value=inf)
    with (
        measuring_briefly(folder),
        mock.patch.object(finals, "step_seconds", tried),
        mock.patch.object(finals, "HOPELESS", 1e9),
    ):
        plan = read_plan(graph(), "auto", mesh, model=net())
    return len({call.args[3].to_json() for call in tried.mock_calls}) - tried.call_count, bool(plan)


def test_where_no_plan_runs_each_is_tried_once(measured: str) -> None:
    assert ranks(2, all_refuse, measured) == [(0, True)] * 2


def short_of_memory(mesh: Mesh, folder: str) -> tuple[str, tuple[str, ...], str]:
    """Search with less memory than any plan has that keeps all; returns what is said without."""
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    deep = nn.Sequential(*(copy.deepcopy(layer) for _ in range(10) for layer in layers))
    captured = capture(deep, (torch.zeros(2, 4, 64, 64),))
    said = ""
    with measuring_briefly(folder):
        try:
            exhausted(auto_search(captured, mesh, memory="1.2MB", recompute=False), lambda _: None)
        except PlanError as error:
            said = str(error)
        searching = auto_plans.auto_plan(captured, mesh, memory="1.2MB", model=deep)
        chosen, _, _ = exhausted(searching, lambda _: None)
    return said, chosen.recompute, chosen.to_json()


def test_layers_are_computed_again_where_memory_is_short(folder: str) -> None:
    found = ranks(2, short_of_memory, folder)
    assert len({plan for _, _, plan in found}) == 1
    for said, again, _ in found:
        assert "too small" in said
        assert again


def try_options(mesh: Mesh, folder: str) -> list[tuple[tuple[str, ...], torch.dtype | None]]:
    """Return how plans are tried that are to recompute under autocast, and then without."""
    seen: list[tuple[tuple[str, ...], torch.dtype | None]] = []

    def pretend(mesh: Mesh, model: Any, graph: Graph, plan: Plan, *_: Any) -> float:
        casts = torch.is_autocast_enabled("cpu")
        seen.append((plan.recompute, torch.get_autocast_dtype("cpu") if casts else None))
        return 1.0

    options = {"recompute": ("*",)}
    with (
        measuring_briefly(folder),
        mock.patch.object(finals, "step_seconds", pretend),
        mock.patch.multiple(finals, HOPELESS=1e9, SECONDS=-1.0),
        mock.patch.object(auto_plans, "ROUNDS", (5,)),
    ):
        for casts in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
                plan = read_plan(graph(), "auto", mesh, model=net(), options=options)
                assert plan.recompute == ("*",)
        read_plan(graph(), "auto", mesh, model=net())
    return seen


def test_plans_are_tried_as_they_are_to_run(measured: str) -> None:
    for seen in ranks(2, try_options, measured):
        tried = [(("*",), torch.bfloat16), (("*",), None), ((), None)]
        assert seen == [one for one in tried for _ in range(2)]


def refuse_numbers(mesh: Mesh, folder: str) -> bool:
    """Try plans of a model whose loss wants numbers that are never drawn."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target - 1)

    with measuring_briefly(folder):
        captured = capture(net(), (torch.zeros(SHAPE),), loss, targets=(torch.ones(4).long(),))
        seconds = [
            finals.step_seconds(
                mesh, net(), captured, Plan.uniform(captured, d), torch.device("cpu")
            )
            for d in ("1", "n2")
        ]
        return seconds == [inf, inf]


def test_a_model_that_refuses_drawn_numbers_is_not_tried(folder: str) -> None:
    assert ranks(2, refuse_numbers, folder) == [True, True]


class Nested(nn.Module):
    """A list, a number that is no tensor, and nothing to train."""

    def forward(self, both: list[torch.Tensor], twice: bool) -> torch.Tensor:
        return (both[0] + both[1]).sigmoid() * (2 if twice else 1)


def time_odd_ones(mesh: Mesh) -> list[float]:
    x = torch.zeros(3, 4)
    nested = capture(Nested(), ([x, x], True))
    entropy = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    target = (torch.zeros(3, 1),)
    graphs = [
        (Nested(), nested),
        (entropy, capture(entropy, (x,), F.binary_cross_entropy, targets=target)),
    ]
    return [
        finals.step_seconds(mesh, one, graph, Plan.uniform(graph, "n2"), torch.device("cpu"))
        for one, graph in graphs
    ]


def test_what_is_drawn_is_put_together_as_the_examples_are() -> None:
    for found in ranks(2, time_odd_ones):
        assert all(0 < seconds < inf for seconds in found)


# -- what was measured, and the plan that follows --------------------------------------------------


def graph() -> Graph:
    return capture(net(), (torch.zeros(SHAPE),), F.cross_entropy)


def test_measured_calls_take_the_place_of_the_model() -> None:
    captured = graph()
    setting = Setting(rates_here(2), 2, "float32", 4, "adam")
    listed = formulate(captured, setting, with_calls=True).calls
    convolution = [one for one in listed.values() if one.node.name == "5"]
    assert {str(one.split) for one in convolution} == {"1", "n2", "h2", "w2", "c2", "f2"}
    times = tuple(
        CallTime(call=one.key, forward_s=1.0, backward_s=3.0 if str(one.split) == "h2" else 4.0)
        for one in convolution
        if str(one.split) != "w2"
    )
    machine = setting.machine.model_copy(update={"call_times": times})
    found = formulate(captured, Setting(machine, 2, "float32", 4, "adam"))
    cost, plain = found.costs["5"], formulate(captured, setting).costs["5"]
    forward, backward = cost.forward(1.0), cost.backward(1.0)
    rows = {
        str(found.choices.candidates[found.choices.owner["5"]].degrees(i)): i
        for i in range(len(forward))
    }
    others = [row for text, row in rows.items() if text != "w2"]
    assert np.allclose(forward[others], 1.0)
    assert backward[rows["h2"]] == pytest.approx(3.0)
    silent = [row for row in others if not (plain.halo_forward + plain.exchange_forward)[row]]
    ratio, w2 = np.median(1.0 / plain.forward(1.0)[silent]), rows["w2"]
    assert 0 < len(silent) < len(others)
    assert cost.compute_forward[w2] == pytest.approx(ratio * plain.compute_forward[w2])
    assert cost.halo_forward[w2] == plain.halo_forward[w2] > 0  # arithmetic tells nothing of it
    best = tw.search(captured, devices=2, machine=machine, time_limit=10.0)
    assert str(best.plan.layers["5"]) == "h2"
    assert best.step_seconds > 4.0
    priced = evaluate(found.problem, found.choice(best.plan)).seconds
    assert priced == pytest.approx(best.step_seconds)


def measure_twice(mesh: Mesh, folder: str) -> tuple[list[list[str]], list[str]]:
    """Let splits of space take long; returns what each pass measured, and what the search knew."""
    passes: list[list[str]] = []

    def pretend(mesh: Mesh, listed: Any, *_: Any) -> Any:
        passes.append([one.key for one in listed])
        slow = [1000.0 if "h" in str(one.split) else 10.0 for one in listed]
        return tuple(
            CallTime(call=one.key, forward_s=by * one.predicted_s, backward_s=1e-6)
            for one, by in zip(listed, slow)
        )
        yield

    with (
        measuring_briefly(folder),
        mock.patch.object(timing, "LONG", 0.0),
        mock.patch.object(auto_plans, "PASSES", ((1.2, 9.0), (1.2, 9.0))),
        mock.patch.object(auto_plans, "time_calls", pretend),
    ):
        found = exhausted(auto_plans.auto_search(graph(), mesh), lambda _: None)
    return passes, [] if found is None else list(found.machine.timed)


def test_what_one_pass_measured_the_next_does_not_forget(folder: str) -> None:
    (first, second), known = ranks(2, measure_twice, folder)[0]
    assert first
    assert second  # arithmetic takes ten times as long as was thought, so messages matter less
    assert not set(first) & set(second)
    assert set(known) == {*first, *second}


def measure_briefly(mesh: Mesh, folder: str) -> tuple[list[int], list[str]]:
    """Search twice without time to measure; returns how many calls each measured, and the kept."""
    counts = []
    with (
        measuring_briefly(folder),
        mock.patch.object(auto_plans, "PASSES", ((1.5, -1.0), (2.5, -1.0))),
    ):
        for _ in range(2):
            counted = mock.Mock(wraps=timing._time)
            with mock.patch.object(timing, "_time", counted):
                found = exhausted(auto_search(graph(), mesh), lambda _: None)
            counts.append(counted.call_count)
        kept = load(timing.cache_file(mesh, "gloo"))
    timed = [] if found is None else list(found.machine.timed)
    assert not timed or len(timed) == sum(len(times) == 2 for times in kept.values())
    return counts, list(kept)


def test_calls_for_which_there_is_no_time_stay_unknown(folder: str) -> None:
    for (first, second), kept in ranks(2, measure_briefly, folder):
        assert first == timing.AT_ONCE < len(kept)  # one lot; all calls are short
        assert second == 0


def test_sums_hide_as_far_as_the_machine_says() -> None:
    captured = graph()
    seconds = []
    for share in (0.0, 0.5, 1.0):
        machine = rates_here(2).model_copy(update={"overlap_sums": share})
        found = formulate(captured, Setting(machine, 2, "float32", 4, "adam"))
        cost = evaluate(found.problem, found.choice(Plan.uniform(captured, "n2")))
        seconds.append(cost.seconds)
        assert cost.sync > 0
    assert seconds[0] > seconds[1] > seconds[2] or seconds[1] == seconds[2]


def measure_again(mesh: Mesh, folder: str) -> list[str]:
    """Search with an unreadable machine file; returns what was measured."""
    quick = mock.patch("tilewise.auto.calibrate.SECONDS", 0.001)
    with measuring_briefly(folder), quick:
        return list(dict.fromkeys(text.split(":")[0] for text in auto_search(graph(), mesh)))


def test_a_machine_is_measured_where_none_is_kept(tmp_path: Path) -> None:
    (tmp_path / "machine-2-gloo.json").write_text("{}")
    said = ranks(2, measure_again, str(tmp_path))[0]
    assert {"memory", "messages", "sums", "sums behind compute", "layers"} <= set(said)
    with mock.patch.dict(os.environ, {"TILEWISE_CACHE": str(tmp_path)}):
        kept = load_machine("local", devices=2)
    assert kept.fit_errors
    assert 0 <= kept.overlap_sums <= 1


@pytest.mark.parametrize("measured", [True, False])
def test_a_model_that_is_left_whole_is_said_to_be_so(
    measured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is that a step without a split is predicted, or was measured, to be faster."""
    captured = graph()
    found = search(captured, devices=2, machine="lassen")
    whole, cut = Plan.uniform(captured, "1"), found.baselines["data"].plan
    ran = {whole.to_json(): 0.002, cut.to_json(): 0.003} if measured else {}

    def chosen(plan: Plan) -> Any:
        yield "searching"
        return plan, found, ran

    mesh = mock.Mock(size=2)
    for plan in (cut, whole):
        caplog.clear()
        with mock.patch("tilewise.auto.plan.auto_plan", return_value=chosen(plan)):
            assert read_plan(captured, "auto", mesh) == plan
        said = [one.message for one in caplog.records if one.name == "tilewise"]
        assert len(said) == (plan == whole)
    ms = 1e3 * found.price(whole).step_seconds
    assert "splits no layer on 2 ranks, each of them does all of the work: a step is" in said[0]
    assert f"predicted to take {ms:.3g} ms, and " in said[0]
    assert ("measured were 2 ms, and 3 ms" in said[0]) == measured


def with_a_refusal(mesh: Mesh, folder: str) -> list[str]:
    """Search where one kind of call cannot be measured; returns the kinds that were kept."""
    real = timing._time

    def picky(mesh: Mesh, one: SplitCall, *rest: Any) -> tuple[float, float]:
        if one.node.kind == "max_pool2d":
            raise ValueError("not with these numbers")
        return real(mesh, one, *rest)

    with (
        measuring_briefly(folder),
        mock.patch.object(timing, "_time", picky),
    ):
        for _ in auto_search(graph(), mesh):
            pass
        return [key.split(" cpu ")[1].split()[0] for key in load(timing.cache_file(mesh, "gloo"))]


def test_calls_that_cannot_be_measured_are_priced_by_the_model(folder: str) -> None:
    for kinds in ranks(2, with_a_refusal, folder):
        assert "conv2d" in kinds
        assert "max_pool2d" not in kinds
