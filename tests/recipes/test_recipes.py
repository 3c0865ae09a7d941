"""Recipes: what they ask for, what they train, and test sets that are scored once."""

import hashlib
import json
from dataclasses import replace
from inspect import getdoc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from regard.cli.main import main
from regard.recipes import images
from regard.recipes.book import RECIPES
from regard.recipes.recipe import SCORES, Recipe, files, needs_data, score
from regard.task.spec import Evaluation
from regard.task.specs import spec
from tests.task.samples import backwards, lines, sentences

SMALL = [
    *("--model.width", "16", "--model.heads", "2", "--model.feed-forward", "24"),
    *("--model.encoder-layers", "1", "--model.decoder-layers", "1"),
    *("--training.steps", "2", "--training.warmup", "1", "--training.no-tensorboard"),
    *("--training.device", "cpu", "--training.batch", "300", "--beams", "2"),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Every file that a recipe of texts may ask for."""
    folder = tmp_path / "data"
    folder.mkdir()
    english = sentences(40)
    for name in ("train", "val", "valid", "test", "newstest2014.ende"):
        some = english if name == "train" else english[:5]
        for side in ("en", "de", "fr"):
            lines(folder / f"{name}.{side}", [backwards(text) for text in some])
    for year in ("2016_flickr", "2017_flickr", "2017_mscoco"):
        for side in ("en", "de", "fr"):
            lines(folder / f"test_{year}.{side}", english[:3])
    return folder


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if name not in ("cifar10", "cifar10-long", "fashion-mnist")]
)
def test_a_recipe_is_a_whole_run(name: str, data: Path) -> None:
    made = RECIPES[name](data)
    task = spec(made.task)
    assert isinstance(made.config, task.config)
    assert made.tests
    for options in made.tests.values():
        assert set(options) <= set(task.options)
    told = getdoc(RECIPES[name]) or ""
    assert "Data:" in told
    assert "\n\n" in told


def test_a_folder_is_asked_for_where_one_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = [name for name, make in RECIPES.items() if not needs_data(make)]
    assert without == ["strips", "dates"]
    for name in without:
        RECIPES[name](tmp_path / "none")
        assert main(["recipes", name]) == 0
        assert capsys.readouterr().out.endswith(f"regard train --recipe {name} RUN\n")
    assert main(["recipes", "cifar10"]) == 0
    assert capsys.readouterr().out.endswith("regard train --recipe cifar10 RUN --data FOLDER\n")
    assert main(["recipes"]) == 0
    assert "Without --data: strips, dates." in capsys.readouterr().out


def test_the_commands(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in RECIPES)
    assert main(["recipes", "cifar10"]) == 0
    assert "SHA-1" in capsys.readouterr().out
    for words, said in (
        (["recipes", "cifar"], "did you mean cifar10?"),
        (["train", "--recipe", "dates"], "--recipe needs its name and a folder"),
        (["train", "--recipe", "date", "x"], "did you mean dates?"),
        (["train", "--recipe", "cifar10", "x", "--data", str(data)], "neither data_batch_1.bin"),
        (["train", "--recipe", "multi30k-en-de", "x", "--data", "none"], "none does not exist"),
        (["train", "--recipe", "fashion-mnist", "x", "--data", str(data)], "no train-images"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # of capsys' streams
def test_a_recipe_from_its_command_to_its_scores(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["train", "--recipe", "multi30k-en-de", str(run), "--data", str(data), *SMALL]
    words += ["--cache", str(tmp_path / "cache"), "--training.seed", "7"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "test_2016_flickr: bleu" in said
    kept = json.loads((run / SCORES).read_text())
    assert (kept["recipe"], kept["seed"]) == ("multi30k-en-de", 7)
    assert kept["seconds"] > 0
    cased, lowered = (
        kept["tests"][name]["signatures"]["bleu"]
        for name in ("test_2016_flickr", "test_2016_flickr, lowercased")
    )
    assert "case:mixed" in cased
    assert "case:lc" in lowered
    # Once means once.
    assert main(words) == 0
    assert "scored already" in capsys.readouterr().out


def test_scores_are_kept_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    dates = spec("dates")

    def evaluate(folder: Path, **options: Any) -> Any:
        calls.append(options)
        return Evaluation({"a": 0.5})

    changed = replace(dates, evaluate=evaluate)
    monkeypatch.setattr("regard.recipes.recipe.spec", lambda name: changed)
    tests, said = {"one": {"count": 3}, "two": {}}, list[str]()
    also = {"halved": lambda found: Evaluation({"a": found.scores["a"] / 2})}
    made = Recipe("dates", None, tests, also)
    first = score(made, tmp_path, "cpu", {"seed": 1}, said.append)
    assert [call.get("count") for call in calls] == [3, None]
    assert said == ["one: a 0.5", "one, halved: a 0.25", "two: a 0.5", "two, halved: a 0.25"]
    assert first["tests"]["two, halved"]["scores"] == {"a": 0.25}
    assert first["seed"] == 1
    assert score(made, tmp_path, "cpu", {"seed": 2}, said.append)["seed"] == 1
    assert len(calls) == 2


def test_files_may_be_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.en.gz").write_bytes(b"")
    assert files(tmp_path, "a.en") == (str(tmp_path / "a.en.gz"),)
    with pytest.raises(ValueError, match=r"has no b\.en, plain or compressed"):
        files(tmp_path, "b.en")


@pytest.mark.parametrize("form", ["bin", "webp"])
def test_both_forms_of_cifar10(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    # One real sheet stands for all six.
    pixels = rng.integers(0, 256, (10_000, 32, 32, 3), np.uint8)
    labels = rng.integers(0, 10, 10_000).astype(np.uint8)
    record = np.concatenate([labels[:, None], pixels.transpose(0, 3, 1, 2).reshape(-1, 3072)], 1)
    sha1 = hashlib.sha1(record.tobytes()).hexdigest()
    monkeypatch.setattr(images, "CIFAR10", dict.fromkeys(images.CIFAR10, sha1))
    sheet = pixels.reshape(100, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(3200, 3200, 3)
    first = tmp_path / f"data_batch_1.{form}"
    if form == "bin":
        record.tofile(first)
    else:
        Image.fromarray(sheet).save(first, lossless=True, method=0)
        labels.tofile(tmp_path / "test_labels.u8")
        np.tile(labels, 5).tofile(tmp_path / "train_labels.u8")
    for name in list(images.CIFAR10)[1:]:
        (tmp_path / f"{name}.{form}").hardlink_to(first)
    made = images.cifar10(tmp_path)
    with np.load(made.config.images) as train, np.load(made.tests["test"]["images"]) as test:
        assert train["images"].shape == (50_000, 32, 32, 3)
        assert np.array_equal(test["images"], pixels)
        assert np.array_equal(test["labels"], labels)
    # A damaged file is named.
    (tmp_path / "cache/regard/cifar10/test.npz").unlink()
    monkeypatch.setattr(images, "CIFAR10", dict.fromkeys(images.CIFAR10, "0" * 40))
    with pytest.raises(ValueError, match="is not as it was published"):
        images.cifar10(tmp_path)
