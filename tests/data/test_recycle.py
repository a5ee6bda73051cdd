"""Memory is used again when nobody holds the slab that was in it, and never earlier."""

from __future__ import annotations

import numpy as np
import torch

import data_files
from tilewise import data as td
from tilewise.comm import Mesh
from tilewise.data.recycle import Recycler
from tilewise.layout import Block, Cover, Layout
from tilewise.testing import ranks


def test_memory_comes_back_with_the_last_view() -> None:
    memory = Recycler(64, keep=2)
    first = memory.take((4, 2), torch.float64)
    where = first.data_ptr()
    row, weight = first[1].fill_(3.0), torch.ones(2, dtype=torch.float64, requires_grad=True)
    kept = (weight * row).sum()
    array = first.numpy()
    del first, row
    assert memory.take((8,), torch.float64).data_ptr() != where
    del array
    other = memory.take((8,), torch.float64).zero_()
    assert other.data_ptr() != where
    kept.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
    del kept
    again = [memory.take((3, 5), dtype) for dtype in (torch.bfloat16, torch.bool)]
    assert where in [tensor.data_ptr() for tensor in again]
    assert [tuple(tensor.shape) for tensor in again] == [(3, 5)] * 2
    assert memory.take((0, 3), torch.float32).shape == (0, 3)


def test_no_more_than_so_many_blocks_wait() -> None:
    memory = Recycler(8, keep=2)
    held = [memory.take((8,), torch.uint8) for _ in range(5)]
    del held
    assert len(memory._free) == 2


def test_batches_that_are_kept_stay_as_they_are() -> None:
    """And what lies past the edge is zero again after the model wrote into a slab."""
    samples = [np.full((4, 4), k + 1.0) for k in range(6)]
    cover = Cover.on(Layout((1, 4, 4)), {1: lambda a, b: Block.clipped(a - 1, b + 1, 4)})
    loader = td.loader(td.WholeSamples(samples), cover, shuffle=False, store_bytes=1000)
    for _ in range(3):
        kept = list(loader)
        for number, (slab,) in enumerate(kept):
            assert torch.equal(slab[0, 1:5], torch.full((4, 4), number + 1.0).double())
            assert not slab[0, 0].any()
            assert not slab[0, 5].any()
            slab.fill_(-1)
        del kept, slab
    loader.close()


def smaller_batches(mesh: Mesh) -> list[list[float]]:
    cut = Layout.of((8,), "n", "n5", ranks=mesh.size)
    loader = td.loader(data_files.numbers(15), cut, mesh=mesh, shuffle=False)
    return [batch[0].tolist() for batch in loader]


def test_a_smaller_batch_may_have_more_rows_on_a_rank() -> None:
    first, last = zip(*ranks(5, smaller_batches))
    assert [len(rows) for rows in first] == [1, 2, 1, 2, 2]
    assert [len(rows) for rows in last] == [1, 1, 2, 1, 2]
    assert [value for rows in first + last for value in rows] == list(range(15))
