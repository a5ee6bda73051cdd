"""A real Chromium, and reports to open in it."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import report_files as made
from browsers import Open, find_chromium


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return made.make_plans(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="session")
def sources(plans: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of everything that a report takes."""
    folder = tmp_path_factory.mktemp("sources")
    return [
        *plans,
        made.make_simulation(folder / "simulated.json", plans[2]),
        made.make_run(folder / "run", plans[2]),
        *made.make_benches(folder),
    ]


@pytest.fixture(scope="session")
def page_file(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert made.run("report", *map(str, sources), "-o", str(path)) == 0
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    found = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    yield found
    found.close()


@pytest.fixture
def open_page(context: BrowserContext) -> Iterator[Open]:
    """Open a report from disk; at the end nothing may have been complained about or fetched."""
    said: list[str] = []
    fetched: list[str] = []

    def open_(path: Path, **media: str) -> Page:
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: fetched.append(request.url))
        if media:
            page.emulate_media(**media)  # type: ignore[arg-type]
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_
    assert said == []
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
