"""The page in a real browser: what one clicks, types, compares and prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browsers import Open
from playwright.sync_api import Page, expect
from report_files import make_long_plan, run

CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => {
      v /= 255;
      return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("h2, h3, p, td, th, a, label, button, li")) {
    if (!element.textContent.trim() || !element.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${element.tagName} ${element.textContent.slice(0, 40)} ${ratio}`);
  }
  return found;
}"""


def degrees(path: Path) -> dict[str, str]:
    rows = json.loads(path.read_text())["details"]["layers"]
    return {row["name"]: row["degrees"] for row in rows}


def node(page: Page, name: str) -> Any:
    return page.locator(f'.node[data-name="{name}"]')


def test_click_shows_a_layer(open_page: Open, page_file: Path) -> None:
    page = open_page(page_file)
    expect(page.locator("#cards .card")).to_have_count(5)  # three plans, a simulation, a run
    page.select_option("#plan", label="pinned")
    node(page, "features.0").click()
    expect(page.locator("#layer-name")).to_have_text("features.0")
    expect(node(page, "features.0")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#layer .chips")).to_contain_text("h2: height in 2")
    # an 11 × 11 window of stride 4 and padding 2 over 96 rows cut in two
    page.fill("#layer input[type=number]", "0")
    page.press("#layer input[type=number]", "Enter")
    reads = page.locator("#layer .slabs figure").first
    expect(reads).to_contain_text("height 0–47 of 96 (part 1 of 2), halo")
    assert reads.locator("svg .slab-halo").count() > 0
    assert reads.locator("svg .slab-mine").count() > 0
    expect(page.locator("#layer")).to_contain_text("it was pinned to h2 w2")
    node(page, "features.3").click()
    prices = page.locator("#layer table").last
    expect(prices.locator("tr.chosen")).to_contain_text(re.compile(r"\(chosen\).*exact"))
    assert prices.locator("tbody tr", has_text="exact").count() > 1
    expect(page.locator("#layer")).to_contain_text("gradient sums")


def test_a_cube_is_drawn_with_its_halo(open_page: Open, page_file: Path) -> None:
    page = open_page(page_file)
    page.select_option("#plan", label="cube")
    node(page, "features.conv1").click()
    page.fill("#layer input[type=number]", "7")
    page.press("#layer input[type=number]", "Enter")
    reads = page.locator("#layer .slabs figure").first
    for dim in ("depth", "height", "width"):
        expect(reads).to_contain_text(f"{dim} 16–31 of 32 (part 2 of 2), halo 1 before")
    expect(reads.locator("path.slab-halo")).to_have_count(3)
    # the simulation and the profiled run are of this plan
    costs, measured = page.locator("#layer table").nth(0), page.locator("#layer table").nth(1)
    expect(costs).to_contain_text("simulated: simulated")
    expect(measured).to_contain_text("measured: run")
    expect(measured.locator("tr", has_text="forward")).to_contain_text("600 µs")
    expect(measured.locator("tr", has_text="backward")).to_contain_text("1.2 ms")
    node(page, "features.conv3").click()  # of this plan nothing was proven beyond the bounds
    expect(page.locator("#layer table").last).to_contain_text("between")


def test_search_finds_a_layer(open_page: Open, page_file: Path) -> None:
    page = open_page(page_file)
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("classifier conv")
    expect(page.locator("#matches")).to_contain_text("no layer matches")
    page.fill("#search", "classifier.")
    names = page.locator("#matches li span:first-child").all_inner_texts()
    assert len(names) > 2
    assert all(name.startswith("classifier.") for name in names)
    assert page.locator(".node.dim").count() > 0
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#layer-name")).to_have_text(names[1])
    expect(page.locator("#matches")).to_be_hidden()
    assert page.locator(".node.dim").count() == 0


def test_compare_two_plans(open_page: Open, page_file: Path, plans: list[Path]) -> None:
    page = open_page(page_file)
    first, second = degrees(plans[0]), degrees(plans[1])
    differ = [name for name in first if first[name] != second[name]]
    assert differ
    page.select_option("#compare-a", label="free")
    page.select_option("#compare-b", label="pinned")
    said = page.locator("#difference")
    expect(said).to_have_text(f"{len(differ)} of {len(first)} layers are split differently.")
    shown = page.locator("#comparison .link").all_inner_texts()
    assert shown == differ
    page.click("#swap")
    expect(page.locator("#comparison thead").last).to_contain_text(re.compile(r"pinned\s*free"))
    page.locator("#comparison .link", has_text="features.0").first.click()
    expect(page.locator("#plan")).to_have_value("1")
    expect(page.locator("#layer-name")).to_have_text("features.0")
    page.select_option("#paint", "change")
    page.select_option("#compare-b", label="cube")
    expect(page.locator("#comparison")).to_contain_text("different networks")


def test_keys_go_from_layer_to_layer(open_page: Open, page_file: Path) -> None:
    page = open_page(page_file)
    node(page, "features.0").focus()
    page.keyboard.press("Home")
    expect(page.locator("#layer-name")).to_have_text("features.0")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#layer-name")).not_to_have_text("features.0")
    below = page.locator("#layer-name").inner_text()
    expect(node(page, below)).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#layer-name")).to_have_text("features.0")
    assert page.locator('.node[tabindex="0"]').count() == 1
    page.check("#unfold")
    folded = page.locator(".node").count()
    page.uncheck("#unfold")
    assert page.locator(".node").count() < folded


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_in_both_themes(scheme: str, open_page: Open, page_file: Path) -> None:
    page = open_page(page_file, color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert page.evaluate(CONTRAST) == []
    page.select_option("#theme", "light" if scheme == "dark" else "dark")
    other = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert other != paper
    assert page.evaluate(CONTRAST) == []


def test_pictures_and_controls_have_names(open_page: Open, page_file: Path) -> None:
    page = open_page(page_file)
    nameless = page.evaluate("""() => [
      ...[...document.querySelectorAll("svg[role=img], [role=button]")]
        .filter((one) => !one.getAttribute("aria-label")),
      ...[...document.querySelectorAll("input, select")]
        .filter((one) => !one.labels.length && !one.getAttribute("aria-label")),
      ...[...document.querySelectorAll("section")].filter((one) =>
        !document.getElementById(one.getAttribute("aria-labelledby"))),
    ].map((one) => one.outerHTML.slice(0, 120))""")
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len([one for one in ids if one != "hatch"]) == len({*ids} - {"hatch"})


def test_every_chart_is_drawn(open_page: Open, page_file: Path) -> None:
    page = open_page(page_file)
    charts = page.evaluate("DATA.charts.map((chart) => chart.id)")
    assert {"frontier-alexnet", "timeline-cube", "timeline-simulated", "memory-cube",
            "scaling-strong", "scaling-weak", "run-loss", "run-shares"} <= set(charts)  # fmt: skip
    assert len(set(charts)) == len(charts)
    for chart in charts:
        picture = page.locator(f"#chart-{chart} svg.plot")
        if chart.startswith("layers-"):  # of the plan that is shown
            page.select_option("#plan", label=chart.removeprefix("layers-"))
        picture.scroll_into_view_if_needed()
        assert picture.locator("path, rect, circle").count() > 0, chart
    strong = page.locator("#chart-scaling-strong")
    expect(strong).to_contain_text("ideal")
    expect(strong).to_contain_text("CosmoFlow 512³, 16 samples, V100: Oyama et al.")
    strong.locator("summary").click()
    expect(strong.locator("table")).to_contain_text("1.98×")
    page.select_option("#plan", label="free")
    page.locator("#chart-timeline-cube rect").first.click()
    expect(page.locator("#plan")).to_have_value("2")
    expect(page.locator("#layer-name")).to_have_text("features.conv1")


def test_narrow_and_printed(open_page: Open, page_file: Path) -> None:
    page = open_page(page_file)
    page.set_viewport_size({"width": 360, "height": 740})
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360
    page.emulate_media(media="print")
    expect(page.locator("nav")).to_be_hidden()
    expect(page.locator("#network .bar")).to_be_hidden()
    assert page.pdf()[:5] == b"%PDF-"


def test_many_layers(open_page: Open, tmp_path: Path) -> None:
    plan, page_file = make_long_plan(tmp_path / "long.json", 430), tmp_path / "report.html"
    assert run("report", str(plan), "-o", str(page_file)) == 0
    page = open_page(page_file)
    assert page.locator(".node").count() == 430
    page.fill("#search", "layer429")
    page.keyboard.press("Enter")
    expect(page.locator("#layer-name")).to_have_text("stage21.layer429")
    expect(node(page, "stage21.layer429")).to_be_in_viewport()
    page.locator("#strip svg").click(position={"x": 1, "y": 60})
    expect(page.locator("#layer-name")).to_have_text("stage0.layer0")


def test_names_cannot_break_out(open_page: Open, tmp_path: Path) -> None:
    evil = '</script><script>document.title="taken"</script><b>&'
    plan, page_file = tmp_path / "plan.json", tmp_path / "report.html"
    plan.write_text(json.dumps({"format": 1, "layers": {evil: "n2", "fc": "f2"}}))
    assert run("report", str(plan), "-o", str(page_file), "--title", "<i>mine</i>") == 0
    page = open_page(page_file)
    assert page.title() == "<i>mine</i>"
    expect(page.locator("#layer-name")).to_have_text(evil)
