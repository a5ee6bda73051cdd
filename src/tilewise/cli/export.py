"""`tilewise export`: an ordinary state dict out of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from tilewise.cli.naming import InputError, named_checkpoint
from tilewise.errors import CheckpointError
from tilewise.train.checkpoint import whole_state_dict
from tilewise.train.payload import write_tensors


def export(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a run or of a checkpoint")],
    output: Annotated[Path, typer.Argument(help="a .safetensors or .pt file to write")],
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write the model of CHECKPOINT as a state dict that any PyTorch code can load."""
    if output.suffix not in (".safetensors", ".pt"):
        raise InputError(f"export: {output} must end in .safetensors or .pt")
    if output.exists():
        raise InputError(f"export: {output} exists already; name another file, or remove it")
    folder, _ = named_checkpoint("export", checkpoint)
    try:
        state, extra = whole_state_dict(folder)
    except CheckpointError as error:
        raise InputError(f"export: {error}") from error
    partial = output.with_name(f".{output.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".pt":
            torch.save(state, partial)
        else:
            name = extra.get("recipe", {}).get("model", {}).get("name", "")
            write_tensors(partial, state, {"format": "pt", "model": str(name)})
        partial.rename(output)
    except OSError as error:
        raise InputError(f"export: {output} cannot be written: {error}") from error
    facts = {
        "out": str(output),
        "checkpoint": str(folder),
        "tensors": len(state),
        "elements": sum(tensor.numel() for tensor in state.values()),
    }
    if json_:
        print(json.dumps(facts))
    else:
        Console().print(
            f"{output}: {facts['tensors']} tensors, {facts['elements']:,} elements, of {folder}",
            highlight=False,
        )
