"""Plain PyTorch networks to train, plan and measure with.

Each builder takes ``width``, a factor on every hidden channel count, so that a test can run the
same graph small. None of them knows about devices or partitions.
"""

from collections.abc import Callable
from difflib import get_close_matches

from torch import nn

from tilewise.models.classic import alexnet, vgg16
from tilewise.models.cosmoflow import cosmoflow, cosmoflow_mlperf
from tilewise.models.densenet import densenet121
from tilewise.models.inception import InceptionOutput, inception_v3
from tilewise.models.mesh import mesh1k, mesh2k
from tilewise.models.resnet import resnet50, wrn50
from tilewise.models.unet import unet3d

__all__ = [
    "NAMES",
    "InceptionOutput",
    "alexnet",
    "cosmoflow",
    "cosmoflow_mlperf",
    "densenet121",
    "get",
    "inception_v3",
    "mesh1k",
    "mesh2k",
    "resnet50",
    "unet3d",
    "vgg16",
    "wrn50",
]

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "inception_v3": inception_v3,
    "resnet50": resnet50,
    "wrn50": wrn50,
    "densenet121": densenet121,
    "mesh1k": mesh1k,
    "mesh2k": mesh2k,
    "cosmoflow": cosmoflow,
    "cosmoflow_mlperf": cosmoflow_mlperf,
    "unet3d": unet3d,
}

NAMES = tuple(_BUILDERS)


def get(name: str) -> Callable[..., nn.Module]:
    """Return the builder called ``name``."""
    if name in _BUILDERS:
        return _BUILDERS[name]
    near = get_close_matches(name.lower(), NAMES, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown model {name!r}; did you mean {near!r}? known: {', '.join(NAMES)}")
