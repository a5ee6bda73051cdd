"""Data: every rank reads its own slab, once."""

from tilewise.data.augment import Crop, Flip, Noise, Roll, Scale, Shift, Transpose
from tilewise.data.batch import Batch
from tilewise.data.hdf5 import Hdf5Source
from tilewise.data.loading import Loader, loader
from tilewise.data.nifti import NiftiSource
from tilewise.data.npy import NpySource
from tilewise.data.open import open_source
from tilewise.data.slabs import read_cover
from tilewise.data.source import Field, Source
from tilewise.data.summary import Summary
from tilewise.data.tfrecord import TfRecordSource
from tilewise.data.transform import Cast, Log1p, Normalize, Transform
from tilewise.data.views import Permuted, Subset, SubVolumes, split
from tilewise.data.whole import WholeSamples
from tilewise.data.zarr import ZarrSource

__all__ = [
    "Batch",
    "Cast",
    "Crop",
    "Field",
    "Flip",
    "Hdf5Source",
    "Loader",
    "Log1p",
    "NiftiSource",
    "Noise",
    "Normalize",
    "NpySource",
    "Permuted",
    "Roll",
    "Scale",
    "Shift",
    "Source",
    "SubVolumes",
    "Subset",
    "Summary",
    "TfRecordSource",
    "Transform",
    "Transpose",
    "WholeSamples",
    "ZarrSource",
    "loader",
    "open_source",
    "read_cover",
    "split",
]
