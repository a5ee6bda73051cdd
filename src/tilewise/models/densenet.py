"""DenseNet-121: every layer of a block reads the outputs of all layers before it."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tilewise.models._build import he_init, scaled

BLOCKS = (6, 12, 24, 16)
GROWTH = 32
STEM = 64
BOTTLENECK = 4


class DenseLayer(nn.Module):
    """Append ``growth`` channels, made by a 1×1 and a 3×3 convolution, to the input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        inner = BOTTLENECK * growth
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, inner, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(inner, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(self.relu1(self.norm1(x)))
        new = self.conv2(self.relu2(self.norm2(new)))
        return torch.cat([x, new], 1)


def _transition(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(in_channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(in_channels, out_channels, 1, bias=False),
            pool=nn.AvgPool2d(2, stride=2),
        )
    )


class DenseNet(nn.Module):
    """A stem, dense blocks with halving transitions between them, and a linear classifier."""

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        growth, channels = scaled(GROWTH, width), scaled(STEM, width)
        features: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            norm0=nn.BatchNorm2d(channels),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, stride=2, padding=1),
        )
        for number, depth in enumerate(BLOCKS, start=1):
            if number > 1:
                halved = max(1, channels // 2)
                features[f"transition{number - 1}"] = _transition(channels, halved)
                channels = halved
            block = nn.Sequential()
            for layer in range(1, depth + 1):
                block.add_module(f"denselayer{layer}", DenseLayer(channels, growth))
                channels += growth
            features[f"denseblock{number}"] = block
        features["norm5"] = nn.BatchNorm2d(channels)
        features["relu5"] = nn.ReLU(inplace=True)
        self.features = nn.Sequential(features)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        out: Tensor = self.classifier(x.flatten(1))
        return out


def densenet121(*, num_classes: int = 1000, width: float = 1.0) -> DenseNet:
    """Build DenseNet-121; ``width`` scales the growth rate (32) and the stem (64).

    Input 3×224² (29² at least). Huang et al., "Densely connected convolutional networks", 2016.
    """
    return DenseNet(num_classes, width)
