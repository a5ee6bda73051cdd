"""Sets to train on, made offline: the same bytes from the same seed, whoever makes which sample."""

from tilewise.data.synthetic import brain, cosmology, images, mesh, organs
from tilewise.data.synthetic.generate import KINDS, generate, kind_named
from tilewise.data.synthetic.kind import Kind

__all__ = [
    "KINDS",
    "Kind",
    "brain",
    "cosmology",
    "generate",
    "images",
    "kind_named",
    "mesh",
    "organs",
]
