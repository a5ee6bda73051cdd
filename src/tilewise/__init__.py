"""Train any PyTorch CNN on many devices by splitting every dimension that a convolution has."""

__version__ = "0.1.0"
