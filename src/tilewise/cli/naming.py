"""Read models, shapes, arguments and plans from the command line."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewise.errors import CheckpointError, InputError
from tilewise.models.find import find_model
from tilewise.plan import Plan
from tilewise.plan.given import is_file
from tilewise.train.manifest import Manifest
from tilewise.train.resume import checkpoint_in

__all__ = [
    "LOSSES", "InputError", "build_model", "find_model", "named_checkpoint", "parse_argument",
    "parse_dtype", "parse_loss", "parse_plan", "parse_shape",
]  # fmt: skip

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}


LOSSES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "mse": nn.functional.mse_loss,
    "cross_entropy": nn.functional.cross_entropy,
}
"""The losses that a step may be planned and simulated with."""


def named_checkpoint(command: str, folder: Path) -> tuple[Path, Manifest]:
    """Return the checkpoint that a folder of a run or of a checkpoint means, and its manifest."""
    try:
        found = checkpoint_in(folder)
        return found, Manifest.read(found.absolute())
    except CheckpointError as error:
        raise InputError(f"{command}: {error}") from error


def build_model(name: str, arguments: Sequence[str], dtype: torch.dtype, seed: int) -> nn.Module:
    """Call the model's function with `key=value` arguments, from a seed."""
    function = find_model(name)
    keywords = dict(parse_argument(argument) for argument in arguments)
    torch.manual_seed(seed)
    try:
        model = function(**keywords)
    except Exception as error:
        raise InputError(f"model: {name} with {keywords} raised {error!r}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {name} returned a {type(model).__name__}, not an nn.Module")
    return model.to(dtype)


def parse_argument(text: str) -> tuple[str, Any]:
    """Read `key=value`; the value is a Python literal, true, false, or a word."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"--arg: {text!r} must be key=value")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def parse_shape(text: str) -> tuple[int, ...]:
    """Read a shape such as 2x3x64x64."""
    try:
        shape = tuple(int(part) for part in text.lower().replace("×", "x").split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise InputError(f"--input: {text!r} must be extents joined by x, such as 2x3x64x64")
    return shape


def parse_dtype(text: str, *, known: Iterable[str] = DTYPES) -> torch.dtype:
    """Read a dtype's name, one of those that a command knows."""
    if text not in known:
        raise InputError(f"--dtype: {text!r} must be one of {', '.join(known)}")
    return DTYPES[text]


def parse_loss(text: str) -> Callable[..., Any] | None:
    """Read a loss' name."""
    if text not in LOSSES:
        raise InputError(f"--loss: {text!r} must be one of {', '.join(LOSSES)}")
    return LOSSES[text]


def parse_plan(text: str) -> str | dict[str, str] | Plan:
    """Read degrees, `pattern=degrees` pairs joined by commas, JSON, or a plan file."""
    if is_file(text):
        if not Path(text).is_file():
            raise InputError(f"--plan: there is no file {text}")
        return Plan.load(text)
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise InputError(f"--plan: not JSON: {error}") from error
    if "=" in text:
        pairs = [part.partition("=") for part in text.split(",")]
        return {pattern.strip(): degrees.strip() for pattern, _, degrees in pairs}
    return text
