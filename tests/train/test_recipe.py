"""Recipes: what is wrong is named, with what is allowed and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise.cli.app import app
from tilewise.errors import RecipeError
from tilewise.train.check import check
from tilewise.train.recipe import changes, from_dict, read_recipe, shipped

WRONG = {
    "train.optimiser=sgd": [
        "no key train.optimiser",
        "did you mean 'optimizer'?",
        "takes loss",
    ],
    "train.optimizer=adan": ["train.optimizer (='adan')", "sgd, adam, adamw", "mean 'adam'?"],
    "lr=1e-3": ["there is no key lr", "did you mean train.lr?"],
    "train.batch=0": ["train.batch (=0)", "greater than or equal to 1"],
    "train.batch='8'": ["train.batch (='8')", "valid integer"],
    "train.accumulate=3": ["batch (=16) must be a multiple of accumulate (=3)"],
    "train.loss=mes": ["'mes' must be one of mse, mae", "did you mean 'mse'?"],
    "train.stop={metrc='mse'}": ["did you mean 'metric'?"],
    "metrics.names=['dise']": ["metrics.names", "did you mean 'dice'?"],
    "schedule.kind=cosin": ["schedule.kind (='cosin')", "did you mean 'cosine'?"],
    "data.make.kind=brian": ["data.make.kind", "did you mean 'brain'?"],
    "plan=5": ["plan (=5)"],
    "train.lr.x=1": ["lr is no table"],
    "train": ["must be section.key=value"],
}


@pytest.mark.parametrize("change", WRONG)
def test_what_is_wrong_is_named(change: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe("cosmoflow", [change])
    for part in WRONG[change]:
        assert part in str(caught.value)


def test_changes_are_toml_values_or_words() -> None:
    found = read_recipe(
        "cosmoflow", ["train.lr=1e-4", "train.optimizer=sgd", "data.shares=[0.5,0.5]", "plan=h2 w2"]
    )
    assert (found.train.lr, found.train.optimizer) == (1e-4, "sgd")
    assert (found.data.shares, found.plan) == ([0.5, 0.5], "h2 w2")


def test_a_recipe_is_found_by_file_and_by_name(tmp_path: Path) -> None:
    copy = tmp_path / "own.toml"
    copy.write_text(
        '[model]\nname = "vgg16"\n[data]\npath = "d"\n[train]\nloss = "mse"\nbatch = 1\n'
    )
    assert read_recipe(copy).model.name == "vgg16"
    with pytest.raises(RecipeError, match="did you mean 'unet3d'"):
        read_recipe("unet")
    with pytest.raises(RecipeError, match="there is no file"):
        read_recipe("nowhere/unet3d.toml")
    copy.write_text("model = ")
    with pytest.raises(RecipeError, match="not TOML"):
        read_recipe(copy)


@pytest.mark.parametrize("name", [n for n in shipped() if n != "brain"])
def test_shipped_recipes_check_out_before_their_sets_are_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(name)
    assert from_dict(recipe.as_dict()) == recipe
    found = check(recipe, 2)
    assert found.fits
    assert found.slab_shape != found.input_shape
    assert sum(found.samples.values()) == recipe.data.make.count  # type: ignore[union-attr]
    small = read_recipe(name, ["memory=1MiB"])
    assert not check(small, 2).fits


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.transforms.x=['log2']", "'log2' must be one of log1p, normalize"),
        ("data.transforms={z=['log1p']}", "names 'z'; the fields are x, y"),
        ("data.augment=[{flip={dim='d'}}]", "flip: .*unexpected keyword"),
        ("metrics.names=['dice']", "dice of outputs .* needs one target"),
        ("model.frozen=['feetures']", "no layer matches 'feetures'"),
        ("model.args={size=33}", "size must be one of"),
        ("model.pretrained='nowhere.pt'", "there is no file nowhere.pt"),
        ("train.class_weights=[1.0]", "the loss 'mse' takes none"),
    ],
)
def test_what_only_the_check_can_see(
    change: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=said):
        check(read_recipe("cosmoflow", [change]), 2)


def test_an_auto_plan_is_checked_by_a_search_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "nothing"))
    small = ["plan=auto", "memory=40MiB"]
    alone = check(read_recipe("cosmoflow-mlperf", ["plan='1'"]), 2)
    found = check(read_recipe("cosmoflow-mlperf", small), 2)
    assert found.model_bytes < alone.model_bytes
    assert found.model_bytes <= 40 * 2**20
    assert "with the rates of machine 'lassen' finds: " in found.notes[0]
    command = ["train", "cosmoflow-mlperf", "--check", "--ranks", "2", "--plan", "auto"]
    refused = CliRunner().invoke(app, [*command, "--set", "memory=1MiB"])
    assert refused.exit_code == 1
    assert "memory (=1 MiB) is too small: the smallest plan" in refused.stderr


def test_what_changed_in_a_recipe_is_listed() -> None:
    before = {"plan": "n2", "train": {"lr": 1e-3, "stop": None}, "data": {"path": "a"}}
    now = {"plan": "d2", "train": {"lr": 1e-2, "stop": {"metric": "mse"}}, "data": {"path": "a"}}
    assert changes(before, now) == [
        "train.lr was 0.001 and is 0.01",
        "train.stop was None and is {'metric': 'mse'}",
    ]
