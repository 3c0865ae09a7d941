"""Alignments are those of the head that the model needs, and of the hypothesis that won."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer
from regard.decode.engine.eager import ReadingSession, encode
from regard.decode.search.beam import beam
from regard.decode.search.greedy import greedy
from regard.look.align import Example, Head, cross, find, links, words
from regard.look.record import record
from tests.model.samples import tokens, transformer

START, END = 1, 2


# Words


@pytest.mark.parametrize(
    "text",
    [
        "ein Hund läuft",
        "  two   spaces\tand a tab ",
        "« mot »",  # no-break spaces, which are two bytes each
        "wide　space, 漢字 and 😀 signs",
        "a\u2028b\x1cc\x85d",
        "nothing else",
        "",
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_tokens_know_their_words(text: str, kind: str) -> None:
    tokenizer = (
        Tokenizer.bpe(["two words and nothing else"] * 3, 300)
        if kind == "bytes"
        else Tokenizer.characters([text or "a"])
    )
    pieces = tokenizer.pieces(tokenizer.encode(text))
    numbers = words(pieces)
    assert len(numbers) == len(pieces)
    assert sorted({n for n in numbers if n >= 0}) == list(range(len(text.split())))
    real = [n for n in numbers if n >= 0]
    assert real == sorted(real)


def test_pieces_by_hand() -> None:
    assert words(["▁a", "b", "▁", "c", "<unk>", "▁d"]) == [0, 0, -1, 1, 1, 2]
    assert words(["a", "<0xC2>", "<0xA0>", "b"]) == [0, -1, -1, 1]  # a space of two bytes
    assert words(["<0xC3>", "<0xA4>", "▁x"]) == [0, 0, 1]
    assert words(["<0xFF>", "▁x"]) == [0, 1]  # no letter at all
    assert words([]) == []


def test_a_target_word_is_linked_to_the_word_it_looks_at_most() -> None:
    weights = torch.tensor(
        [
            # a     b1    b2    end
            [0.3, 0.2, 0.2, 0.3],  # the two tokens of b together are more than a
            [0.2, 0.0, 0.1, 0.7],  # EOS is no word
            [0.0, 0.4, 0.0, 0.6],
            [0.0, 0.0, 0.0, 1.0],  # the step that wrote the end
        ]
    )
    assert links(weights, [0, 1, 1], [0, 1, 2]) == [(0, 1), (1, 0), (1, 2)]
    assert links(weights, [0, 1, 1], [0, 0, 0]) == [(1, 0)]
    assert links(weights, [0, -1, 1], [0, -1, 1]) == [(0, 0), (0, 1)]
    assert links(weights, [-1, -1, -1], [0, 1, 2]) == []
    assert links(weights, [0, 1, 1], []) == []


# Weights


class Watched(ReadingSession):
    """Rows that remember what they attended to."""

    seen: Tensor | None = None  # R, steps, layers, H, S

    def step(self, tokens: Tensor) -> Tensor:
        with record(self.model, lambda name: name.endswith("cross")) as seen:
            logits = super().step(tokens)
        # Beams of one source are queries of one row.
        together = torch.stack([asked.weights() for asked in seen.values()])
        rows = together.permute(1, 3, 0, 2, 4).flatten(0, 1)[:, None]
        self.seen = rows if self.seen is None else torch.cat((self.seen, rows), 1)
        return logits

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        assert self.seen is not None
        self.seen = self.seen[rows]


def test_attention_is_that_of_the_search_reordered_to_the_winner() -> None:
    """One pass over what was found gives the weights that the winning beam had step by step."""
    most, lengths, model = 5, [7, 3, 5], transformer()
    source = tokens(3, 7)
    for width, (n, length) in itertools.product((1, 4), enumerate(lengths)):
        row = source[n : n + 1, :length].clone()
        row[0, -1] = END
        with torch.no_grad():  # alone, so that the winner stays to the end
            session = Watched(model, *encode(model, row, None))
        given: dict[str, Any] = {"end": END, "max_length": most, "min_length": most}
        if width == 1:
            (best,) = greedy(session, [[START]], **given)
        else:
            ((best,),) = beam(session, [[START]], width=width, **given)
        (have,) = cross(model, [(row[0, :-1].tolist(), best.tokens)], START, END)
        assert have.shape == (2, 6, most + 1, length)
        assert session.seen is not None
        want = session.seen.permute(0, 2, 3, 1, 4).float()  # R, layers, H, steps, S
        assert want.shape == (width, 2, 6, most, length)
        # Exactly one row of the search had written these tokens so far.
        alike = [torch.allclose(have[:, :, :most], one, atol=1e-6) for one in want]
        assert sum(alike) == 1


def test_a_batch_of_attentions_equals_one_by_one_and_layer_by_layer() -> None:
    model = transformer()
    pairs = [([5, 6, 7], [3, 4]), ([8], [9, 5, 6, 4]), ([4, 4], [])]
    together = cross(model, pairs, START, END)
    for n, pair in enumerate(pairs):
        (alone,) = cross(model, [pair], START, END)
        torch.testing.assert_close(together[n], alone)
        for layer in range(2):
            (one,) = cross(model, [pair], START, END, layer)
            torch.testing.assert_close(one[0], alone[layer])
    assert cross(model, [], START, END) == []


# Heads


def test_nothing_is_found_where_no_head_could_be_wrong() -> None:
    model = transformer()
    assert find(model, [], START, END) is None
    assert find(model, [Example([5], [6], [0], [0])], START, END) is None
    assert find(model, [Example([5, 6], [], [0, 1], [])], START, END) is None


def test_every_head_and_shift_is_judged_by_what_leaving_out_costs() -> None:
    model = transformer()
    example = Example([5, 6, 7], [3, 4, 8], [0, 0, 1], [0, 1, 1])
    found = find(model, [example], START, END)
    assert found is not None
    assert found.shares.shape == (2, 6, 2)
    assert found.words == 2

    def logs(source: list[int]) -> Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([[*source, END]]), torch.tensor([[START, 3, 4, 8]]))
        return logits[0].log_softmax(-1)[torch.arange(3), torch.tensor([3, 4, 8])]

    cost = torch.stack([logs([5, 6, 7]) - logs([7]), logs([5, 6, 7]) - logs([5, 6])], 1)
    cost = torch.stack((cost[0], cost[1] + cost[2])).double()  # target words, source words
    (weights,) = cross(model, [(example.source, example.target)], START, END)
    best = cost.max(1).values.sum()
    for layer in range(2):
        for head in range(6):
            for shift in (0, 1):
                linked = links(weights[layer, head, shift:], [0, 0, 1], [0, 1, 1])
                want = sum(cost[target, source] for source, target in linked) / best
                torch.testing.assert_close(
                    found.shares[layer, head, shift], want, rtol=1e-4, atol=0
                )
    place = found.best
    assert found.shares[place.layer, place.head, place.shift] == found.shares.max()
    assert str(Head(1, 2)) == "head 3 of layer 2, before the word is written"
    # Without spaces it is tokens that are left out.
    tokens_of = replace(example, source_words=[0, 0, 0], target_words=[0, 0, 0])
    apart = find(model, [tokens_of], START, END)
    assert apart is not None
    assert apart.words == 3


@pytest.mark.slow
def test_the_head_found_is_the_one_that_aligns(tmp_path: Path) -> None:
    """Sentences said backwards, of which every alignment is known: what leaving out says of a head
    is what it gets right, for each of them."""
    from regard.task.load import load
    from regard.task.translate import Config, build
    from regard.task.translator import Translator
    from tests.task.samples import SHAPE, TRAINING, backwards, lines, sentences, trained

    many = sentences(3000, seed=1)
    config = Config(
        source=(lines(tmp_path / "a", many),),
        target=(lines(tmp_path / "b", [backwards(text) for text in many]),),
        held_out=100,
        vocabulary=300,
        beams=1,
        cache=str(tmp_path / "cache"),
        model=replace(SHAPE, width=64, heads=4, feed_forward=128, position="rotary"),
        training=replace(TRAINING, steps=500, batch=1000, lr=3e-3, warmup=50, evaluate_every=250),
    )
    trained(build(config, tmp_path / "run"), config.training, tmp_path / "run")
    translator = load(tmp_path / "run")
    assert isinstance(translator, Translator)
    texts = sentences(50, seed=9)

    def right(head: Head) -> float:
        translator.head = head
        good = count = 0
        for text, (one, *_) in zip(texts, translator.translations(texts, align=True)):
            size = len(text.split())
            if one.text == backwards(text) and one.alignment is not None:
                good += sum(source == size - 1 - target for source, target in one.alignment)
                count += size
        assert count > 100
        return good / count

    found = translator.find_head([])
    assert found is not None
    assert found.best.shift == 0
    assert right(found.best) > 0.9
    for layer, head, shift in [(0, head, shift) for head in range(4) for shift in (0, 1)]:
        share = float(found.shares[layer, head, shift])
        assert abs(share - right(Head(layer, head, shift))) < 0.1
