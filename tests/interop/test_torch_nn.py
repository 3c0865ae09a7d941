"""torch.nn's layers, read by `interop.torch_nn`, give the same results here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import causal, padding
from regard.interop import torch_nn
from regard.interop.torch_nn import Layer
from regard.model.block import Block
from regard.model.stack import Stack

B, L, S, D, M = 2, 7, 5, 12, 23
LENGTHS, SOURCE_LENGTHS = torch.tensor([7, 3]), torch.tensor([2, 5])
HIDDEN = torch.ones(L, L, dtype=torch.bool).triu(1)
FILLING = torch.arange(L) >= LENGTHS[:, None]
SOURCE_FILLING = torch.arange(S) >= SOURCE_LENGTHS[:, None]

OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "pre-norm": {"norm_first": True},
    "gelu": {"activation": "gelu", "layer_norm_eps": 1e-2},
    "silu, time first": {"activation": F.silu, "batch_first": False},
    "no biases": {"bias": False, "norm_first": True},
}


def options(given: dict[str, Any]) -> dict[str, Any]:
    sizes = {"dim_feedforward": M, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    return {"d_model": D, "nhead": 3} | sizes | given


def shaken(model: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def called(peer: Any, *inputs: Tensor, **masks: Any) -> Tensor:
    """The peer, with its batch wherever it wants it."""
    first = next(m for m in peer.modules() if isinstance(m, nn.MultiheadAttention)).batch_first
    if first:
        return peer(*inputs, **masks)
    return peer(*[x.transpose(0, 1) for x in inputs], **masks).transpose(0, 1)


def assert_alike(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    """Results and gradients alike at the real positions: padded ones are nobody's."""
    real = (~FILLING)[..., None]
    torch.testing.assert_close(ours * real, theirs * real, atol=1e-11, rtol=0)
    seed = torch.randn_like(ours) * real
    for have, want in zip(
        torch.autograd.grad(ours, inputs, seed), torch.autograd.grad(theirs, inputs, seed)
    ):
        torch.testing.assert_close(have, want, atol=1e-10, rtol=0)


def names(given: dict[str, Any]) -> dict[str, Any]:
    """The same in the words of `Layer`, for a state dict that doesn't tell."""
    activation = given.get("activation", F.relu)
    return {
        "heads": 3,
        "norm": "pre" if given.get("norm_first") else "post",
        "activation": F.gelu if activation == "gelu" else activation,
        "epsilon": given.get("layer_norm_eps", 1e-5),
    }


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS.keys())
def test_encoder_layer(given: dict[str, Any], training: bool) -> None:
    peer = shaken(nn.TransformerEncoderLayer(**options(given))).train(training)
    x = normal(B, L, D)
    for ours in (
        torch_nn.block(peer),
        torch_nn.block(peer.state_dict(), Layer(**names(given))),
    ):
        assert isinstance(ours, Block)
        assert sum(p.numel() for p in ours.parameters()) == sum(
            p.numel() for p in peer.parameters()
        )
        assert_alike(ours(x), called(peer, x), [x])
        theirs = called(peer, x, src_mask=HIDDEN, src_key_padding_mask=FILLING)
        assert_alike(ours(x, mask=causal() & padding(LENGTHS)), theirs, [x])
        theirs = called(peer, x, src_key_padding_mask=FILLING)
        assert_alike(ours(x, mask=padding(LENGTHS)), theirs, [x])


@pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS.keys())
def test_decoder_layer(given: dict[str, Any]) -> None:
    peer = shaken(nn.TransformerDecoderLayer(**options(given)))
    x, memory = normal(B, L, D), normal(B, S, D)
    for ours in (
        torch_nn.block(peer),
        torch_nn.block(peer.state_dict(), Layer(**names(given))),
    ):
        theirs = called(peer, x, memory, tgt_mask=HIDDEN, memory_key_padding_mask=SOURCE_FILLING)
        out = ours(x, memory, mask=causal(), memory_mask=padding(SOURCE_LENGTHS))
        assert_alike(out, theirs, [x, memory])


# torch warns of what it cannot make fast.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("final", [None, nn.LayerNorm(D, 1e-3), nn.LayerNorm(D, bias=False)])
def test_encoder(final: nn.LayerNorm | None, training: bool) -> None:
    layer = nn.TransformerEncoderLayer(**options({"bias": final is None}))
    final = None if final is None else final.double()
    peer = shaken(nn.TransformerEncoder(layer, 3, final, enable_nested_tensor=False))
    ours, x = torch_nn.stack(peer.train(training)), normal(B, L, D)
    assert isinstance(ours, Stack)
    assert ours.training == training
    assert len(ours.blocks) == 3
    theirs = peer(x, src_key_padding_mask=FILLING)
    assert_alike(ours(x, mask=padding(LENGTHS)), theirs, [x])
    if final is None or final.eps == 1e-5:
        ours = torch_nn.stack(peer.state_dict(), Layer(3))
        theirs = peer(x, src_key_padding_mask=FILLING)
        assert_alike(ours(x, mask=padding(LENGTHS)), theirs, [x])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS.keys())
def test_transformer(given: dict[str, Any]) -> None:
    peer = shaken(nn.Transformer(num_encoder_layers=2, num_decoder_layers=3, **options(given)))
    source, target = normal(B, S, D), normal(B, L, D)
    for encoder, decoder in (
        torch_nn.stacks(peer),
        torch_nn.stacks(peer.state_dict(), Layer(**names(given))),
    ):
        theirs = called(
            peer,
            source,
            target,
            tgt_mask=HIDDEN,
            src_key_padding_mask=SOURCE_FILLING,
            memory_key_padding_mask=SOURCE_FILLING,
        )
        memory = encoder(source, mask=padding(SOURCE_LENGTHS))
        out = decoder(target, memory, mask=causal(), memory_mask=padding(SOURCE_LENGTHS))
        assert_alike(out, theirs, [source, target])


