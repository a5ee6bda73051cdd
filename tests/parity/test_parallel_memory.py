"""No rank holds a whole activation that its plan splits, and recomputed layers hold nothing."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tilewise import Mesh, Plan
from tilewise.errors import MismatchError, PlanError
from tilewise.graph import Graph
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close
from twins import assert_grads, assert_same, assert_state, build, captured, draw, split, whole_grads

SHAPE = (1, 2, 16, 12, 12)


class UNet(nn.Module):
    """Two levels, a skip connection, and an output for every voxel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU())
        self.up = nn.ConvTranspose3d(8, 8, 2, stride=2)
        self.join = nn.Sequential(nn.Conv3d(16, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(True))
        self.last = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        x = self.up(self.deep(F.max_pool3d(skip, 2)))
        out: Tensor = self.last(self.join(torch.cat([skip, x], 1)))
        return out


class Largest(TorchDispatchMode):
    """Note the largest tensor that any call returns, and the call."""

    elements = 0
    call = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                if size > self.elements:
                    self.elements, self.call = size, f"{func} {tuple(tensor.shape)}"
        return out


class Saved(saved_tensors_hooks):
    """Count what autograd keeps for backward, each storage once, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                self.sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
            return tensor

        super().__init__(note, lambda tensor: tensor)

    def __enter__(self) -> Saved:
        super().__enter__()
        return self


# 16 channels of the joined tensor at full resolution: the largest activation
WHOLE = 16 * prod(SHAPE[2:])


def measure(mesh: Mesh, graph: Graph, plan: str) -> tuple[int, str, list[int]]:
    model = split(mesh, build(UNet), graph, plan)
    slab = draw(*model.input_layouts[0].local_shape(mesh.rank))
    with Largest() as largest:
        with Saved(model) as saved:
            y = model(slab)
        y.square().mean().backward()
    return largest.elements, largest.call, list(saved.sizes.values())


def test_a_whole_activation_is_as_large_as_we_think() -> None:
    elements, _, saved = ranks(1, measure, captured(UNet, SHAPE), "1")[0]
    assert elements == max(saved) == WHOLE


@pytest.mark.parametrize(
    ("plan", "world", "most"),
    [
        ("d2", 2, WHOLE * (8 + 2) // 16),
        ("h2", 2, WHOLE * (6 + 2) // 12),
        ("d2 h2", 4, WHOLE * (8 + 2) * (6 + 2) // (16 * 12)),
        ("d4", 4, WHOLE * (4 + 2) // 16),
    ],
)
def test_spatial_plans_hold_slabs_and_halos_only(plan: str, world: int, most: int) -> None:
    for elements, call, _ in ranks(world, measure, captured(UNet, SHAPE), plan):
        assert elements <= most, call


def test_channel_plans_keep_parts_only() -> None:
    """A layer's own partial sum is whole while it is finished; nothing whole outlives it."""
    _, _, whole = ranks(1, measure, captured(UNet, SHAPE), "1")[0]
    for elements, call, saved in ranks(2, measure, captured(UNet, SHAPE), "c2"):
        assert elements <= WHOLE // 2, call
        assert max(saved) <= WHOLE // 2
        assert sum(saved) < 0.55 * sum(whole)


def test_filter_plans_hold_at_most_the_gathered_input_of_a_layer() -> None:
    for elements, call, _ in ranks(2, measure, captured(UNet, SHAPE), "f2"):
        assert elements <= WHOLE, call


# -- recomputed layers ----------------------------------------------------------------------------


class Blocks(nn.Module):
    """Two blocks with everything that must not happen twice: norms, dropout, buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name, channels in (("one", 3), ("two", 6)):
            block = nn.Sequential(
                nn.Conv2d(channels, 6, 3, padding=1),
                nn.BatchNorm2d(6, momentum=None),
                nn.ReLU(True),
                nn.Dropout(0.3),
                nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 6, 3, padding=1)),
                nn.GELU(),
            )
            setattr(self, name, block)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.one(x)
        y = self.two(x)
        return self.head(y), x.mean((2, 3))


def loss_of(outputs: Any) -> Tensor:
    total: Tensor = outputs[0].square().sum() + outputs[1].sum()
    return total


def recompute(mesh: Mesh, graph: Graph, plan: str, patterns: tuple[str, ...]) -> None:
    """Compare with the same plan where everything is kept."""
    kept = split(mesh, build(Blocks), graph, Plan.uniform(graph, plan))
    model = split(mesh, build(Blocks), graph, Plan.uniform(graph, plan, recompute=patterns))
    bytes_kept: list[int] = []
    for step in range(2):
        x = draw(4, 3, 9, 8, seed=step)
        for one in (kept, model):
            slab = one.scatter(x).requires_grad_()
            with Saved(one) as saved:
                outputs = one(slab)
            bytes_kept.append(sum(saved.sizes.values()))
            loss = loss_of(one.gather(outputs))
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
            one.seen = (loss.detach(), slab.grad)
        assert torch.equal(model.seen[0], kept.seen[0])
        assert_close(model.seen[1], kept.seen[1], "input gradient", tolerance=1e-13)
        assert_same(whole_grads(model), whole_grads(kept), tolerance=1e-13)
        for (name, b), c in zip(model.named_buffers(), kept.buffers()):
            assert torch.equal(b, c), name
    if mesh.rank == 0:
        most = {1: 0.75, 2: 0.4}[len(patterns)]
        assert bytes_kept[1] < most * bytes_kept[0]


@pytest.mark.parametrize("patterns", [("two*",), ("one*", "two*"), ("two.[0-3]* two.4* two.5",)])
@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2"])
def test_recomputed_layers_give_the_same_and_keep_less(
    plan: str, patterns: tuple[str, ...]
) -> None:
    ranks(4, recompute, captured(Blocks, (4, 3, 9, 8)), plan, patterns)


def recompute_empty(mesh: Mesh, graph: Graph, plan: str) -> None:
    model = split(mesh, build(UNet), graph, Plan.uniform(graph, plan, recompute=("*",)))
    serial = build(UNet)
    x = draw(1, 2, 4, 2, 2)
    there = model.at(tuple(x.shape))
    for _ in range(2):
        found, expected = there.gather(there(there.scatter(x))), serial(x)
        assert_close(found, expected, "output")
        found.square().mean().backward()
        expected.square().mean().backward()
    assert_grads(model, serial)
    assert_state(model, serial)


@pytest.mark.parametrize("plan", ["d8", "d2 h4"])
def test_ranks_without_a_slab_recompute_too(plan: str) -> None:
    ranks(8, recompute_empty, captured(UNet, SHAPE), plan)


class Written(nn.Module):
    """What a recomputed layer reads or returns is written in place by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        shifted = x + 1.0
        flat = torch.flatten(self.drop(F.relu(x, inplace=True) - 0.1), 2)
        out: Tensor = shifted.flatten(2) * F.relu(flat, inplace=True)
        return out


def write(mesh: Mesh, graph: Graph) -> None:
    plan = Plan.uniform(graph, "h2", recompute=("#add", "#flatten", "drop"))
    serial, model = build(Written).eval(), split(mesh, build(Written), graph, plan).eval()
    x = draw(4, 3, 9, 8)
    found, expected = model.gather(model(model.scatter(x))), serial(x)
    assert_close(found, expected, "output")
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_grads(model, serial)


def test_layers_beside_recomputed_ones_may_write_in_place() -> None:
    ranks(2, write, captured(Written, (4, 3, 9, 8)))


class Fork(nn.Module):
    """Two layers that need the same halo."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.fork = nn.ModuleDict({side: nn.Conv2d(8, 8, 3, padding=1) for side in ("a", "b")})

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.fork["a"](x) * self.fork["b"](x)
        return out


def share(mesh: Mesh, graph: Graph) -> None:
    plan = Plan.uniform(graph, "h2", recompute=("fork*",))
    serial, model = build(Fork), split(mesh, build(Fork), graph, plan)
    x = draw(4, 3, 9, 8)
    with Saved(model) as saved:
        y = model(model.scatter(x))
    assert max(saved.sizes.values()) == y.numel()  # and not some rows more
    model.mean(y.square()).backward()
    serial(x).square().mean().backward()
    assert_grads(model, serial)


def test_what_moves_for_recomputed_layers_moves_again() -> None:
    ranks(2, share, captured(Fork, (4, 3, 9, 8)))


def no_gradient(mesh: Mesh, graph: Graph) -> None:
    model = split(mesh, build(UNet), graph, Plan.uniform(graph, "d2", recompute=("*",)))
    model.requires_grad_(False)
    x = draw(*SHAPE)
    y = model(model.scatter(x))
    assert not y.requires_grad
    with torch.no_grad():
        assert_close(model.gather(y), build(UNet)(x), "output")
    with pytest.raises(PlanError, match="no layer matches 'encoder"):
        split(mesh, build(UNet), graph, Plan(recompute=("encoder*",)))


def test_frozen_layers_are_not_recomputed() -> None:
    ranks(2, no_gradient, captured(UNet, SHAPE))


class Ends(nn.Module):
    """Outputs that do not all depend on both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(self.a(x))
        z = self.b(y)
        return y, z, z.argmax(1), z.detach() + y


def use_some(mesh: Mesh, graph: Graph, plan: str, patterns: tuple[str, ...]) -> None:
    x = draw(4, 3, 9, 8)
    for used in (0, 1, 3):
        cut = Plan.uniform(graph, plan, recompute=patterns)
        serial, model = build(Ends), split(mesh, build(Ends), graph, cut)
        model.gather(model(model.scatter(x)))[used].square().sum().backward()
        serial(x)[used].square().sum().backward()
        assert_grads(model, serial)
        assert (model.get_parameter("b.weight").grad is None) == (used != 1)
    for one in (serial, model):  # the input's gradient alone, after a pass without it
        one.requires_grad_(False)
    model(model.scatter(x))
    slab, x = model.scatter(x).requires_grad_(), x.requires_grad_()
    model.gather(model(slab))[0].square().sum().backward()
    serial(x)[0].square().sum().backward()
    assert x.grad is not None
    assert_close(slab.grad, x.grad[model.input_layouts[0].slab(mesh.rank)], "input gradient")


@pytest.mark.parametrize("patterns", [("*",), ("a", "b")])
@pytest.mark.parametrize("plan", ["n2 h2", "h2 f2"])
def test_recomputed_layers_that_the_loss_ignores_have_no_gradient(
    plan: str, patterns: tuple[str, ...]
) -> None:
    ranks(4, use_some, captured(Ends, (4, 3, 9, 8)), plan, patterns)


class Averaging(nn.Module):
    """A norm that reads how many batches it has seen, which its model counts outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out


def count_on(mesh: Mesh, graph: Graph) -> None:
    plan = Plan.uniform(graph, "h2", recompute=("norm",))
    serial, model = build(Averaging), split(mesh, build(Averaging), graph, plan)
    x = draw(4, 3, 9, 8)
    found, expected = model.gather(model(model.scatter(x))), serial(x)
    with torch.no_grad():
        model(model.scatter(x))
        serial(x)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_grads(model, serial)
    assert_state(model, serial)


def test_buffers_may_change_before_layers_are_computed_again() -> None:
    ranks(2, count_on, captured(Averaging, (4, 3, 9, 8)))


class Dropping(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(F.relu(self.first(x))))
        return out


def run_in_backward(mesh: Mesh, drops: Graph, keeps: Graph, reentrant: bool) -> None:
    """torch's checkpoint runs the whole model again: what it draws would be others."""
    x = draw(4, 3, 9, 8)
    model = split(mesh, build(Dropping), drops, "h2")
    found = checkpoint(model, model.scatter(x).requires_grad_(), use_reentrant=reentrant)
    with pytest.raises(MismatchError, match="recompute="):
        found.sum().backward()
    model.eval()
    still = split(mesh, build(lambda: Dropping(0.0)), keeps, "h2")
    for other in (model, still):
        grads = []
        for again in (False, True):
            slab = other.scatter(x).requires_grad_()
            found = checkpoint(other, slab, use_reentrant=reentrant) if again else other(slab)
            found.square().sum().backward()
            grads.append(slab.grad)
        assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_random_layers_are_not_run_again_in_backward_by_others(reentrant: bool) -> None:
    drops = captured(Dropping, (4, 3, 9, 8))
    keeps = captured(lambda: Dropping(0.0), (4, 3, 9, 8))
    ranks(2, run_in_backward, drops, keeps, reentrant)
