"""What the course documents say about models, shown or put right by the product's own parts.

Each test is named by its item of the course's list. Numbers are measured in float64.
"""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.utils.flop_counter import FlopCounterMode

from regard import (
    Concatenated,
    MultiHeadAttention,
    SinusoidalPositions,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
    attention_weights,
    causal,
)
from regard.attention.attend import formula
from regard.model.baseline import Convolution, Dense, Recurrent
from regard.model.block import Block, FeedForward, PostNorm, PreNorm
from regard.model.embedding import Patches, Tokens, flat_patches
from regard.model.stack import Stack
from tests.model.samples import (
    SOURCES,
    D,
    N,
    close,
    frames,
    images,
    lively,
    parameters,
    transformer,
    vision,
)

L, S, H = 7, 11, 3
SENTENCE, SOURCE = torch.arange(L)[None], torch.arange(S)[None] + 5


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention(**options: object) -> MultiHeadAttention:
    return lively(MultiHeadAttention(D, H, **options))


def encoder(blocks: int = 2) -> Stack:
    """Without positions."""
    return lively(
        Stack(
            [
                Block(MultiHeadAttention(D, H), FeedForward(D, 17), partial(PostNorm, D))
                for _ in range(blocks)
            ]
        )
    )


def reach(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Which row of the result depends on which row of x (1, L, D)."""
    return jacobian(function, x).abs().sum((0, 2, 3, 5)) > 0


def cost(function: Callable[[], object]) -> int:
    """Multiplications, as torch counts them: half of its floating-point operations."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() // 2


def published(model: type[nn.Module], size: str, *given: object, **options: object) -> nn.Module:
    with torch.device("meta"):
        return getattr(model, size)(*given, **options)


# --- Slides: self-attention and Transformers


def test_item_10_as_many_numbers_out_as_in() -> None:
    for length in (L, S):
        x = normal(1, length, D)
        for layer in (attention(), encoder(), lively(Dense(D, 13))):
            assert layer(x).shape == x.shape


def test_item_11_a_dense_layer_over_everything() -> None:
    """N²D² parameters (and N·D biases), and as many multiplications for each sequence."""
    for n, d in ((5, 3), (10, 3), (5, 6)):
        layer = Dense(d, n)
        assert parameters(layer) == (n * d) ** 2 + n * d
        assert cost(lambda layer=layer, n=n, d=d: layer(torch.zeros(1, n, d))) == (n * d) ** 2


def test_item_12_attentions_matrices_are_shared_by_all_tokens() -> None:
    """4 D² parameters, W_O included, and their biases, for a sequence of any length."""
    for d in (12, 24):
        assert parameters(MultiHeadAttention(d, H)) == 4 * d * d + 4 * d
    layer, x = attention(), normal(1, L, D)
    close(layer.query(x)[:, 3], layer.query(x[:, 3]))


def test_item_13_dot_products_and_projections() -> None:
    """N²D for the scores, as much for the values, and N·D² for each of four projections."""
    for n, d in ((7, 12), (14, 12), (7, 24)):
        q = torch.zeros(1, 1, n, d)
        assert cost(lambda q=q: formula(q, q, q)) == 2 * n * n * d
        layer, x = MultiHeadAttention(d, H), torch.zeros(1, n, d)
        projections = (layer.query, layer.key, layer.value, layer.output)
        assert cost(lambda ps=projections, x=x: [p(x) for p in ps]) == 4 * n * d * d


def test_item_14_the_layer_after_it() -> None:
    for n, d in ((7, 12), (14, 12), (7, 24)):
        layer = nn.Linear(d, d, bias=False)
        assert parameters(layer) == d * d
        assert cost(lambda layer=layer, n=n, d=d: layer(torch.zeros(n, d))) == n * d * d


def test_item_15_equivariant_and_not_invariant() -> None:
    model, x, order = encoder(), normal(1, L, D), torch.randperm(L)
    y, shuffled = model(x), model(x[:, order])
    assert (shuffled - y[:, order]).norm() < 1e-13
    assert (shuffled - y).norm() > 1
    # One query's output is invariant under a shuffling of the pairs of keys and values.
    layer, query, source = attention(), normal(1, 1, D), normal(1, S, D)
    close(layer(query, source), layer(query, source[:, torch.randperm(S)]), 1e-14)
    # A causal mask gives the order away.
    y, shuffled = (model(rows, mask=causal()) for rows in (x, x[:, order]))
    assert (shuffled - y[:, order]).norm() > 1


def test_item_16_order_matters() -> None:
    """Two sentences of the same words: told apart by a model with positions alone."""
    words = {word: n for n, word in enumerate(["CSK", "plays", "better", ",", "not", "MI"])}
    one, other = (
        torch.tensor([[words[w] for w in sentence.replace(",", " ,").split()]])
        for sentence in ("CSK plays better, not MI", "MI plays better, not CSK")
    )
    for position in ("none", "sinusoidal", "rotary", "linear-bias", "learned", "concatenated"):
        model = transformer(position)
        means = [model.encode(ids).mean(1) for ids in (one, other)]
        assert torch.allclose(*means) == (position == "none")


def test_item_17_concatenated_positions_cost_more() -> None:
    """P more columns: every matrix that reads them is wider, and so is what it costs."""
    P, x = 6, normal(1, L, D)
    placed = Concatenated(SinusoidalPositions(P))(x)
    assert placed.shape == (1, L, D + P)
    added, beside = (MultiHeadAttention(d, H).double() for d in (D, D + P))
    assert parameters(beside) - parameters(added) == 4 * ((D + P) ** 2 - D**2) + 4 * P
    costs = [cost(lambda m=m, y=y: m(y)) for m, y in ((added, x), (beside, placed))]
    assert costs[1] > costs[0]


def test_item_18_added_positions() -> None:
    layer = lively(Tokens(N, D, position=SinusoidalPositions(D)))
    x = math.sqrt(D) * layer.table(SENTENCE)
    close(layer(SENTENCE), x + SinusoidalPositions(D).encoding(torch.arange(L), torch.float64))


@pytest.mark.parametrize(("width", "cosine"), [(3, 0.50), (64, 0.10), (512, 0.035)])
def test_item_19_random_directions_are_nearly_orthogonal_in_many_dimensions(
    width: int, cosine: float
) -> None:
    """E|cos| = Γ(D/2) / (√π Γ((D+1)/2)), which is about √(2/(πD))."""
    exact = math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)
    assert round(exact, 3 if width == 512 else 2) == cosine
    measured = F.cosine_similarity(normal(3000, width), normal(3000, width)).abs().mean()
    assert abs(measured / exact - 1) < 0.05
    if width > 3:
        assert abs(exact / math.sqrt(2 / (math.pi * width)) - 1) < 0.01


