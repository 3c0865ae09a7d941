"""Attention of other people's modules is recorded, and recording changes nothing."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported

from regard.attention.functional import scaled_dot_product_attention as ours
from regard.attention.multihead import MultiHeadAttention
from regard.checks import check
from regard.look.record import record, sampled
from regard.look.view import view_of
from regard.model.transformer import Transformer, TransformerConfig


class Foreign(nn.Module):
    """An attention as people write it, which calls torch's function."""

    def __init__(self, heads: int, **options: object):
        super().__init__()
        self.heads, self.options = heads, options
        self.projection = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.projection(x).chunk(3, -1)
        )
        self.seen = q, k, v
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


def formula(query: Tensor, key: Tensor, added: Tensor | float, scale: float) -> Tensor:
    scores = query @ key.mT * scale + added
    return (scores - scores.logsumexp(-1, keepdim=True)).exp()


ALLOWED = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.7
ALLOWED |= torch.eye(5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "added", "scale"),
    [
        ({}, 0.0, 1 / 2),
        ({"is_causal": True}, torch.full((5, 5), -math.inf).triu(1), 1 / 2),
        ({"scale": 0.3}, 0.0, 0.3),
        ({"attn_mask": ALLOWED}, torch.zeros(2, 1, 5, 5).masked_fill(~ALLOWED, -math.inf), 1 / 2),
        ({"attn_mask": ALLOWED.float()}, ALLOWED.float(), 1 / 2),
    ],
    ids=["plain", "causal", "scale", "boolean mask", "added mask"],
)
def test_torchs_function_is_seen(
    options: dict[str, object], added: Tensor | float, scale: float
) -> None:
    model = nn.Sequential(nn.Linear(7, 12), Foreign(3, **options)).eval()
    x = torch.randn(2, 5, 7)
    plain = model(x)
    with record(model) as seen:
        recorded = model(x)
    assert torch.equal(plain, recorded)
    assert list(seen) == ["1"]
    query, key, value = model[1].seen
    expected = formula(query, key, added, scale)
    torch.testing.assert_close(seen["1"].weights(), expected)
    torch.testing.assert_close((expected @ value).transpose(1, 2).flatten(2), plain)


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, ours])
@pytest.mark.parametrize(
    ("query", "key", "options"),
    [
        ((3, 5, 4), (3, 7, 4), {}),
        ((3, 5, 4), (3, 7, 4), {"is_causal": True}),
        ((3, 5, 4), (3, 7, 4), {"attn_mask": torch.rand(3, 5, 7)}),
        ((2, 6, 5, 4), (2, 2, 7, 4), {"enable_gqa": True}),
        ((5, 4), (7, 4), {"scale": 2.0}),
    ],
    ids=["three axes", "top left", "added", "grouped heads", "matrices"],
)
def test_both_functions_feed_one_recorder(
    function: Any, query: tuple[int, ...], key: tuple[int, ...], options: dict[str, Any]
) -> None:
    class Calling(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return function(q, k, v, **options)

    q, k, v = torch.randn(query), torch.randn(key), torch.randn(key)
    model = Calling()
    with record(model) as seen:
        out = model(q, k, v)
    asked = seen[""]
    value = asked.value.repeat_interleave(asked.query.shape[1] // asked.value.shape[1], 1)
    torch.testing.assert_close((asked.weights() @ value).reshape(out.shape), out)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_multihead_attention_is_seen(need_weights: bool, gradients: bool) -> None:
    """Without gradients and weights it runs on a fast path, past the function."""
    layer = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(2, 5, 12)
    with torch.set_grad_enabled(gradients):
        plain, weights = layer(x, x, x, need_weights=need_weights)
        with record(layer) as seen:
            output, recorded = layer(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(output, plain)
    assert (weights is not None) == (recorded is not None) == need_weights
    _, expected = layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(seen[""].weights(), expected)


@pytest.mark.parametrize("gradients", [False, True])
def test_torchs_transformer_is_seen_by_the_paths_of_its_layers(gradients: bool) -> None:
    """Its layers have a fast path without gradients, which calls no attention by name."""
    layer = nn.TransformerDecoderLayer(12, 2, 20, batch_first=True)
    encoder = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)
    model = nn.ModuleDict(
        {"encoder": nn.TransformerEncoder(encoder, 2), "decoder": nn.TransformerDecoder(layer, 1)}
    ).eval()
    source, target = torch.randn(2, 7, 12), torch.randn(2, 5, 12)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.set_grad_enabled(gradients):
        plain = model["decoder"](target, model["encoder"](source), tgt_mask=mask)
        with record(model) as seen:
            output = model["decoder"](target, model["encoder"](source), tgt_mask=mask)
    torch.testing.assert_close(output, plain)
    assert {name: tuple(call.weights().shape) for name, call in seen.items()} == {
        "encoder.layers.0.self_attn": (2, 2, 7, 7),
        "encoder.layers.1.self_attn": (2, 2, 7, 7),
        "decoder.layers.0.self_attn": (2, 2, 5, 5),
        "decoder.layers.0.multihead_attn": (2, 2, 5, 7),
    }
    assert seen["decoder.layers.0.self_attn"].weights().triu(1).eq(0).all()
    assert "0.multihead_attn: 2 × 2 × 5 × 7" in repr(seen)


def test_attention_written_with_einsum_warns() -> None:
    """As x-transformers computes it without its flag attn_flash."""

    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = torch.einsum("b h i d, b h j d -> b h i j", x, x) / 2
            return torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(-1), x)

    model = nn.Sequential(Written())
    with pytest.warns(UserWarning, match="written out as softmax"), record(model) as seen:
        model(torch.randn(2, 3, 5, 4))
    assert not seen


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_text_models_of_hugging_face_are_seen(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    ids, mask = torch.randint(3, 31, (2, 7)), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=31,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=40,
        )
        model, path = transformers.BertModel(config).eval(), "encoder.layer.{}.attention.self"
    else:
        config = transformers.GPT2Config(
            vocab_size=31, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0
        )
        model, path = transformers.GPT2LMHeadModel(config).eval(), "transformer.h.{}.attn"
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask)[0]
        with record(model) as seen:
            recorded = model(input_ids=ids, attention_mask=mask)[0]
        model.set_attn_implementation("eager")
        outputs = model(input_ids=ids, attention_mask=mask, output_attentions=True)
    assert torch.equal(plain, recorded)
    assert list(seen) == [path.format(0), path.format(1)]
    for call, weights in zip(seen.values(), outputs.attentions):
        for n, length in enumerate((7, 4)):  # rows of padding differ between the two
            have, want = call.weights()[n, :, :length], weights[n, :, :length]
            torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-4)


