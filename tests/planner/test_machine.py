"""Machine files: presets, units, and what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.planner.machine import (
    Machine,
    MachineError,
    load_machine,
    local_path,
    preset_names,
)
from tilewise.planner.price import link_s, sum_s


def raw(name: str = "lassen") -> dict[str, Any]:
    return dict(json.loads(load_machine(name).to_json()))


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_name_the_source_of_every_number(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    said = " ".join(machine.sources)
    for key in (
        "devices_per_node", "memory_bytes", "memory_bandwidth_bytes_per_s", "memory_by_bytes",
        "call_s", "peak_flops_per_s", "node", "network", "all_reduce", "overlap_halo",
        "by_flops", "concurrent_messages", "reserved_bytes", "overlap_sums",
    ):  # fmt: skip
        assert key in said, key
    assert Machine.from_json(machine.to_json()) == machine


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
    said = machine.sources["compute.peak_flops_per_s"]
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
