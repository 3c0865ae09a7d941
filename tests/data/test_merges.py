"""Tokens split into those that they were merged from."""

import numpy as np
import pytest

from regard.data.batch import EndToEnd
from regard.data.merges import Merges, grown
from regard.data.seeding import uniform
from regard.data.tokenizer import Tokenizer

TEXTS = [
    "the lowest tower is lower than the newest one",
    "newer towers are wider and their stones are whiter",
    "größer, höher und weiter",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.bpe(TEXTS * 3, 400)


def split(
    tokenizer: Tokenizer, texts: list[str], p: float, step: int = 0, longest: int = 500
) -> list[list[int]]:
    packed = EndToEnd(*tokenizer.encode_packed(texts))
    numbers = np.array([TEXTS.index(text) for text in texts])
    found = Merges(tokenizer).split(packed, p, longest, numbers, 3, step)
    ends = np.cumsum(found.lengths)
    assert ends[-1] == len(found.ids)
    return [part.tolist() for part in np.split(found.ids, ends[:-1])]


def test_the_text_stays(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode_batch(TEXTS)
    assert split(tokenizer, TEXTS, 0.0) == whole
    for step in range(20):
        found = split(tokenizer, TEXTS, 0.3, step)
        assert tokenizer.decode_batch(found) == TEXTS
        assert found != whole
    assert split(tokenizer, TEXTS, 0.3, 1) != split(tokenizer, TEXTS, 0.3, 2)


def test_nothing_is_left_to_split(tokenizer: Tokenizer) -> None:
    """With certainty all merges are undone: bytes, each with the space that belongs to it."""
    found = split(tokenizer, TEXTS, 1.0)
    merged = {whole for _, whole in tokenizer.merges}
    assert not merged & {token for text in found for token in text}
    assert [len(text) for text in found] == [1 + len(text.encode()) for text in TEXTS]


def test_how_many_are_split(tokenizer: Tokenizer) -> None:
    """A token that was merged from two bytes is split with probability p."""
    merges = Merges(tokenizer)
    of_bytes = (merges.parts[:, 0] >= 0) & (merges.parts[merges.parts] < 0).all((1, 2))
    texts = EndToEnd(np.full(20_000, of_bytes.argmax()), np.full(200, 100))
    found = merges.split(texts, 0.2, 500, np.arange(200), 0)
    assert abs(len(found.ids) / 20_000 - 1.2) < 0.01


@pytest.mark.parametrize("p", [0.1, 0.3])
def test_how_long_texts_become(tokenizer: Tokenizer, p: float) -> None:
    steps = [split(tokenizer, TEXTS, p, step) for step in range(200)]
    for n, before in enumerate(map(len, tokenizer.encode_batch(TEXTS))):
        after = np.array([len(step[n]) for step in steps])
        assert after.mean() > (1 + p / 2) * before
        assert (after > grown(before, p)).mean() < 0.02


def test_a_text_is_split_alike_in_any_batch(tokenizer: Tokenizer) -> None:
    together = split(tokenizer, TEXTS, 0.4, 7)
    assert [split(tokenizer, [text], 0.4, 7)[0] for text in TEXTS] == together
    assert split(tokenizer, TEXTS[::-1], 0.4, 7) == together[::-1]


def test_no_text_becomes_too_long(tokenizer: Tokenizer) -> None:
    lengths = [len(one) for one in tokenizer.encode_batch(TEXTS)]
    longest = max(lengths) + 3
    assert max(map(len, split(tokenizer, TEXTS, 0.9, longest=longest))) <= longest


def test_tokens_that_were_not_merged() -> None:
    with pytest.raises(ValueError, match="bpe_dropout needs tokens that were merged"):
        Merges(Tokenizer.characters(TEXTS))


def test_uniform() -> None:
    """Even, unrelated between neighbours, and each place by itself."""
    places = np.arange(100_000, dtype=np.uint64)
    found = uniform(places, 1, 2)
    assert 0 <= found.min() < found.max() < 1
    counts, _ = np.histogram(found, 100, (0, 1))
    assert counts.min() > 850
    assert counts.max() < 1150
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(found, uniform(places, 1, 3))[0, 1]) < 0.02
    assert np.array_equal(uniform(places[50:60], 1, 2), found[50:60])