def test_names_are_of_the_module_that_attends() -> None:
    inner = nn.ModuleDict({"attn": Foreign(2), "other": Foreign(3)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner["other"](self.inner["attn"](x))

    model = Both()
    with record(model, lambda name: name.endswith("attn")) as seen:
        model(torch.randn(1, 4, 12))
    assert list(seen) == ["inner.attn"]
    assert seen["inner.attn"].weights().shape == (1, 2, 4, 4)


def test_ours_is_recorded_once_and_gives_the_same_bits() -> None:
    config = TransformerConfig(
        31, width=24, heads=4, feed_forward=40, encoder_layers=1, decoder_layers=1
    )
    model = Transformer(config).eval()
    source, target = torch.randint(31, (3, 11)), torch.randint(31, (3, 7))
    plain = model(source, target)
    with record(model) as seen:
        assert torch.equal(model(source, target), plain)
    assert list(seen) == [
        "encoder.blocks.0.attention",
        "decoder.blocks.0.attention",
        "decoder.blocks.0.cross",
    ]


def test_after_an_error_nothing_is_seen() -> None:
    model = nn.Sequential(Foreign(3))
    with pytest.raises(RuntimeError), record(model):
        model(torch.randn(1, 4, 11))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    with record(model) as seen:
        model(torch.randn(1, 4, 12))
    assert list(seen) == ["0"]


def test_hugging_faces_models_are_seen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        image_size=20,
        patch_size=5,
    )
    model = transformers.ViTModel(config).eval()
    images = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        plain = model(images).last_hidden_state
        with record(model) as seen:
            recorded = model(images).last_hidden_state
        model.set_attn_implementation("eager")
        expected = model(images, output_attentions=True).attentions
    assert torch.equal(plain, recorded)
    assert len(seen) == 2
    for asked, weights in zip(seen.values(), expected):
        torch.testing.assert_close(asked.weights(), weights)


def test_hugging_faces_eager_attention_warns_with_the_remedy() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=12,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=20,
        image_size=10,
        patch_size=5,
    )
    config._attn_implementation = "eager"
    model = transformers.ViTModel(config).eval()
    images = torch.randn(2, 3, 10, 10)
    with (
        pytest.warns(UserWarning, match=r"'eager'.*load the model with attn_implementation=\"sdpa"),
        record(nn.Sequential(model)),
    ):
        model(images)
    model.set_attn_implementation("sdpa")
    with record(model) as seen:
        model(images)
    assert len(seen) == 1


