"""No padding, the same numbers: packed batches equal padded ones, gradients too."""

import pytest
import torch
from torch import Tensor, nn

from regard import PackedLengths, TextSource
from tests.model.samples import (
    OWN,
    POSITIONS,
    SOURCES,
    M,
    close,
    frames,
    images,
    language,
    pack,
    tokens,
    transformer,
)

B, L, S = 4, 7, 11
TARGETS, READ = torch.tensor([7, 0, 3, 5]), torch.tensor([2, 4, 0, 11])
"""Lengths of targets and sources: an empty target, and a target whose source is empty."""

every_position = pytest.mark.parametrize("position", [*POSITIONS, *OWN])


def same(model: nn.Module, have: Tensor, want: Tensor, tolerance: float = 1e-11) -> None:
    """Equal outputs, and equal gradients of every parameter."""
    close(have, want, tolerance)
    seeds, own = torch.randn_like(want), list(model.parameters())
    one, two = (
        torch.autograd.grad(out, own, seeds, allow_unused=True, materialize_grads=True)
        for out in (have, want)
    )
    for mine, other in zip(one, two):
        close(mine, other, tolerance)


@pytest.mark.usefixtures("unchecked")
@every_position
def test_text(position: str) -> None:
    model = transformer(position, norm="pre", key_heads=3)
    source, target = tokens(B, S), tokens(B, L)
    want = model(source, target, source_lengths=READ, target_lengths=TARGETS)
    have = model(
        pack(source, READ),
        pack(target, TARGETS),
        source_lengths=PackedLengths(READ),
        target_lengths=PackedLengths(TARGETS),
    )
    same(model, have, pack(want, TARGETS))


@every_position
def test_a_language_model(position: str) -> None:
    model, ids = language(position), tokens(B, L)
    have = model(pack(ids, TARGETS), lengths=PackedLengths(TARGETS))
    same(model, have, pack(model(ids, lengths=TARGETS), TARGETS))


def test_two_vocabularies_after_each_sum() -> None:
    source = TextSource(vocabulary=M)
    model = transformer(norm="post", final_norm=True, source=source, share="target")
    ids, target = tokens(B, S, most=M), tokens(B, L)
    want = model(ids, target, source_lengths=READ.tolist(), target_lengths=TARGETS.tolist())
    have = model(
        pack(ids, READ),
        pack(target, TARGETS),
        source_lengths=PackedLengths(READ),
        target_lengths=PackedLengths(TARGETS),
    )
    same(model, have, pack(want, TARGETS))


def test_sound() -> None:
    model, target, sound = transformer(source=SOURCES["audio"]), tokens(B, L), frames(B, S)
    want = model(sound, target, source_lengths=READ, target_lengths=TARGETS)
    have = model(
        pack(sound, READ),
        pack(target, TARGETS),
        source_lengths=PackedLengths(READ),
        target_lengths=PackedLengths(TARGETS),
    )
    same(model, have, pack(want, TARGETS))


def test_captions_of_images() -> None:
    """Images are all of one size: only their captions are packed."""
    model, target, pictures = transformer(source=SOURCES["image"]), tokens(B, L), images(B)
    want = model(pictures, target, target_lengths=TARGETS)
    have = model(pictures, pack(target, TARGETS), target_lengths=PackedLengths(TARGETS))
    same(model, have, pack(want, TARGETS))


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "linear-bias"])
def test_filling_is_never_seen(position: str) -> None:
    """Not by its values, nor by how much of it there is; each sentence is as if alone."""
    model = transformer(position)
    source, target = tokens(B, S), tokens(B, L)
    want = model(source, target, source_lengths=READ, target_lengths=TARGETS)
    for b in range(B):
        source[b, READ[b] :], target[b, TARGETS[b] :] = 1, 2
    have = model(source, target, source_lengths=READ, target_lengths=TARGETS)
    close(pack(have, TARGETS), pack(want, TARGETS))
    for b in (0, 3):
        alone = model(source[b : b + 1, : READ[b]], target[b : b + 1, : TARGETS[b]])
        close(alone[0], want[b, : TARGETS[b]])


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [1], [0, 5, 0]], ids=str)
def test_hardly_anything(lengths: list[int]) -> None:
    model, total = language(), sum(lengths)
    ids = tokens(1, total)
    have = model(ids, lengths=PackedLengths(lengths))
    assert have.shape == (1, total, 19)
    if total:
        close(have, model(ids))
    seq, n = transformer(), len(lengths)
    have = seq(
        tokens(1, 2 * n),
        ids,
        source_lengths=PackedLengths([2] * n),
        target_lengths=PackedLengths(lengths),
    )
    assert have.shape == (1, total, 19)


def test_an_empty_source_gives_what_no_source_would() -> None:
    """Cross-attention over nothing adds its output's bias alone: finite, and so are gradients."""
    model = transformer()
    want = model(tokens(2, 3), tokens(2, L), source_lengths=torch.tensor([0, 3]))
    assert want.isfinite().all()
    gradients = torch.autograd.grad(want.sum(), list(model.parameters()))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision(dtype: torch.dtype) -> None:
    model = transformer(dtype=dtype)
    source, target = tokens(B, S), tokens(B, L)
    want = model(source, target, source_lengths=READ, target_lengths=TARGETS)
    have = model(
        pack(source, READ),
        pack(target, TARGETS),
        source_lengths=PackedLengths(READ),
        target_lengths=PackedLengths(TARGETS),
    )
    assert have.dtype == dtype
    close(have, pack(want, TARGETS), 1e-5 if dtype == torch.float32 else 0.15)
