"""Helpers the networks share: scaled channel counts and weight initialisation."""

from torch import nn


def scaled(channels: int, width: float) -> int:
    """Return ``channels`` times ``width``, rounded to an integer of at least 1."""
    if width <= 0:
        raise ValueError(f"width must be positive, got {width}")
    return max(1, round(channels * width))


def he_init(model: nn.Module) -> None:
    """Draw every convolution's weight as in He et al. (2015) and zero its bias.

    The default of PyTorch shrinks the signal layer by layer, which deep networks without batch
    normalisation do not survive.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
