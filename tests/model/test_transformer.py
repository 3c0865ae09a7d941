"""The Transformer as a whole: its equation, its sources, shared weights, and life with it."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard import (
    ALiBi,
    ImageSource,
    MultiHeadAttention,
    TextSource,
    Transformer,
    TransformerConfig,
    causal,
    padding,
)
from regard.model.block import FeedForward, GatedFeedForward
from tests.model.samples import (
    FEATURES,
    OWN,
    POSITIONS,
    SIZES,
    SOURCES,
    D,
    M,
    N,
    close,
    frames,
    images,
    lively,
    parameters,
    transformer,
)

B, L, S = 3, 5, 7
SOURCE, TARGET = torch.arange(B * S).view(B, S) % N, torch.arange(B * L).view(B, L) % N


# --- The equation


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_it_is_an_encoder_a_decoder_and_an_output(norm: str) -> None:
    model, lengths = transformer(norm=norm), torch.tensor([7, 3, 1])
    memory = model.source(SOURCE)
    for block in model.encoder.blocks:
        memory = block(memory, mask=padding(lengths))
    states = model.target(TARGET)
    if norm == "pre":
        memory = model.encoder.norm(memory)
    for block in model.decoder.blocks:
        states = block(states, memory, mask=causal(), memory_mask=padding(lengths))
    if norm == "pre":
        states = model.decoder.norm(states)
    close(model.encode(SOURCE, lengths), memory)
    close(model.states(TARGET, memory, None, lengths), states)
    logits = states @ model.target.table.weight.T
    close(model.decode(TARGET, memory, None, lengths), logits)
    close(model(SOURCE, TARGET, source_lengths=lengths), logits)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("final_norm", [None, True, False])
def test_a_norm_at_the_end(norm: str, final_norm: bool | None) -> None:
    model = transformer(norm=norm, final_norm=final_norm)
    wanted = norm == "pre" if final_norm is None else final_norm
    assert (model.encoder.norm is not None) == (model.decoder.norm is not None) == wanted


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_activations_by_name(activation: str) -> None:
    layer = transformer(activation=activation).encoder.blocks[0].feed_forward
    if activation == "swiglu":
        assert isinstance(layer, GatedFeedForward)
    else:
        assert isinstance(layer, FeedForward)
        assert layer.activation(torch.tensor(-1.0)) == {
            "relu": nn.functional.relu,
            "gelu": nn.functional.gelu,
            "silu": nn.functional.silu,
        }[activation](torch.tensor(-1.0))


# --- Any source


def source_of(kind: str) -> Tensor:
    return {"text": SOURCE, "image": images(B), "audio": frames(B, S)}[kind]


@pytest.mark.parametrize("kind", ["text", *SOURCES])
def test_one_decoder_for_any_source(kind: str) -> None:
    """The decoder's own parameters are the same ones, and lengths are unrelated."""
    model = transformer(source=SOURCES.get(kind, TextSource()))
    out = model(source_of(kind), TARGET)
    assert out.shape == (B, L, N)
    assert model.encode(source_of(kind)).shape == (B, {"image": 15}.get(kind, S), D)
    assert {n: p.shape for n, p in model.decoder.named_parameters()} == {
        n: p.shape for n, p in transformer().decoder.named_parameters()
    }
    assert not torch.allclose(out, model(source_of(kind).flip(1), TARGET))


@pytest.mark.parametrize("position", ["rotary", "linear-bias", "sinusoidal", "none"])
def test_an_images_patches_have_their_own_position(position: str) -> None:
    """Whatever places the target: an image has rows and columns."""
    model = transformer(position, source=SOURCES["image"])
    assert all(block.attention.position is None for block in model.encoder.blocks)
    inside = {type(block.attention.position) for block in model.decoder.blocks}
    assert (inside == {type(None)}) == (position in ("sinusoidal", "none"))
    assert model(images(B), TARGET).shape == (B, L, N)


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
def test_positions_of_patches(position: str) -> None:
    source = ImageSource(image=(6, 10), patch=2, position=position)
    model = transformer(source=source)
    part = model.source.position
    assert (part is None) == (position == "none")
    if part is not None:
        assert part.encoding(torch.arange(15)).shape == (15, D)


@pytest.mark.parametrize("position", [*POSITIONS, *OWN])
def test_positions_by_name(position: str) -> None:
    """Each tells order but for `none`, under which the encoder cannot see it."""
    model = transformer(position)
    memory, moved = model.encode(SOURCE), model.encode(SOURCE.roll(1, 1))
    assert torch.allclose(memory, moved.roll(-1, 1)) == (position == "none")


def test_parts_of_ones_own() -> None:
    given: list[nn.Module | None] = []

    def attention(position: nn.Module | None) -> nn.Module:
        given.append(position)
        return MultiHeadAttention(D, 3, position=position)

    config = TransformerConfig(N, encoder_layers=1, decoder_layers=2, **SIZES)
    model = Transformer(
        config,
        position=lambda: ALiBi(3),
        attention=attention,
        feed_forward=lambda: nn.Linear(D, D),
    )
    assert [type(part) for part in given] == [ALiBi] * 3
    assert len({id(part) for part in given}) == 3
    assert model.source.position is None
    assert isinstance(model.decoder.blocks[1].feed_forward, nn.Linear)
    assert isinstance(model.decoder.blocks[1].cross, MultiHeadAttention)
    assert model(SOURCE, TARGET).shape == (B, L, N)


# --- Shared weights


