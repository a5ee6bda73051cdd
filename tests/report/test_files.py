"""Figures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_files import run

from tilewise.report import read_source
from tilewise.report.page import Contents


def test_every_figure_is_written(sources: list[Path], tmp_path: Path) -> None:
    sources = sources[2:6]  # a plan, a simulation, a run and a bench
    folder, page = tmp_path / "figures", tmp_path / "report.html"
    assert run("report", *map(str, sources), "-o", str(page), "--figures", str(folder)) == 0
    charts = Contents([read_source(path) for path in sources]).charts
    names = {chart.id for chart in charts} | {"network-cube", "slab-cube"}
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{ending}" for name in names for ending in ("png", "svg")
    }
    for name in names:
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
    assert "Oyama et al." in (folder / "scaling-strong.svg").read_text()


def test_the_page_loads_nothing(page_file: Path) -> None:
    text = page_file.read_text()
    for loading in ('<link rel="stylesheet', "src=", "@import", "url(http", "fetch(", "https://"):
        assert loading not in text, loading
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.json", None, "there is no file or folder"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[1]", "holds a list"),
        ("a.json", '{"x": 1}', "is none of what is known"),
        ("a.json", '{"format": 1, "layers": {"a": "q3"}}', "layer 'a'"),
        ("a.json", '{"format": 1, "layers": {}}', "has no layers"),
        ("a.json", '{"rows": [{"layer": "a"}]}', "something is missing"),
        ("run", None, "has no metrics.jsonl"),
        ("run/metrics.jsonl", "", "has no steps yet"),
        ("run/metrics.jsonl", 'x\n{"step": 1}\n', "line 1 is not JSON"),
    ],
)
def test_bad_input_is_one_line(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if name.startswith("run"):
        (tmp_path / "run").mkdir()
    if text is not None:
        path.write_text(text)
    assert run("report", str(path), "-o", str(tmp_path / "report.html")) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written(
    plans: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("report", str(plans[0]), "-o", str(tmp_path / "no" / "report.html")) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_same_names_are_told_apart(plans: list[Path], tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "plan.json")
        paths[-1].write_text(plans[0].read_text())
    contents = Contents([read_source(path) for path in [*paths, paths[0]]])
    labels = [view["label"] for view in contents.plans]
    assert labels == ["a/plan", "b/plan", "a/plan (2)"]


def test_json_of_a_plan_shows_the_same(plans: list[Path], tmp_path: Path) -> None:
    """What `tilewise plan --json` prints is as good as the file that -o writes."""
    whole = json.loads(plans[0].read_text())["details"]
    inner = {"model", "inputs", "dtype", "optimizer", "memory_bytes", "devices_per_node",
             "network", "prices", "step"}  # fmt: skip
    printed = {key: value for key, value in whole.items() if key not in inner}
    printed["details"] = {key: whole[key] for key in inner}
    path = tmp_path / "free.json"
    path.write_text(json.dumps(printed))
    a, b = (Contents([read_source(one)]).as_dict() for one in (plans[0], path))
    assert a == b
