"""A corpus takes no more memory than its largest batch."""

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from regard.data.tokenizer import Tokenizer
from regard.task.text import Search, Translator, build_transformer
from tests.task.samples import SHAPE, WORDS

SENTENCES = 100_000
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident() -> int:
    with open("/proc/self/statm") as about:
        return int(about.read().split()[1]) * PAGE


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_growth_over_many_sentences() -> None:
    tokenizer = Tokenizer.bpe(WORDS, 300)
    model = build_transformer(replace(SHAPE, width=8), (tokenizer, tokenizer), seed=1).eval()
    translator = Translator(model, (tokenizer, tokenizer), Search.of(tokenizer, beams=2, length=6))
    chance = random.Random(0)

    def texts() -> Iterator[str]:
        for n in range(SENTENCES):
            yield f"{n} {' '.join(chance.choices(WORDS, k=chance.randint(1, 3)))}"

    # Every word is met, windows have their full size and pools are filled in the first fifth.
    sizes = [
        resident()
        for n, _ in enumerate(translator.stream(texts(), batch=256), 1)
        if n % (SENTENCES // 20) == 0
    ]
    begun, rest = max(sizes[:4]), max(sizes[4:])
    assert len(sizes) == 20
    assert rest - begun < 8 * 2**20, [size >> 20 for size in sizes]
