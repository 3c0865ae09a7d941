"""A corpus takes no more memory than its largest batch.

The tokenizer remembers words that it has cut, up to some 40 MB of them: here they are few.
"""

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from regard.data.tokenizer import Tokenizer
from regard.decode.engine.int8.linear import int8
from regard.task.search import SearchSettings
from regard.task.text import build_transformer
from regard.task.translator import Translator
from tests.task.samples import SHAPE, WORDS

SENTENCES = 100_000
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident() -> int:
    with open("/proc/self/statm") as about:
        return int(about.read().split()[1]) * PAGE


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.filterwarnings("ignore:8-bit layers run through torch")
@pytest.mark.parametrize(("beams", "whole"), [(1, True), (2, False)], ids=["greedy int8", "beams"])
def test_no_growth_over_many_sentences(beams: int, whole: bool) -> None:
    tokenizer = Tokenizer.bpe(WORDS, 300)
    model = build_transformer(replace(SHAPE, width=8), (tokenizer, tokenizer), seed=1).eval()
    model = int8(model) if whole else model
    settings = SearchSettings.of(tokenizer, beams=beams, length=6)
    translator = Translator(model, (tokenizer, tokenizer), settings)
    chance = random.Random(0)

    def texts() -> Iterator[str]:
        for n in range(SENTENCES):
            yield f"{n % 97} {' '.join(chance.choices(WORDS, k=chance.randint(1, 3)))}"

    # Every word is met, windows have their full size and pools are filled in the first fifth.
    sizes = [
        resident()
        for n, _ in enumerate(translator.stream(texts(), batch=256), 1)
        if n % (SENTENCES // 20) == 0
    ]
    begun, rest = max(sizes[:4]), max(sizes[4:])
    assert len(sizes) == 20
    assert rest - begun < 8 * 2**20, [size >> 20 for size in sizes]
