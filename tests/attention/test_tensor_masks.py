"""Tensors in place of masks, and `scale` in place of `beta`: the arguments that torch takes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard import (
    DotScore,
    Mask,
    MultiHeadAttention,
    attend,
    attention_statistics,
    attention_weights,
    explain_attention,
    padding,
)
from regard.model.block import Block, FeedForward, PreNorm
from regard.model.stack import Stack

REAL = torch.tensor([[True, True, False, False], [True, True, True, False], [True] * 4])


@pytest.mark.parametrize("mask", [REAL, REAL.long(), REAL.to(torch.uint8), REAL.tolist()])
def test_padding_takes_a_mask_of_real_tokens(mask: Tensor) -> None:
    assert str(padding(mask)) == "padding([2, 3, 4])"
    assert torch.equal(padding(mask).tensor(3, 4), padding([2, 3, 4]).tensor(3, 4))


def test_padding_on_a_device_takes_any_mask_without_reading_it() -> None:
    mask = padding(REAL.long().to("meta"))
    assert str(mask) == "from_tensor(3x1x1x4)"
    assert mask.tensors[0].device.type == "meta"


def test_padding_while_compiling_is_exact_for_any_pattern(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    flipped = REAL.flip(1)
    assert torch.equal(
        padding(flipped.long()).tensor(2, 4), flipped[:, None, None].expand(3, 1, 2, 4)
    )


def test_a_boolean_tensor_is_a_mask() -> None:
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 13)
    allowed = torch.rand(2, 1, 5, 11) < 0.6
    mask = Mask.from_tensor(allowed)
    assert torch.equal(attend(q, k, v, allowed), attend(q, k, v, mask))
    torch.testing.assert_close(
        attend(q, k, v, allowed[0, 0]),
        F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[0, 0]),
    )
    assert torch.equal(attention_weights(q, k, allowed), attention_weights(q, k, mask))
    assert explain_attention(q, k, v, allowed) == explain_attention(q, k, v, mask)
    for theirs, ours in zip(attention_statistics(q, k, allowed), attention_statistics(q, k, mask)):
        assert torch.equal(theirs, ours)
    score = DotScore()
    assert torch.equal(score.attend(q, k, v, mask=allowed), score.attend(q, k, v, mask=mask))


def test_a_boolean_tensor_is_a_mask_in_modules() -> None:
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    allowed, across = torch.rand(5, 5) < 0.7, torch.rand(2, 5, 7) < 0.7
    block = Block(
        MultiHeadAttention(12, 3),
        FeedForward(12, 17),
        lambda: PreNorm(12),
        cross=MultiHeadAttention(12, 3),
    )
    masks = {"mask": allowed, "memory_mask": across}
    for module in (block, Stack([block])):
        expected = module(
            x, memory, **{name: Mask.from_tensor(tensor) for name, tensor in masks.items()}
        )
        assert torch.equal(module(x, memory, **masks), expected)


def test_scale_is_another_name_of_beta() -> None:
    q, k, v = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 13)
    assert torch.equal(attend(q, k, v, scale=0.7), attend(q, k, v, beta=0.7))
    assert torch.equal(attention_weights(q, k, scale=2), attention_weights(q, k, beta=2))
    entropy = attention_statistics(q, k, scale=2).entropy
    assert torch.equal(entropy, attention_statistics(q, k, beta=2).entropy)
    assert explain_attention(q, k, v, scale=2) == explain_attention(q, k, v, beta=2)