def test_an_own_forward_that_calls_torchs_function_is_recorded() -> None:
    class Direct(MultiHeadAttention):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model, x = nn.Sequential(Direct(12, 3)), torch.randn(2, 5, 12)
    with record(model) as seen:
        output = model(x)
    torch.testing.assert_close((seen["0"].weights() @ x[:, None])[:, 0], output)


class TimmAttention(nn.Module):
    """Of the shape of timm's: one linear layer for queries, keys and values, norms of queries and
    keys, and a call that a model was given, by the module's name or by one that it imported."""

    def __init__(self, width: int, heads: int, call: Callable[..., Tensor] | None):
        super().__init__()
        self.heads, self.call = heads, call
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = (nn.LayerNorm(width // heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        self.seen = q, k
        if self.call is None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        else:
            out = self.call(q, k, v, dropout_p=0.0)
        return self.proj(out.transpose(1, 2).reshape(B, N, C))


class TimmBlock(nn.Module):
    def __init__(self, call: Callable[..., Tensor] | None):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(15), TimmAttention(15, 3, call)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm1(x))


@pytest.mark.parametrize("call", [None, imported], ids=["by module", "imported"])
def test_modules_of_timms_shape_are_seen(call: Callable[..., Tensor] | None) -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(TimmBlock(call), TimmBlock(call))}).eval()
    x = torch.randn(2, 7, 15)
    with torch.no_grad():
        plain = model["blocks"](x)
        with record(model) as seen:
            recorded = model["blocks"](x)
    assert torch.equal(plain, recorded)
    assert list(seen) == ["blocks.0.attn", "blocks.1.attn"]
    for block, asked in zip(model["blocks"], seen.values()):
        query, key = block.attn.seen
        torch.testing.assert_close(asked.weights(), formula(query, key, 0.0, 5**-0.5))
    report = check(model["blocks"], x)
    assert report.holds
    assert not [finding for finding in report if finding.status == "skipped"]


def test_marians_three_attentions_are_seen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MarianConfig(
        vocab_size=31,
        d_model=24,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        max_position_embeddings=32,
    )
    model = transformers.MarianMTModel(config).eval()
    source, target = torch.randint(2, 31, (2, 11)), torch.randint(2, 31, (2, 7))
    given = {
        "input_ids": source,
        "attention_mask": torch.tensor([[1] * 11, [1] * 5 + [0] * 6]),
        "decoder_input_ids": target,
        "use_cache": False,
    }
    with torch.no_grad():
        plain = model(**given).logits
        with record(model) as seen:
            recorded = model(**given).logits
        model.set_attn_implementation("eager")
        found = model(**given, output_attentions=True)
    assert torch.equal(plain, recorded)
    assert list(seen) == [
        "model.encoder.layers.0.self_attn",
        *(
            f"model.decoder.layers.{n}.{part}"
            for n in range(2)
            for part in ("self_attn", "encoder_attn")
        ),
    ]
    expected = [
        *found.encoder_attentions,
        *(
            weights
            for pair in zip(found.decoder_attentions, found.cross_attentions)
            for weights in pair
        ),
    ]
    for asked, weights in zip(seen.values(), expected, strict=True):
        torch.testing.assert_close(asked.weights(), weights, atol=1e-5, rtol=1e-4)
    view = view_of(seen, [str(n) for n in range(11)], [str(n) for n in range(7)])
    assert len(view.maps[0].layers) == 2


def test_an_overview_of_a_long_sequence() -> None:
    model = Foreign(3)
    with record(model) as seen, torch.no_grad():
        model(torch.randn(1, 53, 12))
    asked = seen[""]
    whole = asked.weights()
    small = asked.overview(cells=10, rows=13)
    assert small.shape == (1, 3, 9, 9)  # 6 rows and columns in a cell, fewer in the last
    torch.testing.assert_close(small.sum(-1), torch.ones(1, 3, 9))
    torch.testing.assert_close(small[0, 2, 1, 3], whole[0, 2, 6:12, 18:24].sum(-1).mean())
    torch.testing.assert_close(small[0, 2, 8, 8], whole[0, 2, 48:, 48:].sum(-1).mean())
    torch.testing.assert_close(asked.overview(cells=100), whole)
    rows = sampled(53, 10)
    assert rows == list(range(4, 53, 6))
    some = asked.sample(cells=10)
    torch.testing.assert_close(some.sum(-1), torch.ones(1, 3, 9))
    torch.testing.assert_close(some[0, 2, 1, 3], whole[0, 2, rows[1], 18:24].sum())
