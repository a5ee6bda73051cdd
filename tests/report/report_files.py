"""Things to report on: real plans of small networks, and files as other commands write them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tilewise.bench.layers import Row
from tilewise.bench.messages import Primitive
from tilewise.bench.model import ModelRow
from tilewise.bench.scaling import Point
from tilewise.cli import main

ALEXNET = ("alexnet", "--arg", "width=0.25", "--input", "8x3x96x96", "--devices", "4")
COSMOFLOW = ("cosmoflow", "--arg", "size=32", "--arg", "width=0.25", "--input", "2x4x32x32x32",
             "--devices", "8")  # fmt: skip


def run(*arguments: str) -> int:
    """Run the command in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tilewise", *arguments])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def make_plans(folder: Path) -> list[Path]:
    """Write two plans of one network, and one of another, 3-D, whose first layer has halos."""
    free, pinned, cube = (folder / f"{name}.json" for name in ("free", "pinned", "cube"))
    machine = ("--machine", "lassen", "--price-limit", "60")
    assert run("plan", *ALEXNET, *machine, "--pareto", "-o", str(free)) == 0
    pin = ("--pin", "features.0=h2 w2", "--pin", "classifier.1=c2 f2")
    assert run("plan", *ALEXNET, *machine, *pin, "-o", str(pinned)) == 0
    pin = ("--pin", "features.conv1=d2 h2 w2")
    few = ("--price-limit", "0")
    assert run("plan", *COSMOFLOW, *machine, *few, *pin, "-o", str(cube)) == 0
    return [free, pinned, cube]


def make_simulation(path: Path, plan: Path) -> Path:
    """Write a simulation of a plan as `tilewise simulate --json` does, with a strong sweep."""
    about = json.loads(plan.read_text())
    details = about["details"]
    layers = [
        {key: row[key] for key in ("name", "kind", "compute_s", "halo_s", "exchange_s")}
        | {"degrees": about["layers"].get(row["name"])}
        for row in details["layers"]
    ]
    bars, memory, now = [], [], 0.0
    for phase in ("forward", "backward"):
        for row in layers if phase == "forward" else layers[::-1]:
            end = now + row["compute_s"] / 2
            span = {"layer": row["name"], "phase": phase, "start_s": now, "end_s": end}
            bars.append({"stream": "compute", "kind": phase, **span})
            memory.append({**span, "peak_bytes": 2000, "end_bytes": 1000})
            now = end
    bars.append({"stream": "sync", "kind": "gradients", "layer": layers[0]["name"],
                 "phase": "backward", "start_s": now, "end_s": 1.1 * now})  # fmt: skip
    points = [
        {"devices": devices, "inputs": [[16, 4, 512, 512, 512]], "step_seconds": 8.0 / devices,
         "planned_step_seconds": 7.5 / devices}
        for devices in (128, 256, 512)
    ]  # fmt: skip
    data = {
        "kind": "simulation", "format": 1, "model": "cosmoflow", "inputs": details["inputs"],
        "devices": 8, "machine": "lassen", "plan": about["layers"], "step_seconds": 1.1 * now,
        "peak_bytes": 2000, "layers": layers, "timeline": bars, "memory": memory, "ranks": [{}],
        "agreement": {"bytes_equal": True, "step_ratio": 1.01, "peak_ratio": 0.98,
                      "planned_peak_bytes": 1900},
        "strong": points,
    }  # fmt: skip
    path.write_text(json.dumps(data))
    return path


def make_run(folder: Path, plan: Path) -> Path:
    """Write the folder of a profiled training run of a plan."""
    (folder / "profile").mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for step in range(1, 41):
        shares = {"compute": 0.7, "halo": 0.1, "redistribution": 0.05, "sync": 0.1, "input": 0.05}
        records.append({"kind": "train", "epoch": 1, "step": step, "loss": 1.0 / step, "lr": 1e-3,
                        "seconds": 0.2, "shares": shares})  # fmt: skip
    records.append({"kind": "valid", "epoch": 1, "step": 40, "mse": 0.25, "seconds": 1.0})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + '{"kind": "train", "ste')
    bare = json.loads(plan.read_text())
    layer = bare.pop("details")["layers"][0]["name"]
    (folder / "plan.json").write_text(json.dumps(bare))
    for rank, micros in enumerate((400, 600)):
        trace = json.dumps({"traceEvents": trace_events(layer, micros)})
        (folder / f"profile/rank-{rank}.json").write_text(trace)
    return folder


