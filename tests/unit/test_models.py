"""The networks: their size at full width, and their outputs at a small one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewise import models
from tilewise.models import InceptionOutput

PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "inception_v3": 27_161_264,
    "resnet50": 25_557_032,
    "wrn50": 68_883_240,
    "densenet121": 7_978_856,
    "mesh1k": 34_418_688,
    "mesh2k": 12_387_584,
    "cosmoflow": 9_437_636,
    "cosmoflow_mlperf": 5_597_604,
    "unet3d": 19_070_560,
}

# The smallest sensible input of each network and what comes out of it, without the batch.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "alexnet": ((3, 63, 63), (10,)),
    "vgg16": ((3, 32, 32), (10,)),
    "inception_v3": ((3, 75, 75), (10,)),
    "resnet50": ((3, 32, 32), (10,)),
    "wrn50": ((3, 32, 32), (10,)),
    "densenet121": ((3, 32, 32), (10,)),
    "mesh1k": ((18, 32, 64), (1024, 1, 2)),
    "mesh2k": ((18, 64, 128), (4096, 1, 2)),
    "cosmoflow": ((4, 16, 16, 16), (4,)),
    "cosmoflow_mlperf": ((4, 32, 32, 32), (4,)),
    "unet3d": ((1, 8, 16, 24), (3, 8, 16, 24)),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small(name: str, width: float = 1 / 32) -> nn.Module:
    options: dict[str, Any] = {"width": width}
    if name.startswith("cosmoflow"):
        options["size"] = SHAPES[name][0][-1]
    elif SHAPES[name][1] == (10,):
        options["num_classes"] = 10
    return models.get(name)(**options)


def sample(name: str) -> Tensor:
    return torch.randn(2, *SHAPES[name][0])


def test_every_name_is_covered() -> None:
    assert set(models.NAMES) == set(PARAMETERS) == set(SHAPES)
    assert all(getattr(models, name) is models.get(name) for name in models.NAMES)


@pytest.mark.parametrize("name", models.NAMES)
def test_parameter_count(name: str) -> None:
    with torch.device("meta"):
        assert count(models.get(name)()) == PARAMETERS[name]


@pytest.mark.parametrize("width", [1 / 32, 0.07])
@pytest.mark.parametrize("name", models.NAMES)
def test_forward_and_backward(name: str, width: float) -> None:
    torch.manual_seed(0)
    model, x, expected = small(name, width), sample(name), (2, *SHAPES[name][1])
    out = model(x)
    if name == "inception_v3":
        assert isinstance(out, InceptionOutput)
        assert out.aux.shape == expected
        loss = out.logits.sum() + out.aux.sum()
        out = out.logits
    else:
        loss = out.sum()
    assert out.shape == expected
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        out = model.eval()(x)
    assert isinstance(out, Tensor)
    assert out.shape == expected
    assert out.isfinite().all()


@pytest.mark.parametrize("name", models.NAMES)
def test_training_graph_exports(name: str) -> None:
    program = torch.export.export(small(name).train(), (sample(name),))
    assert any("conv" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("size", [139, 299, 320])
def test_inception_auxiliary_head_takes_any_size(size: int) -> None:
    with torch.device("meta"):
        out = models.inception_v3()(torch.empty(2, 3, size, size))
    assert out.aux.shape == out.logits.shape == (2, 1000)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256, 512])
def test_cosmoflow_ends_alike_at_every_size(size: int) -> None:
    with torch.device("meta"):
        model = models.cosmoflow(size=size)
        assert model.features(torch.empty(1, 4, size, size, size)).shape == (1, 256, 2, 2, 2)
        assert count(model) == PARAMETERS["cosmoflow"]
        assert count(models.cosmoflow(size=size, batch_norm=True)) == 9_439_652


def test_wrn_without_widening_is_resnet() -> None:
    with torch.device("meta"):
        assert count(models.wrn50(k=1)) == PARAMETERS["resnet50"]


def test_mesh_head_can_predict_once_a_cell() -> None:
    out = models.mesh2k(width=1 / 32, out_channels=1)(sample("mesh2k"))
    assert out.shape == (2, 1, 1, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosmoflow", {"size": 100}, "size must be one of"),
        ("cosmoflow_mlperf", {"size": 16}, "multiple of 32"),
        ("resnet50", {"width": 0}, "width must be positive"),
    ],
)
def test_impossible_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.get(name)(**options)


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("resnet-50", "resnet50"), ("Inception", "inception_v3"), ("unet", "unet3d")],
)
def test_unknown_name_suggests_the_nearest(typo: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{nearest}'") as error:
        models.get(typo)
    assert all(name in str(error.value) for name in models.NAMES)
