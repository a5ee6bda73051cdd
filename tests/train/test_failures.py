"""What goes wrong in a run, done on real ranks: no hang, no lost checkpoint, one error."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tilewise.cli import main
from tilewise.errors import InputError
from tilewise.train.checkpoint import Checkpoints, whole_state_dict
from tilewise.train.lock import RunLock

HERE = Path(__file__).parent
RECIPE = f"""
plan = "f2"
[model]
name = "{HERE / "faulty.py"}:Net"
[data]
path = "images"
make = {{kind = "images", size = 16, count = 20, format = "npy"}}
shares = [1.0]
[train]
loss = "cross_entropy"
precision = "float64"
epochs = 2
batch = 4
optimizer = "adam"
[checkpoint]
epochs = 0
steps = 2
"""
STEPS = 10


class Place:
    """A folder with a recipe and a set, in which runs are made."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def run(self, out: str, *options: str, fault: str = "", step: int = 5) -> tuple[int, str]:
        """Train, as `tilewise` would; returns the exit code and what was said."""
        timeout = "10" if fault == "SIGSTOP" else "120"
        argv = ["tilewise", "train", "r.toml", "--out", out, "--timeout", timeout, *options]
        if fault:
            argv += ["--set", f"model.args.fault={fault}", "--set", f"model.args.step={step}"]
        self.capsys.readouterr()
        children = ranks_alive()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", argv)
            with pytest.raises(SystemExit) as caught:
                main()
        assert ranks_alive() == children, "ranks were left behind"
        return int(caught.value.code or 0), self.capsys.readouterr().err

    def losses(self, out: str) -> list[float]:
        """Return the losses of a run, of all steps in order."""
        path = self.folder / out / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        return [line["loss"] for line in lines]