def test_decoder() -> None:
    layer = nn.TransformerDecoderLayer(**options({}))
    peer = shaken(nn.TransformerDecoder(layer, 2))
    x, memory = normal(B, L, D), normal(B, S, D)
    out = torch_nn.stack(peer)(x, memory, mask=causal())
    assert_alike(out, peer(x, memory, tgt_mask=HIDDEN), [x, memory])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("source_width", "value_width"), [(D, D), (13, 13), (13, D), (13, 7)])
def test_attention(source_width: int, value_width: int, bias: bool) -> None:
    peer = nn.MultiheadAttention(
        D, 4, bias=bias, kdim=source_width, vdim=value_width, batch_first=True
    )
    peer = shaken(peer.double())
    x, source = normal(B, L, D), normal(B, S, source_width)
    value = source if value_width == source_width else normal(B, S, value_width)
    for ours in (torch_nn.attention(peer), torch_nn.attention(peer.state_dict(), 4)):
        theirs = peer(x, source, value, key_padding_mask=SOURCE_FILLING)[0]
        have = ours(x, source, value=value, mask=padding(SOURCE_LENGTHS))
        assert_alike(have, theirs, [x, source, value])


def test_dropout_is_where_torch_has_it() -> None:
    peer = nn.TransformerDecoderLayer(**options({"dropout": 0.3}))
    ours = torch_nn.block(peer)
    rates = [ours.attention.core.dropout, ours.cross.core.dropout, ours.feed_forward.dropout.p]
    rates += [
        ours.add_attention.dropout.p,
        ours.add_cross.dropout.p,
        ours.add_feed_forward.dropout.p,
    ]
    assert rates == [0.3] * 6
    torch.manual_seed(1)
    x, memory = normal(1, 499, D), normal(1, 503, D)
    with torch.no_grad():
        ratio = (ours(x, memory) - ours.eval()(x, memory)).std() / (
            peer(x, memory) - peer.eval()(x, memory)
        ).std()
    assert ratio == pytest.approx(1, abs=0.05)


def test_reading_draws_nothing_and_copies() -> None:
    peer = nn.TransformerEncoderLayer(**options({}))
    state = torch.get_rng_state()
    ours = torch_nn.block(peer)
    assert torch.equal(torch.get_rng_state(), state)
    before = peer.self_attn.in_proj_weight.clone()
    with torch.no_grad():
        ours.attention.query.weight.zero_()
    assert torch.equal(peer.self_attn.in_proj_weight, before)
    assert all(parameter.requires_grad for parameter in ours.parameters())


def test_every_misfit_is_listed_at_once() -> None:
    state = dict(nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 3, M), 2).state_dict())
    del state["layers.0.norm1.bias"], state["layers.1.self_attn.in_proj_weight"]
    state["layers.1.linear2.weight"] = torch.zeros(M, D)
    state["layers.0.self_attn.bias_k"] = torch.zeros(1, 1, D)
    with pytest.raises(ValueError, match="missing") as caught:
        torch_nn.stack(state, Layer(3))
    for named in (
        "layers.0.norm1.bias",
        "layers.1.self_attn.in_proj_weight",
        "unexpected layers.0.self_attn.bias_k",
        f"misshapen layers.1.linear2.weight ({M}, {D}) for ({D}, {M})",
    ):
        assert named in str(caught.value)


class Own(nn.TransformerEncoderLayer):
    pass


def mixed() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 3)
    layer.dropout1.p = 0.7
    return layer


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a key of its own": (
        lambda: torch_nn.attention(nn.MultiheadAttention(D, 3, add_bias_kv=True)),
        "put a key beside the source's",
    ),
    "a zero key": (
        lambda: torch_nn.attention(nn.MultiheadAttention(D, 3, add_zero_attn=True)),
        "put a key beside the source's",
    ),
    "no heads": (
        lambda: torch_nn.attention(nn.MultiheadAttention(D, 3).state_dict()),
        r"attention\(state, heads=8\)",
    ),
    "no layer": (
        lambda: torch_nn.block(nn.TransformerEncoderLayer(D, 3).state_dict()),
        r"give Layer\(heads=8\)",
    ),
    "wrong heads": (
        lambda: torch_nn.block(nn.TransformerEncoderLayer(D, 3).state_dict(), Layer(5)),
        r"heads \(5\) must divide width \(12\); try 6 or 12",
    ),
    "both": (
        lambda: torch_nn.block(nn.TransformerEncoderLayer(D, 3), Layer(3)),
        "says itself what it is; leave Layer",
    ),
    "a class of one's own": (lambda: torch_nn.block(Own(D, 3)), "a Own is not one of torch's own"),
    "a stack of one's own": (
        lambda: torch_nn.stacks(nn.Transformer(D, 3, custom_encoder=nn.Linear(2, 3))),
        "a Linear is not one of torch's own stacks",
    ),
    "several rates": (lambda: torch_nn.block(mixed()), "p must be one for all parts of a layer"),
    "another norm": (
        lambda: torch_nn.stack(
            nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 3), 1, nn.RMSNorm(D))
        ),
        r"the last norm \(a RMSNorm\) must be a LayerNorm",
    ),
    "nothing": (lambda: torch_nn.block({}, Layer(3)), "there is no .*norm1.weight"),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.usefixtures("unchecked")
def test_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
