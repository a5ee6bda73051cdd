"""Split predictions equal one device's, in every format; an export is an ordinary state dict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
import zarr
from typer.testing import CliRunner

from small_runs import Segmenter, make_set, recipe, trained
from tilewise import Degrees, Layout, Mesh
from tilewise.cli.app import app
from tilewise.comm.pool import exhausted
from tilewise.data.open import open_source
from tilewise.data.output import check_output, chunks, create_output, open_output
from tilewise.errors import DataError, RecipeError
from tilewise.testing import ranks
from tilewise.train.manifest import Manifest
from tilewise.train.payload import Payload
from tilewise.train.predict import Prediction, _judged, batch_size, predict, recipe_of
from tilewise.train.resume import checkpoint_in

Saved = tuple[Path, Path, Segmenter]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Train a little and return the set, the run, and the plain model with the run's values."""
    folder = tmp_path_factory.mktemp("predict")
    data = make_set(folder / "set", segment=True)
    trained(2, recipe(data, segment=True, plan="d2", train_epochs=1), folder / "run")
    done = CliRunner().invoke(
        app, ["export", str(folder / "run"), str(folder / "model.safetensors"), "--json"]
    )
    assert done.exit_code == 0, done.output
    payload = Payload(folder / "model.safetensors")
    model = Segmenter().double()
    model.load_state_dict({name: payload.tensor(name).clone() for name in payload.entries})
    assert json.loads(done.stdout)["tensors"] == len(payload.entries)
    return data, folder / "run", model.eval()


