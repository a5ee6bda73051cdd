"""The mesh-tangling networks: fully convolutional, with one prediction per input pixel.

From Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained
parallelism", IPDPS 2019. Six blocks of convolution, batch norm, ReLU; the first convolution of a
block has stride 2. A feature map r times smaller than the input meets a 1×1 convolution with r²
output channels: one for each of the r×r pixels that a cell of the map stands for.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from tilewise.models._build import he_init, scaled

MESH1K_BLOCKS = (
    (128, 256, 256, 256, 256),
    (384,) * 5,
    (512,) * 5,
    (384,) * 5,
    (384,) * 5,
    (128,) * 5,
)
MESH2K_BLOCKS = tuple((channels,) * 3 for channels in (128, 256, 256, 384, 384, 128))


def _mesh(
    blocks: Sequence[Sequence[int]],
    strides: Sequence[int],
    width: float,
    in_channels: int,
    out_channels: int | None,
    pixels: bool,
) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels, reduction = in_channels, 1
    for i, (block, stride) in enumerate(zip(blocks, strides, strict=True), start=1):
        reduction *= stride
        for j, base in enumerate(block, start=1):
            kernel = 5 if i == j == 1 else 3
            block_channels = scaled(base, width)
            layers[f"conv{i}_{j}"] = nn.Conv2d(
                channels,
                block_channels,
                kernel,
                stride=stride if j == 1 else 1,
                padding=kernel // 2,
                bias=False,
            )
            layers[f"bn{i}_{j}"] = nn.BatchNorm2d(block_channels)
            layers[f"relu{i}_{j}"] = nn.ReLU(inplace=True)
            channels = block_channels
    predictions = reduction**2 if out_channels is None else out_channels
    layers["head"] = nn.Conv2d(channels, predictions, 1, bias=False)
    if pixels:
        layers["pixels"] = nn.PixelShuffle(reduction)
    model = nn.Sequential(layers)
    he_init(model)
    return model


def mesh1k(
    *,
    width: float = 1.0,
    in_channels: int = 18,
    out_channels: int | None = None,
    strides: Sequence[int] = (2, 2, 2, 2, 2, 1),
    pixels: bool = False,
) -> nn.Sequential:
    """Build the network for 1024² meshes: five convolutions a block, block 6 at stride 1.

    Returns logits, without the paper's final sigmoid, so that binary cross-entropy with logits
    applies: 1024 × H/32 × W/32, which ``pixel_shuffle(y, 32)`` turns into one map of H × W;
    ``pixels`` makes that the last layer. ``out_channels`` overrides the 1024. ``strides`` are the
    blocks'; smaller ones suit small meshes. Input sizes are multiples of their product, 32.
    """
    return _mesh(MESH1K_BLOCKS, strides, width, in_channels, out_channels, pixels)


def mesh2k(
    *,
    width: float = 1.0,
    in_channels: int = 18,
    out_channels: int | None = None,
    strides: Sequence[int] = (2, 2, 2, 2, 2, 2),
    pixels: bool = False,
) -> nn.Sequential:
    """Build the network for 2048² meshes: three convolutions a block, all blocks at stride 2.

    Returns logits, without the paper's final sigmoid, so that binary cross-entropy with logits
    applies: 4096 × H/64 × W/64, which ``pixel_shuffle(y, 64)`` turns into one map of H × W;
    ``pixels`` makes that the last layer. ``out_channels`` overrides the 4096. ``strides`` are the
    blocks'; smaller ones suit small meshes. Input sizes are multiples of their product, 64.
    """
    return _mesh(MESH2K_BLOCKS, strides, width, in_channels, out_channels, pixels)
