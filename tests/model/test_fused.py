"""Fused kernels against torch's own operations, values and gradients.

On a GPU in bfloat16; without one, where there is Triton and TRITON_INTERPRET=1, in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import fusing
from regard.attention.attend import attend
from regard.attention.backends import Call
from regard.attention.mask import Mask, PackedLengths, causal, packed
from regard.attention.position import Layout, RotaryEmbedding
from regard.model.block import FeedForward
from regard.model.transformer import Transformer, TransformerConfig
from regard.model.vit import VisionConfig, VisionTransformer
from regard.train.loss import cross_entropy, divergence

pytestmark = [pytest.mark.gpu, pytest.mark.triton]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CLOSE = 6e-3 if DEVICE == "cuda" else 1e-5
"""Relative error: bfloat16 has 8 bits."""


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton")


@pytest.fixture(params=[HALF, torch.float16], ids=str)
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each dtype that the interpreter, or the GPU, multiplies."""
    monkeypatch.setitem(globals(), "HALF", request.param)
    if request.param is torch.float16:
        monkeypatch.setitem(globals(), "CLOSE", 1e-3)


def near(have: Tensor, want: Tensor, tolerance: float = CLOSE) -> None:
    error = (have.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)
    assert error <= tolerance


def same(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor, scale: float = 1.0
) -> None:
    """Values and gradients, with respect to all inputs."""
    have, want = ours(*inputs), plain(*inputs)
    grad = torch.randn_like(want, dtype=torch.float32)
    near(have, want, CLOSE * scale)
    grads = (
        torch.autograd.grad((out.float() * grad).sum(), inputs, allow_unused=True)
        for out in (have, want)
    )
    for mine, theirs in zip(*grads):
        near(mine, theirs, 2 * CLOSE * scale)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


# Attention


def test_tiles_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "HALF", torch.float16)
    monkeypatch.setitem(globals(), "CLOSE", 1e-3)
    test_tiles(2, True, None, 24)


def test_tiles_of_empty_sequences() -> None:
    from regard.attention.backends import tiles

    mask = packed(PackedLengths([0, 0], DEVICE), PackedLengths([0, 3], DEVICE))
    query, key = (torch.randn(1, 2, n, 16, device=DEVICE).to(HALF).requires_grad_() for n in (0, 3))
    out = tiles.packed(Call(query, key, key, mask, 0.25, None, 0.0))
    assert out.shape == query.shape
    (grad,) = torch.autograd.grad(out.sum(), key)
    assert torch.equal(grad, torch.zeros_like(key))


