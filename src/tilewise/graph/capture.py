"""Trace a model with torch.export, in any mode and for any input shape.

Fake tensors stand for the real ones, so a 512³ input costs no memory.
"""

from __future__ import annotations

import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from tilewise.errors import CaptureError
from tilewise.graph.graph import Program
from tilewise.graph.reader import Reader
from tilewise.graph.template import rebuild

WINDOWED = re.compile(r"(?:Conv|ConvTranspose|\w+Pool)([123])d|BatchNorm([23])d")


class Tracer:
    """A model kept ready to be traced in any mode and for any input shape."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None = None) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.loss = loss
        self.cumulative = _cumulative_norms(model)
        self.template = rebuild(
            model,
            lambda _, p: nn.Parameter(self.faked(p), requires_grad=p.requires_grad),
            lambda _, b: self.faked(b),
        )
        for path in self.cumulative:
            self.template.get_submodule(path).momentum = 0.1  # type: ignore[assignment]

    def faked(self, tensor: Any) -> Any:
        """Return a tensor of the same shape, dtype and device without memory."""
        if not isinstance(tensor, Tensor):
            return tensor
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        with self.fake:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)

    def trace(
        self,
        inputs: tuple[Any, ...],
        targets: tuple[Any, ...] | None = None,
        modes: dict[str, bool] | None = None,
    ) -> Program:
        """Trace one mode; with targets, the loss is the only output."""
        inputs = tree_map(self.faked, inputs)
        if modes is not None:
            for path, module in self.template.named_modules():
                module.training = modes[path]
        if targets is None:
            wrapped: nn.Module = _Plain(self.template)
            args = inputs
        else:
            wrapped = _WithLoss(self.template, self.loss, len(inputs))
            args = (*inputs, *tree_map(self.faked, targets))
        wrapped.training = self.template.training
        try:
            with _silence():
                exported = torch.export.export(wrapped, args, strict=False)
        except CaptureError:
            raise
        except Exception as error:
            raise self._untraceable(inputs, error) from error
        leaves = {
            path for path, module in self.template.named_modules() if not list(module.children())
        }
        trained = {
            name
            for name, parameter in self.template.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        return Reader(exported, leaves, self.cumulative, trained).program()

    def _untraceable(self, inputs: tuple[Any, ...], error: Exception) -> CaptureError:
        name = type(self.template).__name__
        shapes = [tuple(t.shape) for t in tree_flatten(inputs)[0] if isinstance(t, Tensor)]
        dims = _wrong_dims(error)
        if dims:
            return CaptureError(f"capture: {name} cannot take inputs {shapes}: {dims}")
        return CaptureError(
            f"capture: torch.export could not trace {name} for inputs {shapes}: "
            f"{_what_happened(error)}{_where(error)}"
        )

    def guess_targets(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a fake target that the loss accepts for the model's output.

        It has the output's shape, or is a class for every position of it (cross-entropy).
        """
        assert self.loss is not None
        with self.fake, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                output = self.template(*tree_map(self.faked, inputs))
            except Exception as error:
                raise self._untraceable(inputs, error) from error
            if not isinstance(output, Tensor):
                raise CaptureError(
                    "capture: the model has several outputs, so the shape of the loss' targets "
                    "cannot be guessed; pass example targets: targets=(target,)"
                )
            classes = torch.zeros(
                (output.shape[0], *output.shape[2:]), dtype=torch.int64, device=output.device
            )
            for guess in (torch.empty_like(output), classes):
                if guess is not classes and _takes_classes(self.loss):
                    continue
                try:
                    self.loss(output, guess)
                except (RuntimeError, ValueError, IndexError, TypeError):
                    continue
                return (guess,)
        raise CaptureError(
            "capture: could not guess the shape of the loss' target; pass an example: "
            "targets=(target,)"
        )


def _called(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Call the model; refuse one that puts a new tensor in a buffer's place."""
    before = dict(model.named_buffers())
    output = model(*inputs)
    for name, buffer in model.named_buffers():
        if buffer is not before.get(name):
            raise CaptureError(
                f"capture: forward assigns a new tensor to the buffer {name}; write into it "
                f"instead: self.{name.rpartition('.')[2]}.copy_(...)"
            )
    return output


class _Plain(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return _called(self.model, inputs)


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Any, inputs: int) -> None:
        super().__init__()
        self.model, self.loss, self.inputs = model, loss, inputs

    def forward(self, *tensors: Any) -> Any:
        output = _called(self.model, tensors[: self.inputs])
        return self.loss(output, *tensors[self.inputs :])


def _takes_classes(loss: Callable[..., Any]) -> bool:
    names = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}
    return getattr(loss, "__name__", type(loss).__name__) in names


def _cumulative_norms(model: nn.Module) -> set[str]:
    """List batch norms with momentum None; tracing them would read a value from a tensor."""
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
    }


@contextmanager
def _silence() -> Iterator[None]:
    """Keep to itself what torch prints while it traces; what matters is in the error."""
    known = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(known)


def _what_happened(error: BaseException) -> str:
    if type(error).__name__ in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return (
            "it branches on the value of a tensor, which a graph cannot; use torch.where or the "
            "like, or do it outside of forward"
        )
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _wrong_dims(error: BaseException) -> str:
    """Say how many dims a layer wants, if the error came from one that was given others."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer, x = frame.f_locals.get("self"), frame.f_locals.get("input")
        named = WINDOWED.fullmatch(type(layer).__name__)
        if named is None or not isinstance(layer, nn.Module) or not isinstance(x, Tensor):
            continue
        space = ("depth", "height", "width")[-int(named[1] or named[2]) :]
        if x.dim() != 2 + len(space):
            return (
                f"its {type(layer).__name__} wants {2 + len(space)} dims (samples, channels, "
                f"{', '.join(space)}), and is given {x.dim()}: {'×'.join(map(str, x.shape))}"
            )
    return ""


def _where(error: BaseException) -> str:
    """Name the last line of the model's own code that the error came through."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if not frame.filename.startswith((*ours, "<"))]
    last = [frame for frame in found if "site-packages" not in frame.filename][-1:]
    return (
        f" (at {last[0].filename}:{last[0].lineno})" if last and last[0].name == "forward" else ""
    )
