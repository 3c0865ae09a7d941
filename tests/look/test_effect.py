"""Changes inside a model do what a model without that part does."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from regard.attention.attend import attend
from regard.attention.mask import Mask
from regard.attention.multihead import MultiHeadAttention
from regard.look.effect import changed, effect_of_heads, effect_of_units, log_p
from regard.look.record import record
from regard.model.transformer import Transformer, TransformerConfig


def small(position: str = "sinusoidal") -> Transformer:
    config = TransformerConfig(
        31,
        width=24,
        heads=4,
        feed_forward=40,
        encoder_layers=2,
        decoder_layers=2,
        position=position,
    )
    return Transformer(config).eval()


def test_a_head_off_is_a_head_whose_output_is_not_mixed_in() -> None:
    model = small()
    source, target = torch.randint(31, (2, 7)), torch.randint(31, (2, 5))
    without = copy.deepcopy(model)
    layer = without.decoder.blocks[1].cross
    layer.output.weight.data[:, 2 * 6 : 3 * 6] = 0  # columns of head 2
    whole = model(source, target)
    with changed(model, off=[("decoder.blocks.1.cross", 2)]):
        torch.testing.assert_close(model(source, target), without(source, target))
    assert torch.equal(model(source, target), whole)


@pytest.mark.parametrize("factor", [0.0, 0.5, 3.0])
def test_beta_times_a_factor(factor: float) -> None:
    layer = MultiHeadAttention(12, 3).eval()
    x = torch.randn(2, 5, 12)
    kept: dict[str, Tensor] = {}
    hook = layer.core.register_forward_hook(
        lambda core, given, out: kept.update(zip("qkvo", (*given, out)))
    )
    layer(x)
    hook.remove()
    natural = 4**-0.5
    beta = torch.tensor([natural, natural * factor, natural])
    expected = attend(kept["q"], kept["k"], kept["v"], beta=beta)
    with changed(layer, beta={("", 1): factor}):
        found = layer(x)
    torch.testing.assert_close(found, layer.output(expected.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(layer(x), layer.output(kept["o"].transpose(1, 2).flatten(2)))


def test_a_hidden_position_is_one_that_is_masked_everywhere() -> None:
    model = small()
    source, target = torch.randint(31, (1, 7)), torch.randint(31, (1, 5))
    with changed(model, hidden=[1, 4]):
        found = model(source, target)
    kept = [0, 2, 3, 5, 6]
    mask = Mask.from_tensor(torch.tensor([n in kept for n in range(7)])[None, None, None])
    memory = model.encoder(model.source(source), mask=mask)[:, kept]  # the others are not seen
    torch.testing.assert_close(found, model.decode(target, memory))
    # What the hidden tokens are makes no difference.
    other = source.clone()
    other[0, [1, 4]] = torch.tensor([30, 29])
    with changed(model, hidden=[1, 4]):
        torch.testing.assert_close(model(other, target), found)
    assert not torch.allclose(model(source, target), found)


def test_effects_of_words_are_differences_of_log_p() -> None:
    model = small()
    source, target = torch.randint(31, (1, 6)), [5, 9, 11]
    units = [[0, 1], [2], [5]]
    found = effect_of_units(model, source, target, units, 1, 2)
    assert found.shape == (3, 4)
    whole = log_p(model, source, target, 1, 2)[0]
    for unit, fall in zip(units, found):
        with changed(model, hidden=unit):
            without = log_p(model, source, target, 1, 2)[0]
        torch.testing.assert_close(fall, whole - without)
    logits = model(source, torch.tensor([[1, *target]]))
    expected = logits.log_softmax(-1)[0, range(4), [*target, 2]]
    torch.testing.assert_close(whole, expected.detach())
    assert effect_of_units(model, source, target, [], 1, 2).shape == (0, 4)


def test_effects_of_heads() -> None:
    model = small("rotary")
    source = torch.randint(31, (1, 6))
    heads = [("encoder.blocks.0.attention", 1), ("decoder.blocks.1.attention", 3)]

    def answer() -> Tensor:
        return log_p(model, source, [4, 8], 1, 2).sum()

    falls = effect_of_heads(model, heads, answer)
    whole = answer()
    for head, fall in zip(heads, falls):
        with changed(model, off=[head]):
            assert float(fall) == pytest.approx(float(whole - answer()), abs=1e-6)
            assert abs(float(fall)) > 1e-5


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("head", "message"),
    [
        (("encoder.blocks.9.attention", 0), "is unknown; there are encoder.blocks.0.attention"),
        (("encoder.blocks.0.attention", 4), "must lie from 0 to 3"),
    ],
)
def test_heads_that_are_not_there(head: tuple[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message), changed(small(), off=[head]):
        pass


@pytest.mark.parametrize("ended", [False, True])
def test_changes_apply_when_checkpointed_blocks_are_recomputed(ended: bool) -> None:
    """In any thread, as a device has one of its own, and after the block has ended."""
    model, other = small().double(), small().double()
    other.load_state_dict(model.state_dict())
    other.encoder.checkpointing = other.decoder.checkpointing = True
    source, target = torch.randint(31, (2, 7)), torch.randint(31, (2, 5))
    change = {"beta": {("encoder.blocks.0.attention", 1): 3.0}, "hidden": [2]}
    with changed(model, **change):
        model(source, target).square().sum().backward()
    with changed(other, **change), record(other) as seen:
        loss = other(source, target).square().sum()
        queries = [asked.query for asked in seen.values()]
        if not ended:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(loss.backward).result()
    if ended:
        loss.backward()
    for one, two in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(one.grad, two.grad)
    assert all(asked.query is query for asked, query in zip(seen.values(), queries))