def ranks_alive() -> set[str]:
    """Return the processes that were started as ranks and still are."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return set() if pid is None else children_of(pid)


def children_of(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def error_line(said: str) -> str:
    """Return the one error that a command ends with."""
    assert "Traceback" not in said
    lines = said.strip().splitlines()
    errors = [line for line in lines if line.startswith("tilewise: ")]
    assert errors == lines[-1:], said
    return errors[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    (made / "r.toml").write_text(RECIPE)
    return made


@pytest.fixture
def place(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Place:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    monkeypatch.chdir(folder)
    found = Place(folder, capsys)
    if not (folder / "undisturbed").exists():
        assert found.run("undisturbed")[0] == 0
    return found


# -- ranks ---------------------------------------------------------------------------------------

FAULTS = {
    "SIGKILL": r"rank 1: process \d+ was killed by SIGKILL",
    "SIGSTOP": r"rank 1: process \d+ is stopped \(SIGSTOP\) and gave no answer",
    "raise": r"rank 1: ValueError: the cat sat .* \(faulty.py:\d+\); see raise/failure.log",
    "loss": r"rank 1: ValueError: all elements of input .* \(faulty.py:\d+\); see loss/failure.log",
    "memory": r"rank 1: out of memory, with 4096 MiB more to allocate; see memory/failure.log",
}


@pytest.mark.parametrize("fault", [*FAULTS])
def test_a_rank_that_fails_is_named_in_one_line(place: Place, fault: str) -> None:
    code, said = place.run(fault, fault=fault)
    assert code == 1
    assert re.match(f"tilewise: {FAULTS[fault]}", error_line(said))
    assert Checkpoints(place.folder / fault / "checkpoints").latest() is not None
    if "see" in FAULTS[fault]:
        assert "faulty.py" in (place.folder / fault / "failure.log").read_text()


def test_a_run_restarts_and_ends_as_if_undisturbed(place: Place) -> None:
    once = f"model.args.once={place.folder / 'mark'}"
    options = ("--set", once, "--max-restarts", "2")
    code, said = place.run("restarted", *options, fault="SIGKILL", step=6)
    assert code == 0, said
    assert "starting again from the last checkpoint (restart 1 of 2)" in said
    assert re.search("from step [24]", said)  # what was being written when it died is lost
    assert place.losses("restarted") == pytest.approx(place.losses("undisturbed"), rel=1e-12)


def test_restarts_are_counted_and_start_anew_without_a_checkpoint(place: Place) -> None:
    code, said = place.run("hopeless", "--max-restarts", "1", fault="SIGKILL", step=1)
    assert code == 1
    assert said.count("starting again") == 1
    assert "was killed by SIGKILL" in error_line(said)


def test_what_is_wrong_with_the_recipe_is_not_tried_again(place: Place) -> None:
    code, said = place.run("wrong", "--max-restarts", "3", "--set", "model.frozen=['nothing']")
    assert code == 2
    assert "starting again" not in said
    assert "no layer matches 'nothing'" in error_line(said)


# -- being asked to stop -------------------------------------------------------------------------


def test_a_preempted_rank_stops_all_and_the_run_goes_on(place: Place) -> None:
    code, said = place.run("preempted", fault="SIGTERM", step=5)
    assert code == 75
    assert "stopped and saved at step 5; --resume latest goes on" in said
    assert place.run("preempted")[0] == 2, "it is not begun anew by mistake"
    code, said = place.run("preempted", "--resume", "latest", "--ranks", "3", "--plan", "f3")
    assert code == 0, said
    assert "3 ranks, 10 steps, from step 5" in said
    assert place.losses("preempted") == pytest.approx(place.losses("undisturbed"), rel=1e-12)


def test_a_signal_to_the_command_reaches_the_ranks(place: Place) -> None:
    """The signal comes once the ranks are at work; meanwhile nobody else gets the folder."""
    refused: list[str] = []

    def ask() -> None:
        metrics = place.folder / "signalled" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
        with pytest.raises(InputError) as caught, RunLock(metrics.parent):
            pass
        refused.append(str(caught.value))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    code, said = place.run("signalled", "--set", "train.epochs=2000")
    thread.join()
    assert code == 75
    assert "SIGTERM: stopping after this step" in said
    assert "stopped and saved at step" in said
    assert f"signalled is in use by process {os.getpid()} on" in refused[0]


def wait_until(done: Callable[[], bool], limit_s: float = 200.0) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def test_nothing_is_left_of_a_command_that_is_killed(place: Place) -> None:
    command = [sys.executable, "-m", "tilewise", "train", "r.toml", "--out", "killed"]
    command += ["--set", "train.epochs=2000"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    metrics = place.folder / "killed" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    helpers = children_of(process.pid)
    family = helpers.union(*(children_of(int(pid)) for pid in helpers))
    assert len(family) >= 4, "two ranks, and what multiprocessing starts"
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in family))
    with RunLock(metrics.parent):
        pass


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_dead_process_holds_no_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with RunLock(tmp_path):
            os.write(writer, b"x")
            time.sleep(60)
            os._exit(0)
    os.read(reader, 1)
    with pytest.raises(InputError, match=f"is in use by process {child} on"):
        RunLock(tmp_path).__enter__()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with RunLock(tmp_path):
        pass


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture
def disk(place: Place) -> Iterator[Path]:
    """The checkpoints of the run `full` on a file system of their own."""
    checkpoints = place.folder / "full" / "checkpoints"
    shutil.rmtree(checkpoints.parent, ignore_errors=True)
    checkpoints.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", checkpoints], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield checkpoints
    subprocess.run(["umount", checkpoints], check=True)


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(place: Place, disk: Path) -> None:
    code, said = place.run("full", "--set", "checkpoint.keep=99")
    assert code == 1
    line = error_line(said)
    assert "it was not saved" in line, line
    assert "No space left on device" in line
    steps = sorted(entry.name for entry in disk.iterdir())
    assert steps
    for name in steps:
        whole_state_dict(disk / name)


def test_a_read_only_disk_ends_the_run(place: Place, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    code, said = place.run("full")
    assert code == 1
    assert "checkpoint of step 2: it was not saved: rank 0: [Errno 30]" in error_line(said)


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_taken(place: Place) -> None:
    shutil.copytree(place.folder / "undisturbed", place.folder / "damaged")
    newest = place.folder / "damaged" / "checkpoints" / "step-00000010"
    (newest / "rank-1.safetensors").write_bytes(b"")
    code, said = place.run("damaged", "--resume", "latest")
    assert code == 0, said
    assert "step-00000010/rank-1.safetensors: damaged, it has 0 bytes" in said
    assert "falling back to the checkpoint before it" in said
    assert "from step 8" in said
    assert place.losses("damaged") == pytest.approx(place.losses("undisturbed"), rel=1e-12)


# -- launchers -----------------------------------------------------------------------------------


def test_ranks_of_a_launcher_end_with_one_error(place: Place) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tilewise", "train", "r.toml", "--out", "launched"]
    command += ["--set", "model.args.fault=raise", "--set", "model.args.step=5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode
    errors = [line for line in ran.stderr.splitlines() if line.startswith("tilewise: ")]
    assert len(errors) == 1, ran.stderr
    assert errors[0].startswith("tilewise: rank 1: ValueError: the cat sat on the keyboard")
    assert "ValueError" in (place.folder / "launched" / "failure.log").read_text()
