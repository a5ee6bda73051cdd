"""Every code block of the docs runs, and every command in them is one that there is.

Snippets run on four ranks, on a small model that they may take for granted. The page on data and
the README have tests of their own in test_examples.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import DEFAULT

import pytest
import torch
import torch.distributed as dist
import typer

from measured_here import keep_rates, measuring_briefly
from scripts import finish, run_script
from tilewise import Mesh
from tilewise.cli.app import app
from tilewise.cli.reference import reference
from tilewise.testing.ranks import Pool

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
ALONE = ("simulate.md",)
UNDER_MPI = ("performance.md", "howto/mpi.md")
ELSEWHERE = ("data.md", "tutorial.md", *UNDER_MPI)

GIVEN = """
import torch, torch.distributed as dist, torch.nn.functional as F
import tilewise as tw
from torch import nn
from tilewise.models import alexnet, cosmoflow, unet3d

torch.manual_seed(0)
if PAGE == "concepts.md":
    model, x = alexnet(width=0.125), torch.randn(4, 3, 64, 64)
    target = torch.randint(3, (4,))
else:
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))
    x, target = torch.randn(4, 1, 16, 16, 16), torch.randint(3, (4, 16, 16, 16))
if SPLIT:
    pmodel = tw.parallelize(model, x, plan="n2 h2", loss=F.cross_entropy)
    x_slab, t_slab = pmodel.scatter(x, target)
graph, rank = tw.capture(model, x), dist.get_rank()
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Four ranks that are a world of their own, as a script's are."""
    found = Pool(4, backend="gloo", timeout=300.0)
    yield found
    found.close()


def on_four_ranks(pool: Pool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return pool.run(tuple(range(4)), function, arguments, 300.0, None)


def blocks(page: str, *kinds: str) -> list[str]:
    """Return the code blocks of a page that are marked with one of some words."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    return [text for kind, text in found if kind in kinds]


def run_pages(mesh: Mesh, texts: dict[str, list[str]], folder: str) -> list[str]:
    """Run the blocks of each page one after the other on this rank; returns what went wrong."""
    os.chdir(folder)
    errors = []
    with (
        measuring_briefly(folder),
        # the ranks have joined already, and stay for the next page
        mock.patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT),
    ):
        for page, some in texts.items():
            split = any(re.search(r"\b(pmodel|x_slab|t_slab)\b", text) for text in some)
            names: dict[str, Any] = {"PAGE": page, "SPLIT": split}
            exec(GIVEN, names)
            if page in ALONE and mesh.rank:
                continue
            for text in some:
                try:
                    with contextlib.redirect_stdout(io.StringIO()):
                        exec(compile(text, page, "exec"), names)
                except Exception as error:
                    errors.append(f"{page}: {error!r} in\n{text}")
    return errors


def test_snippets_run_on_four_ranks(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {page: blocks(page, "python") for page in PAGES if page not in ELSEWHERE}
    texts = {page: some for page, some in texts.items() if some}
    assert len(texts) > 8
    keep_rates(tmp_path, 4)
    for errors in on_four_ranks(pool, run_pages, texts, str(tmp_path)):
        assert not errors, "\n".join(errors)
    assert (tmp_path / "volumes.h5").is_file()
    inspect = next(c for c in commands("howto/hdf5.md") if "inspect" in c)
    monkeypatch.chdir(tmp_path)
    assert finish(inspect, monkeypatch) == 0


def test_snippets_on_mpi_run_under_mpiexec(tmp_path: Path) -> None:
    script = tmp_path / "mpi.py"
    script.write_text("\n".join(text for page in UNDER_MPI for text in blocks(page, "python")))
    launcher = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
    ran = subprocess.run(
        [launcher, "-n", "1", sys.executable, str(script)],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def losses(said: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([0-9.]+)", said)]


def test_the_tutorial_gives_the_losses_of_one_device(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *named, planned = blocks("tutorial.md", "python")
    scripts = {text.split()[1]: text for text in named}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    (alone,) = pool.run((0,), run_script, (scripts["train.py"], str(tmp_path)), 300.0)
    split, *others = on_four_ranks(pool, run_script, scripts["train_split.py"], str(tmp_path))
    assert len(losses(alone)) == 3
    assert losses(split) == pytest.approx(losses(alone), abs=2e-4)
    assert all(said == "" for said in others)
    assert "head.weight" in torch.load(tmp_path / "unet.pt", weights_only=True)
    monkeypatch.chdir(tmp_path)
    said = {command.split()[1]: finish(command, monkeypatch) for command in commands("tutorial.md")}
    assert said == {"verify": 0, "plan": 0, "report": 0, "simulate": 0}
    shown = capsys.readouterr().out
    assert "equal within" in shown
    assert "bytes are the planner's" in shown
    assert json.loads((tmp_path / "plan.json").read_text())["layers"]["head"]
    assert "up1.0" in (tmp_path / "report.html").read_text()
    script, count = re.subn(r"pmodel = .*\n", planned, scripts["train_split.py"])
    assert (count, planned.count("plan.json")) == (1, 1)
    split, *_ = on_four_ranks(pool, run_script, script, str(tmp_path))
    assert losses(split) == pytest.approx(losses(alone), abs=2e-4)


def commands(page: str) -> list[str]:
    """Return the commands of a page: lines of a shell that call tilewise, launchers left out."""
    text = "".join(blocks(page, "sh", "bash", "")).replace("\\\n", " ")
    found = [re.search(r"\btilewise (?!/).*", line) for line in text.splitlines()]
    return [match[0].split(" # ")[0].strip() for match in found if match is not None]


def test_commands_are_spelled_right() -> None:
    root = typer.main.get_command(app)
    seen = 0
    for page in PAGES:
        for command in commands(page):
            one: Any = root
            words = shlex.split(command)[1:]
            while hasattr(one, "commands"):
                one, words = one.commands[words[0]], words[1:]
            one.make_context(command, words)
            seen += 1
    assert seen > 20


def test_the_reference_names_every_command() -> None:
    page = reference()
    for words in ("verify", "plan", "simulate", "calibrate", "doctor", "bench layers", "data make"):
        assert f"## tilewise {words}\n" in page
    assert "| `--strong` |" in page