def run(mesh: Mesh, options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = exhausted(predict(mesh, options), lambda done: None)
    return found


def read(path: Path) -> Any:
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".zarr":
        group: Any = zarr.open_group(path, mode="r")
        return group["y"][:]
    with h5py.File(path, "r") as file:
        return file["y"][:]


@pytest.mark.parametrize(
    ("count", "plan", "name", "batch"),
    [
        (2, "d2", "y.npy", 1),
        (4, "h2 w2", "y.h5", 0),
        (3, "w3", "y.zarr", 3),
        (4, "n2 d2", "z.h5", 3),
        (4, "d2 f2", "z.npy", 2),
    ],
)
def test_predictions_equal_one_device(
    count: int, plan: str, name: str, batch: int, saved: Saved, tmp_path: Path
) -> None:
    data, folder, model = saved
    with torch.no_grad():
        expected = model(torch.from_numpy(np.load(data / "x.npy")).double())
    options: dict[str, Any] = {
        "checkpoint": str(checkpoint_in(folder)), "data": str(data), "plan": plan, "batch": batch,
    }  # fmt: skip
    ranks(count, run, {**options, "out": str(tmp_path / name)})
    np.testing.assert_allclose(read(tmp_path / name), expected.numpy(), rtol=1e-9, atol=1e-12)
    classes = tmp_path / f"classes-{name}"
    ranks(count, run, {**options, "out": str(classes), "classes": True})
    assert read(classes).dtype == np.uint8
    np.testing.assert_array_equal(read(classes), expected.argmax(1).numpy())


@pytest.mark.parametrize(
    ("plan", "trained", "batch"),
    [
        ("d2", [4, 2, 7, 6, 5], 4),  # as in training
        ("d4", [4, 2, 7, 6, 5], 8),  # on twice as many ranks
        ("h1", [4, 2, 7, 6, 5], 2),
        ("d2", [4, 2, 7, 3, 2], 1),  # trained on crops
        ("n2", [4, 2, 7, 3, 2], 2),
        ({"outer": "n3"}, None, 3),  # saved by an earlier version
        ("auto", None, 1),
        ("d2", [4, 2, 14, 12, 10], 10),  # all there are
    ],
)
def test_a_batch_is_what_training_held(
    plan: Any, trained: list[int] | None, batch: int, saved: Saved
) -> None:
    data, folder, _ = saved
    task = Prediction(str(checkpoint_in(folder)), str(data), "y.npy", plan)
    found = Manifest.read(checkpoint_in(folder).absolute())
    assert found.extra["input"] == [4, 2, 7, 6, 5]
    extra = {name: one for name, one in found.extra.items() if name != "input"}
    other = replace(found, extra=extra if trained is None else extra | {"input": trained})
    texts = list(plan.values()) if isinstance(plan, dict) else [plan]
    count = 2 if plan == "auto" else max(Degrees.parse(text).product for text in texts)
    with mock.patch.object(Manifest, "read", return_value=other):
        assert batch_size(count, task, open_source(data, ["x"])) == batch


def one_and_a_half(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss of one's own, with calls that a plan names."""
    return ((output - target).abs() ** 1.5).mean()


def judge(loss: str, tmp_path: Path) -> tuple[Any, Any, str]:
    """Train a regressor split; returns its outputs and classes, predicted by the saved plan."""
    data = make_set(tmp_path / "set")
    trained(2, recipe(data, plan="d2", train_epochs=1, train_loss=loss), tmp_path / "run")
    folder = checkpoint_in(tmp_path / "run")
    plan = json.dumps(Manifest.read(folder.absolute()).plan)
    options = {"checkpoint": str(folder), "data": str(data), "plan": plan}
    ranks(2, run, {**options, "out": str(tmp_path / "y.npy")})
    ranks(2, run, {**options, "out": str(tmp_path / "c.npy"), "classes": True})
    return read(tmp_path / "y.npy"), read(tmp_path / "c.npy"), plan


def test_a_plan_that_names_calls_of_the_loss_predicts(tmp_path: Path) -> None:
    outputs, classes, plan = judge(f"{__file__}:one_and_a_half", tmp_path)
    assert '"#' in plan
    np.testing.assert_array_equal(classes, outputs.argmax(1))


def test_logits_of_yes_and_no_become_ones_and_zeros(tmp_path: Path) -> None:
    outputs, classes, _ = judge("binary_cross_entropy", tmp_path)
    assert classes.dtype == np.uint8
    np.testing.assert_array_equal(classes, outputs > 0)


def test_one_channel_has_no_classes(saved: Saved) -> None:
    _, folder, _ = saved
    read_from = recipe_of(checkpoint_in(folder))
    with pytest.raises(RecipeError, match="leave --classes out"):
        _judged(read_from, Layout.replicated((4, 1, 7), ranks=1))


@pytest.mark.parametrize("suffix", [".h5", ".npy", ".zarr"])
@pytest.mark.parametrize("degrees", ["n2 d2", "h3", "w5", "d2 h2 w2", "1"])
def test_slabs_fill_a_file_in_any_order(suffix: str, degrees: str, tmp_path: Path) -> None:
    whole = np.arange(3 * 2 * 4 * 6 * 5, dtype="float32").reshape(3, 2, 4, 6, 5)
    layout = Layout.of(whole.shape, "n.dhw", degrees, ranks=Degrees.parse(degrees).product)
    path = tmp_path / f"out{suffix}"
    check_output(path)
    create_output(path, layout, 3, "float32")
    for rank in reversed(range(layout.ranks)):
        slab = layout.slab(rank)
        open_output(path).write([part.start for part in slab], whole[slab])
    np.testing.assert_array_equal(read(path), whole)
    with pytest.raises(DataError, match="exists already"):
        check_output(path)
    for dim, size in enumerate(chunks(layout), start=1):
        starts = {layout.intervals(rank)[dim][0] for rank in range(layout.ranks)}
        assert all(start % size == 0 for start in starts)


def test_an_export_in_torchs_format_and_names_that_will_not_do(
    saved: Saved, tmp_path: Path
) -> None:
    _, folder, model = saved
    runner = CliRunner()
    out = tmp_path / "model.pt"
    assert runner.invoke(app, ["export", str(folder), str(out)]).exit_code == 0
    state = torch.load(out, weights_only=True)
    assert set(state) == set(model.state_dict())
    again = runner.invoke(app, ["export", str(folder), str(out)])
    assert "exists already" in str(again.exception)
    other = runner.invoke(app, ["export", str(folder), str(tmp_path / "model.onnx")])
    assert "must end in .safetensors or .pt" in str(other.exception)
