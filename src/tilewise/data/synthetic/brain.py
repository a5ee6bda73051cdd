"""Brain: parts of a real head, the MNI152 template with its grey and white matter.

**Data.** x is 1 × D × H × W float32, the T1-weighted template in [0, 1], brain only; y is D × H × W
uint8: 0 background, 1 grey matter, 2 white matter, whichever of grey, white and neither is most
probable in the template's tissue maps. They come with nilearn (`pip install tilewise[brain]`), at
1 mm: 197 × 233 × 189 voxels (right, front, up), extents that no degree divides.

**Samples** are crops with edges of `size`, but never more than the volume's along right and up, nor
77 along front: with `--size 197` they are slabs, 197 × 77 × 189. Each is centred on a brain voxel
drawn at random, moved inward where it would reach over its part's border.

**Held out.** Every fourth sample (index 3, 7, …; `held_out` in set.json lists them) is cut from the
front third, y ≥ 156, of which the others show nothing (y < 156). Front to back, because the
template is symmetric: left is the mirror image of right.

**Baseline.** All background: accuracy 0.44 at size 64, Dice 0 for grey and white. The template is
the average of many heads and has little noise, so brightness tells most: two thresholds on x alone,
tuned on the samples that are not held out, reach Dice 0.97 (grey) and 0.98 (white) on those that
are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tilewise.data.synthetic.kind import Sample, class_counts, constant_class, generator
from tilewise.data.write import Array, Field
from tilewise.errors import DataError

SMALLEST = 8
CLASSES = ("background", "grey", "white")
EXTENTS = (197, 233, 189)
FRONT = 1
BORDER = 156
THICKEST = EXTENTS[FRONT] - BORDER
EVERY = 4


def edges(size: int) -> tuple[int, int, int]:
    """Return the extents of a sample."""
    most = (EXTENTS[0], THICKEST, EXTENTS[2])
    return min(size, most[0]), min(size, most[1]), min(size, most[2])


def fields(size: int) -> dict[str, Field]:
    """Return what a sample has."""
    return {"x": Field((1, *edges(size)), "float32"), "y": Field(edges(size), "uint8")}


def is_held_out(index: int) -> bool:
    """Return whether a sample is cut from the part kept for testing."""
    return index % EVERY == EVERY - 1


def sample(size: int, seed: int, index: int) -> Sample:
    """Cut one sample out of the template."""
    image, labels = template()
    box = crop(size, seed, index)
    return {"x": image[box][None].copy(), "y": labels[box].copy()}


def crop(size: int, seed: int, index: int) -> tuple[slice, ...]:
    """Return where in the volume a sample lies."""
    front = (BORDER, EXTENTS[FRONT]) if is_held_out(index) else (0, BORDER)
    part = [(0, EXTENTS[0]), front, (0, EXTENTS[2])]
    inside = _brain_voxels(is_held_out(index))
    centre = inside[generator("brain", seed, index).integers(len(inside))]
    box = []
    for at, edge, (low, high) in zip(centre.tolist(), edges(size), part):
        start = min(max(at - edge // 2, low), high - edge)
        box.append(slice(start, start + edge))
    return tuple(box)


@cache
def template() -> tuple[Array, Array]:
    """Return the whole image and its labels, from the files that nilearn brings."""
    try:
        from nilearn import datasets
    except ImportError as error:
        raise DataError(
            "brain: the MNI152 template comes with nilearn, which is not installed; "
            "pip install 'tilewise[brain]'"
        ) from error
    image, grey, white = (
        np.asarray(load(resolution=1).get_fdata(), np.float32)
        for load in (
            datasets.load_mni152_template,
            datasets.load_mni152_gm_template,
            datasets.load_mni152_wm_template,
        )
    )
    if image.shape != EXTENTS:
        raise DataError(f"brain: nilearn's template has extents {image.shape}, not {EXTENTS}")
    labels = np.stack([1 - grey - white, grey, white]).argmax(0).astype(np.uint8)
    return image, labels


@cache
def _brain_voxels(held_out: bool) -> Array:
    """Return the positions of grey and white matter in the part to train on or in the other."""
    _, labels = template()
    front = slice(BORDER, None) if held_out else slice(0, BORDER)
    places = np.argwhere(labels[:, front] > 0)
    places[:, FRONT] += front.start
    return places


def tally(y: Array) -> Array:
    """Count the voxels of each class."""
    return class_counts(y, len(CLASSES))


def baseline(tallies: Array) -> dict[str, Any]:
    """Score the predictor that gives every voxel the commonest class."""
    return constant_class(tallies, CLASSES)


def facts(size: int, count: int, seed: int) -> dict[str, Any]:
    """Return the classes, and which samples are kept for testing and where all lie."""
    boxes = [crop(size, seed, index) for index in range(count)]
    return {
        "classes": list(CLASSES),
        "held_out": [index for index in range(count) if is_held_out(index)],
        "held_out_from": {"dim": FRONT, "at": BORDER},
        "starts": [[part.start for part in box] for box in boxes],
        "source": "MNI152 template (ICBM 2009a symmetric, 1 mm), from the nilearn package",
    }
