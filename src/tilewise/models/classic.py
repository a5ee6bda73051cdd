"""AlexNet and VGG-16: plain chains of convolutions with a large fully connected head."""

from torch import Tensor, nn

from tilewise.models._build import he_init, scaled

VGG16_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


class PlainNet(nn.Module):
    """A feature extractor, an adaptive pool to a fixed size, and a classifier."""

    def __init__(self, features: nn.Sequential, pooled: int, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        out: Tensor = self.classifier(x.flatten(1))
        return out


def alexnet(*, num_classes: int = 1000, width: float = 1.0, dropout: float = 0.5) -> PlainNet:
    """Build AlexNet in its one-tower form.

    Input 3×224² (63² at least). Krizhevsky, "One weird trick for parallelizing convolutional
    neural networks", 2014.
    """
    c1, c2, c3, c4, c5 = (scaled(c, width) for c in (64, 192, 384, 256, 256))
    fc = scaled(4096, width)
    features = nn.Sequential(
        nn.Conv2d(3, c1, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(c1, c2, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(c2, c3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c3, c4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c4, c5, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
    )
    classifier = nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(c5 * 6 * 6, fc),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(fc, fc),
        nn.ReLU(inplace=True),
        nn.Linear(fc, num_classes),
    )
    return PlainNet(features, 6, classifier)


def vgg16(*, num_classes: int = 1000, width: float = 1.0, dropout: float = 0.5) -> PlainNet:
    """Build VGG-16 (configuration D, no batch normalisation).

    Input 3×224² (32² at least). Simonyan and Zisserman, "Very deep convolutional networks for
    large-scale image recognition", 2014.
    """
    layers: list[nn.Module] = []
    channels = 3
    for stage_channels, depth in VGG16_STAGES:
        for _ in range(depth):
            out_channels = scaled(stage_channels, width)
            layers += [nn.Conv2d(channels, out_channels, 3, padding=1), nn.ReLU(inplace=True)]
            channels = out_channels
        layers.append(nn.MaxPool2d(2, stride=2))
    fc = scaled(4096, width)
    classifier = nn.Sequential(
        nn.Linear(channels * 7 * 7, fc),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(fc, fc),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(fc, num_classes),
    )
    model = PlainNet(nn.Sequential(*layers), 7, classifier)
    he_init(model)
    return model
