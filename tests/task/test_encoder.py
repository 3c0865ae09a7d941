"""An encoder that learns from text alone, and what starts from it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard import checkpoint
from regard.config import from_json, to_json
from regard.data.batch import Hiding, share
from regard.data.seeding import rng
from regard.model.classifier import ClassifierShape, TextClassifier
from regard.model.encoder import EncoderConfig, EncoderShape, TextEncoder
from regard.model.transformer import Transformer, TransformerShape
from regard.task import encoder, label, translate
from regard.task.encoder import Config, Hidden, TextEmbedder, build
from regard.task.load import load
from regard.train.config import TrainingConfig
from regard.train.fit import Result
from tests.task.samples import TRAINING as SHORT
from tests.task.samples import backwards, lines, sentences
from tests.task.samples import trained as fitted

TEXTS = sentences(131)
TRAINING = replace(SHORT, smoothing=0.0)
SHAPE = EncoderShape(width=16, heads=2, feed_forward=16, layers=1, norm="pre", dropout=0.0)
FIXED: dict[str, Any] = {"words": "characters", "held_out": 0.2, "model": SHAPE}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = lines(tmp_path / "corpus.txt", TEXTS)
    return Config(text=(path,), cache=str(tmp_path / "cache"), training=TRAINING, **FIXED)


@pytest.fixture
def run(tmp_path: Path, config: Config) -> Path:
    trained(build(config), tmp_path / "run")
    return tmp_path / "run"


def trained(task: Any, run: Path, training: TrainingConfig = TRAINING) -> Result:
    return fitted(task, training, run)


def whole(task: Hidden) -> Any:
    return task.batch(np.arange(len(task.train.places)), 1)


# What is hidden


def test_each_line_is_read_whole_and_closed_as_sources_are(config: Config) -> None:
    task = build(config)
    batch = whole(task)
    ids = batch.inputs[0].clone()
    ids[batch.hidden] = batch.labels
    texts = [
        part.tolist() for part in ids.split(torch.as_tensor(batch.lengths.lengths).long().tolist())
    ]
    assert all(text[-1] == task.tokenizer.end for text in texts)
    assert {task.tokenizer.decode(text) for text in texts} < set(TEXTS)
    held = task.held.places[:, 0]
    assert len(texts) + len(held) == len(TEXTS)


def test_as_many_are_hidden_as_is_said_and_in_three_ways(config: Config) -> None:
    task = build(replace(config, hidden=0.4))
    seen, kept, masked, any_other = 0, 0, 0, 0
    for step in range(40):
        batch = task.batch(np.arange(len(task.train.places)), step)
        now = batch.inputs[0][batch.hidden]
        seen += len(now)
        kept += int((now == batch.labels).sum())
        masked += int((now == task.tokenizer.pad).sum())
        any_other += int(((now != batch.labels) & (now != task.tokenizer.pad)).sum())
        assert len(set(batch.hidden.tolist())) == len(batch.hidden) == int(batch.tokens)
        assert (batch.labels != task.tokenizer.end).all()
    assert kept + masked + any_other == seen
    letters = len(task.hiding.others)
    assert masked / seen == pytest.approx(0.8, abs=0.02)
    # One in ten is replaced by any token, which may happen to be the same.
    assert any_other / seen == pytest.approx(0.1 * (1 - 1 / letters), abs=0.02)
    characters = sum(len(text) for text in TEXTS) * 0.8
    assert seen / 40 == pytest.approx(0.4 * characters, rel=0.1)


def test_a_text_draws_from_its_own_numbers(config: Config) -> None:
    """Whatever else is in the batch, and however many processes share it."""
    task = build(config)
    indices = np.arange(20)
    together = task.batch(indices, 3)
    ends = np.cumsum(task.train.places[:20, 2])
    for part in share(indices, 1, 3):
        alone = task.batch(part, 3)
        rows = torch.cat(
            [
                together.inputs[0, int(ends[i] - task.train.places[i, 2]) : int(ends[i])]
                for i in part
            ]
        )
        assert torch.equal(alone.inputs[0], rows)
    assert not torch.equal(task.batch(indices, 4).inputs, together.inputs)


def test_at_least_one_token_is_hidden_and_never_the_end() -> None:
    hiding = Hiding(0.15, 0, np.arange(4, 9))
    assert hiding.counts(np.array([1, 2, 7, 100])).tolist() == [1, 1, 1, 15]
    seen, chosen = hiding.hide(np.array([5]), rng(0))
    assert chosen.tolist() == [0]
    assert len(seen) == 1


def test_long_texts_are_cut_and_ends_alone_left_out(config: Config) -> None:
    task = build(replace(config, context=5))
    lengths = task.train.places[:, 2]
    assert lengths.max() == 5
    batch = whole(task)
    assert len(batch) == len(lengths)
    assert int(batch.tokens) >= len(lengths)


# The loss


def test_the_loss_is_of_hidden_tokens_alone(config: Config) -> None:
    task = build(config)
    task.model.double().eval()
    batch = task.batch(np.arange(7), 1)
    loss, count = task.loss(batch)
    logits = task.model(batch.inputs, lengths=batch.lengths)[0]
    logs = logits.log_softmax(-1)
    want = -sum(logs[n, t] for n, t in zip(batch.hidden.tolist(), batch.labels.tolist()))
    torch.testing.assert_close(loss, want)
    assert int(count) == len(batch.labels) < batch.inputs.numel()
    # What a token that is not hidden might have been is not asked.
    (grad,) = torch.autograd.grad(
        task.loss(batch)[0], task.model.output.bias, retain_graph=False, materialize_grads=True
    )
    want_bias = logits[batch.hidden].softmax(-1).sum(0)
    want_bias -= torch.bincount(batch.labels, minlength=len(want_bias))
    torch.testing.assert_close(grad, want_bias.detach())


def test_scores_do_not_depend_on_batches(config: Config) -> None:
    task = build(config)
    scores = [
        encoder.measure(task.model, task.held, task.tokenizer, task.hiding, budget)
        for budget in (30, 3000)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert 0 <= scores[0]["accuracy"] <= 1
    assert scores[0]["perplexity"] > 1


@pytest.mark.slow
def test_it_learns_which_letters_follow_each_other(config: Config, tmp_path: Path) -> None:
    shape = replace(SHAPE, width=64, heads=4, feed_forward=128, layers=2)
    training = replace(TRAINING, steps=400, batch=1500, lr=3e-3, warmup=40, evaluate_every=100)
    task = build(replace(config, model=shape, training=training))
    before = task.evaluate(task.model.eval())["accuracy"]
    result = trained(task, tmp_path / "run", training)
    assert result.best is not None
    assert before < 0.3 < 0.6 < result.best


# Use, and what starts from it


def test_a_run_is_saved_loaded_evaluated_and_resumed(run: Path, config: Config) -> None:
    loaded = load(run)
    assert isinstance(loaded, TextEmbedder)
    vectors = loaded.encode(["ab cd", "efg", ""])
    assert vectors.shape == (3, 16)
    torch.testing.assert_close(vectors[:1], loaded.encode(["ab cd"]))
    (found,) = loaded.fill(["ab [MASK]d"], best=3)
    assert len(found) == 3
    assert 0 < sum(chance for _, chance in found) <= 1
    loaded.model.output.weight.data[7] = torch.nan
    with pytest.raises(ValueError, match="the logits were not finite"):
        loaded.fill(["ab [MASK]d"])
    scores = encoder.evaluate(run).scores
    assert scores["perplexity"] < math.inf
    longer = replace(TRAINING, steps=5)
    assert trained(build(replace(config, training=longer), run), run, longer).step == 5


def test_a_classifier_starts_from_it(tmp_path: Path, run: Path) -> None:
    rows = [f"{'long' if len(text) > 12 else 'short'}\t{text}" for text in TEXTS]
    table = lines(tmp_path / "texts.tsv", rows)
    settings = label.Config(texts=(table,), start=str(run), training=TRAINING)
    task = label.build(settings)
    saved = checkpoint.load(run / "best").model
    assert isinstance(saved, TextEncoder)
    assert isinstance(task.model, TextClassifier)
    for name, value in task.model.encoder.state_dict().items():
        assert torch.equal(value, saved.encoder.state_dict()[name])
    assert torch.equal(task.model.tokens.table.weight, saved.tokens.table.weight)
    assert task.tokenizer.size == saved.config.vocabulary
    trained(task, tmp_path / "labels")
    assert load(tmp_path / "labels").label(["ab"])[0] in ("long", "short")
    frozen = label.build(replace(settings, freeze=True)).model
    assert [n for n, p in frozen.named_parameters() if p.requires_grad] == [
        "head.weight",
        "head.bias",
    ]


@pytest.mark.parametrize("share", ["all", "target"])
def test_a_translator_starts_from_it(tmp_path: Path, run: Path, share: Any) -> None:
    pairs = lines(tmp_path / "pairs.tsv", [f"{text}\t{backwards(text)}" for text in TEXTS])
    shape = TransformerShape(decoder_layers=1, share=share)
    settings = translate.Config(
        pairs=(pairs,),
        start=str(run),
        model=replace(translate.Config().model, decoder_layers=2, share=share),
        training=TRAINING,
        cache=str(tmp_path / "cache"),
    )
    task = translate.build(settings)
    saved = checkpoint.load(run / "best").model
    assert isinstance(saved, TextEncoder)
    model = task.model
    assert (model.config.width, model.config.encoder_layers) == (16, 1)
    assert model.config.decoder_layers == 2
    for name, value in model.encoder.state_dict().items():
        assert torch.equal(value, saved.encoder.state_dict()[name])
    assert isinstance(model.source, type(saved.tokens))
    assert torch.equal(model.source.table.weight, saved.tokens.table.weight)
    tied = model.target.table.weight is model.source.table.weight
    assert tied == (share == "all")
    # The encoder computes what it did.
    ids = torch.tensor([task.tokenizers[0].encode("ab cd")])
    torch.testing.assert_close(model.eval().encode(ids), saved.features(ids))
    trained(task, tmp_path / "translator")
    assert load(tmp_path / "translator").translate(["ab cd"])
    made = Transformer.of(saved, shape)
    assert made.config.position == saved.config.position


@pytest.mark.usefixtures("unchecked")
def test_one_line_says_what_is_wrong(tmp_path: Path, config: Config, run: Path) -> None:
    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=words) as error:
            build(replace(config, **changes))
        assert "\n" not in str(error.value)

    refused(r"hidden \(1.5\) must be above 0 and below 1", hidden=1.5)
    refused("name at least one file with --text", text=())
    refused(r"learned positions \(7\)", model=replace(SHAPE, position="learned", length=7))
    refused(r"model.heads \(8\) cannot be changed", start=str(run), model=replace(SHAPE, heads=8))
    with pytest.raises(ValueError, match=r"must have one \[MASK\]"):
        load(run).fill(["ab cd"])
    classifier = ClassifierShape(width=16, heads=2, feed_forward=16, layers=1)
    rows = [f"{n % 2}\t{text}" for n, text in enumerate(TEXTS)]
    table = lines(tmp_path / "texts.tsv", rows)
    made = label.build(label.Config(texts=(table,), model=classifier, training=TRAINING))
    trained(made, tmp_path / "labels")
    refused("holds a TextClassifier; name the folder of an encoder", start=str(tmp_path / "labels"))


@pytest.mark.parametrize("size", ["tiny", "base", "big"])
def test_presets_are_whole(size: Any) -> None:
    config = encoder.preset(size)
    assert from_json(Config, to_json(config)) == config


def test_the_output_is_the_table_of_tokens() -> None:
    model = TextEncoder(EncoderConfig(19, width=12, heads=3, feed_forward=17, layers=1))
    assert model.output.weight is model.tokens.table.weight
    moved = model.to("meta")
    assert moved.output.weight is moved.tokens.table.weight
