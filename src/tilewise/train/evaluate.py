"""Measure a split model on samples that it was not trained on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.data import Batch
from tilewise.graph import ParallelModel
from tilewise.train.metrics import Metric, Tally
from tilewise.train.precision import Precision


@torch.no_grad()
def evaluate(
    model: ParallelModel,
    batches: Iterable[Batch],
    metrics: list[Metric],
    precision: Precision,
    *,
    own_loss: bool = False,
) -> dict[str, float]:
    """Return the metrics over all batches, in evaluation mode; the same on every rank.

    With `own_loss` the loss is the mean of the batches' losses, weighted by their samples.
    """
    model.eval()
    tally = Tally(model.mesh, metrics)
    total = samples = 0.0
    for batch in batches:
        if len(batch) != 2 and metrics:
            raise ValueError(f"metrics take one input and one target, not {len(batch)} fields")
        shapes = [(batch.size, *layout.shape[1:]) for layout in model.input_layouts]
        here = model.at(*shapes)
        with precision.autocast():
            if metrics:
                output = here(batch[0])
                tally.add(output, batch[1], here.output_layouts[0], here.input_layouts[1])
            if own_loss:
                total += float(here.loss(*batch)) * batch.size
                samples += batch.size
    found = tally.report()
    return {"loss": total / samples, **found} if own_loss and samples else found