def test_what_is_shared() -> None:
    whole, target, none = (transformer(share=share) for share in ("all", "target", "none"))
    assert whole.source.table.weight is whole.target.table.weight is whole.output.weight
    assert target.source.table.weight is not target.target.table.weight is target.output.weight
    assert len({id(m) for m in (none.source.table.weight, none.output.weight)}) == 2
    assert parameters(none) == parameters(target) + N * D == parameters(whole) + 2 * N * D
    separate = transformer(source=TextSource(vocabulary=M), share="target")
    assert separate.source.table.num_embeddings == M
    reader = transformer(source=SOURCES["image"], share="all")
    assert reader.output.weight is reader.target.table.weight


@pytest.mark.parametrize(
    "moved",
    [
        copy.deepcopy,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.float(),
        lambda model: model.to("meta"),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
    ids=["deepcopy", "bfloat16", "float", "meta", "to_empty"],
)
def test_what_is_shared_stays_shared(moved: Callable[[Transformer], Transformer]) -> None:
    model = moved(transformer())
    assert model.source.table.weight is model.target.table.weight is model.output.weight
    model = moved(transformer(source=TextSource(vocabulary=M), share="target"))
    assert model.source.table.weight is not model.target.table.weight is model.output.weight
    assert len(list(moved(transformer(share="none")).parameters())) == 2 + len(
        list(moved(transformer()).parameters())
    )


def test_an_output_bias() -> None:
    model = transformer(output_bias=True)
    with torch.no_grad():
        before = model(SOURCE, TARGET)
        model.output.bias += torch.arange(N)
        close(model(SOURCE, TARGET), before + torch.arange(N))


# --- Dropout


def test_dropout_is_where_the_paper_has_it() -> None:
    """On both embedded inputs and on every sublayer's output; not on weights or hidden layers."""
    model = Transformer(TransformerConfig(N, encoder_layers=2, decoder_layers=3, **SIZES))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    on = replace(model.config, dropout=0.1)
    names = {
        name
        for name, module in Transformer(on).named_modules()
        if isinstance(module, nn.Dropout) and module.p == 0.1
    }
    sublayers = {
        f"{stack}.blocks.{n}.add_{part}.dropout"
        for stack, blocks, parts in (
            ("encoder", 2, ("attention", "feed_forward")),
            ("decoder", 3, ("attention", "cross", "feed_forward")),
        )
        for n in range(blocks)
        for part in parts
    }
    assert names == sublayers | {"source.dropout", "target.dropout"}


def test_dropout_elsewhere_is_asked_for() -> None:
    model = transformer(attention_dropout=0.2, hidden_dropout=0.3)
    cores = [m.core.dropout for m in model.modules() if isinstance(m, MultiHeadAttention)]
    hidden = [m.dropout.p for m in model.modules() if isinstance(m, FeedForward)]
    assert cores == [0.2] * 6
    assert hidden == [0.3] * 4
    torch.manual_seed(1)
    assert not torch.equal(model.train()(SOURCE, TARGET), model(SOURCE, TARGET))


def test_without_dropout_training_and_evaluation_agree() -> None:
    model = transformer()
    assert torch.equal(model.train()(SOURCE, TARGET), model.eval()(SOURCE, TARGET))
    model = transformer(dropout=0.1)
    assert not torch.equal(model.train()(SOURCE, TARGET), model.eval()(SOURCE, TARGET))


# --- Living with it


@pytest.mark.parametrize("position", ["learned", "rotary", "concatenated learned"])
def test_state_dict_and_the_meta_device(position: str) -> None:
    """A model made without memory takes another's weights, and gives its numbers."""
    model, own = transformer(position, torch.float32, key_heads=2), OWN.get(position)
    with torch.device("meta"):
        twin = Transformer(model.config, position=own)
    assert all(p.is_meta for p in twin.parameters())
    twin.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(twin.eval()(SOURCE, TARGET), model(SOURCE, TARGET))
    assert torch.equal(copy.deepcopy(model)(SOURCE, TARGET), model(SOURCE, TARGET))


@pytest.mark.parametrize("kind", ["text", *SOURCES])
def test_the_meta_device_computes_shapes(kind: str) -> None:
    model = transformer(source=SOURCES.get(kind, TextSource())).to("meta")
    out = model(source_of(kind).to("meta"), TARGET.to("meta"))
    assert out.is_meta
    assert out.shape == (B, L, N)


def test_bfloat16_is_near() -> None:
    model = transformer()
    want = model(SOURCE, TARGET)
    have = copy.deepcopy(model).to(torch.bfloat16)(SOURCE, TARGET)
    assert have.dtype == torch.bfloat16
    assert (have.double() - want).abs().mean() < 0.02 * want.abs().mean() + 0.01


def test_autocast() -> None:
    model = lively(transformer(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        have = model(SOURCE, TARGET)
    close(have.float(), model(SOURCE, TARGET), 0.15)


def test_the_published_sizes_by_name() -> None:
    with torch.device("meta"):
        big, tiny = Transformer.big(37_000), Transformer.tiny(10_000)
    assert (big.config.width, big.config.heads, big.config.feed_forward) == (1024, 16, 4096)
    assert big.config.dropout == 0.3
    assert (tiny.config.width, tiny.config.heads, tiny.config.feed_forward) == (128, 4, 256)
    assert len(tiny.encoder.blocks) == len(tiny.decoder.blocks) == 4


def test_frames_may_be_of_any_length() -> None:
    model = transformer(source=SOURCES["audio"])
    for length in (1, 13):
        sound = torch.randn(B, length, FEATURES).double()
        assert model(sound, TARGET).shape == (B, L, N)
