"""Wrong input to a model gets one line that names what was given and what would do instead."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard import (
    AudioSource,
    Concatenated,
    ImageSource,
    LanguageConfig,
    LanguageModel,
    MultiHeadAttention,
    PackedLengths,
    SelfCache,
    SinusoidalPositions,
    TextSource,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from regard.model.stack import StackCache
from tests.model.samples import OWN, SOURCES, images, language, tokens, transformer, vision

Case = tuple[Callable[[], object], *tuple[str, ...]]
"""A call, and what its error must hold: the values that are wrong or disagree, and a remedy."""

IDS = torch.arange(10).view(2, 5)
ROW = IDS.view(1, 10)
SMALL = {"width": 12, "heads": 2}
PACKED = PackedLengths([5, 5])


def config(**options: object) -> TransformerConfig:
    return TransformerConfig(19, **(SMALL | options))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


def text() -> Transformer:
    return transformer(dtype=torch.float32)


def words() -> LanguageModel:
    return language(dtype=torch.float32)


def pictures() -> VisionTransformer:
    return vision(torch.float32)


def read(kind: str) -> Transformer:
    return transformer(dtype=torch.float32, source=SOURCES[kind])


def after_a_step(new: Callable[[LanguageModel, StackCache], object]) -> object:
    model = words()
    cache = model.cache()
    model(IDS, cache=cache)
    return new(model, cache)


NAMES: dict[str, Case] = {
    "activation": (lambda: Transformer(config(activation="tanh")), "'tanh'", "relu, gelu, silu"),
    "norm": (lambda: Transformer(config(norm="none")), "'none'", "post, pre"),
    "position": (lambda: Transformer(config(position="relative")), "'relative'", "rotary"),
    "share": (lambda: Transformer(config(share="both")), "'both'", "all, target, none"),
    "pool": (lambda: vision(pool="max"), "'max'", "class, mean"),
    "position of patches": (lambda: vision(position="rotary"), "'rotary'", "learned, sinusoidal"),
    "position of a source": (
        lambda: Transformer(config(source=ImageSource(image=6, patch=2, position="rotary"))),
        *("'rotary'", "learned, sinusoidal"),
    ),
    "source": (lambda: Transformer(config(source="text")), "'text'", "TextSource"),
}

SIZES: dict[str, Case] = {
    "heads": (lambda: Transformer(config(heads=5)), r"heads \(5\)", r"width \(12\)", "6 or 12"),
    "no heads": (lambda: Transformer(config(heads=0, position="rotary")), r"heads \(0\)", "1 or"),
    "key heads": (
        lambda: Transformer(config(heads=6, key_heads=4)),
        *(r"key_heads \(4\)", r"heads \(6\)", "3 or 6"),
    ),
    "rotary and odd": (
        lambda: Transformer(config(width=10, position="rotary")),
        *(r"width \(10\)", r"heads \(2\)", "try a width of 12"),
    ),
    "rotary and odd, language": (
        lambda: LanguageModel(LanguageConfig(19, width=21, heads=3)),
        *(r"width \(21\)", r"heads \(3\)", "try a width of 24"),
    ),
    "vocabulary": (lambda: Transformer(TransformerConfig(0)), r"vocabulary \(0\)", "1 or more"),
    "vocabulary of halves": (lambda: words_of(1.5), r"vocabulary \(1\.5\)", "whole number"),
    "feed-forward": (lambda: transformer(feed_forward=0), r"feed_forward \(0\)", "1 or more"),
    "layers": (lambda: transformer(encoder_layers=-1), r"layers \(-1\)", "0 or more"),
    "layers of halves": (lambda: vision(layers=1.5), r"layers \(1\.5\)", "whole number"),
    "dropout": (lambda: transformer(dropout=1.5), "1.5", "between 0 and 1"),
    "dropout of weights": (lambda: transformer(attention_dropout=-1), r"\(-1\)", "at least 0"),
    "length": (lambda: transformer("learned", length=0), r"length \(0\)", "1 or more"),
    "features": (
        lambda: transformer(source=AudioSource(features=0)),
        *(r"features \(0\)", "1 or more"),
    ),
    "channels": (lambda: vision(channels=0), r"channels \(0\)", "1 or more"),
    "classes": (lambda: VisionTransformer.tiny(0), r"classes \(0\)", "1 or more"),
    "new classes": (lambda: pictures().replace_head(0), r"classes \(0\)", "1 or more"),
    "head": (lambda: vision(head_width=0), r"head_width \(0\)", "1 or more"),
    "patch": (lambda: vision(patch=4), r"patch \(4\)", "6 × 10", "8 × 8"),
    "patch of 225": (
        lambda: VisionTransformer.base(10, image=225),
        *(r"patch \(16\)", "225 × 225", "224 × 224"),
    ),
    "patch beyond the image": (lambda: VisionTransformer.base(10, image=7), "7 × 7", "16 × 16"),
    "patch of halves": (lambda: VisionTransformer.base(10, patch=1.5), r"patch \(1\.5\)", "whole"),
    "patch of a source": (
        lambda: Transformer(config(source=ImageSource(image=9, patch=2))),
        *(r"patch \(2\)", "9 × 9", "8 × 8"),
    ),
    "another size": (lambda: pictures().resize_images((7, 10)), r"patch \(2\)", "7 × 10", "8 × 10"),
    "image with channels": (
        lambda: VisionTransformer.base(10, image=(3, 32, 32)),
        *(r"\(3, 32, 32\)", r"\(rows, columns\)"),
    ),
    "no image": (lambda: VisionTransformer.base(10, image=0), r"\(0\)", "1 or more"),
    "no room": (lambda: words().cache(0), r"capacity \(0\)", "1 or more"),
}


def words_of(vocabulary: object) -> LanguageModel:
    return LanguageModel(LanguageConfig(vocabulary))


PARTS: dict[str, Case] = {
    "a number for a config": (
        lambda: Transformer(37_000),
        *(r"\(37000\)", r"TransformerConfig\.tiny\("),
    ),
    "another's config": (
        lambda: Transformer(VisionConfig(3)),
        *("a VisionConfig", "must be a TransformerConfig"),
    ),
    "classes for a config": (lambda: VisionTransformer(1000), r"\(1000\)", "VisionConfig"),
    "two vocabularies": (
        lambda: Transformer(config(source=TextSource(vocabulary=23))),
        *("23 tokens", "target 19", "share='target'"),
    ),
    "shared beside positions": (
        lambda: Transformer(config(), position=OWN["concatenated"]),
        *("'all'", "7 of 12", "share='none'"),
    ),
    "shared beside positions, language": (
        lambda: LanguageModel(LanguageConfig(19, **SMALL), position=OWN["concatenated"]),
        *("7 of 12", "share=False"),
    ),
    "no room beside positions": (
        lambda: Transformer(config(), position=lambda: Concatenated(SinusoidalPositions(12))),
        *("12 wide", r"width \(12\)", "narrower"),
    ),
    "positions of another width": (
        lambda: Transformer(config(), position=lambda: SinusoidalPositions(10))(IDS, IDS),
        *(r"\(12\)", r"\(10\)", "build the position"),
    ),
    "a position for its maker": (
        lambda: Transformer(config(), position=SinusoidalPositions(12)),
        *(r"SinusoidalPositions\(12", "a function that makes one", "lambda"),
    ),
    "a name for a position": (
        lambda: Transformer(config(), position=lambda: "rotary"),
        *("'rotary'", "RotaryEmbedding or ALiBi"),
    ),
    "an attention for its maker": (
        lambda: VisionTransformer(VisionConfig(3, 6, 2), attention=MultiHeadAttention(12, 3)),
        *("attention", "a function that makes one", "lambda position:"),
    ),
    "a number for a part": (
        lambda: LanguageModel(LanguageConfig(19, **SMALL), feed_forward=7),
        *(r"feed_forward \(7\)", "lambda"),
    ),
    "no class token to read": (
        lambda: vision(class_token=False),
        *("'class'", "class_token is False", "use mean"),
    ),
}

BATCHES: dict[str, Case] = {
    "float ids": (lambda: text()(IDS.float(), IDS), "^source", "float32", r"source\.long"),
    "float targets": (lambda: text()(IDS, IDS.double()), "^target", "float64", r"target\.long"),
    "boolean ids": (lambda: words()(IDS.bool()), "^tokens", "bool", r"tokens\.long"),
    "one sentence": (
        lambda: words()(IDS[0]),
        *("^tokens", r"\(5,\)", r"\(batch, length\)", r"tokens\[None\]"),
    ),
    "a list": (lambda: text()([[1, 2]], IDS), "^source", r"\[\[1, 2\]\]", r"torch\.tensor"),
    "a list of targets": (
        lambda: text()(IDS, [[1, 2]]),
        *("^target", r"\[\[1, 2\]\]", r"torch\.tensor"),
    ),
    "no memory": (lambda: text().decode(IDS, [1]), "^memory", r"\[1\]"),
    "a text": (lambda: words()("Hallo"), "^tokens", "'Hallo'", r"torch\.tensor"),
    "ids beyond": (lambda: words()(IDS + 19), "^tokens", "19 to 28", "0 to 18", "tokenizer"),
    "ids below": (lambda: text()(IDS, IDS - 3), "^target", "-3 to 6", "0 to 18", "tokenizer"),
    "sources below": (lambda: text()(IDS - 3, IDS), "^source", "-3 to 6", "0 to 18"),
    "an image of another size": (
        lambda: pictures()(zeros(2, 3, 8, 10)),
        *(r"\(2, 3, 8, 10\)", r"\(batch, 3, 6, 10\)", "resize_images"),
    ),
    "a grey image": (lambda: pictures()(zeros(2, 1, 6, 10)), r"\(2, 1, 6, 10\)", "3, 6, 10"),
    "a list of pixels": (lambda: pictures()([1]), "images", r"\[1\]", r"torch\.tensor"),
    "a list of tokens": (
        lambda: words().tokens([[5, 6]]),  # type: ignore[arg-type]
        *("^tokens", r"\[\[5, 6\]\]", r"torch\.tensor"),
    ),
    **{
        f"tokens of {dtype}": (
            lambda dtype=dtype: words()(IDS.to(dtype)),
            *(str(dtype), r"\(2, 5\)", "int64 or int32", r"tokens\.long\(\)"),
        )
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.complex64, torch.bool)
    },
    "sparse tokens": (lambda: words()(IDS.to_sparse()), "^tokens", "sparse", "to_dense"),
    "sources of int8": (lambda: text()(IDS.to(torch.int8), IDS), "^source", "torch.int8"),
    "an image alone": (lambda: pictures()(zeros(3, 6, 10)), r"\(3, 6, 10\)", "batch"),
    "bytes": (
        lambda: pictures()(zeros(2, 3, 6, 10).byte()),
        *("uint8", "float32", r"images\.to\("),
    ),
    "exact images": (lambda: read("image")(images(2), IDS), "float64", "float32", r"images\.to\("),
    "an image to a reader of text": (
        lambda: text()(zeros(2, 3, 6, 10), IDS),
        *("float32", r"\(2, 3, 6, 10\)", r"\(batch, length\)"),
    ),
    "text to a reader of images": (
        lambda: read("image")(IDS, IDS),
        *(r"\(2, 5\)", r"\(batch, 3, 6, 10\)"),
    ),
    "text to a listener": (lambda: read("audio")(IDS, IDS), r"\(2, 5\)", r"\(batch, time, 5\)"),
    "frames of another width": (
        lambda: read("audio")(zeros(2, 5, 7), IDS),
        *(r"\(2, 5, 7\)", r"\(batch, time, 5\)"),
    ),
    "exact frames": (
        lambda: read("audio")(zeros(2, 5, 5).double(), IDS),
        *("float64", "float32", r"frames\.to\("),
    ),
    "other sources than targets": (
        lambda: text()(tokens(2, 5), tokens(3, 5)),
        *("source has 2 sentences and target has 3", "one source for each target"),
    ),
    "other memories than targets": (
        lambda: text().decode(tokens(3, 5), text().encode(tokens(2, 5))),
        *("memory has 2 sentences and target has 3", "one source for each target"),
    ),
    "other images than targets": (
        lambda: read("image")(images(2).float(), tokens(3, 5)),
        *("source has 2 images and target has 3", "one source for each target"),
    ),
    "beyond learned positions": (
        lambda: transformer("learned")(tokens(1, 30), IDS[:1]),
        *("position 29", "29 positions", "30 positions"),
    ),
}

LENGTHS: dict[str, Case] = {
    "packed and padded": (
        lambda: text()(IDS, ROW, target_lengths=PACKED, source_lengths=[5, 5]),
        *("PackedLengths", "list", "both be PackedLengths"),
    ),
    "padded and packed": (
        lambda: text()(ROW, IDS, source_lengths=PACKED, target_lengths=torch.tensor([5, 5])),
        *("PackedLengths", "Tensor", "both be PackedLengths"),
    ),
    "packed and whole": (
        lambda: text()(ROW, IDS, source_lengths=PACKED),
        *("PackedLengths", "None", "both be PackedLengths"),
    ),
    "fewer sources": (
        lambda: text()(ROW, ROW, source_lengths=PACKED, target_lengths=PackedLengths([5, 2, 3])),
        *(r"\(3\)", r"\(2\)", "length 0"),
    ),
    "fewer images": (
        lambda: read("image")(images(3, torch.float32), ROW, target_lengths=PACKED),
        *(r"\(2\)", r"\(3\)", "length 0"),
    ),
    "packed sources of another total": (
        lambda: text()(ROW, ROW, source_lengths=PackedLengths([5, 4]), target_lengths=PACKED),
        *("9 tokens", "rows of 10", "end to end"),
    ),
    "packed targets of another total": (
        lambda: text()(ROW, ROW, source_lengths=PACKED, target_lengths=PackedLengths([5, 4])),
        *("9 tokens", "rows of 10", "end to end"),
    ),
    "packed, but in rows": (
        lambda: words()(IDS, lengths=PACKED),
        *("10 tokens", "2 rows of 5", "one row of 10"),
    ),
    "more lengths than sentences": (
        lambda: text()(IDS, IDS, source_lengths=[5, 4, 3]),
        *("3 lengths", "batch of 2", "one for each"),
    ),
    "fewer lengths than targets": (
        lambda: text()(IDS, IDS, target_lengths=[5]),
        *("1 lengths", "batch of 2", "one for each"),
    ),
    "longer than its row": (
        lambda: text()(IDS, IDS, source_lengths=[6, 4]),
        *(r"\(6\)", r"\(5\)", "real tokens"),
    ),
    "longer than its row, language": (
        lambda: words()(IDS, lengths=torch.tensor([4, 7])),
        *(r"\(7\)", r"\(5\)", "real tokens"),
    ),
    "lengths of halves": (
        lambda: words()(IDS, lengths=torch.tensor([1.5, 2])),
        *("lengths", "float32", r"\.long\(\)"),
    ),
    "one length": (lambda: text()(IDS, IDS, source_lengths=5), "1 axis", r"\[3, 5\]"),
}

DECODING: dict[str, Case] = {
    "no memory": (lambda: text().decode(IDS, None), r"memory \(None\)", r"encode\(source\)"),
    "no memory yet": (
        lambda: (lambda model: model.decode(IDS, None, cache=model.cache()))(text()),
        *("empty CrossCache", "source at its first step"),
    ),
    "memory of another width": (
        lambda: text().decode(IDS, zeros(2, 5, 7)),
        *(r"\(2, 5, 7\)", "source_width = 12"),
    ),
    "exact memory": (
        lambda: text().decode(IDS, zeros(2, 5, 12).double()),
        *("float64", "float32", "convert"),
    ),
    "a cache of fewer blocks": (
        lambda: words()(IDS, cache=StackCache(1)),
        *("1 blocks", "there are 2", r"model\.cache\(\)"),
    ),
    "a cache of one attention": (
        lambda: words()(IDS, cache=SelfCache()),
        "SelfCache",
        r"cache\(\)",
    ),
    "no room left": (
        lambda: (lambda model: model(IDS, cache=model.cache(3)))(words()),
        *("holds 3", "5 are needed", r"SelfCache\(5\)"),
    ),
    "packed steps": (
        lambda: (lambda model: model(ROW, lengths=PACKED, cache=model.cache()))(words()),
        *(r"packed\(\[5, 5\]\)", "one row for each sequence"),
    ),
    "another batch": (
        lambda: after_a_step(lambda model, cache: model(IDS[:1], cache=cache)),
        *(r"\(2, 6\)", r"\(1, 6\)", r"select\(rows\)"),
    ),
    "rows beyond": (
        lambda: after_a_step(lambda model, cache: cache.select([0, 2])),
        *(r"\[0, 2\]", "0 to 1", "holds 2 sequences"),
    ),
}

TABLES = {
    "names": NAMES,
    "sizes": SIZES,
    "parts": PARTS,
    "batches": BATCHES,
    "lengths": LENGTHS,
    "decoding": DECODING,
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{table}: {name}")
        for table, cases in TABLES.items()
        for name, case in cases.items()
    ],
)
def test_wrong_input_is_named(case: Case) -> None:
    call, *wanted = case
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        call()
    message = str(caught.value)
    for words in wanted:
        assert re.search(words, message), f"{words!r} is not in: {message}"
