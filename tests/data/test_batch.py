"""Batches: every example once, in an order that seed and epoch decide, without padding."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.attention.packed import PackedLengths
from regard.data.batch import (
    Batch,
    Hiding,
    image_batch,
    image_text_batch,
    label_batch,
    language_batch,
    masked_batch,
    plan,
    share,
    text_batch,
    windows,
)
from regard.data.seeding import rng
from regard.model.transformer import Transformer, TransformerConfig

# Plans


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), min_size=1, max_size=97),
    st.integers(1, 101),
    st.integers(0, 5),
    st.integers(1, 7),
)
def test_every_example_once(
    pairs: list[tuple[int, int]], budget: int, epoch: int, bucket: int
) -> None:
    lengths = np.array(pairs, np.int32)
    batches = plan(lengths, budget, 3, epoch, bucket=bucket)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(pairs)))
    for batch in batches:
        assert len(batch) == 1 or lengths[batch].sum() <= budget
    again = plan(lengths, budget, 3, epoch, bucket=bucket)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


def _lengths(n: int = 5003) -> np.ndarray:
    chance = np.random.default_rng(0)
    return np.clip(chance.lognormal(2.7, 0.7, (n, 2)).astype(np.int32), 1, 97)


def test_seed_and_epoch_decide() -> None:
    lengths = _lengths()
    first = plan(lengths, 997, 1, 0)
    for seed, epoch in ((1, 1), (2, 0), (0, 1)):
        other = plan(lengths, 997, seed, epoch)
        assert [batch.tolist() for batch in other[:5]] != [batch.tolist() for batch in first[:5]]


def test_batches_are_full_and_of_like_length() -> None:
    lengths = _lengths()
    total = lengths.sum(1)
    by_chance = plan(lengths, 997, 1, 0, bucket=1)
    sorted_some = plan(lengths, 997, 1, 0, bucket=10)
    for batches in (by_chance, sorted_some):
        assert len(batches) <= 1.06 * total.sum() / 997

    def spread(batches: list[np.ndarray]) -> float:
        return float(np.mean([total[batch].std() for batch in batches]))

    assert spread(sorted_some) < 0.2 * spread(by_chance)
    # Short and long come in any order.
    means = [total[batch].mean() for batch in sorted_some]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_images_come_in_equal_numbers() -> None:
    batches = plan(np.ones(103, np.int64), 10, 0, 0)
    assert sorted(map(len, batches)) == [3, *[10] * 10]


def test_a_long_example_is_alone_or_refused() -> None:
    lengths = np.array([[3, 4], [500, 2], [2, 2]])
    batches = plan(lengths, 11, 0, 0)
    assert sorted(map(len, batches)) == [1, 2]
    assert [1] in [batch.tolist() for batch in batches]
    with pytest.raises(ValueError, match=r"example 1 has more tokens \(502\) than .*\(budget 11\)"):
        plan(lengths, 11, 0, 0, over="refuse")


def test_a_plan_takes_time_by_its_batches_not_by_its_examples() -> None:
    def calls(examples: int) -> int:
        """Of any function, while as many batches are planned for more and more examples."""
        count = 0

        def called(frame: object, event: str, of: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        lengths = np.full((examples, 2), 29, np.int32)
        sys.setprofile(called)
        try:
            batches = plan(lengths, 58 * (examples // 100), 0, 0)
        finally:
            sys.setprofile(None)
        assert len(batches) == 100
        return count

    assert calls(100_000) == pytest.approx(calls(1000), rel=0.1)


@settings(max_examples=40)
@given(st.integers(0, 41), st.integers(1, 5), st.integers(1, 4))
def test_shares_are_the_batch(n: int, world: int, accumulate: int) -> None:
    indices = np.arange(n) * 7
    shares = [share(indices, rank, world, accumulate) for rank in range(world)]
    assert {len(parts) for parts in shares} == {accumulate}
    whole = [i for parts in shares for part in parts for i in part.tolist()]
    assert sorted(whole) == indices.tolist()
    sizes = [len(part) for parts in shares for part in parts]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40)
@given(st.lists(st.integers(0, 29), min_size=1, max_size=11), st.integers(1, 13))
def test_windows_predict_everything_once(lengths: list[int], most: int) -> None:
    documents = [np.arange(10, 10 + n) + 100 * i for i, n in enumerate(lengths)]
    cut = windows(np.array(lengths), most)
    assert cut[:, 2].max() <= most
    batch = language_batch(documents.__getitem__, cut, 1, 2)
    labels, inputs = [], []
    for document in documents:
        labels += [*document.tolist(), 2]
        inputs += [1, *document.tolist()]
    assert batch.labels.tolist() == [labels]
    assert batch.inputs.tolist() == [inputs]
    assert batch.lengths.lengths.tolist() == cut[:, 2].tolist()
    assert batch.tokens == len(labels)
    assert len(batch) == len(cut)


def test_of_a_long_document_no_more_than_a_window_is_read() -> None:
    class Document:
        def __getitem__(self, part: slice) -> np.ndarray:
            assert part.stop - part.start <= 8
            return np.arange(10, 510)[part]

    cut = windows(np.array([500]), 7)
    batch = language_batch(lambda i: Document(), cut, 1, 2)
    assert batch.inputs.tolist() == [[1, *range(10, 510)]]
    hidden = masked_batch(
        lambda i: Document(), cut, 2, Hiding(0.15, 3, np.arange(4, 9)), map(rng, range(len(cut)))
    )
    assert (hidden.labels == hidden.hidden + 10).all()


@pytest.mark.usefixtures("unchecked")
def test_errors() -> None:
    lengths, none = np.array([3]), torch.zeros(2, 1, 3, 5, dtype=torch.uint8)
    for match, make in (
        (r"budget \(0\) must be 1", lambda: plan(lengths, 0, 0, 0)),
        (r"bucket \(0\) must be 1", lambda: plan(lengths, 5, 0, 0, bucket=0)),
        (r"over \('x'\) must be alone or refuse", lambda: plan(lengths, 5, 0, 0, over="x")),
        ("no examples", lambda: plan(lengths[:0], 5, 0, 0)),
        (r"seed and counters \(-1, 0\)", lambda: plan(lengths, 5, -1, 0)),
        (r"rank \(2\) must be at least 0 and below world \(2\)", lambda: share(lengths, 2, 2)),
        (r"accumulate \(0\)", lambda: share(lengths, 0, 1, 0)),
        (r"most \(0\)", lambda: windows(lengths, 0)),
        (r"images \(2\) and texts \(1\)", lambda: image_text_batch(none, [[3]], 1, 2)),
        (r"images \(2\) and labels \(1\)", lambda: image_batch(none, [3])),
        (r"texts \(1\) and labels \(2\)", lambda: label_batch([[3]], [1, 2])),
    ):
        with pytest.raises(ValueError, match=match) as error:
            make()
        assert "\n" not in str(error.value)


# Tensors

PAIRS = [([5, 6, 7], [8, 9]), ([5], [4, 3, 8, 6, 7]), ([9, 9], [])]


def test_text() -> None:
    batch = text_batch(PAIRS, 1, 2)
    assert batch.source.tolist() == [[5, 6, 7, 5, 9, 9]]
    assert batch.target.tolist() == [[1, 8, 9, 1, 4, 3, 8, 6, 7, 1]]
    assert batch.labels.tolist() == [[8, 9, 2, 4, 3, 8, 6, 7, 2, 2]]
    assert batch.source_lengths is not None
    assert batch.source_lengths.lengths.tolist() == [3, 1, 2]
    assert batch.target_lengths.lengths.tolist() == [3, 6, 1]
    assert (batch.tokens, len(batch)) == (10, 3)
    closed = text_batch(PAIRS, 1, 2, source_end=2)
    assert closed.source.tolist() == [[5, 6, 7, 2, 5, 2, 9, 9, 2]]
    narrow = [(np.array(a, np.uint16), np.array(b, np.uint16)) for a, b in PAIRS]
    assert torch.equal(text_batch(narrow, 1, 2).labels, batch.labels)


def test_a_model_takes_them() -> None:
    config = TransformerConfig(
        11, width=6, heads=2, feed_forward=7, encoder_layers=1, decoder_layers=1
    )
    model = Transformer(config).eval()
    batch = text_batch(PAIRS, 1, 2)

    def logits(batch: Batch) -> torch.Tensor:
        return model(
            batch.source,
            batch.target,
            source_lengths=batch.source_lengths,
            target_lengths=batch.target_lengths,
        )

    whole = logits(batch)
    assert whole.shape == (1, 10, 11)
    alone = [logits(text_batch([pair], 1, 2)) for pair in PAIRS]
    torch.testing.assert_close(torch.cat(alone, 1), whole)
    # What a process has where examples are fewer than processes.
    assert logits(text_batch([], 1, 2)).shape == (1, 0, 11)


def test_images_and_texts() -> None:
    images = torch.zeros(2, 3, 5, 7, dtype=torch.uint8)
    batch = image_text_batch(images, [[5, 6], [7]], 1, 2)
    assert batch.source is images
    assert batch.source_lengths is None
    assert batch.labels.tolist() == [[5, 6, 2, 7, 2]]
    labelled = image_batch(images, np.array([4, 3], np.uint8))
    assert labelled.labels.tolist() == [4, 3]
    assert labelled.labels.dtype == torch.int64
    assert (labelled.tokens, len(labelled)) == (2, 2)
    texts = label_batch([[5, 6], [7]], [1, 0])
    assert texts.inputs.tolist() == [[5, 6, 7]]
    assert texts.lengths is not None
    assert texts.lengths.lengths.tolist() == [2, 1]


def test_to_a_device() -> None:
    batch = text_batch(PAIRS, 1, 2)
    moved = batch.to("meta")
    assert moved.source.is_meta
    assert moved.labels.is_meta
    assert moved.target_lengths.offsets.is_meta
    assert batch.tokens == 10
    assert torch.equal(batch.pin().labels, batch.labels)


@pytest.mark.gpu
def test_to_a_device_from_pinned_memory() -> None:
    batch = text_batch(PAIRS, 1, 2).pin()
    assert batch.source.is_pinned()
    moved = batch.to("cuda")
    assert moved.source.device.type == "cuda"
    assert torch.equal(moved.labels.cpu(), batch.labels)
    assert isinstance(moved.source_lengths, PackedLengths)
    assert moved.source_lengths.offsets.device.type == "cuda"
