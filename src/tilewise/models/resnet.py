"""ResNet-50 and its wide sibling: residual stages of bottleneck blocks."""

from torch import Tensor, nn

from tilewise.models._build import he_init, scaled

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4


class Bottleneck(nn.Module):
    """A 1×1, a 3×3 (which carries the stride) and a 1×1 convolution around a shortcut."""

    def __init__(self, in_channels: int, inner: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += shortcut
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """Four stages of bottlenecks with the inner width multiplied by ``k``."""

    def __init__(self, num_classes: int, width: float, k: int) -> None:
        super().__init__()
        channels = scaled(64, width)
        self.conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages = []
        for number, (base, depth) in enumerate(STAGES):
            inner, out_channels = scaled(base * k, width), scaled(base * EXPANSION, width)
            blocks = []
            for block in range(depth):
                stride = 2 if number > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, inner, out_channels, stride))
                channels = out_channels
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def resnet50(*, num_classes: int = 1000, width: float = 1.0) -> ResNet:
    """Build ResNet-50, with the stride in the 3×3 convolutions ("v1.5").

    Input 3×224² (any size works). He et al., "Deep residual learning for image recognition", 2015.
    """
    return ResNet(num_classes, width, k=1)


def wrn50(*, k: int = 2, num_classes: int = 1000, width: float = 1.0) -> ResNet:
    """Build WRN-50-k: ResNet-50 with the bottlenecks' inner channels multiplied by ``k``.

    Input 3×224² (any size works). Zagoruyko and Komodakis, "Wide residual networks", 2016.
    """
    return ResNet(num_classes, width, k)
