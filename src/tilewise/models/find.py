"""Find the function that a model's name means."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from tilewise import models
from tilewise.errors import InputError


def find_model(name: str) -> Callable[..., nn.Module]:
    """Return the callable that `package.module:callable`, `file.py:callable` or a name means."""
    if ":" not in name:
        try:
            return models.get(name)
        except ValueError as error:
            raise InputError(f"model: {error}") from error
    return find_function(name, "model")


def find_function(name: str, what: str) -> Callable[..., Any]:
    """Return the callable that `package.module:callable` or `file.py:callable` means.

    `what` says in errors what it is for.
    """
    source, _, attribute = name.rpartition(":")
    module = (
        _load_file(Path(source), what) if source.endswith(".py") else _load_module(source, what)
    )
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"{what}: {source} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{what}: {name} is a {type(found).__name__}, not something to call")
    return found  # type: ignore[no-any-return]


def _load_file(path: Path, what: str) -> Any:
    if not path.is_file():
        raise InputError(f"{what}: there is no file {path.absolute()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{what}: {path} cannot be loaded: {error}") from error
    return module


def _load_module(name: str, what: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{what}: module {name!r} cannot be imported: {error}") from error
