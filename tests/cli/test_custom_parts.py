"""A run whose model has custom parts is refused by every command, and continued from Python."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import load
from regard.attention.core import Core
from regard.checks import check
from regard.cli.main import main
from regard.config import from_json
from regard.model.language import LanguageConfig, LanguageModel
from regard.task.specs import spec
from regard.train.fit import fit

WORDS = ("a", "man", "in", "red", "rides", "the", "bicycle", "and", "two", "dogs", "run", "through")


class Gentle(Core):
    """Attention with weights that differ less."""

    def forward(self, query: Tensor, *inputs: Tensor, **options: Any) -> Tensor:
        return super().forward(query / 2, *inputs, **options)


def with_gentle_cores(model: nn.Module) -> nn.Module:
    for block in model.decoder.blocks:
        block.attention.core = Gentle()
    return model


def task_with_custom_parts(folder: Path, steps: int):  # type: ignore[no-untyped-def]
    config = spec("language").preset("tiny")
    shape = {"layers": 1, "width": 12, "heads": 2, "feed_forward": 17}
    text = folder / "text"
    text.write_text("".join(" ".join(WORDS[n % 5 :: 1 + n % 3]) + "\n" for n in range(40)))
    config = replace(
        config,
        text=(str(text),),
        vocabulary=290,
        context=13,
        examples="lines",
        held_out=0.1,
        cache=str(folder / "cache"),
        model=replace(config.model, **shape),
        training=replace(config.training, steps=steps, minutes=None, epochs=None, device="cpu"),
    )
    task = spec("language").build(config)
    with_gentle_cores(task.model)
    return task, config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    task, config = task_with_custom_parts(folder, 2)
    fit(task, config.training, folder / "run")
    return folder / "run"


REFUSED = r"decoder.blocks.0.attention.core is Gentle(beta=None, dropout=0.0)"
COMMANDS = {
    "generate": "generate RUN a man",
    "evaluate": "evaluate RUN --texts TEXT",
    "check": "check RUN",
    "serve": "serve RUN",
    "export": "export RUN OUT --to torch-export",
    "average": "average RUN/best RUN/last OUT",
    "quantize": "quantize RUN OUT",
    "look": "look RUN",
    "compare": "compare RUN RUN --source TEXT --target TEXT",
    "cost": "cost RUN",
    "resume": "train --resume RUN",
    "again": "train --again RUN OUT",
    "from": "train --from RUN OUT",
    "start": "train language OUT --start RUN --text TEXT",
}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=[pytest.mark.slow] if name == "serve" else [])
        for name, words in COMMANDS.items()
    ],
)
def test_commands_refuse_a_run_with_custom_parts(
    words: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"RUN": str(run), "OUT": str(tmp_path / "out"), "TEXT": str(run.parent / "text")}
    for name, path in names.items():
        words = words.replace(name, path)
    status = main(words.split())
    error = capsys.readouterr().err
    assert status == 2, error
    assert REFUSED in error


def test_training_continues_only_with_the_same_parts(run: Path, tmp_path: Path) -> None:
    task, config = task_with_custom_parts(run.parent, 3)
    shutil.copytree(run, tmp_path / "run")
    plain = spec("language").build(config)
    with pytest.raises(ValueError, match=r"is a run of another model: .*Gentle") as error:
        fit(plain, config.training, tmp_path / "run")
    assert "\n" not in str(error.value)
    # A run that has saved nothing yet remembers them as well.
    shutil.rmtree(tmp_path / "run" / "last")
    with pytest.raises(ValueError, match=r"is a run of another model: .*Gentle"):
        fit(plain, config.training, tmp_path / "run")
    shutil.copytree(run / "last", tmp_path / "run" / "last")
    assert fit(task, config.training, tmp_path / "run").step == 3


def test_a_run_is_loaded_with_its_parts(run: Path) -> None:
    predictor = load(run, model=model_like(run))
    assert isinstance(predictor.model.decoder.blocks[0].attention.core, Gentle)


def model_like(run: Path) -> nn.Module:
    about = json.loads((run / "best" / "config.json").read_text())
    return with_gentle_cores(LanguageModel(from_json(LanguageConfig, about["model"])))


def test_a_model_with_custom_parts_is_checked(run: Path) -> None:
    names = ("fused = formula", "exported = native", "recorded = unrecorded")
    names += ("packed = padded", "loaded = saved", "resumed = uninterrupted")
    model = model_like(run)
    before = copy.deepcopy(model.state_dict())
    report = check(run, model=model, device="cpu", properties=names)
    assert all(torch.equal(before[name], part) for name, part in model.state_dict().items())
    status = {finding.name: finding.status for finding in report}
    reasons = {finding.name: finding.of for finding in report}
    assert "fails" not in status.values(), reasons
    assert {name for name in names if status[name] == "skipped"} == set(names[:3])
    assert "decoder.blocks.0.attention.core is Gentle(" in reasons["fused = formula"]
    assert "decoder.blocks.0.attention.core is a Gentle" in reasons["exported = native"]
    assert "(Gentle) overrides forward without weights" in reasons["recorded = unrecorded"]