LENGTHS = [5, 0, 30, 7, 64, 1, 90]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sources", [None, [7, 4, 0, 17, 70, 9, 100]])
@pytest.mark.parametrize("width", [24, 64])
def test_tiles(group: int, is_causal: bool, sources: list[int] | None, width: int) -> None:
    from regard.attention.backends import tiles

    H, T = 4, sum(LENGTHS)
    if is_causal and sources is not None:
        sources = [n + 3 for n in LENGTHS]
    S = T if sources is None else sum(sources)
    queries = PackedLengths(LENGTHS, DEVICE)
    mask: Mask = (
        packed(queries) if sources is None else packed(queries, PackedLengths(sources, DEVICE))
    )
    mask = causal() & mask if is_causal else mask
    # As the projections lay them out: heads within tokens, side by side with others.
    query, key, value = (
        torch.randn(1, n, heads, width + 8, device=DEVICE).to(HALF)[..., :width].requires_grad_()
        for n, heads in ((T, H), (S, H // group), (S, H // group))
    )

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return tiles.packed(Call(q, k, v, mask, width**-0.5, None, 0.0))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
        return attend(q, k, v, mask=mask, backend="formula")

    same(ours, plain, query, key, value)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("length", [5, 64, 65, 83, 197])
@pytest.mark.parametrize("width", [16, 64])
def test_whole(length: int, width: int) -> None:
    from regard.attention.backends import whole

    B, H = 2, 3
    joint = torch.randn(B, length, 3 * H * width + 8, device=DEVICE).to(HALF).requires_grad_()

    def heads(joint: Tensor) -> Sequence[Tensor]:
        parts = joint[..., : 3 * H * width].unflatten(-1, (3, H, width)).unbind(2)
        return [part.transpose(1, 2) for part in parts]

    def ours(joint: Tensor) -> Tensor:
        return whole.unmasked(Call(*heads(joint), None, 0.3, None, 0.0))

    def plain(joint: Tensor) -> Tensor:
        query, key, value = (part.float() for part in heads(joint))
        return attend(query, key, value, beta=0.3, backend="formula")

    same(ours, plain, joint)


def test_gradients_side_by_side_are_not_copied() -> None:
    from regard.attention.linear import parts

    widths = (8, 8, 16)
    joint, made = torch.randn(2, 3, 32, device=DEVICE), torch.randn(2, 3, 32, device=DEVICE)
    pieces = parts(joint.requires_grad_(), widths)
    (grad,) = torch.autograd.grad(pieces, joint, made.split(widths, -1))
    assert grad.data_ptr() == made.data_ptr()
    assert torch.equal(grad, made)
    apart = [piece.contiguous() for piece in made.split(widths, -1)]
    swapped = [made[..., 8:16], made[..., :8], made[..., 16:]]
    for given in (apart, swapped):
        (grad,) = torch.autograd.grad(parts(joint, widths), joint, given)
        assert torch.equal(grad, torch.cat(given, -1))


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("width", [8, 12])
def test_rotation(layout: Layout, width: int) -> None:
    from regard.attention.rotation import rotate

    turn = RotaryEmbedding(8, layout=layout)
    at = torch.randint(0, 900, (1, 9), device=DEVICE)
    same(
        lambda x: rotate(x.transpose(1, 2), at[0], 8, 10000, layout == "halves"),
        lambda x: turn.rotate(x.float().transpose(1, 2), at),
        normal(1, 9, 3, width, dtype=HALF),
    )


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("base", [10000, 500000.0])
def test_a_rotation_is_exact_at_any_position(layout: Layout, base: float) -> None:
    from regard.attention.rotation import rotate

    at = torch.tensor([[0, 1, 997, 100_003, 1_000_003, 100_000_007]], device=DEVICE)
    x = torch.randn(1, 2, 6, 16, device=DEVICE).requires_grad_()
    seeds = torch.randn(1, 2, 6, 16, device=DEVICE)
    rotary = RotaryEmbedding(16, base, layout)
    have, want = rotate(x, at[0], 16, base, layout == "halves"), rotary.rotate(x.double(), at)
    slopes = (torch.autograd.grad(y, x, seeds.to(y.dtype))[0] for y in (have, want))
    for mine, exact in ((have, want), tuple(slopes)):
        assert (mine - exact).abs().max() < 3e-6  # of entries up to 4


def test_training_rotates_every_row_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, at = torch.randn(3, 2, 5, 8, device=DEVICE), torch.arange(5, device=DEVICE)[None]
    want = RotaryEmbedding(8).rotate(x, at)
    monkeypatch.setattr("regard.attention.position.fuses", lambda x: True)
    near(RotaryEmbedding(8).rotate(x, at), want)


# Layers


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("rows", [0, 3, 5000])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(rows: int, bias: bool) -> None:
    from regard.attention.linear import linear

    inputs = [normal(1, rows, 40, dtype=HALF), normal(72, 40), normal(72)][: 2 + bias]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.float(), weight.to(HALF).float(), bias)

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    same(ours, plain, *inputs)


@pytest.mark.parametrize("width", [7, 37, 64, 1000])
def test_norms_and_residuals(width: int) -> None:
    from regard.model import fused

    norm = nn.LayerNorm(width, device=DEVICE)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, y = normal(1, 37, width), normal(1, 37, width, dtype=HALF)

    def both(x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.autocast(DEVICE, HALF, enabled=DEVICE == "cuda"):
            normed, residual = fused.norm(x, norm)
        return normed + 2 * residual

    weights = (norm.weight, norm.bias)
    same(both, lambda x, *_: norm(x) + 2 * x, x, *weights)
    same(
        lambda x, y, *_: fused.add_norm(x, y, 0.0, norm),
        lambda x, y, *_: norm(x + y),
        x,
        y,
        *weights,
    )
    same(lambda x, y: fused.residual(x, y, 0.0), lambda x, y: x + y, x, y)

    def summed(x: Tensor, y: Tensor, *parameters: Tensor) -> Tensor:
        with torch.autocast(DEVICE, HALF, enabled=DEVICE == "cuda"):
            normed, total = fused.norm(x, norm, y)
        return normed + 2 * total

    same(summed, lambda x, y, *_: norm(x + y) + 2 * (x + y), x, y, *weights)
    with torch.no_grad():
        near(summed(x, y), norm(x + y) + 2 * (x + y))
    # Whoever reads the sum alone, or its LayerNorm alone.
    for n in range(2):
        same(
            lambda x, y, n=n: fused.norm(x, norm, y)[n],
            lambda x, y, n=n: (norm(x + y), x + y)[n],
            x,
            y,
        )


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout(dropout: float) -> None:
    from regard.model import fused

    x, y = torch.zeros(1, 300, 64, device=DEVICE), torch.ones(1, 300, 64, device=DEVICE)
    y.requires_grad_()
    torch.manual_seed(3)
    out = fused.residual(x, y, dropout)
    (grad,) = torch.autograd.grad(out.sum(), y)
    assert torch.equal(grad, out.detach())
    assert abs(float((out == 0).float().mean()) - dropout) < 0.02
    assert set(out.unique().tolist()) == {0.0, out.max().item()}
    assert out.max().item() == pytest.approx(1 / (1 - dropout))
    torch.manual_seed(3)
    assert torch.equal(fused.residual(x, y, dropout), out)
    assert not torch.equal(fused.residual(x, y, dropout), out)
    # The same entries are dropped forwards and backwards.
    norm = nn.LayerNorm(64, device=DEVICE)
    normed = fused.add_norm(x, y, dropout, norm)
    (grad,) = torch.autograd.grad((normed * torch.randn_like(normed)).sum(), y)
    dropped = normed.detach() < 0
    assert torch.equal(grad == 0, dropped)
    _, total = fused.norm(x, norm, y, dropout)
    (grad,) = torch.autograd.grad(total.sum(), y)
    assert torch.equal(grad, total.detach())
    with torch.no_grad():
        _, total = fused.norm(x, norm, y, dropout)
    assert abs(float((total == 0).float().mean()) - dropout) < 0.02


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("gelu", [False, True])
def test_feed_forward(gelu: bool) -> None:
    from regard.model import fused

    expand, reduce = (nn.Linear(*sizes, device=DEVICE) for sizes in ((40, 72), (72, 40)))
    activation = F.gelu if gelu else F.relu
    parameters = [p for layer in (expand, reduce) for p in (layer.weight, layer.bias)]

    def ours(x: Tensor, *_: Tensor) -> Tensor:
        return fused.feed_forward(x, expand, reduce, gelu)

    def plain(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        # With a bias in float32, other hidden units would be just above zero.
        hidden = activation(F.linear(x.float(), w1.to(HALF).float(), b1.to(HALF).float()))
        return F.linear(hidden, w2.to(HALF).float(), b2)

    same(ours, plain, normal(1, 2500, 40, dtype=HALF), *parameters, scale=2)


@pytest.mark.skipif(DEVICE == "cpu", reason="the matrix product has an exact GELU on a CPU")
def test_a_row_alone_has_the_activation_of_a_batch() -> None:
    """The weights are 1 and 0: products are exact, and what differs is the activation alone."""
    x = 2 * torch.randn(4096, 512, device=DEVICE, dtype=HALF)  # above LARGE; one row is below
    layer = FeedForward(512, 512, nn.GELU()).to(DEVICE)
    for linear in (layer.expand, layer.reduce):
        nn.init.eye_(linear.weight)
        nn.init.zeros_(linear.bias)
    with torch.autocast(DEVICE, HALF):
        trained = layer(x).detach()
    layer.to(HALF)
    with torch.no_grad():
        batch = layer(x)
        for rows in (1, 2, 7, 100):
            assert torch.equal(layer(x[:rows]), batch[:rows])
        assert layer(x[:0]).shape == (0, 512)
    exact = F.gelu(x.double())
    for result in (trained, batch):  # 4.8e-4, and rounding to 8 bits
        assert ((result - exact).abs() <= 4.8e-4 + 2**-8 * exact.abs()).all()


@pytest.mark.parametrize("bias", [False, True])
def test_cross_entropy(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.train.softmax.COLUMNS", 128)  # several tiles, the last one ragged
    states, output = normal(1, 50, 32), nn.Linear(32, 500, bias, device=DEVICE)
    labels = torch.randint(0, 500, (1, 50), device=DEVICE)
    labels[0, 5:9] = -100
    if DEVICE == "cpu":
        monkeypatch.setattr("regard.train.loss.fuses", lambda x: True)

    def ours(states: Tensor, *_: Tensor) -> Tensor:
        with torch.autocast(DEVICE, HALF, enabled=DEVICE == "cuda"):
            return cross_entropy(states, output, labels, 0.1)

    def plain(states: Tensor, *_: Tensor) -> Tensor:
        return F.cross_entropy(output(states)[0], labels[0], label_smoothing=0.1, reduction="sum")

    same(ours, plain, states, *output.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_divergence(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.train.softmax.COLUMNS", 128)
    one, two = normal(1, 50, 32), normal(1, 50, 32)
    output = nn.Linear(32, 500, bias, device=DEVICE)
    labels = torch.randint(0, 500, (1, 50), device=DEVICE)
    labels[0, 5:9] = -100
    if DEVICE == "cpu":
        monkeypatch.setattr("regard.train.loss.fuses", lambda x: True)

    def ours(one: Tensor, two: Tensor, *_: Tensor) -> Tensor:
        with torch.autocast(DEVICE, HALF, enabled=DEVICE == "cuda"):
            return divergence(one, two, output, labels)

    def plain(one: Tensor, two: Tensor, *_: Tensor) -> Tensor:
        p, q = (output(x)[labels >= 0].log_softmax(-1) for x in (one, two))
        return 0.5 * ((p.exp() - q.exp()) * (p - q)).sum()

    same(ours, plain, one, two, *output.parameters(), scale=3)


# Models


@pytest.mark.parametrize(
    "changes", [{"norm": "pre", "position": "rotary"}, {"norm": "post"}, {"activation": "gelu"}]
)
def test_a_model_trains_as_without(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TransformerConfig(
        50, width=64, heads=2, feed_forward=96, encoder_layers=2, decoder_layers=2, dropout=0.0
    )
    model = Transformer(replace(config, **changes)).to(DEVICE).train()
    S, T = PackedLengths([7, 4, 30, 2], DEVICE), PackedLengths([5, 9, 3, 20], DEVICE)
    source, target, labels = (
        torch.randint(0, 50, (1, n), device=DEVICE) for n in (S.total, T.total, T.total)
    )

    def gradients(autocast: bool) -> Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            states = model.states(target, model.encode(source, S), T, S)
            loss = cross_entropy(states, model.output, labels, 0.1)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    assert fusing._available(torch.device(DEVICE))
    fused = gradients(True)
    monkeypatch.setattr(fusing, "_available", lambda device: False)
    plain, exact = gradients(True), gradients(False)
    error = (fused - exact).norm() / exact.norm()
    assert error <= 1.2 * (plain - exact).norm() / exact.norm()
    assert error < 0.1


def vit() -> VisionTransformer:
    """With ten patches of eight by eight in each direction, and the class token."""
    shape = {"width": 96, "heads": 3, "feed_forward": 160, "layers": 3}
    model = VisionTransformer(VisionConfig(7, 80, 8, **shape)).to(DEVICE)  # type: ignore[arg-type]
    nn.init.normal_(model.head.output.weight)
    return model


@pytest.mark.parametrize("hooked", [False, True])
def test_a_vision_transformer_trains_as_without(
    hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = vit().train(), torch.randn(5, 3, 80, 80, device=DEVICE)
    seen: list[Any] = []
    if hooked:
        for module in (model.encoder.blocks[1], model.encoder.blocks[1].add_attention):
            module.register_forward_hook(lambda _, args, out: seen.append(out))

    def gradients(autocast: bool) -> Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(images).float().square().sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    fused = gradients(True)
    assert len(seen) == 2 * hooked
    assert all(isinstance(out, Tensor) for out in seen)
    monkeypatch.setattr(fusing, "_available", lambda device: False)
    plain, exact = gradients(True), gradients(False)
    error = (fused - exact).norm() / exact.norm()
    assert error <= 1.2 * (plain - exact).norm() / exact.norm()
    assert error < 0.1


def test_a_vision_transformer_infers_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = vit().eval(), torch.randn(7, 3, 80, 80, device=DEVICE)
    calls: list[int] = []
    with torch.no_grad():
        exact = model(images)
        model.bfloat16()
        monkeypatch.setattr(fusing, "LARGE", 2**16)
        from regard.model import fused

        norm = fused.norm
        monkeypatch.setattr(fused, "norm", lambda *given: calls.append(1) or norm(*given))
        have = model(images.bfloat16())
        assert len(calls) == 6
        monkeypatch.setattr(fusing, "LARGE", 2**40)
        plain = model(images.bfloat16())
        alone = model(images[:1].bfloat16())
    assert len(calls) == 6
    error = (have - exact).norm() / exact.norm()
    assert error <= 1.5 * (plain - exact).norm() / exact.norm()
    assert (alone - have[:1]).norm() <= 3 * error * exact[:1].norm()
