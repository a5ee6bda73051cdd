"""Capture: names, modes, shapes without memory, in-place operators, and clear errors."""

from __future__ import annotations

import pickle
import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise import capture, models
from tilewise.errors import CaptureError
from tilewise.graph.graph import Program


def kinds(program: Program) -> list[str]:
    return [node.kind for node in program.nodes]


def test_names_are_module_paths_with_further_operators_numbered() -> None:
    graph = capture(models.resnet50(width=0.0625, num_classes=3), torch.randn(2, 3, 32, 32))
    names = [layer.name for layer in graph.layers]
    assert len(names) == len(set(names))
    for name in ("conv1", "bn1", "layer1.0.conv2", "fc"):
        assert name in names
    assert any(name.startswith("layer1.0") and "#add" in name for name in names)


def test_training_and_evaluation_differ_as_written() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.drop = nn.Conv2d(1, 2, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(self.conv(x))
            return x * 2 if self.training else x

    graph = capture(Net(), torch.randn(2, 1, 5, 5))
    assert "mul" in kinds(graph.training)
    assert "mul" not in kinds(graph.evaluation)


def test_capture_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph = capture(model, torch.randn(4, 1, 8, 8))
    assert graph.training.nodes
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_large_volumes_cost_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = models.cosmoflow(size=512)
    graph = capture(model, torch.empty(1, 4, 512, 512, 512, device="meta"))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert graph.training.inputs[0].shape == (1, 4, 512, 512, 512)
    assert 3 * graph.flops == pytest.approx(3550e9, rel=0.01)
    assert held < 1_500_000  # kilobytes: the input alone would be 2 GiB


def test_a_model_on_the_meta_device_is_captured() -> None:
    with torch.device("meta"):
        model = models.unet3d(width=0.25)
    graph = capture(model, torch.empty(1, 1, 32, 32, 32, device="meta"))
    assert graph.layers[-1].shape == (1, 3, 32, 32, 32)


def test_in_place_operators_become_values_written_once() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.add_(1)
            part = y[:, :1]
            part.mul_(3)
            return y + part

    graph = capture(Net(), torch.randn(2, 2, 3))
    written = [value for node in graph.training.nodes for value in node.outs]
    assert len(written) == len(set(written))
    assert "slice_scatter" in kinds(graph.training)


def test_a_graph_travels_between_processes() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(inplace=True))
    graph = capture(model, torch.randn(2, 1, 5, 5), F.mse_loss)
    copy = pickle.loads(pickle.dumps(graph))
    assert [layer.name for layer in copy.layers] == [layer.name for layer in graph.layers]
    assert copy.training.nodes[0].op is graph.training.nodes[0].op
    with pytest.raises(CaptureError, match="attach"):
        copy.program(graph.modes(True), (torch.empty(3, 1, 5, 5, device="meta"),))
    copy.attach(model)
    other = copy.program(graph.modes(True), (torch.empty(3, 1, 5, 5, device="meta"),))
    assert other.inputs[0].shape == (3, 1, 5, 5)


def test_targets_are_guessed_for_losses_of_classes_and_of_values() -> None:
    model = nn.Conv2d(1, 3, 1)
    x = torch.randn(2, 1, 4, 5)
    classes = capture(model, x, F.cross_entropy)
    values = capture(model, x, nn.MSELoss())
    assert classes.targets is not None
    assert values.targets is not None
    assert tuple(classes.targets[0].shape) == (2, 4, 5)
    assert classes.targets[0].dtype == torch.int64
    assert tuple(values.targets[0].shape) == (2, 3, 4, 5)


def test_what_cannot_be_traced_says_why() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match="could not trace Branches for inputs"):
        capture(Branches(), torch.randn(2, 3)).training  # noqa: B018
    for loss in (None, F.mse_loss):
        with pytest.raises(CaptureError, match=r"could not trace Conv2d for inputs \[\(2, 4, 5"):
            capture(nn.Conv2d(3, 2, 1), torch.randn(2, 4, 5, 5), loss).training  # noqa: B018
    with pytest.raises(CaptureError, match="hold no tensor"):
        capture(nn.Identity(), (3,))


@pytest.mark.parametrize(
    ("shape", "layer", "given"), [((2, 1, 8, 8), "Conv3d", 4), ((1, 8, 8, 8), "BatchNorm3d", 4)]
)
@pytest.mark.parametrize("loss", [None, F.mse_loss])
def test_too_few_dims_are_said_to_be_so(
    shape: tuple[int, ...], layer: str, given: int, loss: Any
) -> None:
    model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2))
    text = rf"its {layer} wants 5 dims \(samples, channels, depth, height, width\), .* {given}: "
    with pytest.raises(CaptureError, match=text) as caught:
        capture(model, torch.randn(shape), loss).training  # noqa: B018
    assert "torch" not in str(caught.value)