class Unskipped(PostNorm):
    """The same sublayers without the residual sum."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], rows: None = None) -> Tensor:
        return self.norm(sublayer(x))


@pytest.mark.usefixtures("unchecked")
def test_item_20_skip_connections_carry_the_position() -> None:
    """A linear probe reads the position from every layer; without skips it is soon lost."""
    width, length, batch = 24, 16, 128
    place = torch.arange(length).double()
    place = ((place - place.mean()) / place.std()).repeat(batch)[:, None]

    def errors(residual: type[nn.Module]) -> list[float]:
        """The probe's mean squared error after each layer, 1 for one that guesses."""
        torch.manual_seed(0)
        x = 0.3 * normal(batch, length, width)
        x = x + SinusoidalPositions(width).encoding(torch.arange(length), torch.float64)
        left = []
        for _ in range(5):
            make = partial(residual, width)
            x = Block(MultiHeadAttention(width, 4), FeedForward(width, 48), make).double()(x)
            rows = F.pad(x.detach().flatten(0, 1), (0, 1), value=1.0)
            fit, test = slice(0, len(rows) // 2), slice(len(rows) // 2, None)
            probe = torch.linalg.lstsq(rows[fit], place[fit]).solution
            left.append(float((rows[test] @ probe - place[test]).square().mean()))
        return left

    with_skips, without = errors(PostNorm), errors(Unskipped)
    assert max(with_skips) < 0.3
    assert min(without[2:]) > 0.9


def test_item_21_the_sinusoids_of_the_model() -> None:
    part = transformer().target.position
    r = part.encoding(torch.arange(L), torch.float64)
    for n in range(L):
        for i in range(D):
            angle = n / 10_000 ** ((i - i % 2) / D)
            assert abs(r[n, i] - (math.cos(angle) if i % 2 else math.sin(angle))) < 1e-14


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_item_22_stacks_with_residual_connections(norm: str) -> None:
    """Where every sublayer gives nothing, x goes through unchanged (or only normalised)."""
    model, x, memory = transformer(norm=norm, final_norm=False), normal(1, L, D), normal(1, S, D)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            nn.init.zeros_(module.output.weight), nn.init.zeros_(module.output.bias)
        elif isinstance(module, FeedForward):
            nn.init.zeros_(module.reduce.weight), nn.init.zeros_(module.reduce.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    want = x if norm == "pre" else F.layer_norm(x, (D,))
    for out in (model.encoder(x), model.decoder(x, memory, mask=causal())):
        torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)  # LayerNorm's epsilon


def test_item_23_the_decoder_masks_what_comes_after() -> None:
    model, memory = transformer(), normal(1, S, D)
    x = model.target(SENTENCE).detach()
    depends = reach(lambda x: model.decoder(x, memory, mask=causal()), x)
    assert torch.equal(depends, torch.ones(L, L, dtype=torch.bool).tril())
    assert reach(lambda x: model.encoder(x), x).all()


def test_item_24_the_output_is_shared_and_keys_and_values_are_not() -> None:
    """Each decoder layer reads the top encoder's output through matrices of its own."""
    model, read = transformer(), []
    for block in model.decoder.blocks:
        block.cross.register_forward_pre_hook(lambda module, given: read.append(given[1]))
    model(SOURCE, SENTENCE)
    assert all(torch.equal(source, model.encode(SOURCE)) for source in read)
    assert len(read) == 2
    first, second = (block.cross for block in model.decoder.blocks)
    for name in ("key", "value"):
        one, two = getattr(first, name), getattr(second, name)
        assert one is not two
        assert not torch.allclose(one(read[0]), two(read[0]))


def test_item_25_cross_attention_asks_from_the_layer_below() -> None:
    model, seen = transformer(norm="post"), {}
    block = model.decoder.blocks[1]
    block.add_attention.register_forward_hook(lambda m, given, out: seen.update(below=out))
    block.cross.register_forward_pre_hook(lambda m, given: seen.update(asks=given[0]))
    model(SOURCE, SENTENCE)
    assert torch.equal(seen["asks"], seen["below"])


# --- The exercise sheet


def test_item_26_multi_head_attention() -> None:
    ours, peer = attention(), nn.MultiheadAttention(D, H, batch_first=True).double()
    parts = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        peer.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
        peer.out_proj.load_state_dict(ours.output.state_dict())
    x, source = normal(2, L, D), normal(2, S, D)
    close(ours(x, source), peer(x, source, source)[0])


def test_item_27_self_and_cross_attention_are_one_operation() -> None:
    layer, x = attention(), normal(1, L, D)
    assert torch.equal(layer(x), layer(x, x))


def test_item_28_queries_and_pairs_may_differ_in_number() -> None:
    layer = attention()
    for length, sources in ((L, S), (S, L), (1, S), (L, 1)):
        assert layer(normal(1, length, D), normal(1, sources, D)).shape == (1, length, D)


def test_items_29_and_31_which_attention_stands_where() -> None:
    """Encoder: self. Decoder: masked self, then cross."""
    model, seen = transformer(), []
    for stack in ("encoder", "decoder"):
        for n, block in enumerate(getattr(model, stack).blocks):
            for kind in ("attention", "cross"):
                part = getattr(block, kind)
                if part is not None:
                    part.register_forward_pre_hook(
                        lambda module, given, named, place=(stack, n): seen.append(
                            (*place, _kind(given, named))
                        ),
                        with_kwargs=True,
                    )
    model(SOURCE, SENTENCE)
    assert seen == [
        ("encoder", 0, "self"),
        ("encoder", 1, "self"),
        ("decoder", 0, "masked self"),
        ("decoder", 0, "cross"),
        ("decoder", 1, "masked self"),
        ("decoder", 1, "cross"),
    ]


def _kind(inputs: tuple[Tensor | None, ...], named: dict[str, object]) -> str:
    if any(source is not None for source in inputs[1:]):
        return "cross"
    return "self" if named["mask"] is None else "masked self"


@pytest.mark.parametrize("kind", SOURCES)
def test_item_30_cross_attention_joins_modalities(kind: str) -> None:
    """Every word of a text reads every patch of an image, or every frame of a recording."""
    model = transformer(source=SOURCES[kind])
    source = (images(1) if kind == "image" else frames(1, S)).requires_grad_()
    for row in model(source, SENTENCE)[0]:
        (gradient,) = torch.autograd.grad(row.sum(), source, retain_graph=True)
        assert (gradient != 0).all()


# --- The homework: several heads


def test_item_45_heads_are_stacked_and_w_o_mixes_them() -> None:
    layer, x, K = attention(bias=False), normal(1, L, D), D // H
    result = torch.zeros(1, L, D, dtype=torch.float64)
    for h in range(H):
        own = slice(h * K, (h + 1) * K)
        query, key, value = (
            x @ part.weight[own].T for part in (layer.query, layer.key, layer.value)
        )
        result += attention_weights(query, key) @ value @ layer.output.weight[:, own].T
    close(layer(x), result)
    # Without W_O each block of columns would come from one head, and its own value matrix, alone.
    with torch.no_grad():
        layer.output.weight.copy_(torch.eye(D))
    before = layer(x)
    with torch.no_grad():
        layer.value.weight[:K] += 1
    changed = (layer(x) - before).abs().amax((0, 1)) > 1e-9
    assert changed.tolist() == [True] * K + [False] * (D - K)


def test_item_46_a_head_reads_all_channels_and_a_group_its_own() -> None:
    K, x = D // H, normal(1, L, D)
    depthwise, grouped = (lively(Convolution(D, 1, groups=groups)) for groups in (D, H))
    layer = attention()

    def read(part: Callable[[Tensor], Tensor]) -> int:
        """How many input channels the first K output channels depend on."""
        gradient = jacobian(lambda row: part(row)[..., :K].sum(), x[:, :1])
        return int((gradient != 0).sum())

    assert read(lambda row: layer.query(row)) == D
    assert read(lambda row: grouped(row)) == read(lambda row: depthwise(row)) == K
    one = jacobian(lambda row: depthwise(row)[..., 0].sum(), x[:, :1])
    assert int((one != 0).sum()) == 1
    # They agree for block-diagonal weights.
    blocks = grouped.convolution.weight[..., 0].split(K)
    with torch.no_grad():
        layer.query.weight.copy_(torch.block_diag(*blocks))
        layer.query.bias.copy_(grouped.convolution.bias)
    close(layer.query(x), grouped(x))


def test_item_47_heads_stand_one_above_the_other() -> None:
    """h·d' numbers for each token, which W_O maps to the width; not an axis of heads."""
    layer, seen = lively(MultiHeadAttention(D, 5, key_width=2, value_width=3)), []
    layer.output.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    assert layer(normal(1, L, D)).shape == (1, L, D)
    assert seen == [(1, L, 5 * 3)]


def test_item_53_no_recurrence_and_all_positions_at_once() -> None:
    model = transformer()
    assert not any(isinstance(module, nn.RNNBase) for module in model.modules())
    whole = model(SOURCE, SENTENCE)
    for n in range(1, L + 1):
        close(model(SOURCE, SENTENCE[:, :n])[:, -1], whole[:, n - 1])
    # A recurrent layer's last row depends on the first through every state between them, the
    # attention's directly: with the rows between them made to forget, only attention still sees it.
    recurrent, x = lively(Recurrent(D, "gru")), normal(1, L, D)
    with torch.no_grad():
        recurrent.forwards.bias_ih_l0[D : 2 * D] = -50  # the update gate carries nothing on,
        recurrent.forwards.weight_hh_l0.zero_()  # and nothing else reads the state
    assert jacobian(lambda x: recurrent(x)[:, -1], x)[..., 0, :].abs().max() < 1e-12
    layer = attention()
    assert jacobian(lambda x: layer(x)[:, -1], x)[..., 0, :].abs().max() > 1e-6


def test_item_59_subspaces_concatenated_and_projected() -> None:
    """Heads may be exchanged with all that belongs to them, and each adds its own part."""
    layer, x, K = attention(), normal(1, L, D), D // H
    before = layer(x)
    swap = torch.arange(D).view(H, K)[[2, 0, 1]].flatten()
    with torch.no_grad():
        for part in (layer.query, layer.key, layer.value):
            part.weight.copy_(part.weight[swap])
            part.bias.copy_(part.bias[swap])
        layer.output.weight.copy_(layer.output.weight[:, swap])
    close(layer(x), before)
    query, key = (part(x).view(1, L, H, K).transpose(1, 2) for part in (layer.query, layer.key))
    looks = attention_weights(query, key)[0]
    assert all((looks[h] - looks[g]).abs().max() > 0.01 for h in range(H) for g in range(h))


# --- The homework: feed-forward networks and norms


def test_item_62_the_feed_forward_network() -> None:
    layer, x = lively(FeedForward(D, 17)), normal(1, L, D)
    inner = torch.clamp(x @ layer.expand.weight.T + layer.expand.bias, min=0)
    assert inner.shape == (1, L, 17)
    close(layer(x), inner @ layer.reduce.weight.T + layer.reduce.bias)
    for n in range(L):
        close(layer(x)[:, n], layer(x[:, n]))
    base = published(Transformer, "base", 37_000).config
    assert base.feed_forward == 4 * base.width


def test_item_63_it_is_position_wise() -> None:
    """∂y_i/∂x_j = 0 for i ≠ j: nothing of neighbours, unlike a convolution."""
    x = normal(1, L, D)
    assert torch.equal(reach(lively(FeedForward(D, 17)), x), torch.eye(L, dtype=torch.bool))
    neighbours = reach(lively(Convolution(D, 3)), x)
    assert torch.equal(neighbours, torch.ones(L, L, dtype=torch.bool).triu(-1).tril(1))


def test_item_64_six_layers_of_two_or_three_sublayers() -> None:
    model = published(Transformer, "base", 37_000)
    for stack, sublayers in ((model.encoder, 2), (model.decoder, 3)):
        assert len(stack.blocks) == 6
        for block in stack.blocks:
            parts = [part for part in block.children() if isinstance(part, PostNorm)]
            assert len(parts) == sublayers
            assert all(part.dropout.p == 0.1 for part in parts)
    layer, x = PostNorm(D, 0.5), torch.randn(1, L, D)
    with torch.random.fork_rng():
        have = layer(x, lambda x: 3 * x)
    dropped = layer.dropout(3 * x)
    torch.testing.assert_close(have, layer.norm(x + dropped))


class Plain(PostNorm):
    """x + Sublayer(x), without a norm."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor], rows: None = None) -> Tensor:
        return x + sublayer(x)


@pytest.mark.usefixtures("unchecked")
def test_item_65_layer_norm_stabilises_and_speeds_training() -> None:
    """Without it vectors grow from layer to layer, and the same steps end at a higher loss."""

    def grown_and_left(residual: type[nn.Module]) -> tuple[float, float]:
        torch.manual_seed(0)
        stack = Stack(
            [
                Block(MultiHeadAttention(D, H), FeedForward(D, 48), lambda: residual(D))
                for _ in range(8)
            ]
        )
        head, x = nn.Linear(D, 5), torch.randn(32, L, D)
        grown = float(stack(x).std().detach())
        labels = torch.randint(5, (32,))
        optimizer = torch.optim.Adam([*stack.parameters(), *head.parameters()], lr=1e-2)
        for _ in range(15):
            optimizer.zero_grad()
            loss = F.cross_entropy(head(stack(x).mean(1)), labels)
            loss.backward()
            optimizer.step()
        return grown, float(loss.detach())

    (grown, left), (wild, high) = grown_and_left(PreNorm), grown_and_left(Plain)
    assert 0.5 < grown < 10 < wild
    assert left < 0.5 * high


# --- The homework: the Vision Transformer


def test_item_66_local_convolutions_and_global_attention() -> None:
    """In one layer a convolution sees neighbours, attention everything, the MLP itself alone."""
    model, x = vision(position="none"), normal(1, 16, D)
    block = model.encoder.blocks[0]
    assert reach(block.attention, x).all()
    assert torch.equal(reach(block.feed_forward, x), torch.eye(16, dtype=torch.bool))
    assert reach(lively(Convolution(D, 3)), x).sum() == 16 + 2 * 15
    # A convolution moves with its picture (away from the border); so do patches, by whole patches.
    convolution = lively(Convolution(D, 3))
    close(convolution(x.roll(2, 1))[:, 4:-1], convolution(x)[:, 2:-3])
    patches, picture = model.patches, images(1)
    moved = patches(picture.roll(2, -1)).unflatten(1, (3, 5))
    close(moved, patches(picture).unflatten(1, (3, 5)).roll(1, 2))
    assert not torch.allclose(
        patches(picture.roll(1, -1)).unflatten(1, (3, 5)), moved.roll(-1, 2), atol=1e-3
    )


def test_item_67_there_is_a_convolution_in_it() -> None:
    layer = lively(Patches(32, 4, 3, D))
    pictures = normal(2, 3, 32, 32)
    kernel = layer.projection.weight.view(D, 3, 4, 4)
    want = F.conv2d(pictures, kernel, layer.projection.bias, stride=4).flatten(2).mT
    assert (layer(pictures) - want).abs().max() < 1e-14


def test_item_68_an_image_is_a_sequence_of_flattened_patches() -> None:
    patches = flat_patches(torch.zeros(2, 3, 224, 224), 16)
    assert patches.shape == (2, 14 * 14, 3 * 16 * 16)


def test_items_69_and_73_positions_fixed_or_learned() -> None:
    """Fixed at both inputs of the Transformer; learned in ViT, the class token's included."""
    model = published(Transformer, "base", 37_000)
    for part in (model.source.position, model.target.position):
        assert isinstance(part, SinusoidalPositions)
        assert not list(part.parameters())
    base = published(VisionTransformer, "base", 1000)
    assert base.patches.position.table.shape == (196, 768)
    assert base.class_position.shape == (768,)
    assert base.class_position.requires_grad


@pytest.mark.parametrize(
    ("model", "size", "options", "ours", "papers"),
    [
        (Transformer, "base", {"vocabulary": 37_000}, 63.1, 65),
        (Transformer, "big", {"vocabulary": 37_000}, 214.2, 213),
        (VisionTransformer, "base", {"classes": 1000}, 86.6, 86),
        (VisionTransformer, "large", {"classes": 1000}, 304.3, 307),
        (VisionTransformer, "large", {"classes": 1000, "patch": 32}, 306.5, 307),
        (VisionTransformer, "huge", {"classes": 1000}, 632.0, 632),
    ],
)
def test_item_70_sizes_beside_the_papers(
    model: type[nn.Module], size: str, options: dict[str, int], ours: float, papers: float
) -> None:
    millions = parameters(published(model, size, **options)) / 1e6
    assert round(millions, 1) == ours
    assert abs(millions / papers - 1) < 0.03


def test_item_71_big_and_large_are_equally_wide() -> None:
    assert TransformerConfig.big(1).width == VisionConfig.large(1).width == 1024


def test_item_72_feed_forward_networks_are_not_smaller() -> None:
    sizes = [getattr(VisionConfig, s)(1).feed_forward for s in ("base", "large", "huge")]
    assert sizes == [3072, 4096, 5120]
    assert [getattr(TransformerConfig, s)(1).feed_forward for s in ("base", "big")] == [2048, 4096]
    model = published(VisionTransformer, "base", 10)
    for block in model.encoder.blocks:  # encoder only, pre-norm, GELU
        assert block.cross is None
        assert isinstance(block.add_attention, PreNorm)
        assert isinstance(block.feed_forward.activation, nn.GELU)
    assert model.class_token is not None


def test_item_74_the_class_tokens_last_state_is_the_image() -> None:
    model, pictures = vision(), images(3)
    x = model.embed(pictures)
    for block in model.encoder.blocks:
        x = block(x)
    close(model.represent(pictures), model.encoder.norm(x[:, 0]))
    # It depends on all pixels.
    gradient = jacobian(lambda p: model.represent(p).sum(), pictures[:1])
    assert (gradient != 0).all()


def test_item_75_one_hidden_layer_then_none() -> None:
    before = vision(head_width=11)
    x = normal(3, D)
    hidden = torch.tanh(before.head.hidden(x))
    close(before.head(x), before.head.output(hidden))
    after = before.replace_head(5)
    assert [type(part) for part in after.head.children()] == [nn.Linear]


@pytest.mark.usefixtures("unchecked")
def test_item_76_a_vision_transformer_learns() -> None:
    torch.manual_seed(0)
    config = VisionConfig(5, 8, 4, channels=1, width=24, heads=3, feed_forward=48, layers=2)
    model = VisionTransformer(config)
    pictures, labels = torch.randn(15, 1, 8, 8), torch.arange(15) % 5
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        F.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
    assert (model(pictures).argmax(1) == labels).float().mean() >= 0.95


# --- The handout


def test_item_94_an_encoder_is_a_feature_extractor_and_not_compact() -> None:
    """The output stays L×d, and most parameters are not attention's."""
    model = published(Transformer, "base", 37_000)
    parts = dict.fromkeys((MultiHeadAttention, FeedForward), 0)
    for module in model.modules():
        if type(module) in parts:
            parts[type(module)] += parameters(module)
    millions = [round(count / 1e6, 1) for count in parts.values()]
    assert millions == [18.9, 25.2]
    assert transformer().encode(SOURCE).shape == (1, S, D)
    # Transfer: a frozen encoder's vectors serve another head, and are what they were.
    trained = vision()
    other = trained.replace_head(3).freeze_backbone()
    pictures = images(2)
    close(other.represent(pictures), trained.represent(pictures))
    assert not other.represent(pictures).requires_grad


def test_item_95_adding_is_concatenating_with_tied_weights() -> None:
    """W (x + p) = [W W] [x; p]; the paper adds."""
    W, x, p = (
        normal(17, D),
        normal(L, D),
        SinusoidalPositions(D).encoding(torch.arange(L), torch.float64),
    )
    beside = Concatenated(SinusoidalPositions(D))(x)
    close((x + p) @ W.T, beside @ torch.cat((W, W), 1).T)
    assert not isinstance(transformer().target.position, Concatenated)


def test_every_item_has_its_test() -> None:
    wanted = {*range(10, 32), 45, 46, 47, 53, 59, *range(62, 77), 94, 95}
    named = " ".join(name for name in globals() if name.startswith("test_item"))
    assert {n for n in wanted if f"_{n}_" not in named} == set()
