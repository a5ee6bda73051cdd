"""Checkpoints: any plan, world and backend; whole or not at all; never a pickle."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

import tilewise as tw
from tilewise import Mesh, ParallelModel
from tilewise.comm.pool import Pool
from tilewise.errors import CheckpointError
from tilewise.graph import Graph
from tilewise.testing import ranks
from tilewise.train import storage
from tilewise.train.checkpoint import Checkpoints, whole_state_dict
from tilewise.train.manifest import MANIFEST, Manifest
from tilewise.train.payload import Payload, write_tensors
from twins import Small, build, captured, classes, draw, split
from worlds import meet

SHAPE = (4, 3, 9, 8)


class Dropping(Small):
    """Small, whose strided layer has 10 filters, with dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.95)),
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
}


def graph() -> Graph:
    return captured(Dropping, SHAPE, F.cross_entropy)


def start(mesh: Mesh, graph: Graph, plan: str, kind: str, seed: int = 3) -> tuple[Any, Any]:
    model = build(Dropping)
    if seed != 3:
        torch.manual_seed(seed)
        model = Dropping().double()
    parallel = split(mesh, model, graph, plan)
    return parallel, OPTIMIZERS[kind](parallel.parameters())


def train(model: ParallelModel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model.loss(*model.scatter(draw(*SHAPE, seed=step), classes(5, 4, seed=step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def go_on(
    mesh: Mesh, graph: Graph, plan: str, kind: str, folder: Path, steps: range, save: bool
) -> list[float]:
    """Load the latest checkpoint, if there is one, into other values, train, and save."""
    checkpoints = Checkpoints(folder, keep=2, mesh=mesh)
    latest = checkpoints.latest()
    model, optimizer = start(mesh, graph, plan, kind, 3 if latest is None else 11)
    if latest is not None:
        extra = checkpoints.load(latest, model=model, optimizer=optimizer)
        assert extra == {"step": steps.start, "loader": {"epoch": 1}, "rate": 0.1}
    losses = train(model, optimizer, steps)
    if save:
        extra = {"step": steps.stop, "loader": {"epoch": 1}, "rate": 0.1}
        checkpoints.save(steps.stop, model=model, optimizer=optimizer, extra=extra)
        checkpoints.wait()
    return losses


def saved(folder: Path, plan: str = "f2", world: int = 2, *, upto: int = 2) -> Path:
    """Save a checkpoint, and return its folder."""
    ranks(world, go_on, graph(), plan, "Adam", folder, range(upto), True)
    return folder / f"step-{upto:08d}"


@pytest.fixture(scope="module")
def mpi() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        pool = Pool(3, backend="mpi", timeout=60.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", [*OPTIMIZERS])
def test_training_goes_on_elsewhere_as_if_never_interrupted(
    kind: str, tmp_path: Path, mpi: Pool
) -> None:
    """10 filters over two ranks, three, three MPI processes, one device, and four by channel."""
    folder = tmp_path / "a"
    whole = ranks(1, go_on, graph(), "1", kind, tmp_path / "b", range(10), False)[0]
    found = ranks(2, go_on, graph(), "f2", kind, folder, range(2), True)[0]
    found += ranks(3, go_on, graph(), "f3", kind, folder, range(2, 4), True)[0]
    by_mpi = (graph(), "c3", kind, folder, range(4, 6), True)
    found += mpi.run((0, 1, 2), go_on, by_mpi, 300.0)[0]
    found += ranks(1, go_on, graph(), "1", kind, folder, range(6, 8), True)[0]
    found += ranks(4, go_on, graph(), "n2 c2", kind, folder, range(8, 10), True)[0]
    assert found == pytest.approx(whole, rel=1e-12)
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-00000008", "step-00000010"]


def together(mesh: Mesh, graph: Graph, folder: Path) -> dict[str, torch.Tensor]:
    checkpoints = Checkpoints(folder, mesh=mesh)
    model, _ = start(mesh, graph, "c2", "Adam", 11)
    checkpoints.load(folder / "step-00000002", model=model)
    return tw.full_state_dict(model)


def test_one_process_reads_the_whole_state(tmp_path: Path) -> None:
    path = saved(tmp_path)
    state, extra = whole_state_dict(path)
    assert extra["step"] == 2
    expected = ranks(2, together, graph(), tmp_path)[1]
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    plain = Dropping().double()
    plain.load_state_dict(state)
    manifest = Manifest.read(path)
    assert manifest.plan == json.loads(tw.Plan.uniform(graph(), "f2").to_json())
    sizes = {box.sizes for box in manifest.tensors["model/down.weight"].boxes}
    assert sizes == {(5, 6, 3, 3)}, "each rank saves its own filters"


# -- saving --------------------------------------------------------------------------------------


def snapshots(mesh: Mesh, graph: Graph, folder: Path) -> None:
    """Steps after a save change nothing of it."""
    model, optimizer = start(mesh, graph, "f2", "Adam")
    checkpoints = Checkpoints(folder, keep=2, mesh=mesh)
    for step in (2, 4, 6):
        train(model, optimizer, range(step - 2, step))
        before = {name: t.clone() for name, t in tw.full_state_dict(model).items()}
        checkpoints.save(step, model=model, optimizer=optimizer)
    train(model, optimizer, range(6, 8))
    latest = checkpoints.latest()
    assert latest == folder / "step-00000006"
    with pytest.raises(CheckpointError, match="`extra` must be JSON"):
        checkpoints.save(8, model=model, extra={"x": object()})
    checkpoints.load(latest, model=model, optimizer=optimizer)
    for name, tensor in tw.full_state_dict(model).items():
        assert torch.equal(tensor, before[name]), name
    checkpoints.save(6, model=model, optimizer=optimizer)  # beside the first, until it is whole
    assert checkpoints.latest() == folder / "step-00000006.1"


def test_a_save_is_a_snapshot_and_old_ones_go(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.partial").mkdir()
    ranks(2, snapshots, graph(), tmp_path)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["step-00000004", "step-00000006.1"]


class Dying:
    """Rank 1 is killed half way through its file."""

    __name__ = "dying"

    def __init__(self, folder: Path, graph: Graph) -> None:
        self.folder, self.graph = folder, graph

    def __call__(self, mesh: Mesh) -> None:
        model, optimizer = start(mesh, self.graph, "f2", "Adam")
        checkpoints = Checkpoints(self.folder, mesh=mesh)
        checkpoints.save(1, model=model, optimizer=optimizer)
        checkpoints.wait()
        if mesh.rank == 1:
            storage.write_tensors = die_writing
        checkpoints.save(2, model=model, optimizer=optimizer)
        checkpoints.wait()


def die_writing(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    name, tensor = next(iter(tensors.items()))
    write_tensors(path, {name: tensor})
    os.kill(os.getpid(), signal.SIGKILL)
    return 0, 0


def test_a_crash_while_writing_leaves_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    said = meet([Dying(folder, graph())], tmp_path)["dying"]
    assert said.startswith("CheckpointError: checkpoint of step 2: it was not saved: ")
    assert [entry.name for entry in sorted(folder.iterdir())][-1] == "step-00000001"
    whole_state_dict(folder / "step-00000001")


def overflow(mesh: Mesh, graph: Graph, folder: Path, limit: int | None) -> list[str]:
    """Save, then save again where rank 1 cannot: all ranks say the same."""
    model, optimizer = start(mesh, graph, "f2", "Adam")
    checkpoints = Checkpoints(folder, mesh=mesh)
    said = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for step in (1, 2):
            if limit is not None and step == 2 and mesh.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            checkpoints.save(step, model=model, optimizer=optimizer)
            try:
                checkpoints.wait()
                said.append("")
            except CheckpointError as error:
                said.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoints.latest() == (None if said[0] else folder / "step-00000001")
    return said


def test_a_file_that_cannot_be_written_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = ranks(2, overflow, graph(), tmp_path, 4096)
    assert first == second
    text = "checkpoint of step 2: it was not saved: rank 1: [Errno 27] File too large"
    assert first == ["", text]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB: room for one checkpoint."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_leaves_the_one_before(disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes(30000))
    first, second = ranks(2, overflow, graph(), disk / "run", None)
    assert first == second
    assert first[0] == ""
    assert "it was not saved" in first[1]
    assert "No space left on device" in first[1]
    assert [entry.name for entry in (disk / "run").iterdir()] == ["step-00000001"]


def test_a_read_only_folder_is_one_error_on_all_ranks(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    first, second = ranks(2, overflow, graph(), disk / "run", None)
    assert first == second
    assert "rank 0: [Errno 30] Read-only file system" in first[0]


# -- what is not loaded --------------------------------------------------------------------------


def cut_short(folder: Path) -> None:
    path = folder / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip(folder: Path) -> None:
    path = folder / "rank-0.safetensors"
    found = bytearray(path.read_bytes())
    found[-20] ^= 1
    path.write_bytes(found)


def remove_file(folder: Path) -> None:
    (folder / "rank-1.safetensors").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def edit_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"epoch": 1', '"epoch": 2'))


def empty_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("")


DAMAGES: dict[Callable[[Path], None], str] = {
    cut_short: "damaged, it has",
    flip: "its checksum is wrong",
    remove_file: "rank-1.safetensors is missing; it was half deleted",
    remove_manifest: "there is no manifest.json",
    edit_manifest: "its checksum is wrong",
    empty_manifest: "damaged or no manifest",
}


def find(mesh: Mesh, folder: Path) -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return Checkpoints(folder, mesh=mesh, say=said.append).latest(), said


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("pair")
    saved(folder, upto=1)
    shutil.copytree(folder / "step-00000001", folder / "step-00000002")
    return folder


def test_where_all_are_damaged_nothing_begins_anew(pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(pair, folder)
    for step in folder.iterdir():
        cut_short(step)
    with pytest.raises(CheckpointError, match="no checkpoint in it is whole; move it elsewhere"):
        Checkpoints(folder, say=[].append).latest()


def test_a_run_that_goes_on_from_an_earlier_step_leaves_the_later_ones(
    pair: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(pair, folder)
    said: list[str] = []
    checkpoints = Checkpoints(folder, say=said.append)
    checkpoints.abandon_after(folder / "step-00000001")
    assert checkpoints.latest() == folder / "step-00000001"
    assert (folder / "abandoned-step-00000002").is_dir()
    assert "given up" in said[0]


@pytest.mark.parametrize("damage", [*DAMAGES])
def test_a_damaged_checkpoint_is_told_of_and_skipped(
    damage: Callable[[Path], None], pair: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(pair, folder)
    damage(folder / "step-00000002")
    found, others = ranks(2, find, folder)
    assert found[0] == others[0] == folder / "step-00000001"
    assert others[1] == []
    (said,) = found[1]
    assert "step-00000002" in said
    assert DAMAGES[damage] in said
    assert said.endswith("; falling back to the checkpoint before it")
    with pytest.raises(CheckpointError, match=re.escape(DAMAGES[damage])):
        whole_state_dict(folder / "step-00000002")


class Evil:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def as_manifest(folder: Path, evil: bytes) -> None:
    (folder / MANIFEST).write_bytes(evil)


def beside(folder: Path, evil: bytes) -> None:
    (folder / "model.pt").write_bytes(evil)


def as_payload(folder: Path, evil: bytes) -> None:
    """Whoever can write the file can also write its checksum."""
    (folder / "rank-0.safetensors").write_bytes(evil)
    sign(folder, lambda body: body["files"].update({"rank-0.safetensors": facts(evil)}))


def as_header(folder: Path, evil: bytes) -> None:
    as_payload(folder, struct.pack("<Q", len(evil)) + evil)


def as_named_file(folder: Path, evil: bytes) -> None:
    (folder / "model.pt").write_bytes(evil)
    sign(folder, lambda body: body["files"].update({"model.pt": facts(evil)}))


def as_torchs_own(folder: Path, evil: bytes) -> None:
    """What torch's own reader unpickles."""
    (folder / MANIFEST).unlink()
    (folder / ".metadata").write_bytes(evil)


def facts(content: bytes) -> list[int]:
    return [len(content), zlib.crc32(content)]


def sign(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    body = json.loads((folder / MANIFEST).read_text())["body"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    found = {"checksum": zlib.crc32(text.encode()), "body": body}
    (folder / MANIFEST).write_text(json.dumps(found))


def load_anything(mesh: Mesh, graph: Graph, folder: Path) -> str:
    model, optimizer = start(mesh, graph, "f2", "Adam")
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder.parent, mesh=mesh).load(folder, model=model, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(before[name], parameter)
    return str(caught.value)


PICKLES = {
    as_manifest: "damaged or no manifest",
    beside: "holds 'model.pt', which its manifest does not name",
    as_payload: "this is not a file of tensors",
    as_header: "this is not a file of tensors",
    as_named_file: "'model.pt' is not a name of a file of tensors",
    as_torchs_own: "which is pickled and may run any code; it is not loaded",
}


@pytest.mark.parametrize("plant", [*PICKLES])
def test_a_pickle_is_refused_and_does_not_run(
    plant: Callable[[Path, bytes], None], pair: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step-00000001"
    shutil.copytree(pair / "step-00000001", folder)
    mark = tmp_path / "it ran"
    plant(folder, pickle.dumps(Evil(mark)))
    found, other = ranks(2, load_anything, graph(), folder)
    assert found == other
    assert PICKLES[plant] in found
    assert not mark.exists()
    if plant is as_torchs_own:
        with pytest.raises(BaseException, match=r"metadata|state_dict"):
            dcp.load({"x": torch.zeros(1)}, checkpoint_id=folder, no_dist=True)
        assert mark.exists(), "torch's own reader runs it: the pickle is a live one"


class Wider(Small):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.head = nn.Conv2d(6, 12, 3, stride=2), nn.Linear(12, 5)


class Deeper(Small):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Conv2d(3, 3, 1)


def misfits(mesh: Mesh, folder: Path) -> list[str]:
    said = []
    models: list[nn.Module] = [Wider().double(), Deeper().double(), Small().float()]
    for plain in models:
        torch.manual_seed(0)
        plain.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        dtype = next(plain.parameters()).dtype
        model = tw.parallelize(plain, draw(*SHAPE, dtype=dtype), "f2", mesh=mesh)
        with pytest.raises(CheckpointError) as caught:
            Checkpoints(folder.parent, mesh=mesh).load(folder, model=model)
        said.append(str(caught.value))
    model, _ = start(mesh, captured(Dropping, SHAPE, F.cross_entropy), "f2", "Adam")
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder.parent, mesh=mesh).load(folder, model=model, optimizer=optimizer)
    return [*said, str(caught.value)]


def test_a_checkpoint_of_another_model_is_refused(pair: Path) -> None:
    wider, deeper, single, optimizer = ranks(2, misfits, pair / "step-00000001")[0]
    assert "its down.weight has shape (10, 6, 3, 3), here it is (12, 6, 3, 3)" in wider
    assert "it has no more.weight, which the model has; it is of another model" in deeper
    assert "its stem.0.weight is torch.float64, here it is torch.float32" in single
    assert "it was saved with another optimizer" in optimizer


# -- files ---------------------------------------------------------------------------------------


def test_tensors_come_back_from_a_file(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 6).double().t(),
        "none": torch.zeros(0, 3),
    }
    path = tmp_path / "x.safetensors"
    size, _ = write_tensors(path, tensors, {"made": "here"})
    assert path.stat().st_size == size
    payload = Payload(path)
    assert payload.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(payload.tensor(name), tensor), name
        assert payload.tensor(name).dtype == tensor.dtype
    with pytest.raises(CheckpointError, match="complex128 cannot be saved"):
        write_tensors(tmp_path / "y", {"z": torch.zeros(1, dtype=torch.complex128)})
