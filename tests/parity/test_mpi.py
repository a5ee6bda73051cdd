"""The MPI backend: the results of gloo, progress while local work runs, errors, no collapse."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tilewise as tw
from tilewise import Mesh
from tilewise.comm import Exchange
from tilewise.comm.pool import Pool, _mpiexec
from tilewise.errors import CommError
from tilewise.layout import Axis, Layout
from tilewise.testing.verify import Result, verify

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Four ranks: more than this machine may have cores."""
    pool = Pool(4, backend="mpi", timeout=60.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gloo() -> Iterator[Pool]:
    pool = Pool(4, timeout=60.0)
    yield pool
    pool.close()


def draw(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def collectives(mesh: Mesh) -> dict[str, list[Any]]:
    """Run what torch.distributed has, in the world's group; the tensors hold small integers."""
    rank, size = mesh.rank, mesh.size
    found: dict[str, list[Any]] = {}
    for dtype in DTYPES:
        for name in ("SUM", "MAX", "MIN"):
            x = draw(rank, 3, 5, dtype=dtype)
            dist.all_reduce(x, getattr(dist.ReduceOp, name))
            found[f"all_reduce {name} {dtype}"] = x.tolist()
    x = draw(rank, 3, 5).t()
    dist.broadcast(x, 2)
    found["broadcast"] = x.tolist()
    x = draw(rank, 4)
    dist.reduce(x, 1)
    found["reduce"] = x.tolist() if rank == 1 else []
    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, draw(rank, 4, 3)[:, 1])
    found["all_gather"] = [part.tolist() for part in parts]
    whole = torch.empty(4 * size)
    dist.all_gather_into_tensor(whole, draw(rank, 4))
    found["all_gather_into_tensor"] = whole.tolist()
    mine = torch.empty(2)
    dist.reduce_scatter(mine, list(draw(rank, size, 2)))
    found["reduce_scatter"] = mine.tolist()
    dist.reduce_scatter_tensor(mine, draw(rank, 2 * size))
    found["reduce_scatter_tensor"] = mine.tolist()
    parts = [torch.empty(4) for _ in range(size)] if rank == 0 else []
    dist.gather(draw(rank, 4), parts or None, 0)
    found["gather"] = [part.tolist() for part in parts]
    x = torch.empty(2)
    dist.scatter(x, list(draw(rank, size, 2)) if rank == 3 else None, 3)
    found["scatter"] = x.tolist()
    out = torch.empty(sum(rank + 1 + i for i in range(size)))
    sends = [rank + 1 + i for i in range(size)]
    dist.all_to_all_single(out, draw(rank, sum(sends)), sends, sends)
    found["all_to_all_single"] = out.tolist()
    said: list[Any] = [None] * size
    dist.all_gather_object(said, {"rank": rank})
    found["all_gather_object"] = said
    dist.barrier()
    return found


def test_collectives_equal_gloos(pool: Pool, gloo: Pool) -> None:
    everyone = (0, 1, 2, 3)
    ours = pool.run(everyone, collectives, (), 120)
    theirs = gloo.run(everyone, collectives, (), 120)
    assert ours == theirs


def halo(mesh: Mesh) -> list[float]:
    """Bring rows of an uneven split together with their neighbours' rows, and back."""
    rows = Layout((11, 3), [Axis(mesh.size, 0)])
    everything = Layout.replicated((11, 3), ranks=mesh.size)
    exchange = Exchange(mesh, rows, everything, layer="rows")
    x = draw(mesh.rank, *rows.local_shape(mesh.rank), dtype=torch.float64).requires_grad_()
    whole = exchange(x)
    (whole * torch.arange(33.0).view(11, 3)).sum().backward()
    assert x.grad is not None
    return [*whole.flatten().tolist(), *x.grad.flatten().tolist()]


@pytest.mark.parametrize("members", [(0, 1, 2, 3), (2, 0), (1, 3, 2)])
def test_exchanges_equal_gloos(members: tuple[int, ...], pool: Pool, gloo: Pool) -> None:
    assert pool.run(members, halo, (), 60) == gloo.run(members, halo, (), 60)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.down = nn.Conv2d(6, 7, 3, stride=2, padding=1)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        out: Tensor = self.head(torch.relu(self.down(x)).mean((2, 3)))
        return out


def check(mesh: Mesh, plan: str) -> Result:
    torch.manual_seed(0)
    model = Net().double()
    return verify(mesh, model, [torch.randn(4, 3, 9, 7, dtype=torch.float64)], plan, steps=1)


@pytest.mark.parametrize("plan", ["h2 w2", "c2 f2"])
def test_models_equal_one_device(plan: str, pool: Pool) -> None:
    result = pool.run((0, 1, 2, 3), check, (plan,), 120)[0]
    assert result.ok, result


def with_ddp(mesh: Mesh) -> tuple[list[float], list[float]]:
    """Train with DDP on the backend, and on one device."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))
    torch.manual_seed(mesh.rank)  # DDP takes rank 0's values
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))
    if mesh.rank == 0:
        model.load_state_dict(alone.state_dict())
    split = DistributedDataParallel(model)
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(7))
    for net, part in ((alone, x), (split, x[2 * mesh.rank : 2 * mesh.rank + 2])):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(part).square().mean().backward()
            optimizer.step()
    flat = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (model, alone)]
    return flat[0].tolist(), flat[1].tolist()


def test_ddp_trains_on_it(pool: Pool) -> None:
    for found, expected in pool.run((0, 1, 2, 3), with_ddp, (), 60):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def compute_meanwhile(mesh: Mesh) -> tuple[bool, bool]:
    """Post a large exchange and compute until it is complete, without ever waiting for it."""
    peer = 1 - mesh.rank
    out, into = torch.ones(2**20), torch.zeros(2**20)
    works = [
        mesh.receive(into, peer, tag=7, layer="x"),
        mesh.send(out, peer, tag=7, layer="x"),
    ]
    a = torch.randn(128, 128)
    began = time.monotonic()
    while not all(work.is_completed() for work in works) and time.monotonic() < began + 60:
        a = torch.tanh(a @ a)
    return all(work.polled for work in works), bool((into == 1).all())


def test_messages_travel_while_local_work_runs(pool: Pool) -> None:
    assert pool.run((0, 1), compute_meanwhile, (), 120) == [(True, True)] * 2


def small_messages(mesh: Mesh) -> list[bool]:
    """Ask whether a small message came, without ever waiting; then drop what is under way."""
    peer = 1 - mesh.rank
    into = [torch.zeros(8), torch.zeros(8)]
    works = [
        mesh.receive(into[0], peer, tag=8, layer="x"),
        mesh.send(torch.ones(8), peer, tag=8, layer="x"),
    ]
    began = time.monotonic()
    while not all(work.is_completed() for work in works) and time.monotonic() < began + 20:
        time.sleep(1e-3)
    came = all(work.is_completed() for work in works)
    mesh.receive(into[1], peer, tag=9, layer="x")
    mesh.agree("nobody holds the request")
    mesh.send(torch.ones(8), peer, tag=9, layer="x")
    while not into[1].all() and time.monotonic() < began + 40:
        time.sleep(1e-3)
    return [came, bool((into[0] == 1).all()), bool((into[1] == 1).all())]


def test_small_messages_come_without_waiting_for_them(pool: Pool) -> None:
    assert pool.run((0, 1), small_messages, (), 120) == [[True] * 3] * 2


def silent(mesh: Mesh) -> str:
    """Wait for a rank that does not send."""
    short = Mesh(mesh.world_ranks, timeout=timedelta(seconds=1))
    text = ""
    if mesh.rank == 0:
        exchange = Exchange(
            short, Layout((4,), [Axis(2, 0)]), Layout.replicated((4,), ranks=2), layer="conv1"
        )
        with pytest.raises(CommError) as caught:
            exchange.start(torch.zeros(2)).finish()
        text = str(caught.value)
    else:
        short.group()
    mesh.agree("the end")
    return text


def test_a_silent_peer_is_named(pool: Pool) -> None:
    said = pool.run((2, 3), silent, (), 60)[0]
    assert "receive of conv1: no answer from rank 1 on rank 0" in said


ALONE = """
import torch
import torch.distributed as dist
from tilewise.comm.launch import join

join("mpi")
if dist.get_rank() == 1:
    raise ValueError("on one rank alone")
dist.recv(torch.zeros(1), 1)
"""


def run_apart(script: str, ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [_mpiexec(), "-n", str(ranks), sys.executable, "script.py"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )  # fmt: skip


def test_an_error_on_one_rank_of_a_script_ends_all(tmp_path: Path) -> None:
    ran = run_apart(ALONE, 2, tmp_path)
    assert ran.returncode
    assert "ValueError: on one rank alone" in ran.stderr


POLLED = """
import atexit
import torch
import torch.distributed as dist
from mpi4py import MPI
from tilewise.comm.mpi_request import Request, poller

atexit.register(lambda: print("polled", poller.thread.is_alive()))  # the last one to be called
word = torch.zeros(1).numpy()
poller.watch(Request(MPI.COMM_SELF.Irecv(word, 0), 60.0, word))
print("polled", poller.thread.is_alive())
MPI.COMM_SELF.Send(word.copy(), 0)
"""


def test_the_polling_thread_ends_before_the_program(tmp_path: Path) -> None:
    ran = run_apart(POLLED, 1, tmp_path)
    assert (ran.returncode, ran.stdout.split()) == (0, ["polled", "True", "polled", "False"])


def too_long(mesh: Mesh) -> tuple[str, bool]:
    """Send more than the receiver has room for, while a thread polls; returns what came of it."""
    from tilewise.comm.mpi_request import poller

    said = ""
    if mesh.rank == 0:
        dist.isend(torch.ones(100_000), 1, tag=5).wait()
    elif mesh.rank == 1:
        work = dist.irecv(torch.zeros(50_000), 0, tag=5)
        while not work.done:  # the poller finds it
            time.sleep(0.001)
        try:
            work.wait()
        except RuntimeError as error:
            said = str(error)
    x = torch.ones(100_000)
    dist.all_reduce(x, async_op=True).wait()
    return said, poller.thread is not None and poller.thread.is_alive() and bool((x == 4).all())


def test_what_the_polling_thread_meets_is_raised_where_it_is_waited_for(pool: Pool) -> None:
    found = pool.run((0, 1, 2, 3), too_long, (), 120)
    assert "trunc" in found[1][0].lower()
    assert all(alive for _, alive in found)


def futures(mesh: Mesh) -> tuple[bool, float]:
    """Ask for the future of a sum that the last rank joins when all others have theirs."""
    x, word, last = torch.ones(10), torch.zeros(1), mesh.size - 1
    if mesh.rank == last:
        for rank in range(last):
            dist.recv(word, rank)
    future = dist.all_reduce(x, async_op=True).get_future()
    early = not future.done()
    if mesh.rank != last:
        dist.send(word, last)
    future.wait()
    return early, float(x.sum())


def test_a_future_is_there_before_its_result(pool: Pool) -> None:
    found = pool.run((0, 1, 2, 3), futures, (), 120)
    assert all(early for early, _ in found[:-1])
    assert [total for _, total in found] == [40.0] * 4


LEAVING = """
import sys
import torch
import torch.distributed as dist
from tilewise.cli import app
from tilewise.comm.launch import join
from tilewise.errors import InputError

join("mpi")
who = sys.argv.pop()

def run():
    if who == "all" or dist.get_rank() == 1:
        raise InputError("cannot go on")
    dist.recv(torch.zeros(1), 1)

app.app = run
app.main()
"""


@pytest.mark.parametrize("who", ["one", "all"])
def test_a_command_that_fails_on_one_rank_ends_on_all(tmp_path: Path, who: str) -> None:
    (tmp_path / "script.py").write_text(LEAVING)
    ran = subprocess.run(
        [_mpiexec(), "-n", "2", sys.executable, "script.py", who],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.count("tilewise: cannot go on") == (2 if who == "all" else 1)


def test_without_a_launcher_it_says_what_is_missing() -> None:
    import tilewise.comm.mpi as mpi

    class Store:
        def set(self, key: str, value: str) -> None: ...
        def wait(self, keys: list[str], timeout: timedelta) -> None: ...
        def get(self, key: str) -> str:
            return "0"

    class Options:
        store, group_rank, group_size = Store(), 0, 2
        timeout, group_id = timedelta(seconds=1), "g"

    with pytest.raises(RuntimeError, match="2 ranks here are 1 MPI processes"):
        mpi._create(Options())
    assert tw.Mesh().size == 1
