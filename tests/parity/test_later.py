"""Gradients of weights are found while the sums of a batch norm travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixed_ways import fixed_ways
from tilewise import Mesh, parallelize
from tilewise.comm.exchange import Exchange, Pending
from tilewise.ops.conv_local import LocalConv, Way, Ways
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close
from twins import assert_grads

PATCHED = Way(patch=True, last=False)


class Net(nn.Module):
    """`first`, a norm, then `second` one or two times."""

    def __init__(self, *, bias: bool = False, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=bias)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.first(x)))
        for _ in range(self.times):
            x = self.second(x)
        return x


@contextmanager
def noted() -> Iterator[list[str]]:
    """Note the order of the norm's message back and of the gradients of weights."""
    found: list[str] = []
    start, finish, weight = Exchange.start_adjoint, Pending.finish, LocalConv.weight

    def starts(self: Exchange, grad: Any) -> Pending:
        if self.layer == "norm":
            found.append("start")
        return start(self, grad)

    def finishes(self: Pending) -> Tensor:
        if self.way.layer == "norm (backward)":
            found.append("finish")
        return finish(self)

    def weighs(self: LocalConv, way: Way, dy: Tensor, x: Tensor, *rest: Any, **kwargs: Any) -> Any:
        found.append("second" if x.shape[1] == 4 else "first")
        return weight(self, way, dy, x, *rest, **kwargs)

    with (
        mock.patch.object(Exchange, "start_adjoint", starts),
        mock.patch.object(Pending, "finish", finishes),
        mock.patch.object(LocalConv, "weight", weighs),
    ):
        yield found


BEHIND = ["start", "second", "finish", "first"]
BEFORE = ["second", "start", "finish", "first"]


def check(mesh: Mesh, plan: str, options: dict[str, Any], order: list[str]) -> None:
    torch.manual_seed(0)
    serial, other = Net(**options).double(), Net(**options).double()
    other.load_state_dict(serial.state_dict())
    x = torch.randn(4, 2, 9, 5, dtype=torch.float64)
    expected = serial(x).square().mean()
    # the last format is one that torch's own node is not taken for
    with fixed_ways(Ways(PATCHED, PATCHED, PATCHED, last=True)):
        model = parallelize(other, x, plan, mesh=mesh)
        loss = model.mean(model(model.scatter(x)).square())
        for _ in range(2):  # a graph that is kept puts off anew
            expected.backward(retain_graph=True)
            with noted() as found:
                loss.backward(retain_graph=True)
            assert found == order
    assert_grads(model, serial)
    second = model.second.weight
    with noted() as found:
        (alone,) = torch.autograd.grad(loss, second)
    assert "second" in found
    assert_close(alone, torch.autograd.grad(expected, serial.second.weight)[0], "second")


@pytest.mark.parametrize("plan", ["n2", "h2"])
@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, BEHIND),
        ({"bias": True}, BEFORE),  # found together with the bias'
        ({"times": 2}, ["second", *BEFORE]),  # autograd adds them up
    ],
)
def test_the_gradient_of_a_weight_is_found_behind_a_message(
    plan: str, options: dict[str, Any], order: list[str]
) -> None:
    ranks(2, check, plan, options, order)


def anomaly(mesh: Mesh) -> None:
    """What stands for a gradient till it is found has no NaN, which anomaly mode looks for."""
    x = torch.randn(4, 2, 9, 5, dtype=torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with fixed_ways(Ways(PATCHED, PATCHED, PATCHED, last=True)):
            model = parallelize(Net().double(), x, "n2", mesh=mesh)
            with noted() as found, torch.autograd.detect_anomaly(check_nan=True):
                model.mean(model(model.scatter(x)).square()).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == BEHIND


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_what_stands_for_a_gradient_is_a_number() -> None:
    ranks(2, anomaly)


def leave_out(mesh: Mesh) -> None:
    """Nothing is put off that nobody would read in this backward."""
    x = torch.randn(4, 2, 9, 5, dtype=torch.float64, requires_grad=True)
    with fixed_ways(Ways(PATCHED, PATCHED, PATCHED, last=True)):
        model = parallelize(Net().double(), x, "n2", mesh=mesh)
        slab = model.scatter(x).detach().requires_grad_()
        loss = model.mean(model(slab).square())
        with noted() as found:
            torch.autograd.grad(loss, slab, retain_graph=True)
        assert found == BEFORE
        with noted() as found:
            loss.backward()
        assert found == BEHIND


def test_nothing_is_put_off_that_nobody_reads() -> None:
    ranks(2, leave_out)
