"""Recorded weights are those that the model used."""

from dataclasses import replace

import pytest
import torch

from regard.attention.multihead import MultiHeadAttention
from regard.attention.score import Additive
from regard.look.record import record
from regard.model.transformer import Transformer, TransformerConfig


def small(**changes: object) -> Transformer:
    torch.manual_seed(0)
    config = TransformerConfig(
        31, width=24, heads=4, feed_forward=40, encoder_layers=2, decoder_layers=2
    )
    return Transformer(replace(config, **changes)).eval()


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "linear-bias"])
def test_every_attention_is_seen(position: str) -> None:
    model = small(position=position, key_heads=2)
    source, target = torch.randint(31, (3, 11)), torch.randint(31, (3, 7))
    with record(model) as seen:
        model(source, target, source_lengths=[11, 5, 2])
    assert list(seen) == [
        *(f"encoder.blocks.{n}.attention" for n in range(2)),
        *(f"decoder.blocks.{n}.{part}" for n in range(2) for part in ("attention", "cross")),
    ]
    cross = seen["decoder.blocks.1.cross"].weights()
    assert cross.shape == (3, 4, 7, 11)
    torch.testing.assert_close(cross.sum(-1), torch.ones(3, 4, 7))
    assert cross[1, :, :, 5:].eq(0).all()
    own = seen["decoder.blocks.0.attention"].weights()
    assert own.triu(1).eq(0).all()


def test_the_weights_give_the_attentions_output() -> None:
    model = small()
    kept = {}
    core = model.decoder.blocks[0].cross.core
    handle = core.register_forward_hook(lambda module, given, out: kept.update(v=given[2], out=out))
    with record(model, lambda name: name.endswith("cross")) as seen:
        model(torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    handle.remove()
    assert set(seen) == {"decoder.blocks.0.cross", "decoder.blocks.1.cross"}
    torch.testing.assert_close(seen["decoder.blocks.0.cross"].weights() @ kept["v"], kept["out"])


def test_other_scores_are_recorded_as_they_are_used() -> None:
    layer = MultiHeadAttention(12, 3, score=Additive(4, 4, 5, heads=3)).eval()
    x = torch.randn(2, 5, 12)
    kept = {}
    layer.core.register_forward_hook(lambda module, given, out: kept.update(v=given[2], out=out))
    with record(layer) as seen:
        layer(x)
    torch.testing.assert_close(seen[""].weights() @ kept["v"], kept["out"])


def test_nothing_is_left_behind() -> None:
    model = small()
    with pytest.raises(RuntimeError, match="on purpose"), record(model):
        raise RuntimeError("on purpose")
    assert not any(module._forward_pre_hooks for module in model.modules())
    with record(model) as seen:
        pass
    with pytest.raises(KeyError, match=r"'encoder.x' was not recorded; there are none"):
        seen["encoder.x"]


def test_statistics_of_what_was_seen() -> None:
    model = small()
    with record(model) as seen:
        model(torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    assert "  decoder.blocks.1.cross: 2 × 4 × 3 × 5" in repr(seen)
    asked = seen["encoder.blocks.0.attention"]
    torch.testing.assert_close(asked.statistics().received, asked.weights().sum(-2))


def test_statistics_show_themselves_in_a_notebook() -> None:
    model = small()
    with record(model) as seen:
        model(torch.randint(31, (2, 5)), torch.randint(31, (2, 3)))
    found = seen["encoder.blocks.0.attention"].statistics()
    shown = found._repr_html_()
    assert "2 × 4 × 5" in shown
    assert f"{float(found.entropy.mean()):.3f} nats" in shown
    assert f"key {int(found.received.sum((0, 1)).argmax())}" in shown