def trace_events(layer: str, micros: int) -> list[dict[str, Any]]:
    """Return the events of two operators, the second a layer's; backward takes twice its time."""
    span = {"ph": "X", "cat": "user_annotation", "name": layer, "ts": 100.0, "dur": micros}
    operators = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::convolution", "ts": ts, "dur": 5.0,
         "args": {"Sequence number": 7, "Fwd thread id": 0}}
        for ts in (50.0, 120.0)
    ]  # fmt: skip
    nodes = [
        {"ph": "X", "cat": "cpu_op", "name": before + name, "ts": 5000.0, "dur": 2.0 * micros,
         "args": {"Sequence number": number, "Fwd thread id": 1}}
        for number, name in ((7, "ConvolutionBackward0"), (8, "SumBackward0"))
        for before in ("autograd::engine::evaluate_function: ", "")
    ]  # fmt: skip
    return [span, *operators, *nodes]


def make_benches(folder: Path) -> list[Path]:
    """Write benches with the classes that the commands print."""
    row = Row("conv", "h2", 2, 0.2, 0.01, 0.1, 0.12, 0.04, 0.08, 0.83, 1.67, 4096)
    model = ModelRow(
        "alexnet", "n2", 2, 1.0, 0.6, 0.57, 0.58, 0.56, 0.5, 0.55, 1.8, 1.1, 1.05, 0.91, 4096, 2048,
        0.02,
    )  # fmt: skip
    message = Primitive("exchange", {64: 1e-5, 1024: 2e-5}, 9e-6, 1e-8, 0.05)
    points = [Point("conv", f"h{k}" if k > 1 else "1", k, 0.1 / k, 0.2 / k, k, k) for k in (1, 2)]
    found = {
        "layers": {"rows": [asdict(row)]},
        "model": model.as_dict(),
        "messages": {"backend": "gloo", "ranks": 2, "primitives": [message.as_dict()]},
        "scaling": {"scaling": "weak", "points": [point.as_dict() for point in points]},
        "input": {"ranks": 2, "whole_samples_s": 3.0, "slab_samples_s": 6.0},
        "predictions": {"rows": [{"plan": "n2", "predicted_s": 0.1, "measured_s": 0.11}]},
    }
    paths = []
    for name, data in found.items():
        paths.append(folder / f"bench-{name}.json")
        paths[-1].write_text(json.dumps(data))
    return paths


def make_long_plan(path: Path, count: int) -> Path:
    """Write the plan of a network of many layers, every third one with a skip."""
    degrees = ("n2", "h2", "c2 f2", "1", "n2 w2")
    rows, network = [], []
    for k in range(count):
        name = f"stage{k // 20}.layer{k}"
        rows.append({"name": name, "kind": "conv2d", "degrees": degrees[k % 5], "compute_s": 1e-4,
                     "halo_s": 1e-5, "exchange_s": 0.0, "sync_s": 2e-5, "bytes": k})  # fmt: skip
        reads = [rows[j]["name"] for j in (k - 1, k - 3) if j >= 0 and (j == k - 1 or k % 3 == 0)]
        network.append({"name": name, "reads": reads, "shape": [4, 8, 16, 16], "dims": "nchw",
                        "axes": [[4, 0]], "operands": []})  # fmt: skip
    data = {
        "format": 1, "layers": {row["name"]: row["degrees"] for row in rows},
        "details": {"layers": rows, "network": network, "devices": 4, "step_seconds": 0.1},
    }  # fmt: skip
    path.write_text(json.dumps(data))
    return path
