"""The mean of several models."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard import checkpoint
from regard.cli.main import main
from regard.model.transformer import Transformer, TransformerConfig

CONFIG = replace(
    TransformerConfig.tiny(20),
    width=16,
    heads=2,
    feed_forward=17,
    encoder_layers=1,
    decoder_layers=1,
)


def saved(
    folder: Path, seed: int, config: TransformerConfig = CONFIG, tokenizer: bytes = b"{}"
) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(config)
    checkpoint.save(folder, model, files={"tokenizer.json": tokenizer}, task={"name": "translate"})
    return model


def test_the_mean_of_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    models = [saved(folder, seed) for seed, folder in enumerate(folders)]
    out = tmp_path / "mean"
    assert main(["average", *map(str, folders), str(out)]) == 0
    assert "the mean of 3 models" in capsys.readouterr().out
    mean = checkpoint.load(out)
    assert mean.files["tokenizer.json"].read_bytes() == b"{}"
    assert mean.task == {"name": "translate"}
    states = [model.state_dict() for model in models]
    for name, value in mean.model.state_dict().items():
        want = torch.stack([state[name].double() for state in states]).mean(0)
        torch.testing.assert_close(value, want.float())


def test_a_run_s_kept_models(tmp_path: Path) -> None:
    for step, seed in ((5, 0), (9, 1)):
        saved(tmp_path / f"run/bests/{step:09}", seed)
    assert main(["average", str(tmp_path / "run"), str(tmp_path / "mean")]) == 0
    assert (tmp_path / "mean/model.safetensors").is_file()


def test_what_has_no_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "a", 0)
    saved(tmp_path / "wide", 1, replace(CONFIG, width=32))
    saved(tmp_path / "words", 2, tokenizer=b"[]")
    for names, said in (
        (["a"], "holds one model, and a mean needs two"),
        (["a", "wide"], "models of different shapes: width"),
        (["a", "words"], "different tokenizers"),
        (["a", "none"], "does not exist"),
    ):
        folders = [str(tmp_path / name) for name in names]
        assert main(["average", *folders, str(tmp_path / "mean")]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("command", ["average", "quantize", "import"])
def test_refuses_to_replace_a_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another model, a run's checkpoint and a new folder within a run."""
    for name in ("a", "b", "run/last"):
        saved(tmp_path / name, 0)
    (tmp_path / "run/config.json").write_text('{"kind": "run"}')
    (tmp_path / "config.json").write_text("another program's")
    folders = [str(tmp_path / "a")] * (2 if command == "average" else 1)
    for out, said in (
        ("b", "exists and is not an empty folder; name a new one"),
        ("run/last", "exists and is not an empty folder; name a new one"),
        ("run/new", "is within the run"),
    ):
        before = sorted(tmp_path.rglob("*"))
        assert main([command, *folders, str(tmp_path / out)]) == 2
        assert said in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "other", [{"labels": ["rose", "tulip"]}, {"size": [9, 8]}, {"mean": [0.5]}, {"std": [0.5]}]
)
def test_refuses_the_mean_of_unlike_tasks(
    other: dict[str, list[object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"name": "classify", "labels": ["cat", "dog"], "size": [8, 8], "mean": [0], "std": [1]}
    model = Transformer(CONFIG)
    checkpoint.save(tmp_path / "a", model, task={**task, "examples": 1})
    checkpoint.save(tmp_path / "b", model, task={**task, "examples": 2})
    checkpoint.save(tmp_path / "c", model, task={**task, **other})
    a, b, c, mean = (str(tmp_path / name) for name in ("a", "b", "c", "mean"))
    assert main(["average", a, b, mean]) == 0
    assert main(["average", a, c, mean + "2"]) == 2
    (name,) = other
    assert f"differ in their task: {name} is" in capsys.readouterr().err
    assert not Path(mean + "2").exists()
