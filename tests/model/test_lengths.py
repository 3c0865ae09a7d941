"""Custom sources and encoders that change the number of rows say which lengths they leave."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import (
    AudioSource,
    MultiHeadAttention,
    PackedLengths,
    TextClassifier,
    TextEncoder,
    Transformer,
    TransformerConfig,
    packed,
)
from regard.decode.engine.int8.linear import int8
from regard.decode.engine.pick import open_session, pick
from regard.decode.search.beam import beam
from regard.decode.search.greedy import greedy
from regard.model.classifier import ClassifierConfig
from regard.model.encoder import EncoderConfig
from regard.model.stack import Stack
from tests.model.samples import lively

D, N, FEATURES, LATENTS = 12, 19, 5, 6
SIZES: dict[str, Any] = {"width": D, "heads": 3, "feed_forward": 17, "dropout": 0.0}


class SilentLatents(nn.Module):
    """A fixed number of vectors that attend to the source (Jaegle et al. 2021, Perceiver)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(LATENTS, D))
        self.attention = MultiHeadAttention(D, 3)

    def forward(self, x: Tensor, mask: Any = None, **_: Any) -> Tensor:
        if mask is not None and mask.packing is not None:
            source = mask.packing.query
            mask = packed(PackedLengths([LATENTS] * len(source)), source)
            return self.attention(self.queries.repeat(len(source), 1)[None], x, mask=mask)
        return self.attention(self.queries.expand(len(x), -1, -1), x, mask=mask)


class Latents(SilentLatents):
    def lengths(self, lengths: Tensor) -> Tensor:
        return torch.full_like(lengths, LATENTS)


