"""Inception-v3 with its auxiliary classifier."""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise.models._build import scaled

Kernel = int | tuple[int, int]


class InceptionOutput(NamedTuple):
    """What the network returns in training mode."""

    logits: Tensor
    aux: Tensor


class Scale(Protocol):
    """The scaling of a channel count, with the width already chosen."""

    def __call__(self, channels: int) -> int: ...


class ConvBN(nn.Sequential):
    """Convolution without bias, batch norm and ReLU."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Kernel, stride: int = 1, pad: Kernel = 0
    ) -> None:
        super().__init__(
            OrderedDict(
                conv=nn.Conv2d(in_channels, out_channels, kernel, stride, pad, bias=False),
                bn=nn.BatchNorm2d(out_channels, eps=0.001),
                relu=nn.ReLU(inplace=True),
            )
        )


class Concat(nn.Module):
    """Give every branch the same input and concatenate their channels."""

    def __init__(self, out_channels: int, **branches: nn.Module) -> None:
        super().__init__()
        self.out_channels = out_channels
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.children()], 1)


def _chain(channels: int, *layers: tuple[int, Kernel], last_stride: int = 1) -> nn.Sequential:
    """Chain size-keeping convolutions; a last one with a stride has no padding."""
    convs = []
    for i, (out_channels, kernel) in enumerate(layers):
        stride = last_stride if i == len(layers) - 1 else 1
        pad: Kernel = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        convs.append(ConvBN(channels, out_channels, kernel, stride, pad if stride == 1 else 0))
        channels = out_channels
    return nn.Sequential(*convs)


def _pool(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), ConvBN(channels, out_channels, 1))


def _mixed5(c: int, pool: int, s: Scale) -> Concat:
    return Concat(
        2 * s(64) + s(96) + s(pool),
        branch1x1=_chain(c, (s(64), 1)),
        branch5x5=_chain(c, (s(48), 1), (s(64), 5)),
        branch3x3dbl=_chain(c, (s(64), 1), (s(96), 3), (s(96), 3)),
        branch_pool=_pool(c, s(pool)),
    )


def _mixed6a(c: int, s: Scale) -> Concat:
    return Concat(
        s(384) + s(96) + c,
        branch3x3=_chain(c, (s(384), 3), last_stride=2),
        branch3x3dbl=_chain(c, (s(64), 1), (s(96), 3), (s(96), 3), last_stride=2),
        branch_pool=nn.MaxPool2d(3, stride=2),
    )


def _mixed6(c: int, inner: int, s: Scale) -> Concat:
    row, column, n = (1, 7), (7, 1), s(inner)
    return Concat(
        4 * s(192),
        branch1x1=_chain(c, (s(192), 1)),
        branch7x7=_chain(c, (n, 1), (n, row), (s(192), column)),
        branch7x7dbl=_chain(c, (n, 1), (n, column), (n, row), (n, column), (s(192), row)),
        branch_pool=_pool(c, s(192)),
    )


def _mixed7a(c: int, s: Scale) -> Concat:
    n = s(192)
    return Concat(
        s(320) + n + c,
        branch3x3=_chain(c, (n, 1), (s(320), 3), last_stride=2),
        branch7x7x3=_chain(c, (n, 1), (n, (1, 7)), (n, (7, 1)), (n, 3), last_stride=2),
        branch_pool=nn.MaxPool2d(3, stride=2),
    )


def _mixed7(c: int, s: Scale) -> Concat:
    n = s(384)

    def split() -> Concat:
        return Concat(2 * n, row=_chain(n, (n, (1, 3))), column=_chain(n, (n, (3, 1))))

    return Concat(
        s(320) + 4 * n + s(192),
        branch1x1=_chain(c, (s(320), 1)),
        branch3x3=nn.Sequential(_chain(c, (n, 1)), split()),
        branch3x3dbl=nn.Sequential(_chain(c, (s(448), 1), (n, 3)), split()),
        branch_pool=_pool(c, s(192)),
    )


class AuxHead(nn.Module):
    """A classifier on the middle of the network, which gives its lower half a stronger gradient."""

    def __init__(self, in_channels: int, num_classes: int, s: Scale) -> None:
        super().__init__()
        self.conv0 = ConvBN(in_channels, s(128), 1)
        self.conv1 = ConvBN(s(128), s(768), 5)
        self.fc = nn.Linear(s(768), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # The paper's pooling takes 17² (input 299²) to 5²; a smaller map would not fill conv1.
        if min(x.shape[2:]) >= 17:
            x = F.avg_pool2d(x, 5, stride=3)
        else:
            x = F.adaptive_avg_pool2d(x, 5)
        x = F.adaptive_avg_pool2d(self.conv1(self.conv0(x)), 1)
        out: Tensor = self.fc(x.flatten(1))
        return out


class InceptionV3(nn.Module):
    """A stem, eleven mixed blocks in three resolutions, and two classifiers."""

    def __init__(self, num_classes: int, width: float, dropout: float) -> None:
        super().__init__()
        s = partial(scaled, width=width)
        self.stem = nn.Sequential(
            ConvBN(3, s(32), 3, stride=2),
            ConvBN(s(32), s(32), 3),
            ConvBN(s(32), s(64), 3, pad=1),
            nn.MaxPool2d(3, stride=2),
            ConvBN(s(64), s(80), 1),
            ConvBN(s(80), s(192), 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.mixed5b = _mixed5(s(192), 32, s)
        self.mixed5c = _mixed5(self.mixed5b.out_channels, 64, s)
        self.mixed5d = _mixed5(self.mixed5c.out_channels, 64, s)
        self.mixed6a = _mixed6a(self.mixed5d.out_channels, s)
        self.mixed6b = _mixed6(self.mixed6a.out_channels, 128, s)
        self.mixed6c = _mixed6(self.mixed6b.out_channels, 160, s)
        self.mixed6d = _mixed6(self.mixed6c.out_channels, 160, s)
        self.mixed6e = _mixed6(self.mixed6d.out_channels, 192, s)
        self.aux = AuxHead(self.mixed6e.out_channels, num_classes, s)
        self.mixed7a = _mixed7a(self.mixed6e.out_channels, s)
        self.mixed7b = _mixed7(self.mixed7a.out_channels, s)
        self.mixed7c = _mixed7(self.mixed7b.out_channels, s)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(self.mixed7c.out_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor | InceptionOutput:
        x = self.mixed5d(self.mixed5c(self.mixed5b(self.stem(x))))
        x = self.mixed6e(self.mixed6d(self.mixed6c(self.mixed6b(self.mixed6a(x)))))
        middle = x
        x = self.mixed7c(self.mixed7b(self.mixed7a(x)))
        logits: Tensor = self.fc(self.dropout(self.avgpool(x).flatten(1)))
        return InceptionOutput(logits, self.aux(middle)) if self.training else logits


def inception_v3(
    *, num_classes: int = 1000, width: float = 1.0, dropout: float = 0.5
) -> InceptionV3:
    """Build Inception-v3; it returns ``InceptionOutput`` in training mode and logits otherwise.

    Input 3×299² (75² at least). Szegedy et al., "Rethinking the Inception architecture for computer
    vision", 2015.
    """
    return InceptionV3(num_classes, width, dropout)
