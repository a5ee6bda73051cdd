"""The order of samples, resuming in the middle of an epoch, and ranks that leave it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import data_files
from tilewise import data as td
from tilewise.comm import Mesh
from tilewise.errors import CommError, DataError
from tilewise.layout import Layout
from tilewise.testing import RanksError, ranks


def orders(
    mesh: Mesh, batch: int, epochs: int, options: dict[str, Any]
) -> list[list[tuple[int, ...]]]:
    cut = Layout.of((batch,), "n", f"n{mesh.size}", ranks=mesh.size)
    loader = td.loader(data_files.numbers(23), cut, mesh=mesh, **options)
    return [[batch.samples for batch in loader] for _ in range(epochs)]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first = orders(Mesh.alone(), 4, 3, {"seed": 1})
    assert ranks(4, orders, 4, 3, {"seed": 1, "prefetch": 0, "store_bytes": 50}) == [first] * 4
    assert len(first[0]) == 6
    assert [len(samples) for samples in first[0]] == [4] * 5 + [3]
    assert sorted(sum(first[0], ())) == list(range(23))
    assert first[0] != first[1] != first[2]
    assert orders(Mesh.alone(), 4, 1, {"seed": 2})[0] != first[0]
    plain = orders(Mesh.alone(), 4, 2, {"shuffle": False, "drop_last": True})
    assert plain == [[tuple(range(k, k + 4)) for k in range(0, 20, 4)]] * 2


def partly(
    mesh: Mesh, state: dict[str, Any] | None, take: int | None, options: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the numbers in some batches (to the end of the epoch after next), and the state."""
    cut = Layout.of((4,), "n", f"n{mesh.size}", ranks=mesh.size)
    loader = td.loader(data_files.numbers(), cut, mesh=mesh, seed=3, **options)
    if state is not None:
        loader.load_state_dict(state)
    found: list[Any] = []
    while loader.epoch < 3:
        for batch in loader:
            found.append((batch.samples, batch[0].tolist()))
            if take is not None and len(found) == take:
                return found, loader.state_dict()
    return found, loader.state_dict()


@pytest.mark.parametrize("store", [None, 1000, 12])
@pytest.mark.parametrize("take", [1, 2, 3, 5])
def test_resume_on_another_number_of_ranks(take: int, store: int | None) -> None:
    options = {"store_bytes": store}
    whole, _ = partly(Mesh.alone(), None, None, {})
    assert len(whole) == 6
    before = ranks(4, partly, None, take, options)
    state = before[0][1]
    assert all(found[1] == state for found in before)
    after = ranks(3, partly, state, None, options)
    for results, expected in ((before, whole[:take]), (after, whole[take:])):
        for number, (samples, values) in enumerate(expected):
            assert all(found[0][number][0] == samples for found in results)
            assert [v for found in results for v in found[0][number][1]] == values
        assert all(len(found[0]) == len(expected) for found in results)


def test_state_of_another_set_is_refused() -> None:
    loader = td.loader(data_files.numbers(), Layout((4,)))
    state = loader.state_dict()
    with pytest.raises(DataError, match="the state has seed 1, the loader 0"):
        loader.load_state_dict({**state, "seed": 1})
    with pytest.raises(DataError, match="not the state of a loader"):
        loader.load_state_dict({"epoch": 1})


def test_an_epoch_left_early_starts_again() -> None:
    for found in ranks(2, leave_and_start_again):
        assert found == [True, True]


def leave_and_start_again(mesh: Mesh) -> list[bool]:
    cut = Layout.of((2,), "n", f"n{mesh.size}", ranks=mesh.size)
    loader = td.loader(data_files.numbers(), cut, mesh=mesh, store_bytes=100)
    whole = [batch.samples for batch in loader]
    loader.set_epoch(0)
    same = []
    for take in (1, 3):
        for number, _ in enumerate(loader):
            if number == take:
                break
        assert loader.state_dict()["batches"] == take + 1
        same.append([batch.samples for batch in loader] == whole)
        loader.set_epoch(0)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]
    return same


def leave_alone(mesh: Mesh) -> str:
    cut = Layout.of((2,), "n", f"n{mesh.size}", ranks=mesh.size)
    loader = td.loader(data_files.numbers(), cut, mesh=mesh, prefetch=1)
    taken = 0
    try:
        for _ in loader:
            taken += 1
            if mesh.rank == 0 and taken == 2:
                break
    except CommError as error:
        return str(error)
    return ""


def test_a_rank_that_leaves_alone_is_named() -> None:
    first, second = ranks(2, leave_alone)
    assert first == ""
    assert "epoch 1, batch" in second
    assert "1 of 2 ranks left the epoch" in second


def other_epoch(mesh: Mesh) -> None:
    loader = td.loader(data_files.numbers(), Layout.replicated((2,), ranks=mesh.size), mesh=mesh)
    loader.set_epoch(mesh.rank)
    iter(loader)


def test_ranks_in_different_epochs_are_told() -> None:
    with pytest.raises(RanksError, match=r"MismatchError: data: ranks disagree.*epoch"):
        ranks(2, other_epoch)
