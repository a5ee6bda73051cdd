"""Predictions beside the papers' measurements, as near as they really come; see docs/papers.md.

A plan is priced by pinning every layer, so that thousands of devices take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import pytest
import torch
from torch.nn import functional as F

from tilewise import Degrees, Found, Graph, Plan, capture, models, search
from tilewise.planner.cost import Setting
from tilewise.planner.formulate import formulate
from tilewise.planner.formulation import Formulation
from tilewise.planner.machine import load_machine
from tilewise.planner.solve import Cost, evaluate
from tilewise.planner.timeline import peak_bytes

GIB = 2**30
GPU_BYTES = 16e9


@cache
def graph_of(name: str, shape: tuple[int, ...], **options: object) -> Graph:
    with torch.device("meta"):
        model = models.get(name)(**options)
    loss = {"cosmoflow": F.mse_loss, "inception_v3": None}.get(name, F.cross_entropy)
    return capture(model, (torch.empty(shape, device="meta"),), loss)


def cosmoflow(samples: int, size: int = 512, *, batch_norm: bool = False) -> Graph:
    shape = (samples, 4, size, size, size)
    return graph_of("cosmoflow", shape, size=size, batch_norm=batch_norm)


def unet(samples: int) -> Graph:
    return graph_of("unet3d", (samples, 1, 256, 256, 256))


@dataclass
class Predicted:
    """A plan on lassen: what a step costs, and the bytes of the fullest device."""

    found: Formulation
    cost: Cost
    peak_bytes: int

    def seconds(self, kind: str) -> float:
        """Return the seconds of all arithmetic of one kind of layer."""
        program = self.found.choices.program
        return sum(
            float(cost.compute_forward[0] + cost.compute_backward[0])
            for name, cost in self.found.costs.items()
            if program.node(name).kind == kind
        )


@cache
def predict(graph: Graph, degrees: str, optimizer: str = "adam") -> Predicted:
    plan = Plan.uniform(graph, degrees)
    devices = Degrees.parse(degrees).product
    setting = Setting(load_machine("lassen"), devices, "float32", 4, optimizer)
    found = formulate(graph, setting, pins=dict(plan.layers))
    choice = (0,) * len(found.names)
    return Predicted(found, evaluate(found.problem, choice), peak_bytes(found, choice))


def speedup(graph: Graph, before: str, after: str) -> float:
    return predict(graph, before).cost.seconds / predict(graph, after).cost.seconds


# -- Oyama et al., TPDS 2021 -----------------------------------------------------------------------


def test_the_convolutions_of_cosmoflow() -> None:
    """Published: 142.9 ms on 8 GPUs a sample and 48.8 on 32, halos included."""
    assert predict(cosmoflow(64), "n64 d8").seconds("conv3d") == pytest.approx(0.1429, rel=0.03)
    assert predict(cosmoflow(64), "n64 d32").seconds("conv3d") == pytest.approx(0.0488, rel=0.13)


@pytest.mark.parametrize(
    ("samples", "before", "after", "published", "predicted"),
    [
        (16, "n16 d8", "n16 d32", 1.98, 3.19),
        (64, "n64 d8", "n64 d32", 1.77, 3.19),
        (4, "n4 d8", "n4 d16", 1.66, 1.82),
    ],
)
def test_strong_scaling_of_cosmoflow(
    samples: int, before: str, after: str, published: float, predicted: float
) -> None:
    """Up to twice the published GPUs a prediction is 10 % too good, at four times 61 and 80 %."""
    found = speedup(cosmoflow(samples), before, after)
    assert found == pytest.approx(predicted, rel=0.02)
    assert published < found


def test_strong_scaling_of_the_unet() -> None:
    """Published: 1.42 from 256 to 512 GPUs."""
    assert speedup(unet(16), "n16 d16", "n16 d32") / 1.42 - 1 == pytest.approx(0.38, abs=0.02)


@pytest.mark.parametrize(("degrees", "other_s"), [("n64 d8", 0.0157), ("n64 d32", 0.0068)])
def test_what_a_step_of_cosmoflow_has_besides_convolutions(degrees: str, other_s: float) -> None:
    found = predict(cosmoflow(64), degrees)
    rest = found.cost.seconds - found.seconds("conv3d")
    assert rest == pytest.approx(other_s, rel=0.02)
    assert found.cost.sync == pytest.approx(0.0031, abs=0.0001)
    waiting = found.found.waiting_seconds((0,) * len(found.found.names))
    assert waiting == pytest.approx(0.0010, abs=0.0001)


@pytest.mark.parametrize(
    ("graph", "small", "large", "ideal", "published", "predicted"),
    [
        ((1, 128), "d4", "n128 d4", 128, 65.4, 121.8),
        ((1, 512), "d8", "n256 d8", 256, 147.31, 255.6),
        ((1, 512), "d16", "n128 d16", 128, 71.32, 127.7),
        ((1, 512), "d32", "n64 d32", 64, 37.2, 63.8),
    ],
)
def test_weak_scaling_of_cosmoflow(
    graph: tuple[int, int], small: str, large: str, ideal: int, published: float, predicted: float
) -> None:
    """The model hides most gradient sums behind backward, and so promises almost all of it."""
    samples, size = graph
    few = predict(cosmoflow(samples, size), small).cost.seconds
    many = predict(cosmoflow(ideal * samples, size), large).cost.seconds
    assert published < ideal * few / many <= ideal
    assert ideal * few / many == pytest.approx(predicted, rel=0.005)


def test_weak_scaling_of_the_unet() -> None:
    """Published: 28.4 on 1,024 GPUs over 32; predicted is nearly all of 32."""
    few = predict(unet(2), "n2 d16").cost.seconds
    many = predict(unet(64), "n64 d16").cost.seconds
    assert 28.4 < 32 * few / many <= 32
    assert 32 * few / many == pytest.approx(31.8, rel=0.005)


def test_activations_and_error_signals_of_cosmoflow() -> None:
    """Published: 0.824, 6.59 and 52.7 GiB a sample; all tensors twice come within 8 %."""
    for size, published in ((128, 0.824), (256, 6.59), (512, 52.7)):
        assert all_twice(cosmoflow(1, size)) / GIB == pytest.approx(published, rel=0.08)


def all_twice(graph: Graph) -> int:
    """Return the bytes of all tensors of the network and as many of error signals."""
    program = graph.training
    tensors = [out for node in program.nodes for out in node.outs] + [program.inputs[0]]
    return 2 * 4 * sum(prod(tensor.shape) for tensor in tensors)


@pytest.mark.parametrize(
    ("graph", "kept_all", "here"),
    [
        (lambda: cosmoflow(1), 4, 2),
        (lambda: cosmoflow(1, batch_norm=True), 8, 4),
        (lambda: unet(1), 16, 8),
    ],
)
def test_how_many_gpus_a_sample_needs(graph: object, kept_all: int, here: int) -> None:
    """Published: 4, with batch norm 8, and 16 for the U-Net, with all tensors kept.

    What autograd frees makes half of them enough.
    """
    assert callable(graph)
    found = graph()
    assert least(lambda ways: all_twice(found) / ways) == kept_all
    reserved = load_machine("lassen").reserved_bytes
    assert least(lambda ways: predict(found, f"d{ways}").peak_bytes + reserved) == here


def least(needed: object) -> int:
    assert callable(needed)
    return next(ways for ways in (1, 2, 4, 8, 16, 32) if needed(ways) <= GPU_BYTES)


# -- Jia et al., ICML 2018 -------------------------------------------------------------------------


@cache
def layer_wise(name: str, devices: int, overlap: float = 0.0) -> Found:
    extent = 299 if name == "inception_v3" else 224
    graph = graph_of(name, (32 * devices, 3, extent, extent))
    hides = {"overlap_sums": overlap, "overlap_halo": overlap}
    machine = load_machine("p100x4").model_copy(update=hides)
    return search(graph, devices=devices, machine=machine, optimizer="momentum", time_limit=60.0)


@pytest.mark.parametrize(
    ("name", "published", "miss", "overlapping", "others"),
    [
        ("alexnet", 12.2, 0.01, 13.0, 1.46),
        ("vgg16", 14.8, 0.01, 15.8, 1.07),
        ("inception_v3", 15.5, -0.19, 14.9, 1.06),
    ],
)
def test_throughput_of_layer_wise_plans(
    name: str, published: float, miss: float, overlapping: float, others: float
) -> None:
    """16 GPUs against one, 32 samples each; the best other plan took up to 2.2, 1.5, 1.4 as long.

    Nothing overlaps there. If all could, predictions would be higher.
    """
    one, many = layer_wise(name, 1), layer_wise(name, 16)
    assert many.optimal
    found = 16 * one.step_seconds / many.step_seconds
    assert found / published - 1 == pytest.approx(miss, abs=0.02)
    slower = [many.baselines[other].step_seconds for other in ("data", "model", "owt")]
    assert min(slower) / many.step_seconds == pytest.approx(others, abs=0.015)
    hiding = 16 * one.step_seconds / layer_wise(name, 16, 1.0).step_seconds
    assert hiding == pytest.approx(overlapping, rel=0.02)


@pytest.mark.parametrize(
    ("name", "data", "model", "owt"),
    [
        ("alexnet", 4.2, 8.8, 1.32),
        ("vgg16", 2.36, 74, 0.80),
        ("inception_v3", 0.45, 56, 0.47),
    ],
)
def test_communication_of_layer_wise_plans(
    name: str, data: float, model: float, owt: float
) -> None:
    """Published: 1.3 to 23 times less than data and model parallelism, 1.2 to 2.5 than OWT."""
    many = layer_wise(name, 16)
    mine = many.payload(many.plan).bytes
    for other, predicted in (("data", data), ("model", model), ("owt", owt)):
        sent = many.payload(many.baselines[other].plan).bytes
        assert sent / mine == pytest.approx(predicted, rel=0.05), other


def test_a_plan_of_vgg_that_is_as_fast_sends_less() -> None:
    """Where layers are about as fast split one way or the other, bytes may differ a lot."""
    many = layer_wise("vgg16", 16)
    layers = {name: str(degrees) for name, degrees in many.plan.layers.items()}
    names = ("features.24", "features.26", "features.28")
    assert {layers[name] for name in names} == {"n4 c2 f2"}
    last = dict.fromkeys(names, "n8 f2") | {"features.30": "n8 c2"}
    plan = Plan.of(many.formulation.graph, layers | last)
    assert many.price(plan).step_seconds / many.step_seconds == pytest.approx(1.0002, abs=0.0001)
    sent = many.payload(plan).bytes
    for other, predicted in (("owt", 1.23), ("data", 3.7)):
        ratio = many.payload(many.baselines[other].plan).bytes / sent
        assert ratio == pytest.approx(predicted, rel=0.02)


def test_the_plan_of_vgg_on_four_gpus() -> None:
    """Published: samples for the convolutions, the last ones h2 w2, then linear layers by output.

    Ours keeps samples to the last convolution, and is as good.
    """
    found = layer_wise("vgg16", 4)
    layers = {name: str(degrees) for name, degrees in found.plan.layers.items()}
    assert {text for name, text in layers.items() if name.startswith("features")} == {"n4"}
    assert [layers[f"classifier.{i}"] for i in (0, 3, 6)] == ["c4", "c2 f2", "c4"]
    by_output = Plan.of(
        found.formulation.graph, layers | {f"classifier.{i}": "f4" for i in (0, 3, 6)}
    )
    ratio = found.price(by_output).step_seconds / found.step_seconds
    assert ratio == pytest.approx(1.002, abs=0.001)
    last = dict.fromkeys(("features.24", "features.26", "features.28"), "h2 w2")
    theirs = Plan.of(
        found.formulation.graph,
        layers | last | {"classifier.0": "f4", "classifier.3": "f2", "classifier.6": "1"},
    )
    assert found.price(theirs).step_seconds / found.step_seconds == pytest.approx(1.011, abs=0.003)


# -- Dryden et al., SC 2019 ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "degrees", "shorter", "sums"),
    [
        (2, "f2", 1.63, 1.93),
        (2, "f4", 2.27, 3.6),
        (2, "c2 f4", 2.71, 6.5),
        (4, "f2", 1.82, 2.0),
        (4, "f4", 3.19, 3.9),
        (4, "c2 f4", 5.23, 7.4),
        (8, "f2", 1.93, 2.0),
        (8, "f4", 3.64, 3.9),
        (8, "c2 f4", 6.68, 7.8),
    ],
)
def test_wide_residual_networks(k: int, degrees: str, shorter: float, sums: float) -> None:
    """Published: up to 4.1 times shorter steps, 4 times less time for gradient sums.

    Here one GPU a sample against several that share channels and filters.
    """
    graph = graph_of("wrn50", (64, 3, 224, 224), k=k)
    alone = predict(graph, "n64", "momentum").cost
    shared = predict(graph, f"n64 {degrees}", "momentum").cost
    assert alone.sync / shared.sync == pytest.approx(sums, rel=0.02)
    assert alone.seconds / shared.seconds == pytest.approx(shorter, rel=0.01)
