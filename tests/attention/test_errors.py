"""Wrong input gets one line that names what was given and what would do instead."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard import (
    ALiBi,
    CrossCache,
    Mask,
    MultiHeadAttention,
    PackedLengths,
    RotaryEmbedding,
    SelfCache,
    SinusoidalPositions,
    attend,
    attention_statistics,
    attention_weights,
    causal,
    documents,
    explain_attention,
    packed,
    padding,
    prefix,
    window,
)
from regard.attention.functional import scaled_dot_product_attention
from regard.attention.score import BilinearScore, DotScore

Case = tuple[Callable[[], object], *tuple[str, ...]]
"""A call, and what its error must hold: the values that are wrong or disagree, and a remedy."""


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


def true(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


Q, K, V = zeros(2, 6, 3, 5), zeros(2, 6, 4, 5), zeros(2, 6, 4, 7)
ONE = (Q[:1], K[:1], V[:1])
X = zeros(2, 3, 12)


def grown(rows: int = 2, width: int = 5) -> SelfCache:
    """A cache of six heads with four positions in each row."""
    cache = SelfCache()
    cache.extend(lambda: (zeros(rows, 6, 4, width), zeros(rows, 6, 4, 7)))
    return cache


def beams() -> CrossCache:
    """Two sources, each read by two rows."""
    cache = CrossCache()
    cache.extend(lambda: (K[:, :1], V[:, :1]))
    cache.share(None, 2)
    return cache


TENSOR = r"Mask\.from_tensor\("
UNDER_3 = r"from -3 to 2: the number of queries is 3"

VECTORS: dict[str, Case] = {
    "widths": (lambda: attend(Q, zeros(2, 6, 4, 7), V), r"width \(5\)", r"width \(7\)", "project"),
    "widths, weights": (
        lambda: attention_weights(Q, zeros(2, 6, 4, 7)),
        r"\(5\)",
        r"\(7\)",
        "project",
    ),
    "widths, statistics": (
        lambda: attention_statistics(Q, zeros(2, 6, 4, 7)),
        r"\(5\)",
        r"\(7\)",
        "project",
    ),
    "widths, explain": (
        lambda: explain_attention(Q, zeros(2, 6, 4, 7), V),
        r"\(5\)",
        r"\(7\)",
        "project",
    ),
    "widths of matrices": (lambda: attend(zeros(3, 5), zeros(4, 2), zeros(4, 2)), "5", "2"),
    "keys and values": (lambda: attend(Q, K, zeros(2, 6, 3, 7)), "4 keys", "3 values", "one value"),
    "integers": (lambda: attend(Q.int(), K, V), "query", "int32", r"query\.float\(\)"),
    "integers, weights": (
        lambda: attention_weights(Q.long(), K),
        "query",
        "int64",
        r"query\.float\(\)",
    ),
    "integers, statistics": (
        lambda: attention_statistics(Q.bool(), K),
        "bool",
        r"query\.float\(\)",
    ),
    "complex": (lambda: attend(Q.cfloat(), K, V), "complex64", r"floating-point"),
    "integer keys": (lambda: attend(Q, K.int(), V), "float32", "key is torch.int32", "convert"),
    "mixed dtypes": (lambda: attend(Q, K.double(), V), "float32", "key.*float64", "convert"),
    "mixed values": (lambda: attend(Q, K, V.bfloat16()), "float32", "value.*bfloat16", "convert"),
    "mixed devices": (lambda: attend(Q, K.to("meta"), V), "cpu", "key.*meta", "move"),
    "values missing": (
        lambda: attend(Q, K, None),
        "value must be a tensor",
        "None",
        "length, width",
    ),
    "values missing, explain": (
        lambda: explain_attention(Q, K, None),
        "value must be a tensor",
        "None",
    ),
    "keys missing": (
        lambda: attention_weights(Q, None),
        "key must be a tensor",
        "None",
        "length, width",
    ),
    "queries missing": (lambda: attention_statistics(None, K), "query must be a tensor", "None"),
    "a list": (lambda: attend([[1.0]], K, V), r"query.*\[\[1\.0\]\]", r"torch\.tensor\("),
    "lists": (lambda: attend(Q, K, V.tolist()), "value.*a list", r"torch\.tensor\("),
    "an array": (lambda: attend(Q, K.numpy(), V), "key.*a ndarray", r"torch\.tensor\("),
    "a mask": (lambda: attend(Q, K, causal()), r"value.*causal\(\)", "tensor"),
    "query vector": (lambda: attend(zeros(5), K, V), r"query.*\(5,\)", r"vector\[None\]"),
    "key vector": (lambda: attend(Q, zeros(5), V), r"key.*\(5,\)", r"vector\[None\]"),
    "value vector": (lambda: attend(Q, K, zeros(7)), r"value.*\(7,\)", r"vector\[None\]"),
    "no axis": (lambda: attention_weights(torch.tensor(1.0), K), r"query.*\(\)", r"length, width"),
    "key heads": (
        lambda: attend(Q, K[:, :4], V[:, :4]),
        r"\(4\)",
        r"\(6\)",
        "try 1 or 2 or 3 or 6",
    ),
    "key heads, weights": (
        lambda: attention_weights(Q, K[:, :4]),
        r"\(4\)",
        r"\(6\)",
        "try 1 or 2 or 3",
    ),
    "fewer query heads": (lambda: attend(Q[:, :4], K, V), r"\(6\)", r"\(4\)", "try 1 or 2 or 4"),
    "value heads": (lambda: attend(Q, K[:, :3], V[:, :2]), "3 key", "2 value", "one value"),
    "batches": (
        lambda: attend(Q, zeros(3, 6, 4, 5), zeros(3, 6, 4, 7)),
        *(r"\(2, 6, 3, 5\)", r"\(3, 6, 4, 5\)", "equal or 1"),
    ),
    "batches without heads": (
        lambda: attend(zeros(2, 3, 5), zeros(3, 4, 5), zeros(3, 4, 7)),
        *(r"\(2, 3, 5\)", r"\(3, 4, 5\)", "equal or 1"),
    ),
}

SCALES: dict[str, Case] = {
    "a beta beyond float64": (lambda: attend(Q, K, V, beta=10**400), "beta", "not be negative"),
    "negative beta": (lambda: attend(Q, K, V, beta=-1), r"\(-1\)", "negative", "0.*to infinity"),
    "minus infinity": (lambda: attend(Q, K, V, beta=-math.inf), r"\(-inf\)", "0.*to infinity"),
    "NaN": (lambda: attend(Q, K, V, beta=math.nan), r"\(nan\)", "NaN", "0.*to infinity"),
    "negative beta, weights": (
        lambda: attention_weights(Q, K, beta=-0.5),
        r"\(-0.5\)",
        "0.*to infinity",
    ),
    "NaN, statistics": (
        lambda: attention_statistics(Q, K, beta=math.nan),
        r"\(nan\)",
        "0.*to infinity",
    ),
    "negative beta, explain": (
        lambda: explain_attention(Q, K, V, beta=-2),
        r"\(-2\)",
        "0.*to infinity",
    ),
    "negative beta in a tensor": (
        lambda: attend(Q, K, V, beta=torch.tensor(-1.0)),
        *(r"-1\.0", "negative", "0.*to infinity"),
    ),
    "a negative beta among heads": (
        lambda: attend(Q, K, V, beta=torch.tensor([1.0, 2, 3, -4, 5, 6])),
        *(r"-4\.0", "negative", "0.*to infinity"),
    ),
    "a NaN among heads": (
        lambda: attend(Q, K, V, beta=torch.tensor([1.0, 2, 3, math.nan, 5, 6])),
        *("nan", "NaN", "0.*to infinity"),
    ),
    "beta of other heads": (
        lambda: attend(Q, K, V, beta=torch.ones(5)),
        *(r"\(5,\)", "6 heads", "one per head"),
    ),
    "beta with two axes": (
        lambda: attend(Q, K, V, beta=torch.ones(6, 1)),
        *(r"\(6, 1\)", "6 heads", "one per head"),
    ),
    "beta and scale": (
        lambda: attend(Q, K, V, beta=0.5, scale=0.25),
        *(r"beta \(0\.5\) and scale \(0\.25\)", "one of them"),
    ),
    "negative scale, weights": (
        lambda: attention_weights(Q, K, scale=-0.5),
        *(r"\(-0.5\)", "0.*to infinity"),
    ),
    "beta that is true": (lambda: attend(Q, K, V, beta=True), "True", "number", "None means"),
    "beta in words": (lambda: attend(Q, K, V, beta="sharp"), "'sharp'", "number", "None means"),
    "beta in a list": (lambda: attend(Q, K, V, beta=[1.0, 2.0]), r"\[1\.0, 2\.0\]", "tensor"),
    "beta on another device": (
        lambda: attend(Q, K, V, beta=torch.ones(6, device="meta")),
        *("query is on cpu", "beta is on meta", "move one"),
    ),
    "complex beta": (
        lambda: attend(Q, K, V, beta=torch.tensor(1j)),
        *("beta is torch.complex64", r"beta\.float\(\)"),
    ),
    "boolean beta": (
        lambda: attention_weights(Q, K, beta=true(6)),
        *("beta is torch.bool", r"beta\.float\(\)"),
    ),
    "dropout in words": (lambda: attend(Q, K, V, dropout="a"), r"\('a'\)", "number", "below 1"),
    "no dropout": (lambda: attend(Q, K, V, dropout=None), r"\(None\)", "number", "below 1"),
    "dropout of all, explain": (
        lambda: explain_attention(Q, K, V, dropout=1.0),
        r"\(1\.0\)",
        "below 1",
    ),
    "dropout of all": (lambda: attend(Q, K, V, dropout=1.0), r"\(1\.0\)", "below 1"),
    "negative dropout": (lambda: attend(Q, K, V, dropout=-0.1), r"\(-0\.1\)", "at least 0"),
    "NaN dropout": (lambda: attend(Q, K, V, dropout=math.nan), r"\(nan\)", "at least 0"),
    "bias of another length": (
        lambda: attend(Q, K, V, bias=zeros(3, 5)),
        *(r"\(3, 5\)", r"\(2, 6, 3, 4\)", "S is 5"),
    ),
    "bias of heads alone": (
        lambda: attend(Q, K, V, bias=zeros(6, 3, 4)),
        *(r"\(6, 3, 4\)", r"\(2, 6, 3, 4\)", "B is 6"),
    ),
    "bias of other heads": (
        lambda: attention_weights(Q, K, bias=zeros(2, 5, 3, 4)),
        *(r"\(2, 5, 3, 4\)", r"\(2, 6, 3, 4\)", "H is 5"),
    ),
    "bias of more rows": (
        lambda: attention_statistics(Q, K, bias=zeros(4, 4)),
        *(r"\(4, 4\)", r"\(2, 6, 3, 4\)", "L is 4"),
    ),
    "bias with five axes": (
        lambda: attend(Q, K, V, bias=zeros(1, 2, 6, 3, 4)),
        *(r"\(1, 2, 6, 3, 4\)", "5 axes", r"\(B, H, L, S\)"),
    ),
    "a number for a bias": (lambda: attend(Q, K, V, bias=1.0), "bias", "tensor", r"1\.0", "B, H"),
    "a mask for a bias": (lambda: attend(Q, K, V, bias=causal()), r"bias is", r"mask=causal\(\)"),
    "boolean bias": (lambda: attend(Q, K, V, bias=true(3, 4)), "bias is torch.bool", TENSOR),
    "integer bias": (lambda: attend(Q, K, V, bias=zeros(3, 4).int()), "int32", "floating-point"),
    "bias elsewhere": (
        lambda: attend(Q, K, V, bias=zeros(3, 4).to("meta")),
        *("cpu", "bias.*meta", "move"),
    ),
}

BACKENDS: dict[str, Case] = {
    "unknown": (lambda: attend(Q, K, V, backend="flash"), "'flash'", "auto", "sdpa", "flex"),
    "whole": (lambda: attend(Q, Q, Q, backend="whole"), "'whole'", "CUDA", "auto"),
    "unknown, explain": (
        lambda: explain_attention(Q, K, V, backend="fast"),
        "'fast'",
        "choose",
        "auto",
    ),
    "no backend": (lambda: attend(Q, K, V, backend=None), "None", "choose", "auto"),
    "packed without a mask": (
        lambda: attend(Q, K, V, backend="packed"),
        *("'packed'", r"packed\(lengths\)", "'auto'"),
    ),
    "packed, not one range": (
        lambda: attend(Q, K, V, ~causal(), backend="packed"),
        *("'packed'", r"~causal\(\)", "one range", "'auto'"),
    ),
    "packed with a bias": (
        lambda: attend(Q, K, V, causal(), bias=zeros(3, 4), backend="packed"),
        *("'packed'", "bias", "'auto' or 'sdpa'"),
    ),
    "flex with a bias": (
        lambda: attend(Q, K, V, bias=zeros(3, 4), backend="flex"),
        *("'flex'", "bias", "'auto' or 'sdpa'"),
    ),
    "flex with dropout": (
        lambda: attend(Q, K, V, dropout=0.5, backend="flex"),
        *("'flex'", r"0\.5", "'auto' or 'sdpa'"),
    ),
    "flex with gradients": (
        lambda: attend(Q.clone().requires_grad_(), K, V, backend="flex"),
        *("'flex'", "CPU", "'auto'", r"torch\.no_grad\(\)"),
    ),
    "hard attention by sdpa": (
        lambda: attend(Q, K, V, beta=math.inf, backend="sdpa"),
        *("'sdpa'", "∞", "'auto' or 'formula'"),
    ),
    "hard attention by flex": (
        lambda: attend(Q, K, V, beta=math.inf, backend="flex"),
        *("'flex'", "∞", "'auto' or 'formula'"),
    ),
    "hard attention of one head": (
        lambda: attend(Q, K, V, beta=torch.tensor([1.0, 1, 1, 1, 1, math.inf]), backend="sdpa"),
        *("'sdpa'", "∞", "'auto' or 'formula'"),
    ),
}

MASKS: dict[str, Case] = {
    "not called": (lambda: attend(Q, K, V, mask=causal), "function causal", r"mask=causal\(\)"),
    "not called, weights": (
        lambda: attention_weights(Q, K, mask=causal),
        "causal",
        r"mask=causal\(\)",
    ),
    "not called, explain": (
        lambda: explain_attention(Q, K, V, causal),
        "causal",
        r"mask=causal\(\)",
    ),
    "a word": (lambda: attend(Q, K, V, mask="causal"), "'causal'", r"mask=causal\(\)"),
    "a bool": (lambda: attend(Q, K, V, mask=True), "True", r"mask=causal\(\)"),
    "a float tensor": (lambda: attend(Q, K, V, mask=zeros(3, 4)), "float32", "bias=tensor"),
    "an integer tensor": (
        lambda: attention_statistics(Q, K, mask=true(3, 4).int()),
        *("int32", r"tensor\.bool\(\)"),
    ),
    "a boolean tensor of other columns": (
        lambda: attend(Q, K, V, mask=true(3, 5)),
        *(r"3, 5\)", "S = 4", "S is 5"),
    ),
    "a boolean tensor of batch or heads": (
        lambda: attend(zeros(6, 6, 3, 5), zeros(6, 6, 4, 5), zeros(6, 6, 4, 7), true(6, 3, 4)),
        *(r"\(6, 3, 4\)", "both B and H are 6", r"mask\[:, None\] or mask\[None\]"),
    ),
    "a padding mask for two axes": (
        lambda: attend(Q, K, V, mask=true(2, 4)),
        *(r"2, 4\)", "L is 2", r"padding\(mask\)"),
    ),
    "floats": (lambda: Mask.from_tensor(zeros(3, 4)), "float32", "boolean", "bias"),
    "integers": (lambda: Mask.from_tensor(zeros(3, 4).int()), "int32", "boolean", "convert"),
    "a list": (lambda: Mask.from_tensor([[True]]), "list", "boolean", "convert"),
    "five axes": (
        lambda: Mask.from_tensor(true(1, 1, 1, 3, 4)),
        r"\(1, 1, 1, 3, 4\)",
        "B, H, L, S",
    ),
    "other columns": (
        lambda: attend(Q, K, V, Mask.from_tensor(true(3, 5))),
        *(r"3, 5\)", "S = 4", "S is 5"),
    ),
    "other rows": (
        lambda: attend(Q, K, V, Mask.from_tensor(true(4, 4))),
        *(r"4, 4\)", "L = 3", "L is 4"),
    ),
    "other batch": (
        lambda: attend(Q, K, V, Mask.from_tensor(true(3, 3, 4))),
        *("3x1x3x4", "3 masks", "batch of 2", "one for each"),
    ),
    "other heads": (
        lambda: attend(Q, K, V, Mask.from_tensor(true(2, 4, 3, 4))),
        *("4 heads", "the query has 6", "use 1 or 6"),
    ),
    "other heads, in a conjunction": (
        lambda: attend(Q, K, V, causal() & Mask.from_tensor(true(1, 4, 3, 4))),
        *("4 heads", "the query has 6", "use 1 or 6"),
    ),
    "other columns, in an alternative": (
        lambda: attend(Q, K, V, causal() | Mask.from_tensor(true(3, 5))),
        *(r"3, 5\)", "S = 4", "S is 5"),
    ),
    "other columns, negated": (
        lambda: attend(Q, K, V, ~Mask.from_tensor(true(3, 5))),
        *(r"3, 5\)", "S = 4", "S is 5"),
    ),
    "other heads than one": (
        lambda: attend(Q[:, :1], K[:, :1], V[:, :1], Mask.from_tensor(true(1, 4, 3, 4))),
        *("4 heads", "the query has 1", "use 1$"),
    ),
    "a rule that is a number": (lambda: Mask(3, "x"), "rule", "3 and 'x'", r"lambda at: at\.key"),
    "a rule with Python's and": (
        lambda: Mask(lambda at: at.key < 3 and at.query < 3, "corner").draw(4, 5),
        "corner",
        r"& \| ~",
        "parentheses",
    ),
    "a rule with Python's not": (
        lambda: attend(Q, K, V, causal() & Mask(lambda at: not at.key < 3, "corner")),
        "corner",
        r"& \| ~",
    ),
    "a text that is none": (lambda: Mask(lambda at: at.key > 2, None), "text", "None", "lambda at"),
    "a rule that says yes": (
        lambda: attend(Q, K, V, Mask(lambda at: True, "own")),
        *("rule of own", "True", r"at\.key <= at\.query"),
    ),
    "a rule that counts": (
        lambda: attend(Q, K, V, causal() & Mask(lambda at: at.key, "own")),
        *("rule of own", "torch.int64", r"at\.key <= at\.query"),
    ),
    "a rule that weighs": (
        lambda: Mask(lambda at: at.key / 2, "own").tensor(3, 4),
        *("rule of own", "torch.float32", r"at\.key <= at\.query"),
    ),
    "a rule of another shape": (
        lambda: attention_weights(Q, K, causal() & Mask(lambda at: true(5, 4), "own")),
        *("rule of own", r"\(5, 4\)", "combine the indices"),
    ),
    "a rule of more axes": (
        lambda: Mask(lambda at: true(1, 1, 1, 3, 4), "own").draw(3, 4),
        *("rule of own", r"\(1, 1, 1, 3, 4\)", r"\(1, 1, 3, 4\)", "combine the indices"),
    ),
    "a tensor first, &": (lambda: true(3, 4) & causal(), "'&'", TENSOR),
    "a tensor first, |": (lambda: true(3, 4) | causal(), r"'\|'", TENSOR),
    "nothing first": (lambda: None | causal(), r"'\|'", "got None", "leave it out"),
    "true first": (lambda: True & causal(), "'&'", "got True", "leave it out"),
    "a tensor joined by &": (lambda: causal() & true(3, 4), "'&'", TENSOR),
    "a tensor joined by |": (lambda: causal() | true(3, 4), r"'\|'", TENSOR),
    "a function joined": (lambda: causal() & causal, "'&'", "function", "forget to call"),
    "nothing joined": (lambda: causal() | None, r"'\|'", "got None", "leave it out"),
    "batches that disagree": (
        lambda: padding([1, 2]) & padding([1, 2, 3]),
        *("batch", "2 and 3", "equal, or 1"),
    ),
    "batches that disagree, |": (
        lambda: padding([1, 2]) | prefix([1, 2, 3]),
        *("batch", "2 and 3", "equal, or 1"),
    ),
    "heads that disagree": (
        lambda: Mask.from_tensor(true(1, 2, 3, 4)) & Mask.from_tensor(true(1, 3, 3, 4)),
        *("head", "2 and 3", "equal, or 1"),
    ),
    "fewer than no queries": (lambda: causal().tensor(-1, 3), r"L \(-1\)", "0 or more"),
    "half a query": (lambda: causal().tensor(3.5, 3), r"L \(3\.5\)", "whole number"),
    "half a key": (lambda: causal().tensor(3, 3.5), r"S \(3\.5\)", "whole number"),
    "drawing less than nothing": (lambda: causal().draw(-1, 2), r"L \(-1\)", "0 or more"),
}

BANDS: dict[str, Case] = {
    "a window beyond int32": (lambda: window(2**31), r"left \(2147483648\)", "at most 2147483647"),
    "a window beyond int64": (lambda: window(1, 2**64), "right", "at most 2147483647"),
    "an offset beyond int64": (lambda: causal(2**64), r"offset \(18446", "at most 2147483647"),
    "a negative offset beyond int64": (lambda: causal().at(-(2**64)), "offset", "-2147483647 or"),
    "a rule's offset beyond int64": (
        lambda: Mask(lambda at: at.key > 2, "own").at(2**64),
        *(r"offset \(18446", "at most 2147483647"),
    ),
    "offset that is true": (lambda: causal(True), "offset", "True", "number of keys"),
    "half an offset": (lambda: causal(1.5), r"1\.5", "integer", "number of keys"),
    "a list of offsets": (lambda: causal([1, 2]), r"\[1, 2\]", "tensor", "number of keys"),
    "float offsets": (lambda: causal(torch.tensor(1.5)), "offset", "float32", r"\.long\(\)"),
    "boolean offsets": (lambda: window(2, offset=torch.tensor(True)), "bool", r"\.long\(\)"),
    "a table of offsets": (lambda: causal(zeros(2, 2).long()), r"\(2, 2\)", "0 or 1 axis", "list"),
    "window's offset": (lambda: window(2, offset=True), "offset", "True", "number of keys"),
    "offsets of another batch": (
        lambda: attend(Q, K, V, causal(torch.tensor([1, 1, 1]))),
        *("3 offsets", "batch of 2", "one for each"),
    ),
    "half a window": (lambda: window(1.5), "left", r"1\.5", "whole number", "0 or more"),
    "a negative window": (lambda: window(-1), "left", "-1", "0 or more"),
    "a negative right": (lambda: window(2, -3), "right", "-3", "0 or more"),
    "a float right": (lambda: window(2, 1.0), "right", r"1\.0", "whole number"),
    "a window that is true": (lambda: window(True), "left", "True", "whole number"),
    "no window": (lambda: window(None), "left", "None", "whole number"),
}

LENGTHS: dict[str, Case] = {
    "a length beyond int64": (lambda: padding([2**64]), "padding lengths", "64 bits", "18446"),
    "a prefix beyond int64": (lambda: prefix(2**64), r"prefix n \(18446", "at most 2147483647"),
    "prefixes beyond int64": (lambda: prefix([1, 2**64]), "prefix n", "64 bits"),
    "longer than the keys": (
        lambda: attend(Q, K, V, padding([4, 5])),
        *(r"\(5\)", "S = 4", "number of real keys"),
    ),
    "longer than the keys, weights": (
        lambda: attention_weights(Q, K, padding([9, 1])),
        *(r"\(9\)", "S = 4", "number of real keys"),
    ),
    "longer than the keys, statistics": (
        lambda: attention_statistics(Q, K, causal() & padding([9, 1])),
        *(r"\(9\)", "S = 4", "number of real keys"),
    ),
    "longer than the keys, tensor": (lambda: padding([5]).tensor(3, 4), r"\(5\)", "S = 4"),
    "longer than the keys, draw": (lambda: padding([5]).draw(3, 4), r"\(5\)", "S = 4"),
    "of another batch": (
        lambda: attend(Q, K, V, padding([4, 4, 4])),
        *("3 lengths", "batch of 2", "one for each"),
    ),
    "of no sentence": (lambda: attend(Q, K, V, padding([])), "0 lengths", "batch of 2"),
    "negative": (lambda: padding([2, -1]), r"\[2, -1\]", "negative", "count keys"),
    "floats": (lambda: padding([1.5, 2]), "lengths", "float32", r"\.long\(\)"),
    "float tensor": (lambda: padding(torch.tensor([1.0, 2.0])), "float32", r"\.long\(\)"),
    "a mask of one sentence": (lambda: padding(true(2)), "lengths", "bool", r"mask\[None\]"),
    "a mask padded on the left": (
        lambda: padding(torch.tensor([[True, True, False], [False, True, True]])),
        *("row 1", r"\[0, 1, 1\]", r"Mask\.from_tensor\(mask\.bool\(\)\[:, None, None, :\]\)"),
    ),
    "a mask with a hole": (
        lambda: padding(torch.tensor([[1, 0, 1]])),
        *("row 0", r"\[1, 0, 1\]", TENSOR),
    ),
    "a mask of fewer columns than keys": (
        lambda: attend(Q, K, V, padding(true(2, 3))),
        *("3 columns", "4 keys", "one for each key"),
    ),
    "a float mask": (lambda: padding(zeros(2, 3)), "lengths", "float32", r"\.long\(\)"),
    "a number": (lambda: padding(3), "1 or 2 axes", r"\(\)", r"such as \[3, 5\]"),
    "a table": (lambda: padding([[1, 2]]), "row 0", r"\[1, 2\]", r"such as \[3, 5\]"),
    "three axes": (lambda: padding(true(1, 2, 3)), "torch.bool", "has 2 axes$"),
    "words": (lambda: padding("ab"), "integers", "'ab'", r"such as \[3, 5\]"),
    "packed ones": (
        lambda: padding(PackedLengths([1, 2])),
        "integers",
        r"PackedLengths\(\[1, 2\]\)",
        "such as",
    ),
    "negative prefix": (lambda: prefix(-1), r"\(-1\)", "count keys"),
    "a negative prefix among others": (lambda: prefix([-1, 2]), r"\[-1, 2\]", "count keys"),
    "half a prefix": (lambda: prefix(1.5), "prefix", "float32", r"\.long\(\)"),
    "prefix that is true": (lambda: prefix(True), "prefix", "bool", "integers"),
    "float prefixes": (lambda: prefix([1.0, 2.0]), "prefix", "float32", r"\.long\(\)"),
    "prefixes of another batch": (
        lambda: attend(Q, K, V, causal() | prefix([1, 1, 1])),
        *("3 prefixes", "batch of 2", "one for each"),
    ),
}

DOCUMENTS: dict[str, Case] = {
    "an id beyond int64": (lambda: documents([1, 2**64]), "document ids", "64 bits"),
    "float ids": (lambda: documents([0.0, 1.0]), "ids", "float32", r"\.long\(\)"),
    "a float tensor": (lambda: documents(zeros(4)), "ids", "float32", r"\.long\(\)"),
    "boolean ids": (lambda: documents([True, False]), "ids", "bool", r"\.long\(\)"),
    "rows of two lengths": (lambda: documents([[0, 0], [1]]), "ids", r"\[\[0, 0\], \[1\]\]"),
    "a number": (lambda: documents(3), "ids", "1 or 2 axes", r"\(\)"),
    "three axes": (lambda: documents(zeros(1, 2, 3).long()), "1 or 2 axes", r"\(1, 2, 3\)"),
    "too few ids": (
        lambda: attend(Q, K, V, documents([0, 0, 1])),
        *("3 ids", "4 keys", "one id for each key"),
    ),
    "too few ids, drawn": (lambda: documents([0, 1]).draw(3, 4), "2 ids", "4 keys", "one id"),
    "more queries than keys": (
        lambda: attend(zeros(2, 6, 5, 5), K, V, documents([0, 0, 1, 1])),
        *("5 queries", "4 keys", "its own key"),
    ),
    "another batch": (
        lambda: attend(Q, K, V, documents(zeros(3, 4).long())),
        *("3 rows of ids", "batch of 2", "one for each"),
    ),
}

PACKINGS: dict[str, Case] = {
    "more tokens than kernels count": (
        lambda: packed([2**31 - 1, 1]),
        *(r"\[2147483647, 1\]", "more than 2147483647 tokens", "fewer sequences"),
    ),
    "float lengths": (lambda: packed([1.0, 2.0]), "lengths", "float32", r"\.long\(\)"),
    "half a length": (lambda: PackedLengths([1.5]), "lengths", "float32", r"\.long\(\)"),
    "negative": (lambda: packed([3, -1]), "negative", r"\[3, -1\]", "count tokens"),
    "negative PackedLengths": (lambda: PackedLengths([-1]), "negative", r"\[-1\]", "count tokens"),
    "a number": (lambda: PackedLengths(3), "1 axis", r"\(\)", r"such as \[3, 5\]"),
    "a table": (lambda: packed([[1]]), "1 axis", r"\(1, 1\)", r"such as \[3, 5\]"),
    "a mask": (lambda: packed(causal()), "integers", r"causal\(\)", r"such as \[3, 5\]"),
    "lengths that do not pair": (
        lambda: packed([1, 2], [1, 2, 3]),
        *("2 query", "3 source", "one of both"),
    ),
    "query total": (
        lambda: attend(*ONE, packed([1, 1], [2, 2])),
        *("query", "add up to 2", "are 3", "this very batch"),
    ),
    "source total": (
        lambda: attend(*ONE, packed([3], [5])),
        *("source", "add up to 5", "are 4", "this very batch"),
    ),
    "total, drawn": (lambda: packed([1, 2]).tensor(3, 4), "add up to 3", "are 4", "very batch"),
    "a batch": (lambda: attend(Q, K, V, packed([3], [4])), "must be 1", "got 2", "end to end"),
    "two packings": (
        lambda: attend(*ONE, packed([1, 2], [2, 2]) & packed([2, 1], [2, 2])),
        *("one packed", r"packed\(\[1, 2\], \[2, 2\]\) and packed\(\[2, 1\]", "queries, sources"),
    ),
    "with padding": (
        lambda: packed([1, 2], [2, 2]) & padding([4]),
        *("padding", "packed", "keep packed"),
    ),
    "or padding": (lambda: packed([1, 2]) | padding([3]), "padding", "packed", "keep packed"),
    "with padding further in": (
        lambda: packed([1, 2]) & (causal() | ~padding([3])),
        *("padding", "packed", "keep packed"),
    ),
    "two lengths with documents": (
        lambda: attend(*ONE, packed([1, 2], [2, 2]) & documents([0, 0, 1, 1])),
        *("documents", r"packed\(lengths\)", "self-attention"),
    ),
}

LOOKING: dict[str, Case] = {
    "a row too far": (lambda: attention_weights(Q, K, rows=3), r"\[3\]", UNDER_3),
    "a row too far from the end": (lambda: attention_weights(Q, K, rows=-4), r"\[-4\]", UNDER_3),
    "a row among others": (lambda: attention_weights(Q, K, rows=[0, 5]), r"\[0, 5\]", UNDER_3),
    "rows in a tensor": (
        lambda: attention_weights(Q, K, rows=torch.tensor([7])),
        r"\[7\]",
        UNDER_3,
    ),
    "a row of none": (
        lambda: attention_weights(Q[:, :, :0], K, rows=0),
        r"\[0\]",
        "number of queries is 0",
    ),
    "half a slice": (
        lambda: attention_weights(Q, K, rows=slice(0.5, 2)),
        r"slice\(0\.5",
        r"slice\(0, 3\)",
    ),
    "a slice of no step": (
        lambda: attention_weights(Q, K, rows=slice(0, 2, 0)),
        *(r"slice\(0, 2, 0\)", "step", r"try slice\(0, 3\)"),
    ),
    "float rows": (lambda: attention_weights(Q, K, rows=[0.5]), "rows", "float32", r"\.long\(\)"),
    "half a row": (lambda: attention_weights(Q, K, rows=1.5), "rows", "float32", r"\.long\(\)"),
    "a mask of rows": (
        lambda: attention_weights(Q, K, rows=true(3)),
        "rows",
        "bool",
        r"\.long\(\)",
    ),
    "rows in words": (
        lambda: attention_weights(Q, K, rows="all"),
        "rows",
        "integers",
        "'all'",
        "such as",
    ),
    "a table of rows": (
        lambda: attention_weights(Q, K, rows=zeros(1, 2).long()),
        "1 axis",
        r"\(1, 2\)",
    ),
    "top none": (lambda: attention_statistics(Q, K, topk=0), r"\(0\)", "1 or more"),
    "top minus one": (lambda: attention_statistics(Q, K, topk=-1), r"\(-1\)", "1 or more"),
    "top that is true": (
        lambda: attention_statistics(Q, K, topk=True),
        r"\(True\)",
        "whole number",
    ),
    "top and a half": (lambda: attention_statistics(Q, K, topk=1.5), r"\(1\.5\)", "whole number"),
}


def heads_3(**options: object) -> MultiHeadAttention:
    return MultiHeadAttention(12, 3, **options)  # type: ignore[arg-type]


def filled(cache: SelfCache | CrossCache) -> SelfCache | CrossCache:
    """What heads_3 leaves in a cache after a step over X."""
    heads_3()(X, X if isinstance(cache, CrossCache) else None, cache=cache)
    return cache


MODULES: dict[str, Case] = {
    "a capacity beyond int64": (lambda: SelfCache(2**64), r"capacity \(18446", "at most"),
    "trimming to more than is filled": (
        lambda: grown().trim(torch.tensor([4, 5])),
        *(r"lengths \(\[4, 5\]\)", r"from 0 to .* cache \(\[4, 4\]\)"),
    ),
    "trimming to less than nothing": (
        lambda: grown().trim(torch.tensor([-1, 2])),
        *(r"lengths \(\[-1, 2\]\)", r"\[4, 4\]"),
    ),
    "trimming other rows": (
        lambda: grown().trim(torch.tensor([1, 2, 3])),
        *("3 lengths", "2 rows", "one for each"),
    ),
    "trimming what is empty": (
        lambda: SelfCache().trim(torch.tensor([1])),
        *("no rows to trim", "take a step first"),
    ),
    "trimming to fractions": (lambda: grown().trim(zeros(2)), "lengths", "integers", "float32"),
    "joining another kind of cache": (
        lambda: grown().join(CrossCache()),
        *("SelfCache", "got a CrossCache"),
    ),
    "joining another module's cache": (
        lambda: grown().join(grown(width=3)),
        *("keys 5 and values 7", "keys 3 and values 7", "one module"),
    ),
    "selecting a beam that is not there": (
        lambda: beams().select([0, 4]),
        *(r"rows \(\[0, 4\]\)", "from 0 to 3", "4 sequences"),
    ),
    "heads": (lambda: MultiHeadAttention(512, 3), r"\(3\)", r"\(512\)", "try 4 or 8"),
    "more heads than width": (lambda: MultiHeadAttention(7, 11), r"\(11\)", r"\(7\)", "try 1 or 7"),
    "key heads": (
        lambda: MultiHeadAttention(12, 6, key_heads=4),
        *(r"key_heads \(4\)", r"heads \(6\)", "try 3 or 6"),
    ),
    "more key heads than heads": (
        lambda: MultiHeadAttention(12, 6, key_heads=12),
        *(r"key_heads \(12\)", r"heads \(6\)", "try 3 or 6"),
    ),
    "more key heads than one": (
        lambda: MultiHeadAttention(12, 1, key_heads=2),
        *(r"key_heads \(2\)", r"heads \(1\)", "try 1$"),
    ),
    "no heads": (lambda: MultiHeadAttention(12, 0), r"heads \(0\)", "1 or more"),
    "negative heads": (lambda: MultiHeadAttention(12, -3), r"heads \(-3\)", "1 or more"),
    "float heads": (lambda: MultiHeadAttention(12, 2.0), r"heads \(2\.0\)", "whole number"),
    "heads that are true": (lambda: MultiHeadAttention(12, True), r"heads \(True\)", "whole"),
    "no width": (lambda: MultiHeadAttention(0, 3), r"width \(0\)", "1 or more"),
    "no key heads": (lambda: heads_3(key_heads=0), r"key_heads \(0\)", "1 or more"),
    "no key width": (lambda: heads_3(key_width=0), r"key_width \(0\)", "1 or more"),
    "negative value width": (lambda: heads_3(value_width=-2), r"value_width \(-2\)", "1 or more"),
    "half a source width": (lambda: heads_3(source_width=2.5), r"source_width \(2\.5\)", "whole"),
    "no output width": (lambda: heads_3(output_width=0), r"output_width \(0\)", "1 or more"),
    "dropout of all": (lambda: heads_3(dropout=1.0), r"\(1\.0\)", "below 1"),
    "negative dropout": (lambda: heads_3(dropout=-0.5), r"\(-0\.5\)", "at least 0"),
    "NaN dropout": (lambda: heads_3(dropout=math.nan), r"\(nan\)", "at least 0"),
    "dropout in words": (lambda: heads_3(dropout="a"), r"\('a'\)", "number"),
    "no dropout": (lambda: heads_3(dropout=None), r"\(None\)", "number"),
    "a score and beta": (lambda: heads_3(beta=1.5, score=DotScore()), r"\(1\.5\)", "score"),
    "negative beta": (lambda: heads_3(beta=-1.0), r"\(-1\.0\)", "0.*to infinity"),
    "NaN beta": (lambda: heads_3(beta=math.nan), r"\(nan\)", "0.*to infinity"),
    "negative beta in a tensor": (
        lambda: heads_3(beta=torch.tensor([1.0, -2.0, 3.0])),
        *(r"-2\.0", "0.*to infinity"),
    ),
    "beta of other heads": (
        lambda: heads_3(beta=torch.ones(2)),
        *(r"\(2,\)", "3 heads", "one per head"),
    ),
    "score in words": (lambda: heads_3(score="dot"), r"score \('dot'\)", r"score=DotScore\(\)"),
    "score not called": (
        lambda: heads_3(score=DotScore),
        r"score \(class DotScore\)",
        r"score=DotScore\(\)",
    ),
    "position in words": (
        lambda: heads_3(position="rotary"),
        r"'rotary'",
        r"RotaryEmbedding\(width\)",
    ),
    "position not called": (
        lambda: heads_3(position=RotaryEmbedding),
        *(r"\(class RotaryEmbedding\)", r"RotaryEmbedding\(width\)"),
    ),
    "position for the input": (
        lambda: heads_3(position=SinusoidalPositions(4)),
        *(r"\(SinusoidalPositions\(4", r"RotaryEmbedding\(width\)", "added to the input"),
    ),
    "score of other heads": (
        lambda: heads_3(score=BilinearScore(4, 4, heads=2))(X),
        *("3, 3, 4", "2 heads", "without heads"),
    ),
    "score of another width": (
        lambda: heads_3(score=BilinearScore(5, 4))(X),
        *(r"3, 4\)", "5 wide", "query_width"),
    ),
    "rotary too wide": (
        lambda: heads_3(position=RotaryEmbedding(6))(X),
        r"\(6\)",
        r"\(4\)",
        r"RotaryEmbedding\(4\)",
    ),
    "linear bias of other heads": (lambda: heads_3(position=ALiBi(4))(X), "4", "3", "H is 4"),
    "another width": (lambda: heads_3()(zeros(2, 3, 11)), r"\(2, 3, 11\)", "width = 12"),
    "a vector": (lambda: heads_3()(zeros(12)), r"\(12,\)", "length"),
    "nothing": (lambda: heads_3()(None), "x must be a tensor", r"length, 12\)", "None"),
    "a list for x": (lambda: heads_3()([1.0]), "x must be a tensor", r"\[1\.0\]"),
    "double x": (lambda: heads_3()(X.double()), "float64", "float32", r"x\.to\(torch\.float32\)"),
    "integer x": (lambda: heads_3()(X.long()), "int64", "float32", r"x\.to\(torch\.float32\)"),
    "double source": (
        lambda: heads_3()(X, X.double()),
        *("source is torch.float64", "float32", r"source\.to\(torch\.float32\)"),
    ),
    "mask for a source": (lambda: heads_3()(X, causal()), r"source is", r"mask=causal\(\)"),
    "a tensor for a mask": (lambda: heads_3()(X, mask=zeros(3, 3)), "float32", "bias=tensor"),
    "a function for a mask": (lambda: heads_3()(X, mask=causal), "causal", r"mask=causal\(\)"),
    "a number for a cache": (lambda: heads_3()(X, cache=3), r"cache \(3\)", r"SelfCache\(\)"),
    "a dictionary for a cache": (lambda: heads_3()(X, cache={}), r"\(\{\}\)", r"SelfCache\(\)"),
    "a cache not called": (
        lambda: heads_3()(X, cache=SelfCache),
        *(r"cache \(class SelfCache\)", r"SelfCache\(\)"),
    ),
    "leading axes": (
        lambda: heads_3()(X[None], zeros(2, 4, 12)),
        *(r"\(1, 2, 3, 12\)", r"\(2, 4, 12\)", "same leading axes"),
    ),
    "another source width": (
        lambda: heads_3()(X, zeros(2, 4, 11)),
        *(r"\(2, 4, 11\)", r"source_width = 12"),
    ),
    "a source vector": (lambda: heads_3()(X, zeros(12)), r"source.*\(12,\)", "length"),
    "another batch of sources": (
        lambda: heads_3()(X, zeros(3, 4, 12)),
        *(r"\(2, 3, 3, 4\)", r"\(3, 3, 4, 4\)", "equal or 1"),
    ),
    "a source of another width, without a cache": (
        lambda: heads_3(source_width=7)(X),
        *(r"source_width \(7\)", r"width \(12\)", "pass a source$"),
    ),
    "a source missing": (
        lambda: heads_3(source_width=7)(X, cache=CrossCache()),
        *("empty CrossCache needs the source", r"module\(x, source, cache=cache\)"),
    ),
    "a source missing, of the same width": (
        lambda: heads_3()(X, cache=CrossCache()),
        *("empty CrossCache needs the source", r"module\(x, source, cache=cache\)"),
    ),
    "a source for the own sequence": (
        lambda: heads_3()(X, zeros(2, 4, 12), cache=SelfCache()),
        *("SelfCache", r"\(2, 4, 12\)", r"use CrossCache\(\)"),
    ),
    "rotary with sources": (
        lambda: heads_3(position=RotaryEmbedding(4))(X, cache=filled(CrossCache())),
        *("RotaryEmbedding", "cross-attention", "leave position out"),
    ),
    "packed and growing": (
        lambda: heads_3()(X[:1], mask=packed([1, 2]), cache=SelfCache()),
        *(r"packed\(\[1, 2\]\)", "SelfCache", "one row for each sequence"),
    ),
    "rotary across": (
        lambda: heads_3(position=RotaryEmbedding(4))(X, zeros(2, 4, 12)),
        *("RotaryEmbedding", "cross-attention", "leave position out"),
    ),
    "linear bias across": (
        lambda: heads_3(position=ALiBi(3))(X, zeros(2, 4, 12)),
        *("ALiBi", "cross-attention", "leave position out"),
    ),
    "lengths too long": (
        lambda: heads_3()(X, mask=padding([3, 4])),
        *(r"\(4\)", "S = 3", "number of real keys"),
    ),
    "packed batch": (lambda: heads_3()(X, mask=packed([3])), "got 2", "end to end"),
    "packed total": (
        lambda: heads_3()(X[:1], mask=packed([2])),
        *("add up to 2", "are 3", "this very batch"),
    ),
    "packed total, turned": (
        lambda: heads_3(position=RotaryEmbedding(4))(X[:1], mask=packed([2])),
        *("add up to 2", "are 3", "this very batch"),
    ),
    "no capacity": (lambda: SelfCache(0), r"capacity \(0\)", "whole number", "1 or more"),
    "negative capacity": (lambda: SelfCache(-1), r"\(-1\)", "whole number", "1 or more"),
    "capacity that is true": (lambda: SelfCache(True), r"\(True\)", "whole number"),
    "capacity in words": (lambda: SelfCache("a"), r"capacity \('a'\)", "whole number"),
    "half a capacity": (lambda: SelfCache(1.5), r"capacity \(1\.5\)", "whole number"),
    "capacity too small": (
        lambda: heads_3()(X, cache=SelfCache(2)),
        *("holds 2", "3 are needed", r"SelfCache\(3\)"),
    ),
    "capacity used up": (
        lambda: heads_3()(X, cache=filled(SelfCache(5))),
        *("holds 5", "6 are needed", r"SelfCache\(6\)"),
    ),
    "cache of another batch": (
        lambda: heads_3()(X[:1], cache=filled(SelfCache())),
        *(r"\(2, 3\)", r"\(1, 3\)", r"select\(rows\)"),
    ),
    "cache of another width": (
        lambda: MultiHeadAttention(12, 3, key_width=5)(X, cache=filled(SelfCache())),
        *("keys 4", "keys 5", "one cache for each module"),
    ),
    "cache of other heads": (
        lambda: MultiHeadAttention(12, 6)(X, cache=filled(SelfCache(7))),
        *("3 heads", "6 heads", "one cache for each module"),
    ),
    "sources of another width": (
        lambda: MultiHeadAttention(12, 3, value_width=5)(X, cache=filled(CrossCache())),
        *("values 4", "values 5", "one cache for each module"),
    ),
    "cache of another dtype": (
        lambda: heads_3().double()(X.double(), cache=filled(SelfCache())),
        *("float32", "float64", "one cache for each module"),
    ),
    "cache of another device": (
        lambda: heads_3().to("meta")(X.to("meta"), cache=filled(SelfCache(7))),
        *("cpu", "meta", "one cache for each module"),
    ),
    "sources of another batch": (
        lambda: heads_3()(zeros(3, 1, 12), cache=filled(CrossCache())),
        *(r"\(3, 3, 1, 4\)", r"\(2, 3, 3, 4\)", "equal or 1"),
    ),
    "rows beyond": (
        lambda: filled(SelfCache()).select([0, 2]),
        *(r"\[0, 2\]", "0 to 1", "holds 2 sequences"),
    ),
    "rows before": (
        lambda: filled(CrossCache()).select(torch.tensor([-1])),
        *(r"\[-1\]", "0 to 1", "holds 2 sequences"),
    ),
    "float rows": (lambda: SelfCache().select([0.5]), "rows", "float32", r"\.long\(\)"),
    "rows by yes and no": (lambda: SelfCache().select(true(2)), "rows", "bool", r"\.long\(\)"),
    "a table of rows": (lambda: CrossCache().select([[0, 1]]), "rows", "1 axis", r"\(1, 2\)"),
}

TABLES = {
    "vectors": VECTORS,
    "scales": SCALES,
    "backends": BACKENDS,
    "masks": MASKS,
    "bands": BANDS,
    "lengths": LENGTHS,
    "documents": DOCUMENTS,
    "packings": PACKINGS,
    "looking": LOOKING,
    "modules": MODULES,
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


# --- Tensors of other kinds

KINDS: dict[str, Callable[[Tensor], object]] = {
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8),
    "float8": lambda t: t.to(torch.float8_e5m2),
    "complex": lambda t: t.to(torch.complex64),
    "uint16": lambda t: t.to(torch.uint16),
    "a NumPy array": lambda t: t.to(torch.float64).numpy(),
    "a list": lambda t: t.tolist(),
}
PLACES: dict[str, Callable[[object], object]] = {
    "query": lambda x: attend(x, K, V),
    "key": lambda x: explain_attention(Q, x, V),
    "value": lambda x: attend(Q, K, x),
    "query of weights": lambda x: attention_weights(x, K),
    "key of statistics": lambda x: attention_statistics(Q, x),
    "bias": lambda x: attend(Q, K, V, bias=x),
    "mask": lambda x: attend(Q, K, V, mask=x),
    "mask tensor": Mask.from_tensor,
    "joined mask": lambda x: causal() & x,
    "beta": lambda x: attend(Q, K, V, beta=x),
    "dropout": lambda x: attend(Q, K, V, dropout=x),
    "backend": lambda x: attend(Q, K, V, backend=x),
    "rows": lambda x: attention_weights(Q, K, rows=x),
    "topk": lambda x: attention_statistics(Q, K, topk=x),
    "window": window,
    "offset": causal,
    "lengths": padding,
    "prefix": prefix,
    "ids": documents,
    "packed lengths": packed,
    "offset of a rule": Mask(lambda at: at.key > 2, "own").at,
    "sizes": lambda x: causal().tensor(3, x),
    "input": lambda x: MultiHeadAttention(5, 1)(x),
    "source": lambda x: MultiHeadAttention(5, 1)(Q[0], x),
    "cache": lambda x: MultiHeadAttention(5, 1)(Q[0], cache=x),
    "score": lambda x: BilinearScore(5, 5).attend(x, K, V),
    "dot product": lambda x: DotScore().attend(Q, x, V),
    "torch's key": lambda x: scaled_dot_product_attention(Q, x, V),
    "torch's mask": lambda x: scaled_dot_product_attention(Q, K, V, x),
    "trimmed lengths": lambda x: grown().trim(x),
    "selected rows": lambda x: grown().select(x),
    "joined cache": lambda x: grown().join(x),
    "capacity": SelfCache,
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_tensors_of_other_kinds_are_refused_in_one_line(
    kind: Callable[[Tensor], object],
) -> None:
    tensor = kind(torch.ones(2, 1, 3, 4))
    for place in PLACES.values():
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
            place(tensor)
