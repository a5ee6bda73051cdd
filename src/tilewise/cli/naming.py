"""Read models, shapes, arguments and plans from the command line."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewise import models
from tilewise.errors import TilewiseError
from tilewise.plan import Plan


class InputError(TilewiseError, ValueError):
    """Something on the command line that cannot be used."""


def find_model(name: str) -> Callable[..., nn.Module]:
    """Return the callable that `package.module:callable`, `file.py:callable` or a name means."""
    if ":" not in name:
        try:
            return models.get(name)
        except ValueError as error:
            raise InputError(f"model: {error}") from error
    source, _, attribute = name.rpartition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"model: {source} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"model: {name} is a {type(found).__name__}, not something to call")
    return found  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"model: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"model: {path} cannot be loaded: {error}") from error
    return module


def _load_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"model: module {name!r} cannot be imported: {error}") from error


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


def parse_dtype(text: str) -> torch.dtype:
    """Read float64, float32 or bfloat16."""
    known = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if text not in known:
        raise InputError(f"--dtype: {text!r} must be one of {', '.join(known)}")
    return known[text]


def parse_plan(text: str) -> str | dict[str, str] | Plan:
    """Read degrees, `pattern=degrees` pairs joined by commas, JSON, or a plan file."""
    if text.endswith(".json"):
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
