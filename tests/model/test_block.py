"""A block: its residual lines, its norms, its feed-forward networks, and dropout's place."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import MultiHeadAttention, causal, padding, prefix, window
from regard.attention import fusing
from regard.model.block import Block, FeedForward, GatedFeedForward, PostNorm, PreNorm
from tests.model.samples import close, lively

B, L, S, D, E = 3, 5, 7, 12, 10


def block(residual: type[nn.Module], cross: bool = False, dropout: float = 0.0) -> Block:
    return lively(
        Block(
            MultiHeadAttention(D, 3),
            FeedForward(D, 17),
            lambda: residual(D, dropout),
            MultiHeadAttention(D, 2, source_width=E) if cross else None,
        )
    )


def test_post_norm_is_the_papers_line() -> None:
    layer, x, memory = block(PostNorm, cross=True), normal(B, L, D), normal(B, S, E)
    mask, memory_mask = causal(), padding([7, 2, 5])
    norms = [layer.add_attention.norm, layer.add_cross.norm, layer.add_feed_forward.norm]
    y = norms[0](x + layer.attention(x, mask=mask))
    y = norms[1](y + layer.cross(y, memory, mask=memory_mask))
    y = norms[2](y + layer.feed_forward(y))
    close(layer(x, memory, mask=mask, memory_mask=memory_mask), y)


def test_pre_norm_keeps_a_straight_path() -> None:
    layer, x, memory = block(PreNorm, cross=True), normal(B, L, D), normal(B, S, E)
    norms = [layer.add_attention.norm, layer.add_cross.norm, layer.add_feed_forward.norm]
    y = x + layer.attention(norms[0](x))
    y = y + layer.cross(norms[1](y), memory)
    y = y + layer.feed_forward(norms[2](y))
    close(layer(x, memory), y)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("residual", [PostNorm, PreNorm])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_first_rows_alone(residual: type[nn.Module], rows: int) -> None:
    layer, x = block(residual), normal(B, L, D)
    masks = [causal(), window(1), window(2, 0) & padding([5, 2, 3]), causal() | prefix(2)]
    for mask in [*masks, ~window(1)]:
        close(layer(x, mask=mask, rows=rows), layer(x, mask=mask)[:, :rows])
    have, want = layer(x, rows=rows), layer(x)[:, :rows]
    close(have, want)
    seeds = torch.randn_like(want)
    for one, two in zip(*(torch.autograd.grad(y, layer.parameters(), seeds) for y in (have, want))):
        close(one, two)


@pytest.mark.parametrize(
    ("activation", "bend"), [(nn.ReLU(), F.relu), (nn.GELU(), F.gelu), (nn.SiLU(), F.silu)]
)
def test_feed_forward(activation: nn.Module, bend: type) -> None:
    layer, x = FeedForward(D, 17, activation).double(), normal(B, L, D)
    W1, b1, W2, b2 = (p for m in (layer.expand, layer.reduce) for p in (m.weight, m.bias))
    close(layer(x), bend(x @ W1.T + b1) @ W2.T + b2)


def test_the_batchs_size_does_not_choose_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision on a GPU, where the matrix product computes an approximate GELU."""
    rows: list[int] = []
    product = torch._addmm_activation

    def watched(*args: Tensor, **options: bool) -> Tensor:
        rows.append(len(args[1]))
        return product(*args, **options)

    monkeypatch.setattr(torch, "_addmm_activation", watched)
    monkeypatch.setattr(fusing, "_available", lambda device: True)
    monkeypatch.setattr(fusing, "LARGE", 2 * D)
    layer, x = FeedForward(D, 17, nn.GELU()).bfloat16(), torch.randn(B, L, D).bfloat16()
    with torch.no_grad():
        layer(x[:1, :1]), layer(x)
        assert layer(x[:0]).shape == (0, L, D)
    assert rows == [1, B * L, 0]


def test_gated_feed_forward() -> None:
    layer, x = GatedFeedForward(D, 17).double(), normal(B, L, D)
    gate = x @ layer.gate.weight.T
    want = (gate * gate.sigmoid() * (x @ layer.expand.weight.T)) @ layer.reduce.weight.T
    close(layer(x), want)
    assert all(m.bias is None for m in (layer.gate, layer.expand, layer.reduce))


@pytest.mark.parametrize("make", [FeedForward, GatedFeedForward])
def test_dropout_inside_a_feed_forward_network(make: type[nn.Module]) -> None:
    layer, x = make(D, 17, dropout=0.5), torch.randn(B, L, D)
    seen: list[Tensor] = []
    layer.reduce.register_forward_hook(lambda module, given, result: seen.append(given[0]))
    layer(x), layer.eval()(x)
    kept, whole = seen
    assert ((kept == 0) | torch.isclose(kept, 2 * whole)).all()
    assert (kept[whole != 0] == 0).any()


@pytest.mark.parametrize("residual", [PostNorm, PreNorm])
def test_dropout_falls_on_a_sublayers_output_before_the_sum(residual: type[nn.Module]) -> None:
    layer, x = residual(D, 0.5), torch.randn(B, L, D)
    layer.norm = nn.Identity()
    kept = layer(x, torch.ones_like) - x
    assert set(kept.round(decimals=4).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(layer.eval()(x, torch.ones_like), x + 1)


def test_dropout_is_drawn_again_for_every_sublayer() -> None:
    torch.manual_seed(1)
    layer, x = block(PreNorm, cross=True, dropout=0.5).train(), normal(B, L, D)
    memory = normal(B, S, E)
    assert not torch.equal(layer(x, memory), layer(x, memory))
    assert torch.equal(layer.eval()(x, memory), layer(x, memory))
    assert sum(isinstance(m, nn.Dropout) and m.p > 0 for m in layer.modules()) == 3
