"""What the papers published, to stand beside what is predicted and measured here.

Each curve is relative to its first point, as the papers give it.
"""

from __future__ import annotations

from dataclasses import dataclass

OYAMA = "Oyama et al., TPDS 2021, arXiv:2007.12856"
JIA = "Jia et al., ICML 2018, arXiv:1802.04924"


@dataclass(frozen=True)
class Published:
    """Speed-ups of a network from a first number of devices on.

    Args:
        model: the start of the network's name in `tilewise.models`.
        scaling: `strong`, or `weak` where the mini-batch grows with the devices.
        label: what was run.
        points: devices and speed-up over the first point; the first is 1 by definition.
        edge: the input's extent, where it matters.
    """

    model: str
    scaling: str
    label: str
    points: tuple[tuple[int, float], ...]
    source: str
    edge: int | None = None


PUBLISHED = (
    Published("cosmoflow", "strong", "CosmoFlow 512³, 16 samples, V100",
              ((128, 1.0), (512, 1.98)), OYAMA, 512),
    Published("cosmoflow", "strong", "CosmoFlow 512³, 64 samples, V100",
              ((512, 1.0), (2048, 1.77)), OYAMA, 512),
    Published("cosmoflow", "strong", "CosmoFlow 512³, 4 samples, V100",
              ((32, 1.0), (64, 1.66)), OYAMA, 512),
    Published("unet3d", "strong", "3-D U-Net 256³, 16 samples, V100",
              ((256, 1.0), (512, 1.42)), OYAMA, 256),
    Published("cosmoflow", "weak", "CosmoFlow 128³, V100",
              ((4, 1.0), (512, 65.4)), OYAMA, 128),
    Published("cosmoflow", "weak", "CosmoFlow 512³, 8 GPUs a sample, V100",
              ((8, 1.0), (2048, 147.31)), OYAMA, 512),
    Published("cosmoflow", "weak", "CosmoFlow 512³, 16 GPUs a sample, V100",
              ((16, 1.0), (2048, 71.32)), OYAMA, 512),
    Published("cosmoflow", "weak", "CosmoFlow 512³, 32 GPUs a sample, V100",
              ((32, 1.0), (2048, 37.2)), OYAMA, 512),
    Published("unet3d", "weak", "3-D U-Net 256³, 32 GPUs a sample, V100",
              ((32, 1.0), (1024, 28.4)), OYAMA, 256),
    Published("alexnet", "weak", "AlexNet, 32 samples a GPU, P100",
              ((1, 1.0), (16, 12.2)), JIA),
    Published("vgg16", "weak", "VGG-16, 32 samples a GPU, P100",
              ((1, 1.0), (16, 14.8)), JIA),
    Published("inception_v3", "weak", "Inception-v3, 32 samples a GPU, P100",
              ((1, 1.0), (16, 15.5)), JIA),
)  # fmt: skip


def published(model: str, scaling: str, edges: set[int]) -> list[Published]:
    """Return what is known of a network and a kind of scaling, at the edge shown if it has one."""
    return [
        one
        for one in PUBLISHED
        if model.startswith(one.model)
        and one.scaling == scaling
        and (one.edge is None or one.edge in edges)
    ]
