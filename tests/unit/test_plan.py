"""Plans: what is reduced, what raises, what follows what."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from tilewise import Degrees, Graph, Plan, capture
from tilewise.cli.naming import parse_plan
from tilewise.cli.train import plan_text, ranks_of
from tilewise.errors import LayoutError, PlanError
from tilewise.graph import as_plan
from tilewise.graph.parallel import check_names
from tilewise.train.recipe import Recipe


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.deep(self.conv1(x)))
        return self.fc(torch.flatten(self.pool(x), 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Net(), torch.randn(4, 3, 8, 6))


def test_layers_have_names_kinds_shapes_and_flops(graph: Graph) -> None:
    named = {layer.name: layer for layer in graph.layers}
    assert list(named) == ["conv1", "deep", "#relu", "pool", "#flatten", "fc"]
    assert named["conv1"].kind == "conv2d"
    assert named["conv1"].shape == (4, 8, 8, 6)
    assert named["conv1"].flops == 2 * 4 * 8 * 48 * 27
    assert named["conv1"].parameters == 8 * 27 + 8
    assert named["fc"].flops == 2 * 4 * 5 * 8
    assert named["#flatten"].extents == {}


def test_uniform_gives_each_layer_what_it_can_use(graph: Graph) -> None:
    plan = Plan.uniform(graph, "n2 h2")
    assert str(plan.layers["conv1"]) == "n2 h2"
    assert str(plan.layers["#relu"]) == "n2 h2"
    assert str(plan.layers["fc"]) == "n2"
    assert "#flatten" not in plan.layers
    assert any(note.startswith("pool: h2 reduced to h1") for note in plan.notes)


def test_uniform_cuts_grouped_convolutions_no_further_than_groups(graph: Graph) -> None:
    plan = Plan.uniform(graph, "c2 f2")
    assert str(plan.layers["conv1"]) == "c2 f2"
    assert plan.layers["deep"].c * plan.layers["deep"].f == 2
    assert any(note.startswith("deep:") for note in plan.notes)


def test_of_obeys_and_the_last_pattern_wins(graph: Graph) -> None:
    plan = Plan.of(graph, {"*conv*": "h4", "conv1": "w2", "fc": "f4"})
    assert {name: str(degrees) for name, degrees in plan.layers.items()} == {
        "conv1": "w2",
        "fc": "f4",
    }


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ({"fc": "h2"}, "fc has no height to cut by h2 (output 4×5); use n, c, f"),
        ({"conv1": "d4"}, "conv1 has no depth to cut by d4 (output 4×8×8×6); use n, c, f, h, w"),
        ({"conv9": "h2"}, "no layer matches 'conv9'; did you mean 'conv1'? layers: conv1, deep"),
        ({"#flatten": "n2"}, "#flatten (flatten) has no split of its own, it follows its producer"),
    ],
)
def test_of_raises_what_a_layer_cannot_do(
    graph: Graph, patterns: dict[str, str], text: str
) -> None:
    with pytest.raises(PlanError) as found:
        Plan.of(graph, patterns)
    assert text in str(found.value)


def test_a_pattern_that_matches_nothing_is_answered_with_one_that_does() -> None:
    features = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    model = nn.Sequential(OrderedDict(features=features))
    graph = capture(model, torch.randn(2, 3, 4, 4))
    for pattern, near in (("feature.*", "features.*"), ("feature.2", "features.2")):
        with pytest.raises(PlanError, match=f"did you mean '{re.escape(near)}'"):
            Plan.of(graph, {pattern: "h2"})
    with pytest.raises(PlanError, match=r"'feature.0', .*; did you mean 'features.0'\?"):
        check_names(graph, Plan({"feature.0": Degrees(h=2)}))
    with pytest.raises(PlanError, match=r"recomputed; did you mean 'features.0'\?$"):
        check_names(graph, Plan(recompute=("feature.0",)))


def test_of_refuses_degrees_it_cannot_read(graph: Graph) -> None:
    with pytest.raises(LayoutError, match="'x2' in 'x2' is not one of n c f d h w"):
        Plan.of(graph, {"conv1": "x2"})


def test_a_file_is_a_plan_whatever_its_name(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = Plan.of(graph, {"conv1": "h2"})
    for name in ("chosen.plan", "n2", "auto", "1"):
        plan.save(name)
    for name in ("chosen.plan", "n2"):
        assert as_plan(graph, name) == parse_plan(name) == plan
        assert plan_text(name) == name
        assert ranks_of(Recipe.model_construct(plan=name)) == 2
    assert parse_plan("auto") == "auto"
    assert as_plan(graph, "1") == Plan.uniform(graph, "1")
    assert parse_plan("conv*=h2,fc=f2") == {"conv*": "h2", "fc": "f2"}


def test_a_word_that_is_no_plan_is_answered_with_what_may_be_meant(graph: Graph) -> None:
    known = "is not one of n c f d h w followed by a number, such as 'n2 h4'"
    for word, guess in (
        ("atuo", f"{known}; did you mean 'auto'?$"),
        ("plan.jsn", f"{known}; there is no plan file of that name either$"),
        ("x2", f"{known}$"),
    ):
        with pytest.raises(LayoutError, match=re.escape(guess[:-1]) + "$"):
            as_plan(graph, word)


def test_layers_that_share_a_parameter_share_channel_degrees() -> None:
    tied = capture(Tied(), torch.randn(2, 4, 6, 6))
    with pytest.raises(PlanError, match=r"share the parameter b\.weight"):
        Plan.of(tied, {"a": "c2", "b": "f2"})
    plan = Plan.of(tied, {"a": "c2 h2", "b": "c2 n2"})
    assert plan.layers["a"].h == 2


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.conv_transpose2d(self.a(x), self.a.weight, padding=1)


def test_filters_are_the_channels_of_a_transposed_convolution_by_the_same_weight() -> None:
    turned = capture(Turned(), torch.randn(2, 4, 6, 6))
    back = turned.layers[-1].name
    assert Plan.of(turned, {"a": "f8", back: "c8"}).layers[back].c == 8
    with pytest.raises(PlanError, match="so one's c must be the other's f"):
        Plan.of(turned, {"a": "f2", back: "f2"})
    plan = Plan.uniform(turned, "f8")
    assert {name: str(degrees) for name, degrees in plan.layers.items()} == {"a": "c4", back: "f4"}
    assert plan.notes[-1] == f"a 'c4', {back} 'f4': they share a parameter, so it is cut alike"


def test_check_names_the_layer_whose_product_does_not_divide(graph: Graph) -> None:
    plan = Plan.of(graph, {"conv1": "h4"})
    plan.check(8)
    with pytest.raises(PlanError, match=r"conv1 is split 'h4', whose product \(=4\) must divide"):
        plan.check(6)


def test_json_round_trip(graph: Graph, tmp_path: Path) -> None:
    plan = Plan.uniform(graph, "n2 h2", recompute=("conv*",), statistics="spatial")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.recomputes("conv1")
    assert not plan.recomputes("fc")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON"),
        ('{"format": 7, "layers": {}}', r"format \(=7\) must be 1"),
        ('{"format": 1}', "'layers' is missing"),
        ('{"format": 1, "layers": {}, "colour": 3}', r"unknown keys \['colour'\]"),
    ],
)
def test_bad_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_files_that_are_no_plans_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json cannot be read"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PlanError, match=r"not a plan: .*other\.json"):
        Plan.load(tmp_path / "other.json")


def test_statistics_must_be_known() -> None:
    with pytest.raises(PlanError, match="must be 'global', 'spatial' or 'local'"):
        Plan({"a": Degrees()}, statistics="some")
