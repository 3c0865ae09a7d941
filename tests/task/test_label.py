"""Texts in classes, from scratch and on a trained translator's encoder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard import checkpoint
from regard.config import from_json, to_json
from regard.data.tokenizer import Tokenizer
from regard.model.classifier import ClassifierShape
from regard.task import label
from regard.task.label import Config, Labeler, build
from regard.task.load import load
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from tests.task.samples import SHAPE, TRAINING, lines, sentences, trained

TEXTS = sentences(131)
ROWS = [("long" if len(text) > 12 else "short", text) for text in TEXTS]
SMALL = ClassifierShape(width=16, heads=2, feed_forward=16, layers=1, norm="pre")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = lines(tmp_path / "texts.tsv", [f"{name}\t{text}" for name, text in ROWS])
    return Config(texts=(path,), vocabulary=280, held_out=0.2, model=SMALL, training=TRAINING)


@pytest.fixture
def translator(tmp_path: Path) -> str:
    tokenizer = Tokenizer.characters(TEXTS)
    model = build_transformer(SHAPE, (tokenizer, tokenizer), seed=5)
    about = {"name": "translate", **to_json(SearchSettings.of(tokenizer))}
    files = {"tokenizer.json": tokenizer.to_bytes()}
    checkpoint.save(tmp_path / "translator", model, files=files, task=about)
    return str(tmp_path / "translator")


def test_a_table_is_split_by_its_texts(config: Config) -> None:
    task = build(config)
    assert task.labels == ["long", "short"]
    assert len(task.train.ids) + len(task.held.ids) == len(ROWS)
    assert 10 < len(task.held.ids) < 45
    tokenizer = task.tokenizer
    train, held = ({tokenizer.decode(ids) for ids in part.ids} for part in (task.train, task.held))
    assert not train & held
    assert all(ids[-1] == tokenizer.end for ids in task.train.ids)
    for ids, number in zip(task.train.ids, task.train.labels.tolist()):
        assert (task.labels[number], tokenizer.decode(ids)) in ROWS


def test_columns_that_look_swapped_are_refused(config: Config) -> None:
    with pytest.raises(
        ValueError, match=r"only 2 differ; if label and text are swapped, add .* 0 1"
    ):
        build(replace(config, columns=(1, 0)))


def test_an_id_as_label_is_refused(tmp_path: Path) -> None:
    rows = [f"{n}\t{text}\t{name}" for n, (name, text) in enumerate(ROWS)]
    path = lines(tmp_path / "ids.tsv", ["id\ttext\tlabel", *rows])
    with pytest.raises(ValueError, match=r"if column 0 is an id.* is 'id\\ttext\\tlabel'"):
        build(Config(texts=(path,), model=SMALL, training=TRAINING))


def test_a_run_stops_if_more_than_a_tenth_of_the_lines_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "latin.tsv"
    texts = [f"{name}\t{text}{' é' * (n % 8 == 0)}" for n, (name, text) in enumerate(ROWS)]
    path.write_text("\n".join(texts) + "\n", encoding="latin-1")
    config = Config(texts=(str(path),), model=SMALL, training=TRAINING)
    with pytest.raises(ValueError, match=r"17 of 131 lines cannot be read.*Latin-1.*on-bad skip"):
        build(config)
    assert len(build(replace(config, on_bad="skip")).notes) == 1
    path.write_text("\n".join(texts[1:] * 2) + "\n", encoding="latin-1")
    path.write_bytes(path.read_bytes().replace(b"\xe9", b"e", 16))  # 16 of 260 lines are bad
    assert len(build(config).notes) == 1


def test_labels_that_look_alike_are_noticed(tmp_path: Path) -> None:
    names = ["caf\u00e9", "cafe\u0301", "big cat", "big\u00a0cat", "pos", "pos\u200b", "neg"]
    rows = [f"{names[n % 7]}\t{text}" for n, text in enumerate(TEXTS)]
    path = lines(tmp_path / "alike.tsv", rows)
    notes = "\n".join(build(Config(texts=(path,), model=SMALL, training=TRAINING)).notes)
    for group in (names[:2], names[2:4], names[4:6]):
        assert all(ascii(name) in notes for name in group)
    assert notes.count("look alike") == 3
    assert "neg" not in notes


def test_a_folder_for_each_class_is_the_same(tmp_path: Path, config: Config) -> None:
    for n, (name, text) in enumerate(ROWS):
        place = tmp_path / "texts" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{n}.txt").write_text(text.replace(" ", "\n"), encoding="utf-8")
    (tmp_path / "texts" / "long" / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "texts" / "short" / "empty.txt").write_bytes(b" \n")
    task = build(replace(config, texts=(str(tmp_path / "texts"),)))
    assert sorted(map(tuple, task.held.ids)) == sorted(map(tuple, build(config).held.ids))
    assert any("long/bad.txt, byte 0" in note for note in task.notes)
    assert any("short/empty.txt" in note for note in task.notes)
    with pytest.raises(ValueError, match="not UTF-8"):
        build(replace(config, texts=(str(tmp_path / "texts"),), on_bad="refuse"))


def test_texts_to_validate_on(tmp_path: Path, config: Config) -> None:
    path = lines(tmp_path / "valid.tsv", ["short\tab", "long\tab cd efg hij klm"])
    task = build(replace(config, valid=(path,)))
    assert len(task.train.ids) == len(ROWS)
    assert task.held.labels.tolist() == [1, 0]
    other = lines(tmp_path / "other.tsv", ["medium\tab"])
    with pytest.raises(ValueError, match="labels medium, which training has not"):
        build(replace(config, valid=(other,)))


def test_a_validation_set_that_is_the_training_set_is_noted(config: Config) -> None:
    (note,) = build(replace(config, valid=config.texts)).notes
    assert note.startswith(f"{config.texts[0]} is used to train and to validate")


def test_long_texts_are_cut(config: Config) -> None:
    task = build(replace(config, longest=3))
    assert int(task.train.lengths.max()) == 4


def test_a_run_labels_texts(tmp_path: Path, config: Config) -> None:
    run = tmp_path / "run"
    trained(build(config, run), TRAINING, run)
    assert trained(build(config, run), TRAINING, run, steps=4).step == 4
    labeler = load(run)
    assert isinstance(labeler, Labeler)
    texts = ["ab", "ab cd efg hij klm", ""]
    shares = labeler.probabilities(texts)
    assert torch.allclose(shares.sum(-1), torch.ones(3))
    assert torch.allclose(shares[1], labeler.probabilities(texts[1:2])[0], atol=1e-6)
    found = [labeler.labels[n] for n in shares.argmax(-1).tolist()]
    assert labeler.label(texts) == found
    assert labeler.label([]) == []
    said = checkpoint.load(run / "best").task
    assert said is not None
    assert from_json(Config, {**said["config"], "training": to_json(TRAINING)}) == config
    scores = label.evaluate(run).scores
    assert 0 <= scores.pop("macro_f1") <= 1
    assert scores == pytest.approx(build(config, run).evaluate(labeler.model))
    other = lines(tmp_path / "test.tsv", ["short\tab"])
    assert label.evaluate(run, texts=(other,)).scores["accuracy"] in (0.0, 1.0)
    # Going on from a classifier keeps its head where the labels are the same.
    again = build(replace(config, start=str(run)))
    assert torch.equal(again.model.head.weight, labeler.model.head.weight)
    labeler.model.head.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="the logits were not finite"):
        labeler.label(texts)


def test_a_translators_encoder_transfers(config: Config, translator: str) -> None:
    task = build(replace(config, vocabulary=8000, start=translator, freeze=True))
    encoder = load(translator).model
    assert torch.equal(task.model.tokens.table.weight, encoder.source.table.weight)
    free = {name for name, one in task.model.named_parameters() if one.requires_grad}
    assert free == {"head.weight", "head.bias"}
    tuned = build(replace(config, vocabulary=8000, start=translator))
    assert all(one.requires_grad for one in tuned.model.parameters())
    # The encoder says what it said before.
    ids = torch.tensor([tuned.held.ids[0]])
    memory = encoder.encode(ids)
    assert torch.allclose(tuned.model.eval().features(ids), memory, atol=1e-6)


def test_a_frozen_encoder_stays_as_it_is(tmp_path: Path, config: Config, translator: str) -> None:
    frozen = replace(config, vocabulary=8000, start=translator, freeze=True)
    task = build(frozen)
    before = [one.clone() for one in task.model.encoder.parameters()]
    trained(task, TRAINING, tmp_path / "run")
    for one, other in zip(before, task.model.encoder.parameters()):
        assert torch.equal(one, other)
    assert task.model.head.weight.abs().sum() > 0


@pytest.mark.usefixtures("unchecked")
def test_one_line_says_what_is_wrong(tmp_path: Path, config: Config) -> None:
    with pytest.raises(ValueError, match="there are no texts"):
        build(replace(config, texts=()))
    with pytest.raises(ValueError, match="freeze needs start"):
        replace(config, freeze=True)
    with pytest.raises(ValueError, match=r"held_out \(0.0\)"):
        replace(config, held_out=0.0)
    same = lines(tmp_path / "same.tsv", ["a\tb"] * 3)
    with pytest.raises(ValueError, match="there must be two classes"):
        build(replace(config, texts=(same,)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no folders"):
        build(replace(config, texts=(str(tmp_path / "empty"),)))
    with pytest.raises(ValueError, match="choose from tiny, base, big"):
        label.preset("huge")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["tiny", "base", "big"])
def test_presets_are_whole(size: str) -> None:
    config = label.preset(size)  # type: ignore[arg-type]
    assert from_json(Config, to_json(config)) == config
