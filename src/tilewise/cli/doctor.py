"""`tilewise doctor`: what this machine has, and how to get what it lacks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilewise.comm.launch import engine, launched
from tilewise.errors import TilewiseError
from tilewise.ops.kept import machine_name
from tilewise.ops.tune import cache_file, tuning
from tilewise.planner.machine import load_machine, preset_names
from tilewise.units import size

TORCH = ((2, 11), (2, 14))
PYTHON = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for: `state` is `ok`, `missing` (optional) or `wrong`."""

    group: str
    name: str
    state: str
    found: str
    install: str = ""


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show what this machine has for tilewise, and the command that installs what is missing."""
    findings = list(examine())
    ok = all(finding.state != "wrong" for finding in findings)
    if json_:
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}))
    else:
        _show(findings, ok)
    sys.exit(0 if ok else 1)


def examine() -> Iterator[Finding]:
    """Yield all findings."""
    for group in (_versions, _devices, _backends, _launchers, _packages, _measurements):
        yield from group()


def _versions() -> Iterator[Finding]:
    low = ".".join(map(str, PYTHON))
    right = sys.version_info >= PYTHON
    command = "" if right else f"install Python {low} and make a new environment"
    yield _checked("versions", "python", right, platform.python_version(), command)
    number = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    command = f"pip install 'torch>={_text(TORCH[0])},<{_text(TORCH[1])}'"
    yield _checked("versions", "torch", TORCH[0] <= number < TORCH[1], torch.__version__, command)
    yield Finding(
        "versions", "tilewise", "ok", _version("tilewise") or "not installed, from source"
    )


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = f"{machine_name()}, {cores} cores, {size(memory)}, torch uses {torch.get_num_threads()}"
    yield Finding("devices", "cpu", "ok", said)
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    if count:
        yield Finding("devices", "gpu", "ok", f"{count} × {', '.join(sorted(names))}")
    else:
        built = torch.version.cuda or torch.version.hip
        said = f"none seen, torch is built for {built}" if built else "torch is built for CPUs only"
        yield Finding("devices", "gpu", "missing", said, "" if built else "pip install torch")


def _backends() -> Iterator[Finding]:
    for name, install in (
        ("gloo", "pip install torch"),
        ("mpi", "pip install 'tilewise[mpi]'"),
        ("nccl", "pip install torch on a machine with NVIDIA GPUs"),
    ):
        try:
            engine(name)
            there = name != "gloo" or dist.is_gloo_available()
            said = _mpi() if name == "mpi" else "comes with torch"
        except (TilewiseError, ImportError, RuntimeError) as error:
            there, said = False, str(error).splitlines()[0]
        if name == "gloo":
            yield _checked("backends", name, there, said, install)
        else:
            yield Finding("backends", name, _optional(there), said, "" if there else install)


def _mpi() -> str:
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split())
    return f"mpi4py {_version('mpi4py')}, {library}"


def _launchers() -> Iterator[Finding]:
    beside = os.path.dirname(sys.executable)
    for name, install in (
        ("torchrun", "pip install torch"),
        ("mpiexec", "pip install 'tilewise[mpi]'"),
        ("srun", "comes with SLURM"),
    ):
        path = shutil.which(name) or shutil.which(name, path=beside)
        there = path is not None
        yield Finding(
            "launchers", name, _optional(there), path or "not found", "" if there else install
        )
    if launched():
        yield Finding("launchers", "this process", "ok", "was started by a launcher")


def _packages() -> Iterator[Finding]:
    """Yield what each optional part of the package needs and this environment has of it."""
    needs: dict[str, list[str]] = {}
    lines = importlib.metadata.requires("tilewise") if _version("tilewise") else None
    for line in lines or ():
        match = re.match(r"([A-Za-z0-9_.-]+).*extra\s*==\s*['\"]([\w-]+)['\"]", line)
        if match is not None and match[1] != "tilewise":
            needs.setdefault(match[2], []).append(match[1])
    for extra, names in needs.items():
        lacking = [name for name in names if _version(name) is None]
        said = f"without {', '.join(lacking)}" if lacking else ", ".join(names)
        install = f"pip install 'tilewise[{extra}]'" if lacking else ""
        yield Finding("optional", extra, _optional(not lacking), said, install)


def _measurements() -> Iterator[Finding]:
    path = cache_file()
    known = _entries(path.read_text) if path.is_file() else 0
    if not tuning():
        said = "tuning is switched off"
    else:
        said = f"{known} shapes in {path}" if known else f"none yet; runs fill {path}"
    yield Finding("measured", "ways to convolve", "ok", said)
    found = sorted(path.parent.glob("machine-*.json"))
    for file in found:
        try:
            machine = load_machine(file)
            yield Finding("measured", "machine", "ok", f"{machine.name} in {file}")
        except TilewiseError as error:
            again = f"rm {file}"
            yield Finding("measured", "machine", "missing", str(error), again)
    if not found:
        said = f"not calibrated; presets: {', '.join(preset_names())}"
        yield Finding("measured", "machine", "missing", said, "tilewise calibrate -o here.json")


def _entries(read: Callable[[], str]) -> int:
    try:
        return len(json.loads(read()))
    except (OSError, ValueError, TypeError):
        return 0


def _checked(group: str, name: str, right: bool, found: str, install: str) -> Finding:
    return Finding(group, name, "ok" if right else "wrong", found, "" if right else install)


def _optional(there: bool) -> str:
    return "ok" if there else "missing"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


STYLES = {"ok": "[green]✓[/]", "missing": "[yellow]–[/]", "wrong": "[red]✗[/]"}


def _show(findings: list[Finding], ok: bool) -> None:
    table = Table(title="what this machine has")
    for name in ("", "what", "found", "to install"):
        table.add_column(name)
    last = ""
    for finding in findings:
        if finding.group != last and last:
            table.add_section()
        last = finding.group
        table.add_row(
            STYLES[finding.state], *map(escape, (finding.name, finding.found, finding.install))
        )
    console = Console()
    console.print(table)
    console.print("all that is needed is there" if ok else "[red]something is wrong, see ✗[/]")
