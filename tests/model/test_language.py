"""A decoder-only language model from the same blocks."""

import copy
from dataclasses import replace

import pytest
import torch

from regard import LanguageConfig, LanguageModel, RotaryEmbedding, causal
from regard.model.block import GatedFeedForward, PreNorm
from tests.model.samples import OWN, POSITIONS, N, close, language, parameters, tokens

B, L = 3, 7


def test_it_is_one_stack_under_a_causal_mask() -> None:
    model, ids = language(), tokens(B, L)
    x = model.tokens.table(ids)
    for block in model.decoder.blocks:
        x = block(x, mask=causal())
    x = model.decoder.norm(x)
    close(model.states(ids), x)
    close(model(ids), x @ model.tokens.table.weight.T)


def test_the_defaults_are_todays() -> None:
    block = LanguageModel.tiny(N).decoder.blocks[0]
    assert isinstance(block.feed_forward, GatedFeedForward)
    assert isinstance(block.add_attention, PreNorm)
    assert isinstance(block.attention.position, RotaryEmbedding)
    assert block.cross is None


@pytest.mark.parametrize("position", [*POSITIONS, *OWN])
def test_no_token_sees_a_later_one(position: str) -> None:
    model, ids = language(position), tokens(B, L)
    before = model(ids)
    ids[:, 4] = (ids[:, 4] + 1) % N
    after = model(ids)
    assert torch.equal(before[:, :4], after[:, :4])
    assert ((before[:, 4:] - after[:, 4:]).abs() > 1e-6).any(-1).all()


def test_sharing_the_table() -> None:
    shared, own = language(), language(share=False)
    assert shared.output.weight is shared.tokens.table.weight
    assert parameters(own) == parameters(shared) + N * 12
    for moved in (copy.deepcopy(shared), shared.to(torch.bfloat16), shared.to("meta")):
        assert moved.output.weight is moved.tokens.table.weight


def test_state_dict_and_the_meta_device() -> None:
    model, ids = language(dtype=torch.float32), tokens(B, L)
    with torch.device("meta"):
        twin = LanguageModel(model.config)
    assert all(p.is_meta for p in twin.parameters())
    twin.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(ids), model(ids))
    with torch.device("meta"):
        assert twin.to("meta")(ids.to("meta")).shape == (B, L, N)


def test_dropout() -> None:
    config = replace(LanguageConfig.tiny(N), dropout=0.1)
    ids, model = tokens(B, L), LanguageModel(config)
    torch.manual_seed(1)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))
    still = language()
    assert torch.equal(still.train()(ids), still.eval()(ids))
