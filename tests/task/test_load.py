"""From a folder to something that works, whatever the folder."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard import checkpoint
from regard.data.tokenizer import Tokenizer
from regard.model.language import LanguageConfig, LanguageModel
from regard.model.transformer import Transformer, TransformerConfig
from regard.task.folder import model_folder, run_config
from regard.task.load import load
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from regard.task.translate import Config, build
from regard.task.translator import Translator
from tests.task.samples import SHAPE, TRAINING, lines, sentences

TOKENIZER = Tokenizer.characters(["abc "])
ABOUT = {"name": "translate", "start": 1, "end": 2, "pad": 0, "banned": [0, 1], "beams": 1}


def model() -> Transformer:
    return build_transformer(SHAPE, (TOKENIZER, TOKENIZER), seed=3)


def save(folder: Path, about: dict[str, object] | None, tokenizer: bool = True) -> Path:
    files = {"tokenizer.json": TOKENIZER.to_bytes()} if tokenizer else {}
    checkpoint.save(folder, model(), files=files, task=about)
    return folder


def test_it_is_a_part_of_the_public_face(tmp_path: Path) -> None:
    translator = regard.load(save(tmp_path / "model", ABOUT))
    assert isinstance(translator, Translator)
    assert isinstance(translator.model, Transformer)
    assert translator.tokenizer.size == TOKENIZER.size
    assert len(translator.translate(["abc", ""])) == 2


def test_what_was_saved_says_the_same(tmp_path: Path) -> None:
    settings = SearchSettings.read(ABOUT, "here")
    fresh = Translator(model().eval(), (TOKENIZER, TOKENIZER), settings)
    texts = ["abc", "c a", "bb"]
    assert load(save(tmp_path / "model", ABOUT)).translate(texts) == fresh.translate(texts)


def test_a_runs_best_model_counts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"format": 1, "kind": "run"}), encoding="utf-8")
    with pytest.raises(ValueError, match="saved no model yet"):
        load(run)
    save(run / "last", ABOUT)
    assert model_folder(run) == run / "last"
    save(run / "best", ABOUT)
    assert model_folder(run) == run / "best"
    assert run_config(run) == {"format": 1, "kind": "run"}
    assert run_config(run / "best") is None
    assert isinstance(load(run), Translator)
    with pytest.raises(ValueError, match=r"is that of a run; name its model: .*best$"):
        checkpoint.load(run)


def test_dtype_and_parts_of_ones_own(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", ABOUT)
    assert load(folder, dtype=torch.float64).model.output.weight.dtype == torch.float64
    own = model()
    assert load(folder, model=own).model is own


def test_without_a_tokenizer_only_translating_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", ABOUT, tokenizer=False)
    translator = load(folder)
    assert isinstance(translator.model, Transformer)
    with pytest.raises(ValueError, match="has no tokenizer"):
        translator.translate(["abc"])


@pytest.mark.parametrize("about", [None, {"name": "juggle"}])
def test_an_unknown_task_is_named(tmp_path: Path, about: dict[str, object] | None) -> None:
    said = "no task" if about is None else "the unknown task 'juggle'"
    message = rf"names {said} \(such as translate, .*checkpoint.load\(folder\).model"
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path / "model", about))


def test_a_model_that_is_not_the_tasks_is_refused(tmp_path: Path) -> None:
    other = LanguageModel(LanguageConfig(7, width=8, heads=2, feed_forward=8, layers=1))
    files = {"tokenizer.json": TOKENIZER.to_bytes()}
    checkpoint.save(tmp_path / "model", other, files=files, task=ABOUT)
    with pytest.raises(ValueError, match="holds a LanguageModel"):
        load(tmp_path / "model")
    for name in ("label", "language"):
        with pytest.raises(ValueError, match="holds a Transformer"):
            load(save(tmp_path / name, {**ABOUT, "name": name}))


def test_a_marian_folder_translates_and_is_trained_on(tmp_path: Path) -> None:
    """Two SentencePiece models, one vocabulary, and the padding token as the start."""
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = sentences(31)
    spm = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=spm,
        vocab_size=31,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    names = ["</s>", "<unk>", *pieces, "<pad>"]
    vocabulary = json.dumps({name: i for i, name in enumerate(names)}).encode()
    files = {"source.spm": spm.getvalue(), "target.spm": spm.getvalue(), "vocab.json": vocabulary}
    pad = len(names) - 1
    about = {
        "name": "translate",
        "start": pad,
        "end": 0,
        "pad": pad,
        "banned": [pad],
        "beams": 2,
        "length": 20,
        "length_penalty": 1.0,
        "renormalize": True,
    }
    marian = Transformer(TransformerConfig(len(names), **asdict(SHAPE)))
    checkpoint.save(tmp_path / "marian", marian, files=files, task=about)
    translator = load(tmp_path / "marian")
    assert isinstance(translator, Translator)
    assert len(translator.translate([*texts[:3], ""])) == 4
    assert translator.attention(texts[0], "ab").source[-1] == "</s>"

    table = lines(tmp_path / "pairs.tsv", [f"{text}\t{text}" for text in texts])
    config = Config(
        pairs=(table,),
        start=str(tmp_path / "marian"),
        held_out=3,
        beams=2,
        cache=str(tmp_path / "cache"),
        training=TRAINING,
    )
    task = build(config)
    assert task.search == translator.search
    assert task.files() == files
    batch = task.batch(np.arange(2), 1)
    assert batch.target[0, 0] == pad
    assert batch.labels[0, -1] == 0


def test_no_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        load(tmp_path / "nowhere")
