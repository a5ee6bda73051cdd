"""The rules: one file for each operator family; importing this package registers them."""

from tilewise.graph.rules import loss, norm, random, reduce, shape, weighted, window  # isort: skip
from tilewise.graph.rules import pointwise  # isort: skip - takes what is left
from tilewise.graph.rules.undivided import fallback, whole

__all__ = [
    "fallback",
    "loss",
    "norm",
    "pointwise",
    "random",
    "reduce",
    "shape",
    "weighted",
    "whole",
    "window",
]
