"""The 3-D U-Net: volumetric segmentation by a contracting and an expanding path."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tilewise.models._build import he_init, scaled

LEVELS = ((32, 64), (64, 128), (128, 256))
BOTTOM = (256, 512)


def _double_conv(in_channels: int, mid: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv3d(in_channels, mid, 3, padding=1, bias=False),
            bn1=nn.BatchNorm3d(mid),
            relu1=nn.ReLU(inplace=True),
            conv2=nn.Conv3d(mid, out_channels, 3, padding=1, bias=False),
            bn2=nn.BatchNorm3d(out_channels),
            relu2=nn.ReLU(inplace=True),
        )
    )


class UNet3d(nn.Module):
    """Three levels of convolution pairs on either side of a bottom pair, joined by skips."""

    def __init__(self, in_channels: int, num_classes: int, width: float) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        self.pool = nn.MaxPool3d(2)
        self.deconv = nn.ModuleList()
        self.up = nn.ModuleList()
        channels, skips = in_channels, []
        for first, second in LEVELS:
            self.down.append(_double_conv(channels, scaled(first, width), scaled(second, width)))
            channels = scaled(second, width)
            skips.append(channels)
        bottom = scaled(BOTTOM[1], width)
        self.bottom = _double_conv(channels, scaled(BOTTOM[0], width), bottom)
        channels = bottom
        for skip in reversed(skips):
            self.deconv.append(nn.ConvTranspose3d(channels, channels, 2, stride=2, bias=False))
            self.up.append(_double_conv(channels + skip, skip, skip))
            channels = skip
        self.head = nn.Conv3d(channels, num_classes, 1, bias=False)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for deconv, up in zip(self.deconv, self.up, strict=True):
            x = up(torch.cat([deconv(x), skips.pop()], 1))
        out: Tensor = self.head(x)
        return out


def unet3d(*, in_channels: int = 1, num_classes: int = 3, width: float = 1.0) -> UNet3d:
    """Build the 3-D U-Net with padded convolutions, so that the output has the input's size.

    Returns logits per voxel. No layer has a bias, the deconvolutions keep their channel count, and
    batch norm has its scale and shift: 19.07 M parameters. Input sizes are multiples of 8. Çiçek et
    al., "3D U-Net: learning dense volumetric segmentation from sparse annotation", 2016.
    """
    return UNet3d(in_channels, num_classes, width)
