"""CosmoFlow: regression of four cosmological parameters from a volume of dark matter.

The original is Mathuriya et al., "CosmoFlow: using deep learning to learn the universe at scale",
SC 2018.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tilewise.models._build import he_init, scaled

CHANNELS = (16, 32, 64, 128, 256, 256, 256)
STRIDES = (1, 1, 1, 2, 1, 1, 1)
SIZES = (8, 16, 32, 64, 128, 256, 512)
IN_CHANNELS = 4
TARGETS = 4
FINAL_SIZE = 2

MLPERF_LAYERS = 5
MLPERF_SLOPE = 0.3
MLPERF_SCALE = 1.2


class CosmoFlow(nn.Module):
    """Convolutions and poolings down to a small volume, then a fully connected head."""

    def __init__(self, features: nn.Sequential, head: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.head = head
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).flatten(1))
        return out


class ScaledTanh(nn.Module):
    """Bound the output to ±``scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


def cosmoflow(
    *, size: int = 128, batch_norm: bool = False, width: float = 1.0, dropout: float = 0.2
) -> CosmoFlow:
    """Build CosmoFlow as extended to larger volumes, for input 4 × ``size``³.

    Seven convolutions, with an average pool after each of the first log2(size) - 2, so that every
    size ends as 256 × 2³ and has the same parameters: five poolings at 128, six at 256, seven at
    512, and fewer for the sizes 8 to 64 that are no part of the paper. Oyama et al., "The
    case for strong scaling in deep learning: training large 3D CNNs with hybrid parallelism", 2020.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {SIZES}, got {size}")
    poolings = size.bit_length() - 3
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = IN_CHANNELS
    for i, (base, stride) in enumerate(zip(CHANNELS, STRIDES, strict=True), start=1):
        out_channels = scaled(base, width)
        layers[f"conv{i}"] = nn.Conv3d(
            channels, out_channels, 3, stride=stride, padding=1, bias=False
        )
        if batch_norm:
            layers[f"bn{i}"] = nn.BatchNorm3d(out_channels)
        layers[f"act{i}"] = nn.LeakyReLU(inplace=True)
        if i <= poolings:
            layers[f"pool{i}"] = nn.AvgPool3d(3, stride=2, padding=1)
        channels = out_channels
    fc1, fc2 = scaled(2048, width), scaled(256, width)
    head = OrderedDict(
        drop1=nn.Dropout(dropout),
        fc1=nn.Linear(channels * FINAL_SIZE**3, fc1),
        act1=nn.LeakyReLU(inplace=True),
        drop2=nn.Dropout(dropout),
        fc2=nn.Linear(fc1, fc2),
        act2=nn.LeakyReLU(inplace=True),
        drop3=nn.Dropout(dropout),
        fc3=nn.Linear(fc2, TARGETS),
    )
    return CosmoFlow(nn.Sequential(layers), nn.Sequential(head))


def cosmoflow_mlperf(*, size: int = 128, width: float = 1.0, dropout: float = 0.5) -> CosmoFlow:
    """Build the CosmoFlow of the MLPerf HPC benchmark, for input 4 × ``size``³.

    Five convolutions of kernel 2 padded at the far end only, each with a max pool, and a bounded
    output, 1.2 tanh; the slope of the LeakyReLU is Keras' 0.3. ``size`` is a multiple of 32.
    Farrell et al., "MLPerf HPC: a holistic benchmark suite for scientific machine learning on HPC
    systems", 2021.
    """
    final, remainder = divmod(size, 2**MLPERF_LAYERS)
    if final < 1 or remainder:
        raise ValueError(f"size must be a positive multiple of {2**MLPERF_LAYERS}, got {size}")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = IN_CHANNELS
    for i in range(MLPERF_LAYERS):
        out_channels = scaled(32 * 2**i, width)
        layers[f"conv{i + 1}"] = nn.Conv3d(channels, out_channels, 2, padding="same")
        layers[f"act{i + 1}"] = nn.LeakyReLU(MLPERF_SLOPE, inplace=True)
        layers[f"pool{i + 1}"] = nn.MaxPool3d(2)
        channels = out_channels
    fc1, fc2 = scaled(128, width), scaled(64, width)
    head = OrderedDict(
        fc1=nn.Linear(channels * final**3, fc1),
        act1=nn.LeakyReLU(MLPERF_SLOPE, inplace=True),
        drop1=nn.Dropout(dropout),
        fc2=nn.Linear(fc1, fc2),
        act2=nn.LeakyReLU(MLPERF_SLOPE, inplace=True),
        drop2=nn.Dropout(dropout),
        fc3=nn.Linear(fc2, TARGETS),
        bound=ScaledTanh(MLPERF_SCALE),
    )
    return CosmoFlow(nn.Sequential(layers), nn.Sequential(head))
