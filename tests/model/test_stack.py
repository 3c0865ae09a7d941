"""A stack: block after block, a norm at the end, and checkpointing that changes nothing."""

import pytest
import torch
from torch import Tensor, nn

from regard import MultiHeadAttention, causal
from regard.model.block import Block, FeedForward, PreNorm
from regard.model.stack import Stack, StackCache
from tests.model.samples import close, language, lively, tokens, transformer, vision

B, L, S, D = 3, 5, 7, 12


def stack(blocks: int = 3, norm: bool = True, cross: bool = False) -> Stack:
    def block() -> Block:
        other = MultiHeadAttention(D, 2) if cross else None
        return Block(MultiHeadAttention(D, 3), FeedForward(D, 17), lambda: PreNorm(D), other)

    return lively(Stack([block() for _ in range(blocks)], nn.LayerNorm(D) if norm else None))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_one_block_after_the_other() -> None:
    model, x, memory = stack(cross=True), normal(B, L, D), normal(B, S, D)
    y = x
    for block in model.blocks:
        y = block(y, memory, mask=causal())
    close(model(x, memory, mask=causal()), model.norm(y))
    model.norm = None
    close(model(x, memory, mask=causal()), y)


def test_no_block_at_all() -> None:
    x = normal(B, L, D)
    assert torch.equal(Stack([])(x), x)
    assert StackCache(0).length == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_first_rows_alone(rows: int) -> None:
    model, x = stack(), normal(B, L, D)
    close(model(x, rows=rows), model(x)[:, :rows])


def gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(out, model.parameters(), torch.randn_like(out)))


MODELS = {
    "transformer": (lambda: transformer(dropout=0.1), lambda: (tokens(B, S), tokens(B, L))),
    "language": (lambda: language(dropout=0.1), lambda: (tokens(B, L),)),
    "vision": (lambda: vision(dropout=0.1), lambda: (torch.randn(B, 3, 6, 10).double(),)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_checkpointing_gives_the_same_gradients(name: str, training: bool) -> None:
    """Dropout is drawn alike the second time."""
    make, inputs = MODELS[name]
    model, given = make().train(training), inputs()
    results = []
    for checkpointing in (False, True):
        for module in model.modules():
            if isinstance(module, Stack):
                module.checkpointing = checkpointing
        torch.manual_seed(0)
        out = model(*given)
        results.append([out, *gradients(model, out)])
    for one, two in zip(*results):
        close(one, two)


def test_checkpointing_keeps_each_blocks_input_alone() -> None:
    model, x = stack(blocks=4), normal(B, 31, D).requires_grad_()

    def kept(checkpointing: bool) -> int:
        model.checkpointing, saved = checkpointing, []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (saved.append(t.numel()), t)[1], lambda t: t
        ):
            model(x, mask=causal())
        return sum(saved)

    assert kept(True) < 0.4 * kept(False)
    with torch.no_grad():  # nothing to keep, nothing to compute again
        model(x)


def test_a_cache_has_a_part_for_each_block() -> None:
    cache = StackCache(3, 11)
    assert cache.length == 0
    assert len(cache.blocks) == 3
    assert {block.own.capacity for block in cache.blocks} == {11}
    model = stack(cross=True)
    model(normal(B, 2, D), normal(B, S, D), mask=causal(), cache=cache)
    assert int(cache.length) == 2
    cache.select([1])
    assert all(
        part.held is not None and len(part.held[0]) == 1 for block in cache.blocks for part in block
    )
