"""Machine files: presets, units, and what is wrong with a bad one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.planner.machine import (
    PRESETS,
    Machine,
    MachineError,
    load_machine,
    local_path,
    preset_names,
)
from tilewise.planner.price import link_s, sum_s


def raw(name: str = "lassen") -> dict[str, Any]:
    return dict(json.loads(load_machine(name).to_json()))


def numbers(part: object, *path: str) -> Iterator[tuple[str, ...]]:
    """List the path of every number, or list of numbers, of a machine file."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key not in ("sources", "name"):
                yield from numbers(value, *path, key)
    else:
        yield path


def has_source(path: tuple[str, ...], sources: Iterable[str]) -> bool:
    """Whether one of these keys, `*` for any part, is the number's or that of all of its curves."""
    for key in sources:
        parts = key.split(".")
        curve = path[-1] in ("at", "share") and len(parts) < len(path)
        if (curve or len(parts) == len(path)) and all(map(fnmatch, path, parts)):
            return True
    return False


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_name_the_source_of_every_number(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    listed = list(numbers(json.loads((PRESETS / f"{name}.json").read_text(encoding="utf-8"))))
    for path in listed:
        assert has_source(path, machine.sources), ".".join(path)
    for key in machine.sources:
        assert any(has_source(path, [key]) for path in listed), key
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("name", preset_names())
def test_presets_state_each_number_that_plans_are_priced_with(name: str) -> None:
    """None comes from a default of the code."""
    stated = set(numbers(json.loads((PRESETS / f"{name}.json").read_text(encoding="utf-8"))))
    every = set(numbers(json.loads(load_machine(name).to_json())))
    measured = {("layer_times",), ("call_times",)}
    assert stated == every - measured


def test_files_of_before_load_as_they_did() -> None:
    """Keys that were not there yet have the values that were priced with then."""
    old = raw()
    for part, key in (
        (old, "workspace_channel_block"), (old, "overlap_sums"), (old, "reserved_bytes"),
        (old["all_reduce"], "latency_share"), (old["all_reduce"], "overhead_s"),
        *((one, "backward_share") for one in old["compute"].values()),
    ):  # fmt: skip
        del part[key]
    found = Machine.from_json(json.dumps(old)).model_dump()
    assert found == load_machine("lassen").model_dump() | {"reserved_bytes": 0}


def test_a_number_needs_a_source_of_its_own() -> None:
    curve = ("compute", "float32", "kinds", "linear", "by_flops", "at")
    assert has_source(curve, ["compute.*.kinds"])
    assert not has_source(curve, ["compute.*.kinds.conv2d"])
    assert has_source(("node", "latency_s"), ["*.latency_s"])
    assert not has_source(("node", "latency_s"), ["node", "node.latency_s.x", "network.latency_s"])


def test_lassen_has_the_papers_links() -> None:
    machine = load_machine("lassen")
    assert machine.network.latency_s == 1.2e-6
    assert 1 / machine.network.bandwidth_bytes_per_s == pytest.approx(3.893e-11, rel=1e-3)
    assert machine.node.latency_s == 8e-6
    assert 1 / machine.node.bandwidth_bytes_per_s == pytest.approx(2.661e-11, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tera"), [("p100x4", 21.2), ("lassen", 125), ("perlmutter", 312), ("dgx-h100", 989)]
)
def test_float16_runs_at_the_published_rates(name: str, tera: float) -> None:
    machine = load_machine(name)
    assert machine.rates("float16").peak_flops_per_s == pytest.approx(tera * 1e12)
    said = machine.sources["compute.*.peak_flops_per_s"]
    assert f"{tera:g}" in said
    assert "float16" in said.replace("bfloat16", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": 16}, "memory_gb: Extra inputs"),
        ({"devices_per_node": 0}, "devices_per_node: Input should be greater than or equal to 1"),
        ({"node": {"latency_s": 1e-6}}, "node.bandwidth_bytes_per_s: Field required"),
        ({"reserved_bytes": 1 << 40}, "must be less than memory_bytes"),
        ({"call_s": -1.0}, "call_s: Input should be greater than or equal to 0"),
        ({"memory_by_bytes": {"at": [2, 1], "share": [0.5, 0.5]}}, "at must increase"),
        ({"memory_by_bytes": {"at": [1], "share": [1.5]}}, "less than or equal to 1"),
        ({"compute": {"float32": {"peak_flops_per_s": 1, "kinds": {}}}}, "must have a 'default'"),
    ],
)
def test_bad_files_say_which_key_and_why(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(raw() | change))
    with pytest.raises(MachineError) as caught:
        load_machine(path)
    assert message in str(caught.value)
    assert "bad.json" in str(caught.value)


def test_what_is_no_json_and_no_machine(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(MachineError, match="not JSON"):
        load_machine(path)
    with pytest.raises(MachineError, match="these are: dgx-h100, lassen"):
        load_machine("laptop")
    with pytest.raises(MachineError, match="no rates for int8"):
        load_machine("lassen").rates("int8")


def test_rates_that_nothing_has_are_not_taken_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    link = load_machine("lassen").node.model_copy(update={"bandwidth_bytes_per_s": 1e30})
    free = load_machine("lassen").model_copy(update={"node": link})
    local_path(2).write_text(free.to_json())
    with pytest.raises(MachineError, match="too busy to be measured; run tilewise calibrate"):
        load_machine("local", devices=2)
    assert load_machine(local_path(2)) == free  # one may try what a free link would be worth


def test_links_and_sums_follow_their_formulas() -> None:
    machine = load_machine("lassen")
    link = machine.network
    two = link_s(link, np.array([1e6, 0.0]), np.array([9.0, 0.0]))
    assert two[0] == pytest.approx(2 * link.latency_s + 1e6 / link.bandwidth_bytes_per_s)
    assert two[1] == 0
    beta = 1 / link.bandwidth_bytes_per_s
    large = sum_s(machine, np.array(1e8), np.array(16.0), np.array(64.0))
    assert large == pytest.approx(2 * 4 * link.latency_s + 2 * 15 / 16 * 1e8 * beta)
    small = sum_s(machine, np.array(1e3), np.array(16.0), np.array(64.0))
    assert small == pytest.approx(4 * (link.latency_s + 1e3 * beta))
    assert sum_s(machine, np.array(1e3), np.array(1.0), np.array(1.0)) == 0
