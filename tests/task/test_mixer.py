"""Models without self-attention, or with a window, on one's own data: trained, kept and used."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.cli.arguments import parse
from regard.model.baseline import Convolution, Recurrent
from regard.task import classify, label, language, translate
from regard.task.load import load
from regard.task.specs import NAMES, spec
from tests.task.samples import SHAPE, TRAINING, backwards, lines, sentences, trained

TEXTS = sentences(131)
KINDS = {"lstm": Recurrent, "gru": Recurrent, "convolution": Convolution}


@pytest.mark.parametrize("name", NAMES)
def test_every_task_has_the_flags(name: str) -> None:
    task = spec(name)
    flags = ["--model.mixer", "convolution", "--model.kernel", "7"]
    config = parse(task.config, task.preset("tiny"), flags, "train")
    assert (config.model.mixer, config.model.kernel) == ("convolution", 7)
    config = parse(task.config, task.preset("tiny"), ["--model.window", "16"], "train")
    assert config.model.window == 16
    assert task.preset("tiny").model.window is None


@pytest.mark.usefixtures("unchecked")  # thousands of calls
@pytest.mark.parametrize("changed", [{"mixer": "lstm"}, {"mixer": "convolution"}, {"window": 2}])
def test_translate(tmp_path: Path, changed: dict[str, Any]) -> None:
    pairs = lines(tmp_path / "pairs.tsv", [f"{text}\t{backwards(text)}" for text in TEXTS])
    config = translate.Config(
        pairs=(pairs,),
        words="characters",
        held_out=5,
        longest=24,
        model=replace(SHAPE, **changed),
        training=TRAINING,
        cache=str(tmp_path / "cache"),
    )
    task = translate.build(config)
    trained(task, TRAINING, tmp_path / "run")
    translator: Any = load(tmp_path / "run")
    assert vars(translator.model.config) | changed == vars(translator.model.config)
    if mixer := changed.get("mixer"):
        assert isinstance(translator.model.encoder.blocks[0].attention, KINDS[mixer])
    # A batch gives what single sentences give.
    assert translator.translate(TEXTS[:3]) == [translator.translate([t])[0] for t in TEXTS[:3]]
    scores = translate.evaluate(tmp_path / "run", beams=2).scores
    assert {"bleu", "chrf"} <= scores.keys()
    # A run goes on, and another starts from it.
    longer = replace(TRAINING, steps=5)
    again = translate.build(replace(config, training=longer), tmp_path / "run")
    assert trained(again, longer, tmp_path / "run").step == 5
    assert translate.build(replace(config, start=str(tmp_path / "run"))).model.config.width == 16


@pytest.mark.parametrize("mixer", KINDS)
def test_label_and_generate(tmp_path: Path, mixer: Any) -> None:
    rows = [f"{'long' if len(text) > 12 else 'short'}\t{text}" for text in TEXTS]
    table = lines(tmp_path / "texts.tsv", rows)
    shape = replace(label.Config().model, width=16, heads=2, feed_forward=16, layers=1, mixer=mixer)
    config = label.Config(texts=(table,), model=shape, vocabulary=280, training=TRAINING)
    trained(label.build(config), TRAINING, tmp_path / "labels")
    labeler: Any = load(tmp_path / "labels")
    assert set(labeler.label(TEXTS[:9])) <= {"long", "short"}
    assert "accuracy" in label.evaluate(tmp_path / "labels").scores

    text = lines(tmp_path / "text.txt", TEXTS)
    small = replace(language.Config().model, width=16, heads=2, feed_forward=16, layers=1)
    config_2 = language.Config(
        text=(text,),
        words="characters",
        model=replace(small, mixer=mixer),
        training=TRAINING,
        cache=str(tmp_path / "cache"),
    )
    trained(language.build(config_2), TRAINING, tmp_path / "text")
    generator: Any = load(tmp_path / "text")
    (written,) = generator.generate(["ab"], length=5, temperature=0)
    assert written.startswith("ab")


def test_images(tmp_path: Path) -> None:
    training = replace(TRAINING, batch=16)
    for changed in ({"mixer": "gru"}, {"window": 1}):
        tiny = classify.preset("tiny")
        config = replace(
            tiny,
            augmentation=type(tiny.augmentation)(),
            model=replace(tiny.model, layers=1, **changed),
            training=training,
        )
        name = min(changed)
        trained(classify.build(config), training, tmp_path / name)
        assert getattr(load(tmp_path / name).model.config, name) == changed[name]
