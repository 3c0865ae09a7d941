"""Subword regularization: tokens split into those that they were merged from, anew at each step.

    lower → low er → l ow er            each token with probability p, and so on with its parts

BPE-dropout (Provilkov et al. 2020) leaves out merges while a word is tokenized. Here merges are
undone in tokens that are there already, which takes no text and is done for a whole batch at once.
The two differ only where another merge would have taken the place of one that was left out.
"""

import math

import numpy as np
from jaxtyping import Int64

from regard.data.batch import EndToEnd
from regard.data.seeding import uniform
from regard.data.tokenizer import AnyTokenizer, Tokenizer

DEEPEST = 16
"""Rounds in which parts are split again; at p = 0.5 one in 65,536 would have another."""


class Merges:
    """What each token was merged from."""

    def __init__(self, tokenizer: AnyTokenizer):
        self.parts = np.full((tokenizer.size, 2), -1, np.int64)
        """Two tokens for each, or -1 where there are none."""
        for parts, whole in _merges(tokenizer):
            self.parts[whole] = parts

    def split(
        self, texts: EndToEnd, p: float, longest: int, numbers: Int64[np.ndarray, "n"], *seeds: int
    ) -> EndToEnd:
        """The same texts, each token split with probability p.

        A text draws from its number and the seeds, whatever else is in the batch. One that could
        become longer than `longest` stays as it is.
        """
        ids = texts.ids.astype(np.int64)
        owner = np.repeat(np.arange(len(texts.lengths)), texts.lengths)
        fresh = np.ones(len(ids), bool)
        for level in range(DEEPEST):
            lengths = np.bincount(owner, minlength=len(texts.lengths))
            place = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            places = numbers[owner].astype(np.uint64) << np.uint64(32)
            chance = uniform(places + place.astype(np.uint64), level, *seeds)
            short = 2 * lengths <= longest
            chosen = fresh & (self.parts[ids, 0] >= 0) & short[owner] & (chance < p)
            if not chosen.any():
                break
            counts = 1 + chosen
            left = (np.cumsum(counts) - counts)[chosen]
            parts = self.parts[ids[chosen]]
            ids, owner = np.repeat(ids, counts), np.repeat(owner, counts)
            ids[left], ids[left + 1] = parts.T
            fresh = np.repeat(chosen, counts)
        return EndToEnd(ids, np.bincount(owner, minlength=len(texts.lengths)))


def grown(tokens: int, p: float) -> int:
    """How many tokens so many become at most, with rare exceptions: the mean of those that can all
    be split, and three standard deviations of a Poisson distribution."""
    more = tokens * p / max(0.1, 1 - 2 * p)
    return math.ceil(tokens + more + 3 * math.sqrt(more))


def _merges(tokenizer: AnyTokenizer) -> list[tuple[tuple[int, int], int]]:
    if isinstance(tokenizer, Tokenizer) and tokenizer.merges:
        return tokenizer.merges
    raise ValueError(
        "bpe_dropout needs tokens that were merged by byte-pair encoding, and this tokenizer has "
        "none; leave it at 0"
    )
