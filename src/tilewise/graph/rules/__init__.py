"""The rules: one file for each operator family; importing this package registers them."""

import contextlib
from tilewise.graph.rules import norm, random, reduce, shape, weighted, window
with contextlib.suppress(ImportError):
    from tilewise.graph.rules import loss
from tilewise.graph.rules import pointwise
from tilewise.graph.rules.undivided import fallback, whole
