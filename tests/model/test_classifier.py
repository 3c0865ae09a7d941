"""A text classifier: the Transformer's encoder, a mean, and a head."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard import ImageSource, PackedLengths, Transformer, TransformerConfig
from regard.checkpoint import load, save
from regard.model.classifier import ClassifierConfig, TextClassifier

CONFIG = ClassifierConfig(
    5, 17, width=12, heads=2, feed_forward=19, layers=2, dropout=0.0, norm="pre"
)
LENGTHS = [3, 7, 1]


def model(**changed: object) -> TextClassifier:
    made = TextClassifier(replace(CONFIG, **changed))  # type: ignore[arg-type]
    torch.nn.init.normal_(made.head.weight)
    return made.eval().double()


def texts() -> list[torch.Tensor]:
    return [torch.randint(0, 17, (1, n)) for n in LENGTHS]


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_packed_padded_and_alone_are_the_same(pool: str) -> None:
    one, ids = model(pool=pool), texts()
    alone = torch.cat([one(text) for text in ids])
    packed = one(torch.cat(ids, 1), lengths=PackedLengths(LENGTHS))
    rows = [torch.nn.functional.pad(text, (0, 7 - text.shape[1]), value=3) for text in ids]
    padded = one(torch.cat(rows), lengths=torch.tensor(LENGTHS))
    assert alone.shape == (3, 5)
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(padded, alone)


def test_the_mean_is_read_by_the_head() -> None:
    one, (_, text, _) = model(), texts()
    torch.testing.assert_close(one(text), one.head(one.features(text).mean(1)))
    one = model(pool="last")
    torch.testing.assert_close(one(text), one.head(one.features(text)[:, -1]))


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_an_empty_text_is_zero(pool: str) -> None:
    one, ids = model(pool=pool), torch.randint(0, 17, (3, 4))
    padded = one.represent(ids, lengths=[0, 4, 0])
    packed = one.represent(ids[1:2], lengths=PackedLengths([0, 4, 0]))
    torch.testing.assert_close(packed, padded)
    assert padded.any(1).tolist() == [False, True, False]
    nothing = torch.zeros(2, 0, dtype=torch.long)
    for empty, lengths in (
        (nothing, None),
        (nothing, [0, 0]),
        (nothing[:1], PackedLengths([0, 0])),
    ):
        assert torch.equal(one.represent(empty, lengths=lengths), padded.new_zeros(2, 12))


def test_the_encoder_of_a_transformer() -> None:
    config = TransformerConfig(
        17, width=12, heads=2, feed_forward=19, encoder_layers=2, decoder_layers=1, dropout=0.0
    )
    transformer = Transformer(config).eval()
    one = TextClassifier.of(transformer, 3).eval()
    (_, text, _) = texts()
    torch.testing.assert_close(one.features(text), transformer.encode(text))
    assert not one(text).any()  # the new head says nothing yet
    one.tokens.table.weight.data.zero_()
    assert transformer.source.table.weight.any()
    assert one.config.layers == 2
    assert one.config.vocabulary == 17


def test_freezing_and_other_classes() -> None:
    one = model().freeze_backbone()
    assert sum(parameter.requires_grad for parameter in one.parameters()) == 2
    other = one.replace_head(7)
    assert other.head.weight.shape == (7, 12)
    assert other.config == replace(one.config, classes=7)
    assert one.head.weight.shape == (5, 12)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    one = model()
    save(tmp_path / "folder", one)
    back = load(tmp_path / "folder").model
    assert isinstance(back, TextClassifier)
    (_, text, _) = texts()
    assert torch.equal(back(text), one(text))
    with torch.device("meta"):
        assert TextClassifier(CONFIG).head.weight.is_meta


@pytest.mark.usefixtures("unchecked")
def test_one_line_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="choose from mean, last"):
        TextClassifier(replace(CONFIG, pool="max"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes"):
        TextClassifier(replace(CONFIG, classes=0))
    image = Transformer(
        TransformerConfig(
            5,
            source=ImageSource(image=4, patch=2),
            width=12,
            heads=2,
            feed_forward=8,
            encoder_layers=1,
            decoder_layers=1,
        )
    )
    with pytest.raises(ValueError, match="source is image"):
        TextClassifier.of(image, 3)
