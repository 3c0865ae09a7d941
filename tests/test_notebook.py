"""What notebooks show: pictures of masks, tables of plans, models and translators."""

import re
from xml.etree import ElementTree

import pytest
import torch

from regard import (
    LanguageModel,
    Mask,
    Transformer,
    VisionTransformer,
    causal,
    documents,
    explain_attention,
    packed,
    padding,
    prefix,
    window,
)
from regard.data.tokenizer import Tokenizer
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from regard.task.translator import Translator
from tests.task.samples import SHAPE, sentences


def parsed(html: str) -> ElementTree.Element:
    """Well-formed, and without anything that is fetched."""
    assert not re.search(r"(?:src|href|url)\s*[=(]", html)
    return ElementTree.fromstring(html)


@pytest.mark.parametrize(
    ("mask", "rows", "columns"),
    [
        (causal(), 8, 8),
        (causal() & window(2), 8, 8),
        (padding([5, 3]), 5, 5),
        (causal() | prefix(2), 8, 8),
        (documents([0, 0, 1, 1, 1]), 5, 5),
        (packed([3, 4], [2, 5]), 7, 7),
        (packed([1]), 1, 1),
        (packed([]), 0, 0),
        (Mask.from_tensor(torch.ones(3, 6).bool()), 3, 6),
        (causal() & Mask.from_tensor(torch.ones(1, 6).bool()), 6, 6),
        (~causal(), 8, 8),
        (Mask(lambda at: (at.key + at.query) % 2 == 0, "<checked> & more"), 8, 8),
    ],
)
def test_a_mask_is_a_picture_of_itself(mask: Mask, rows: int, columns: int) -> None:
    page = parsed(mask._repr_html_())
    squares = [one.attrib["fill-opacity"] for one in page.iter("rect")]
    allowed = mask.tensor(rows, columns)[0, 0].flatten().tolist()
    assert [square == "0.85" for square in squares] == allowed
    assert page.findtext("b") == str(mask)


def test_a_mask_for_an_empty_batch_is_an_empty_picture() -> None:
    page = parsed((causal() & padding([]))._repr_html_())
    assert {square.attrib["fill-opacity"] for square in page.iter("rect")} == {"0.08"}


def test_a_large_mask_is_shown_in_part() -> None:
    page = parsed(padding([500])._repr_html_())
    assert len(list(page.iter("rect"))) == 32 * 32
    assert "the first 32 and 32 are shown" in "".join(page.itertext())


def test_a_plan_is_a_table() -> None:
    x = torch.randn(2, 3, 5, 8)
    said = explain_attention(x, x, x, mask=causal())
    text = "".join(parsed(said._repr_html_()).itertext())
    for part in (said.backend, said.kernel, said.reason):
        assert part in text


@pytest.mark.parametrize(
    "model",
    [
        Transformer.tiny(vocabulary=50),
        VisionTransformer.tiny(classes=3, image=32),
        LanguageModel.tiny(vocabulary=50),
    ],
)
def test_a_model_says_what_it_is(model: torch.nn.Module) -> None:
    text = "".join(parsed(model._repr_html_()).itertext())  # type: ignore[operator]
    total = sum(one.numel() for one in model.parameters())
    assert f"{type(model).__name__}, {total:,} parameters" in text
    assert "width" in text


def test_a_translator_says_what_it_is() -> None:
    tokenizer = Tokenizer.characters(sentences(20))
    model = build_transformer(SHAPE, (tokenizer, tokenizer), seed=0).eval()
    settings = SearchSettings.of(tokenizer, beams=3, length=40)
    translator = Translator(model, (tokenizer, tokenizer), settings, {"tags": ["de", "fr"]})
    count = sum(parameter.numel() for parameter in model.parameters())
    assert repr(translator) == (
        f"Translator('', Transformer, width 16, layers 1 + 1, parameters {count:,}, "
        f"vocabulary {tokenizer.size}, beams 3, length 40, tags de fr, device cpu)"
    )
    text = "".join(parsed(translator._repr_html_()).itertext())
    assert "de fr" in text
    assert "Transformer, " in text