class Strided(nn.Module):
    """A convolution of kernel and stride 2 over frames."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(2 * FEATURES, D, bias=False)

    def lengths(self, lengths: Tensor) -> Tensor:
        return (lengths + 1) // 2

    def forward(self, frames: Tensor, at: int | Tensor = 0) -> Tensor:
        if isinstance(at, Tensor):
            begins = [*(at[0] == 0).nonzero()[:, 0].tolist(), frames.shape[1]]
            sizes = [end - begin for begin, end in pairwise(begins)]
            return torch.cat([self(piece) for piece in frames.split(sizes, 1)], 1)
        even = nn.functional.pad(frames, (0, 0, 0, frames.shape[1] % 2))
        return self.projection(even.unflatten(1, (-1, 2)).flatten(2))


def with_latents() -> Transformer:
    model = Transformer(TransformerConfig(N, encoder_layers=1, decoder_layers=2, **SIZES))
    model.encoder = Latents()
    return lively(model)


def with_strides() -> Transformer:
    source = AudioSource(features=FEATURES)
    shape = {"encoder_layers": 2, "decoder_layers": 2, "position": "rotary"}
    model = Transformer(TransformerConfig(N, source=source, **shape, **SIZES))
    model.source = Strided()
    return lively(model)


def ids(*sizes: int) -> list[Tensor]:
    return [torch.randint(N, (size,)) for size in sizes]


def frames(*sizes: int) -> list[Tensor]:
    return [torch.randn(size, FEATURES, dtype=torch.float64) for size in sizes]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


KINDS = [
    pytest.param(with_latents, lambda: ids(6, 4, 9), id="latents"),
    pytest.param(with_strides, lambda: frames(7, 4, 9), id="strides"),
]
Make = Callable[[], Transformer]
Sources = Callable[[], list[Tensor]]


@pytest.mark.parametrize(("make", "sources"), KINDS)
def test_alone_is_padded_is_packed(make: Make, sources: Sources) -> None:
    model, rows, targets = make(), sources(), ids(3, 5, 2)
    alone = [model(row[None], target[None])[0] for row, target in zip(rows, targets)]
    source, source_lengths = padded(rows)
    target, counts = padded(targets)
    for lengths in (source_lengths, source_lengths.tolist()):
        together = model(source, target, source_lengths=lengths)
        for have, want, count in zip(together, alone, counts.tolist()):
            torch.testing.assert_close(have[:count], want)
    end_to_end = model(
        torch.cat(rows)[None],
        torch.cat(targets)[None],
        source_lengths=PackedLengths(source_lengths),
        target_lengths=PackedLengths(counts),
    )
    torch.testing.assert_close(end_to_end[0], torch.cat(alone))


@pytest.mark.parametrize(("make", "sources"), KINDS)
def test_search_alone_is_padded_is_packed(make: Make, sources: Sources) -> None:
    model, rows = make(), sources()
    rules: dict[str, Any] = {"end": 2, "max_length": 5}

    def found(source: Tensor, lengths: Any, count: int) -> list[list[tuple[int, ...]]]:
        results: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
        for search in (greedy, beam):
            width = {} if search is greedy else {"width": 3}
            with open_session(model, source, lengths) as session:
                best = search(session, [[1]] * count, **rules, **width)
            for result, hypothesis in zip(results, best):
                first = hypothesis if search is greedy else hypothesis[0]
                result.append(tuple(first.tokens))
        return results

    alone = [found(row[None], None, 1)[0] for row in rows]
    source, lengths = padded(rows)
    assert found(source, lengths, 3) == alone
    assert found(torch.cat(rows)[None], PackedLengths(lengths), 3) == alone


def test_a_classifier_pools_over_the_rows_that_are_left() -> None:
    model = TextClassifier(ClassifierConfig(5, N, layers=1, **SIZES))
    model.encoder = Latents()
    lively(model)
    rows = ids(6, 4, 9)
    alone = torch.cat([model(row[None]) for row in rows])
    source, lengths = padded(rows)
    torch.testing.assert_close(model(source, lengths=lengths), alone)
    torch.testing.assert_close(model(torch.cat(rows)[None], lengths=PackedLengths(lengths)), alone)
    encoder = TextEncoder(EncoderConfig(N, layers=1, **SIZES))
    encoder.encoder = Latents()
    with pytest.raises(ValueError, match="gives a vector for each token"):
        encoder(source, lengths=lengths)


def test_a_part_that_may_change_lengths_must_say_so() -> None:
    model = Transformer(TransformerConfig(N, encoder_layers=1, decoder_layers=1, **SIZES))
    source, lengths = padded(ids(6, 4))
    target = torch.stack(ids(3, 3))
    model.encoder = SilentLatents()
    model(source, target)
    for given in (lengths, [6, 4]):
        with pytest.raises(ValueError, match=r"^SilentLatents may change the number of rows, "):
            model(source, target, source_lengths=given)
    packing = PackedLengths(lengths)
    with pytest.raises(ValueError, match=r"^SilentLatents may change the number of rows, "):
        model.encode(torch.cat([source[0], source[1, :4]])[None], packing)


def test_a_part_with_another_forward_may_keep_lengths() -> None:
    class Noisy(Stack):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            return super().forward(x, **options) + 1

    class Kept(Noisy):
        def lengths(self, lengths: Tensor) -> Tensor:
            return lengths

    model = Transformer(TransformerConfig(N, encoder_layers=1, decoder_layers=1, **SIZES))
    source, lengths = padded(ids(6, 4))
    model.encoder.__class__ = Noisy
    with pytest.raises(ValueError, match=r"^Noisy may change"):
        model.encode(source, lengths)
    model.encoder.__class__ = Kept
    assert model.encode(source, lengths).shape == (2, 6, D)
    assert model.memory_lengths(lengths) is lengths


def test_lengths_that_a_part_names_wrongly_are_refused() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor, *_: Any, **options: Any) -> Tensor:
            return x[:, ::2]

    model = Transformer(TransformerConfig(N, encoder_layers=2, decoder_layers=1, **SIZES))
    source, lengths = padded(ids(6, 3))
    model.encoder.blocks[1] = Halves()
    with pytest.raises(ValueError, match=r"^Stack made 3 rows of 6, "):
        model.encode(source, lengths)
    model.encoder = Latents()
    model.encoder.lengths = lambda lengths: lengths + 3
    with pytest.raises(
        ValueError, match=r"a length \(9\) is longer than the rows of the output of Latents \(6\)"
    ):
        model.encode(source, lengths)


def test_engines_leave_such_models_to_the_eager_one() -> None:
    model = int8(with_latents().float())
    assert pick(model).name == "eager"
    assert "its encoder is a Latents, which may change lengths" in pick(model).reason
    strides = int8(with_strides().float())
    assert "its source is a Strided, which may change lengths" in pick(strides).reason
