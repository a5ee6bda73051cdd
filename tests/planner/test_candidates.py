"""Which degrees a layer may be given, and why the others are left out."""

from __future__ import annotations

from math import comb

import pytest

from tilewise.errors import PlanError
from tilewise.layout import Degrees
from tilewise.plan import Layer
from tilewise.planner.candidates import candidates, why_not

SPACE = {"n": 512, "d": 512, "h": 512, "w": 512}
CONV = Layer("conv", "conv3d", (512, 512, 512, 512, 512), SPACE | {"c": 512, "f": 512})
POOL = Layer("pool", "max_pool3d", CONV.shape, SPACE | {"c": 512, "f": 512, "cf": 512})
LINEAR = Layer("fc", "linear", (4, 10), {"n": 4, "c": 3, "f": 10})


@pytest.mark.parametrize("power", [0, 1, 4, 8])
def test_all_degrees_whose_product_divides_the_devices(power: int) -> None:
    found = candidates(CONV, 2**power)
    assert len(found) == comb(power + 6, 6)
    assert len({tuple(row) for row in found.table.tolist()}) == len(found)
    assert all(2**power % row.prod() == 0 for row in found.table)
    assert len(candidates(POOL, 2**power)) == comb(power + 5, 5)


@pytest.mark.parametrize("devices", [1, 6, 12, 16])
@pytest.mark.parametrize("layer", [CONV, POOL, LINEAR], ids=lambda layer: layer.name)
def test_every_degrees_is_a_candidate_or_has_a_reason(layer: Layer, devices: int) -> None:
    kept = {
        str(candidates(layer, devices).degrees(i)) for i in range(len(candidates(layer, devices)))
    }
    dropped = {str(one.degrees): one.reason for one in candidates(layer, devices).dropped()}
    assert not kept & set(dropped)
    everything = candidates(CONV, devices)
    assert kept | set(dropped) == {str(everything.degrees(i)) for i in range(len(everything))}
    assert all(why_not(layer, Degrees.parse(text), devices) is None for text in kept)


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        ("h2", "the layer has no height to cut by h2"),
        ("n3", "the product (=3) does not divide 16 devices"),
    ],
)
def test_reasons(degrees: str, reason: str) -> None:
    assert why_not(LINEAR, Degrees.parse(degrees), 16) == reason
    with pytest.raises(PlanError, match="cannot be split"):
        candidates(LINEAR, 16, pin=Degrees.parse(degrees))


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        ("n8", "n8 cuts 4 samples into empty parts"),
        ("c4", "c4 cuts 3 channels into empty parts"),
    ],
)
def test_empty_parts_are_left_out_unless_pinned(degrees: str, reason: str) -> None:
    wanted = Degrees.parse(degrees)
    assert why_not(LINEAR, wanted, 16) == reason
    with pytest.raises(PlanError, match="into empty parts"):
        candidates(LINEAR, 16).index(wanted)
    found = candidates(LINEAR, 16, pin=wanted)
    assert [found.degrees(i) for i in range(len(found))] == [wanted]
    assert degrees not in {str(one.degrees) for one in found.dropped()}


def test_only_the_product_of_c_and_f_counts_without_weights() -> None:
    reason = why_not(POOL, Degrees(c=2, f=4), 16)
    assert reason == "the same as c8: only the product of c and f counts"
    found = candidates(POOL, 16)
    assert found.degrees(found.index(Degrees(c=2, f=4))) == Degrees(c=8)


def test_a_pin_leaves_one() -> None:
    found = candidates(CONV, 16, pin=Degrees(n=4, d=2))
    assert [str(found.degrees(i)) for i in range(len(found))] == ["n4 d2"]


def test_a_pin_is_the_reason_of_what_the_layer_could_use() -> None:
    found = candidates(LINEAR, 4, pin=Degrees(n=4))
    reasons = {str(one.degrees): one.reason for one in found.dropped()}
    assert reasons["f4"] == "the layer is pinned to 'n4'"
    assert reasons["h2"] == "the layer has no height to cut by h2"
    assert "n4" not in reasons


def test_few_rules_leave_out_many_ways() -> None:
    rules = [one.rule for one in candidates(LINEAR, 64).dropped()]
    assert len(rules) > 500
    assert set(rules) == {
        "the layer has no depth to cut by d",
        "the layer has no height to cut by h",
        "the layer has no width to cut by w",
        "n is at most 4, the layer's samples",
        "c is at most 3, the layer's channels",
        "f is at most 10, the layer's filters",
    }
    small = Layer("pool", "max_pool1d", (8, 2, 8), {"n": 8, "h": 8, "c": 2, "f": 2, "cf": 2})
    assert {one.rule for one in candidates(small, 4).dropped()} >= {
        "c times f is at most 2, the layer's channels",
        "the same with c alone: only the product of c and f counts",
    }


def test_of_a_grouped_convolution_groups_are_cut() -> None:
    grouped = Layer("deep", "conv1d", (8, 16, 8), {"n": 8, "h": 8, "c": 2, "f": 2, "cf": 2})
    rules = {one.rule for one in candidates(grouped, 4).dropped()}
    assert rules >= {
        "c is at most 2, the layer's groups",
        "f is at most 2, the layer's groups",
        "c times f is at most 2, the layer's groups",
    }
    assert why_not(grouped, Degrees(c=4), 4) == "c4 cuts 2 groups into empty parts"
    assert why_not(grouped, Degrees(c=2, f=2), 4) == "c2 f2 cut 2 groups into empty parts"
